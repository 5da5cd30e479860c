"""Saves and loads use as many connections as were found to fill the link, and change their number as they run."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.s3 import connections
from dcp_s3.s3.connections import Width, connections_of, first_width
from dcp_s3.s3.parts import GETS_PER_SECOND, PUTS_PER_SECOND, plan_part_size
from dcp_s3.s3.store import S3Store
from dcp_s3.s3.upload import WAITING_PARTS
from dcp_s3.settings import Settings
from dcp_s3.workers import Workers
from tests.faulty import BUCKET, FaultyServer
from tests.s3.waiting import LONG

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

MIB = 2**20
URL = f"s3://{BUCKET}/run"
SETTINGS = {"part_size": "5MiB"}


def state(value: float) -> dict[str, Any]:
    return {f"w{n}": torch.full((10 * MIB // 4,), value + n) for n in range(12)}


class Scripted(Width):
    """Goes through these numbers, one at each look that finds ``go`` set."""

    numbers: list[int]
    go = threading.Event()
    go.set()

    def __init__(self, first: int) -> None:
        super().__init__(self.numbers[0])
        self._left = iter(self.numbers[1:])

    def moved(self, seconds: float, count: int, most: int) -> None:
        if self.go.is_set():
            self.connections = min(most, next(self._left, self.connections))


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is known, and the host has time."""
    monkeypatch.setattr(connections._IdleShare, "look", lambda _: 1.0)
    connections._links.clear()
    yield
    connections._links.clear()


class Crowd:
    """Holds requests of one operation back until ``count`` are there together."""

    def __init__(self, faulty: FaultyServer, operation: str, count: int) -> None:
        self._operation, self._count = operation, count
        self._changed = threading.Condition()
        self._there = 0
        self.most = 0
        self.met = False
        faulty.rule = self._rule

    def _rule(self, request: Any) -> None:
        if request.operation != self._operation or (
            self._operation == "GetObject" and request.key.endswith("metadata")
        ):
            return
        with self._changed:
            self._there += 1
            self.most = max(self.most, self._there)
            self.met = self.met or self._there >= self._count
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.met, LONG)
            self._there -= 1


