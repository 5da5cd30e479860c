"""What the server remembers: buckets, objects, multipart uploads. No HTTP and no XML here."""

from __future__ import annotations

import base64
import binascii
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


def base64_of(crc: int) -> str:
    return base64.b64encode(crc.to_bytes(8, "big")).decode()


def checksums_of(headers: Mapping[str, str]) -> dict[str, str]:
    """The checksums among these headers, of whatever kind: they are kept, and given back."""
    names = ("algorithm", "mode", "type")
    return {
        name: value
        for name, value in headers.items()
        if name.startswith("x-amz-checksum-") and not name.endswith(names)
    }


class S3Error(Exception):
    """An error answer: HTTP status, S3 code, message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{status} {code}: {message}")
        self.status = status
        self.code = code
        self.message = message


@dataclass(frozen=True)
class StoredObject:
    """An object. Replaced as a whole, never changed."""

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


@dataclass(frozen=True)
class Part:
    """A part of a multipart upload."""

    body: Body
    etag: str
    modified: float
    checksums: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Upload:
    """A multipart upload that is neither complete nor aborted."""

    id: str
    key: str
    headers: Mapping[str, str]
    initiated: float
    algorithm: str = ""
    """Of the checksums of its parts."""
    parts: dict[int, Part] = field(default_factory=dict)


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
            return Page(page.keys, page.prefixes, last if max_keys else None)
        key = keys[index]
        end = key.find(delimiter, len(prefix)) if delimiter else -1
        if end < 0:
            page.keys.append(key)
            last = key
            index += 1
            continue
        common = key[: end + len(delimiter)]
        if common > after or not after.startswith(common):
            page.prefixes.append(common)
        last = common + LAST_CHARACTER
        index = bisect.bisect_right(keys, last)
    return page


def continuation_token(after: str) -> str:
    return base64.urlsafe_b64encode(after.encode()).decode()


def parse_continuation_token(token: str) -> str:
    try:
        return base64.urlsafe_b64decode(token).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise S3Error(400, "InvalidArgument", "The continuation token provided is incorrect") from None


class _Bucket:
    def __init__(self) -> None:
        self.objects: dict[str, StoredObject] = {}
        self.uploads: dict[str, Upload] = {}
        self._sorted: list[str] | None = None

    def put(self, key: str, stored: StoredObject) -> None:
        if key not in self.objects:
            self._sorted = None
        self.objects[key] = stored

    def remove(self, key: str) -> None:
        if self.objects.pop(key, None) is not None:
            self._sorted = None

    def sorted_keys(self) -> list[str]:
        if self._sorted is None:
            self._sorted = sorted(self.objects)
        return self._sorted


class Store:
    """Buckets and what is in them. Every method is atomic and may be called from any thread."""

    def __init__(self, *, clock: Callable[[], float], verifies: bool) -> None:
        """``clock`` gives modification times (seconds since the epoch); whether checksums are verified."""
        self._clock, self.verifies = clock, verifies
        self._lock = threading.RLock()
        self._buckets: dict[str, _Bucket] = {}
        self._numbers = itertools.count(1)

    def _bucket(self, name: str) -> _Bucket:
        try:
            return self._buckets[name]
        except KeyError:
            raise S3Error(404, "NoSuchBucket", "The specified bucket does not exist") from None

    def _etag(self, suffix: str = "") -> str:
        return f'"{next(self._numbers):032x}{suffix}"'

    # Buckets

    def create_bucket(self, name: str) -> None:
        with self._lock:
            if name in self._buckets:
                raise S3Error(409, "BucketAlreadyOwnedByYou", "It was created before")
            self._buckets[name] = _Bucket()

    def check_bucket(self, name: str) -> None:
        with self._lock:
            self._bucket(name)

    def delete_bucket(self, name: str) -> None:
        with self._lock:
            if self._bucket(name).objects:
                raise S3Error(409, "BucketNotEmpty", "The bucket you tried to delete is not empty")
            del self._buckets[name]

    # Objects

    def put(
        self,
        bucket: str,
        key: str,
        body: Body,
        *,
        headers: Mapping[str, str],
        checksums: Mapping[str, str] | None = None,
        if_none_match: str | None = None,
        if_match: str | None = None,
    ) -> StoredObject:
        """Store an object, if the conditions (ETags or ``*``) allow it."""
        with self._lock:
            target = self._bucket(bucket)
            _check_write(target.objects.get(key), if_none_match, if_match)
            stored = StoredObject(body, self._etag(), self._clock(), headers, checksums or {})
            target.put(key, stored)
            return stored

    def get(self, bucket: str, key: str) -> StoredObject:
        with self._lock:
            try:
                return self._bucket(bucket).objects[key]
            except KeyError:
                raise S3Error(404, "NoSuchKey", "The specified key does not exist.") from None

    def delete(self, bucket: str, keys: Iterable[str], etags: Mapping[str, str] | None = None) -> list[str]:
        """Remove objects; those that do not exist are no error. Returns those that have another ETag than ``etags``
        says, and stay."""
        with self._lock:
            target = self._bucket(bucket)
            refused = []
            for key in keys:
                wanted, found = (etags or {}).get(key, "*"), target.objects.get(key)
                if wanted != "*" and found is not None and found.etag.strip('"') != wanted.strip('"'):
                    refused.append(key)
                else:
                    target.remove(key)
            return refused

    def objects(self, bucket: str) -> dict[str, StoredObject]:
        with self._lock:
            target = self._bucket(bucket)
            return {key: target.objects[key] for key in target.sorted_keys()}

    def page(
        self, bucket: str, *, prefix: str, delimiter: str, after: str, max_keys: int
    ) -> tuple[Page, dict[str, StoredObject]]:
        with self._lock:
            target = self._bucket(bucket)
            page = paginate(target.sorted_keys(), prefix=prefix, delimiter=delimiter, after=after, max_keys=max_keys)
            return page, {key: target.objects[key] for key in page.keys}

    # Multipart uploads

    def create_upload(self, bucket: str, key: str, headers: Mapping[str, str], *, algorithm: str = "") -> Upload:
        with self._lock:
            upload = Upload(f"upload-{next(self._numbers):08x}", key, headers, self._clock(), algorithm)
            self._bucket(bucket).uploads[upload.id] = upload
            return upload

    def upload(self, bucket: str, key: str, upload_id: str) -> Upload:
        with self._lock:
            upload = self._bucket(bucket).uploads.get(upload_id)
            if upload is None or upload.key != key:
                raise S3Error(404, "NoSuchUpload", "The specified upload does not exist.")
            return upload

    def uploads(self, bucket: str) -> list[Upload]:
        with self._lock:
            found = self._bucket(bucket).uploads.values()
            return sorted(found, key=lambda upload: (upload.key, upload.initiated, upload.id))

    def put_part(
        self,
        bucket: str,
        key: str,
        upload_id: str,
        number: int,
        body: Body,
        checksums: Mapping[str, str] | None = None,
    ) -> Part:
        with self._lock:
            part = Part(body, self._etag(), self._clock(), checksums or {})
            self.upload(bucket, key, upload_id).parts[number] = part
            return part

    def abort_upload(self, bucket: str, key: str, upload_id: str) -> None:
        with self._lock:
            self.upload(bucket, key, upload_id)
            del self._bucket(bucket).uploads[upload_id]

    def complete_upload(
        self,
        bucket: str,
        key: str,
        upload_id: str,
        chosen: Sequence[tuple[int, str]],
        *,
        checksums: Mapping[str, str],
        if_none_match: str | None,
        if_match: str | None,
    ) -> StoredObject:
        """Make an object of the ``chosen`` (part number, ETag) pairs, without copying them.

        ``checksums`` are those of the whole object.
        """
        with self._lock:
            target = self._bucket(bucket)
            upload = self.upload(bucket, key, upload_id)
            parts = _choose(upload, chosen)
            body = Body.join(part.body for part in parts)
            if self.verifies:
                _verify(body, checksums)
            _check_write(target.objects.get(key), if_none_match, if_match)
            stored = StoredObject(body, self._etag(f"-{len(parts)}"), self._clock(), upload.headers, checksums)
            target.put(key, stored)
            del target.uploads[upload_id]
            return stored


def _choose(upload: Upload, chosen: Sequence[tuple[int, str]]) -> list[Part]:
    if not chosen:
        raise S3Error(400, "MalformedXML", "A completed upload needs at least one part")
    numbers = [number for number, _ in chosen]
    if any(a >= b for a, b in itertools.pairwise(numbers)):
        raise S3Error(400, "InvalidPartOrder", "The list of parts was not in ascending order.")
    parts = []
    for number, etag in chosen:
        part = upload.parts.get(number)
        if part is None or part.etag.strip('"') != etag.strip('"'):
            raise S3Error(
                400,
                "InvalidPart",
                f"Part {number} could not be found: it was not uploaded, or the ETag given is not the part's.",
            )
        parts.append(part)
    if any(len(part.body) < MIN_PART_SIZE for part in parts[:-1]):
        raise S3Error(400, "EntityTooSmall", f"A part other than the last is smaller than {MIN_PART_SIZE} bytes")
    return parts


def crc_of(body: Body) -> str:
    """The CRC-64/NVME of a body, as headers have it."""
    return base64_of(body.crc())


def _verify(body: Body, expected: Mapping[str, str]) -> None:
    if CHECKSUM in expected and expected[CHECKSUM] != (computed := crc_of(body)):
        raise S3Error(400, "BadDigest", f"The CRC64NVME you specified is not the object's, {computed}")


def _check_write(present: StoredObject | None, if_none_match: str | None, if_match: str | None) -> None:
    if if_match is not None and present is None:
        raise S3Error(404, "NoSuchKey", "The specified key does not exist.")
    refused = present is not None and (
        (if_none_match is not None and if_none_match in ("*", present.etag))
        or (if_match is not None and if_match not in ("*", present.etag, present.etag.strip('"')))
    )
    if refused:
        raise S3Error(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold")
