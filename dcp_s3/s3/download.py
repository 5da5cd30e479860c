"""Ranged GET into given buffers: resumed at the byte reached when it breaks, hedged when it straggles.

`Race` is one read: the reader's own requests, and at times a second request on a thread of its own, which receives
into a buffer. Only the reader's thread ever writes to the reader's memory: when the second request wins, the reader's
socket is shut down, and its thread then copies the buffer. `hedge.Hedges` says when a second request is made.
"""

from __future__ import annotations

import functools
import logging
import mmap
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from botocore.exceptions import ClientError

from dcp_s3 import errors
from dcp_s3.failures import without_tracebacks
from dcp_s3.limit import Cancelled, LinkedEvent
from dcp_s3.memory import ReadTarget, targets_of
from dcp_s3.s3.botocore_private import Flight, finish_response, readinto_response
from dcp_s3.s3.bucket import Bucket, Send
from dcp_s3.s3.diagnosis import TruncatedBodyError
from dcp_s3.s3.hedge import INTERVAL, Hedges, hedges_of
from dcp_s3.s3.retry import this_thread
from dcp_s3.store import Into, Moved, same_etag

logger = logging.getLogger(__name__)

# Bytes received before they are added to the checksum: most are then still in the CPU's cache.
_BLOCK = 4 * 2**20
_MOST_BYTES = 256 * 2**20  # longer requests (by DCP_S3_PART_SIZE) are not made twice
_BLOCK_OF_SECOND = 2**20


def read(
    store: Bucket, key: str, start: int, into: Into, etag: str | None = None, *, moved: Moved | None = None
) -> None:
    """See `Store.read`.

    There is one request unless it breaks or straggles. After a break the next request asks only for the rest, of the
    same version of the object (If-Match). An attempt that made progress does not count towards the limit. One that
    straggles may be overtaken by a second one. Only this thread writes to the targets, and the threads of second
    requests have ended when the function returns or raises.
    """
    cursor = Cursor(targets_of(into), moved=moved)
    if not cursor.total:
        return
    with Race(store, key, start, cursor, etag) as race:
        attempt = functools.partial(race.own.attempt, key=key, advance=race.advance, hedges=race.hedges)
        while True:
            before = cursor.done
            try:
                store.call("GetObject", key, attempt, cancel=race.stop, data=True)
            except Cancelled:
                if not race.take():
                    raise
            except errors.TransferError:
                # All attempts are used up, but the last round moved on: a slow, flaky link, not a dead one.
                if cursor.done > before and cursor.done < cursor.total and store.settings.retry_attempts > 1:
                    continue
                if not race.take(wait=True):
                    raise
            return


class Cursor:
    """The place in a list of targets up to which bytes have arrived.

    Args:
        moved: called with the number of bytes that have arrived.

    Attributes:
        total: bytes of all targets.
        done: bytes that have arrived.
    """

    def __init__(
        self, targets: Sequence[ReadTarget], *, block: int = _BLOCK, moved: Callable[[int], None] | None = None
    ) -> None:
        self._block = block
        self._moved = moved
        self._targets = [target for target in targets if target.view.nbytes]
        self._index = 0
        self._offset = 0
        self.total = sum(target.view.nbytes for target in self._targets)
        self.done = 0

    @property
    def view(self) -> memoryview | None:
        """Memory for the next bytes, at most a block; None if all have arrived."""
        if self.done == self.total:
            return None
        return self._targets[self._index].view[self._offset : self._offset + self._block]

    def advance(self, count: int) -> None:
        """Note that ``count`` bytes have arrived in `view`."""
        target = self._targets[self._index]
        target.received(self._offset, count)
        self.done += count
        self._offset += count
        if self._moved is not None:
            self._moved(count)
        if self._offset == target.view.nbytes:
            self._index += 1
            self._offset = 0

    def fill(self, data: memoryview) -> None:
        while data and (view := self.view) is not None:
            count = min(view.nbytes, data.nbytes)
            view[:count], data = data[:count], data[count:]
            self.advance(count)


