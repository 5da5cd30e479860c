"""Multipart uploads, and S3's own copies."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from dcp_s3 import errors
from dcp_s3.s3.bucket import Bucket, map_in_threads
from dcp_s3.s3.diagnosis import answered_code
from dcp_s3.s3.operations import checksum_arguments, creation_arguments, request_with_checksum
from dcp_s3.s3.parts import MAX_PARTS
from dcp_s3.store import ObjectHead, Upload

logger = logging.getLogger(__name__)

COPY_PART_SIZE = 256 * 2**20
"""Bytes that one request copies, at most: S3 takes up to 5 GiB, but copies parts of one object side by side."""


def create(bucket: Bucket, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
    """Begin a multipart upload of a data object; returns its id."""
    arguments: dict[str, Any] = {**creation_arguments(bucket.settings, data=True), "Key": key}
    if metadata:
        arguments["Metadata"] = dict(metadata)
    if bucket.settings.checksum != "none":
        arguments |= {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
    answer = request_with_checksum(bucket, "CreateMultipartUpload", key, arguments)
    return _expect(bucket, "CreateMultipartUpload", key, answer.get("UploadId"))


def send_part(bucket: Bucket, key: str, upload_id: str, number: int, body: Any, checksum: Mapping[str, str]) -> str:
    """Send a part; returns its ETag."""
    arguments = {"Key": key, "UploadId": upload_id, "PartNumber": number, "Body": body, **checksum}
    answer = request_with_checksum(bucket, "UploadPart", key, arguments, data=True)
    return _expect(bucket, "UploadPart", key, answer.get("ETag"))


def complete(bucket: Bucket, key: str, upload_id: str, etags: Sequence[str], *, size: int, crc: int | None) -> None:
    """Complete an upload: make the object of its parts.

    If S3 has no such upload, but an object of this size, an earlier attempt succeeded and its answer was lost.

    Args:
        crc: CRC-64/NVME of the object, None if it is not known.
    """
    parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, start=1)]
    arguments: dict[str, Any] = {"Key": key, "UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
    if bucket.settings.checksum != "none" and crc is not None:
        arguments |= {**checksum_arguments(bucket.settings, crc), "ChecksumType": "FULL_OBJECT"}
    try:
        request_with_checksum(bucket, "CompleteMultipartUpload", key, arguments)
    except errors.StorageError as error:
        if answered_code(error) != "NoSuchUpload" or not _is_there(bucket, key, size):
            raise


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


def _expect(bucket: Bucket, operation: str, key: str, value: object) -> str:
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


# --- copies: no byte passes through this machine ---------------------------------------------------


def copy_object(store: Bucket, source: Bucket, source_key: str, key: str) -> None:
    """Copy an object between buckets of one endpoint; see `Store.copy`."""
    found = source.head(source_key, checksum=True)
    origin = _origin(store, source, found)
    if found.size <= COPY_PART_SIZE:
        arguments = {**creation_arguments(store.settings, data=True), **origin, "Key": key}
        store.request("CopyObject", key, arguments, data=True)
        return
    part = max(COPY_PART_SIZE, -(-found.size // MAX_PARTS))
    upload_id = create(store, key, metadata=found.metadata)

    def copy_part(store: Bucket, number: int) -> str:
        start = (number - 1) * part
        span = {"CopySourceRange": f"bytes={start}-{min(start + part, found.size) - 1}"}
        arguments = {**origin, **span, "Key": key, "UploadId": upload_id, "PartNumber": number}
        answer = store.request("UploadPartCopy", key, arguments, data=True)
        return _expect(store, "UploadPartCopy", key, (answer.get("CopyPartResult") or {}).get("ETag"))

    try:
        etags = map_in_threads(store, copy_part, range(1, -(-found.size // part) + 1))
        crc = None if found.crc64nvme is None else int(found.crc64nvme, 16)
        complete(store, key, upload_id, etags, size=found.size, crc=crc)
    except BaseException:
        abort_quietly(store.within(store.limit.for_cleanup()), key, upload_id)
        raise


def _origin(store: Bucket, source: Bucket, found: ObjectHead) -> dict[str, Any]:
    owner = store.settings.expected_bucket_owner
    return {
        "CopySource": {"Bucket": source.name, "Key": found.key},
        **({"CopySourceIfMatch": found.etag} if found.etag else {}),
        **({"ExpectedSourceBucketOwner": owner} if owner else {}),
    }
