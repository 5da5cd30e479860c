"""The engine: fetches ranges of a checkpoint's objects in parallel, verifies them, and returns what has arrived.

    requests -> threads -> bytes at their place -> checksums, once more if they do not match -> finished transfers

Loads, sharing between ranks, verify and read_tensors use it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from dcp_s3 import errors
from dcp_s3.checksum import crc_hex
from dcp_s3.limit import Cancelled, Deadline
from dcp_s3.load.plan import READ_GAP, ReadRequest, Segment, halve, plan_requests
from dcp_s3.load.transfer import Buffer, Reception, Transfer
from dcp_s3.memory import ReadTarget
from dcp_s3.process import collect_young
from dcp_s3.settings import Settings
from dcp_s3.store import Moved, ReadWidth, Store
from dcp_s3.units import format_size
from dcp_s3.url import CheckpointURL
from dcp_s3.workers import Workers

logger = logging.getLogger(__name__)


class Arrival(NamedTuple):
    """A request that has been carried out."""

    request: ReadRequest
    """The request as it was planned."""
    finished: list[Transfer]
    """Transfers that this request completed: in place, and verified."""


class Work:
    """Queue of one fetch: requests to be carried out, and their outcomes. Thread-safe.

    ``ahead`` requests may be taken before `make_room` is called. With ``divide`` they are halved where there are fewer
    than threads that were added.
    """

    def __init__(self, requests: Iterable[ReadRequest], ahead: int, *, divide: bool = False) -> None:
        self._planned: deque[ReadRequest] = deque(requests if divide else ())
        self._requests = iter(() if divide else requests)
        self._expected = 0
        """Threads that have not asked for their first request."""
        self._again: deque[ReadRequest] = deque()
        self._room = ahead
        self._wanted = 0
        self._surplus = 0
        self._is_over = False
        self._changed = threading.Condition()
        self.outcomes: queue.SimpleQueue[Arrival | BaseException | None] = queue.SimpleQueue()
        """Also None from each thread that has ended."""
        self.running = 0
        """Threads whose end has not been noted."""

    def resize(self, count: int) -> int:
        """Have ``count`` threads from now on; returns how many to start. Surplus ones get no more requests."""
        with self._changed:
            more, self._wanted = count - self._wanted, count
            if more < 0:
                self._surplus -= more
                return 0
            staying = min(more, self._surplus)
            self._surplus -= staying
            starting = 0 if self._is_over else more - staying
            self.running += starting
            self._expected += starting
            return starting

    def ended(self) -> None:
        with self._changed:
            self.running -= 1

    @property
    def is_busy(self) -> bool:
        """Whether there is more to do than the threads do now."""
        return not self._is_over and self._room > 0

    def next(self) -> ReadRequest | None:
        """The next request to fetch; None for a thread that is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._room > 0)
            if self._surplus:
                self._surplus -= 1
                return None
            request = self._take()
            self._is_over = request is None
            self._room -= request is not None
            return request

    def _take(self) -> ReadRequest | None:
        self._expected = max(0, self._expected - 1)
        if self._again:
            return self._again.popleft()
        if not self._planned:
            return next(self._requests, None)
        request = self._planned.popleft()  # the largest
        halves = halve(request) if len(self._planned) < self._expected else None
        if halves is None:
            return request
        self._planned.append(halves[1])
        return halves[0]

    def add(self, requests: Iterable[ReadRequest]) -> None:
        """Add requests to be fetched before all others."""
        with self._changed:
            self._again.extend(requests)

    def make_room(self) -> None:
        with self._changed:
            self._room += 1
            self._changed.notify()

    def stop(self) -> None:
        """Let `next` return nothing more."""
        with self._changed:
            self._requests, self._room, self._is_over = iter(()), sys.maxsize, True
            self._again.clear()
            self._planned.clear()
            self._changed.notify_all()


_TOO_LATE = (queue.Empty, errors.DeadlineExceededError)

LOAD_BUFFERS = 512 * 2**20
"""Bytes of host memory, per process, for loading what cannot be received in place: tensors on a device, strided ones,
other dtypes, parts of rows. 32 buffers of 16 MiB keep a link of several GiB/s busy."""

# Number of requests between collections of the reference cycles that botocore leaves.
_COLLECT_EVERY = 100
# Minimum bytes of a request that goes through a buffer.
_SMALL_BUFFER = 2**20
# Bytes of such a request where there are more connections than buffers of this size: it fills a connection to S3 for a
# few times its latency.
_BUFFER = 16 * 2**20


