"""Multipart uploads: sizes of their parts, their requests, and copies that S3 makes itself, of which no byte passes
through this machine."""

from __future__ import annotations

import base64
import contextlib
import itertools
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dcp_s3 import errors
from dcp_s3.memory import combine_crc64nvme, crc64nvme, crc_hex, encode_crc
from dcp_s3.s3.bucket import Bucket, Quirk, creation_arguments, learn, map_in_threads, request_with_checksum
from dcp_s3.s3.diagnosis import answered_code, answered_status
from dcp_s3.s3.download import read
from dcp_s3.s3.listing import DIRECTORY_BUCKET, delete
from dcp_s3.settings import MAX_PART_SIZE
from dcp_s3.store import CopyRange, ObjectHead, Upload

logger = logging.getLogger(__name__)

MAX_PARTS = 10_000
# Sizes of objects are estimates until the last item is framed: leave room for a tenth of the parts.
_PLANNED_PARTS = 9_000
_PART_SIZE_STEP = 2**20

# S3 takes so many of these per second and partition of its keys.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance.html
PUTS_PER_SECOND = 3500
GETS_PER_SECOND = 5500
_CONNECTION_RATE = 90e6  # bytes per second
_SMALL_PART, _GOOD_PART = 8 * 2**20, 32 * 2**20

COPIED_PART_SIZE = 256 * 2**20
"""Bytes that one request copies, or up to twice as many: S3 takes 5 GiB, but copies parts of an object side by side."""
COPIES_AT_ONCE = 32
"""Most requests of one batch that copy at a time."""

_READERS, _BLOCK = 8, 8 * 2**20  # of a copy whose checksum S3 does not tell: threads, and bytes that each holds


