"""Fetches ranges of a checkpoint's objects in parallel, verifies them, and returns what has arrived.

requests -> threads -> bytes at their place -> checksums, once more if they do not match -> finished transfers
"""

from __future__ import annotations

import gc
import logging
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
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
    """Fetches from one checkpoint's objects in a store.

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
        *,
        buffers: int | None = None,
    ) -> None:
        self._cancel = threading.Event()
        self.store = store.within(replace(store.limit, cancel=self._cancel).shared(settings.stall_timeout))
        self.url, self.settings = url, settings
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

    def fetch(
        self, requests: Collection[ReadRequest], *, threads: int | None = None, most: int = sys.maxsize
    ) -> Generator[Transfer, None, None]:
        """Carry out ``requests``, in order, several at once; yield the transfers that are finished: in place, and
        verified. Raises an error of any thread. Whoever closes it before its end cancels everything.

        Args:
            threads: number of requests at once; None: as many as fill the link.
            most: highest number of requests at once.
        """
        work = _Work(requests, self.carry_out)
        try:
            if threads is None:
                width = self.store.adapt_reads(resize=work.resize, is_busy=lambda: not work.is_over, most=most)
                work.moved, threads = width.moved, width.connections
            work.resize(min(threads, most))
            ended = 0
            while ended < work.started:
                outcome = work.outcomes.get()
                if outcome is None:
                    ended += 1
                elif isinstance(outcome, BaseException):
                    try:
                        raise outcome
                    finally:
                        del outcome  # its traceback has this frame: no cycle
                else:
                    yield from outcome
        except BaseException:
            self.cancel()
            raise
        finally:
            with work.changed:  # begin no more requests, and wait for those under way
                work.is_over = True
                work.queue.clear()
            for thread in work.threads:
                if thread.ident is not None:
                    thread.join()

    def fetch_alone(self, transfers: Sequence[Transfer]) -> None:
        """Fetch transfers that lie one after the other in an object, on this thread, in one request."""
        segments = tuple(segment for transfer in transfers for segment in transfer.segments())
        start, stop = segments[0].start, segments[-1].stop
        left = [ReadRequest(transfers[0].path, start, stop - start, segments)]
        while left:
            left += self.carry_out(left.pop())[1]

    # --- on any thread --------------------------------------------------------------------------------

    def carry_out(self, request: ReadRequest, moved: Moved | None = None) -> tuple[list[Transfer], list[ReadRequest]]:
        """Carry out a request; returns the finished transfers and what to fetch in addition. Damage in transit gets one
        more try, damage at rest is an error."""
        if self._cancel.is_set():
            raise Cancelled
        if len(self.fetched) % _COLLECT_EVERY == _COLLECT_EVERY - 1:
            gc.collect(1)
        finished: list[Transfer] = []
        again: list[Segment] = []
        for transfer in self.receive(request, moved):
            if wrong := transfer.verify():
                (part, found), name = wrong[0], transfer.item.storage_index.fqn
                if transfer.fetched_again:
                    start, stop = transfer.base + part.start, transfer.base + part.stop
                    raise errors.CorruptCheckpointError(
                        f"{name!r} in {self.url}: bytes {start} to {stop - 1} of {transfer.path} have CRC-64/NVME "
                        f"{crc_hex(found)}, recorded was {crc_hex(part.crc or 0)}, twice. The stored data is damaged: "
                        "load an earlier checkpoint",
                        url=str(self.url),
                    )
                logger.warning("checksum of %r in %s does not match; fetching it again", name, self.url)
                transfer.fetched_again = True
                self.store.distrust(self.url.key(transfer.path))
                again += transfer.segments([part for part, _ in wrong])
            elif transfer.complete is not None and (instead := transfer.complete(transfer)) is not None:
                again += instead.segments()
            else:
                finished.append(transfer)
        return finished, plan_requests(again, max_request=self.max_buffered) if again else []

    def receive(self, request: ReadRequest, moved: Moved | None = None) -> list[Transfer]:
        """Receive a request: in place as far as its transfers own memory, the rest in this thread's buffer, from where
        it is put in place. Returns the transfers that this completed."""
        runs = list(_runs(request))
        sizes = [-(-(stop - start) // ALIGNMENT) * ALIGNMENT for start, stop, *_ in runs]
        size = sum([size for size, run in zip(sizes, runs, strict=True) if not run[3]])
        rest: memoryview = getattr(self._local, "buffer", memoryview(b""))
        if rest.nbytes < size:
            self._local.buffer = rest = memoryview(b"")  # the old memory is freed first
            self._local.buffer = rest = view_bytes(torch.empty(size, dtype=torch.uint8, pin_memory=self.pin))
        targets: list[ReadTarget] = []
        # Each with the target that receives it alone, if one does, and its part of the buffer, if it is in there.
        expected: list[tuple[Segment, ReadTarget | None, memoryview | None]] = []
        for (start, stop, inside, in_place), size in zip(runs, sizes, strict=True):
            if in_place:
                first = inside[0].item.base
                view = inside[0].item.memory(start - first, stop - first)
            else:
                view, rest = rest[: stop - start], rest[size:]
            alone = len(inside) == 1 and inside[0][:2] == (start, stop)
            targets.append(ReadTarget(view, checksum=alone and inside[0].item.checked))
            for segment in inside:
                buffered = None if in_place else view[segment.start - start : segment.stop - start]
                expected.append((segment, targets[-1] if alone else None, buffered))
        self.read(request, targets, moved=moved)
        self.fetched.append(request.length)  # one operation: no lock
        complete = []
        for (start, stop, transfer), target, buffered in expected:
            crc = 0
            if target is not None:
                crc = target.crc or 0
            elif buffered is not None and transfer.checked:
                crc = crc64nvme(buffered)
            if transfer.arrived(start - transfer.base, stop - start, crc, buffered):
                complete.append(transfer)
        return complete

    def read(self, request: ReadRequest, targets: Sequence[ReadTarget], *, moved: Moved | None = None) -> None:
        """Fill ``targets`` with the bytes of a request. Raises CorruptCheckpointError if the object differs from the
        metadata: deleted, replaced or too short."""
        path = request.path
        try:
            self.store.read(self.url.key(path), request.start, targets, self.etags.get(path), moved=moved)
            return
        except errors.ObjectNotFoundError as error:
            what = f"its object {path} does not exist: it was deleted after the save. Load an earlier checkpoint"
            cause: errors.StorageError = error
        except errors.PreconditionFailedError as error:
            what, cause = f"its object {path} was replaced while it was read. Remedy: load it again", error
        except errors.OutOfRangeError as error:
            stop = request.start + request.length
            what, cause = f"{path} ends before byte {stop}. Load an earlier checkpoint", error
        raise errors.CorruptCheckpointError(f"{self.url} is damaged: {what}", url=str(self.url)) from cause


class _Work:
    """The threads of one fetch, their queue of requests, which are halved for threads without one, and the outcomes."""

    def __init__(self, requests: Collection[ReadRequest], carry_out: Callable[..., Any]) -> None:
        self.queue = deque(requests)
        """Requests to be taken first: the largest, or what is fetched again."""
        self._carry_out = carry_out
        self._inference = torch.is_inference_mode_enabled()  # a property of the thread
        self.changed = threading.Lock()
        self.threads: list[threading.Thread] = []
        self._alive = self._wanted = self._starting = 0
        self.outcomes: queue.SimpleQueue[list[Transfer] | BaseException | None] = queue.SimpleQueue()
        """Finished transfers of each request that was carried out. None from each thread that has ended."""
        self.started = 0
        """Threads that were started, and therefore end."""
        self.is_over = False
        """Whether there is no more to do than the threads do now."""
        self.moved: Moved | None = None

    def resize(self, count: int) -> None:
        """Have ``count`` threads from now on. Those too many end when they have done their request."""
        with self.changed:
            self._wanted = count
            while self._alive < count and not self.is_over:
                thread = threading.Thread(target=self._run, name=f"dcp_s3-download-{len(self.threads)}")
                self.threads.append(thread)  # before start(): an interrupt in it may leave the thread running
                thread.start()
                self._alive += 1
                self._starting += 1
                self.started += 1

    def _run(self) -> None:
        is_new = True
        try:
            with torch.inference_mode(self._inference):
                while True:
                    with self.changed:
                        self._starting -= is_new
                        is_new = False
                        if self._alive > self._wanted:
                            self._alive -= 1
                            break
                        request = self.queue.popleft() if self.queue else None
                        self.is_over = request is None
                        if request is None:
                            self._alive -= 1
                            break
                        if len(self.queue) < self._starting and (halves := halve(request)) is not None:
                            request, other = halves
                            self.queue.append(other)
                    finished, again = self._carry_out(request, self.moved)
                    if again:
                        with self.changed:
                            self.queue.extendleft(again)
                    self.outcomes.put(finished)
        except BaseException as error:  # noqa: BLE001 - the iterator raises it
            self.outcomes.put(error)
        finally:
            self.outcomes.put(None)


# --- memory that receives -----------------------------------------------------------------------------

# Segments of at least this many bytes are received by themselves.
_LONG = 64 * 2**10


def _runs(request: ReadRequest) -> Iterator[tuple[int, int, list[Segment], bool]]:
    """Cut a request into runs, each received by itself: first byte, end, the segments in it, and whether in place. What
    is not long lies in one run with its neighbours and the gaps between them, as do segments that overlap."""
    at, end = request.start, request.start + request.length
    short: list[Segment] = []  # from ``at`` on
    for segment in request.segments:
        start, stop, transfer = segment
        if request.shared or stop - start < _LONG:
            short.append(segment)
            continue
        if at < start:
            yield at, start, short, False
            short = []
        # Bytes fetched only for a checksum lie before and after those that have a place in memory.
        owned = (stop, stop) if transfer.owned is None else [transfer.base + offset for offset in transfer.owned]
        low, high = (min(max(place, start), stop) for place in owned)
        for first, last, in_place in ((start, low, False), (low, high, True), (high, stop, False)):
            if first < last:
                yield first, last, [Segment(first, last, transfer)], in_place
        at = stop
    if at < end:
        yield at, end, short, False
