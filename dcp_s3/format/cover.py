"""Whether boxes of a tensor overlap, and fill it. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Sequence
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]


def find_flaw(shape: Shape, boxes: Sequence[tuple[Shape, Shape]], *, filled: bool = True) -> str | None:
    """What is wrong with the chunks of a tensor; None if each element is in one of them.

    Args:
        shape: shape of the tensor.
        boxes: offsets and sizes of its chunks, all inside of it.
        filled: whether chunks must fill the tensor.
    """
    boxes = [box for box in boxes if 0 not in box[1]]
    volume, expected = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if volume > expected or (filled and volume < expected):
        return f"has {expected} elements, its chunks have {volume}"
    pair = find_overlap(boxes) if len(boxes) > 1 else None
    return (
        None if pair is None else "has chunks that overlap: " + " and ".join(box_text(*boxes[n]) for n in sorted(pair))
    )


def find_overlap(boxes: Sequence[tuple[Shape, Shape]]) -> tuple[int, int] | None:
    """Positions of two boxes (offsets, sizes) that overlap, by a sweep along the dimension with the most offsets."""
    dims = len(boxes[0][0])
    dim = max(range(dims), key=lambda each: len({offsets[each] for offsets, _ in boxes}))
    active: list[tuple[int, int]] = []
    for number in sorted(range(len(boxes)), key=lambda each: (boxes[each][0][dim], *boxes[each][0])):
        offsets, sizes = boxes[number]
        del active[: bisect_right(active, (offsets[dim], len(boxes)))]
        for _, other in active:
            if _overlap(boxes[number], boxes[other]):
                return number, other
        insort(active, (offsets[dim] + sizes[dim], number))
    return None


def _overlap(one: tuple[Shape, Shape], other: tuple[Shape, Shape]) -> bool:
    return all(
        start < other_start + other_size and other_start < start + size
        for start, size, other_start, other_size in zip(*one, *other, strict=True)
    )


def box_text(offsets: Shape, sizes: Shape) -> str:
    """A chunk, for messages."""
    return f"the one of shape {tuple(sizes)} at {tuple(offsets)}"
