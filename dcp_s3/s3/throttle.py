"""What holds requests back: S3's throttling, and DCP_S3_MAX_BANDWIDTH.

`Gate` limits this process's data requests in flight to one bucket; it is lowered when S3 throttles, by AIMD. Until S3
throttles there is no limit but the threads of each save and load. Then the limit is halved, and grows by one
for each successful round of requests; at the ceiling there is none again. Uploads and downloads share it. `Pace`
limits the bytes per second of all uploads. A forked child starts afresh.
"""

from __future__ import annotations

import collections
import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dcp_s3.events import Throttled, emit
from dcp_s3.process import reset_in_child

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1  # between looks at whether it is over, while a request waits
_LOG_SECONDS = 10.0  # between log lines about one bucket

# Of limited bandwidth: what may be made up for after a pause, and the sizes that are sent at once.
_BURST_SECONDS = 0.5
_SLICES_PER_SECOND = 8
_LEAST_SLICE, _MOST_SLICE = 16 * 2**10, 2**20


class Aimd:
    """Additive increase, multiplicative decrease of the number of requests in flight. Not thread safe.

    Only requests that began after the last decrease count: a burst that was in flight together lowers the limit once.
    Times are seconds of one clock.
    """

    def __init__(self, ceiling: int) -> None:
        self.ceiling = ceiling
        self._value = float(ceiling)
        self._decreased_at = -math.inf

    @property
    def limit(self) -> int:
        """Requests that may be in flight, from 1 to the ceiling."""
        return int(self._value)

    @property
    def is_open(self) -> bool:
        return self._value >= self.ceiling

    def raise_ceiling(self, ceiling: int) -> None:
        """Let the limit grow to ``ceiling``; an open limit stays open."""
        if self.is_open:
            self._value = float(ceiling)
        self.ceiling = ceiling

    def succeeded(self, began: float) -> None:
        """Note that a request that began at ``began`` succeeded."""
        if began > self._decreased_at:
            self._value = min(float(self.ceiling), self._value + 1 / self._value)

    def throttled(self, began: float, now: float) -> bool:
        """Note that a request that began at ``began`` was throttled; return whether the limit fell."""
        if began <= self._decreased_at:
            return False
        before = self.limit
        self._value = max(1.0, self._value / 2)
        self._decreased_at = now
        return self.limit < before


@dataclass(frozen=True)
class GateState:
    """A gate at one moment, with counts since the process began."""

    limit: int
    """Data requests that may be in flight."""
    in_flight: int
    """Data requests that are in flight."""
    waiting: int
    """Data requests that wait for their turn."""
    throttled: int
    """Requests that S3 throttled, small ones included."""
    decreases: int
    """Number of times that the limit fell."""
    waited: float
    """Total seconds that data requests waited."""


class Gate:
    """Holds data requests while as many are in flight as the limit allows. First come first served, thread safe."""

    def __init__(self, name: str, ceiling: int) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._aimd = Aimd(ceiling)
        self._in_flight = 0
        self._waiting: collections.deque[threading.Event] = collections.deque()
        self._throttled = 0
        self._decreases = 0
        self._waited = 0.0
        self._logged_at = -math.inf
        self._throttled_at = -math.inf

    def raise_ceiling(self, ceiling: int) -> None:
        """Let the limit grow to ``ceiling`` if that is higher."""
        if ceiling > self._aimd.ceiling:
            with self._lock:
                self._aimd.raise_ceiling(max(ceiling, self._aimd.ceiling))
                self._admit()

    def enter(self, *, is_over: Callable[[], bool] = lambda: False, timeout: float | None = None) -> bool:
        """Wait for a data request's turn; after True, call `leave` once.

        Args:
            is_over: whether to wait no longer.
            timeout: most seconds to wait.

        Returns:
            False if the turn did not come.
        """
        waiter = threading.Event()
        if self._queue(waiter):
            return True
        started = time.monotonic()
        admitted = False
        try:
            admitted = _wait(waiter, is_over, None if timeout is None else started + timeout)
        finally:
            self._end_wait(waiter, started, admitted=admitted)
        return admitted

    def _queue(self, waiter: threading.Event) -> bool:
        """Enter at once and return True, or append the waiter to the queue."""
        with self._lock:
            if self._is_free() and not self._waiting:
                self._in_flight += 1
                return True
            self._waiting.append(waiter)
            return False

    def _end_wait(self, waiter: threading.Event, started: float, *, admitted: bool) -> None:
        with self._lock:
            self._waited += time.monotonic() - started
            if not admitted:
                if waiter.is_set():  # at the last moment
                    self._in_flight -= 1
                    self._admit()
                else:
                    self._waiting.remove(waiter)

    def leave(self, began: float, *, succeeded: bool, throttled: bool) -> None:
        """Note the end of a data request that began at ``began`` (of time.monotonic)."""
        fell = False
        with self._lock:
            self._in_flight -= 1
            if succeeded:
                self._aimd.succeeded(began)
            elif throttled:
                fell = self._decrease(began)
            self._admit()
        if fell:
            self._tell()

    def signal(self, began: float) -> None:
        """Note that a small request, which does not wait here, was throttled."""
        with self._lock:
            fell = self._decrease(began)
        if fell:
            self._tell()

    def is_calm(self, seconds: float) -> bool:
        """Whether there is no limit, and S3 has not throttled for ``seconds``."""
        with self._lock:
            return self._aimd.is_open and time.monotonic() - self._throttled_at >= seconds

    @property
    def state(self) -> GateState:
        with self._lock:
            return GateState(
                self._aimd.limit,
                self._in_flight,
                len(self._waiting),
                self._throttled,
                self._decreases,
                self._waited,
            )

    def _is_free(self) -> bool:
        return self._aimd.is_open or self._in_flight < self._aimd.limit

    def _admit(self) -> None:
        while self._waiting and self._is_free():
            self._in_flight += 1
            self._waiting.popleft().set()

    def _tell(self) -> None:
        """Not under the lock: a subscriber may ask for the state."""
        state = self.state
        emit(Throttled(bucket=self._name, limit=state.limit, decreases=state.decreases))

    def _decrease(self, began: float) -> bool:
        """Note that S3 throttled; returns whether the limit fell."""
        now = time.monotonic()
        self._throttled += 1
        self._throttled_at = now
        if not self._aimd.throttled(began, now):
            return False
        self._decreases += 1
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            logger.info(
                "S3 throttles (%s): at most %d data requests in flight now, %d decreases so far",
                self._name, self._aimd.limit, self._decreases,
            )  # fmt: skip
        return True