class _Request:
    """What one of the two requests for a range receives.

    Args:
        start: first byte of the object that ``cursor`` takes.
        etag: ETag of the version to read, empty for any; it is filled in by the first answer.
        stop: event that is set when the request is useless.
    """

    def __init__(self, start: int, cursor: Cursor, etag: list[str], stop: LinkedEvent) -> None:
        self.start, self.cursor, self.etag, self.stop = start, cursor, etag, stop
        self.flight = Flight()
        self.idle = 0.0
        """Seconds for which nothing has come, as the watcher sees them."""
        self._moves = -1

    def attempt(self, send: Send, *, key: str, advance: Callable[[int], None], hedges: Hedges) -> None:
        """Try once to fetch what is still missing; ``advance`` is called instead of the cursor's method."""
        cursor, etag, flight = self.cursor, self.etag, self.flight
        byte_range = f"bytes={self.start + cursor.done}-{self.start + cursor.total - 1}"
        expected, began, complete = cursor.total - cursor.done, time.monotonic(), False
        try:
            with flight.on_this_thread():
                flight.await_bytes(0)
                answer = send(Key=key, Range=byte_range, **({"IfMatch": etag[0]} if etag else {}))
                head_at, attempts, awaited = time.monotonic(), this_thread.attempts, 0
                body, found, length = answer["Body"], answer.get("ETag"), answer.get("ContentLength")
                try:
                    if not etag and found:
                        etag.append(found)
                    elif found and not same_etag(found, etag[0]):
                        raise _another_version()  # rclone takes no notice of If-Match
                    if length is not None and length > expected:
                        raise TruncatedBodyError(
                            f"asked for {expected} bytes ({byte_range}), got {length}: no range support?"
                        )
                    while (view := cursor.view) is not None:
                        if self.stop.is_set():
                            raise Cancelled
                        attempts.check()
                        if not awaited:
                            flight.await_bytes(awaited := view.nbytes)
                        count = readinto_response(body, view[:awaited])
                        if count == 0:
                            missing = cursor.total - cursor.done
                            raise TruncatedBodyError(f"the body of {byte_range} ended {missing} bytes early")
                        awaited -= count
                        advance(count)
                        attempts.moved(count)
                    complete = True
                finally:
                    finish_response(body, complete=complete)
                hedges.completed(head_at - began, time.monotonic() - head_at, expected)
        except Exception as error:
            if not self.stop.is_set():
                raise
            without_tracebacks(error)
            raise Cancelled from None

    def is_late(self, elapsed: float, hedges: Hedges) -> bool:
        """Whether it straggles, ``elapsed`` seconds after the last look."""
        moves, awaits = self.flight.moves, self.flight.awaits
        if awaits is None or moves != self._moves:
            self._moves, self.idle = moves, 0.0
        else:
            self.idle += elapsed
        return awaits is not None and self.idle > hedges.patience(awaits)


def _another_version() -> ClientError:
    error = {"Code": "PreconditionFailed", "Message": "the object has another ETag"}
    answer: Any = {"Error": error, "ResponseMetadata": {"HTTPStatusCode": 412}}
    return ClientError(answer, "GetObject")


