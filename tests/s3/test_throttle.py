"""S3 throttles: fewer requests in flight, for uploads and downloads together, until it takes more again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import botocore.exceptions as boto
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3 import errors
from dcp_s3.limit import UNLIMITED, Cancelled, Limit
from dcp_s3.s3 import retry
from dcp_s3.s3.throttle import Aimd, Gate
from tests.s3.waiting import LONG, until

pytestmark = [
    pytest.mark.usefixtures("new_gates"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def slow_down(status: int = 503, code: str = "SlowDown") -> boto.ClientError:
    return boto.ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "UploadPart")


Events = st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(0, 5)), max_size=60)


@given(st.integers(1, 512), Events)
def test_the_limit_stays_between_one_and_the_ceiling(ceiling: int, events: list[tuple[bool, int, int]]) -> None:
    aimd, now = Aimd(ceiling), 0
    for success, pause, took in events:
        now += pause
        before = aimd.limit
        if success:
            aimd.succeeded(now - took)
            assert before <= aimd.limit <= before + 1
        else:
            fell = aimd.throttled(now - took, now)
            assert fell == (aimd.limit < before)
            assert aimd.limit >= before // 2
        assert 1 <= aimd.limit <= ceiling
        assert aimd.is_open == (aimd.limit == ceiling)


@given(st.integers(2, 512), st.integers(1, 600))
def test_a_burst_lowers_it_once(ceiling: int, burst: int) -> None:
    aimd = Aimd(ceiling)
    assert [aimd.throttled(0, 1 + n) for n in range(burst)] == [True] + [False] * (burst - 1)
    assert aimd.limit == ceiling // 2


@given(st.integers(2, 64), st.integers(1, 8))
def test_requests_that_began_before_do_not_raise_it_and_later_ones_do_by_one_a_round(ceiling: int, rounds: int) -> None:
    aimd = Aimd(ceiling)
    aimd.throttled(0, 10)
    lowered = aimd.limit
    for _ in range(100):
        aimd.succeeded(9)
    assert aimd.limit == lowered
    for _ in range(rounds):
        before = aimd.limit
        for _ in range(before + 1):
            aimd.succeeded(11)
        assert min(before + 1, ceiling) <= aimd.limit <= before + 2
    for _ in range(ceiling * ceiling):
        aimd.succeeded(11)
    assert aimd.is_open


def test_a_decrease_for_each_round_trip_leads_to_one() -> None:
    aimd = Aimd(64)
    limits = []
    for now in range(1, 9):
        aimd.throttled(now - 0.5, now)
        limits.append(aimd.limit)
    assert limits == [32, 16, 8, 4, 2, 1, 1, 1]


def test_a_higher_ceiling_lifts_a_limit_only_where_it_was_open() -> None:
    opened, closed = Aimd(4), Aimd(4)
    closed.throttled(0, 1)
    for aimd in (opened, closed):
        aimd.raise_ceiling(16)
    assert (opened.limit, closed.limit) == (16, 2)


# --- the gate ----------------------------------------------------------------------------------------


def closed_gate(limit: int) -> Gate:
    """With ``limit`` places, none of them taken."""
    gate = Gate("test", 2 * limit)
    gate.signal(time.monotonic())
    assert gate.state.limit == limit
    return gate


def test_an_open_gate_lets_everybody_pass() -> None:
    gate = Gate("test", 2)
    assert all(gate.enter(timeout=0) for _ in range(50))
    assert (gate.state.in_flight, gate.state.waited) == (50, 0.0)


def test_first_come_first_served() -> None:
    gate = closed_gate(1)
    assert gate.enter()
    served: list[int] = []

    def wait(number: int) -> None:
        assert gate.enter(timeout=LONG)
        served.append(number)
        gate.leave(0, succeeded=False, throttled=False)

    with ThreadPoolExecutor(5) as pool:
        for number in range(5):
            pool.submit(wait, number)
            until(lambda number=number: gate.state.waiting == number + 1)  # type: ignore[misc]
        assert not gate.enter(timeout=0), "behind those that wait"
        gate.leave(0, succeeded=False, throttled=False)
    assert served == [0, 1, 2, 3, 4]
    assert (gate.state.in_flight, gate.state.waiting) == (0, 0)
    assert gate.state.waited > 0


def test_cancelling_ends_the_wait_and_leaves_no_trace() -> None:
    gate, cancel = closed_gate(1), threading.Event()
    assert gate.enter()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gate.enter, is_over=cancel.is_set)
        until(lambda: gate.state.waiting == 1)
        cancel.set()
        assert waiting.result(LONG) is False
    assert (gate.state.in_flight, gate.state.waiting) == (1, 0)
    gate.leave(0, succeeded=False, throttled=False)
    assert gate.enter(timeout=0)


def test_a_turn_that_comes_as_its_waiter_gives_up_is_not_lost() -> None:
    gate = closed_gate(1)
    assert gate.enter()

    class Late(threading.Event):
        def is_set(self) -> bool:
            gate.leave(0, succeeded=False, throttled=False)
            return True

    assert not gate.enter(is_over=Late().is_set)
    assert (gate.state.in_flight, gate.state.waiting) == (0, 0)
    assert gate.enter(timeout=0)


def test_success_admits_more_than_it_frees() -> None:
    gate = closed_gate(1)
    assert gate.enter()
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(gate.enter, timeout=LONG) for _ in range(2)]
        until(lambda: gate.state.waiting == 2)
        gate.leave(time.monotonic(), succeeded=True, throttled=False)
        assert all(each.result(LONG) for each in waiting)
    assert gate.state.limit == 2


def test_many_threads_never_exceed_the_limit() -> None:
    gate, lock = closed_gate(3), threading.Lock()
    inside, most = [0], [0]

    def work(_: int) -> None:
        assert gate.enter(timeout=LONG)
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        with lock:
            inside[0] -= 1
        gate.leave(0, succeeded=False, throttled=False)  # neither: the limit stays

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(2000)))
    assert 1 <= most[0] <= 3
    assert (gate.state.in_flight, gate.state.waiting) == (0, 0)


def test_decreases_are_logged_with_the_limit_but_not_each(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate("http://host/bucket", 64)
    with caplog.at_level("INFO", "dcp_s3.s3.throttle"):
        for _ in range(4):
            gate.signal(time.monotonic())
    assert [record.getMessage() for record in caplog.records] == [
        "S3 throttles (http://host/bucket): at most 32 data requests in flight now, 1 decreases so far"
    ]
    assert (gate.state.limit, gate.state.decreases, gate.state.throttled) == (4, 4, 4)


# --- the retry loop ----------------------------------------------------------------------------------


def call(request: Callable[[], Any], gate: Gate, **options: Any) -> Any:
    options = {"attempts": 5, "data": True, "limit": UNLIMITED} | options
    tries = retry.Tries("UploadPart", "b", "k", options["attempts"], options["limit"])
    return retry.call(request, tries, gate=gate, data=options["data"])


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (slow_down(), 1),
        (slow_down(503, "ServiceUnavailable"), 1),
        (slow_down(503, "SlowDownWrite"), 1),
        (slow_down(429, "TooManyRequests"), 1),
        (slow_down(400, "Throttling"), 1),
        (slow_down(500, "InternalError"), 0),
        (ConnectionResetError(), 0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("data", [True, False])
def test_what_counts_as_throttling(error: Exception, counts: int, data: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "backoff", lambda _: 0.0)
    gate, failures = Gate("test", 8), [error]

    def request() -> str:
        if failures:
            raise failures.pop()
        return "done"

    assert call(request, gate, data=data) == "done"
    state = gate.state
    assert (state.throttled, state.decreases, state.in_flight) == (counts, counts, 0)
    assert state.limit == (8 if not counts else 4)


def test_a_bug_gives_its_place_back() -> None:
    gate = closed_gate(1)
    with pytest.raises(KeyError):
        call(lambda: {}["x"], gate)
    assert gate.state.in_flight == 0


def test_a_throttled_request_has_no_place_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, waiting, go_on = closed_gate(1), threading.Event(), threading.Event()

    class Waits(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waiting.set()
            assert go_on.wait(LONG)
            return False

    failures = [slow_down()]

    def request() -> str:
        if failures:
            raise failures.pop()
        return "done"

    with ThreadPoolExecutor(1) as pool:
        throttled = pool.submit(call, request, gate, limit=Limit(cancel=Waits()))
        assert waiting.wait(LONG)
        assert call(lambda: "another", gate) == "another"
        go_on.set()
        assert throttled.result(LONG) == "done"


def test_small_requests_never_wait() -> None:
    gate = closed_gate(1)
    assert gate.enter()
    assert call(lambda: "small", gate, data=False) == "small"
    assert gate.state.in_flight == 1


def test_waiting_at_the_gate_uses_up_the_patience() -> None:
    gate = closed_gate(1)
    assert gate.enter()
    with pytest.raises(errors.TransferError, match="S3 throttles") as failure:
        call(lambda: pytest.fail("not its turn"), gate, limit=Limit(patience=0.05))
    assert failure.value.key == "k"
    assert gate.state.waiting == 0


def test_a_cancelled_request_does_not_wait_on() -> None:
    gate, cancel = closed_gate(1), threading.Event()
    assert gate.enter()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(call, lambda: "never", gate, limit=Limit(cancel=cancel))
        until(lambda: gate.state.waiting == 1)
        cancel.set()
        with pytest.raises(Cancelled):
            waiting.result(LONG)
