"""Stores that wrap another one, and change some of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from dcp_s3.limit import Limit
from dcp_s3.memory import ReadTarget, targets_of
from dcp_s3.store import Into, Moved, ReadWidth, Store

SelfWrapper = TypeVar("SelfWrapper", bound="StoreWrapper")
T = TypeVar("T")
U = TypeVar("U")


def _passed_on(name: str) -> Any:
    def method(self: StoreWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.store, name)(*args, **kwargs)

    return method


class StoreWrapper(Store):
    """Passes everything on to ``store``."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.name, self.limit = store.name, store.limit

    def within(self: SelfWrapper, limit: Limit) -> SelfWrapper:
        other = copy.copy(self)
        other.store, other.limit = self.store.within(limit), limit
        return other

    def copy(self, source: Store, source_key: str, key: str) -> None:
        self.store.copy(source.store if isinstance(source, StoreWrapper) else source, source_key, key)

    def map(self: SelfWrapper, function: Callable[[SelfWrapper, T], U], items: Iterable[T]) -> Sequence[U]:
        """As many at once as ``store`` has under way."""
        return self.store.map(lambda store, item: function(self.within(store.limit), item), items)

    read: Any = _passed_on("read")
    distrust: Any = _passed_on("distrust")
    read_width: Any = _passed_on("read_width")
    adapt_reads: Any = _passed_on("adapt_reads")
    counters: Any = _passed_on("counters")
    get: Any = _passed_on("get")
    put: Any = _passed_on("put")
    put_stream: Any = _passed_on("put_stream")
    batch: Any = _passed_on("batch")
    head: Any = _passed_on("head")
    exists: Any = _passed_on("exists")
    page: Any = _passed_on("page")
    delete: Any = _passed_on("delete")
    uploads: Any = _passed_on("uploads")
    abort: Any = _passed_on("abort")


class Copies(Protocol):
    """Copies of objects that are never replaced."""

    @property
    def read_bytes(self) -> int:
        """Bytes that were read from them."""

    def read_into(self, key: str, start: int, targets: Sequence[ReadTarget]) -> bool:
        """Fill ``targets`` with the bytes of an object from byte ``start`` on; False if it cannot."""

    def distrust(self, key: str) -> None:
        """Have no copy of this object from now on."""


class Overlay(StoreWrapper):
    """Reads what ``near`` has from there, unless a certain version is asked for; all else is ``store``'s."""

    def __init__(self, near: Copies, store: Store) -> None:
        super().__init__(store)
        self.near = near

    def read(self, key: str, start: int, into: Into, etag: str | None = None, *, moved: Moved | None = None) -> None:
        targets = targets_of(into)
        self.limit.check(f"read of {key}")
        if etag is not None or not self.near.read_into(key, start, targets):
            self.store.read(key, start, targets, etag, moved=moved)

    def distrust(self, key: str) -> None:
        self.near.distrust(key)

    def adapt_reads(self, *, resize: Callable[[int], None], is_busy: Callable[[], bool], most: int) -> ReadWidth:
        # Not all bytes come from the store: their rate says nothing.
        return self.store.adapt_reads(resize=resize, is_busy=is_busy, most=min(most, self.read_width()))