class Race:
    """One read of a range. A context manager for one thread; when it is left, its own threads have ended.

    Attributes:
        stop: event that is set when the reader's own request is useless: it was overtaken, or is cancelled.
    """

    def __init__(self, store: Bucket, key: str, start: int, cursor: Cursor, etag: str | None = None) -> None:
        self.stop = LinkedEvent(store.limit.cancel)
        self._store = store
        self._key = key
        self._cursor = cursor
        self.own = _Request(start, cursor, [] if etag is None else [etag], self.stop)
        self.hedges = hedges_of(store)
        self._lock = threading.Lock()  # the cursor, who won, and whether it is over
        self._second: _Request | None = None
        self._data = memoryview(b"")
        self._winner: memoryview | None = None
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def __enter__(self) -> Race:
        self.hedges.enter(self.look)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._is_closed = True
        self.hedges.leave(self.look)
        self._break_off_second()
        if self._thread is not None:
            self._thread.join()

    # --- the reader -----------------------------------------------------------------------------------

    def advance(self, count: int) -> None:
        """Note that the reader's own request has received ``count`` bytes more."""
        with self._lock:
            if self._winner is not None:
                raise Cancelled
            self._cursor.advance(count)

    def take(self, *, wait: bool = False) -> bool:
        """Fill the rest of the memory with what the second request received; False if it was not faster."""
        deadline = self._store.limit.deadline
        while wait and self._second is not None and not self.stop.is_set():
            if deadline is not None and deadline.passed:
                break
            self.stop.wait(INTERVAL)
        with self._lock:
            winner = self._winner
        if winner is None:
            return False
        self._cursor.fill(winner)
        return True

    # --- the watcher ----------------------------------------------------------------------------------

    def look(self, elapsed: float) -> None:
        if self.stop.other is not None and self.stop.other.is_set():
            self.own.flight.break_off()
            self._break_off_second()
        elif self.own.is_late(elapsed, self.hedges) and self._thread is None:
            left = self._cursor.total - self._cursor.done
            if left <= _MOST_BYTES and self.hedges.may_start(self._store) and not self._start_second():
                self.hedges.ended(won=False, wasted=0)

    def _break_off_second(self) -> None:
        second = self._second
        if second is not None:
            second.stop.set()
            second.flight.break_off()

    def _start_second(self) -> bool:
        with self._lock:
            first, etag = self._cursor.done, self.own.etag
            if (
                self._is_closed or first == self._cursor.total or (first and not etag)
            ):  # the rest could be of another version
                return False
            try:
                # Unlike a bytearray, a mapping is not touched before bytes arrive.
                self._data = memoryview(mmap.mmap(-1, self._cursor.total - first))
                cursor = Cursor([ReadTarget(self._data)], block=_BLOCK_OF_SECOND)
                second = _Request(self.own.start + first, cursor, list(etag), LinkedEvent(self.stop))
                thread = threading.Thread(target=self._run, args=(second, first), name="dcp_s3-hedge")
                thread.start()
            except (OSError, RuntimeError):  # no memory or no thread: no hedge
                return False
            self._second, self._thread = second, thread
            return True

    # --- the second request ---------------------------------------------------------------------------

    def _run(self, second: _Request, first: int) -> None:
        overlap = None
        try:
            attempt = functools.partial(
                second.attempt, key=self._key, advance=second.cursor.advance, hedges=self.hedges
            )
            self._store.call("GetObject", self._key, attempt, cancel=second.stop, attempts=1, data=True)
            overlap = self._win(second, first)
        except Cancelled:
            pass
        except Exception as error:  # noqa: BLE001 - the reader goes on by itself
            logger.debug("the second request for s3://%s/%s failed: %s", self._store.name, self._key, error)
        finally:
            with self._lock:
                self._second = None
            won = overlap is not None
            self.hedges.ended(won=won, wasted=second.cursor.done if overlap is None else overlap)

    def _win(self, second: _Request, first: int) -> int | None:
        """Bytes that the reader's own request had received, too, if this one was faster; otherwise None."""
        with self._lock:
            if self._is_closed or self._cursor.done == self._cursor.total:
                return None
            if self._cursor.done and (not self.own.etag or second.etag != self.own.etag):
                return None  # it could be, or is, another version of the object than what has arrived
            overlap = self._cursor.done - first
            self._winner = self._data[overlap:]
            self.stop.set()
        self.own.flight.break_off()
        logger.debug("the second request for s3://%s/%s was faster", self._store.name, self._key)
        return overlap
