"""The pool of staging buffers: reused from save to save, never while anything can still read them.

DCP does not tell a stager when an upload ends. But every staged tensor, and every view of one, keeps the `lease` of its
buffer alive, so a weak reference to the lease tells when the last reader is gone, however the save ended.
"""

from __future__ import annotations

import gc
import inspect
import logging
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dcp_s3.errors import StagingLimitError
from dcp_s3.staging.buffers import Buffer, Kind
from dcp_s3.staging.regions import place, split
from dcp_s3.units import format_size

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 30.0
_MAX_SLACK = 2  # a free buffer serves requests down to its size over this


@dataclass(eq=False)
class Generation:
    """The buffers of one staged state. In use until every lease of them is gone."""

    buffers: list[Buffer] = field(default_factory=list)
    leased: int = 0


class Slot(NamedTuple):
    """Where a region lies: bytes ``offset`` onwards of ``lease``, a view of ``buffer``."""

    buffer: Buffer
    lease: memoryview
    offset: int

    @property
    def address(self) -> int:
        """Of the first byte."""
        return self.buffer.address + self.offset


class BufferPool:
    """Hands out memory for staged states.

    Args:
        limit: bytes of memory for all generations together; None for no limit.
        generations: how many may be in use at a time; a request for one more waits.
        spill_dir: directory for what exceeds ``limit``.
        pin: register the memory with CUDA.
        shared: begin with memory that other processes can map.
    """

    def __init__(
        self,
        *,
        limit: int | None,
        generations: int,
        spill_dir: str | None,
        pin: bool = False,
        shared: bool = False,
    ) -> None:
        self.limit = limit
        self.generations = generations
        self.spill_dir = spill_dir
        self.shared = shared
        self._pin = pin
        self._free: list[Buffer] = []
        self._in_use: set[Generation] = set()
        self._lock = threading.Lock()
        # Filled by callbacks of weak references, which may come at any instant, in any thread, also one that holds
        # the lock: SimpleQueue is made for that.
        self._returned: queue.SimpleQueue[tuple[Generation, Buffer]] = queue.SimpleQueue()
        self._closed = threading.Event()

    @property
    def in_use(self) -> int:
        """Generations that something still refers to."""
        with self._lock:
            self._collect()
            return len(self._in_use)

    @property
    def size(self) -> int:
        """Bytes of all buffers, in use and free, in memory and on disk."""
        with self._lock:
            self._collect()
            return sum(buffer.size for buffer in (*self._free, *self._buffers_in_use()))

    def acquire(self, sizes: Sequence[int]) -> list[Slot]:
        """Memory for regions of ``sizes`` bytes. Waits while all generations, or the budget, are in use.

        Raises:
            StagingLimitError: over the budget even when nothing else is in use, and there is no spill directory.
            StagingError: there is no room for the buffers.
        """
        if not sizes:
            return []
        with self._lock:
            self._collect()
            self._wait_for_turn(sizes)
            in_memory = split(sizes, self._room())
            generation = Generation()
            slots: list[Slot | None] = [None] * len(sizes)
            try:
                for kind, wanted in (("memory", True), ("file", False)):
                    numbers = [number for number, choice in enumerate(in_memory) if choice == wanted]
                    if not numbers:
                        continue
                    offsets, size = place([sizes[number] for number in numbers])
                    buffer = self._take(size, "file" if kind == "file" else self._memory_kind())
                    generation.buffers.append(buffer)
                    lease = buffer.lease()
                    for number, offset in zip(numbers, offsets, strict=True):
                        slots[number] = Slot(buffer, lease, offset)
            except BaseException:
                self._free.extend(generation.buffers)
                raise
            self._lend(generation, [slot for slot in slots if slot is not None])
            return [slot for slot in slots if slot is not None]

    def close(self) -> None:
        """Free what is not in use now, and the rest when it is not used any more."""
        self._closed.set()
        with self._lock:
            self._collect()
            self._free.clear()

    def _lend(self, generation: Generation, slots: Sequence[Slot]) -> None:
        leases = {id(slot.lease): slot for slot in slots}
        generation.leased = len(leases)
        self._in_use.add(generation)
        for slot in leases.values():
            callback = weakref.finalize(slot.lease, _give_back, self._returned, self._closed, generation, slot.buffer)
            callback.atexit = False

    def _collect(self) -> None:
        while True:
            try:
                generation, buffer = self._returned.get_nowait()
            except queue.Empty:
                return
            self._take_back(generation, buffer)

    def _take_back(self, generation: Generation, buffer: Buffer) -> None:
        generation.leased -= 1
        if not self._closed.is_set():
            self._free.append(buffer)
        generation.buffers.remove(buffer)
        if not generation.leased:
            self._in_use.discard(generation)

    def _buffers_in_use(self) -> list[Buffer]:
        return [buffer for generation in self._in_use for buffer in generation.buffers]

    def _room(self) -> int | None:
        """Bytes of the budget that are not in use."""
        if self.limit is None:
            return None
        return max(0, self.limit - sum(b.size for b in self._buffers_in_use() if b.kind != "file"))

    def _memory_kind(self) -> Kind:
        return "shared" if self.shared else "private"

    def _reason_to_wait(self, sizes: Sequence[int]) -> str | None:
        if len(self._in_use) >= self.generations:
            return (
                f"{len(self._in_use)} earlier saves still hold their staged copies, as many as "
                f"DCP_S3_STAGING_GENERATIONS={self.generations} allows"
            )
        if self.spill_dir is None and not all(split(sizes, self._room())):
            if not self._in_use:
                raise StagingLimitError(
                    f"the state to stage has {format_size(sum(sizes))}, more than the "
                    f"{format_size(self.limit or 0)} that DCP_S3_STAGING_LIMIT allows this process. Remedy: raise "
                    "DCP_S3_STAGING_LIMIT, or set DCP_S3_SPILL_DIR to a local directory, where the rest is then staged"
                )
            return (
                f"earlier saves still hold most of the {format_size(self.limit or 0)} that DCP_S3_STAGING_LIMIT allows "
                "this process, and DCP_S3_SPILL_DIR is not set"
            )
        return None

    def _wait_for_turn(self, sizes: Sequence[int]) -> None:
        """Wait until there is a generation and, without a spill directory, memory."""
        reason = self._reason_to_wait(sizes)
        if reason is None:
            return
        drop_finished_frames()
        self._collect()
        reason = self._reason_to_wait(sizes)
        if reason is None:
            return
        started = reported = time.monotonic()
        logger.warning("staging waits: %s", reason)
        while reason is not None:
            try:
                self._take_back(*self._returned.get(timeout=1.0))
            except queue.Empty:
                now = time.monotonic()
                if now - reported >= _REPORT_SECONDS:
                    reported = now
                    logger.warning("staging has waited for %.0f s: %s", now - started, reason)
                    drop_finished_frames()
                continue
            cause, reason = reason, self._reason_to_wait(sizes)
        logger.warning("staging waited for %.1f s: %s", time.monotonic() - started, cause)

    def _take(self, size: int, kind: Kind) -> Buffer:
        fitting = [b for b in self._free if b.kind == kind and size <= b.size <= max(size, 1) * _MAX_SLACK]
        if fitting:
            best = min(fitting, key=lambda buffer: buffer.size)
            self._free.remove(best)
            return best
        self._drop_for(size, on_disk=kind == "file")
        return Buffer(size, kind, directory=self.spill_dir, pin=self._pin and kind != "file")

    def _drop_for(self, size: int, *, on_disk: bool) -> None:
        """Free buffers that lay unused the longest: no more are kept than generations, nor beyond the budget."""
        in_use = [b for b in self._buffers_in_use() if (b.kind == "file") == on_disk]
        free = [b for b in self._free if (b.kind == "file") == on_disk]
        limit = None if on_disk else self.limit
        while free and (
            len(in_use) + len(free) >= self.generations
            or (limit is not None and sum(b.size for b in (*in_use, *free)) + size > limit)
        ):
            self._free.remove(free.pop(0))


def _give_back(
    returned: queue.SimpleQueue[tuple[Generation, Buffer]],
    closed: threading.Event,
    generation: Generation,
    buffer: Buffer,
) -> None:
    if not closed.is_set():
        returned.put((generation, buffer))


def drop_finished_frames() -> None:
    """Empty the frames that failed saves left behind.

    A caller may keep the future of a failed save; its exception keeps the traceback, that the frames of torch's and our
    functions, and these the staged state, for good. The functions have ended: nothing reads those variables but a
    debugger.
    """
    gc.collect()
    for candidate in gc.get_objects():
        if not issubclass(type(candidate), BaseException):  # isinstance would ask proxies for their class
            continue
        trace = candidate.__traceback__
        while trace is not None:
            frame, trace = trace.tb_frame, trace.tb_next
            module = frame.f_globals.get("__name__", "")
            if not module.startswith(("torch.distributed.checkpoint.", "dcp_s3.")):
                continue
            if frame.f_code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
                continue  # a suspended one would be closed
            try:
                frame.clear()
            except RuntimeError:
                continue  # still running
