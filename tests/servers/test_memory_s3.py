"""The in-memory S3 server, where the tests of dcp_s3 would not notice that it errs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.memory_s3 import Fault, MemoryS3

BUCKET = "bucket"
MIB = 1 << 20


def client(memory: MemoryS3) -> Any:
    return boto3.client(
        "s3", endpoint_url=memory.endpoint_url, aws_access_key_id="test", aws_secret_access_key="secret",
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1, "mode": "standard"}),
    )  # fmt: skip


def refused(call: Any, **arguments: Any) -> str:
    with pytest.raises(ClientError) as error:
        call(**arguments)
    return str(error.value.response["Error"]["Code"])


@pytest.fixture
def memory() -> Iterator[MemoryS3]:
    with MemoryS3(preallocate=16 * MIB) as running:
        running.create_bucket(BUCKET)
        yield running


def test_a_wrong_checksum_of_a_whole_upload_is_refused(memory: MemoryS3) -> None:
    s3 = client(memory)
    other = s3.put_object(Bucket=BUCKET, Key="other", Body=b"other", ChecksumAlgorithm="CRC64NVME")["ChecksumCRC64NVME"]
    upload = {"Bucket": BUCKET, "Key": "k"}
    upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
    parts = [{"PartNumber": 1, "ETag": s3.upload_part(**upload, PartNumber=1, Body=b"small")["ETag"]}]
    whole = {"MultipartUpload": {"Parts": parts}, "ChecksumCRC64NVME": other}
    assert refused(s3.complete_multipart_upload, **upload, **whole) == "BadDigest"
    assert list(memory.objects(BUCKET)) == ["other"]


NOT_APPLIED = [Fault.error(503, "SlowDown"), Fault.reset(), Fault.reset_request(100_000), Fault.forge(203)]
APPLIED = [Fault.forge(200, applied=True), Fault.apply_then_reset(), Fault.cut_head(20), Fault.repeat()]


@pytest.mark.parametrize("fault", [*NOT_APPLIED, *APPLIED])
def test_what_is_applied_and_what_is_not(memory: MemoryS3, fault: Fault) -> None:
    memory.fault = lambda _: fault
    with contextlib.suppress(ClientError, BotoCoreError, ConnectionError):
        client(memory).put_object(Bucket=BUCKET, Key="k", Body=b"x" * MIB)
    assert memory.objects(BUCKET) == ({"k": MIB} if fault in APPLIED else {})


def test_a_directory_bucket_refuses_what_that_of_s3_refuses(memory: MemoryS3) -> None:
    memory.create_bucket("express--use1-az4--x-s3")
    for arguments, code in (({"Prefix": "ru"}, "InvalidRequest"), ({"Delimiter": "-"}, "InvalidArgument")):
        assert refused(client(memory).list_objects_v2, Bucket="express--use1-az4--x-s3", **arguments) == code
    assert len(memory._operations.refused) == 2