class Source:
    """The objects of a checkpoint in a store.

    ``buffers`` are the bytes of `LOAD_BUFFERS` to use instead.
    """

    def __init__(self, store: Store, url: CheckpointURL, settings: Settings, *, buffers: int | None = None) -> None:
        self._cancel = threading.Event()
        self._store = store.within(replace(store.limit, cancel=self._cancel))
        self.url = url
        self.settings = settings
        self.buffers = LOAD_BUFFERS if buffers is None else buffers

    @property
    def deadline(self) -> Deadline | None:
        return self._store.limit.deadline

    @property
    def cancelled(self) -> bool:
        return self._cancel.is_set()

    def cancel(self) -> None:
        """Make reads fail soon. Safe to call from any thread."""
        self._cancel.set()

    def distrust(self, path: str) -> None:
        """Read this object from the store from now on, not from a copy of it."""
        self._store.distrust(self.url.key(path))

    @property
    def connections(self) -> int:
        return self._store.read_width()

    def adapt(self, *, resize: Callable[[int], None], is_busy: Callable[[], bool], most: int) -> ReadWidth:
        """Adapts the number of requests of one transfer; see `Store.adapt_reads`."""
        return self._store.adapt_reads(resize=resize, is_busy=is_busy, most=most)

    def read(self, path: str, start: int, targets: Sequence[ReadTarget], *, moved: Moved | None = None) -> None:
        """Fill ``targets`` with the bytes of object ``path`` from ``start`` on. Safe to call from any thread.

        ``moved`` is called with the number of bytes that have arrived from S3.

        Raises:
            CorruptCheckpointError: the object differs from the metadata: deleted, replaced or too short.
            StorageError: S3 failed despite retries.
            Cancelled: `cancel` was called.
        """
        try:
            self._store.read(self.url.key(path), start, targets, moved=moved)
        except errors.StorageError as error:
            lost = self._explain(error, path, start + sum(target.view.nbytes for target in targets))
            if lost is None:
                raise
            try:
                raise lost from error
            finally:
                del lost  # its traceback has this frame: no cycle

    def _explain(self, error: errors.StorageError, path: str, stop: int) -> errors.CorruptCheckpointError | None:
        """The damage to the checkpoint that an answer of S3 shows, None if it shows none."""
        if isinstance(error, errors.ObjectNotFoundError):
            what = (
                f"is incomplete: its object {path} does not exist. It was deleted after the save: load an earlier "
                "checkpoint"
            )
        elif isinstance(error, errors.PreconditionFailedError):
            what = f"changed while it was read: its object {path} was replaced. Remedy: load it again"
        elif isinstance(error, errors.OutOfRangeError):
            what = f"is damaged: {path} ends before byte {stop}. Load an earlier checkpoint"
        else:
            return None
        return errors.CorruptCheckpointError(f"{self.url} {what}", url=str(self.url))


class Receiver(Protocol):
    """The memory of one request, and what to do when it is full. `Reception` implements it.

    Attributes:
        targets: memory to be filled, in order.
    """

    targets: list[ReadTarget]

    def deliver(self) -> list[Transfer]:
        """Put what was received in place; returns the transfers that this completed."""


