"""Ranged GET into given buffers: resumed at the byte reached when it breaks, hedged when it straggles.

`Race` is one read: the reader's own request, and at times a second one on a thread of its own, which receives into a
buffer. Only the reader's thread ever writes to the reader's memory: when the second request wins, the reader's socket
is shut down, and its thread then copies the buffer. `hedge.Hedges` says when a second request is made.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from botocore.exceptions import ClientError

from dcp_s3 import errors
from dcp_s3.failures import without_tracebacks
from dcp_s3.limit import Cancelled, LinkedEvent
from dcp_s3.memory import ReadTarget, targets_of
from dcp_s3.s3.botocore_private import Flight, finish_response, readinto_response
from dcp_s3.s3.bucket import Bucket, Send
from dcp_s3.s3.diagnosis import TruncatedBodyError
from dcp_s3.s3.hedge import CALM, INTERVAL, Hedges
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
    race = Race(store, key, start, targets_of(into), etag, moved=moved)
    own, hedges, deadline = race.own, race.hedges, store.limit.deadline
    if not own.total:
        return
    bounded = store.within(replace(store.limit, cancel=own.stop))
    hedges.enter(race.look)
    try:
        while True:
            before = own.done
            try:
                bounded.request("GetObject", key, attempt=own.attempt, data=True)
                return
            except (Cancelled, errors.TransferError) as error:
                if isinstance(error, errors.TransferError):
                    # All attempts are used up, but the last round moved on: a slow, flaky link, not a dead one.
                    if before < own.done < own.total and store.settings.retry_attempts > 1:
                        continue
                    while race.second is not None and not own.stop.is_set() and not (deadline and deadline.passed):
                        own.stop.wait(INTERVAL)
                with own.lock:
                    rest, own.rest = own.rest, None
                if rest is None:
                    raise
            while own.done < own.total:
                view = own.view
                view[:], rest = rest[: view.nbytes], rest[view.nbytes :]
                own.advance(view.nbytes)
            return
    finally:
        own.stop.set()
        with own.lock:
            race.is_closed = True
        hedges.leave(race.look)
        if (second := race.second) is not None:
            second.break_off()
        if race.thread is not None:
            race.thread.join()


class _Request(Flight):
    """One of the two requests for a range: where its bytes go, and how far it has come.

    Args:
        start: first byte of the object that ``targets`` take.
        targets: memory of its own.
        etag: ETag of the version to read, empty for any; it is filled in by the first answer.
        cancel: event with which `stop` is set, too.
        moved: called with the number of bytes that have arrived.

    Attributes:
        stop: event that is set when the request is useless.
        total, done: bytes of all targets, and those that have arrived.
        idle: seconds for which nothing has come, as the watcher sees them.
        rest: what another request was faster to receive; its bytes follow those that are done.
    """

    def __init__(
        self, key: str, start: int, targets: Sequence[ReadTarget], etag: list[str], cancel: threading.Event | None,
        hedges: Hedges, *, block: int = _BLOCK, moved: Moved | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.start, self.etag, self.stop = start, etag, LinkedEvent()
        self.stop.other = cancel
        self._key, self._hedges, self._block, self._moved = key, hedges, block, moved
        self._targets = [target for target in targets if target.view.nbytes]
        self._index = self._offset = self.done = 0
        self.total = sum(target.view.nbytes for target in self._targets)
        self.lock = threading.Lock()
        self.rest: memoryview | None = None
        self.idle, self.seen = 0.0, -1

    @property
    def view(self) -> memoryview:
        """Memory for the next bytes, at most a block."""
        return self._targets[self._index].view[self._offset : self._offset + self._block]

    def advance(self, count: int) -> None:
        """Note that ``count`` bytes have arrived in `view`."""
        with self.lock:
            if self.rest is not None:
                raise Cancelled
            target = self._targets[self._index]
            target.received(self._offset, count)
            self.done += count
            self._offset += count
            if self._offset == target.view.nbytes:
                self._index, self._offset = self._index + 1, 0
        if self._moved is not None:
            self._moved(count)

    def attempt(self, send: Send) -> dict[str, Any]:
        """Try once to fetch what is still missing; returns the answer, whose body has been read."""
        byte_range = f"bytes={self.start + self.done}-{self.start + self.total - 1}"
        expected, began, etag = self.total - self.done, time.monotonic(), self.etag
        before, this_thread.flight = this_thread.flight, self
        try:
            self.moves, self.awaits = self.moves + 1, 0
            answer = send(Key=self._key, Range=byte_range, **({"IfMatch": etag[0]} if etag else {}))
            head_at, progress, awaited, complete = time.monotonic(), this_thread.attempts.progress, 0, False
            body, found, length = answer["Body"], answer.get("ETag"), answer.get("ContentLength")
            try:
                if not etag and found:
                    etag.append(found)
                elif found and not same_etag(found, etag[0]):  # rclone takes no notice of If-Match
                    refusal = {"Code": "PreconditionFailed", "Message": "the object has another ETag"}
                    other: Any = {"Error": refusal, "ResponseMetadata": {"HTTPStatusCode": 412}}
                    raise ClientError(other, "GetObject")
                if length is not None and length > expected:
                    raise TruncatedBodyError(
                        f"asked for {expected} bytes ({byte_range}), got {length}: no range support?"
                    )
                while self.done < self.total:
                    if self.stop.is_set():
                        raise Cancelled
                    view = self.view
                    if not awaited:
                        awaited = view.nbytes
                        self.moves, self.awaits = self.moves + 1, awaited
                    count = readinto_response(body, view[:awaited])
                    if count == 0:
                        missing = self.total - self.done
                        raise TruncatedBodyError(f"the body of {byte_range} ended {missing} bytes early")
                    awaited -= count
                    self.advance(count)
                    progress.moved(count)
                complete = True
            finally:
                finish_response(body, complete=complete)
            self._hedges.completed(head_at - began, time.monotonic() - head_at, expected)
            return answer
        except Exception as error:
            if not self.stop.is_set():
                raise
            without_tracebacks(error)
            raise Cancelled from None
        finally:
            self.awaits = None
            self.let_go()
            this_thread.flight = before


class Race:
    """One read of a range: the reader's own request, and the second one while there is one."""

    def __init__(
        self, store: Bucket, key: str, start: int, targets: Sequence[ReadTarget], etag: str | None = None,
        *, moved: Moved | None = None,
    ) -> None:  # fmt: skip
        self._store, self._key, self.hedges = store, key, store.known.hedges
        cancel, etags = store.limit.cancel, [] if etag is None else [etag]
        self.own = _Request(key, start, targets, etags, cancel, self.hedges, moved=moved)
        self.second: _Request | None = None
        self.thread: threading.Thread | None = None
        self.is_closed = False

    def look(self, elapsed: float) -> None:
        """Begin a second request if the reader's own straggles, ``elapsed`` seconds after the last look."""
        own, cancel = self.own, self._store.limit.cancel
        if cancel is not None and cancel.is_set():
            for request in (own, self.second):
                if request is not None:
                    request.break_off()
            return
        moves, awaits = own.moves, own.awaits
        if awaits is None or moves != own.seen:
            own.seen, own.idle = moves, 0.0
            return
        own.idle += elapsed
        known, settings = self._store.known, self._store.settings
        if (
            own.idle <= self.hedges.patience(awaits)
            or self.thread is not None
            or own.total - own.done > _MOST_BYTES
            or not known.gate.is_calm(CALM)
            or not self.hedges.started(min(known.width("download").connections, settings.max_connections))
        ):
            return
        with own.lock:
            first = own.done
            # Without an ETag the rest could be of another version.
            if not self.is_closed and first < own.total and (own.etag or not first):
                try:
                    # Unlike a bytearray, a mapping is not touched before bytes arrive.
                    data = memoryview(mmap.mmap(-1, own.total - first))
                    second = _Request(
                        self._key, own.start + first, [ReadTarget(data)], list(own.etag), own.stop,
                        self.hedges, block=_BLOCK_OF_SECOND,
                    )  # fmt: skip
                    thread = threading.Thread(target=self._run, args=(second, data, first), name="dcp_s3-hedge")
                    thread.start()
                    self.second, self.thread = second, thread
                    return
                except (OSError, RuntimeError):
                    pass  # no memory or no thread: no hedge
        self.hedges.ended(won=False, wasted=0)

    def _run(self, second: _Request, data: memoryview, first: int) -> None:
        overlap = None
        try:
            store = self._store.within(replace(self._store.limit, cancel=second.stop, attempts=1))
            store.request("GetObject", self._key, attempt=second.attempt, data=True)
            overlap = self.overtake(second, data, first)
        except Cancelled:
            pass
        except Exception as error:  # noqa: BLE001 - the reader goes on by itself
            logger.debug("the second request for s3://%s/%s failed: %s", self._store.name, self._key, error)
        finally:
            with self.own.lock:
                self.second = None
            self.hedges.ended(won=overlap is not None, wasted=second.done if overlap is None else overlap)

    def overtake(self, second: _Request, data: memoryview, first: int) -> int | None:
        """Let the reader take what the second request received, from its byte ``first`` on; returns how many of these
        bytes its own had received, too. None: the second one was not faster."""
        own = self.own
        with own.lock:
            if self.is_closed or own.done == own.total:
                return None
            if own.done and (not own.etag or second.etag != own.etag):
                return None  # it could be, or is, another version of the object than what has arrived
            overlap = own.done - first
            own.rest = data[overlap:]
            own.stop.set()
        own.break_off()
        logger.debug("the second request for s3://%s/%s was faster", self._store.name, self._key)
        return overlap
