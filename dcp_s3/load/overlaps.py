"""Finds the saved chunks of a tensor that overlap local ones, and where. Pure: no I/O, no tensors.

Overlaps come in the order of torch's `create_read_items_for_chunk_list`. It looks at all pairs that overlap in one
dimension, the longest; here both sets are halved along whichever dimension keeps their boxes apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a chunk, in elements."""

# For fewer pairs, a loop is done before numpy has made its arrays.
_FEW_PAIRS = 24
# Number of pairs compared at once: a few hundred KiB of booleans.
_BLOCK_PAIRS = 2**14


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


def find_overlaps(saved: Sequence[Box], local: Sequence[Box]) -> Overlaps:
    """All pairs that overlap, in torch's order: by the beginning of the local chunk, then by the end of the saved one,
    both in the longest dimension.

    Two chunks overlap if in every dimension each begins before the other ends; so an empty chunk overlaps one that has
    it strictly inside. Takes O((n + m) log(n + m) + k) for n saved and m local chunks with k overlaps, if the
    chunks of a set do not lie across each other.

    Raises:
        ValueError: boxes have different numbers of dimensions.
    """
    if not saved or not local:
        return Overlaps([], [], [], [], [])
    dims = len(local[0][0])
    if set(map(len, chain.from_iterable(chain(saved, local)))) != {dims}:
        raise ValueError("the chunks of a tensor differ in their number of dimensions")
    if len(saved) * len(local) <= _FEW_PAIRS or dims == 0:
        return _compare_all(saved, local, dims)
    return _join(saved, local)


def _longest(ends: Sequence[int]) -> int:
    """The first dimension in which the chunks reach furthest; 0 if they reach nowhere."""
    furthest = max(ends)
    return ends.index(furthest) if furthest > 0 else 0


def _compare_all(saved: Sequence[Box], local: Sequence[Box], dims: int) -> Overlaps:
    found = Overlaps([], [], [], [], [])
    by_end, by_start = range(len(saved)), range(len(local))
    if dims and len(saved) * len(local) > 1:
        dim = _longest([max(o[d] + s[d] for boxes in (saved, local) for o, s in boxes) for d in range(dims)])
        by_end = sorted(by_end, key=lambda i: saved[i][0][dim] + saved[i][1][dim])  # type: ignore[assignment]
        by_start = sorted(by_start, key=lambda i: local[i][0][dim])  # type: ignore[assignment]
    for i in by_start:
        local_starts, local_sizes = local[i]
        for j in by_end:
            saved_starts, saved_sizes = saved[j]
            for a, n, b, m in zip(local_starts, local_sizes, saved_starts, saved_sizes, strict=True):
                if a >= b + m or b >= a + n:
                    break
            else:
                starts = list(map(max, local_starts, saved_starts))
                found.local.append(i)
                found.saved.append(j)
                found.local_offsets.append(tuple(x - a for x, a in zip(starts, local_starts, strict=True)))
                found.saved_offsets.append(tuple(x - b for x, b in zip(starts, saved_starts, strict=True)))
                found.lengths.append(
                    tuple(
                        min(a + n, b + m) - x
                        for x, a, n, b, m in zip(
                            starts, local_starts, local_sizes, saved_starts, saved_sizes, strict=True
                        )
                    )
                )
    return found


def _join(saved: Sequence[Box], local: Sequence[Box]) -> Overlaps:
    saved_starts, saved_ends = _bounds(saved)
    local_starts, local_ends = _bounds(local)
    if (saved_ends < saved_starts).any() or (local_ends < local_starts).any():  # negative sizes, or beyond 64 bits
        return _compare_all(saved, local, saved_starts.shape[1])
    i, j = _pairs(local_starts, local_ends, saved_starts, saved_ends)
    dim = _longest(np.maximum(saved_ends.max(0), local_ends.max(0)).tolist())
    order = np.lexsort((j, saved_ends[j, dim], i, local_starts[i, dim]))
    i, j = i[order], j[order]
    starts = np.maximum(local_starts[i], saved_starts[j])
    return Overlaps(
        i.tolist(),
        j.tolist(),
        _tuples(starts - local_starts[i]),
        _tuples(starts - saved_starts[j]),
        _tuples(np.minimum(local_ends[i], saved_ends[j]) - starts),
    )


def _bounds(boxes: Sequence[Box]) -> tuple[Any, Any]:
    """Begins and ends, (n, dims) each."""
    numbers = np.fromiter(chain.from_iterable(chain.from_iterable(boxes)), dtype=np.int64)
    both = numbers.reshape(len(boxes), 2, -1)
    return both[:, 0], both[:, 0] + both[:, 1]


def _tuples(rows: Any) -> list[tuple[int, ...]]:
    return list(zip(*rows.T.tolist(), strict=True))


def _pairs(a_starts: Any, a_ends: Any, b_starts: Any, b_ends: Any) -> tuple[Any, Any]:
    """Numbers of the boxes of a and b that overlap, in any order."""
    found: list[tuple[Any, Any]] = []
    work = [(np.arange(len(a_starts)), np.arange(len(b_starts)))]
    while work:
        a, b = work.pop()
        if len(a) * len(b) <= _BLOCK_PAIRS:
            hits = np.ones((len(a), len(b)), dtype=bool)
            for dim in range(a_starts.shape[1]):
                hits &= a_starts[a, dim][:, None] < b_ends[b, dim]
                hits &= b_starts[b, dim] < a_ends[a, dim][:, None]
            i, j = np.nonzero(hits)
            found.append((a[i], b[j]))
        elif len(a) >= len(b):
            for half in _halves(a, a_starts, a_ends):
                others = _within(half, a_starts, a_ends, b, b_starts, b_ends)
                work.append((half, others))
        else:
            for half in _halves(b, b_starts, b_ends):
                others = _within(half, b_starts, b_ends, a, a_starts, a_ends)
                work.append((others, half))
    return np.concatenate([i for i, _ in found]), np.concatenate([j for _, j in found])


def _halves(boxes: Any, starts: Any, ends: Any) -> tuple[Any, Any]:
    """Split boxes along the dimension in which they are furthest apart relative to their size."""
    begins = starts[boxes]
    sizes = np.maximum((ends[boxes] - begins).mean(0), 1)
    dim = np.argmax((begins.max(0) - begins.min(0)) / sizes)
    half = len(boxes) // 2
    order = np.argpartition(begins[:, dim], half)
    return boxes[order[:half]], boxes[order[half:]]


def _within(boxes: Any, starts: Any, ends: Any, others: Any, other_starts: Any, other_ends: Any) -> Any:
    """The boxes of ``others`` that overlap the bounding box of ``boxes``."""
    low, high = starts[boxes].min(0), ends[boxes].max(0)
    return others[((other_starts[others] < high) & (low < other_ends[others])).all(1)]
