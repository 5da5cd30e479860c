"""Copies the tensors of a snapshot into staging buffers, from CPU memory or accelerators.

What is copied: tensors of one storage that overlap or touch, and together use at least half of the bytes between the
first and the last of them, are one region, and stay aliased in the copy. Any other tensor is a region of its own, a
small view of a huge storage, too: gathered, if it is strided.

How: torch's own copy within host memory splits each tensor among its threads and waits for all of them. With a hundred
tensors, and one core busy with a data loader or an upload, it waits a hundred times for the slowest thread. In
`run_copies` each thread takes the next piece.
"""

from __future__ import annotations

import ctypes
import queue
from collections import defaultdict
from collections.abc import Hashable, Sequence
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
_SOURCE_ALIGNMENT = 16  # complex128: a region starts on a whole element of every tensor in it
_MIN_DENSITY = 0.5


# --- what to copy, pure -------------------------------------------------------------------------------------


class TensorSpan(NamedTuple):
    """Where one tensor lies in its storage."""

    storage: Hashable
    """Identity of the storage."""
    start: int
    """First byte that the tensor uses."""
    stop: int
    """The byte after the last."""
    nbytes: int
    """Elements times element size; less than ``stop - start`` for a strided view, more for an expanded one."""
    layout: Hashable = None
    """Dtype, size and strides, which tell apart strided tensors of the same span. None for a tensor without gaps."""


class Region(NamedTuple):
    """Bytes that are copied together."""

    tensors: tuple[int, ...]
    """The tensors in the region, as indices into the list of spans."""
    start: int
    """First byte in the source storage."""
    size: int
    """Bytes in the copy."""
    gathered: bool = False
    """Whether the tensors (all alike) are copied element by element into row-major order, because they use little of
    the span that they lie in."""


def plan_regions(spans: Sequence[TensorSpan]) -> list[Region]:
    """Regions that hold every span, in the order of their first tensors. Empty spans are in none."""
    by_storage: dict[Hashable, list[int]] = defaultdict(list)
    for number, span in enumerate(spans):
        if span.nbytes:
            by_storage[span.storage].append(number)
    regions: list[Region] = []
    for cluster in (each for numbers in by_storage.values() for each in _clusters(spans, numbers)):
        if _is_dense(spans, cluster):
            regions.append(_hull(spans, cluster))
            continue
        alike: dict[TensorSpan, list[int]] = defaultdict(list)
        for number in cluster:
            alike[spans[number]].append(number)
        for span, same in alike.items():
            is_dense = _is_dense(spans, same[:1])
            gathered = Region(tuple(same), span.start, span.nbytes, gathered=True)
            regions.append(_hull(spans, same) if is_dense else gathered)
    regions.sort(key=lambda region: region.tensors[0])
    return regions


def _clusters(spans: Sequence[TensorSpan], numbers: Sequence[int]) -> list[list[int]]:
    """Groups of spans that overlap or touch each other."""
    clusters: list[list[int]] = []
    stop = -1
    for number in sorted(numbers, key=lambda number: spans[number].start):
        span = spans[number]
        if not clusters or span.start > stop:
            clusters.append([])
        clusters[-1].append(number)
        stop = max(stop, span.stop)
    return clusters


def _is_dense(spans: Sequence[TensorSpan], numbers: Sequence[int]) -> bool:
    """Whether the tensors use about half or more of the bytes between the first and the last of them."""
    if len(numbers) == 1:
        span = spans[numbers[0]]
        return span.nbytes >= _MIN_DENSITY * (span.stop - span.start)
    begin = reached = min(spans[number].start for number in numbers)
    used = 0
    for number in sorted(numbers, key=lambda number: spans[number].start):
        span = spans[number]
        if span.stop > reached:
            used += min(span.nbytes, span.stop - max(span.start, reached))
            reached = span.stop
    # The count above misses a dense span inside a sparse one that begins first.
    largest = max(min(spans[number].nbytes, spans[number].stop - spans[number].start) for number in numbers)
    return max(used, largest) >= _MIN_DENSITY * (reached - begin)


def _hull(spans: Sequence[TensorSpan], numbers: Sequence[int]) -> Region:
    start = min(spans[number].start for number in numbers)
    start -= start % _SOURCE_ALIGNMENT
    stop = max(spans[number].stop for number in numbers)
    return Region(tuple(sorted(numbers)), start, stop - start)


# --- copies -------------------------------------------------------------------------------------------------


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
                    staged.update(zip(region.tensors, self._copy_region(region, slot, pending), strict=True))
            run_copies(pending)
        finally:
            for stream in self._streams.values():
                stream.synchronize()  # also after an error: the buffers go back while copies may be under way
        for number, tensor in enumerate(self._tensors):
            if number not in staged:  # it has no bytes
                staged[number] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        return [staged[number] for number in range(len(self._tensors))], slots

    def _copy_region(self, region: Region, slot: Slot, pending: list[MemoryCopy]) -> list[torch.Tensor]:
        """Copy one region, enqueue its copy, or add it to ``pending``. Returns its staged tensors."""
        originals = [self._tensors[number] for number in region.tensors]
        source = originals[0]
        source_storage = source.untyped_storage()
        if len(originals) > 1:  # two storages may begin at one address (torch.from_numpy of an array and its beginning)
            source_storage = max((tensor.untyped_storage() for tensor in originals), key=torch.UntypedStorage.nbytes)
        if not region.gathered and source_storage.nbytes() < region.start + region.size:
            raise StagingError(
                "the memory of a tensor was freed before it was staged. Remedy: wait for staging_completion of "
                "async_save's response before the state is changed or resharded"
            )
        small = region.size < _SMALL and source.device.type == "cpu"
        if small and len(originals) == 1 and region.size == source.nbytes and source.is_contiguous():
            ctypes.memmove(slot.address, source.data_ptr(), region.size)  # by far the most frequent case: kept short
            copied = torch.frombuffer(slot.lease, dtype=source.dtype, count=source.numel(), offset=slot.offset)
            # Not a view: that would keep the memory when `StagedState` releases it.
            return [copied.resize_(source.shape)]
        target = torch.frombuffer(slot.lease, dtype=torch.uint8, count=region.size, offset=slot.offset)
        storage = target.untyped_storage()
        if region.gathered:
            bits = _BITS[source.element_size()]  # torch cannot copy every dtype
            gathered = target.view(bits).view(source.shape)
            gathered.copy_(source.view(bits), non_blocking=True)
            copied = torch.empty(0, dtype=source.dtype).set_(storage, 0, gathered.shape, gathered.stride())
            return [copied] * len(originals)
        if source.device.type == "cpu":
            pending.append(MemoryCopy(slot.address, source_storage.data_ptr() + region.start, region.size))
        else:
            raw = torch.empty(0, dtype=torch.uint8, device=source.device)
            raw.set_(source_storage, region.start, (region.size,), (1,))
            target.copy_(raw, non_blocking=True)
        return [
            torch.empty(0, dtype=tensor.dtype).set_(
                storage, tensor.storage_offset() - region.start // tensor.element_size(), tensor.shape, tensor.stride()
            )
            for tensor in originals
        ]
