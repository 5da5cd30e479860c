"""Finds what two cuts of a tensor into chunks have in common, so that checksums of the chunks can be compared. Pure.

A CRC is linear. Let each chunk have one, over its elements in row-major order. Shift each by a number of bytes, and XOR
them. The results of both sides can be compared if each byte of the tensor is shifted alike on both: by the shift of its
chunk plus what follows it in the chunk. Rows that were cut into other rows are the plain case: the chunks follow one
another, and their CRCs combine to that of the whole.

The overlaps of chunks are the edges of a graph. Within a connected part of it one shift implies all others. Either they
agree, and the part has one CRC on both sides, or no combination of its CRCs exists. In the latter case its chunks are
replaced by their blocks (see format/blocks.py), whose CRCs are known, too. So they are where two bytes of a part are
shifted alike: different CRCs would still show a change, but a change of both bytes might cancel out.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from dcp_s3.load.overlaps import Overlaps, find_overlaps

# Contiguous runs of a part whose blocks are looked at. A block has 8 KiB or more, and a chunk mostly 64 of them:
# where there are so many runs, some block has several that lie differently on the other side, so that it is of no use.
_MAX_RUNS = 2**16
# Rows against columns: their CRCs do not combine, and thousands of each would take GiB of memory to find out.
_MAX_OVERLAPS = 2**18


class Chunk(NamedTuple):
    """One saved chunk of a tensor, not empty."""

    offsets: tuple[int, ...]
    """First element in each dimension."""
    sizes: tuple[int, ...]
    """Elements in each dimension."""
    block: int | None
    """Bytes of a block; those of the chunk if it has one block. None if its CRC is not known."""


class Part(NamedTuple):
    """A run of a chunk's bytes with a known CRC."""

    chunk: int
    """Number of the chunk."""
    start: int
    """First byte in the chunk."""
    stop: int
    """Byte after the last."""
    shift: int
    """Bytes by which its CRC is shifted."""


class SharedPart(NamedTuple):
    """Bytes of a tensor that have one CRC on both sides: the XOR of the shifted CRCs (`crc64nvme_linear`) there."""

    a: tuple[Part, ...]
    """Where they lie on one side."""
    b: tuple[Part, ...]
    """Where they lie on the other."""


class SharedParts(NamedTuple):
    """What two cuts have in common."""

    parts: tuple[SharedPart, ...]
    """Parts that can be compared: different CRCs show that bytes differ. No two share a byte."""
    complete: bool
    """Whether equal CRCs of all parts show that all bytes of the tensor are equal."""


# Layers of a model are cut alike.
@functools.lru_cache(maxsize=256)
def overlap(boxes: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]) -> bool:
    """Whether some chunks (offsets and sizes, not empty) have an element in common."""
    return len(find_overlaps(boxes, boxes).saved) > len(boxes)


@functools.lru_cache(maxsize=256)
def find_shared_parts(a: tuple[Chunk, ...], b: tuple[Chunk, ...], itemsize: int) -> SharedParts:
    """What can be compared of a tensor that was cut in two ways.

    Args:
        a: chunks of one side. They do not `overlap`, and have the same elements as those of the other side.
        b: chunks of the other side.
        itemsize: bytes of an element.
    """
    found = find_overlaps([(x.offsets, x.sizes) for x in a], [(x.offsets, x.sizes) for x in b])
    if len(found.saved) > _MAX_OVERLAPS:
        return SharedParts((), complete=False)
    graph = _Graph()
    overlaps_of: dict[int, list[int]] = defaultdict(list)
    for number, (i, j) in enumerate(zip(found.saved, found.local, strict=True)):
        overlaps_of[i].append(number)
        graph.add(("a", i, 0), ("b", j, 0), _shift_of_box(a[i], b[j], found, number, itemsize))
    parts: list[SharedPart] = []
    complete = True
    for shifts in graph.solve():
        part = _make_part(shifts, a, b, itemsize, blocks=False) if shifts.agree else None
        if part is None or not _is_proof(part):
            inside = [n for side, i, _ in sorted(shifts.of) if side == "a" for n in overlaps_of[i]]
            finer = _find_in_blocks(a, b, found, inside, itemsize)
            complete = complete and finer is not None and finer.complete
            if finer is not None:
                parts += finer.parts
                continue
        if part is not None:
            parts.append(part)
    return SharedParts(tuple(parts), complete)


def _is_proof(part: SharedPart) -> bool:
    """Whether no two bytes are shifted alike."""
    spans = sorted((each.shift, each.shift + each.stop - each.start) for each in part.a)
    return all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def _find_in_blocks(
    a: Sequence[Chunk], b: Sequence[Chunk], found: Overlaps, inside: Sequence[int], itemsize: int
) -> SharedParts | None:
    """What can be compared of some overlaps by the blocks of their chunks; None if those are not looked at."""
    chunks = [a[found.saved[n]] for n in inside] + [b[found.local[n]] for n in inside]
    if all(each.block is None or each.block >= _nbytes(each, itemsize) for each in chunks):
        return None
    graph = _Graph()
    runs = 0
    for n in inside:
        i, j = found.saved[n], found.local[n]
        starts_a, starts_b, length = _runs(a[i], b[j], found, n)
        runs += len(starts_a)
        if runs > _MAX_RUNS:
            return None
        block_a, block_b = (each.block or _nbytes(each, itemsize) for each in (a[i], b[j]))
        known = a[i].block is not None and b[j].block is not None
        lengths = np.full(len(starts_a), length * itemsize)
        at_a, at_b, lengths = _cut(starts_a * itemsize, starts_b * itemsize, lengths, block_a)
        at_b, at_a, lengths = _cut(at_b, at_a, lengths, block_b)
        number_a, number_b = at_a // block_a, at_b // block_b
        end_a = np.minimum((number_a + 1) * block_a, _nbytes(a[i], itemsize))
        end_b = np.minimum((number_b + 1) * block_b, _nbytes(b[j], itemsize))
        shifts = (end_a - at_a) - (end_b - at_b)
        for p, q, shift in set(zip(number_a.tolist(), number_b.tolist(), shifts.tolist(), strict=True)):
            graph.add(("a", i, p), ("b", j, q), shift if known else None)
    solved = graph.solve()
    parts = [_make_part(each, a, b, itemsize, blocks=True) for each in solved if each.agree]
    return SharedParts(tuple(parts), len(parts) == len(solved) and all(map(_is_proof, parts)))


