"""Fetches ranges of a checkpoint's objects in parallel, verifies them, and returns what has arrived.

    requests -> threads -> bytes at their place -> checksums, once more if they do not match -> finished transfers

Loads, sharing between ranks, read_tensors and exports use it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from dcp_s3 import errors
from dcp_s3.limit import Cancelled
from dcp_s3.load.items import Transfer
from dcp_s3.load.plan import ALIGNMENT, ReadRequest, Segment, halve, plan_requests
from dcp_s3.memory import ReadTarget, crc64nvme, crc_hex, view_bytes
from dcp_s3.settings import Settings
from dcp_s3.store import Moved, Store
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

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


class Fetcher:
    """Fetches from one checkpoint's objects in a store, on threads of a ``name``.

    Args:
        buffers: bytes of memory for what cannot be received in place; None: `LOAD_BUFFERS`.

    Attributes:
        etags: of the objects that must be the ones that the metadata was made of, by path.
        pin: whether buffers are page-locked, for copies to a device.
        fetched: bytes of each request that was carried out.
    """

    def __init__(
        self,
        store: Store,
        url: CheckpointURL,
        settings: Settings,
        name: str,
        *,
        buffers: int | None = None,
    ) -> None:
        self._cancel = threading.Event()
        self.store = store.within(replace(store.limit, cancel=self._cancel).shared(settings.stall_timeout))
        self.url, self.settings, self._name = url, settings, name
        self.buffers = LOAD_BUFFERS if buffers is None else buffers
        share = self.buffers // settings.max_connections
        self.max_buffered = max(_SMALL_BUFFER, min(settings.max_part_size, max(share, min(_BUFFER, self.buffers // 8))))
        """Maximum bytes of a request that goes through a buffer."""
        self.max_buffers = max(1, self.buffers // self.max_buffered)
        """Maximum number of such requests at once."""
        self._local = threading.local()
        self.fetched: list[int] = []
        self.etags: Mapping[str, str] = {}
        self.pin = False

    def cancel(self) -> None:
        """Make all that is under way, and all later reads, fail soon. Safe to call from any thread."""
        self._cancel.set()

    @contextlib.contextmanager
    def fetch(
        self, requests: Collection[ReadRequest], *, threads: int | None = None, most: int = sys.maxsize
    ) -> Iterator[Iterator[Transfer]]:
        """Carry out ``requests``, in order, several at once; iterate over the transfers that are finished: in place,
        and verified.

        The iterator raises an error of any thread. An error that leaves the block cancels everything.

        Args:
            threads: number of requests at once; None: as many as fill the link.
            most: highest number of requests at once.

        Raises:
            CorruptCheckpointError: stored bytes are missing, cut short or not what was written.
            StorageError: S3 failed despite retries.
        """
        work = _Work(requests, self.carry_out, self._name)
        try:
            with contextlib.ExitStack() as stack:
                if threads is None:
                    width = self.store.adapt_reads(resize=work.resize, is_busy=lambda: not work.is_over, most=most)
                    work.moved, threads = width.moved, width.connections
                    stack.enter_context(width)
                work.resize(min(threads, most))
                yield work.arrivals()
        except BaseException:
            self.cancel()
            raise
        finally:
            work.close()

    def fetch_alone(self, transfer: Transfer) -> None:
        """Fetch one transfer on this thread, in one request.

        Raises:
            Exception: the errors of `fetch`'s iterator.
        """
        segments = tuple(transfer.segments())
        start, stop = segments[0].start, segments[-1].stop
        left = [ReadRequest(transfer.path, start, stop - start, segments)]
        while left:
            left += self.carry_out(left.pop())[1]

    # --- on any thread --------------------------------------------------------------------------------

    def carry_out(self, request: ReadRequest, moved: Moved | None = None) -> tuple[list[Transfer], list[ReadRequest]]:
        """Carry out a request; returns the finished transfers, and what to fetch in addition."""
        if self._cancel.is_set():
            raise Cancelled
        if len(self.fetched) % _COLLECT_EVERY == _COLLECT_EVERY - 1:
            gc.collect(1)
        buffer = getattr(self._local, "buffer", None)
        if buffer is None:
            buffer = self._local.buffer = Buffer(pin=self.pin)
        reception = Reception(request, buffer)
        self.read(request.path, request.start, reception.targets, moved=moved)
        self.fetched.append(request.length)  # one operation: no lock
        finished: list[Transfer] = []
        again: list[Segment] = []
        complete = reception.deliver()
        del reception  # it holds memory that is freed when an item is finished
        for transfer in complete:
            more = self._verify(transfer)
            if not more and (instead := transfer.finish()) is not None:
                more = instead.segments()
            again += more
            if not more:
                finished.append(transfer)
        return finished, plan_requests(again, max_request=self.max_buffered) if again else []

    def _verify(self, transfer: Transfer) -> list[Segment]:
        """Compare the checksums: damage in transit gets one more try, damage at rest is an error."""
        wrong = transfer.mismatches()
        if not wrong:
            return []
        part, found = wrong[0]
        if transfer.fetched_again:
            start = transfer.base + part.start
            raise errors.CorruptCheckpointError(
                f"{transfer.name_of(part)!r} in {self.url}: bytes {start} to {transfer.base + part.stop - 1} of "
                f"{transfer.path} have CRC-64/NVME {crc_hex(found)}, recorded was {crc_hex(part.crc or 0)}, twice. The "
                "stored data is damaged: load an earlier checkpoint",
                url=str(self.url),
            )
        logger.warning("checksum of %r in %s does not match; fetching it again", transfer.name_of(part), self.url)
        transfer.fetched_again = True
        self.store.distrust(self.url.key(transfer.path))
        for part, _ in wrong:
            transfer.forget(part)
        return transfer.segments([part for part, _ in wrong])

    def read(self, path: str, start: int, targets: Sequence[ReadTarget], *, moved: Moved | None = None) -> None:
        """Fill ``targets`` with the bytes of object ``path`` from ``start`` on. Safe to call from any thread.

        ``moved`` is called with the number of bytes that have arrived from S3.

        Raises:
            CorruptCheckpointError: the object differs from the metadata: deleted, replaced or too short.
            StorageError: S3 failed despite retries.
            Cancelled: `cancel` was called.
        """
        try:
            self.store.read(self.url.key(path), start, targets, self.etags.get(path), moved=moved)
            return
        except errors.ObjectNotFoundError as error:
            what = f"its object {path} does not exist: it was deleted after the save. Load an earlier checkpoint"
            cause: errors.StorageError = error
        except errors.PreconditionFailedError as error:
            what, cause = f"its object {path} was replaced while it was read. Remedy: load it again", error
        except errors.OutOfRangeError as error:
            stop = start + sum(target.view.nbytes for target in targets)
            what, cause = f"{path} ends before byte {stop}. Load an earlier checkpoint", error
        raise errors.CorruptCheckpointError(f"{self.url} is damaged: {what}", url=str(self.url)) from cause


class _Work:
    """The threads of one fetch, their queue of requests, and the outcomes.

    Requests are halved where there are fewer than threads that were added.
    """

    def __init__(self, requests: Collection[ReadRequest], carry_out: Callable[..., Any], name: str) -> None:
        self._queue = deque(requests)
        """Requests to be taken first: the largest, or what is fetched again."""
        self._carry_out, self._name = carry_out, name
        self._inference = torch.is_inference_mode_enabled()  # a property of the thread
        self._changed = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._alive = self._wanted = self._starting = 0
        self._outcomes: queue.SimpleQueue[list[Transfer] | BaseException | None] = queue.SimpleQueue()
        """Finished transfers of each request that was carried out. None from each thread that has ended."""
        self._started = 0
        """Threads that were started, and therefore end."""
        self.is_over = False
        """Whether there is no more to do than the threads do now."""
        self.moved: Moved | None = None

    def resize(self, count: int) -> None:
        """Have ``count`` threads from now on. Those too many end when they have done their request."""
        with self._changed:
            self._wanted = count
            while self._alive < count and not self.is_over:
                thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}")
                self._threads.append(thread)  # before start(): an interrupt in it may leave the thread running
                thread.start()
                self._alive += 1
                self._starting += 1
                self._started += 1

    def _run(self) -> None:
        try:
            with torch.inference_mode(self._inference):
                first = True
                while (request := self._next(first)) is not None:
                    first = False
                    finished, again = self._carry_out(request, self.moved)
                    if again:
                        with self._changed:
                            self._queue.extendleft(again)
                    self._outcomes.put(finished)
        except BaseException as error:  # noqa: BLE001 - the iterator raises it
            self._outcomes.put(error)
        finally:
            self._outcomes.put(None)

    def _next(self, first: bool) -> ReadRequest | None:
        """The next request to fetch; None for a thread that is to end."""
        with self._changed:
            self._starting -= first
            if self._alive > self._wanted:
                self._alive -= 1
                return None
            request = self._queue.popleft() if self._queue else None
            if request is not None and len(self._queue) < self._starting and (halves := halve(request)) is not None:
                request, other = halves
                self._queue.append(other)
            self.is_over = request is None
            self._alive -= self.is_over
            return request

    def arrivals(self) -> Iterator[Transfer]:
        """The transfers as they are finished, until all threads have ended; raises an error of any thread."""
        ended = 0
        while ended < self._started:
            outcome = self._outcomes.get()
            if outcome is None:
                ended += 1
            elif isinstance(outcome, BaseException):
                try:
                    raise outcome
                finally:
                    del outcome  # its traceback has this frame: no cycle
            else:
                yield from outcome

    def close(self) -> None:
        """Begin no more requests, and wait for those under way."""
        with self._changed:
            self.is_over = True
            self._queue.clear()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()


# --- memory that receives -----------------------------------------------------------------------------


class Buffer:
    """Memory of one thread that requests go through; grows to the largest. ``pin``: page-locked, for a device."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._view = memoryview(b"")

    def reserve(self, size: int) -> memoryview:
        """``size`` bytes at least; what was in it is lost."""
        if self._view.nbytes < size:
            self._view = memoryview(b"")  # the old memory is freed first
            self._view = view_bytes(torch.empty(size, dtype=torch.uint8, pin_memory=self._pin))
        return self._view


