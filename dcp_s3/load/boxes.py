"""Boxes of row-major arrays, and the runs of elements that make them up. Pure: integers only.

A box is a rectangular part of an array: an offset and a length in each dimension. A saved chunk lies in its object as
one run of bytes in row-major order; a request fetches a part of that run, which is a few boxes again.

The elements of a box that lie in a run of its array are, in row-major order, a run of the box too. So the needed
elements of any run can be packed as one run of the box, whatever the shapes: a section.

Overlaps of saved chunks with local ones come in the order of torch's `create_read_items_for_chunk_list`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np


class Box(NamedTuple):
    """A rectangular part of an array."""

    offsets: tuple[int, ...]
    """Index of the first element in each dimension."""
    lengths: tuple[int, ...]
    """Number of elements in each dimension."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array of ``sizes``."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, sizes[dim + 1])
    return tuple(strides)


def check_box(sizes: Sequence[int], box: Box) -> None:
    """Check that a box lies inside its array.

    Raises:
        ValueError: the box is not inside an array of ``sizes``.
    """
    offsets, lengths = box
    if not len(sizes) == len(offsets) == len(lengths) or any(
        offset < 0 or length < 0 or offset + length > size
        for size, offset, length in zip(sizes, offsets, lengths, strict=True)
    ):
        raise ValueError(f"box at {tuple(offsets)} of {tuple(lengths)} is not inside a chunk of {tuple(sizes)}")


