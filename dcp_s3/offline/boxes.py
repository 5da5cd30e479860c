"""Boxes of tensors: what an index selects, and pieces of bounded size. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, SupportsIndex

from dcp_s3.load.plan import Box

Part = SupportsIndex | slice | EllipsisType
Index = Part | tuple[Part, ...] | None
"""An index as in numpy: numbers, slices of step 1, one Ellipsis. None: everything."""


@dataclass(frozen=True)
class Selection:
    """The box that an index selects, and the shape of the result."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    shape: tuple[int, ...]
    """``lengths`` without the dimensions that are indexed by a number."""


def select(index: object, sizes: Sequence[int]) -> Selection:
    """The box that ``index`` selects of a tensor of ``sizes``, or IndexError. Negative numbers count from the end;
    slices are cut off at the ends of the tensor, numbers must lie in it."""
    parts: list[Any] = [] if index is None else list(index) if isinstance(index, tuple) else [index]
    gap = next((number for number, part in enumerate(parts) if part is Ellipsis), None)
    if gap is None:
        gap = len(parts)
        parts.append(Ellipsis)
    if len(parts) - 1 > len(sizes):
        raise IndexError(f"it has {len(parts) - 1} parts, the tensor {len(sizes)} dimensions")
    parts[gap : gap + 1] = [slice(None)] * (len(sizes) - len(parts) + 1)
    offsets, lengths, shape = [], [], []
    for dim, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        try:
            found: Any = range(size)[part]
        except (IndexError, TypeError, ValueError) as error:
            raise IndexError(f"{part!r} in dimension {dim} of {size} elements: {error}") from None
        if isinstance(found, range):
            if found.step != 1:
                raise IndexError(f"its step in dimension {dim} is {found.step}: only 1 can be read")
            shape.append(len(found))
        offsets.append(found.start if isinstance(found, range) else found)
        lengths.append(len(found) if isinstance(found, range) else 1)
    return Selection(tuple(offsets), tuple(lengths), tuple(shape))


def cut(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most ``most`` elements (at least 1) that are runs of its elements in row-major
    order, from the first to the last; none if it is empty."""
    shape = tuple(shape)
    if 0 in shape:
        return
    row = math.prod(shape[1:])
    if math.prod(shape) <= most:
        yield Box((0,) * len(shape), shape)
    elif row > most:
        for number in range(shape[0]):
            for box in cut(shape[1:], most):
                yield Box((number, *box.offsets), (1, *box.lengths))
    else:
        step = most // row
        for start in range(0, shape[0], step):
            lengths = (min(step, shape[0] - start), *shape[1:])
            yield Box((start, *(0 for _ in shape[1:])), lengths)
