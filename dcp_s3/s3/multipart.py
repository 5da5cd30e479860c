"""Multipart uploads."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from dcp_s3 import errors
from dcp_s3.s3.bucket import Bucket
from dcp_s3.s3.diagnosis import answered_code
from dcp_s3.s3.operations import checksum_arguments, creation_arguments, request_with_checksum
from dcp_s3.store import Upload

logger = logging.getLogger(__name__)


def create(bucket: Bucket, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
    """Begin a multipart upload of a data object; returns its id."""
    arguments: dict[str, Any] = {**creation_arguments(bucket.settings, data=True), "Key": key}
    if metadata:
        arguments["Metadata"] = dict(metadata)
    if bucket.settings.checksum != "none":
        arguments |= {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
    answer = request_with_checksum(bucket, "CreateMultipartUpload", key, arguments)
    return expect_text(bucket, "CreateMultipartUpload", key, answer.get("UploadId"))


def send_part(bucket: Bucket, key: str, upload_id: str, number: int, body: Any, checksum: Mapping[str, str]) -> str:
    """Send a part; returns its ETag."""
    arguments = {"Key": key, "UploadId": upload_id, "PartNumber": number, "Body": body, **checksum}
    answer = request_with_checksum(bucket, "UploadPart", key, arguments, data=True)
    return expect_text(bucket, "UploadPart", key, answer.get("ETag"))


def complete(
    bucket: Bucket, key: str, upload_id: str, etags: Sequence[str], *, size: int, crc: int | None
) -> dict[str, Any]:
    """Complete an upload: make the object of its parts. Returns S3's answer, empty if that was lost.

    If S3 has no such upload, but an object of this size, an earlier attempt succeeded and its answer was lost.

    Args:
        crc: CRC-64/NVME of the object, None if it is not known.
    """
    parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, start=1)]
    arguments: dict[str, Any] = {"Key": key, "UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
    if bucket.settings.checksum != "none" and crc is not None:
        arguments |= {**checksum_arguments(bucket.settings, crc), "ChecksumType": "FULL_OBJECT"}
    try:
        return request_with_checksum(bucket, "CompleteMultipartUpload", key, arguments)
    except errors.StorageError as error:
        if answered_code(error) != "NoSuchUpload" or not _is_there(bucket, key, size):
            raise
        return {}


def _is_there(bucket: Bucket, key: str, size: int) -> bool:
    try:
        return bucket.head(key).size == size
    except errors.ObjectNotFoundError:
        return False


def abort(bucket: Bucket, upload: Upload) -> None:
    """See `Store.abort`."""
    try:
        bucket.request("AbortMultipartUpload", upload.key, {"Key": upload.key, "UploadId": upload.upload_id})
    except errors.ObjectNotFoundError:
        pass  # the answer of an earlier attempt was lost


def abort_quietly(bucket: Bucket, key: str, upload_id: str) -> bool:
    """`abort`, and return whether that worked. A failure is logged: another error is on its way to the user."""
    try:
        abort(bucket, Upload(key, upload_id))
    except errors.StorageError as error:
        logger.warning("the multipart upload %s of a failed save stays open: %s", upload_id, error)
        return False
    return True


def expect_text(bucket: Bucket, operation: str, key: str, value: object) -> str:
    """Return a text that S3's answer must have."""
    if not isinstance(value, str) or not value:
        raise errors.StorageError(
            f"{operation} on s3://{bucket.name}/{key} answered without an upload id or ETag. Remedy: check that the "
            "endpoint is an S3 server; copy by way of a directory where the store does not copy parts",
            bucket=bucket.name,
            key=key,
            operation=operation,
        )
    return value
