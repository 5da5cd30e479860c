"""The pool of staging buffers. They are reused from save to save, but never while anything can still read them.

DCP does not tell a stager when an upload ends. But every staged tensor, and every view of one, keeps the `lease` of its
buffer alive. So a weak reference to the lease tells whether the last reader is gone, however the save ended.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from typing import NamedTuple

from dcp_s3.errors import StagingError
from dcp_s3.stage.buffers import HostBuffer, Kind
from dcp_s3.units import format_size

logger = logging.getLogger(__name__)

GENERATIONS = 2
"""Staged copies that may exist at a time: one is uploaded while the next one waits for its turn. More would let the
training run further ahead of a link that does not keep up, at a whole copy of the state each."""
ALIGNMENT = 64
"""Alignment in bytes of each region in its buffer: a cache line, which is enough for any dtype."""

_POLL_SECONDS = 0.05
_REPORT_SECONDS = 30.0
_COLLECT_SECONDS = 5.0
_MAX_SLACK = 2  # a free buffer may be this many times larger than the request


def place(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of regions of ``sizes`` bytes in one buffer, and the size of the buffer in bytes."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def split(sizes: Sequence[int], room: int | None) -> list[bool]:
    """Which regions fit in memory of ``room`` bytes (None: no limit). The others go to disk.

    The smallest come first, so that few and large regions go to disk.
    """
    if room is None:
        return [True] * len(sizes)
    in_memory = [False] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: sizes[number]):
        size = -(-sizes[number] // ALIGNMENT) * ALIGNMENT
        if size > room:
            break
        room -= size
        in_memory[number] = True
    return in_memory


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

    def __init__(self, *, limit: int | None, spill_dir: str | None, generations: int = GENERATIONS) -> None:
        self.limit, self.spill_dir, self.generations = limit, spill_dir, generations
        self.shared = False
        """Whether other processes can map the memory."""
        self._free: list[HostBuffer] = []
        self._in_use: list[list[tuple[weakref.ref[memoryview], HostBuffer]]] = []
        """The buffers of each staged state, with their leases."""
        self._lock = threading.Lock()
        self._closed = threading.Event()

    @property
    def in_use(self) -> int:
        """Generations that something still refers to."""
        with self._lock:
            self._collect()
            return len(self._in_use)

    @property
    def buffers(self) -> list[HostBuffer]:
        """All buffers, in use and free."""
        with self._lock:
            self._collect()
            return [*self._free, *self._used()]

    def acquire(self, sizes: Sequence[int], *, pin: bool = False) -> list[Slot]:
        """Memory for regions of ``sizes`` bytes (none is zero). Waits while all generations, or the budget, are in use.

        Raises:
            StagingError: the request exceeds the budget even when nothing else is in use, and there is no spill
                directory.
            StagingError: there is no room for the buffers.
        """
        if not sizes:
            return []
        started = reported = collected = 0.0
        while True:
            with self._lock:
                self._collect()
                if self._closed.is_set():
                    raise StagingError("the stager was closed. Remedy: close it after the last save, or make a new one")
                reason = self._reason_to_wait(sizes)
                if reason is None:
                    slots = self._allocate(sizes)
                    break
            now = time.monotonic()
            if now - collected >= _COLLECT_SECONDS:
                # The errors of parts and buckets that a failed save did not raise may be in cycles with their own
                # frames, which hold its copy. Training loops that turn the collector off would keep those.
                collected = now
                gc.collect()
                continue
            if not started:
                started = reported = now
                logger.info("staging waits: %s", reason)
            elif now - reported >= _REPORT_SECONDS:
                reported = now
                kept = "(A planner or staged state that is kept also holds its copy.)"
                logger.warning("staging has waited for %.0f s: %s. %s", now - started, reason, kept)
            self._closed.wait(_POLL_SECONDS)
        if pin:
            for buffer in {slot.buffer for slot in slots}:
                buffer.pin()
        return slots

    def close(self) -> None:
        """Free what is not in use now, and the rest once its last user is gone. Waiting requests get an error."""
        self._closed.set()
        with self._lock:
            self._free.clear()
            self._in_use.clear()

    def _collect(self) -> None:
        """Take back what nobody reads any more."""
        for generation in self._in_use:
            self._free += [buffer for lease, buffer in generation if lease() is None]
            generation[:] = [each for each in generation if each[1] not in self._free]
        self._in_use = [generation for generation in self._in_use if generation]

    def _used(self) -> list[HostBuffer]:
        return [buffer for generation in self._in_use for _, buffer in generation]

    def _room(self) -> int | None:
        """Bytes of the budget that are not in use; None: no limit."""
        if self.limit is None:
            return None
        return max(0, self.limit - sum(b.size for b in self._used() if b.kind != "file"))

    def _reason_to_wait(self, sizes: Sequence[int]) -> str | None:
        if len(self._in_use) >= self.generations:
            return f"{len(self._in_use)} earlier saves still hold their staged copies, as many as may exist at a time"
        if self.spill_dir is not None or all(split(sizes, self._room())):
            return None
        limit = f"the {format_size(self.limit or 0)} that DCP_S3_STAGING_LIMIT allows this process"
        if self._in_use:
            return f"earlier saves still hold most of {limit}, and DCP_S3_SPILL_DIR is not set"
        raise StagingError(
            f"the state to stage has {format_size(sum(sizes))}, more than {limit}. Remedy: raise DCP_S3_STAGING_LIMIT, "
            "or set DCP_S3_SPILL_DIR to a local directory, where the rest is then staged"
        )

    def _allocate(self, sizes: Sequence[int]) -> list[Slot]:
        in_memory = split(sizes, self._room())
        parts: dict[Kind, list[int]] = {
            "shared" if self.shared else "private": [number for number, chosen in enumerate(in_memory) if chosen],
            "file": [number for number, chosen in enumerate(in_memory) if not chosen],
        }
        leased: list[tuple[memoryview, HostBuffer]] = []
        slots: dict[int, Slot] = {}
        try:
            for kind, numbers in parts.items():
                if numbers:
                    offsets, size = place([sizes[number] for number in numbers])
                    buffer = self._take(size, kind)
                    leased.append((buffer.lease(), buffer))
                    slots.update((n, Slot(buffer, leased[-1][0], at)) for n, at in zip(numbers, offsets, strict=True))
        except BaseException:
            self._free += [buffer for _, buffer in leased]
            raise
        self._in_use.append([(weakref.ref(lease), buffer) for lease, buffer in leased])
        return [slots[number] for number in range(len(sizes))]

    def _take(self, size: int, kind: Kind) -> HostBuffer:
        fitting = [b for b in self._free if b.kind == kind and size <= b.size <= max(size, 1) * _MAX_SLACK]
        if fitting:
            best = min(fitting, key=lambda buffer: buffer.size)
            self._free.remove(best)
            return best
        self._drop_for(size, on_disk=kind == "file")
        try:
            return HostBuffer(size, kind, directory=self.spill_dir)
        except StagingError:  # those that are free may take the room
            self._free = [b for b in self._free if (b.kind == "file") != (kind == "file")]
        return HostBuffer(size, kind, directory=self.spill_dir)

    def _drop_for(self, size: int, *, on_disk: bool) -> None:
        """Free the buffers that were unused longest. No more are kept than generations, nor beyond the budget."""
        in_use = [b for b in self._used() if (b.kind == "file") == on_disk]
        free = [b for b in self._free if (b.kind == "file") == on_disk]
        limit = None if on_disk else self.limit
        while free and (
            len(in_use) + len(free) >= self.generations
            or (limit is not None and sum(b.size for b in (*in_use, *free)) + size > limit)
        ):
            self._free.remove(free.pop(0))
