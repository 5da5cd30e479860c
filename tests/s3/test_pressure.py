"""How many requests are in flight: fewer while S3 throttles, as many connections as move more bytes otherwise."""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import botocore.exceptions as boto
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.limit import Cancelled, Limit, Progress
from dcp_s3.memory import Piece
from dcp_s3.s3 import pressure, retry
from dcp_s3.s3.multipart import GETS_PER_SECOND, PUTS_PER_SECOND, plan_part_size
from dcp_s3.s3.pressure import Gate, KnownBucket, Tuning, Width
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.objects import separate_objects
from tests.s3.waiting import LONG

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

MIB = 2**20
URL = f"s3://{BUCKET}/run"


@pytest.fixture(autouse=True)
def _idle_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pressure, "_cpu_ticks", lambda: (0, 0))


def closed_gate(*, taken: bool = False) -> Gate:
    """With one place, which may be taken."""
    gate = Gate("http://host/bucket")
    while gate.state.limit != 1:
        gate.throttled(time.monotonic())
    if taken:
        assert gate.enter()
    return gate


@given(st.integers(1, 64), st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 5)), max_size=60))
def test_the_limit_halves_and_grows_by_one_a_round(in_flight: int, events: list[tuple[bool, int, int]]) -> None:
    gate, clock = Gate("test"), SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pressure, "time", clock)
        for _ in range(in_flight):
            assert gate.enter()
        for success, pause, took in events:
            clock.now += pause
            before = gate.state.limit
            if success:
                gate.leave(clock.now - took, succeeded=True)
                gate._in_flight += 1
                after = gate.state.limit
                assert after is None or before is None or before <= after <= before + 1
            else:
                gate.throttled(clock.now - took)
                after = gate.state.limit
                assert after is not None or before is None
                assert after is None or after >= (before or in_flight) // 2
            assert after is None or 1 <= after <= max(in_flight, 4)


def test_a_burst_lowers_it_once_and_what_began_before_does_not_raise_it() -> None:
    gate = Gate("test")
    for _ in range(16):
        assert gate.enter()
    for _ in range(16):
        gate.throttled(0.0)
    assert (gate.state.limit, gate.state.throttled, gate.state.decreases) == (8, 16, 1)
    for _ in range(16):
        gate.leave(0.0, succeeded=True)
    assert gate.state.limit == 8
    rounds = 0
    while gate.state.limit is not None:
        assert gate.enter()
        gate.leave(math.inf, succeeded=True)
        rounds += 1
    assert 8 * 8 < rounds < 100, "open again at what was in flight"
    assert all(gate.enter() for _ in range(50))


def slow_down(status: int = 503, code: str = "SlowDown") -> boto.ClientError:
    return boto.ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "UploadPart")


def call(request: Callable[[], Any], gate: Gate, *, data: bool = True, **limit: Any) -> Any:
    known = KnownBucket("test")
    known.gate = gate
    return retry.Attempts("UploadPart", "b", "k", most=5, limit=Limit(**limit)).run(request, known, data=data)


