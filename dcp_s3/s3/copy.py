"""Copies of objects that S3 makes itself: no byte of them passes through this machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcp_s3 import errors
from dcp_s3.s3 import multipart
from dcp_s3.s3.operations import Operation, Request, creation_arguments, head
from dcp_s3.s3.parts import MAX_PARTS
from dcp_s3.s3.quirks import Place
from dcp_s3.store import ObjectHead, Upload

if TYPE_CHECKING:
    from dcp_s3.s3.store import S3Store

PART_SIZE = 256 * 2**20
"""Bytes that one request copies, at most: S3 takes up to 5 GiB, but copies parts of one object side by side."""
_PARTS_AT_ONCE = 8


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


def copy_object(store: S3Store, source: S3Store, source_key: str, key: str) -> None:
    """Copy an object between buckets of one endpoint; see `Store.copy`."""
    origin = _Origin(source.name, source.run(head(source_key, checksum=True)))
    size = origin.head.size
    if size <= PART_SIZE:
        store.run(_copy_whole(store, origin, key))
        return
    part = max(PART_SIZE, -(-size // MAX_PARTS))
    spans = [(start, min(start + part, size)) for start in range(0, size, part)]
    upload_id = store.run(multipart.create(store, key, metadata=origin.head.metadata))
    try:
        etags = _copy_parts(store, origin, key, upload_id, spans)
        crc = origin.head.crc64nvme
        known = None if crc is None else int(crc, 16)
        store.run(multipart.complete(store, key, upload_id, etags, size=size, crc=known))
    except BaseException:
        store.within(store.limit.for_cleanup()).abort_quietly(Upload(key, upload_id))
        raise


def _copy_parts(store: S3Store, origin: _Origin, key: str, upload_id: str, spans: list[tuple[int, int]]) -> list[str]:
    def send(number: int, span: tuple[int, int]) -> str:
        return store.run(_copy_part(store, origin, key, upload_id, number, span))

    with ThreadPoolExecutor(min(_PARTS_AT_ONCE, len(spans)), "dcp_s3-copy-part") as pool:
        sent = [pool.submit(send, number, span) for number, span in enumerate(spans, start=1)]
        try:
            return [each.result() for each in sent]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
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
