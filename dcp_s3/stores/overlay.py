"""A store with copies of some of its objects in front."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dcp_s3.memory import ReadTarget, targets_of
from dcp_s3.store import Moved, ReadWidth, Store
from dcp_s3.stores.around import StoreAround


class Copies(Protocol):
    """Copies of objects that are never replaced."""

    @property
    def read_bytes(self) -> int:
        """Bytes that were read from them."""

    def read_into(self, key: str, start: int, targets: Sequence[ReadTarget]) -> bool:
        """Fill ``targets`` with the bytes of an object from byte ``start`` on; False if it cannot."""

    def distrust(self, key: str) -> None:
        """Have no copy of this object from now on."""


class Overlay(StoreAround):
    """Reads what ``near`` has from there, unless a certain version is asked for; all else is ``store``'s."""

    def __init__(self, near: Copies, store: Store) -> None:
        super().__init__(store)
        self.near = near

    def read(
        self,
        key: str,
        start: int,
        into: memoryview | Sequence[ReadTarget],
        etag: str | None = None,
        *,
        moved: Moved | None = None,
    ) -> None:
        targets = targets_of(into)
        self.limit.check(f"read of {key}")
        if etag is not None or not self.near.read_into(key, start, targets):
            self.store.read(key, start, targets, etag, moved=moved)

    def distrust(self, key: str) -> None:
        self.near.distrust(key)

    def adapt_reads(self, *, resize: Callable[[int], None], is_busy: Callable[[], bool], most: int) -> ReadWidth:
        # Not all bytes come from the store: their rate says nothing.
        return self.store.adapt_reads(resize=resize, is_busy=is_busy, most=min(most, self.read_width()))