def failing(*failures: Exception) -> Callable[[], str]:
    """Fails once with each."""
    left = list(failures)

    def request() -> str:
        if left:
            raise left.pop(0)
        return "done"

    return request


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (slow_down(), 1),
        (slow_down(503, "SlowDownWrite"), 1),
        (slow_down(429, "TooManyRequests"), 1),
        (slow_down(400, "Throttling"), 1),
        (slow_down(500, "InternalError"), 0),
        (ConnectionResetError(), 0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("data", [True, False])
def test_what_counts_as_throttling(error: Exception, counts: int, data: bool) -> None:
    gate = Gate("test")
    assert call(failing(error), gate, data=data) == "done"
    state = gate.state
    assert (state.throttled, state.decreases, state.in_flight) == (counts, counts, 0)
    assert state.limit == (2 if counts else None)


def test_a_throttled_request_has_no_place_while_it_waits_and_small_ones_need_none() -> None:
    gate, waiting, go_on = closed_gate(), threading.Event(), threading.Event()

    class Waits(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waiting.set()
            assert go_on.wait(LONG)
            return False

    with ThreadPoolExecutor(1) as pool:
        throttled = pool.submit(call, failing(slow_down()), gate, cancel=Waits())
        assert waiting.wait(LONG)
        assert gate.enter()
        assert call(failing(), gate, data=False) == "done"
        gate.leave(0, succeeded=False)
        go_on.set()
        assert throttled.result(LONG) == "done"


def test_only_what_succeeds_opens_the_gate() -> None:
    gate = closed_gate()
    for error in (KeyError("x"), ConnectionResetError()):
        with pytest.raises((KeyError, errors.TransferError)):
            call(failing(error), gate, patience=0.0)
        assert gate.state.limit == 1
    call(failing(), gate)
    assert gate.state.limit == 2


def test_waiting_at_the_gate_uses_up_the_patience_and_ends_when_it_is_cancelled() -> None:
    gate, cancel = closed_gate(taken=True), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, lambda: "never", gate, cancel=cancel)
        time.sleep(0.05)
        assert not waiting.done()
        cancel.set()
        assert isinstance(waiting.exception(LONG), Cancelled)
    with pytest.raises(errors.TransferError, match="S3 throttles") as failure:
        call(lambda: pytest.fail("not its turn"), gate, patience=0.05)
    assert failure.value.key == "k"
    with pytest.raises(errors.DeadlineExceededError, match="next to nothing moved"):
        call(lambda: pytest.fail("not its turn"), gate, progress=Progress(0.2))
    assert gate.state.in_flight == 1


def test_a_save_and_a_load_go_on_with_as_many_requests_as_s3_takes(faulty: FaultyServer) -> None:
    """The server takes three data requests at a time. Each tensor is an object of its own."""
    refused, lock = [0], threading.Lock()

    def rule(request: Any) -> Fault | None:
        if request.operation not in ("PutObject", "UploadPart", "GetObject"):
            return None
        if faulty.s3.in_flight <= 3:
            return Fault.delay(0.01)
        with lock:
            refused[0] += 1
        return Fault.error(503, "SlowDown")

    faulty.rule = rule
    settings = {"concurrency": 16, "retry_attempts": 100}
    state = {f"t{n}": torch.full((100,), float(n)) for n in range(60)}
    with separate_objects(*state):
        dcp.save(state, storage_writer=S3StorageWriter(URL, settings=settings))
    found = {name: torch.zeros(100) for name in state}
    dcp.load(found, storage_reader=S3StorageReader(URL, settings=settings))
    assert all(torch.equal(found[name], state[name]) for name in state)
    gate = dcp_s3.stats().throttle[S3Store(BUCKET, Settings()).known.name]
    assert gate.throttled == refused[0] > 0
    assert 1 <= gate.decreases <= gate.throttled
    assert gate.in_flight == 0


# --- connections, on a clock of its own -------------------------------------------------------------------


class Transfer:
    """One whose connections carry ``each`` bytes per second, and ``total`` all together."""

    def __init__(self, width: Width, each: float, total: float, *, most: int = 64, noise: float = 0.0) -> None:
        self.now, self.is_busy, self.each, self.total = 0.0, True, each, total
        self._noise, self._random = noise, random.Random(0)
        self.known = KnownBucket("test")
        self.known.widths["upload"] = width
        self.sizes: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pressure, "time", self)
            patch.setattr(KnownBucket, "width", lambda *_: width)
            self.tuning = Tuning(
                self.known, "upload", resize=self.sizes.append, is_busy=lambda: self.is_busy, most=most
            )

    def monotonic(self) -> float:
        return self.now

    def run(self, seconds: float) -> float:
        """Bytes per second in that time."""
        moved, tick = 0.0, 0.01
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pressure, "time", self)
            for _ in range(round(seconds / tick)):
                self.now += tick
                rate = min(self.tuning.connections * self.each, self.total)
                count = rate * tick * (1 + self._random.uniform(-self._noise, self._noise))
                self.tuning.moved(int(count))
                moved += count
        return moved / seconds


