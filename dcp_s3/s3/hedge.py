"""When a GET is hedged: the known latencies of a bucket's requests, the budget of second requests, and their outcome.

`Hedges` is shared by the reads of one bucket (`download.Race`). It has the thread that watches them, alive only while
there are any. A forked child starts afresh.
"""

from __future__ import annotations

import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from dcp_s3.process import reset_in_child
from dcp_s3.s3.connections import connections_of
from dcp_s3.s3.operations import Bucket
from dcp_s3.s3.ranged import Timing

_WINDOW = 256
_ENOUGH = 8  # samples; with fewer, `START` counts
# Shorter bodies say more about the client's scheduling than about the bandwidth.
_MIN_BODY = 256 * 2**10
# The rate is of whole bodies; single blocks vary more.
_BLOCK_FACTOR = 2.0

INTERVAL = 0.02
"""Seconds between two looks at the requests in flight."""

# A GET is hedged if it takes longer than nearly all earlier ones, to its first byte or between two blocks of its body.
_PERCENTILE = 95.0
# Seconds without a byte, at least: nearly all requests get S3's first byte within that; stragglers take seconds.
_MIN_DELAY = 0.2
# A hedge per ten requests, and a few for the beginning of a process: if more straggle, the store is slow.
_BUDGET_SHARE, _BUDGET_START, _BUDGET_MOST = 0.1, 4, 16
# Hedges at once, each with a buffer of at most a request's size: a quarter of the requests, but at least two.
_SHARE_AT_ONCE, _LEAST_AT_ONCE = 4, 2
_CALM = 30.0  # seconds without throttling before anything is asked for twice


Look = Callable[[float], None]
"""Begins a second request of one read, if it is time; called with the seconds since the last look."""


@dataclass(frozen=True)
class HedgeState:
    """Outcome of the second requests to one bucket, counted since the process began."""

    started: int = 0
    """Second requests that were made."""
    won: int = 0
    """Second requests that were faster."""
    bytes: int = 0
    """Bytes that second requests received, in whole blocks."""
    wasted: int = 0
    """Bytes that were received twice, in whole blocks."""


class Hedges:
    """State that the reads of one bucket share. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: set[Look] = set()
        self._watcher: tuple[threading.Thread, threading.Event] | None = None
        self._latencies = Latencies()
        self._budget = Budget(_BUDGET_SHARE, _BUDGET_START, _BUDGET_MOST)
        self._running = 0
        self._state = HedgeState()

    @property
    def state(self) -> HedgeState:
        with self._lock:
            return self._state

    def enter(self, look: Look) -> None:
        """Watch a read from now on."""
        with self._lock:
            self._reads.add(look)
            self._budget.earn()
            if self._watcher is None:
                ended = threading.Event()
                thread = threading.Thread(target=self._watch, args=(ended,), name="dcp_s3-hedge-watch")
                with contextlib.suppress(RuntimeError):  # no thread can be started: nothing is hedged
                    thread.start()
                    self._watcher = thread, ended

    def leave(self, look: Look) -> None:
        """Stop watching a read. With the last one, the watching thread ends."""
        with self._lock:
            self._reads.discard(look)
            if self._reads or self._watcher is None:
                return
            (thread, ended), self._watcher = self._watcher, None
        ended.set()
        thread.join()

    def completed(self, timing: Timing) -> None:
        """Learn from a request that was not overtaken: nobody knows how long the others would have taken."""
        with self._lock:
            self._latencies.add(timing.head, timing.body, timing.size)

    def patience(self, awaits: int) -> float:
        """Seconds within which the next ``awaits`` bytes of a body (0: the head) should come."""
        with self._lock:
            expected = self._latencies.expect(_PERCENTILE)
        return max(_MIN_DELAY, expected.seconds(awaits))

    def may_start(self, store: Bucket, *, take: bool) -> bool:
        """Whether a second request may be made now. With ``take`` it is charged: one call of `ended` must follow."""
        if not store.gate.is_calm(_CALM):
            return False
        most = max(_LEAST_AT_ONCE, connections_of(store, "download") // _SHARE_AT_ONCE)
        with self._lock:
            if not take:
                return self._budget.is_left
            if self._running >= most or not self._budget.take():
                return False
            self._running += 1
            return True

    def begun(self) -> None:
        with self._lock:
            self._state = replace(self._state, started=self._state.started + 1)

    def ended(self, *, won: bool, received: int, wasted: int) -> None:
        with self._lock:
            self._running -= 1
            state = self._state
            self._state = HedgeState(state.started, state.won + won, state.bytes + received, state.wasted + wasted)

    def _watch(self, ended: threading.Event) -> None:
        before = time.monotonic()
        while not ended.wait(INTERVAL):
            now = time.monotonic()
            # A process that was held up itself (suspended, another thread kept the GIL) has not waited for S3.
            elapsed, before = min(now - before, 2 * INTERVAL), now
            with self._lock:
                reads = list(self._reads)
            for look in reads:
                look(elapsed)


_hedges: dict[tuple[str | None, str], Hedges] = {}
_lock = threading.Lock()


@reset_in_child
def _begin_anew() -> None:
    global _lock
    _lock = threading.Lock()
    _hedges.clear()


def hedges_of(store: Bucket) -> Hedges:
    """This process's `Hedges` for a bucket. Thread safe."""
    key = (store.settings.endpoint_url, store.name)
    found = _hedges.get(key)
    if found is None:
        with _lock:
            found = _hedges.setdefault(key, Hedges())
    return found


