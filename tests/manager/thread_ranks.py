"""Ranks that are threads of one process, and what they agree through: no process group, no S3."""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dcp_s3.coordination.control_keys import ControlKeys
from dcp_s3.coordination.identity import Attempt
from dcp_s3.manager.agree import Ranks, StoreRanks
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url
from tests.memory_store import MemoryStore

ROOT = parse_url("s3://bucket/run")
_PATIENCE_SECONDS = 60


class _Table:
    """Where threads lay down a value each, and see those of all."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE_SECONDS)


class ThreadRanks(Ranks):
    """One of several ranks that agree as those of a process group do. Counts how often."""

    def __init__(self, rank: int, table: _Table) -> None:
        self.group, self._own_group = None, False
        self.rank, self.size, self._table = rank, len(table.values), table
        self.meetings = 0

    def gather(self, value: Any) -> list[Any]:
        self.meetings += 1
        self._table.barrier.wait()
        self._table.values[self.rank] = value
        self._table.barrier.wait()
        return list(self._table.values)

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def maxima(self, numbers: list[int]) -> list[int]:
        return [max(column) for column in zip(*self.gather(numbers), strict=True)]


def on_threads(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What ``work`` returns on each rank, or the error that it raises."""
    table = _Table(size)

    def run(rank: int) -> Any:
        try:
            return work(ThreadRanks(rank, table))
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


class MemoryKeys(ControlKeys):
    """Control keys below the root of a run in memory."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), ROOT, Attempt("run", (0,), "token", None, 2, 0))

    @property
    def keys(self) -> list[str]:
        return [each.key for each in self._store.list("").objects]


def store_ranks(size: int, keys: ControlKeys) -> list[StoreRanks]:
    """The ranks of a job without collectives, each as in a process of its own."""
    numbers = [defaultdict[str, Any](itertools.count) for _ in range(size)]
    return [StoreRanks(ROOT, Settings(), rank, size, keys, "run", numbers[rank]) for rank in range(size)]
