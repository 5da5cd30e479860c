"""What servers do that the store contract does not see, and what they say of themselves, so that a new version shows
itself here."""

from __future__ import annotations

import base64
from typing import Any

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
