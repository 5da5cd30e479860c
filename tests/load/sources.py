"""A checkpoint's objects in memory, for what fetches."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence

from dcp_s3.limit import Limit
from dcp_s3.load.fetch import Fetcher
from dcp_s3.memory import ReadTarget, targets_of
from dcp_s3.settings import Settings
from dcp_s3.store import Moved
from dcp_s3.url import parse_url
from tests.memory_store import MemoryStore

URL = "s3://bucket/run"

Damage = Callable[[str, int, bytearray], None]


class _Objects(MemoryStore):
    """Remembers what was asked for."""

    def __init__(self, objects: Mapping[str, bytes], damage: Damage) -> None:
        super().__init__()
        self._objects, self._damage, self._asking = objects, damage, threading.Lock()
        self.asked: list[tuple[str, int, int]] = []
        self.distrusted: list[str] = []

    def within(self, limit: Limit) -> _Objects:
        other = copy.copy(self)
        other.limit = limit
        return other

    def distrust(self, key: str) -> None:
        self.distrusted.append(key.removeprefix("run/"))

    def read(
        self,
        key: str,
        start: int,
        into: memoryview | Sequence[ReadTarget],
        etag: str | None = None,
        *,
        moved: Moved | None = None,
    ) -> None:
        path, targets = key.removeprefix("run/"), targets_of(into)
        size = sum(target.view.nbytes for target in targets)
        data = bytearray(self._objects[path][start : start + size])
        assert len(data) == size
        with self._asking:
            self.asked.append((path, start, size))
            self._damage(path, start, data)
        at = 0
        for target in targets:
            count = target.view.nbytes
            target.view[:] = data[at : at + count]
            target.received(0, count)
            at += count


class MemoryFetcher(Fetcher):
    """Reads from ``objects``, by path, and remembers what was asked for; ``damage`` may change what is received."""

    def __init__(
        self,
        objects: Mapping[str, bytes],
        *,
        damage: Damage = lambda *_: None,
    ) -> None:
        store = _Objects(objects, damage)
        super().__init__(store, parse_url(URL), Settings())
        self.asked, self.distrusted = store.asked, store.distrusted
        """Path, first byte and length of each read; the paths that are to be read anew."""