def plan_part_size(total: int, *, connections: int, ranks: int, most: int, requests_per_second: int) -> int:
    """Bytes of a part or ranged GET, if one of ``ranks`` ranks moves ``total`` bytes.

    Every connection gets two, so that none has much to do when the others are done, or one if two would be small,
    because each costs a millisecond of CPU. Larger ones where otherwise all ranks together would make more requests
    than S3 takes: as many connections as have a part send it in its bytes over 90 MB/s.
    """
    share = -(-total // connections)
    size = min(most, max(_SMALL_PART, min(share, _GOOD_PART), share // 2))
    all_send = ranks * connections * _CONNECTION_RATE / requests_per_second
    some_send = math.sqrt(ranks * total * _CONNECTION_RATE / requests_per_second)
    size = max(size, min(math.ceil(min(all_send, some_send)), MAX_PART_SIZE))
    return -(-size // _PART_SIZE_STEP) * _PART_SIZE_STEP


def choose_part_size(object_size: int, part_size: int) -> int:
    """Part size for an object of about ``object_size`` bytes: ``part_size``, or more where S3's limit of 10,000
    parts requires it (rounded up to whole MiB).
    """
    if object_size <= part_size * _PLANNED_PARTS:
        return part_size
    size = -(-object_size // (_PLANNED_PARTS * _PART_SIZE_STEP)) * _PART_SIZE_STEP
    if size > MAX_PART_SIZE:
        raise errors.SettingsError(
            f"an object of {object_size} bytes does not fit into 10,000 parts of at most 5 GiB: shard the "
            "state over more ranks, or raise S3StorageWriter(max_objects=...)"
        )
    return size


# --- requests -----------------------------------------------------------------------------------------


def create(bucket: Bucket, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
    """Begin a multipart upload of a data object; returns its id."""
    arguments: dict[str, Any] = {**creation_arguments(bucket.settings, data=True), "Key": key}
    if metadata:
        arguments["Metadata"] = dict(metadata)
    if bucket.settings.checksum != "none":
        arguments |= {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
    answer = request_with_checksum(bucket, "CreateMultipartUpload", key, arguments)
    return expect_text(bucket, "CreateMultipartUpload", key, answer.get("UploadId"))


def complete(
    bucket: Bucket, key: str, upload_id: str, etags: Sequence[str], *, size: int, crc: int | None
) -> dict[str, Any]:
    """Complete an upload: make the object of its parts; ``crc`` is its CRC-64/NVME, None if it is not known.

    Returns S3's answer, empty if that was lost: S3 has no such upload, but an object of this size.
    """
    parts = [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, start=1)]
    arguments: dict[str, Any] = {"Key": key, "UploadId": upload_id, "MultipartUpload": {"Parts": parts}}
    if bucket.settings.checksum != "none" and crc is not None:
        arguments |= {"ChecksumCRC64NVME": encode_crc(crc), "ChecksumType": "FULL_OBJECT"}
    try:
        return request_with_checksum(bucket, "CompleteMultipartUpload", key, arguments)
    except errors.StorageError as error:
        if answered_code(error) != "NoSuchUpload":
            raise
        try:
            if bucket.head(key).size == size:
                return {}
        except errors.ObjectNotFoundError:
            pass
        raise


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
            bucket=bucket.name, key=key, operation=operation,
        )  # fmt: skip
    return value


# --- copies -------------------------------------------------------------------------------------------


class _Source(NamedTuple):
    """A run of bytes of a version of an object."""

    origin: Mapping[str, Any]
    """Arguments of a request that name this version."""
    start: int
    stop: int


def can_copy(bucket: Bucket) -> bool:
    """Whether a batch of this bucket copies anything: no bucket of S3 Express does, whose copies have no conditions."""
    return not bucket.name.endswith(DIRECTORY_BUCKET) and Quirk.NO_COPIES not in bucket.known.quirks


def copy_object(store: Bucket, source: Bucket, source_key: str, key: str) -> None:
    """Copy an object between buckets of one endpoint; see `Store.copy`."""
    found = source.head(source_key, checksum=True)
    crc = None if found.crc64nvme is None else int(found.crc64nvme, 16)
    whole = _Source(_origin(store, source, found), 0, found.size)
    _copy(store, [whole], key, is_whole=True, crc=crc, metadata=found.metadata)


def copy_ranges(
    store: Bucket, key: str, ranges: Sequence[CopyRange], crc: int, *, slots: threading.Semaphore,
    moved: Callable[[int], None], stays_open: Callable[[str], object],
) -> bool:  # fmt: skip
    """See `Batch.copy`. ``slots`` bounds the requests under way, ``moved`` is called with the bytes of each, and
    ``stays_open`` with the key if a multipart upload could not be aborted."""
    if not can_copy(store):
        return False

    def find(store: Bucket, wanted: CopyRange) -> Mapping[str, Any]:
        found = store.head(wanted.key, checksum=True)
        if found.size != wanted.size or found.crc64nvme not in (None, crc_hex(wanted.crc)):
            raise errors.PreconditionFailedError(f"{wanted.key} was replaced", bucket=store.name, key=wanted.key)
        return _origin(store, store, found)

    size = sum(each.stop - each.start for each in ranges)
    try:
        wanted = {each.key: each for each in ranges}
        origins = dict(zip(wanted, map_in_threads(store, find, wanted.values()), strict=True))
        sources = [_Source(origins[each.key], each.start, each.stop) for each in ranges]
        is_whole = len(ranges) == 1 and size == ranges[0].size
        answer = _copy(store, sources, key, is_whole=is_whole, crc=crc, slots=slots, moved=moved, stays_open=stays_open)
        if is_good(store, key, size, crc, answer.get("ChecksumCRC64NVME"), slots):
            return True
        delete(store, [key])
        logger.warning("s3://%s/%s is sent: S3's copy of it was not what had been saved before", store.name, key)
    except (errors.ObjectNotFoundError, errors.PreconditionFailedError) as error:
        logger.info("s3://%s/%s is sent: what it was to be copied from is gone (%s)", store.name, key, error)
    except (errors.DeadlineExceededError, errors.CredentialsError):
        raise
    except errors.StorageError as error:
        is_empty = type(error) is errors.StorageError and error.__cause__ is None  # see `expect_text`
        if answered_status(error) in (405, 501) or (is_empty and error.operation == "UploadPartCopy"):
            learn(Quirk.NO_COPIES, store, error)
        logger.warning("s3://%s/%s is sent, as S3 does not copy it: %s", store.name, key, error)
    return False


def _origin(store: Bucket, source: Bucket, found: ObjectHead) -> dict[str, Any]:
    owner = store.settings.expected_bucket_owner
    return {
        "CopySource": {"Bucket": source.name, "Key": found.key},
        **({"CopySourceIfMatch": found.etag} if found.etag else {}),
        **({"ExpectedSourceBucketOwner": owner} if owner else {}),
    }


def _copy(
    store: Bucket,
    sources: Sequence[_Source],
    key: str,
    *,
    is_whole: bool,
    crc: int | None,
    metadata: Mapping[str, str] | None = None,
    slots: contextlib.AbstractContextManager[Any] | None = None,
    moved: Callable[[int], None] = lambda _: None,
    stays_open: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Make an object of ``sources``, end to end; each but the last has S3's smallest part. Returns S3's last answer."""
    size = sum(each.stop - each.start for each in sources)
    slots = slots or contextlib.nullcontext()
    if is_whole and size <= COPIED_PART_SIZE:
        arguments = {**creation_arguments(store.settings, data=True), **sources[0].origin, "Key": key}
        if store.settings.checksum != "none":
            arguments["ChecksumAlgorithm"] = "CRC64NVME"
        with slots:
            quirk = Quirk.NO_CHECKSUMS_OF_COPIES  # of these alone: it may well check what is sent
            answer = request_with_checksum(store, "CopyObject", key, arguments, data=True, quirk=quirk)
        moved(size)
        return dict(answer.get("CopyObjectResult") or {})
    # Parts of the same size, ``least`` bytes to twice as many: S3 takes no small part but the last.
    least, parts = max(COPIED_PART_SIZE, -(-2 * size // MAX_PARTS)), list[_Source]()
    for origin, start, stop in sources:
        count = max(1, (stop - start) // least)
        ends = [start + (stop - start) * number // count for number in range(count + 1)]
        parts += [_Source(origin, *span) for span in itertools.pairwise(ends)]
    upload_id = create(store, key, metadata=metadata)

    def copy_part(store: Bucket, number: int) -> str:
        origin, start, stop = parts[number - 1]
        arguments = {**origin, "Key": key, "UploadId": upload_id, "PartNumber": number}
        arguments["CopySourceRange"] = f"bytes={start}-{stop - 1}"
        with slots:
            answer = store.request("UploadPartCopy", key, arguments, data=True)
        moved(stop - start)
        return expect_text(store, "UploadPartCopy", key, (answer.get("CopyPartResult") or {}).get("ETag"))

    try:
        etags = map_in_threads(store, copy_part, range(1, len(parts) + 1))
        return complete(store, key, upload_id, etags, size=size, crc=crc)
    except BaseException:
        if not abort_quietly(store.within(store.limit.for_cleanup()), key, upload_id):
            stays_open(key)
        raise


def is_good(
    store: Bucket, key: str, size: int, crc: int, answered: str | None, slots: contextlib.AbstractContextManager[Any]
) -> bool:
    """Whether an object is what it should be: by the checksum that S3 tells, otherwise by its bytes."""
    reported = None if answered is None else base64.b64decode(answered).hex()
    if reported is None:
        found = store.head(key, checksum=True)
        if found.size != size:
            return False
        reported = found.crc64nvme
    if reported is not None:
        return reported == crc_hex(crc)

    def crc_between(store: Bucket, span: tuple[int, int]) -> tuple[int, int]:
        with slots:  # many copies are read at a time: it bounds the blocks of all
            crc, block = 0, memoryview(bytearray(min(_BLOCK, span[1] - span[0])))
            for start in range(*span, _BLOCK):
                view = block[: min(_BLOCK, span[1] - start)]
                read(store, key, start, view)
                crc = crc64nvme(view, crc)
        return crc, span[1] - span[0]

    ends = [size * number // _READERS for number in range(_READERS + 1)]
    spans = [span for span in itertools.pairwise(ends) if span[0] < span[1]]
    return combine_crc64nvme(map_in_threads(store, crc_between, spans)) == crc
