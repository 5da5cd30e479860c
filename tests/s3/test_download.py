"""Ranged GETs into memory: those that break resume where they broke, those that straggle are raced by a second one.

The bytes are right whoever wins, and nothing is left behind.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import dcp_s3
from dcp_s3 import errors
from dcp_s3.limit import Cancelled, Limit
from dcp_s3.memory import ReadTarget, crc64nvme
from dcp_s3.s3 import hedge, retry
from dcp_s3.s3.download import Race, _Request
from dcp_s3.s3.hedge import HedgeState
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.faulty import FaultyServer
from tests.memory_s3 import Fault
from tests.s3.waiting import LONG

MIB = 2**20
BLOCK = 4 * MIB
NEVER = 1000.0  # seconds that no test waits
DATA = random.Random(5).randbytes(10 * MIB)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a process that knows nothing yet, and hedges early; it must leave no threads and no sockets of requests."""
    monkeypatch.setattr(hedge, "_START_HEAD", 0.05)
    monkeypatch.setattr(hedge, "_START_PER_BYTE", 1e-9)
    monkeypatch.setattr(hedge, "_MIN_DELAY", 0.3)  # of a busy machine, the second request may take 0.05 s, too
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("dcp_s3-hedge")]


@pytest.fixture
def unhedged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hedge, "_MIN_DELAY", NEVER)


class Script:
    """What happens to the GETs, by their order of arrival."""

    def __init__(self, *faults: Fault | Callable[[], Fault | None] | None, rest: Fault | None = None) -> None:
        self.faults: tuple[Any, ...] = faults
        self._rest, self._lock, self.seen = rest, threading.Lock(), list[Any]()
        self.arrived = [threading.Event() for _ in range(20)]

    def __call__(self, request: Any) -> Fault | None:
        if request.operation != "GetObject":
            return None
        with self._lock:
            number = len(self.seen)
            self.seen.append(request)
        self.arrived[number].set()
        fault = self.faults[number] if number < len(self.faults) else self._rest
        return fault() if callable(fault) else fault

    @property
    def ranges(self) -> list[str]:
        return [request.range for request in self.seen]

    def after(self, number: int, fault: Fault | None = None) -> Callable[[], Fault | None]:
        """``fault``, when GET ``number`` has arrived."""

        def wait() -> Fault | None:
            assert self.arrived[number].wait(LONG)
            return fault

        return wait


def put(**settings: Any) -> S3Store:
    bucket = S3Store("bucket", Settings(**settings))
    bucket.put("k", DATA)
    return bucket


def fetch(bucket: S3Store) -> None:
    """Into memory in pieces, with checksums; all of it is compared."""
    memory = [bytearray(size) for size in (3 * MIB, 5, 6 * MIB, MIB - 5)]
    targets = [ReadTarget(memoryview(each), checksum=True) for each in memory]
    bucket.read("k", 0, targets)
    assert b"".join(memory) == DATA
    assert [target.crc for target in targets] == [crc64nvme(bytes(each)) for each in memory]


def state_of(bucket: S3Store) -> HedgeState:
    return bucket.known.hedges.state


@pytest.mark.usefixtures("unhedged")
def test_a_broken_body_resumes_at_the_byte_reached(faulty: FaultyServer) -> None:
    faulty.rule = script = Script(*[Fault.truncate(after_bytes=4_000_000)] * 2)
    fetch(put())
    assert script.ranges == [f"bytes={n}-{len(DATA) - 1}" for n in (0, 4_000_000, 8_000_000)]


def test_attempts_run_out_only_without_progress(faulty: FaultyServer) -> None:
    """Ten breaks, three attempts: where each attempt moved on, the download goes on."""
    target = put(retry_attempts=3)
    faulty.rule = lambda _: Fault.truncate(after_bytes=MIB)
    fetch(target)
    faulty.rule = lambda _: Fault.truncate(after_bytes=0)
    with pytest.raises(errors.TransferError, match="after 3 attempts"):
        fetch(target)


@pytest.mark.usefixtures("unhedged")
def test_an_object_replaced_between_attempts_is_not_mixed(faulty: FaultyServer) -> None:
    target = put()

    def replace() -> Fault:
        target.put("k", b"x" * len(DATA))
        return Fault.error(503, "SlowDown")

    faulty.rule = Script(Fault.truncate(after_bytes=1000), replace)
    with pytest.raises(errors.PreconditionFailedError, match="changed by someone else"):
        target.read("k", 0, [ReadTarget(memoryview(bytearray(len(DATA))))])


