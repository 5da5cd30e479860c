"""What one reader needs of a run of a saved chunk, and how it lies in a message. Pure: integers only.

The elements of a box that lie in a run of its array are, in row-major order, a run of the box too. So what a reader
needs of a piece is packed as one run of its own box, whatever the shapes: a section.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dcp_s3.load.boxes import Box, boxes_of_run, covering_run, row_major_strides

ALIGNMENT = 64
"""Sections begin at multiples of this many bytes of a message: of the size of an element of any dtype."""


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


class Section(NamedTuple):
    """A run of the elements of a box.

    Attributes:
        start: first element, in the row-major order of the box.
        stop: the one behind the last.
    """

    start: int
    stop: int


def find_section(sizes: Sequence[int], box: Box, start: int, stop: int) -> Section:
    """The elements of ``box`` among elements ``start`` to ``stop`` of its array."""
    return Section(elements_before(sizes, box, start), elements_before(sizes, box, stop))


class Strip(NamedTuple):
    """A box of a section.

    Attributes:
        offsets: its first element, in the box.
        lengths: elements in each dimension.
        position: of its first element in the array, in row-major order.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    position: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return Box(self.offsets, self.lengths).numel


def strips_of(sizes: Sequence[int], box: Box, section: Section) -> list[Strip]:
    """The boxes that a section of ``box`` consists of, in order: in an array of ``sizes`` and in the box."""
    strides = row_major_strides(sizes)
    first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))
    return [
        Strip(offsets, lengths, first + sum(o * s for o, s in zip(offsets, strides, strict=True)))
        for offsets, lengths in boxes_of_run(box.lengths, *section)
    ]


def contains(sizes: Sequence[int], box: Box, start: int, stop: int) -> bool:
    """Whether every one of elements ``start`` to ``stop`` of the array is in ``box``."""
    first, last = covering_run(sizes, box)
    return first <= start and stop <= last and last - first == box.numel


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where sections of these sizes (bytes) begin in a message, and how long it is."""
    starts, end = [], 0
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end
