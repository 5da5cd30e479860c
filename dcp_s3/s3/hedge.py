"""Hedging: a second request races a GET that straggles, and the first to complete has its bytes used.

`Race` is one read: the reader's own requests, and at times a second request on a thread of its own, which receives
into a buffer. Only the reader's thread ever writes to the reader's memory: when the second request wins, the reader's
socket is shut down, and its thread then copies the buffer. `Hedges` is shared by the reads of one bucket: the thread
that watches them (alive only while there are any), the known latencies, and the budget. A forked child starts afresh.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING

from dcp_s3.forking import reset_in_child
from dcp_s3.limit import Cancelled
from dcp_s3.s3.flight import Flight
from dcp_s3.s3.latency import Budget, Latencies
from dcp_s3.s3.ranged import Cursor, ReadTarget, Timing, get_range
from dcp_s3.tracebacks import without_tracebacks

if TYPE_CHECKING:
    from dcp_s3.s3.store import S3Store

logger = logging.getLogger(__name__)

_INTERVAL = 0.02  # seconds between two looks at the requests in flight
# A hedge per ten requests, and a few for the beginning of a process: if more straggle, the store is slow.
_BUDGET_SHARE, _BUDGET_START, _BUDGET_MOST = 0.1, 4, 16
_MOST_PER_READ = 3
# Hedges at once, each with a buffer of at most a request's size: a quarter of the requests, but at least two.
_SHARE_AT_ONCE, _LEAST_AT_ONCE = 4, 2
_MOST_BYTES = 256 * 2**20  # longer requests (by DCP_S3_PART_SIZE) are not made twice
_CALM = 30.0  # seconds without throttling before anything is asked for twice
_BLOCK = 2**20


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
        self._races: set[Race] = set()
        self._watcher: tuple[threading.Thread, threading.Event] | None = None
        self._latencies = Latencies()
        self._budget = Budget(_BUDGET_SHARE, _BUDGET_START, _BUDGET_MOST)
        self._running = 0
        self._state = HedgeState()

    @property
    def state(self) -> HedgeState:
        """The counts now."""
        with self._lock:
            return self._state

    def enter(self, race: Race) -> None:
        """Watch a race from now on."""
        with self._lock:
            self._races.add(race)
            self._budget.earn()
            if self._watcher is None:
                ended = threading.Event()
                thread = threading.Thread(target=self._watch, args=(ended,), name="dcp_s3-hedge-watch")
                with contextlib.suppress(RuntimeError):  # no thread can be started: nothing is hedged
                    thread.start()
                    self._watcher = thread, ended

    def leave(self, race: Race) -> None:
        """Stop watching a race. With the last one, the watching thread ends."""
        with self._lock:
            self._races.discard(race)
            if self._races or self._watcher is None:
                return
            (thread, ended), self._watcher = self._watcher, None
        ended.set()
        thread.join()

    def completed(self, timing: Timing) -> None:
        """Learn from a request that was not overtaken: nobody knows how long the others would have taken."""
        with self._lock:
            self._latencies.add(timing.head, timing.body, timing.size)

    def patience(self, store: S3Store, awaits: int) -> float:
        """Seconds within which the next ``awaits`` bytes of a body (0: the head) should come."""
        with self._lock:
            expected = self._latencies.expect(store.settings.hedge_percentile)
        return max(store.settings.hedge_min_delay, expected.seconds(awaits))

    def may_start(self, store: S3Store, *, take: bool) -> bool:
        """Whether a second request may be made now. With ``take`` it is charged: one call of `ended` must follow."""
        if not store.gate.is_calm(_CALM):
            return False
        most = max(_LEAST_AT_ONCE, store.settings.concurrency // _SHARE_AT_ONCE)
        with self._lock:
            if not take:
                return self._budget.is_left
            if self._running >= most or not self._budget.take():
                return False
            self._running += 1
            return True

    def begun(self) -> None:
        """Count a second request."""
        with self._lock:
            self._state = replace(self._state, started=self._state.started + 1)

    def ended(self, *, won: bool, received: int, wasted: int) -> None:
        """Count the end of a second request."""
        with self._lock:
            self._running -= 1
            state = self._state
            self._state = HedgeState(state.started, state.won + won, state.bytes + received, state.wasted + wasted)

    def _watch(self, ended: threading.Event) -> None:
        before = time.monotonic()
        while not ended.wait(_INTERVAL):
            now = time.monotonic()
            # A process that was held up itself (suspended, another thread kept the GIL) has not waited for S3.
            elapsed, before = min(now - before, 2 * _INTERVAL), now
            with self._lock:
                races = list(self._races)
            for race in races:
                race.look(elapsed)


class _Stop(threading.Event):
    """An event that is set by itself or with another event."""

    def __init__(self, other: threading.Event | None) -> None:
        super().__init__()
        self._other = other

    @property
    def is_cancelled(self) -> bool:
        """Whether the other event is set."""
        return self._other is not None and self._other.is_set()

    def is_set(self) -> bool:
        return super().is_set() or self.is_cancelled

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            left = _INTERVAL if until is None else until - time.monotonic()
            if left <= 0:
                return False
            super().wait(min(left, _INTERVAL))
        return True


class _Idle:
    """Measures how long nothing has come on a flight, as its watcher sees it."""

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._moves = -1
        self.seconds = 0.0

    def pass_by(self, elapsed: float) -> int | None:
        """Note that ``elapsed`` seconds have passed; return what the flight awaits."""
        moves, awaits = self._flight.moves, self._flight.awaits
        if awaits is None or moves != self._moves:
            self._moves, self.seconds = moves, 0.0
        else:
            self.seconds += elapsed
        return awaits


class _Hedge:
    """A second request.

    Args:
        first: place in the reader's cursor at which the request begins.
        size: number of bytes.
        etag: ETag of the version to ask for, empty for any.
        cancel: the reader's event.
    """

    def __init__(self, first: int, size: int, etag: list[str], cancel: threading.Event) -> None:
        self.first = first
        self.overlap = 0  # bytes that the reader's own request had also received when this one won
        self.data = memoryview(mmap.mmap(-1, size))  # unlike a bytearray, not touched before bytes arrive
        self.cursor = Cursor([ReadTarget(self.data)], block=_BLOCK)
        self.etag = etag
        self.stop = _Stop(cancel)
        self.flight = Flight()
        self.idle = _Idle(self.flight)

    def break_off(self) -> None:
        """End the request, whatever it waits for."""
        self.stop.set()
        self.flight.break_off()


class Race:
    """One read of a range. A context manager for one thread; when it is left, its own threads have ended.

    Args:
        store: store with the object.
        key: object key.
        start: first byte of the range.
        cursor: cursor for the bytes.
        cancel: event that ends the requests.
        etag: ETag of the version to read; None for any.

    Attributes:
        stop: event that is set when the reader's own request is useless: it was overtaken, or ``cancel`` is set.
    """

    def __init__(
        self,
        store: S3Store,
        key: str,
        start: int,
        cursor: Cursor,
        cancel: threading.Event | None,
        etag: str | None = None,
    ) -> None:
        self.stop = _Stop(cancel)
        self._store = store
        self._key = key
        self._start = start
        self._cursor = cursor
        self._etag: list[str] = [] if etag is None else [etag]
        self._hedges = hedges_of(store)
        self._is_watched = store.settings.hedge_percentile > 0
        self._flight = Flight()
        self._idle = _Idle(self._flight)
        self._lock = threading.Lock()  # the cursor, who won, and whether it is over
        self._hedge: _Hedge | None = None
        self._winner: _Hedge | None = None
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __enter__(self) -> Race:
        if self._is_watched:
            self._hedges.enter(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._is_watched:
            return
        with self._lock:
            self._closed = True
            hedge = self._hedge
        self._hedges.leave(self)
        if hedge is not None:
            hedge.break_off()
        for thread in self._threads:
            thread.join()

    # --- the reader -----------------------------------------------------------------------------------

    def attempt(self) -> None:
        """Send one request for what is missing.

        Raises:
            Cancelled: `stop` is set.
            Exception: raised by botocore, urllib3 or the socket.
        """
        if not self._is_watched:
            self._get()
            return
        try:
            with self._flight.on_this_thread():
                timing = self._get()
        except Exception as error:
            if not self.stop.is_set():
                raise
            without_tracebacks(error)
            raise Cancelled from None
        self._hedges.completed(timing)

    def _get(self) -> Timing:
        return get_range(
            self._store, self._key, self._start, self._cursor, self._etag,
            flight=self._flight, stop=self.stop, advance=self._advance,
        )  # fmt: skip

    def _advance(self, count: int) -> None:
        with self._lock:
            if self._winner is not None:
                raise Cancelled
            self._cursor.advance(count)

    def take(self, *, wait: bool = False) -> bool:
        """Fill the rest of the memory with what a second request received; False if none was faster.

        Args:
            wait: whether to wait until no second request is under way; `stop` and the deadline end the wait.
        """
        while wait and self._hedge is not None and not self.stop.is_set():
            deadline = self._store.limit.deadline
            if deadline is not None and deadline.passed:
                break
            self.stop.wait(_INTERVAL)
        with self._lock:
            hedge = self._winner
        if hedge is None:
            return False
        self._cursor.fill(hedge.data[hedge.overlap :])
        return True

    # --- the watcher ----------------------------------------------------------------------------------

    def look(self, elapsed: float) -> None:
        """Begin a second request if it is time; ``elapsed`` seconds have passed since the last look."""
        hedge = self._hedge
        if self.stop.is_cancelled:
            self._flight.break_off()
            if hedge is not None:
                hedge.break_off()
            return
        is_late = self._is_late(self._idle, elapsed)
        if hedge is not None:
            # It straggles, too: replace it by another one.
            if self._is_late(hedge.idle, elapsed) and is_late and self._may_start(take=False):
                hedge.break_off()
        elif is_late and self._may_start(take=True):
            self._begin()

    def _is_late(self, idle: _Idle, elapsed: float) -> bool:
        awaits = idle.pass_by(elapsed)
        return awaits is not None and idle.seconds > self._hedges.patience(self._store, awaits)

    def _may_start(self, *, take: bool) -> bool:
        return (
            len(self._threads) < _MOST_PER_READ
            and self._cursor.total - self._cursor.done <= _MOST_BYTES
            and self._hedges.may_start(self._store, take=take)
        )

    def _begin(self) -> None:
        with self._lock:
            hedge = self._hedge = self._start_second()
        if hedge is None:
            self._hedges.ended(won=False, received=0, wasted=0)
        else:
            self._hedges.begun()

    def _start_second(self) -> _Hedge | None:
        first = self._cursor.done
        if self._closed or self._cursor.full or (first and not self._etag):  # the rest could be of another version
            return None
        try:
            hedge = _Hedge(first, self._cursor.total - first, list(self._etag), self.stop)
            thread = threading.Thread(target=self._run, args=(hedge,), name="dcp_s3-hedge")
            thread.start()
        except (OSError, RuntimeError):  # no memory or no thread: no hedge
            return None
        self._threads.append(thread)
        return hedge

    # --- the second request ---------------------------------------------------------------------------

    def _run(self, hedge: _Hedge) -> None:
        won = False
        try:
            timing = self._store.call(
                "GetObject", self._key, lambda: self._fetch(hedge), cancel=hedge.stop, attempts=1, data=True
            )
            won = self._has_won(hedge)
            self._hedges.completed(timing)
        except Cancelled:
            pass
        except Exception as error:  # noqa: BLE001 - the reader goes on by itself
            logger.debug("the second request for s3://%s/%s failed: %s", self._store.name, self._key, error)
        finally:
            received = hedge.cursor.done
            with self._lock:
                self._hedge = None
            self._hedges.ended(won=won, received=received, wasted=hedge.overlap if won else received)

    def _fetch(self, hedge: _Hedge) -> Timing:
        try:
            with hedge.flight.on_this_thread():
                return get_range(
                    self._store, self._key, self._start + hedge.first, hedge.cursor, hedge.etag,
                    flight=hedge.flight, stop=hedge.stop,
                )  # fmt: skip
        except Exception as error:
            if not hedge.stop.is_set():
                raise
            without_tracebacks(error)
            raise Cancelled from None

    def _has_won(self, hedge: _Hedge) -> bool:
        with self._lock:
            if self._closed or self._cursor.full:
                return False
            if self._cursor.done and (not self._etag or hedge.etag != self._etag):
                return False  # it could be, or is, another version of the object than what has arrived
            self._winner = hedge
            hedge.overlap = self._cursor.done - hedge.first
            self.stop.set()
        self._flight.break_off()
        logger.debug("the second request for s3://%s/%s was faster", self._store.name, self._key)
        return True


_hedges: dict[tuple[str | None, str], Hedges] = {}
_lock = threading.Lock()


@reset_in_child
def _begin_anew() -> None:
    global _lock
    _lock = threading.Lock()
    _hedges.clear()


def hedges_of(store: S3Store) -> Hedges:
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
