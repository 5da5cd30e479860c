"""Which bytes of which storages to copy, and where to put them. Pure functions.

Tensors of one storage that overlap, or that together fill most of the bytes between them, are copied as one region and
stay aliased in the copy. A small view of a huge storage is a region of its own size, even if it is strided.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

ALIGNMENT = 64
"""Alignment in bytes of each region in its buffer: a cache line, which is enough for any dtype."""

_SOURCE_ALIGNMENT = 16  # complex128: a region starts on a whole element of every tensor in it
_MIN_DENSITY = 0.5


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
    regions = [region for numbers in by_storage.values() for region in _plan_storage(spans, numbers)]
    regions.sort(key=lambda region: region.tensors[0])
    return regions


def _plan_storage(spans: Sequence[TensorSpan], numbers: list[int]) -> list[Region]:
    if _is_dense(spans, numbers):
        return [_hull(spans, numbers)]
    regions = []
    for cluster in _clusters(spans, numbers):
        if _is_dense(spans, cluster):
            regions.append(_hull(spans, cluster))
            continue
        sparse: dict[TensorSpan, list[int]] = defaultdict(list)
        for number in cluster:
            if not _is_dense(spans, [number]):
                sparse[spans[number]].append(number)
        dense = [number for number in cluster if spans[number] not in sparse]
        regions += [Region(tuple(alike), span.start, span.nbytes, gathered=True) for span, alike in sparse.items()]
        regions += [_hull(spans, part) for part in _clusters(spans, dense)]
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