def _boxes_of_run(sizes: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Elements ``start`` to ``stop`` (after it) of an array in row-major order, as boxes in that order.

    There are at most ``2 * len(sizes) - 1`` boxes (one for an array without dimensions).
    """
    if not sizes:
        return [Box((), ())]
    inner = sizes[1:]
    row = math.prod(inner)
    first, skipped = divmod(start, row)
    last, left = divmod(stop, row)
    if first == last:
        return [_at(first, box) for box in _boxes_of_run(inner, skipped, left)]
    found: list[Box] = []
    if skipped:
        found += [_at(first, box) for box in _boxes_of_run(inner, skipped, row)]
        first += 1
    if first < last:
        found.append(Box((first, *([0] * len(inner))), (last - first, *inner)))
    if left:
        found += [_at(last, box) for box in _boxes_of_run(inner, 0, left)]
    return found


def _at(row: int, box: Box) -> Box:
    return Box((row, *box.offsets), (1, *box.lengths))


def covering_run(sizes: Sequence[int], box: Box) -> tuple[int, int]:
    """The first element of a box in the row-major order of its array, and the one after its last.

    Raises:
        ValueError: the box is not inside the array.
    """
    check_box(sizes, box)
    if box.numel == 0:
        return 0, 0
    strides = row_major_strides(sizes)
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    return first, first + 1 + sum((n - 1) * stride for n, stride in zip(box.lengths, strides, strict=True))


def runs_of_box(sizes: Sequence[int], box: Box, max_gap: int) -> list[tuple[int, int]]:
    """Runs of elements, in row-major order, that together cover a box.

    Returns:
        (first element, the one after the last) of each run, in order, more than ``max_gap`` apart. Nothing for an
        empty box, one for a box that is dense.

    Raises:
        ValueError: the box is not inside the array.
    """
    start, stop = covering_run(sizes, box)
    if start == stop:
        return []
    strides = row_major_strides(sizes)
    # From the innermost dimension outwards: a run spans the box in all dimensions from ``dim`` on.
    dim, span = len(sizes), 1
    while dim > 0 and (box.lengths[dim - 1] == 1 or strides[dim - 1] - span <= max_gap):
        dim -= 1
        span += (box.lengths[dim] - 1) * strides[dim]
    starts = [start]
    for outer in range(dim):
        starts = [at + index * strides[outer] for at in starts for index in range(box.lengths[outer])]
    return [(at, at + span) for at in starts]


class Section(NamedTuple):
    """A run of the elements of a box."""

    start: int
    """First element, in the row-major order of the box."""
    stop: int
    """The element after the last."""


def find_section(sizes: Sequence[int], box: Box, start: int, stop: int) -> Section:
    """The elements of ``box`` among elements ``start`` to ``stop`` of its array."""
    return Section(elements_before(sizes, box, start), elements_before(sizes, box, stop))


def elements_before(sizes: Sequence[int], box: Box, position: int) -> int:
    """How many elements of ``box`` come before element ``position`` of its array, in row-major order."""
    count, left = 0, position
    rest = box.numel
    for stride, offset, length in zip(row_major_strides(sizes), box.offsets, box.lengths, strict=True):
        if rest == 0:
            return 0
        index, left = divmod(left, stride)
        rest //= length
        if index < offset:
            return count
        if index >= offset + length:
            return count + length * rest
        count += (index - offset) * rest
    return count + (0 if box.lengths else min(position, 1))


def boxes_of_section(sizes: Sequence[int], box: Box, section: Section) -> list[tuple[Box, int]]:
    """The boxes, within ``box``, that a section of it consists of, in order.

    Returns:
        Each box with the position of its first element in the array, in row-major order.
    """
    if section.start >= section.stop:
        return []
    strides = row_major_strides(sizes)
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    return [
        (part, first + sum(offset * stride for offset, stride in zip(part.offsets, strides, strict=True)))
        for part in _boxes_of_run(tuple(box.lengths), *section)
    ]


# --- chunks that overlap -----------------------------------------------------------------------------

AnyBox = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a chunk, in elements: a `Box`, or torch's."""


class Overlap(NamedTuple):
    """The common box of two chunks."""

    local: int
    """Number of the local chunk."""
    saved: int
    """Number of the saved chunk."""
    local_offsets: tuple[int, ...]
    """Offsets of the common box in the local chunk."""
    saved_offsets: tuple[int, ...]
    """Offsets of the common box in the saved chunk."""
    lengths: tuple[int, ...]
    """Sizes of the common box; a dimension may be 0 where a chunk is empty."""


_PAIRS = 2**16  # that are compared at once: 1 MiB in each dimension


def find_overlaps(saved: Sequence[AnyBox], local: Sequence[AnyBox]) -> Iterator[Overlap]:
    """All pairs that overlap, in torch's order: by the beginning of the local chunk, then by the end of the saved one,
    both in the longest dimension.

    Two chunks overlap if in every dimension each begins before the other ends; so an empty chunk overlaps one that has
    it strictly inside. Compares the pairs that overlap in the dimension in which the fewest do.

    Raises:
        ValueError: boxes have different numbers of dimensions.
    """
    if not saved or not local:
        return
    dims = len(local[0][0])
    if set(map(len, chain.from_iterable(chain(saved, local)))) != {dims}:
        raise ValueError("the chunks of a tensor differ in their number of dimensions")
    starts, stops = _bounds(saved, dims)
    local_starts, local_stops = _bounds(local, dims)
    longest = int(np.maximum(stops.max(0), local_stops.max(0)).argmax())
    by_start = np.argsort(local_starts[:, longest], kind="stable")
    local_starts, local_stops = local_starts[by_start], local_stops[by_start]
    places = np.argsort(np.argsort(stops[:, longest], kind="stable"))  # of the saved chunks, in order of their ends
    candidates = [_overlaps_in(*each) for each in zip(starts.T, stops.T, local_starts.T, local_stops.T, strict=True)]
    by_end, first, counts = min(candidates, key=lambda each: each[2].sum())
    ends = np.cumsum(counts)
    begin = 0
    while begin < len(local):
        before = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + _PAIRS, side="right")))
        i = np.repeat(np.arange(begin, end), counts[begin:end])
        j = by_end[np.arange(before, ends[end - 1]) + (first + counts - ends)[i]]
        begin = end
        kept = ((starts[j] < local_stops[i]) & (local_starts[i] < stops[j])).all(1)
        i, j = i[kept], j[kept]
        order = np.lexsort((places[j], i))
        i, j = i[order], j[order]
        low, high = np.maximum(local_starts[i], starts[j]), np.minimum(local_stops[i], stops[j])
        offsets = ((low - local_starts[i])[:, :dims], (low - starts[j])[:, :dims], (high - low)[:, :dims])
        columns = (map(tuple, each.tolist()) for each in offsets)
        yield from map(Overlap, by_start[i].tolist(), j.tolist(), *columns)


def _overlaps_in(starts: Any, stops: Any, local_starts: Any, local_stops: Any) -> tuple[Any, Any, Any]:
    """For each local span, the saved ones that may overlap it: the place of the first and their number, in an order of
    the saved ones, which is the first value."""
    by_end = np.argsort(stops, kind="stable")
    first_starts = np.minimum.accumulate(starts[by_end][::-1])[::-1]  # from each place on
    first = np.searchsorted(stops[by_end], local_starts, side="right")
    last = np.searchsorted(first_starts, local_stops, side="left")
    return by_end, first, np.maximum(last - first, 0)


def _bounds(boxes: Sequence[AnyBox], dims: int) -> tuple[Any, Any]:
    """First indices of boxes and those after their last ones, a row each; a scalar is a box of one dimension."""
    found = np.fromiter(chain.from_iterable(chain.from_iterable(boxes)), np.int64).reshape(len(boxes), 2, dims)
    if dims == 0:
        return np.zeros((len(boxes), 1), np.int64), np.ones((len(boxes), 1), np.int64)
    return found[:, 0], found.sum(1)
