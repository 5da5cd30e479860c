"""Many requests at once: in order, bounded, and cancelled by the first failure."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from dcp_s3.limit import UNLIMITED, Cancelled
from dcp_s3.s3.bucket import AT_ONCE, map_in_threads
from tests.memory_store import MemoryStore

LONG = 30.0


class Peak:
    """The most calls at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = self.most = 0

    def __enter__(self) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._now -= 1


def test_many_are_under_way_at_once_but_not_more_than_that_also_inside_another() -> None:
    peak, together = Peak(), threading.Barrier(AT_ONCE)

    def inner(store: MemoryStore, item: int) -> int:
        with peak:
            return item

    def outer(store: MemoryStore, item: int) -> int:
        if item < AT_ONCE:
            together.wait(LONG)  # all of them are there at once
        return sum(map_in_threads(store, inner, range(item)))

    assert map_in_threads(MemoryStore(), outer, range(3 * AT_ONCE))[:4] == [0, 0, 1, 3]
    assert peak.most <= AT_ONCE


def test_the_first_failure_is_raised_and_cancels_the_others() -> None:
    begun: list[int] = []
    ended: list[bool] = []

    def work(store: MemoryStore, item: int) -> None:
        begun.append(item)
        if item == AT_ONCE - 1:
            raise ValueError("the first")
        assert store.limit.cancel is not None
        ended.append(store.limit.cancel.wait(LONG))
        store.limit.check("another request")

    with pytest.raises(ValueError, match="the first"):
        map_in_threads(MemoryStore(), work, range(10 * AT_ONCE))
    assert ended == [True] * (AT_ONCE - 1)
    assert sorted(begun) == list(range(AT_ONCE))
    assert not [thread for thread in threading.enumerate() if thread.name == "dcp_s3-requests"]


def test_whoever_cancels_the_store_cancels_what_is_under_way() -> None:
    cancel = threading.Event()
    store = MemoryStore().within(replace(UNLIMITED, cancel=cancel))
    begun: list[int] = []

    def work(store: MemoryStore, item: int) -> None:
        begun.append(item)
        if len(begun) == AT_ONCE:
            cancel.set()
        assert store.limit.cancel is not None
        assert store.limit.cancel.wait(LONG)

    with pytest.raises(Cancelled):
        map_in_threads(store, work, range(2 * AT_ONCE))
    assert len(begun) == AT_ONCE


def test_where_no_thread_can_be_started_the_caller_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert map_in_threads(MemoryStore(), lambda _, item: item, range(5)) == [0, 1, 2, 3, 4]
