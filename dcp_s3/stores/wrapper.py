"""The base of stores that wrap another one, and change some of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from dcp_s3.limit import Limit
from dcp_s3.store import Store

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