def snapshot() -> dict[str, HedgeState]:
    """Outcome of this process's second requests, by ``{endpoint}/{bucket}``."""
    with _lock:
        found = dict(_hedges)
    return {f"{endpoint or 's3:/'}/{name}": hedges.state for (endpoint, name), hedges in found.items()}


# --- how long a GET should take: no I/O, no clock, not thread safe ---------------------------------


@dataclass(frozen=True)
class Expected:
    """Times that nearly all requests keep to."""

    head: float
    """Seconds from the request to the head of the answer."""
    per_byte: float
    """Seconds for each byte of the body."""

    def seconds(self, awaits: int) -> float:
        """Seconds within which the next ``awaits`` bytes of a body should come; 0 for the head."""
        return _BLOCK_FACTOR * self.per_byte * awaits if awaits else self.head


# S3's first byte comes after 30 to 200 ms, the rest at 90 MB/s (docs/performance.md); stores on disks are slower.
START = Expected(head=0.5, per_byte=1 / 10e6)


class Latencies:
    """The last `_WINDOW` requests that completed."""

    def __init__(self) -> None:
        self._heads: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._rates: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._known: dict[float, Expected] = {}

    def add(self, head: float, body: float, size: int) -> None:
        """Add a completed request.

        Args:
            head: seconds until the head of the answer.
            body: seconds from the head to the end.
        """
        self._heads.append(head)
        if size >= _MIN_BODY:
            self._rates.append(body / size)
        self._known.clear()

    def expect(self, percentile: float) -> Expected:
        """Head and rate that ``percentile`` percent of requests kept to, each alone; `START` if too few are known."""
        found = self._known.get(percentile)
        if found is None:
            found = self._known[percentile] = Expected(
                _percentile(self._heads, percentile, START.head), _percentile(self._rates, percentile, START.per_byte)
            )
        return found


def _percentile(samples: collections.deque[float], percentile: float, unknown: float) -> float:
    if len(samples) < _ENOUGH:
        return unknown
    ranked = sorted(samples)
    return ranked[min(len(ranked), max(1, math.ceil(len(ranked) * percentile / 100))) - 1]


class Budget:
    """How many requests may be sent twice: a share of all, so that a slow store is not asked for twice as much."""

    def __init__(self, share: float, start: int, most: int) -> None:
        self._share = share
        self._most = most
        self._left = float(start)

    def earn(self) -> None:
        self._left = min(float(self._most), self._left + self._share)

    @property
    def is_left(self) -> bool:
        """Whether a request may be sent twice now."""
        return self._left >= 1

    def take(self) -> bool:
        """Whether a request may be sent twice now; if so, it is charged."""
        if not self.is_left:
            return False
        self._left -= 1
        return True
