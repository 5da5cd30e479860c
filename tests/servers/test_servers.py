"""What every server must do, so that a test that fails on one points at dcp_s3, and the two
capabilities in which they differ, so that a new version of a server shows itself here."""

from __future__ import annotations

import base64
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest
from awscrt import checksums
from botocore.exceptions import ClientError

from tests.servers import S3Server

PART = 5 << 20


def _crc(data: bytes) -> str:
    return base64.b64encode(checksums.crc64nvme(data).to_bytes(8, "big")).decode()


def _keys(s3: Any, bucket: str, **kwargs: Any) -> list[str]:
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, **kwargs)
    return [found["Key"] for page in pages for found in page.get("Contents", [])]


def _code(error: pytest.ExceptionInfo[ClientError]) -> tuple[str, int]:
    response = error.value.response
    return response["Error"]["Code"], response["ResponseMetadata"]["HTTPStatusCode"]


def test_an_object_is_what_was_put_last(s3: Any, bucket: str) -> None:
    for body in (b"first", b"", b"the second one"):
        s3.put_object(Bucket=bucket, Key="run/a", Body=body)
        assert s3.get_object(Bucket=bucket, Key="run/a")["Body"].read() == body
        assert s3.head_object(Bucket=bucket, Key="run/a")["ContentLength"] == len(body)


def test_a_ranged_get_gives_the_range(s3: Any, bucket: str) -> None:
    s3.put_object(Bucket=bucket, Key="a", Body=bytes(range(100)))
    answer = s3.get_object(Bucket=bucket, Key="a", Range="bytes=10-19")
    assert answer["Body"].read() == bytes(range(10, 20))
    assert answer["ContentRange"] == "bytes 10-19/100"
    beyond = s3.get_object(Bucket=bucket, Key="a", Range="bytes=90-199")
    assert beyond["Body"].read() == bytes(range(90, 100))
    with pytest.raises(ClientError) as e:
        s3.get_object(Bucket=bucket, Key="a", Range="bytes=100-")
    assert _code(e) == ("InvalidRange", 416)


def test_what_is_not_there_is_reported_as_such(s3: Any, bucket: str) -> None:
    with pytest.raises(ClientError) as e:
        s3.get_object(Bucket=bucket, Key="nothing")
    assert _code(e) == ("NoSuchKey", 404)
    with pytest.raises(ClientError) as e:
        s3.head_object(Bucket=bucket, Key="nothing")
    assert _code(e) == ("404", 404)
    with pytest.raises(ClientError) as e:
        s3.list_objects_v2(Bucket=f"{bucket}-not")
    assert _code(e) == ("NoSuchBucket", 404)


def test_a_multipart_upload_is_invisible_until_complete(s3: Any, bucket: str) -> None:
    parts = [b"a" * PART, b"b" * PART, b"tail"]
    s3.put_object(Bucket=bucket, Key="run/m", Body=b"old")
    upload = {"Bucket": bucket, "Key": "run/m"}
    upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]

    def put(number: int) -> dict[str, Any]:
        answer = s3.upload_part(**upload, PartNumber=number, Body=parts[number - 1])
        return {"PartNumber": number, "ETag": answer["ETag"]}

    with ThreadPoolExecutor(3) as pool:  # the last first: they arrive out of order
        done = list(pool.map(put, (3, 2, 1)))
    listed = s3.list_parts(**upload)["Parts"]
    assert [(p["PartNumber"], p["Size"]) for p in listed] == [(1, PART), (2, PART), (3, 4)]
    opened = s3.list_multipart_uploads(Bucket=bucket, Prefix="run/")["Uploads"]
    assert [(u["Key"], u["UploadId"]) for u in opened] == [("run/m", upload["UploadId"])]
    assert s3.get_object(Bucket=bucket, Key="run/m")["Body"].read() == b"old"

    s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": done[::-1]})
    assert s3.get_object(Bucket=bucket, Key="run/m")["Body"].read() == b"".join(parts)
    assert not s3.list_multipart_uploads(Bucket=bucket).get("Uploads")


def test_an_aborted_upload_leaves_nothing(s3: Any, bucket: str) -> None:
    upload = {"Bucket": bucket, "Key": "run/m"}
    upload["UploadId"] = s3.create_multipart_upload(**upload)["UploadId"]
    s3.upload_part(**upload, PartNumber=1, Body=b"x" * PART)
    s3.abort_multipart_upload(**upload)
    with pytest.raises(ClientError) as e:
        s3.abort_multipart_upload(**upload)
    assert _code(e) == ("NoSuchUpload", 404)
    assert _keys(s3, bucket) == []


