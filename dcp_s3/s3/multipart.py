"""Multipart uploads that exist on S3: find, look into, abort."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_s3 import errors
from dcp_s3.s3.bucket import Bucket

logger = logging.getLogger(__name__)

_CHECKSUMS = ("ChecksumCRC64NVME", "ChecksumCRC32C")


@dataclass(frozen=True)
class KnownPart:
    """A part that S3 has.

    Attributes:
        etag: its ETag.
        size: bytes.
        checksums: as S3 lists them, by the names of UploadPart's arguments.
    """

    etag: str
    size: int
    checksums: Mapping[str, str]

    def matches(self, size: int, checksums: Mapping[str, str], views: Sequence[memoryview]) -> bool:
        """Whether it is the part with these bytes: by a checksum if S3 has one, otherwise by the MD5 in the ETag."""
        if size != self.size:
            return False
        for name, value in checksums.items():
            if name in self.checksums:
                return self.checksums[name] == value
        digest = hashlib.md5(usedforsecurity=False)
        for view in views:
            digest.update(view)
        return self.etag.strip('"') == digest.hexdigest()


def find_uploads(bucket: Bucket, key: str) -> dict[str, dict[int, KnownPart]]:
    """The multipart uploads of exactly this key with their parts, by id. None where S3 does not tell: without the
    permission to list them, or without that operation.

    Raises:
        TransferError, CredentialsError, BucketNotFoundError: cannot tell now.
    """
    try:
        return {upload_id: list_parts(bucket, key, upload_id) for upload_id in list_uploads(bucket, key)}
    except (errors.TransferError, errors.CredentialsError, errors.BucketNotFoundError):
        raise
    except errors.StorageError as error:
        _warn_once(bucket.name, error)
        return {}


_warned: set[str] = set()


def _warn_once(bucket: str, error: errors.StorageError) -> None:
    if bucket not in _warned:
        _warned.add(bucket)
        logger.warning("multipart uploads that were left open are not looked for, and may cost storage: %s", error)


def list_uploads(bucket: Bucket, key: str) -> list[str]:
    """Ids of the multipart uploads of exactly this key.

    Raises:
        StorageError: cannot tell.
    """
    found: list[str] = []
    markers: dict[str, str] = {}
    while True:
        arguments = {**bucket.common, "Prefix": key, **markers}
        try:
            page: Any = bucket.call(
                "ListMultipartUploads",
                key,
                lambda: bucket.client.list_multipart_uploads(**arguments),  # noqa: B023
            )
        except errors.BucketNotFoundError:
            raise
        except errors.ObjectNotFoundError:
            return found  # rclone's answer for a bucket without uploads
        found += [each["UploadId"] for each in page.get("Uploads", ()) if each["Key"] == key]
        if not page.get("IsTruncated"):
            return found
        markers = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}


def list_parts(bucket: Bucket, key: str, upload_id: str) -> dict[int, KnownPart]:
    """The parts of a multipart upload by number; none if it is gone.

    Raises:
        StorageError: cannot tell.
    """
    parts: dict[int, KnownPart] = {}
    marker: dict[str, int] = {}
    while True:
        arguments = {**bucket.common, "Key": key, "UploadId": upload_id, **marker}
        try:
            page: Any = bucket.call("ListParts", key, lambda: bucket.client.list_parts(**arguments))  # noqa: B023
        except errors.ObjectNotFoundError:
            return {}
        for each in page.get("Parts", ()):
            checksums = {name: each[name] for name in _CHECKSUMS if name in each}
            parts[int(each["PartNumber"])] = KnownPart(each["ETag"], int(each["Size"]), checksums)
        if not page.get("IsTruncated"):
            return parts
        marker = {"PartNumberMarker": int(page["NextPartNumberMarker"])}


def abort(bucket: Bucket, key: str, upload_id: str) -> None:
    """Abort a multipart upload; one that is gone counts as aborted.

    Raises:
        StorageError: it may stay open.
    """
    arguments = {**bucket.common, "Key": key, "UploadId": upload_id}
    try:
        bucket.call("AbortMultipartUpload", key, lambda: bucket.client.abort_multipart_upload(**arguments))
    except errors.ObjectNotFoundError:
        pass  # the answer of an earlier attempt was lost


def abort_quietly(bucket: Bucket, key: str, upload_id: str) -> bool:
    """`abort`; whether that worked. A failure is logged: another error is on its way to the user."""
    try:
        abort(bucket, key, upload_id)
    except errors.StorageError as error:
        logger.warning("the multipart upload %s of a failed save stays open: %s", upload_id, error)
        return False
    return True
