"""Multipart uploads, and S3's own copies, without I/O. See `operations`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_s3 import errors
from dcp_s3.checksum import encode_crc
from dcp_s3.s3.diagnosis import answered_code
from dcp_s3.s3.listing import all_pages, uploads
from dcp_s3.s3.operations import (
    Bucket,
    Operation,
    Place,
    Quirk,
    Request,
    creation_arguments,
    head,
    learn,
    wire_checksum,
    with_checksum,
)
from dcp_s3.s3.parts import MAX_PARTS
from dcp_s3.store import ObjectHead, Upload

COPY_PART_SIZE = 256 * 2**20
"""Bytes that one request copies, at most: S3 takes up to 5 GiB, but copies parts of one object side by side."""

_CHECKSUMS = ("ChecksumCRC64NVME", "ChecksumCRC32C")


@dataclass(frozen=True)
class KnownPart:
    """A part that S3 has."""

    etag: str
    size: int
    checksums: Mapping[str, str]
    """Checksums that S3 lists, by the names of UploadPart's arguments."""

    def matches(self, size: int, checksums: Mapping[str, str], views: Sequence[memoryview]) -> bool:
        """Whether the part has these bytes: judged by a checksum if S3 has one, otherwise by the MD5 in the ETag."""
        if size != self.size:
            return False
        for name, value in checksums.items():
            if name in self.checksums:
                return self.checksums[name] == value
        digest = hashlib.md5(usedforsecurity=False)
        for view in views:
            digest.update(view)
        return self.etag.strip('"') == digest.hexdigest()


def create(
    place: Place,
    key: str,
    *,
    metadata: Mapping[str, str] | None = None,
    on_failure: Callable[[Exception], None] | None = None,
) -> Operation[str]:
    """Begin a multipart upload of a data object; returns its id."""
    arguments: dict[str, Any] = {**creation_arguments(place.settings, data=True), "Key": key}
    if metadata:
        arguments["Metadata"] = dict(metadata)
    algorithm = wire_checksum(place.settings)
    if algorithm != "none":
        arguments |= {"ChecksumAlgorithm": algorithm.upper(), "ChecksumType": "FULL_OBJECT"}
    request = Request("CreateMultipartUpload", key, arguments, on_failure=on_failure)
    answer = yield from with_checksum(place, request)
    return _expect(place, request, answer, "UploadId")


def send_part(
    place: Place, key: str, upload_id: str, number: int, body: Any, checksum: Mapping[str, str]
) -> Operation[str]:
    arguments = {"Key": key, "UploadId": upload_id, "PartNumber": number, "Body": body, **checksum}
    request = Request("UploadPart", key, arguments, data=True)
    answer = yield from with_checksum(place, request)
    return _expect(place, request, answer, "ETag")


def send_object(place: Place, key: str, body: Any, checksum: Mapping[str, str]) -> Operation[None]:
    """Store a data object of one part; arguments as `send_part`."""
    arguments = {**creation_arguments(place.settings, data=True), "Key": key, "Body": body, **checksum}
    yield from with_checksum(place, Request("PutObject", key, arguments, data=True))


