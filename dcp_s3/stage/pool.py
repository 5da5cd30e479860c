"""The pool of staging buffers. They are reused from save to save, but never while anything can still read them.

DCP does not tell a stager when an upload ends. But every staged tensor, and every view of one, keeps the `lease` of its
buffer alive. So a weak reference to the lease tells when the last reader is gone, however the save ended.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import queue
import threading
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from dcp_s3.errors import StagingError
from dcp_s3.stage.buffers import HostBuffer, Kind
from dcp_s3.stage.regions import place, split
from dcp_s3.units import format_size

logger = logging.getLogger(__name__)

GENERATIONS = 2
"""Staged copies that may exist at a time: one is uploaded while the next one is made. More would let the training run
further ahead of a link that does not keep up, at a whole copy of the state each."""

_POLL_SECONDS = 0.1
_NOTICE_SECONDS = 1.0
"""Less is no matter for a warning: in a queue of saves a copy is often given back just as the next one is made."""
_REPORT_SECONDS = 30.0
_COLLECT_SECONDS = 1.0
_MAX_SLACK = 2  # a free buffer may be this many times larger than the request


class Slot(NamedTuple):
    """Memory for one region: ``lease``, a view of ``buffer``, from byte ``offset`` on."""

    buffer: HostBuffer
    lease: memoryview
    offset: int

    @property
    def address(self) -> int:
        """Address of the first byte."""
        return self.buffer.address + self.offset


class BufferPool:
    """Provides memory for staged states: ``limit`` bytes for all generations together, the rest in files in
    ``spill_dir``. A request for more than ``generations`` at a time waits."""

    def __init__(
        self,
        *,
        limit: int | None,
        generations: int,
        spill_dir: str | None,
        shared: bool = False,
    ) -> None:
        self.limit = limit
        self.generations = generations
        self.spill_dir = spill_dir
        self.shared = shared
        self._free: list[HostBuffer] = []
        self._in_use: dict[int, list[HostBuffer]] = {}
        """The buffers of each staged state, until their leases are gone, by the number of its generation."""
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        # Filled by callbacks of weak references. These may run at any time in any thread, even one that holds the
        # lock; SimpleQueue is made for that.
        self._returned: queue.SimpleQueue[tuple[int, HostBuffer]] = queue.SimpleQueue()
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

    def acquire(self, sizes: Sequence[int], *, pin: bool = False) -> list[Slot]:
        """Memory for regions of ``sizes`` bytes (none is zero). Waits while all generations, or the budget, are in use.

        Raises:
            StagingError: the request exceeds the budget even when nothing else is in use, and there is no spill
                directory.
            StagingError: there is no room for the buffers.
        """
        if not sizes:
            return []
        waiting = _Waiting()
        while True:
            with self._lock:
                self._collect()
                if self._closed.is_set():
                    raise StagingError("the stager was closed. Remedy: close it after the last save, or make a new one")
                reason = self._reason_to_wait(sizes)
                if reason is None:
                    waiting.end()
                    slots = self._allocate(sizes)
                    break
            if not waiting.go_on(reason):
                continue
            with contextlib.suppress(queue.Empty):
                returned = self._returned.get(timeout=_POLL_SECONDS)
                with self._lock:
                    self._take_back(*returned)
                del returned  # this buffer may have to be freed to make room
        if pin:
            for buffer in {slot.buffer for slot in slots}:
                buffer.pin()
        return slots

    def _allocate(self, sizes: Sequence[int]) -> list[Slot]:
        in_memory = split(sizes, self._room())
        parts: dict[Kind, list[int]] = {
            "shared" if self.shared else "private": [number for number, chosen in enumerate(in_memory) if chosen],
            "file": [number for number, chosen in enumerate(in_memory) if not chosen],
        }
        buffers: list[HostBuffer] = []
        slots: dict[int, Slot] = {}
        try:
            for kind, numbers in parts.items():
                if numbers:
                    offsets, size = place([sizes[number] for number in numbers])
                    buffers.append(self._take(size, kind))
                    lease = buffers[-1].lease()
                    slots.update((n, Slot(buffers[-1], lease, at)) for n, at in zip(numbers, offsets, strict=True))
        except BaseException:
            self._free.extend(buffers)
            raise
        generation = next(self._numbers)
        self._in_use[generation] = buffers
        for slot in {id(slot.lease): slot for slot in slots.values()}.values():
            callback = weakref.finalize(slot.lease, _give_back, self._returned, self._closed, generation, slot.buffer)
            callback.atexit = False
        return [slots[number] for number in range(len(sizes))]

    def close(self) -> None:
        """Free what is not in use now, and the rest once its last user is gone. Waiting requests get an error."""
        self._closed.set()
        with self._lock:
            self._collect()
            self._free.clear()
            self._in_use.clear()

    def _collect(self) -> None:
        while True:
            try:
                generation, buffer = self._returned.get_nowait()
            except queue.Empty:
                return
            self._take_back(generation, buffer)

    def _take_back(self, generation: int, buffer: HostBuffer) -> None:
        if self._closed.is_set():
            return
        self._free.append(buffer)
        self._in_use[generation].remove(buffer)
        if not self._in_use[generation]:
            del self._in_use[generation]

    def _buffers_in_use(self) -> list[HostBuffer]:
        return list(itertools.chain.from_iterable(self._in_use.values()))

    def _room(self) -> int | None:
        """Bytes of the budget that are not in use; None: no limit."""
        if self.limit is None:
            return None
        return max(0, self.limit - sum(b.size for b in self._buffers_in_use() if b.kind != "file"))

    def _reason_to_wait(self, sizes: Sequence[int]) -> str | None:
        if len(self._in_use) >= self.generations:
            return f"{len(self._in_use)} earlier saves still hold their staged copies, as many as may exist at a time"
        if self.spill_dir is None and not all(split(sizes, self._room())):
            if not self._in_use:
                raise StagingError(
                    f"the state to stage has {format_size(sum(sizes))}, more than the "
                    f"{format_size(self.limit or 0)} that DCP_S3_STAGING_LIMIT allows this process. Remedy: raise "
                    "DCP_S3_STAGING_LIMIT, or set DCP_S3_SPILL_DIR to a local directory, where the rest is then staged"
                )
            return (
                f"earlier saves still hold most of the {format_size(self.limit or 0)} that DCP_S3_STAGING_LIMIT allows "
                "this process, and DCP_S3_SPILL_DIR is not set"
            )
        return None

    def _take(self, size: int, kind: Kind) -> HostBuffer:
        fitting = [b for b in self._free if b.kind == kind and size <= b.size <= max(size, 1) * _MAX_SLACK]
        if fitting:
            best = min(fitting, key=lambda buffer: buffer.size)
            self._free.remove(best)
            return best
        on_disk = kind == "file"
        self._drop_for(size, on_disk=on_disk)
        try:
            return HostBuffer(size, kind, directory=self.spill_dir)
        except StagingError:
            free = [b for b in self._free if (b.kind == "file") == on_disk]
            if not free:
                raise
            self._free = [b for b in self._free if b not in free]
            del free
        return HostBuffer(size, kind, directory=self.spill_dir)

    def _drop_for(self, size: int, *, on_disk: bool) -> None:
        """Free the buffers that were unused longest. No more are kept than generations, nor beyond the budget."""
        in_use = [b for b in self._buffers_in_use() if (b.kind == "file") == on_disk]
        free = [b for b in self._free if (b.kind == "file") == on_disk]
        limit = None if on_disk else self.limit
        while free and (
            len(in_use) + len(free) >= self.generations
            or (limit is not None and sum(b.size for b in (*in_use, *free)) + size > limit)
        ):
            self._free.remove(free.pop(0))


class _Waiting:
    """Logs one wait for memory, and collects garbage meanwhile.

    The errors of parts and buckets that a failed save did not raise may be in cycles with their own frames, which hold
    its copy. Training loops that turn the collector off would keep those.
    """

    def __init__(self) -> None:
        self._started = self._collected = 0.0
        self._next_report, self._level = _NOTICE_SECONDS, logging.INFO
        self._reason = ""

    def go_on(self, reason: str) -> bool:
        """Whether to wait on for ``reason``. False: look again first, because garbage was collected."""
        self._reason, now = reason, time.monotonic()
        if not self._collected:
            self._collected = now
            gc.collect()
            return False
        if not self._started:
            self._started = now
            logger.info("staging waits: %s", reason)
        waited = now - self._started
        if waited >= self._next_report:
            self._next_report, self._level = waited + _REPORT_SECONDS, logging.WARNING
            logger.warning(
                "staging has waited for %.0f s: %s. (A planner or staged state that is kept also holds its copy.)",
                waited,
                reason,
            )
        if now - self._collected >= max(_COLLECT_SECONDS, waited / 2):
            self._collected = now
            gc.collect()
        return True

    def end(self) -> None:
        """Log how long the wait took, if there was one."""
        if self._started:
            logger.log(self._level, "staging waited for %.1f s: %s", time.monotonic() - self._started, self._reason)


def _give_back(
    returned: queue.SimpleQueue[tuple[int, HostBuffer]],
    closed: threading.Event,
    generation: int,
    buffer: HostBuffer,
) -> None:
    if not closed.is_set():
        returned.put((generation, buffer))
