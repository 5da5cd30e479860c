"""Ranged GET into given buffers: resumed at the byte reached when it breaks, hedged when it straggles.

`Race` is one read: the reader's own requests, and at times a second request on a thread of its own, which receives
into a buffer. Only the reader's thread ever writes to the reader's memory: when the second request wins, the reader's
socket is shut down, and its thread then copies the buffer. `hedge.Hedges` says when a second request is made.
"""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from dcp_s3 import errors
from dcp_s3.failures import without_tracebacks
from dcp_s3.limit import Cancelled, LinkedEvent
from dcp_s3.memory import ReadTarget
from dcp_s3.s3.botocore_private import Flight
from dcp_s3.s3.hedge import INTERVAL, hedges_of
from dcp_s3.s3.operations import Bucket
from dcp_s3.s3.ranged import Cursor, Timing, get_range

logger = logging.getLogger(__name__)

_MOST_PER_READ = 3
_MOST_BYTES = 256 * 2**20  # longer requests (by DCP_S3_PART_SIZE) are not made twice
_BLOCK = 2**20


def fetch_into(
    store: Bucket,
    key: str,
    start: int,
    targets: Sequence[ReadTarget],
    *,
    cancel: threading.Event | None = None,
    etag: str | None = None,
    moved: Callable[[int], None] | None = None,
) -> None:
    """Fetch the bytes of an object from byte ``start`` on that fill ``targets`` in order.

    ``etag``: ETag of the version to read; None for any. ``moved`` is called with the number of bytes that have arrived.

    There is one request unless it breaks or straggles. After a break the next request asks only for the rest, of the
    same version of the object (If-Match). An attempt that made progress does not count towards the limit. One that
    straggles may be overtaken by a second one. Only this thread writes to the targets, and the threads of second
    requests have ended when the function returns or raises.

    Raises:
        ObjectNotFoundError: no such object.
        PreconditionFailedError: the object was replaced while it was read.
        OutOfRangeError: the object has fewer bytes.
        StorageError: other failures.
        Cancelled: ``cancel`` was set.
    """
    cursor = Cursor(targets, moved=moved)
    if not cursor.total:
        return
    with Race(store, key, start, cursor, cancel or store.limit.cancel, etag) as race:
        while True:
            before = cursor.done
            try:
                store.call("GetObject", key, race.attempt, cancel=race.stop, data=True)
            except Cancelled:
                if not race.take():
                    raise
            except errors.TransferError:
                # All attempts are used up, but the last round moved on: a slow, flaky link, not a dead one.
                if cursor.done > before and not cursor.full and store.settings.retry_attempts > 1:
                    continue
                if not race.take(wait=True):
                    raise
            return


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
    """A second request."""

    def __init__(self, first: int, size: int, etag: list[str], cancel: threading.Event) -> None:
        self.first = first
        self.overlap = 0  # bytes that the reader's own request had also received when this one won
        self.data = memoryview(mmap.mmap(-1, size))  # unlike a bytearray, not touched before bytes arrive
        self.cursor = Cursor([ReadTarget(self.data)], block=_BLOCK)
        self.etag = etag
        self.stop = LinkedEvent(cancel)
        self.flight = Flight()
        self.idle = _Idle(self.flight)

    def break_off(self) -> None:
        """End the request, whatever it waits for."""
        self.stop.set()
        self.flight.break_off()


class Race:
    """One read of a range. A context manager for one thread; when it is left, its own threads have ended.

    Attributes:
        stop: event that is set when the reader's own request is useless: it was overtaken, or ``cancel`` is set.
    """

    def __init__(
        self,
        store: Bucket,
        key: str,
        start: int,
        cursor: Cursor,
        cancel: threading.Event | None,
        etag: str | None = None,
    ) -> None:
        self.stop = LinkedEvent(cancel)
        self._store = store
        self._key = key
        self._start = start
        self._cursor = cursor
        self._etag: list[str] = [] if etag is None else [etag]
        self._hedges = hedges_of(store)
        self._flight = Flight()
        self._idle = _Idle(self._flight)
        self._lock = threading.Lock()  # the cursor, who won, and whether it is over
        self._hedge: _Hedge | None = None
        self._winner: _Hedge | None = None
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __enter__(self) -> Race:
        self._hedges.enter(self.look)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        with self._lock:
            self._closed = True
            hedge = self._hedge
        self._hedges.leave(self.look)
        if hedge is not None:
            hedge.break_off()
        for thread in self._threads:
            thread.join()

    # --- the reader -----------------------------------------------------------------------------------

    def attempt(self) -> None:
        """Send one request for what is missing."""
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
        """Fill the rest of the memory with what a second request received; False if none was faster."""
        while wait and self._hedge is not None and not self.stop.is_set():
            deadline = self._store.limit.deadline
            if deadline is not None and deadline.passed:
                break
            self.stop.wait(INTERVAL)
        with self._lock:
            hedge = self._winner
        if hedge is None:
            return False
        self._cursor.fill(hedge.data[hedge.overlap :])
        return True

    # --- the watcher ----------------------------------------------------------------------------------

    def look(self, elapsed: float) -> None:
        hedge = self._hedge
        if self.stop.is_other_set:
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
        return awaits is not None and idle.seconds > self._hedges.patience(awaits)

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
