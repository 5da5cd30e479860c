"""Saves and loads use as many connections as were found to fill the link, and change their number as they run."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.s3 import connections
from dcp_s3.s3.connections import Width, connections_of
from dcp_s3.s3.parts import GETS_PER_SECOND, PUTS_PER_SECOND, plan_part_size
from dcp_s3.s3.store import S3Store
from dcp_s3.s3.upload import WAITING_PARTS
from dcp_s3.settings import Settings
from dcp_s3.workers import Workers
from tests.faulty import BUCKET, FaultyServer

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

_PATIENCE_SECONDS = 60
MIB = 2**20
URL = f"s3://{BUCKET}/run"
SETTINGS = {"part_size": "5MiB"}


def state(value: float) -> dict[str, Any]:
    return {f"w{n}": torch.full((10 * MIB // 4,), value + n) for n in range(12)}


class Scripted(Width):
    """Goes through these numbers, one at each look."""

    numbers: list[int]

    def __init__(self, first: int) -> None:
        super().__init__(self.numbers[0])
        self._left = iter(self.numbers[1:])

    def moved(self, seconds: float, count: int, most: int) -> None:
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
            self._changed.wait_for(lambda: self.met, _PATIENCE_SECONDS)
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
        at_once: list[int] = []
        lock = threading.Lock()

        def rule(request: Any, operation: str = operation, at_once: list[int] = at_once, lock: Any = lock) -> None:
            if request.operation != operation or request.key.endswith("metadata"):
                return
            with lock:
                at_once.append(faulty.s3.in_flight)
                first = len(at_once) <= 4
            if first:
                assert resized.wait(_PATIENCE_SECONDS)
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
    faulty.rule = lambda request: (
        refused.wait(_PATIENCE_SECONDS) and None if request.operation == "UploadPart" else None
    )
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
