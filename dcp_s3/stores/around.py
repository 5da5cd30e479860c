"""A store around another one: passes everything on, for classes that change some of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from dcp_s3.limit import Limit
from dcp_s3.memory import Piece, ReadTarget
from dcp_s3.store import (
    Batch,
    Counters,
    DeleteTarget,
    Expect,
    Moved,
    ObjectHead,
    ObjectStart,
    Page,
    ReadWidth,
    Store,
    StoredObject,
    StreamedObject,
    Upload,
)

SelfAround = TypeVar("SelfAround", bound="StoreAround")


class StoreAround(Store):
    def __init__(self, store: Store) -> None:
        self.store = store
        self.name, self.limit = store.name, store.limit

    def within(self: SelfAround, limit: Limit) -> SelfAround:
        other = copy.copy(self)
        other.store, other.limit = self.store.within(limit), limit
        return other

    def read(
        self,
        key: str,
        start: int,
        into: memoryview | Sequence[ReadTarget],
        etag: str | None = None,
        *,
        moved: Moved | None = None,
    ) -> None:
        self.store.read(key, start, into, etag, moved=moved)

    def distrust(self, key: str) -> None:
        self.store.distrust(key)

    def read_width(self) -> int:
        return self.store.read_width()

    def adapt_reads(self, *, resize: Callable[[int], None], is_busy: Callable[[], bool], most: int) -> ReadWidth:
        return self.store.adapt_reads(resize=resize, is_busy=is_busy, most=most)

    def counters(self) -> Counters:
        return self.store.counters()

    def get(self, key: str) -> StoredObject:
        return self.store.get(key)

    def get_start(self, key: str, most: int) -> ObjectStart:
        return self.store.get_start(key, most)

    def put(
        self,
        key: str,
        data: bytes | memoryview,
        *,
        expect: Expect | None = None,
        content_type: str = "application/octet-stream",
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.store.put(key, data, expect=expect, content_type=content_type, metadata=metadata)

    def put_stream(
        self, key: str, size: int, pieces: Iterable[Piece], *, part_size: int | None = None, resume: bool = False
    ) -> StreamedObject:
        return self.store.put_stream(key, size, pieces, part_size=part_size, resume=resume)

    def batch(self, *, total: int, ranks: int = 1, keys: Sequence[str] = ()) -> Batch:
        return self.store.batch(total=total, ranks=ranks, keys=keys)

    def copy(self, source: Store, source_key: str, key: str) -> None:
        self.store.copy(source.store if isinstance(source, StoreAround) else source, source_key, key)

    def head(self, key: str, *, checksum: bool = False) -> ObjectHead:
        return self.store.head(key, checksum=checksum)

    def exists(self, key: str) -> bool:
        return self.store.exists(key)

    def page(self, prefix: str, delimiter: str = "", *, token: str | None = None) -> Page:
        return self.store.page(prefix, delimiter, token=token)

    def delete(self, targets: Iterable[str | DeleteTarget]) -> Sequence[str]:
        return self.store.delete(targets)

    def uploads(self, prefix: str) -> Sequence[Upload]:
        return self.store.uploads(prefix)

    def abort(self, upload: Upload) -> None:
        self.store.abort(upload)