def complete(
    place: Place, key: str, upload_id: str, etags: Sequence[str], *, size: int, crc: int | None
) -> Operation[None]:
    """Complete an upload: make the object of its parts.

    If S3 has no such upload, but an object of this size, an earlier attempt succeeded and its answer was lost.

    Args:
        crc: CRC-64/NVME of the object, None if it is not known.
    """
    parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, start=1)]
    arguments: dict[str, Any] = {"Key": key, "UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
    if wire_checksum(place.settings) == "crc64nvme" and crc is not None:
        arguments |= {"ChecksumCRC64NVME": encode_crc(crc, "crc64nvme"), "ChecksumType": "FULL_OBJECT"}
    try:
        yield from with_checksum(place, Request("CompleteMultipartUpload", key, arguments))
    except errors.StorageError as error:
        if answered_code(error) != "NoSuchUpload" or not (yield from _is_there(key, size)):
            raise


def _is_there(key: str, size: int) -> Operation[bool]:
    try:
        return (yield from head(key)).size == size
    except errors.ObjectNotFoundError:
        return False


def list_parts(key: str, upload_id: str) -> Operation[dict[int, KnownPart]]:
    """The parts of an upload by number; none if it is gone."""
    arguments = {"Key": key, "UploadId": upload_id}
    try:
        answers = yield from all_pages("ListParts", key, arguments, {"PartNumberMarker": "NextPartNumberMarker"})
    except errors.ObjectNotFoundError:
        return {}
    return {
        int(each["PartNumber"]): KnownPart(
            each["ETag"], int(each["Size"]), {name: each[name] for name in _CHECKSUMS if name in each}
        )
        for answer in answers
        for each in answer.get("Parts", ())
    }


def uploads_of(place: Place, key: str) -> Operation[list[str]]:
    """Ids of the multipart uploads of exactly this key."""
    found = yield from uploads(place, key)
    return [each.upload_id for each in found if each.key == key]


def find_parts(place: Place, key: str) -> Operation[dict[str, dict[int, KnownPart]]]:
    """The parts of each multipart upload of exactly this key, by upload ID.

    Empty if S3 does not tell: the permission to list them, or the operation, is missing.
    """
    found = {}
    try:
        for upload_id in (yield from uploads_of(place, key)):
            found[upload_id] = yield from list_parts(key, upload_id)
    except (errors.TransferError, errors.CredentialsError, errors.BucketNotFoundError):
        raise
    except errors.StorageError as error:
        learn(Quirk.NO_UPLOAD_LISTS, place, error)
        return {}
    return found


def abort(key: str, upload_id: str) -> Operation[None]:
    """Abort an upload; one that is gone counts as aborted."""
    try:
        yield Request("AbortMultipartUpload", key, {"Key": key, "UploadId": upload_id})
    except errors.ObjectNotFoundError:
        pass  # the answer of an earlier attempt was lost


def _expect(place: Place, request: Request, answer: Mapping[str, Any], name: str) -> str:
    """Return a text field that S3's answer must have."""
    value = answer.get(name)
    if not isinstance(value, str) or not value:
        raise errors.StorageError(
            f"{request.operation} on s3://{place.name}/{request.key} answered without {name}: is the endpoint an S3 "
            "server?", bucket=place.name, key=request.key, operation=request.operation,
        )  # fmt: skip
    return value


# --- copies: no byte passes through this machine ---------------------------------------------------


@dataclass(frozen=True)
class _Origin:
    """What is copied."""

    bucket: str
    head: ObjectHead

    def arguments(self, place: Place) -> dict[str, Any]:
        owner = place.settings.expected_bucket_owner
        return {
            "CopySource": {"Bucket": self.bucket, "Key": self.head.key},
            **({"CopySourceIfMatch": self.head.etag} if self.head.etag else {}),
            **({"ExpectedSourceBucketOwner": owner} if owner else {}),
        }


def copy_object(store: Bucket, source: Bucket, source_key: str, key: str) -> None:
    """Copy an object between buckets of one endpoint; see `Store.copy`."""
    origin = _Origin(source.name, source.run(head(source_key, checksum=True)))
    size = origin.head.size
    if size <= COPY_PART_SIZE:
        store.run(_copy_whole(store, origin, key))
        return
    part = max(COPY_PART_SIZE, -(-size // MAX_PARTS))
    spans = [(start, min(start + part, size)) for start in range(0, size, part)]
    upload_id = store.run(create(store, key, metadata=origin.head.metadata))
    try:
        etags = store.map(
            lambda store, part: store.run(_copy_part(store, origin, key, upload_id, *part)),
            list(enumerate(spans, start=1)),
        )
        crc = origin.head.crc64nvme
        known = None if crc is None else int(crc, 16)
        store.run(complete(store, key, upload_id, etags, size=size, crc=known))
    except BaseException:
        store.within(store.limit.for_cleanup()).abort_quietly(Upload(key, upload_id))
        raise


def _copy_whole(place: Place, origin: _Origin, key: str) -> Operation[None]:
    arguments = {**creation_arguments(place.settings, data=True), **origin.arguments(place), "Key": key}
    yield Request("CopyObject", key, arguments, data=True)


def _copy_part(
    place: Place, origin: _Origin, key: str, upload_id: str, number: int, span: tuple[int, int]
) -> Operation[str]:
    start, stop = span
    arguments = {
        **origin.arguments(place),
        "CopySourceRange": f"bytes={start}-{stop - 1}",
        "Key": key,
        "UploadId": upload_id,
        "PartNumber": number,
    }
    answer = yield Request("UploadPartCopy", key, arguments, data=True)
    etag = (answer.get("CopyPartResult") or {}).get("ETag")
    if not isinstance(etag, str) or not etag:
        raise errors.StorageError(
            f"UploadPartCopy on s3://{place.name}/{key} answered without ETag: does the store copy parts?",
            bucket=place.name, key=key, operation="UploadPartCopy",
        )  # fmt: skip
    return etag
