"""Whether the chunks of a tensor fit it and each other: what DCP's `_validate_global_plan` checks. Pure.

The chunks of a tensor that is cut along its dimensions form a grid, and numpy sees at once that a grid has no overlaps.
Others are compared one by one. Tensors that are cut alike are checked once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dcp_s3.errors import ShardingError
from dcp_s3.format.cover import Shape, box_text, find_overlap

Ints: TypeAlias = npt.NDArray[np.integer[Any]]


class ChunkChecks:
    """Checks tensors.

    Args:
        shapes: offsets and sizes, to which what is checked refers by number.
        filled: whether chunks must fill their tensor.
    """

    def __init__(self, shapes: Sequence[Shape], *, filled: bool) -> None:
        self._shapes, self._filled = shapes, filled
        dims = max(map(len, shapes), default=0)
        padded = [(*each, *[0] * (dims - len(each))) for each in shapes]
        self._padded = np.array(padded, np.int64).reshape(len(shapes), dims)
        self._dims = np.array([len(each) for each in shapes], np.int64)
        self._volumes = np.array([math.prod(each) for each in shapes], np.int64)
        self._right: set[bytes] = set()

    def find_outside(self, offsets: Ints, sizes: Ints, wholes: Ints) -> int | None:
        """Position of the first chunk that is not inside its tensor; None if all are."""
        wrong = (self._dims[offsets] != self._dims[wholes]) | (self._dims[sizes] != self._dims[wholes])
        for dim in range(self._padded.shape[1]):
            column = self._padded[:, dim]
            wrong |= column[offsets] + column[sizes] > column[wholes]
        wrong &= self._dims[wholes] > 0  # DCP does not look at scalars
        return int(wrong.argmax()) if wrong.any() else None

    def check(self, fqn: str, whole: int, offsets: Ints, sizes: Ints, ranks: Ints) -> None:
        """Check the chunks of one tensor, all inside of it.

        Args:
            fqn: name of the tensor, for messages.
            whole: its shape.
            offsets: offsets of its chunks, none twice.
            sizes: sizes of its chunks.
            ranks: rank of each chunk, for messages.

        Raises:
            ShardingError: chunks overlap, or do not fill the tensor.
        """
        key = whole.to_bytes(8, "big") + offsets.tobytes() + sizes.tobytes()
        if key in self._right or not self._shapes[whole]:
            return
        if len(offsets) > 1 and not self._is_grid(len(self._shapes[whole]), offsets, sizes):
            boxes = [(self._shapes[a], self._shapes[b]) for a, b in zip(offsets.tolist(), sizes.tolist(), strict=True)]
            if pair := find_overlap(boxes):
                one, other = sorted(pair)
                raise ShardingError(
                    f"{fqn!r} has chunks that overlap: {box_text(*boxes[one])} of rank {ranks[one]}, and "
                    f"{box_text(*boxes[other])} of rank {ranks[other]}",
                    fqn=fqn,
                )
        volume, expected = int(self._volumes[sizes].sum()), int(self._volumes[whole])
        if self._filled and volume != expected:
            raise ShardingError(
                f"{fqn!r} has {expected} elements, but the chunks of ranks {some(ranks.tolist())} have {volume}: some "
                "are missing, or a rank saved another state",
                fqn=fqn,
            )
        self._right.add(key)

    def _is_grid(self, dims: int, offsets: Ints, sizes: Ints) -> bool:
        """Whether the intervals of any two boxes are the same or disjoint in each dimension. As no offsets occur twice,
        the boxes are disjoint then."""
        ordered = np.sort(offsets)
        if (ordered[1:] == ordered[:-1]).any():
            return False
        starts, ends = self._padded[offsets, :dims], self._padded[offsets, :dims] + self._padded[sizes, :dims]
        for dim in range(dims):
            order = np.lexsort((ends[:, dim], starts[:, dim]))
            start, end = starts[order, dim], ends[order, dim]
            same = (start[1:] == start[:-1]) & (end[1:] == end[:-1])
            if not (same | (end[:-1] <= start[1:])).all():
                return False
        return True


def some(ranks: Iterable[int]) -> str:
    """Ranks, for messages: not more than a few."""
    found = sorted(set(ranks))
    return ", ".join(map(str, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
