"""Memory for staged tensors: private, shared between processes, or mapped from a file; and how much there is."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
from pathlib import Path
from typing import Literal

import torch

from dcp_s3 import torch_private
from dcp_s3.errors import StagingError
from dcp_s3.units import format_size

logger = logging.getLogger(__name__)

Kind = Literal["private", "shared", "file"]

_CGROUP = Path("/sys/fs/cgroup")
_FILES = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


class HostBuffer:
    """``size`` bytes of host memory: ``private``, ``shared`` memory that another process can map, or an unnamed
    ``file`` in ``directory``. Freed when neither the object nor a `lease` of it is left.

    Space is reserved here, so that a full disk cannot show as a signal (SIGBUS) in the middle of a copy.

    Raises:
        StagingError: there is no room.
    """

    def __init__(self, size: int, kind: Kind, *, directory: str | None = None) -> None:
        self.size = size
        self.kind = kind
        self._fd = -1
        self._pinned_at: int | None = None
        if kind == "private":
            self._map = _map_private(size)
        else:
            # A memory file: not in /dev/shm, which containers keep small.
            self._fd = os.memfd_create("dcp_s3-staging") if kind == "shared" else _open_file(directory or "", size)
            _reserve(self._fd, size, directory if kind == "file" else None)
            self._map = mmap.mmap(self._fd, size)
        self.address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()

    def fileno(self) -> int:
        """File descriptor of memory that is not private."""
        if self._fd < 0:
            raise ValueError("private memory has no file descriptor")
        return self._fd

    def pin(self) -> None:
        """Register the memory with CUDA, so that copies from a GPU do not block. Without it they are only slower."""
        if self._pinned_at is not None or self.kind == "file":
            return
        try:
            torch_private.pin_memory(self.address, self.size)
        except RuntimeError as error:
            logger.warning("%s of staging memory stays unpinned: %s", format_size(self.size), error)
        else:
            self._pinned_at = self.address

    @property
    def pinned(self) -> bool:
        """Whether the memory is registered with CUDA."""
        return self._pinned_at is not None

    def lease(self) -> memoryview:
        """A view of the whole memory. Tensors made from it by `torch.frombuffer`, and all views of them, keep it alive.
        A weak reference to it tells when the last of them is gone."""
        return memoryview(self._map)

    def __del__(self) -> None:
        pinned_at: int | None = getattr(self, "_pinned_at", None)
        if pinned_at is not None:
            torch_private.unpin_memory(pinned_at)
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)


def map_shared(fd: int, size: int) -> memoryview:
    """Map the memory behind ``fd`` (of another process's buffer) and close ``fd``."""
    try:
        return memoryview(mmap.mmap(fd, size))
    finally:
        os.close(fd)


def _map_private(size: int) -> mmap.mmap:
    try:
        mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise StagingError(
            f"no {format_size(size)} of memory for staging: {error.strerror}. Remedy: set DCP_S3_STAGING_LIMIT and "
            "DCP_S3_SPILL_DIR, so that the rest is staged on disk"
        ) from error
    if hasattr(mmap, "MADV_DONTFORK"):
        # A child (a data loader's worker) would get a copy of every page that staging writes while the child lives.
        mapped.madvise(mmap.MADV_DONTFORK)
    return mapped


def _open_file(directory: str, size: int) -> int:
    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            return os.dup(file.fileno())
    except OSError as error:
        raise StagingError(
            f"cannot stage {format_size(size)} in the spill directory {directory!r}: {error.strerror}. Remedy: make it "
            "a directory that this process can write to, or set DCP_S3_SPILL_DIR to one"
        ) from error


def _reserve(fd: int, size: int, directory: str | None) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        where = "in shared memory" if directory is None else f"in the spill directory {directory!r}"
        raise StagingError(
            f"cannot reserve {format_size(size)} {where} for staging: {error.strerror}. Remedy: set DCP_S3_SPILL_DIR "
            "to a local disk with more room, and DCP_S3_STAGING_LIMIT to what may stay in memory"
        ) from error


def resolve_limit(limit: int | float | None, available: int, local_ranks: int) -> int | None:
    """Bytes that this process may stage in memory; None for no limit.

    ``limit`` is in bytes (int), None, or a fraction (float) of ``available`` bytes, which the ranks of this host share.
    """
    if limit is None or isinstance(limit, int):
        return limit
    return int(limit * available / local_ranks)


def measure_available(proc: Path = Path("/proc"), cgroup: Path = _CGROUP) -> int:
    """Bytes of memory that can still be used: the host's, or the container's if that is less.

    Raises:
        OSError: this system does not report it.
    """
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