@given(
    each=st.floats(10 * MIB, 500 * MIB), total=st.floats(100 * MIB, 8000 * MIB), first=st.integers(4, 32),
    noise=st.floats(0, 0.04),
)  # fmt: skip
def test_connections_that_are_slow_one_by_one_become_as_many_as_fill_the_link(
    each: float, total: float, first: int, noise: float
) -> None:
    transfer = Transfer(width := Width(first), each, total, noise=noise)
    transfer.run(3.0)
    assert transfer.run(1.0) >= 0.8 * min(64 * each, total, max(first * each, first * 250e6))
    assert width.connections <= max(first, 32, 2.2 * total / each)
    assert width.connections == transfer.tuning.connections == (transfer.sizes or [first])[-1]


def test_what_a_transfer_found_the_next_begins_with_and_after_a_while_it_is_tried_again() -> None:
    width = Width(4)
    first = Transfer(width, 2000 * MIB, 1800 * MIB)
    first.run(1.0)
    assert (first.sizes, width.connections) == ([], 4)
    first.total, first.each = 8000 * MIB, 85 * MIB  # the other tenant of the host is gone
    first.run(10.0)
    assert first.sizes == []
    first.run(60.0)
    assert first.sizes == [32, 64]
    assert width.connections == 64
    assert Transfer(width, 1.0, 1.0, most=3).tuning.connections == 3


