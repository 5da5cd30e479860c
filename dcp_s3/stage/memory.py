"""Host memory for staged tensors, and the pool in which it is used again, but never while anything can still read it.

Every staged tensor, and every view of one, keeps the `lease` of its buffer alive. The pool has a weak reference to it.
"""

from __future__ import annotations

import gc
import itertools
import logging
import mmap
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from dcp_s3 import torch_private
from dcp_s3.errors import StagingError
from dcp_s3.units import format_size

logger = logging.getLogger(__name__)

Kind = Literal["private", "shared", "file"]

GENERATIONS = 2
"""Staged copies that may exist at a time: one is uploaded while the next one waits for its turn."""
ALIGNMENT = 64
"""Alignment in bytes of each region in its buffer: a cache line, which is enough for any dtype."""

_POLL_SECONDS = 0.05
_REPORT_SECONDS = 30.0
_COLLECT_SECONDS = 5.0
_MAX_SLACK = 2  # a free buffer may be this many times larger than the request

_CGROUP = Path("/sys/fs/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


class HostBuffer:
    """``size`` bytes of host memory: ``private``, ``shared`` memory that another process can map, or an unnamed
    ``file`` in ``directory``. Freed when neither the object nor a `lease` of it is left. Space is reserved at once: a
    full disk would show as a signal (SIGBUS) in the middle of a copy.

    Raises:
        StagingError: there is no room.
    """

    def __init__(self, size: int, kind: Kind, *, directory: str | None = None) -> None:
        self.size, self.kind = size, kind
        self.fd = -1
        """File descriptor of memory that is not private."""
        self._is_pinned: bool | None = None  # None: not tried. It is used many times, and each would cost a warning
        where = {"private": "in memory", "shared": "in shared memory", "file": f"in the spill directory {directory!r}"}
        try:
            if kind == "private":
                self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                if hasattr(mmap, "MADV_DONTFORK"):
                    # A child (a data loader's worker) would get a copy of every page that staging writes meanwhile.
                    self._map.madvise(mmap.MADV_DONTFORK)
            else:
                if kind == "file":
                    os.makedirs(directory or "", exist_ok=True)
                    with tempfile.TemporaryFile(dir=directory) as file:
                        self.fd = os.dup(file.fileno())
                else:  # a memory file: not in /dev/shm, which containers keep small
                    self.fd = os.memfd_create("dcp_s3-staging")
                os.posix_fallocate(self.fd, 0, size)
                self._map = mmap.mmap(self.fd, size)
        except OSError as error:
            raise StagingError(
                f"no room for {format_size(size)} of staged copies {where[kind]}: {error.strerror}. Remedy: set "
                "DCP_S3_SPILL_DIR to a directory on a local disk that has room and that this process can write to, and "
                "DCP_S3_STAGING_LIMIT to what may stay in memory"
            ) from error
        self.address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def pin(self) -> None:
        """Register the memory with CUDA, so that copies from a GPU do not block. Without it they are only slower."""
        if self._is_pinned is None and self.kind != "file":
            try:
                torch_private.pin_memory(self.address, self.size)
                self._is_pinned = True
            except RuntimeError as error:
                self._is_pinned = False
                logger.warning("%s of staging memory stays unpinned: %s", format_size(self.size), str(error))

    def lease(self) -> memoryview:
        """A view of the whole memory. Tensors made from it by `torch.frombuffer`, and all views of them, keep it alive.
        A weak reference to it tells when the last of them is gone."""
        return memoryview(self._map)

    def __del__(self) -> None:
        if getattr(self, "_is_pinned", False):
            torch_private.unpin_memory(self.address)
        if getattr(self, "fd", -1) >= 0:
            os.close(self.fd)


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
    """Provides memory for ``generations`` requests at a time: ``limit`` bytes for all together, the rest in files in
    ``spill_dir``."""

    def __init__(self, *, limit: int | None, spill_dir: str | None, generations: int = GENERATIONS) -> None:
        self.limit, self.spill_dir, self.generations = limit, spill_dir, generations
        self.shared = False
        """Whether other processes can map the memory."""
        self._free: list[HostBuffer] = []
        self._in_use: list[list[tuple[weakref.ref[memoryview], HostBuffer]]] = []
        """The buffers of each request, with their leases."""
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def acquire(self, sizes: Sequence[int], *, pin: bool = False, wait: bool = True) -> list[Slot]:
        """Memory for regions of ``sizes`` bytes (none is zero). Waits while all generations, or the budget, are in use;
        without ``wait`` returns none then. A StagingError if there is no room, or if the request alone exceeds the
        budget and there is no spill directory."""
        if not sizes:
            return []
        started = reported = collected = 0.0
        while isinstance(found := self._try(sizes), str):
            if not wait:
                return []
            now = time.monotonic()
            if now - collected >= _COLLECT_SECONDS:
                # The errors of parts and buckets that a failed save did not raise may be in cycles with their own
                # frames, which hold its copy. Training loops that turn the collector off would keep those.
                collected = now
                gc.collect()
                continue
            if not started:
                started = reported = now
                logger.info("staging waits: %s", found)
            elif now - reported >= _REPORT_SECONDS:
                reported = now
                kept = "(A planner or staged state that is kept also holds its copy.)"
                logger.warning("staging has waited for %.0f s: %s. %s", now - started, found, kept)
            self._closed.wait(_POLL_SECONDS)
        for slot in found if pin else ():
            slot.buffer.pin()
        return found

    def close(self) -> None:
        """Free what is not in use now, and the rest once its last user is gone. Waiting requests get an error."""
        self._closed.set()
        with self._lock:
            self._free.clear()
            self._in_use.clear()

    def _try(self, sizes: Sequence[int]) -> list[Slot] | str:
        """Memory for regions of these sizes, or why it has to be waited for."""
        with self._lock:
            for generation in self._in_use:  # take back what nobody reads any more
                self._free += [buffer for lease, buffer in generation if lease() is None]
                generation[:] = [each for each in generation if each[1] not in self._free]
            self._in_use = [generation for generation in self._in_use if generation]
            if self._closed.is_set():
                raise StagingError("the stager was closed. Remedy: close it after the last save, or make a new one")
            if len(self._in_use) >= self.generations:
                return f"{len(self._in_use)} earlier saves still hold their staged copies, as many as may exist at once"
            # The smallest come first, so that few and large regions go to disk.
            order = sorted(range(len(sizes)), key=lambda number: sizes[number])
            in_memory = order
            if self.limit is not None:
                room = max(0, self.limit - sum(each.size for each in self._used() if each.kind != "file"))
                totals = itertools.accumulate(_aligned(sizes[number]) for number in order)
                in_memory = order[: sum(total <= room for total in totals)]
            if self.spill_dir is None and len(in_memory) < len(order):
                limit = f"the {format_size(self.limit or 0)} that DCP_S3_STAGING_LIMIT allows this process"
                if self._in_use:
                    return f"earlier saves still hold most of {limit}, and DCP_S3_SPILL_DIR is not set"
                raise StagingError(
                    f"the state to stage has {format_size(sum(sizes))}, more than {limit}. Remedy: raise "
                    "DCP_S3_STAGING_LIMIT, or set DCP_S3_SPILL_DIR to a local directory, where the rest is then staged"
                )
            leased: list[tuple[memoryview, HostBuffer]] = []
            slots: dict[int, Slot] = {}
            memory: Kind = "shared" if self.shared else "private"
            parts: tuple[tuple[Kind, list[int]], ...] = ((memory, in_memory), ("file", order[len(in_memory) :]))
            try:
                for kind, numbers in parts:
                    if numbers:
                        buffer = self._take(sum(_aligned(sizes[number]) for number in numbers), kind)
                        lease, offset = buffer.lease(), 0
                        leased.append((lease, buffer))
                        for number in sorted(numbers):
                            slots[number] = Slot(buffer, lease, offset)
                            offset += _aligned(sizes[number])
            except BaseException:
                self._free += [buffer for _, buffer in leased]
                raise
            self._in_use.append([(weakref.ref(lease), buffer) for lease, buffer in leased])
            return [slots[number] for number in range(len(sizes))]

    def _take(self, size: int, kind: Kind) -> HostBuffer:
        """A free buffer that fits, or a new one. What was unused longest makes room for that: no more buffers are kept
        than generations, nor beyond the budget."""
        fitting = [b for b in self._free if b.kind == kind and size <= b.size <= size * _MAX_SLACK]
        if fitting:
            best = min(fitting, key=lambda buffer: buffer.size)
            self._free.remove(best)
            return best
        alike = [b for b in (*self._free, *self._used()) if (b.kind == "file") == (kind == "file")]
        free = [b for b in alike if b in self._free]
        limit = None if kind == "file" else self.limit
        while free and (
            len(alike) >= self.generations or (limit is not None and sum(b.size for b in alike) + size > limit)
        ):
            alike.remove(free[0])
            self._free.remove(free.pop(0))
        del alike
        try:
            return HostBuffer(size, kind, directory=self.spill_dir)
        except StagingError:
            if not free:
                raise
        self._free = [b for b in self._free if b not in free]  # they may take the room
        free.clear()
        return HostBuffer(size, kind, directory=self.spill_dir)

    def _used(self) -> list[HostBuffer]:
        return [buffer for generation in self._in_use for _, buffer in generation]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def measure_available(proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> int:
    """Bytes of memory that can still be used: the host's, or the container's if that is less. An OSError if this system
    does not report it."""
    host = _read_field(proc / "meminfo", "MemAvailable:")
    if host is None:
        raise OSError(f"no MemAvailable in {proc}/meminfo")
    available = host * 1024
    for limit_file, usage_file in _FILES:
        try:
            limit, usage = (int((cgroup / name).read_text()) for name in (limit_file, usage_file))
        except (OSError, ValueError):  # absent, or "max"
            continue
        stat = (cgroup / limit_file).parent / "memory.stat"
        cache = _read_field(stat, "total_inactive_file") or _read_field(stat, "inactive_file") or 0
        available = min(available, max(0, limit - usage + cache))
    return available


def _read_field(path: Path, name: str) -> int | None:
    """The number after a name at the beginning of a line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.split()[0] == name), None)