def test_a_late_head_is_overtaken(faulty: FaultyServer) -> None:
    bucket = put()
    faulty.rule = script = Script(Fault.straggle(NEVER))
    fetch(bucket)
    assert set(script.ranges) == {f"bytes=0-{len(DATA) - 1}"}
    state = bucket.known.hedges.state
    assert (state.won, state.wasted) == (1, 0)
    assert dcp_s3.stats().hedges[bucket.known.name] == state


@pytest.mark.parametrize(
    "fault", [Fault.stall(8 * MIB, NEVER), Fault.crawl(100_000, after_bytes=8 * MIB)], ids=lambda fault: fault.kind
)
def test_of_a_body_that_stops_only_the_rest_is_asked_for_and_of_the_same_version(
    faulty: FaultyServer, fault: Fault
) -> None:
    bucket = put()
    faulty.rule = script = Script(fault)
    fetch(bucket)
    assert script.ranges[0] == f"bytes=0-{len(DATA) - 1}"
    assert script.ranges[1].endswith(f"-{len(DATA) - 1}")
    reached = int(script.ranges[1].removeprefix("bytes=").partition("-")[0])
    # The memory's pieces are 3 MiB, 5 bytes, 6 MiB, ...; the 6 MiB come as 4 and 2, or as they crawl.
    assert reached >= 9 * MIB + 5 - 2 * MIB
    assert "if-match" in script.seen[1].headers
    assert state_of(bucket).won == 1


def test_a_second_request_that_is_slower_is_ended(faulty: FaultyServer) -> None:
    bucket = put()
    faulty.rule = script = Script(rest=Fault.straggle(NEVER))
    script.faults = (script.after(1),)
    began = time.monotonic()
    fetch(bucket)
    assert time.monotonic() - began < LONG, "it waited for the other one's timeout"
    assert state_of(bucket).won == 0
    assert state_of(bucket).started >= 1


