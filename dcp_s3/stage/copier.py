"""Copies the tensors of a snapshot into staging buffers, from CPU memory or accelerators.

torch's own copy within host memory splits each tensor among its threads and waits for all of them. With a hundred
tensors, and one core busy with a data loader or an upload, it waits a hundred times for the slowest thread. In
`run_copies` each thread takes the next piece.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from dcp_s3.errors import StagingError
from dcp_s3.stage.pool import BufferPool, Slot
from dcp_s3.workers import Workers

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_SMALL = 2**20  # bytes; smaller copies are made at once, not shared among threads
_PIECE = 8 * 2**20  # bytes
_MAX_THREADS = 8  # more do not copy faster: they share the memory's bandwidth


class Region(NamedTuple):
    """The bytes of a tensor."""

    tensors: list[int]
    """Its number in the snapshot, and those of tensors that are the same view of the same memory."""
    start: int
    """First byte in the storage."""
    size: int
    """Bytes in the copy."""
    gathered: bool = False
    """Whether the tensor is copied element by element into row-major order, because it uses less than half of the bytes
    that it spans. Otherwise all of these are copied, and the copy has its strides."""


class MemoryCopy(NamedTuple):
    """``size`` bytes, copied from address ``source`` to address ``target``."""

    target: int
    source: int
    size: int


def run_copies(copies: Sequence[MemoryCopy]) -> None:
    """Carry out ``copies``, which must not overlap. Returns when all are done."""
    pieces: queue.SimpleQueue[MemoryCopy] = queue.SimpleQueue()
    for target, source, size in copies:
        for start in range(0, size, _PIECE):
            pieces.put(MemoryCopy(target + start, source + start, min(_PIECE, size - start)))
    helpers = min(_MAX_THREADS, torch.get_num_threads(), pieces.qsize()) - 1
    if helpers < 1:
        _run_pieces(pieces)
        return
    workers = Workers(helpers, "dcp_s3-copy")
    try:
        futures = [workers.submit(_run_pieces, pieces) for _ in range(helpers)]
        _run_pieces(pieces)
        for future in futures:
            future.result()
    finally:
        workers.close()


def _run_pieces(pieces: queue.SimpleQueue[MemoryCopy]) -> None:
    while True:
        try:
            target, source, size = pieces.get_nowait()
        except queue.Empty:
            return
        ctypes.memmove(target, source, size)  # releases the interpreter's lock


class Copier:
    """Makes one copy of tensors, of what they hold after all work queued so far on the caller's streams."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        devices = sorted({tensor.device for tensor in tensors if tensor.device.type != "cpu"}, key=str)
        self._streams = {device: torch.Stream(device) for device in devices}
        self._events = {device: torch.Event(device) for device in devices}
        for device, event in self._events.items():
            event.record(torch.accelerator.current_stream(device))
        self._device = torch.accelerator.current_device_index() if devices else None

    def copy(self, regions: Sequence[Region], pool: BufferPool) -> tuple[list[torch.Tensor], list[Slot]]:
        """Copy ``regions`` of the tensors to memory from ``pool``. Returns when the bytes are there: the copies, in the
        order of the originals, and the slots that hold them.

        Raises:
            StagingError: there is no memory.
        """
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)  # a new thread would make a context on device 0
        slots = pool.acquire([r.size for r in regions], pin=any(device.type == "cuda" for device in self._streams))
        for device, stream in self._streams.items():
            stream.wait_event(self._events[device])
        staged: dict[int, torch.Tensor] = {}
        pending: list[MemoryCopy] = []
        try:
            for region, slot in zip(regions, slots, strict=True):
                with self._streams.get(self._tensors[region.tensors[0]].device) or nullcontext():
                    staged.update(dict.fromkeys(region.tensors, self._copy_region(region, slot, pending)))
            run_copies(pending)
        finally:
            for stream in self._streams.values():
                stream.synchronize()  # also after an error: the buffers go back while copies may be under way
        for number, tensor in enumerate(self._tensors):
            if number not in staged:  # it has no bytes
                staged[number] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return [staged[number] for number in range(len(self._tensors))], slots

    def _copy_region(self, region: Region, slot: Slot, pending: list[MemoryCopy]) -> torch.Tensor:
        """Copy one region, enqueue its copy, or add it to ``pending``. Returns its staged tensor."""
        source = self._tensors[region.tensors[0]]
        storage = source.untyped_storage()
        if not region.gathered and storage.nbytes() < region.start + region.size:
            raise StagingError(
                "the memory of a tensor was freed before it was staged. Remedy: wait for staging_completion of "
                "async_save's response before the state is changed or resharded"
            )
        is_host = source.device.type == "cpu"
        if is_host and region.size < _SMALL and region.size == source.nbytes and source.is_contiguous():
            ctypes.memmove(slot.address, source.data_ptr(), region.size)  # by far the most frequent case: kept short
            copied = torch.frombuffer(slot.lease, dtype=source.dtype, count=source.numel(), offset=slot.offset)
            # Not a view: that would keep the memory when `StagedState` releases it.
            return copied.resize_(source.shape)
        target = torch.frombuffer(slot.lease, dtype=torch.uint8, count=region.size, offset=slot.offset)
        strides = source.stride()
        if region.gathered:
            bits = _BITS[source.element_size()]  # torch cannot copy every dtype
            gathered = target.view(bits).view(source.shape)
            gathered.copy_(source.view(bits), non_blocking=True)
            strides = gathered.stride()
        elif is_host:
            pending.append(MemoryCopy(slot.address, storage.data_ptr() + region.start, region.size))
        else:
            raw = torch.empty(0, dtype=torch.uint8, device=source.device)
            raw.set_(storage, region.start, (region.size,), (1,))
            target.copy_(raw, non_blocking=True)
        return torch.empty(0, dtype=source.dtype).set_(target.untyped_storage(), 0, source.shape, strides)
