"""Boxes of row-major arrays, and the runs of elements that make them up. Pure: integers only.

A box is a rectangular part of an array: an offset and a length in each dimension. A saved chunk lies in its object as
one run of bytes in row-major order; a request fetches a part of that run, which is a few boxes again.

The elements of a box that lie in a run of its array are, in row-major order, a run of the box too. So the needed
elements of any run can be packed as one run of the box, whatever the shapes: a section.

Overlaps of saved chunks with local ones come in the order of torch's `create_read_items_for_chunk_list`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple


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


@dataclass(frozen=True)
class Overlaps:
    """Parallel lists, one entry for each pair of chunks that overlap."""

    local: list[int]
    """Number of the local chunk."""
    saved: list[int]
    """Number of the saved chunk."""
    local_offsets: list[tuple[int, ...]]
    """Offsets of the common box in the local chunk."""
    saved_offsets: list[tuple[int, ...]]
    """Offsets of the common box in the saved chunk."""
    lengths: list[tuple[int, ...]]
    """Sizes of the common box; a dimension may be 0 where a chunk is empty."""


def find_overlaps(saved: Sequence[AnyBox], local: Sequence[AnyBox]) -> Overlaps:
    """All pairs that overlap, in torch's order: by the beginning of the local chunk, then by the end of the saved one,
    both in the longest dimension.

    Two chunks overlap if in every dimension each begins before the other ends; so an empty chunk overlaps one that has
    it strictly inside. Compares the pairs that overlap in the longest dimension.

    Raises:
        ValueError: boxes have different numbers of dimensions.
    """
    found = Overlaps([], [], [], [], [])
    if not saved or not local:
        return found
    dims = len(local[0][0])
    if set(map(len, chain.from_iterable(chain(saved, local)))) != {dims}:
        raise ValueError("the chunks of a tensor differ in their number of dimensions")
    furthest = [max(o[d] + s[d] for boxes in (saved, local) for o, s in boxes) for d in range(dims)]
    dim = furthest.index(max(furthest)) if dims and max(furthest) > 0 else 0
    spans = [(o[dim], o[dim] + s[dim]) if dims else (0, 1) for o, s in saved]
    by_end = sorted(range(len(saved)), key=lambda j: spans[j][1])
    ends = [spans[j][1] for j in by_end]
    first_starts = list(accumulate((spans[j][0] for j in reversed(by_end)), min))[::-1]  # from each place on
    for i in sorted(range(len(local)), key=lambda i: local[i][0][dim] if dims else 0):
        starts, sizes = local[i]
        start, stop = (starts[dim], starts[dim] + sizes[dim]) if dims else (0, 1)
        for place in range(bisect_right(ends, start), len(ends)):
            if first_starts[place] >= stop:
                break
            j = by_end[place]
            saved_starts, saved_sizes = saved[j]
            for a, n, b, m in zip(starts, sizes, saved_starts, saved_sizes, strict=True):
                if a >= b + m or b >= a + n:
                    break
            else:
                low = list(map(max, starts, saved_starts))
                spans_of_both = zip(low, starts, sizes, saved_starts, saved_sizes, strict=True)
                found.local.append(i)
                found.saved.append(j)
                found.local_offsets.append(tuple([x - a for x, a in zip(low, starts, strict=True)]))
                found.saved_offsets.append(tuple([x - b for x, b in zip(low, saved_starts, strict=True)]))
                found.lengths.append(tuple([min(a + n, b + m) - x for x, a, n, b, m in spans_of_both]))
    return found