def _cut(own: Any, other: Any, lengths: Any, block: int) -> tuple[Any, Any, Any]:
    """Cut runs, given by where they begin on either side, at the ends of blocks of one side."""
    first = own // block
    counts = (own + lengths - 1) // block - first + 1
    which = np.repeat(np.arange(len(own)), counts)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.maximum(own[which], (first[which] + nth) * block)
    stop = np.minimum(own[which] + lengths[which], (first[which] + nth + 1) * block)
    return start, other[which] + (start - own[which]), stop - start


def _runs(a: Chunk, b: Chunk, found: Overlaps, number: int) -> tuple[Any, Any, int]:
    """The runs of an overlap that are contiguous on both sides: where they begin in each chunk, and their length; all
    in elements."""
    lengths = found.lengths[number]
    outer, length = len(lengths), 1
    while outer:
        outer -= 1
        length *= lengths[outer]
        if not lengths[outer] == a.sizes[outer] == b.sizes[outer]:
            break
    starts = []
    for chunk, offsets in ((a, found.saved_offsets[number]), (b, found.local_offsets[number])):
        strides = _strides(chunk.sizes)
        start: Any = np.array([sum(o * s for o, s in zip(offsets, strides, strict=True))], dtype=np.int64)
        if math.prod(lengths[:outer]) > _MAX_RUNS:
            starts.append(np.zeros(_MAX_RUNS + 1, dtype=np.int64))  # too many: not looked at
            continue
        for count, stride in zip(lengths[:outer], strides[:outer], strict=True):
            start = (start[:, None] + np.arange(count) * stride).reshape(-1)
        starts.append(start)
    return starts[0], starts[1], length


def _shift_of_box(a: Chunk, b: Chunk, found: Overlaps, number: int, itemsize: int) -> int | None:
    """By how many bytes more the chunk of ``b`` has to be shifted than that of ``a``, such that their common elements
    are shifted alike; None if that is a different number for each, or a CRC is not known."""
    if a.block is None or b.block is None:
        return None
    after_a, after_b = math.prod(a.sizes) - 1, math.prod(b.sizes) - 1
    strides = zip(_strides(a.sizes), _strides(b.sizes), strict=True)
    offsets = zip(found.saved_offsets[number], found.local_offsets[number], found.lengths[number], strict=True)
    for (stride_a, stride_b), (in_a, in_b, length) in zip(strides, offsets, strict=True):
        if length > 1 and stride_a != stride_b:
            return None
        after_a -= (in_a + length - 1) * stride_a
        after_b -= (in_b + length - 1) * stride_b
    return (after_a - after_b) * itemsize


@functools.lru_cache(maxsize=2**12)
def _strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def _nbytes(chunk: Chunk, itemsize: int) -> int:
    return math.prod(chunk.sizes) * itemsize


_Node = tuple[str, int, int]
"""Side, number of the chunk, number of the block."""


class _Shifts(NamedTuple):
    """A connected part of the graph."""

    of: dict[_Node, int]
    """The shift of each node, in bytes."""
    agree: bool
    """Whether all edges agree with them."""


class _Graph:
    """Nodes, and edges that say how much more one of them has to be shifted than the other."""

    def __init__(self) -> None:
        self._edges: dict[_Node, list[tuple[_Node, int | None]]] = defaultdict(list)

    def add(self, one: _Node, other: _Node, shift: int | None) -> None:
        """Add an edge. None: there is no shift for it."""
        self._edges[one].append((other, shift))
        self._edges[other].append((one, None if shift is None else -shift))

    def solve(self) -> list[_Shifts]:
        """The connected parts."""
        solved: list[_Shifts] = []
        seen: set[_Node] = set()
        for first in self._edges:
            if first in seen:
                continue
            of, agree, waiting = {first: 0}, True, [first]
            while waiting:
                node = waiting.pop()
                for other, shift in self._edges[node]:
                    expected = of[node] + (shift or 0)
                    if other not in of:
                        of[other] = expected
                        waiting.append(other)
                    agree = agree and shift is not None and of[other] == expected
            seen.update(of)  # `|=` with keys would copy it each time
            solved.append(_Shifts(of, agree))
        return solved


def _make_part(shifts: _Shifts, a: Sequence[Chunk], b: Sequence[Chunk], itemsize: int, *, blocks: bool) -> SharedPart:
    least = min(shifts.of.values())

    def parts(side: str, chunks: Sequence[Chunk]) -> Iterable[Part]:
        for (of, number, block), shift in sorted(shifts.of.items()):
            if of != side:
                continue
            nbytes = _nbytes(chunks[number], itemsize)
            size = (chunks[number].block if blocks else None) or nbytes
            yield Part(number, block * size, min((block + 1) * size, nbytes), shift - least)

    return SharedPart(tuple(parts("a", a)), tuple(parts("b", b)))