def test_a_listing_is_sorted_paged_and_current(s3: Any, bucket: str) -> None:
    keys = [f"run/step-{i:03}/{name}" for i in range(4) for name in (".metadata", "a b+c", "x/y")]
    for key in reversed(keys):
        s3.put_object(Bucket=bucket, Key=key, Body=b"1")
    assert _keys(s3, bucket, PaginationConfig={"PageSize": 5}) == keys
    assert _keys(s3, bucket, Prefix="run/step-002/") == keys[6:9]
    assert _keys(s3, bucket, StartAfter=keys[8]) == keys[9:]
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket=bucket, Prefix="run/", Delimiter="/", PaginationConfig={"PageSize": 3}
    )
    prefixes = [p["Prefix"] for page in pages for p in page.get("CommonPrefixes", [])]
    assert prefixes == [f"run/step-{i:03}/" for i in range(4)]

    s3.delete_object(Bucket=bucket, Key=keys[0])
    s3.delete_object(Bucket=bucket, Key=keys[0])  # once more is no error
    missing = {"Key": "run/step-000/not-there"}
    answer = s3.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": keys[1]}, missing]})
    assert not answer.get("Errors")
    assert _keys(s3, bucket) == keys[2:]


def test_if_none_match_lets_exactly_one_writer_through(s3: Any, bucket: str, server: S3Server) -> None:
    writers = 8
    together = threading.Barrier(writers)

    def put(writer: int) -> str:
        together.wait()
        try:
            s3.put_object(Bucket=bucket, Key="run/.metadata", Body=b"%d" % writer, IfNoneMatch="*")
        except ClientError as e:
            return str(e.response["Error"]["Code"])
        return "written"

    if server.conditional_writes:
        with ThreadPoolExecutor(writers) as pool:
            outcomes = list(pool.map(put, range(writers)))
        assert outcomes.count("written") == 1
        assert set(outcomes) <= {"written", "PreconditionFailed", "ConditionalRequestConflict"}
        winner = b"%d" % outcomes.index("written")
        assert s3.get_object(Bucket=bucket, Key="run/.metadata")["Body"].read() == winner
    else:
        s3.put_object(Bucket=bucket, Key="run/.metadata", Body=b"old")
        s3.put_object(Bucket=bucket, Key="run/.metadata", Body=b"new", IfNoneMatch="*")
        assert s3.get_object(Bucket=bucket, Key="run/.metadata")["Body"].read() == b"new"


def test_a_wrong_checksum_is_refused(s3: Any, bucket: str, server: S3Server) -> None:
    s3.put_object(Bucket=bucket, Key="right", Body=b"abc", ChecksumCRC64NVME=_crc(b"abc"))
    wrong = {"Bucket": bucket, "Key": "wrong", "Body": b"abc", "ChecksumCRC64NVME": _crc(b"abd")}
    if server.verifies_checksums:
        head = s3.head_object(Bucket=bucket, Key="right", ChecksumMode="ENABLED")
        assert head["ChecksumCRC64NVME"] == _crc(b"abc")
        with pytest.raises(ClientError) as e:
            s3.put_object(**wrong)
        assert _code(e) == ("BadDigest", 400)
        assert _keys(s3, bucket) == ["right"]
    else:
        s3.put_object(**wrong)


def test_the_whole_objects_checksum_is_verified_at_complete(s3: Any, bucket: str, server: S3Server) -> None:
    def upload(key: str, checksum: str) -> dict[str, Any]:
        where = {"Bucket": bucket, "Key": key}
        where["UploadId"] = s3.create_multipart_upload(
            **where, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT"
        )["UploadId"]
        parts = []
        try:
            for number, data in enumerate((b"a" * PART, b"b"), 1):
                crc = {"ChecksumCRC64NVME": _crc(data)}
                etag = s3.upload_part(**where, PartNumber=number, Body=data, **crc)["ETag"]
                parts.append({"PartNumber": number, "ETag": etag, **crc})
            answer: dict[str, Any] = s3.complete_multipart_upload(
                **where,
                MultipartUpload={"Parts": parts},
                ChecksumCRC64NVME=checksum,
                ChecksumType="FULL_OBJECT",
            )
        except ClientError:
            s3.abort_multipart_upload(**where)
            raise
        return answer

    upload("right", _crc(b"a" * PART + b"b"))
    if server.verifies_checksums:
        with pytest.raises(ClientError) as e:
            upload("wrong", _crc(b"something else"))
        assert _code(e)[1] == 400
        assert _keys(s3, bucket) == ["right"]


def test_taking_memory_server_restricts_a_test_to_it(memory_server: S3Server, s3_env: S3Server, bucket: str) -> None:
    assert memory_server.name == s3_env.name == "memory"
    # No arguments but the endpoint: s3_env must be enough for credentials and region.
    client = boto3.client("s3", endpoint_url=s3_env.endpoint_url)
    assert bucket in {found["Name"] for found in client.list_buckets()["Buckets"]}