@pytest.mark.parametrize("why", ["idle", "throttled", "no more", "busy host"])
def test_when_nothing_is_learned(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = Transfer(width := Width(4), 85 * MIB, 8000 * MIB, most=4 if why == "no more" else 64)
    transfer.is_busy = why != "idle"
    if why == "busy host":
        monkeypatch.setattr(pressure, "_cpu_ticks", lambda: (0, round(100 * transfer.now)))
    if why == "throttled":
        transfer.known.gate.throttled(0.0)
    transfer.run(3.0)
    assert width.connections == 4


@pytest.mark.parametrize("are_worth_it", [True, False])
def test_connections_whose_worth_a_transfer_did_not_see_are_judged_by_the_next(are_worth_it: bool) -> None:
    total = 8000 * MIB if are_worth_it else 360 * MIB
    first = Transfer(width := Width(4), 85 * MIB, total)
    while first.sizes != [32]:
        first.run(0.01)
    assert width.connections == 32
    second = Transfer(width, 85 * MIB, total)
    second.run(2.0)
    assert (second.sizes, width.connections) == (([64], 64) if are_worth_it else ([4], 4))


@pytest.mark.parametrize(
    ("cores", "ranks", "latency", "counts"),
    [
        (2, 1, 0, (4, 4)), (2, 1, 0.1, (32, 32)), (2, 4, 0.1, (8, 8)), (16, 1, 0.001, (4, 8)), (96, 8, 0, (4, 8)),
        (6, 2, 0, (4, 6)), (1, 8, 0.1, (4, 4)),
    ],
)  # fmt: skip
def test_a_transfer_begins_with_as_many_as_keep_cores_busy_and_leave_the_training_its_time(
    cores: int, ranks: int, latency: float, counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(cores))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    known = KnownBucket("test")
    known.latency = latency
    assert (known.width("upload").connections, known.width("download").connections) == counts
    known.widths["upload"].connections = 7
    assert known.width("upload").connections == counts[0], "nothing was measured"
    known.widths["upload"] = Width(7, rate=1e6)
    assert known.width("upload").connections == 7


@pytest.mark.parametrize("delay", [0.0, 0.1])
def test_a_store_that_answers_late_is_far(faulty: FaultyServer, delay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by an answer that something is missing, and a rank that asks for nothing beforehand by its first upload."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    monkeypatch.setattr(pressure, "_FAR_SECONDS", 0.09)  # a busy host answers late
    faulty.rule = lambda request: Fault.delay(delay) if request.operation != "UploadPart" else None
    store = S3Store(BUCKET, Settings())
    if not delay:
        assert not store.exists("nothing")
    with store.batch(total=64 * MIB) as batch:
        batch.put_stream("key", 10 * MIB, [Piece.of(bytes(10 * MIB))], part_size=5 * MIB)
    assert (store.known.latency > 0.09) == bool(delay)
    upload = dcp_s3.stats().connections[f"{store.known.name} upload"]
    assert upload["connections"] == store.read_width() == (32 if delay else 4)


def gather(faulty: FaultyServer, operation: str, count: int) -> threading.Event:
    """Hold requests of one operation back until ``count`` are there together; only the first one passes at once."""
    met, seen = threading.Event(), list[Any]()

    def rule(request: Any) -> None:
        if request.operation == operation and not request.key.endswith("metadata"):
            seen.append(request)
            if faulty.s3.in_flight >= count:
                met.set()
            if len(seen) > 1:
                met.wait(LONG)

    faulty.s3.reset_counters()
    faulty.rule = rule
    return met


def large_state(value: float) -> dict[str, Any]:
    return {f"w{n}": torch.full((10 * MIB // 4,), value + n) for n in range(12)}


@pytest.fixture
def widened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer begins with two connections, and has five (or its ceiling) after the first bytes."""
    for name, value in {"_FEW": 2, "_NEAR_PER_CORE": 0, "_FAR_PER_CORE": 0}.items():
        monkeypatch.setattr(pressure, name, value)

    def moved(self: Tuning, count: int) -> None:
        if not self._is_over and self.connections < 5:
            with self._lock:
                self._change(min(5, self._most))

    monkeypatch.setattr(Tuning, "moved", moved)


@pytest.mark.usefixtures("widened")
@pytest.mark.parametrize("ceiling", ["auto", 3])
def test_a_save_and_a_load_use_more_connections_as_they_run(faulty: FaultyServer, ceiling: Any) -> None:
    settings, expected = {"part_size": "5MiB", "concurrency": ceiling}, 5 if ceiling == "auto" else 3
    met = gather(faulty, "UploadPart", expected)
    dcp.save(large_state(1.0), storage_writer=S3StorageWriter(URL, max_objects=1, settings=settings))
    assert (met.is_set(), faulty.s3.counters.peak_in_flight) == (True, expected)
    met = gather(faulty, "GetObject", expected)
    found = large_state(0.0)
    dcp.load(found, storage_reader=S3StorageReader(URL, settings=settings))
    assert (met.is_set(), faulty.s3.counters.peak_in_flight) == (True, expected)
    assert all(torch.equal(found[name], value) for name, value in large_state(1.0).items())
    told, name = dcp_s3.stats().connections, S3Store(BUCKET, Settings()).known.name
    assert [told[f"{name} {each}"]["connections"] for each in ("upload", "download")] == [expected] * 2


@pytest.mark.parametrize(
    ("total", "part"),
    [(1, 8), (256 * MIB, 8), (1024 * MIB, 32), (3072 * MIB, 48), (4096 * MIB, 64), (100 * 1024 * MIB, 64)],
)
def test_every_connection_has_parts_to_send(total: int, part: int) -> None:
    found = plan_part_size(total, connections=32, ranks=1, most=64 * MIB, requests_per_second=PUTS_PER_SECOND)
    assert found == part * MIB


@pytest.mark.parametrize("ranks", [8, 512, 4096])
@pytest.mark.parametrize("gib", [0.5, 4, 30])
def test_all_ranks_together_stay_below_what_s3_takes(ranks: int, gib: float) -> None:
    total = int(gib * 2**30)
    for most_per_second in (PUTS_PER_SECOND, GETS_PER_SECOND):
        part = plan_part_size(total, connections=32, ranks=ranks, most=64 * MIB, requests_per_second=most_per_second)
        seconds = total / (min(32, total / part) * 90e6)
        assert ranks * total / part / seconds <= 1.01 * most_per_second
