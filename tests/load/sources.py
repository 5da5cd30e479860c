"""What loads are tested with: a checkpoint's objects in memory, and states on several ranks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.limit import Limit
from dcp_s3.load.fetch import LOAD_BUFFERS, Fetcher
from dcp_s3.memory import targets_of
from dcp_s3.settings import Settings
from dcp_s3.store import Into
from dcp_s3.url import parse_url
from tests.end_to_end.states import SMALL_PARTS, random_values
from tests.faulty import BUCKET
from tests.memory_store import MemoryStore

URL = "s3://bucket/run"
RUN = f"s3://{BUCKET}"

Damage = Callable[[str, int, bytearray], None]


class _Objects(MemoryStore):
    def __init__(self, objects: Mapping[str, bytes], damage: Damage) -> None:
        super().__init__()
        self._objects, self._damage, self._asking = objects, damage, threading.Lock()
        self.asked: list[tuple[str, int, int]] = []
        self.distrusted: list[str] = []

    def within(self, limit: Limit) -> _Objects:
        return copy.copy(self)

    def distrust(self, key: str) -> None:
        self.distrusted.append(key.removeprefix("run/"))

    def read(self, key: str, start: int, into: Into, etag: str | None = None, **_: Any) -> None:
        path, targets = key.removeprefix("run/"), targets_of(into)
        size = sum(target.view.nbytes for target in targets)
        data = bytearray(self._objects[path][start : start + size])
        assert len(data) == size
        with self._asking:
            self.asked.append((path, start, size))
            self._damage(path, start, data)
        for target in targets:
            count = target.view.nbytes
            target.view[:] = data[:count]
            target.received(0, count)
            del data[:count]


class MemoryFetcher(Fetcher):
    """Reads from ``objects``, by path, and remembers what was asked for; ``damage`` may change what is received."""

    def __init__(self, objects: Mapping[str, bytes], *, damage: Damage = lambda *_: None) -> None:
        store = _Objects(objects, damage)
        super().__init__(store, parse_url(URL), Settings())
        self.asked, self.distrusted = store.asked, store.distrusted
        """Path, first byte and length of each read; the paths that are to be read anew."""


def save(run: str, state: dict[str, Any], **options: Any) -> str:
    """On all ranks; the URL."""
    dcp.save(state, storage_writer=S3StorageWriter(f"{RUN}/{run}", settings=SMALL_PARTS, **options))
    return f"{RUN}/{run}"


def load_into(url: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """``state`` with what was loaded into it; ``planner``, ``buffers``; others: arguments of the reader."""
    planner, buffers = options.pop("planner", None), options.pop("buffers", LOAD_BUFFERS)
    reader = S3StorageReader(url, settings={**SMALL_PARTS, **options.pop("settings", {})}, **options)
    with mock.patch("dcp_s3.load.fetch.LOAD_BUFFERS", buffers):
        dcp.load(state, storage_reader=reader, planner=planner)
    return state


def large_state(blank: bool = False) -> dict[str, Any]:
    return {f"t{n}": torch.zeros(300_000 + n) if blank else random_values(n, 300_000 + n) for n in range(8)}


def assert_large(state: dict[str, Any]) -> None:
    for name, value in large_state().items():
        assert torch.equal(state[name], value), name