# Runs of at least this many bytes are received by themselves.
_LONG = 64 * 2**10


class Reception:
    """The memory that receives one request, and the work to do when it has arrived.

    Attributes:
        targets: memory to be filled, in order.
    """

    def __init__(self, request: ReadRequest, buffer: Buffer) -> None:
        self.targets: list[ReadTarget] = []
        self._received: list[tuple[Segment, ReadTarget | None, memoryview | None]] = []
        """Each with the target that received it alone, if one did, and its part of the buffer, if it is in there."""
        shortest = sys.maxsize if request.shared else _LONG
        runs = list(_runs(request, shortest))
        rest = memoryview(b"")
        sizes = [-(-(stop - start) // ALIGNMENT) * ALIGNMENT for start, stop, *_ in runs]
        if size := sum([size for size, run in zip(sizes, runs, strict=True) if not run[3]]):
            rest = buffer.reserve(size)
        regions: list[tuple[int, memoryview]] = []  # many runs: first byte in the object, memory
        for (start, stop, transfer, direct), size in zip(runs, sizes, strict=True):
            if direct and transfer is not None:
                view = transfer.memory(start - transfer.base, stop - transfer.base)
            else:
                view = rest[: stop - start]
                rest = rest[size:]
            target = ReadTarget(view, checksum=transfer is not None and transfer.checked)
            self.targets.append(target)
            if transfer is None:
                regions.append((start, view))
            else:
                self._received.append((Segment(start, stop, transfer), target, None if direct else view))
        region = 0
        for segment in request.segments:
            start, stop, _ = segment
            if stop - start >= shortest:
                continue
            while region + 1 < len(regions) and regions[region + 1][0] <= start:
                region += 1
            first, view = regions[region]
            self._received.append((segment, None, view[start - first : stop - first]))

    def deliver(self) -> list[Transfer]:
        """Put what was received in place; returns the transfers that this completed.

        A range that came into the buffer in one piece and is damaged is never put in place.
        """
        complete = []
        for (start, stop, transfer), target, view in self._received:
            crc = 0
            if target is not None:
                crc = target.crc or 0
            elif view is not None and transfer.checked:
                crc = crc64nvme(view)
            offset = start - transfer.base
            if view is not None and not (transfer.checked and transfer.is_damaged(offset, stop - start, crc)):
                transfer.place(offset, view)
            if transfer.arrived(offset, stop - start, crc):
                complete.append(transfer)
        return complete


def _runs(request: ReadRequest, shortest: int) -> Iterator[tuple[int, int, Transfer | None, bool]]:
    """Cut a request into runs, each received by itself: first byte, end, transfer, and whether in place.

    Segments of less than ``shortest`` bytes and gaps between two longer ones are one run, without a transfer.
    """
    at, end = request.start, request.start + request.length
    for start, stop, transfer in request.segments:
        if stop - start < shortest:
            continue
        if at < start:
            yield at, start, None, False
        # Bytes fetched only for a checksum lie before and after those that have a place in memory.
        owned = (stop, stop) if transfer.owned is None else [transfer.base + offset for offset in transfer.owned]
        low, high = (min(max(place, start), stop) for place in owned)
        for first, last, direct in ((start, low, False), (low, high, True), (high, stop, False)):
            if first < last:
                yield first, last, transfer, direct
        at = stop
    if at < end:
        yield at, end, None, False
