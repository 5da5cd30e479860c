"""When a GET is hedged: how long a bucket's requests take, how many second ones are under way, and their outcome."""

from __future__ import annotations

import collections
import contextlib
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

INTERVAL = 0.02
"""Seconds between two looks at the requests in flight."""

# A GET is hedged if it takes longer than nearly all of the last ones, to its first byte or between two blocks of its
# body. With fewer than `_ENOUGH` the `_START`s count: S3's first byte comes after 30 to 200 ms, the rest at 90 MB/s
# (docs/performance.md); stores on disks are slower.
_PERCENTILE, _WINDOW, _ENOUGH = 95.0, 256, 8
_START_HEAD, _START_PER_BYTE = 0.5, 1 / 10e6
# Seconds without a byte, at least: nearly all requests get S3's first byte within that; stragglers take seconds.
_MIN_DELAY = 0.2
# Shorter bodies say more about the client's scheduling than about the bandwidth.
_MIN_BODY = 256 * 2**10
# The rate is of whole bodies; single blocks vary more.
_BLOCK_FACTOR = 2.0
# Hedges at once, each with a buffer of at most a request's size: a quarter of the requests, but at least two.
_SHARE_AT_ONCE, _LEAST_AT_ONCE = 4, 2
CALM = 30.0
"""Seconds without throttling before anything is asked for twice."""

Look = Callable[[float], None]
"""Begins a second request of one read, if it is time; called with the seconds since the last look."""


@dataclass(frozen=True)
class HedgeState:
    """Outcome of the second requests to one bucket, counted since the process began."""

    started: int = 0
    """Second requests that were made."""
    won: int = 0
    """Second requests that were faster."""
    wasted: int = 0
    """Bytes that were received twice, in whole blocks."""


class Hedges:
    """State that the reads of one bucket share, with the thread that watches them while there are any. Thread safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: set[Look] = set()
        self._watcher: tuple[threading.Thread, threading.Event] | None = None
        self._heads: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._rates: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._head, self._per_byte = _START_HEAD, _START_PER_BYTE
        self._running = 0
        self.state = HedgeState()

    def enter(self, look: Look) -> None:
        """Watch a read from now on."""
        with self._lock:
            self._reads.add(look)
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

    def completed(self, head: float, body: float, size: int) -> None:
        """Learn from a request that was not overtaken: nobody knows how long the others would have taken.

        Args:
            head: seconds until the head of the answer.
            body: seconds from the head to the end.
            size: bytes of the body.
        """
        with self._lock:
            self._heads.append(head)
            if size >= _MIN_BODY:
                self._rates.append(body / size)
            found = [_START_HEAD, _START_PER_BYTE]
            for number, samples in enumerate((self._heads, self._rates)):
                if len(samples) >= _ENOUGH:
                    found[number] = sorted(samples)[math.ceil(len(samples) * _PERCENTILE / 100) - 1]
            self._head, self._per_byte = found

    def patience(self, awaits: int) -> float:
        """Seconds within which the next ``awaits`` bytes of a body (0: the head) should come."""
        return max(_MIN_DELAY, _BLOCK_FACTOR * self._per_byte * awaits if awaits else self._head)

    def started(self, connections: int) -> bool:
        """Note that a second request begins, if one may beside so many connections; one call of `ended` must follow."""
        with self._lock:
            if self._running >= max(_LEAST_AT_ONCE, connections // _SHARE_AT_ONCE):
                return False
            self._running += 1
            self.state = replace(self.state, started=self.state.started + 1)
            return True

    def ended(self, *, won: bool, wasted: int) -> None:
        with self._lock:
            self._running -= 1
            self.state = replace(self.state, won=self.state.won + won, wasted=self.state.wasted + wasted)

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
