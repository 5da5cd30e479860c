"""Indices into saved tensors: the box that they select. Pure."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import SupportsIndex

Part = SupportsIndex | slice | EllipsisType
Index = Part | tuple[Part, ...] | None
"""An index as in numpy: numbers, slices of step 1, one Ellipsis. None: everything."""


@dataclass(frozen=True)
class Selection:
    """The box that an index selects, and the shape of the result."""

    offsets: tuple[int, ...]
    """First element of the box in each dimension."""
    lengths: tuple[int, ...]
    """Elements of the box in each dimension."""
    shape: tuple[int, ...]
    """``lengths`` without the dimensions that are indexed by a number."""


def select(index: Index, sizes: Sequence[int]) -> Selection:
    """Find the box that ``index`` selects of a tensor of ``sizes``.

    Negative numbers count from the end; slices are cut off at the ends of the tensor, numbers must lie in it.

    Raises:
        IndexError: a number out of range, too many of them, a step other than 1, or no index at all.
    """
    parts = _expand(index, len(sizes))
    offsets, lengths, shape = [], [], []
    for dim, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if isinstance(part, slice):
            start, length = _cut(part, size, dim)
            shape.append(length)
        else:
            start, length = _number(part, size, dim), 1
        offsets.append(start)
        lengths.append(length)
    return Selection(tuple(offsets), tuple(lengths), tuple(shape))


def _expand(index: object, dims: int) -> list[object]:
    """Expand an index to one part for each dimension."""
    if index is None:
        index = ()
    parts = list(index) if isinstance(index, tuple) else [index]
    gaps = [number for number, part in enumerate(parts) if part is Ellipsis]
    if len(gaps) > 1:
        raise IndexError("it has more than one Ellipsis")
    given = len(parts) - len(gaps)
    if given > dims:
        raise IndexError(f"it has {given} parts, the tensor {dims} dimensions")
    gap = gaps[0] if gaps else len(parts)
    return [*parts[:gap], *[slice(None)] * (dims - given), *parts[gap + 1 :]]


def _cut(part: slice, size: int, dim: int) -> tuple[int, int]:
    """Start and length of a slice."""
    try:
        if part.step is not None and operator.index(part.step) != 1:
            raise IndexError(f"its step in dimension {dim} is {part.step}: only 1 can be read")
        start, stop, _ = part.indices(size)
    except TypeError:
        raise IndexError(f"{part} in dimension {dim} is not made of whole numbers") from None
    return start, max(0, stop - start)


def _number(part: object, size: int, dim: int) -> int:
    if isinstance(part, bool) or not isinstance(part, SupportsIndex):
        raise IndexError(f"{part!r} in dimension {dim} is neither a whole number, a slice nor an Ellipsis")
    try:
        number = operator.index(part)
    except TypeError:  # for example an array of several numbers
        raise IndexError(f"{part!r} in dimension {dim} is not one whole number") from None
    if not -size <= number < size:
        raise IndexError(f"{number} is out of range for dimension {dim} of {size} elements")
    return number % size