@pytest.mark.parametrize("fault", [Fault.error(500, "InternalError"), Fault.reset(), Fault.truncate(MIB)])
def test_errors_of_the_second_request_are_nobodys(
    faulty: FaultyServer, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    bucket = put()
    faulty.rule = script = Script()
    script.faults = (script.after(1), fault)
    with caplog.at_level(logging.INFO):
        fetch(bucket)
    assert not [record for record in caplog.records if record.name.startswith("dcp_s3")]
    assert len(script.seen) == 2
    assert (state_of(bucket).started, state_of(bucket).won) == (1, 0)


@pytest.mark.parametrize("attempts", [1, 5])
def test_the_second_request_saves_a_read_that_has_failed_or_waits(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, attempts: int
) -> None:
    bucket = put(retry_attempts=attempts)
    monkeypatch.setattr(retry, "backoff", lambda _: NEVER)
    faulty.rule = script = Script()
    script.faults = (script.after(1, Fault.error(500, "InternalError")), Fault.delay(0.1))
    fetch(bucket)
    assert (len(script.seen), state_of(bucket).won) == (2, 1)


def test_an_object_replaced_meanwhile_is_not_mixed(faulty: FaultyServer) -> None:
    bucket, replaced = put(), threading.Event()

    def replace() -> None:
        bucket.put("k", bytes(len(DATA)))
        replaced.set()

    def wait() -> None:
        assert replaced.wait(LONG)

    faulty.rule = Script(Fault.stall(9 * MIB, 1.0), replace, wait, wait)
    fetch(bucket)
    assert state_of(bucket).started >= 1
    assert state_of(bucket).won == 0


@pytest.mark.parametrize(
    ("ours", "theirs", "done", "wins"),
    [("a", "a", 4, True), ("b", "a", 4, False), ("b", "a", 0, True), (None, None, 4, False), (None, None, 0, True)],
)
def test_a_second_request_wins_only_with_the_version_of_what_is_there(
    faulty: FaultyServer, ours: str | None, theirs: str | None, done: int, wins: bool
) -> None:
    """The first one's head may come after the second was begun, of any version, or of one without an ETag."""
    race, data = Race(put(), "k", 0, [ReadTarget(memoryview(bytearray(10)))]), memoryview(bytearray(10))
    second = _Request("k", 0, [ReadTarget(data)], [theirs] if theirs else [], None, race.hedges)
    second.advance(10)  # it has all its bytes
    race.own.etag += [ours] if ours else []
    if done:
        race.own.advance(done)
    assert (race.overtake(second, data, 0) is not None) is wins
    assert race.own.stop.is_set() is wins
    assert (None if race.own.rest is None else race.own.rest.nbytes) == (10 - done if wins else None)


def test_cancelling_ends_both_at_once(faulty: FaultyServer) -> None:
    bucket, cancel = put(), threading.Event()
    faulty.rule = script = Script(rest=Fault.straggle(NEVER))
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(fetch, bucket.within(Limit(cancel=cancel)))
        assert script.arrived[1].wait(LONG)
        cancel.set()
        assert isinstance(read.exception(LONG), Cancelled)


NOT_RACED: dict[str, Callable[[S3Store, pytest.MonkeyPatch], object]] = {
    "while S3 throttles": lambda bucket, _: bucket.known.gate.throttled(0.0),
    "too long": lambda _, patch: patch.setattr("dcp_s3.s3.download._MOST_BYTES", len(DATA) - 1),
    "before the delay": lambda _, patch: patch.setattr(hedge, "_MIN_DELAY", NEVER),
    "beside too many others": lambda bucket, _: [bucket.known.hedges.started(400) for _number in range(100)],
    "a store that is known to be slow": lambda bucket, _: [
        bucket.known.hedges.completed(NEVER, 1.0, BLOCK) for _number in range(8)
    ],
}


@pytest.mark.parametrize("why", NOT_RACED)
def test_what_is_not_raced(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    bucket = put()
    NOT_RACED[why](bucket, monkeypatch)
    faulty.rule = script = Script(Fault.straggle(0.4))
    fetch(bucket)
    assert len(script.seen) == 1


def test_connections_that_were_shut_down_are_not_used_again(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one attempt each, a request on a dead connection would fail."""
    bucket = put(retry_attempts=1)
    for fault in [Fault.straggle(NEVER), Fault.stall(9 * MIB, NEVER), Fault.stall(0, NEVER)]:
        faulty.rule = Script(fault)
        fetch(bucket)
        faulty.rule = Script()
        fetch(bucket)
        fetch(bucket)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_the_bytes_are_right_and_nothing_is_left(
    faulty: FaultyServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hedge, "_MIN_DELAY", 0.05)
    bucket = put(retry_attempts=20)
    rng, lock = random.Random(seed), threading.Lock()

    def rule(request: Any) -> Fault | None:
        if request.operation != "GetObject":
            return None
        with lock:
            kind, place = rng.random(), rng.randrange(3 * MIB)
            seconds = rng.choice([0.04, 0.06, 0.08, 0.1, 0.3])  # about as long as a race takes to begin and to end
        return (
            Fault.straggle(seconds) if kind < 0.2
            else Fault.stall(place, seconds) if kind < 0.4
            else Fault.crawl(30e6, after_bytes=place) if kind < 0.5
            else Fault.truncate(place) if kind < 0.55
            else Fault.reset_response(place) if kind < 0.6
            else Fault.reset(seconds=seconds) if kind < 0.65
            else None
        )  # fmt: skip

    def read(number: int) -> None:
        random_read = random.Random(1000 * seed + number)
        start = random_read.randrange(len(DATA) // 2)
        sizes = [random_read.choice([1, 1000, 500_000, 1_500_000]) for _ in range(3)]
        memory = [bytearray(size) for size in sizes]
        targets = [ReadTarget(memoryview(each), checksum=True) for each in memory]
        bucket.read("k", start, targets)
        assert b"".join(memory) == DATA[start : start + sum(sizes)]
        assert [target.crc for target in targets] == [crc64nvme(bytes(each)) for each in memory]

    faulty.rule = rule
    for batch in range(10):  # a busy machine hedges less: until there was a race of each outcome
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(read, range(60 * batch, 60 * (batch + 1))))
        state = state_of(bucket)
        if 0 < state.won < state.started:
            break
    assert 0 < state.won < state.started
    assert bucket.known.hedges._running == 0
    assert bucket.known.gate.state.in_flight == 0