def _wait(waiter: threading.Event, is_over: Callable[[], bool], until: float | None) -> bool:
    while True:
        left = math.inf if until is None else until - time.monotonic()
        if waiter.wait(max(0.0, min(_POLL_SECONDS, left))):
            return True
        if left <= 0 or is_over():
            return False


class Pace:
    """Lets so many bytes per second through: a token bucket. Thread safe, first come first served."""

    def __init__(self, rate: int) -> None:
        self.slice_size = max(_LEAST_SLICE, min(_MOST_SLICE, rate // _SLICES_PER_SECOND))
        """Most bytes to send at once: every connection gets its turn before S3 takes it for dead."""
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = -math.inf

    def reserve(self, count: int, now: float) -> float:
        """Take ``count`` bytes at the time ``now``; returns the seconds after which they may be sent."""
        with self._lock:
            start = max(self._free_at, now - _BURST_SECONDS)
            self._free_at = start + count / self._rate
        return max(0.0, start - now)

    def wait(self, count: int, cancel: threading.Event | None) -> float:
        """Wait until ``count`` bytes may be sent, or ``cancel`` is set; returns the seconds waited."""
        seconds = self.reserve(count, time.monotonic())
        if seconds and cancel is not None:
            cancel.wait(seconds)
        elif seconds:
            time.sleep(seconds)
        return seconds


_gates: dict[tuple[str | None, str], Gate] = {}
_paces: dict[int, Pace] = {}
_lock = threading.Lock()


@reset_in_child
def _begin_anew() -> None:
    global _lock
    _lock = threading.Lock()
    _gates.clear()
    _paces.clear()


def find_gate(endpoint_url: str | None, bucket: str) -> Gate | None:
    """This process's gate for a bucket, if it has been used."""
    return _gates.get((endpoint_url, bucket))


def gate_of(endpoint_url: str | None, bucket: str, ceiling: int) -> Gate:
    """This process's gate for a bucket, with a limit that may grow to ``ceiling``. Thread safe.

    Args:
        endpoint_url: endpoint URL of the settings; None for AWS's own chain.
    """
    key = (endpoint_url, bucket)
    gate = _gates.get(key)
    if gate is None:
        with _lock:
            gate = _gates.setdefault(key, Gate(_name(*key), ceiling))
    gate.raise_ceiling(ceiling)
    return gate


def pace_of(rate: int | None) -> Pace | None:
    """What all uploads of this process at ``rate`` bytes per second share; None for no limit."""
    if rate is None:
        return None
    with _lock:
        return _paces.setdefault(rate, Pace(rate))


def _name(endpoint_url: str | None, bucket: str) -> str:
    return f"s3://{bucket}" if endpoint_url is None else f"{endpoint_url}/{bucket}"


def snapshot() -> dict[str, GateState]:
    """The gates of this process, by ``{endpoint}/{bucket}`` (``s3://{bucket}`` where AWS's own chain decides)."""
    with _lock:
        gates = dict(_gates)
    return {_name(*key): gate.state for key, gate in gates.items()}
