"""What the server remembers: buckets, objects, multipart uploads. No HTTP and no XML here."""

from __future__ import annotations

import base64
import bisect
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .memory import Body

#: S3's smallest part, but for an upload's last one.
MIN_PART_SIZE = 5 * 1024 * 1024

#: The header of the one checksum that is verified.
CHECKSUM = "x-amz-checksum-crc64nvme"

#: Sorts after everything that can follow a common prefix.
LAST_CHARACTER = "\U0010ffff"


def crc_of(body: Body) -> str:
    """The CRC-64/NVME of a body, as headers have it."""
    return base64.b64encode(body.crc().to_bytes(8, "big")).decode()


class S3Error(Exception):
    """An error answer: HTTP status, S3 code, message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status, self.code, self.message = status, code, message


@dataclass(frozen=True)
class StoredObject:
    """An object, or a part of an upload. Replaced as a whole, never changed."""

    body: Body
    etag: str
    """With its double quotes."""
    modified: float
    headers: Mapping[str, str] = field(default_factory=dict)
    """Content-Type and user metadata (``x-amz-meta-*``), as they are sent back."""
    checksums: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return len(self.body)

    def has_etag(self, wanted: str) -> bool:
        return wanted.strip('"') in ("*", self.etag.strip('"'))


@dataclass
class Upload:
    """A multipart upload that is neither complete nor aborted."""

    id: str
    key: str
    headers: Mapping[str, str]
    initiated: float
    algorithm: str
    """Of the checksums of its parts."""
    parts: dict[int, StoredObject] = field(default_factory=dict)


@dataclass(frozen=True)
class Page:
    """One page of a listing: keys and common prefixes, each sorted."""

    keys: list[str]
    prefixes: list[str]
    next_after: str | None
    """Continue the listing after this; None at the end."""


def paginate(keys: Sequence[str], *, prefix: str, delimiter: str, after: str, max_keys: int) -> Page:
    """Choose what one page of a listing shows from sorted ``keys``. Pure."""
    page = Page([], [], None)
    index = max(bisect.bisect_left(keys, prefix), bisect.bisect_right(keys, after))
    last = after
    while index < len(keys) and keys[index].startswith(prefix):
        if len(page.keys) + len(page.prefixes) >= max_keys:
            return Page(page.keys, page.prefixes, last)
        key = keys[index]
        end = key.find(delimiter, len(prefix)) if delimiter else -1
        if end < 0:
            page.keys.append(key)
            last = key
            index += 1
            continue
        common = key[: end + len(delimiter)]
        page.prefixes.append(common)
        last = common + LAST_CHARACTER
        index = bisect.bisect_right(keys, last)
    return page


class _Bucket:
    def __init__(self) -> None:
        self.objects: dict[str, StoredObject] = {}
        self.uploads: dict[str, Upload] = {}
        self._sorted: list[str] | None = None

    def put(self, key: str, stored: StoredObject) -> StoredObject:
        if key not in self.objects:
            self._sorted = None
        self.objects[key] = stored
        return stored

    def remove(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            self._sorted = None

    def sorted_keys(self) -> list[str]:
        if self._sorted is None:
            self._sorted = sorted(self.objects)
        return self._sorted


class Store:
    """Buckets and what is in them. Every method is atomic and may be called from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """``clock`` gives modification times, in seconds since the epoch."""
        self._clock = clock
        self._lock = threading.RLock()
        self._buckets: dict[str, _Bucket] = {}
        self._numbers = itertools.count(1)

    def _new(
        self, body: Body, headers: Mapping[str, str], checksums: Mapping[str, str], suffix: str = ""
    ) -> StoredObject:
        return StoredObject(body, f'"{next(self._numbers):032x}{suffix}"', self._clock(), headers, checksums)

    # Buckets

    def bucket(self, name: str) -> _Bucket:
        found = self._buckets.get(name)
        if found is None:
            raise S3Error(404, "NoSuchBucket", "The specified bucket does not exist")
        return found

    def create_bucket(self, name: str) -> None:
        with self._lock:
            if name in self._buckets:
                raise S3Error(409, "BucketAlreadyOwnedByYou", "It was created before")
            self._buckets[name] = _Bucket()

    def delete_bucket(self, name: str) -> None:
        with self._lock:
            if self.bucket(name).objects:
                raise S3Error(409, "BucketNotEmpty", "The bucket you tried to delete is not empty")
            del self._buckets[name]

    # Objects

    def put(
        self,
        bucket: str,
        key: str,
        body: Body,
        headers: Mapping[str, str],
        checksums: Mapping[str, str],
        *,
        if_none_match: str | None = None,
        if_match: str | None = None,
    ) -> StoredObject:
        """Store an object, if the conditions (ETags or ``*``) allow it."""
        with self._lock:
            present = self.bucket(bucket).objects.get(key)
            if if_match is not None and present is None:
                raise S3Error(404, "NoSuchKey", "The specified key does not exist.")
            if present is not None:
                check_if_match(present, if_match)
                if if_none_match is not None and present.has_etag(if_none_match):
                    raise _refusal()
            return self.bucket(bucket).put(key, self._new(body, headers, checksums))

    def get(self, bucket: str, key: str) -> StoredObject:
        with self._lock:
            found = self.bucket(bucket).objects.get(key)
            if found is None:
                raise S3Error(404, "NoSuchKey", "The specified key does not exist.")
            return found

    def delete(self, bucket: str, keys: Iterable[str], etags: Mapping[str, str] | None = None) -> list[str]:
        """Remove objects; those that do not exist are no error. Returns those that have another ETag than ``etags``
        says, and stay."""
        with self._lock:
            target, refused = self.bucket(bucket), []
            for key in keys:
                found = target.objects.get(key)
                if found is not None and not found.has_etag((etags or {}).get(key, "*")):
                    refused.append(key)
                else:
                    target.remove(key)
            return refused

    def objects(self, bucket: str) -> dict[str, StoredObject]:
        with self._lock:
            target = self.bucket(bucket)
            return {key: target.objects[key] for key in target.sorted_keys()}

    def page(
        self, bucket: str, *, prefix: str, delimiter: str, after: str, max_keys: int
    ) -> tuple[Page, dict[str, StoredObject]]:
        with self._lock:
            target = self.bucket(bucket)
            page = paginate(target.sorted_keys(), prefix=prefix, delimiter=delimiter, after=after, max_keys=max_keys)
            return page, {key: target.objects[key] for key in page.keys}

    # Multipart uploads

    def create_upload(self, bucket: str, key: str, headers: Mapping[str, str], algorithm: str) -> Upload:
        with self._lock:
            upload = Upload(f"upload-{next(self._numbers):08x}", key, headers, self._clock(), algorithm)
            self.bucket(bucket).uploads[upload.id] = upload
            return upload

    def upload(self, bucket: str, key: str, upload_id: str) -> Upload:
        with self._lock:
            upload = self.bucket(bucket).uploads.get(upload_id)
            if upload is None or upload.key != key:
                raise S3Error(404, "NoSuchUpload", "The specified upload does not exist.")
            return upload

    def uploads(self, bucket: str) -> list[Upload]:
        with self._lock:
            found = self.bucket(bucket).uploads.values()
            return sorted(found, key=lambda upload: (upload.key, upload.initiated, upload.id))

    def put_part(
        self, bucket: str, key: str, upload_id: str, number: int, body: Body, checksums: Mapping[str, str]
    ) -> StoredObject:
        with self._lock:
            part = self._new(body, {}, checksums)
            self.upload(bucket, key, upload_id).parts[number] = part
            return part

    def abort_upload(self, bucket: str, key: str, upload_id: str) -> None:
        with self._lock:
            self.upload(bucket, key, upload_id)
            del self.bucket(bucket).uploads[upload_id]

    def complete_upload(
        self, bucket: str, key: str, upload_id: str, chosen: Sequence[tuple[int, str]], checksums: Mapping[str, str]
    ) -> StoredObject:
        """Make an object of the ``chosen`` (part number, ETag) pairs, without copying them.

        ``checksums`` are those of the whole object.
        """
        with self._lock:
            upload = self.upload(bucket, key, upload_id)
            parts = _choose(upload, chosen)
            body = Body.join(part.body for part in parts)
            if CHECKSUM in checksums and checksums[CHECKSUM] != (computed := crc_of(body)):
                raise S3Error(400, "BadDigest", f"The CRC64NVME you specified is not the object's, {computed}")
            del self.bucket(bucket).uploads[upload_id]
            return self.bucket(bucket).put(key, self._new(body, upload.headers, checksums, f"-{len(parts)}"))


def _choose(upload: Upload, chosen: Sequence[tuple[int, str]]) -> list[StoredObject]:
    if not chosen:
        raise S3Error(400, "MalformedXML", "A completed upload needs at least one part")
    if any(a >= b for (a, _), (b, _) in itertools.pairwise(chosen)):
        raise S3Error(400, "InvalidPartOrder", "The list of parts was not in ascending order.")
    parts = []
    for number, etag in chosen:
        part = upload.parts.get(number)
        if part is None or not part.has_etag(etag):
            text = f"Part {number} could not be found: it was not uploaded, or the ETag given is not the part's."
            raise S3Error(400, "InvalidPart", text)
        parts.append(part)
    if any(part.size < MIN_PART_SIZE for part in parts[:-1]):
        raise S3Error(400, "EntityTooSmall", f"A part other than the last is smaller than {MIN_PART_SIZE} bytes")
    return parts


def check_if_match(stored: StoredObject, wanted: str | None) -> None:
    if wanted is not None and not stored.has_etag(wanted):
        raise _refusal()


def _refusal() -> S3Error:
    return S3Error(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
