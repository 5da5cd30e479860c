"""The in-memory S3 server, where the tests of dcp_s3 would not notice that it errs."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from botocore.exceptions import ClientError

from dcp_s3 import errors
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault

NOT_APPLIED = [Fault.error(503, "SlowDown"), Fault.reset(), Fault.reset_request(100_000), Fault.forge(203)]
APPLIED = [Fault.forge(200, applied=True), Fault.apply_then_reset(), Fault.cut_head(20), Fault.repeat(), None]


@pytest.mark.parametrize("fault", [*NOT_APPLIED, *APPLIED])
def test_what_is_applied_and_what_is_not(faulty: FaultyServer, fault: Fault | None) -> None:
    faulty.rule = lambda _: fault
    with contextlib.suppress(errors.StorageError):
        S3Store(BUCKET, Settings(retry_attempts=1)).put("k", bytes(2**20))
    assert faulty.s3.objects(BUCKET) == ({"k": 2**20} if fault in APPLIED else {})


def test_a_wrong_checksum_of_a_whole_upload_and_what_directory_buckets_do_not_take_is_refused(
    faulty: FaultyServer,
) -> None:
    s3: Any = S3Store(BUCKET, Settings()).client
    upload = {"Bucket": BUCKET, "Key": "k"}
    upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
    parts = [{"PartNumber": 1, "ETag": s3.upload_part(**upload, PartNumber=1, Body=b"small")["ETag"]}]
    with pytest.raises(ClientError, match="BadDigest"):
        s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts}, ChecksumCRC64NVME="AAAAAAAAAAA=")
    assert faulty.s3.objects(BUCKET) == {}
    faulty.s3.create_bucket("express--use1-az4--x-s3")
    with pytest.raises(ClientError, match="InvalidRequest"):
        s3.list_objects_v2(Bucket="express--use1-az4--x-s3", Prefix="ru")
    assert len(faulty.s3._operations.refused) == 1
