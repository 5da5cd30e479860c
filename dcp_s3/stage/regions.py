"""Which bytes of which storages to copy, and where they come to lie. Pure functions.

Tensors of one storage that overlap, or that together make up most of what lies between them, are copied as one region
and stay aliased in the copy. A small view of a huge storage is a region of its own size, also if it is strided.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

ALIGNMENT = 64
"""Bytes on which each region starts in its buffer: a cache line, and no less than any dtype needs."""

_SOURCE_ALIGNMENT = 16  # complex128: a region starts on a whole element of every tensor in it
_MIN_DENSITY = 0.5


class TensorSpan(NamedTuple):
    """Where one tensor lies in its storage.

    Attributes:
        storage: identifies the storage.
        start: first byte that the tensor uses.
        stop: byte behind the last.
        nbytes: elements times element size; less than ``stop - start`` for a strided view, more for an expanded one.
        layout: tells apart strided tensors of the same span (dtype, size, strides); None for one without gaps.
    """

    storage: Hashable
    start: int
    stop: int
    nbytes: int
    layout: Hashable = None


class Region(NamedTuple):
    """Bytes that are copied in one piece.

    Attributes:
        tensors: the tensors in it, by their numbers in the list of spans.
        start: first byte in the source storage.
        size: bytes in the copy.
        gathered: the tensors (all alike) are copied element by element into row-major order, because they use little
            of the span that they lie in.
    """

    tensors: tuple[int, ...]
    start: int
    size: int
    gathered: bool = False


def plan_regions(spans: Sequence[TensorSpan]) -> list[Region]:
    """Regions that hold every span, in the order of their first tensors. Spans of no bytes are in none."""
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
    """Whether the tensors use at least half of the bytes between the first and the last of them, at least roughly."""
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
    # What a sparse span reaches over first hides a dense one inside of it.
    largest = max(min(spans[number].nbytes, spans[number].stop - spans[number].start) for number in numbers)
    return max(used, largest) >= _MIN_DENSITY * (reached - begin)


def _hull(spans: Sequence[TensorSpan], numbers: Sequence[int]) -> Region:
    start = min(spans[number].start for number in numbers)
    start -= start % _SOURCE_ALIGNMENT
    stop = max(spans[number].stop for number in numbers)
    return Region(tuple(sorted(numbers)), start, stop - start)


def place(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets at which regions of ``sizes`` bytes lie in one buffer, and the bytes of the buffer."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGNMENT) * ALIGNMENT
    return offsets, end


def split(sizes: Sequence[int], room: int | None) -> list[bool]:
    """Which regions go to memory of ``room`` bytes (None: no limit); the others go to disk.

    Small ones first: what goes to disk is then few and large.
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