@pytest.mark.parametrize("settings", [{}, {"concurrency": 5}])
def test_a_save_and_a_load_use_more_connections_as_they_run(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    monkeypatch.setattr(Scripted, "numbers", [2, 5], raising=False)
    monkeypatch.setattr(connections, "Width", Scripted)
    crowd = Crowd(faulty, "UploadPart", 5)
    dcp.save(state(1.0), storage_writer=S3StorageWriter(URL, max_objects=1, settings=SETTINGS | settings))
    assert crowd.met
    crowd = Crowd(faulty, "GetObject", 5)
    found = state(0.0)
    dcp.load(found, storage_reader=S3StorageReader(URL, settings=SETTINGS | settings))
    assert crowd.met
    assert all(torch.equal(found[name], value) for name, value in state(1.0).items())


def test_fewer_connections_are_fewer_requests_at_once(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way ends, and what waits in line; the threads that are too many then get nothing more."""
    monkeypatch.setattr(Scripted, "numbers", [4, 1], raising=False)
    monkeypatch.setattr(connections, "Width", Scripted)
    monkeypatch.setattr(Scripted, "go", all_four := threading.Event())
    store, resized = S3Store(BUCKET, Settings()), threading.Event()
    original = connections.Tuning.__init__

    def tell(self: Any, *arguments: Any, resize: Any, **options: Any) -> None:
        original(self, *arguments, resize=lambda count: (resize(count), resized.set()), **options)

    monkeypatch.setattr(connections.Tuning, "__init__", tell)
    writer = S3StorageWriter(URL, max_objects=1, settings=SETTINGS)
    for operation, direction, run in (
        ("UploadPart", "upload", lambda: dcp.save(state(1.0), storage_writer=writer)),
        ("GetObject", "download", lambda: dcp.load(state(0), storage_reader=S3StorageReader(URL, settings=SETTINGS))),
    ):
        assert connections_of(store, direction) == 4
        resized.clear()
        all_four.clear()
        at_once: list[int] = []
        lock = threading.Lock()

        def rule(request: Any, operation: str = operation, at_once: list[int] = at_once, lock: Any = lock) -> None:
            if request.operation != operation or request.key.endswith("metadata"):
                return
            with lock:
                at_once.append(faulty.s3.in_flight)
                first = len(at_once) <= 4
            if len(at_once) == 4:
                all_four.set()
            if first:
                assert resized.wait(LONG)
            time.sleep(0.02)  # if there were four threads, they would meet here

        faulty.rule = rule
        run()
        assert max(at_once) == 4
        # An answered request counts until the server has noted its end.
        assert max(at_once[4 + WAITING_PARTS + 2 :]) <= 2
        assert len(at_once) > 12


def test_the_ceiling_of_the_settings_holds(faulty: FaultyServer) -> None:
    crowd = Crowd(faulty, "UploadPart", 3)
    dcp.save(state(1.0), storage_writer=S3StorageWriter(URL, max_objects=1, settings=SETTINGS | {"concurrency": 3}))
    assert (crowd.met, crowd.most) == (True, 3)


def test_what_was_found_is_kept_and_told(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scripted, "numbers", [2, 5], raising=False)
    monkeypatch.setattr(connections, "Width", Scripted)
    Crowd(faulty, "UploadPart", 5)
    dcp.save(state(1.0), storage_writer=S3StorageWriter(URL, max_objects=1, settings=SETTINGS))
    store = S3Store(BUCKET, Settings())
    assert (connections_of(store, "upload"), connections_of(store, "download")) == (5, 2)
    assert connections_of(S3Store(BUCKET, Settings(concurrency=3)), "upload") == 3
    found = {name.rpartition(" ")[2]: each["connections"] for name, each in dcp_s3.stats().connections.items()}
    assert found == {"upload": 5, "download": 2}


def test_a_process_that_has_no_more_threads_goes_on_with_those_it_has(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scripted, "numbers", [2, 5], raising=False)
    monkeypatch.setattr(connections, "Width", Scripted)
    resize = Workers.resize

    def few(self: Workers, count: int) -> None:
        if count == 5:
            raise RuntimeError("can't start new thread")
        resize(self, count)

    monkeypatch.setattr(Workers, "resize", few)
    refused = threading.Event()
    faulty.rule = lambda request: refused.wait(LONG) and None if request.operation == "UploadPart" else None
    monkeypatch.setattr(connections.logger, "warning", lambda *_: refused.set())
    dcp.save(state(1.0), storage_writer=S3StorageWriter(URL, max_objects=1, settings=SETTINGS))
    assert refused.is_set()
    found = state(0.0)
    dcp.load(found, storage_reader=S3StorageReader(URL, settings=SETTINGS))
    assert all(torch.equal(found[name], value) for name, value in state(1.0).items())


@pytest.mark.parametrize(
    ("total", "part"),
    [
        (1, 8),
        (128 * MIB, 8),
        (256 * MIB, 8),
        (1024 * MIB, 32),
        (3072 * MIB, 48),
        (4096 * MIB, 64),
        (100 * 1024 * MIB, 64),
    ],
)
def test_every_connection_has_parts_to_send(total: int, part: int) -> None:
    found = plan_part_size(total, connections=32, ranks=1, most=64 * MIB, requests_per_second=PUTS_PER_SECOND)
    assert found == part * MIB


@pytest.mark.parametrize("ranks", [8, 64, 512, 4096])
@pytest.mark.parametrize("gib", [0.5, 4, 30])
def test_all_ranks_together_stay_below_what_s3_takes(ranks: int, gib: float) -> None:
    total = int(gib * 2**30)
    for most_per_second in (PUTS_PER_SECOND, GETS_PER_SECOND):
        part = plan_part_size(total, connections=32, ranks=ranks, most=64 * MIB, requests_per_second=most_per_second)
        seconds = total / (min(32, total / part) * 90e6)
        assert ranks * total / part / seconds <= 1.01 * most_per_second


# --- how many connections --------------------------------------------------------------------------


TICK = 0.05


@dataclass
class Link:
    """Carries ``each`` bytes per second on a connection, ``total`` on all of them."""

    each: float
    total: float
    latency: float = 0.06
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._open = 0
        self._opening = 0.0

    def carry(self, connections: int, seconds: float) -> int:
        """Bytes moved in ``seconds``; connections that were just made carry nothing before their first answer."""
        if connections > self._open and self._opening <= 0:
            self._opening = self.latency
        self._open = min(self._open, connections)
        if self._opening > 0:
            self._opening -= seconds
            if self._opening <= 0:
                self._open = connections
        rate = min(self._open * self.each, self.total) * (1 + self._random.uniform(-self.noise, self.noise))
        return int(rate * seconds)

    def best(self, most: int) -> float:
        return min(most * self.each, self.total)


def run(width: Width, link: Link, seconds: float, most: int = 64) -> float:
    """Bytes per second over ``seconds``."""
    moved = 0
    for _ in range(round(seconds / TICK)):
        count = link.carry(width.connections, TICK)
        width.moved(TICK, count, most)
        moved += count
    return moved / seconds


@given(
    each=st.floats(10 * MIB, 500 * MIB),
    total=st.floats(100 * MIB, 8000 * MIB),
    first=st.integers(8, 32),
    latency=st.floats(0.001, 0.1),
    noise=st.floats(0, 0.04),
    seed=st.integers(0, 99),
)
def test_what_is_found_fills_the_link(
    each: float, total: float, first: int, latency: float, noise: float, seed: int
) -> None:
    width, link = Width(first), Link(each, total, latency, noise, seed)
    run(width, link, 3.0)
    assert run(width, link, 2.0) >= 0.8 * link.best(64)


@given(each=st.floats(50 * MIB, 500 * MIB), total=st.floats(100 * MIB, 8000 * MIB), first=st.integers(8, 32))
def test_connections_stop_where_throughput_does(each: float, total: float, first: int) -> None:
    width, link = Width(first), Link(each, total, latency=0.001)
    run(width, link, 5.0, most=512)
    assert width.connections <= max(first, 32, 2.2 * total / each)


def test_a_link_that_one_size_fills_is_left_alone() -> None:
    width, link = Width(16), Link(2000 * MIB, 1800 * MIB)
    run(width, link, 3.0)
    assert width.connections == 16


def test_what_was_found_is_tried_again() -> None:
    width, link = Width(16), Link(85 * MIB, 1000 * MIB)
    run(width, link, 3.0)
    assert width.connections == 16
    link.total = 4000 * MIB  # the other tenant of the host is gone
    run(width, link, 30.0)
    assert width.connections == 64


def test_what_a_transfer_will_likely_come_to() -> None:
    assert [Width(first).likely for first in (4, 16, 24, 40)] == [8, 32, 32, 40]
    width = Width(8)
    assert width.likely == 16
    run(width, Link(2000 * MIB, 1800 * MIB), 1.0, most=8)
    assert width.likely == 8
    run(width, Link(85 * MIB, 8000 * MIB), 30.0)
    assert width.likely == 64


def test_what_is_interrupted_does_not_count() -> None:
    width = Width(16)
    for _ in range(100):
        width.moved(0.19, 10**9, 64)
        width.interrupted()
    assert width.connections == 16


def test_the_ceiling_holds() -> None:
    width = Width(16)
    run(width, Link(85 * MIB, 9000 * MIB), 3.0, most=24)
    assert width.connections == 24


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"), [(2, 1, 4), (2, 2, 4), (4, 1, 8), (96, 8, 24), (192, 8, 32), (0.5, 1, 4)]
)
def test_the_first_guess(cores: float, ranks: int, expected: int) -> None:
    assert first_width(cores, ranks) == expected
