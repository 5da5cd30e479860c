"""A store in this process's memory, and one with faults that a test sets while it runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcp_s3 import errors
from dcp_s3.limit import UNLIMITED, Limit
from dcp_s3.memory import Piece, combine_crc64nvme, crc64nvme, crc_hex, targets_of
from dcp_s3.store import (
    DeleteTarget,
    Expect,
    Into,
    ListedObject,
    Moved,
    ObjectHead,
    Page,
    Store,
    StoredObject,
    StreamedObject,
    Upload,
    UserMetadata,
    same_etag,
)
from dcp_s3.stores.wrapper import StoreWrapper


@dataclass(frozen=True)
class _Entry:
    data: bytes
    metadata: Mapping[str, str]
    etag: str
    modified_at: float


@dataclass
class _SharedStorage:
    """What a store and those that `within` makes of it share."""

    clock: Callable[[], float]
    objects: dict[str, _Entry] = field(default_factory=dict)
    uploads: list[Upload] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    writes: int = 0


class MemoryStore(Store):
    """Objects in memory.

    Args:
        page_size: most entries of a page of a listing.
        clock: the store's, seconds since the epoch.
    """

    def __init__(self, name: str = "memory", *, page_size: int = 1000, clock: Callable[[], float] = time.time) -> None:
        self.name = name
        self._page_size = page_size
        self._storage = _SharedStorage(clock)
        self.limit = UNLIMITED

    def within(self, limit: Limit) -> MemoryStore:
        other = MemoryStore(self.name, page_size=self._page_size)
        other._storage, other.limit = self._storage, limit
        return other

    def read(self, key: str, start: int, into: Into, etag: str | None = None, *, moved: Moved | None = None) -> None:
        targets = targets_of(into)
        size = sum(target.view.nbytes for target in targets)
        if not size:
            return
        found = self._find("read", key)
        if etag is not None and not same_etag(found.etag, etag):
            raise errors.PreconditionFailedError(f"{key} in {self.name} has another ETag", bucket=self.name, key=key)
        if start + size > len(found.data):
            raise errors.OutOfRangeError(
                f"{key} in {self.name} has {len(found.data)} bytes: {size} from byte {start} on are not there",
                bucket=self.name, key=key,
            )  # fmt: skip
        for target in targets:
            count = target.view.nbytes
            target.view[:] = found.data[start : start + count]
            target.received(0, count)
            start += count
            if moved is not None:
                moved(count)

    def get(self, key: str) -> StoredObject:
        found = self._find("get", key)
        return StoredObject(found.data, found.metadata, found.etag)

    def put(
        self, key: str, data: bytes | memoryview, *, expect: Expect | None = None, metadata: UserMetadata = None
    ) -> None:
        self.limit.check(f"put of {key}")
        storage, new = self._storage, bytes(data)
        with storage.lock:
            found = storage.objects.get(key)
            if expect is not None and expect.etag and found is None:
                raise self._missing("put", key)
            is_other = found is not None and found.data != new
            if expect is not None and is_other and not same_etag(found.etag, expect.etag):
                raise errors.PreconditionFailedError(
                    f"{key} in {self.name} is not what it was expected to be: somebody else wrote it",
                    bucket=self.name, key=key, operation="put",
                )  # fmt: skip
            storage.writes += 1
            etag = f'"{crc_hex(crc64nvme(new))}-{storage.writes}"'
            storage.objects[key] = _Entry(new, dict(metadata or {}), etag, self._storage.clock())

    def put_stream(
        self, key: str, size: int, pieces: Iterable[Piece], *, part_size: int | None = None
    ) -> StreamedObject:
        data, crcs = bytearray(), []
        for piece in pieces:
            self.limit.check(f"put of {key}")
            crcs.append((piece.checksum(), piece.size))
            data += piece.view or b""
            piece.view = None
        self.put(key, memoryview(data))
        return StreamedObject(len(data), combine_crc64nvme(crcs))

    def head(self, key: str, *, checksum: bool = False) -> ObjectHead:
        found, now = self._find("head", key), self._storage.clock()
        crc = crc_hex(crc64nvme(found.data)) if checksum else None
        return ObjectHead(key, len(found.data), found.modified_at, found.etag, found.metadata, crc, now)

    def page(self, prefix: str, delimiter: str = "", *, token: str | None = None) -> Page:
        """As S3 would give it; a token is the last entry of the page before."""
        self.limit.check(f"list of {prefix}")
        with self._storage.lock:
            objects = sorted(self._storage.objects.items(), key=lambda each: _order(each[0]))
        entries: dict[str, ListedObject | None] = {}  # None: a common prefix
        for key, each in objects:
            if key.startswith(prefix):
                end = key.find(delimiter, len(prefix)) if delimiter else -1
                name = key if end < 0 else key[: end + len(delimiter)]
                if token is None or _order(name) > _order(token):
                    listed = ListedObject(key, len(each.data), each.modified_at, each.etag)
                    entries.setdefault(name, listed if end < 0 else None)
        names = list(entries)[: self._page_size]
        return Page(
            tuple(each for name in names if (each := entries[name]) is not None),
            tuple(name for name in names if entries[name] is None),
            names[-1] if len(entries) > self._page_size else None,
            self._storage.clock(),
        )

    def delete(self, targets: Iterable[str | DeleteTarget]) -> Sequence[str]:
        self.limit.check("delete")
        left = []
        with self._storage.lock:
            for target in (DeleteTarget(each) if isinstance(each, str) else each for each in targets):
                found = self._storage.objects.get(target.key)
                if found is None:
                    continue
                if target.etag and not same_etag(found.etag, target.etag):
                    left.append(target.key)
                else:
                    del self._storage.objects[target.key]
        return left

    def uploads(self, prefix: str) -> Sequence[Upload]:
        found = (each for each in self._storage.uploads if each.key.startswith(prefix))
        return sorted(found, key=lambda each: each.key)

    def abort(self, upload: Upload) -> None:
        self._storage.uploads = [each for each in self._storage.uploads if each.upload_id != upload.upload_id]

    def begin(self, key: str) -> Upload:
        """Begin a multipart upload, which is never completed."""
        self._storage.writes += 1
        upload = Upload(key, f"upload-{self._storage.writes}", self._storage.clock())
        self._storage.uploads.append(upload)
        return upload

    def snapshot(self) -> tuple[Mapping[str, _Entry], Sequence[Upload]]:
        """All that is there, for `put_back`."""
        with self._storage.lock:
            return dict(self._storage.objects), list(self._storage.uploads)

    def put_back(self, snapshot: tuple[Mapping[str, _Entry], Sequence[Upload]]) -> None:
        with self._storage.lock:
            self._storage.objects, self._storage.uploads = dict(snapshot[0]), list(snapshot[1])

    def _find(self, operation: str, key: str) -> _Entry:
        self.limit.check(f"{operation} of {key}")
        found = self._storage.objects.get(key)
        if found is None:
            raise self._missing(operation, key)
        return found

    def _missing(self, operation: str, key: str) -> Exception:
        text = f"there is no {key} in {self.name}"
        return errors.ObjectNotFoundError(text, bucket=self.name, key=key, operation=operation)


def _order(key: str) -> bytes:
    return key.encode("utf-8", "surrogatepass")


Rule = Callable[[str, str], Exception | None]
_METHODS = ("read", "get", "put", "put_stream", "head", "exists", "page", "delete", "uploads", "abort")


class FaultyStore(StoreWrapper):
    """`rule` is asked before each call of ``store`` (with the method's name, and the key or prefix), and again after it
    (the method's name with ``after ``); an exception that it returns is raised."""

    def __init__(self, store: Store, rule: Rule = lambda method, key: None) -> None:
        super().__init__(store)
        self.rule = rule

    def within(self, limit: Limit) -> FaultyStore:
        return FaultyStore(self.store.within(limit), lambda method, key: self.rule(method, key))

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return self._with_faults(name, found) if name in _METHODS else found

    def _with_faults(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def through(first: Any, *args: Any, **kwargs: Any) -> Any:
            if method == "delete":
                first = list(first)
            named = (first or [""])[0] if method == "delete" else first
            key = named if isinstance(named, str) else named.key
            if (fault := self.rule(method, key)) is not None:
                raise fault
            result = call(first, *args, **kwargs)
            if (fault := self.rule(f"after {method}", key)) is not None:
                raise fault
            return result

        return through
