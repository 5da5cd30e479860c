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
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dcp_s3.errors import StagingError
from dcp_s3.stage.buffers import HostBuffer
from dcp_s3.stage.pool import BufferPool, Slot
from dcp_s3.stage.regions import Region
from dcp_s3.workers import Workers

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_SMALL = 2**20  # bytes; smaller copies are made at once, not shared among threads
_PIECE = 8 * 2**20  # bytes
_MAX_THREADS = 8  # more do not copy faster: they share the memory's bandwidth


class MemoryCopy(NamedTuple):
    """``size`` bytes, copied from address ``source`` to address ``target``."""

    target: int
    source: int
    size: int


def run_copies(copies: Sequence[MemoryCopy]) -> None:
    """Carry out ``copies``, which must not overlap. Returns when all are done."""
    pieces: queue.SimpleQueue[MemoryCopy] = queue.SimpleQueue()
    count = 0
    for target, source, size in copies:
        for start in range(0, size, _PIECE):
            pieces.put(MemoryCopy(target + start, source + start, min(_PIECE, size - start)))
            count += 1
    helpers = min(_MAX_THREADS, torch.get_num_threads(), count) - 1
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


@dataclass(frozen=True)
class StagedTensors:
    """Copies of tensors, in the order of the originals, and the slots that hold them."""

    tensors: list[torch.Tensor]
    slots: list[Slot]

    @property
    def buffers(self) -> list[HostBuffer]:
        """The buffers behind the tensors."""
        return list({id(slot.buffer): slot.buffer for slot in self.slots}.values())


class Versions:
    """The versions of tensors, each with the wrappers around it, before they are copied."""

    def __init__(self, watched: Sequence[tuple[torch.Tensor, ...]]) -> None:
        self._watched = watched
        self._versions = [_versions(each) for each in watched]

    def check_unchanged(self) -> None:
        """Reject a copy whose tensors were changed in place while they were copied.

        Raises:
            StagingError: they were changed.
        """
        now = map(_versions, self._watched)
        changed = sum(a != b for a, b in zip(self._versions, now, strict=True))
        if changed:
            raise StagingError(
                f"{changed} tensors were changed in place while they were staged in the background, so the copy may "
                "mix old and new values and is not saved. Remedy: wait for staging_completion of async_save's response "
                "before the next optimizer step, or use a blocking stager: S3Stager(asynchronous=False)"
            )


def _versions(watched: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    """A value that changes with the tensor's bytes, and when its storage is freed or moved."""
    versions = [0 if tensor.is_inference() else tensor._version for tensor in watched]
    return watched[0].untyped_storage().data_ptr(), *versions


class Copier:
    """Makes one copy of tensors. Has its own stream on each accelerator that it copies from."""

    def __init__(self) -> None:
        self._device: int | None = None
        self._streams: dict[torch.device, torch.Stream] = {}

    def mark(self, tensors: Sequence[torch.Tensor]) -> list[torch.Event]:
        """Events that come after all work queued so far on the caller's streams, on the devices of ``tensors``."""
        events = []
        for device in _accelerators(tensors):
            if device not in self._streams:
                self._streams[device] = torch.Stream(device)
            event = torch.Event(device)
            event.record(torch.accelerator.current_stream(device))
            events.append(event)
        if events:
            self._device = torch.accelerator.current_device_index()
        return events

    def copy(
        self,
        tensors: Sequence[torch.Tensor],
        regions: Sequence[Region],
        pool: BufferPool,
        events: Sequence[torch.Event],
    ) -> StagedTensors:
        """Copy ``regions`` of ``tensors`` to memory from ``pool``, after ``events``. Returns when the bytes are there.

        Raises:
            StagingError: there is no memory.
        """
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)  # a new thread would make a context on device 0
        devices = _accelerators(tensors)
        slots = pool.acquire([r.size for r in regions], pin=any(device.type == "cuda" for device in devices))
        streams = [self._streams[device] for device in devices]
        for stream, event in zip(streams, events, strict=False):
            stream.wait_event(event)
        staged: list[torch.Tensor | None] = [None] * len(tensors)
        pending: list[MemoryCopy] = []
        try:
            for region, slot in zip(regions, slots, strict=True):
                source = tensors[region.tensors[0]]
                with self._streams.get(source.device) or nullcontext():
                    copies = _copy_region(region, slot, tensors, pending)
                for number, copied in zip(region.tensors, copies, strict=True):
                    staged[number] = copied
            run_copies(pending)
        finally:
            for stream in streams:
                stream.synchronize()  # also after an error: the buffers go back while copies may be under way
        return StagedTensors([_or_empty(s, tensor) for s, tensor in zip(staged, tensors, strict=True)], slots)


def _accelerators(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    return sorted({t.device for t in tensors if t.device.type != "cpu"}, key=str)


def _or_empty(staged: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    if staged is None:  # it has no bytes
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return staged


def _copy_region(
    region: Region, slot: Slot, tensors: Sequence[torch.Tensor], pending: list[MemoryCopy]
) -> list[torch.Tensor]:
    """Copy one region, enqueue its copy, or add it to ``pending``. Returns its staged tensors."""
    source = tensors[region.tensors[0]]
    # Two storages may begin at one address (torch.from_numpy of an array and of its beginning).
    source_storage = max((tensors[n].untyped_storage() for n in region.tensors), key=torch.UntypedStorage.nbytes)
    if not region.gathered and source_storage.nbytes() < region.start + region.size:
        raise StagingError(
            "the memory of a tensor was freed before it was staged. Remedy: wait for staging_completion of "
            "async_save's response before the state is changed or resharded"
        )
    small = region.size < _SMALL and source.device.type == "cpu"
    if small and len(region.tensors) == 1 and region.size == source.nbytes and source.is_contiguous():
        ctypes.memmove(slot.address, source.data_ptr(), region.size)  # by far the most frequent case: kept short
        copied = torch.frombuffer(slot.lease, dtype=source.dtype, count=source.numel(), offset=slot.offset)
        return [copied.resize_(source.shape)]  # not a view: that would keep the memory when `StagedState` releases it
    target = torch.frombuffer(slot.lease, dtype=torch.uint8, count=region.size, offset=slot.offset)
    storage = target.untyped_storage()
    if region.gathered:
        bits = _BITS[source.element_size()]  # torch cannot copy every dtype
        gathered = target.view(bits).view(source.shape)
        gathered.copy_(source.view(bits), non_blocking=True)
        copied = torch.empty(0, dtype=source.dtype).set_(storage, 0, gathered.shape, gathered.stride())
        return [copied] * len(region.tensors)
    if source.device.type == "cpu":
        pending.append(MemoryCopy(slot.address, source_storage.data_ptr() + region.start, region.size))
    else:
        raw = torch.empty(0, dtype=torch.uint8, device=source.device)
        raw.set_(source_storage, region.start, (region.size,), (1,))
        target.copy_(raw, non_blocking=True)
    return [_view(tensors[number], storage, region) for number in region.tensors]


def _view(tensor: torch.Tensor, storage: torch.UntypedStorage, region: Region) -> torch.Tensor:
    offset = tensor.storage_offset() - region.start // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype).set_(storage, offset, tensor.shape, tensor.stride())