class Engine:
    """Carries out requests for transfers, on threads of a ``name``.

    ``receiver`` makes the memory of a request; by default, in place where that is possible.
    """

    def __init__(
        self, source: Source, name: str, receiver: Callable[[ReadRequest, Buffer], Receiver] = Reception
    ) -> None:
        self._source = source
        self._name = name
        self._receiver = receiver
        self._buffers = threading.local()
        self._requests = itertools.count(1)
        self._fetched: list[int] = []
        self.pin = False
        """Whether buffers are page-locked, for copies to a device."""

    @property
    def fetched_bytes(self) -> int:
        return sum(self._fetched)

    @property
    def max_buffered(self) -> int:
        """Maximum bytes of a request that goes through a buffer."""
        settings, buffers = self._source.settings, self._source.buffers
        share = buffers // settings.max_connections
        return max(_SMALL_BUFFER, min(settings.max_part_size, max(share, min(_BUFFER, buffers // 8))))

    @property
    def max_buffers(self) -> int:
        """Maximum number of requests that go through buffers at once."""
        return max(1, self._source.buffers // self.max_buffered)

    @contextlib.contextmanager
    def fetch(
        self,
        requests: Iterable[ReadRequest],
        *,
        threads: int | None = None,
        most: int = sys.maxsize,
        total: int = 0,
        ahead: int | None = None,
        divide: bool = False,
    ) -> Iterator[Iterator[Arrival]]:
        """Carry out ``requests``, in order, several at once; iterate over what has arrived.

        The iterator raises an error of any thread. An error that leaves the block cancels what is in flight, and the
        source with it.

        Args:
            requests: requests, taken as threads become free.
            threads: number of requests at once; None: as many as fill the link.
            most: highest number of requests at once.
            total: bytes of all requests, for the deadline's error message; 0 to leave them out.
            ahead: maximum number of requests in flight, or done and not taken yet; None: no limit.
            divide: whether requests may be halved, so that connections that are added have some.

        Raises:
            CorruptCheckpointError: stored bytes are missing, cut short or not what was written.
            DeadlineExceededError: the source's deadline has passed.
            StorageError: S3 failed despite retries.
        """
        work = Work(requests, ahead or sys.maxsize, divide=divide)
        inference = torch.is_inference_mode_enabled()  # a property of the thread
        pool = Workers(1, self._name)
        moved: Moved | None = None

        def resize(count: int) -> None:
            pool.resize(max(count, work.running))
            for _ in range(work.resize(count)):
                pool.submit(self._work, work, inference, moved)

        try:
            with contextlib.ExitStack() as stack:
                if threads is None:
                    width = self._source.adapt(resize=resize, is_busy=lambda: work.is_busy, most=most)
                    moved = width.moved
                    resize(width.connections)
                    stack.enter_context(width)
                else:
                    resize(min(threads, most))
                yield self._arrivals(work, total)
        except BaseException:
            self._source.cancel()
            raise
        finally:
            work.stop()
            pool.close()

    def fetch_alone(self, transfer: Transfer) -> None:
        """Fetch one transfer on this thread, in one request.

        Raises:
            Exception: the errors of `fetch`'s iterator.
        """
        segments = tuple(transfer.segments())
        start, stop = segments[0].start, segments[-1].stop
        left = deque([ReadRequest(transfer.path, start, stop - start, segments)])
        while left:
            _, again = self._carry_out(left.popleft())
            left.extend(again)

    def _arrivals(self, work: Work, total: int) -> Iterator[Arrival]:
        deadline, received = self._source.deadline, 0
        while work.running:
            try:
                outcome = work.outcomes.get(timeout=None if deadline is None else deadline.left)
            except queue.Empty as empty:
                outcome = empty
            if outcome is None:
                work.ended()
                continue
            if isinstance(outcome, Arrival):
                received += outcome.request.length
                work.make_room()
                yield outcome
                continue
            try:
                if deadline is not None and deadline.passed and isinstance(outcome, _TOO_LATE):
                    came = f"{format_size(received)} of the {format_size(total)}" if total else "nothing"
                    what = f"the load of {self._source.url}"
                    raise deadline.error(what, f"{came} of this rank had arrived") from outcome
                raise outcome
            finally:
                del outcome  # its traceback has this frame: no cycle

    # --- on the pool ----------------------------------------------------------------------------------

    def _work(self, work: Work, inference: bool, moved: Moved | None) -> None:
        try:
            with torch.inference_mode(inference):
                while (request := work.next()) is not None:
                    if self._source.cancelled:
                        raise Cancelled
                    finished, again = self._carry_out(request, moved)
                    work.add(again)
                    work.outcomes.put(Arrival(request, finished))
        except BaseException as error:  # noqa: BLE001 - the iterator raises it
            work.outcomes.put(error)
        finally:
            work.outcomes.put(None)

    def _carry_out(self, request: ReadRequest, moved: Moved | None = None) -> tuple[list[Transfer], list[ReadRequest]]:
        """Carry out a request; returns the finished transfers, and what to fetch in addition."""
        if next(self._requests) % _COLLECT_EVERY == 0:
            collect_young()
        buffer = getattr(self._buffers, "buffer", None)
        if buffer is None:
            buffer = self._buffers.buffer = Buffer(pin=self.pin)
        receiver = self._receiver(request, buffer)
        try:
            self._source.read(request.path, request.start, receiver.targets, moved=moved)
            self._fetched.append(request.length)  # one operation: no lock
        except errors.CorruptCheckpointError as error:
            lost = list(dict.fromkeys(segment.item for segment in request.segments))
            for transfer in lost:
                transfer.give_up(error)
            return lost, []
        finished: list[Transfer] = []
        again: list[ReadRequest] = []
        complete = receiver.deliver()
        del receiver  # it holds memory that is freed when an item is finished
        for transfer in complete:
            more = self._verify(transfer)
            if not more and (instead := transfer.finish()) is not None:
                more = self._plan(instead.segments())
            again += more
            if not more:
                finished.append(transfer)
        return finished, again

    def _verify(self, transfer: Transfer) -> list[ReadRequest]:
        """Compare the checksums: damage in transit gets one more try, damage at rest is an error."""
        wrong = transfer.mismatches()
        if not wrong:
            return []
        (part, found), url = wrong[0], self._source.url
        if transfer.fetched_again:
            start = transfer.base + part.start
            damage = (
                f"{transfer.name_of(part)!r} in {url}: bytes {start} to {transfer.base + part.stop - 1} of "
                f"{transfer.path} have CRC-64/NVME {crc_hex(found)}, recorded was {crc_hex(part.crc or 0)}, twice. The "
                "stored data is damaged: load an earlier checkpoint"
            )
            transfer.give_up(errors.CorruptCheckpointError(damage, url=str(url)))
            return []
        logger.warning("checksum of %r in %s does not match; fetching it again", transfer.name_of(part), url)
        transfer.fetched_again = True
        self._source.distrust(transfer.path)
        for part, _ in wrong:
            transfer.forget(part)
        return self._plan(transfer.segments(part for part, _ in wrong))

    def _plan(self, segments: Sequence[Segment]) -> list[ReadRequest]:
        return plan_requests(segments, max_request=self.max_buffered, max_gap=READ_GAP)
