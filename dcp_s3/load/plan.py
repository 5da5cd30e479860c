"""Which bytes a load needs, and in which requests they are fetched. Pure: no I/O, no tensors.

Items -> ranges of a chunk -> extents of an object -> requests. An extent is a run of bytes of one object that one item
needs; neighbouring extents share a request, long ones are split over several, those that overlap are fetched once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dcp_s3.format.blocks import Blocks, widen
from dcp_s3.load.boxes import Box, runs_of_box


class Extent(NamedTuple):
    """A run of bytes that one item needs.

    Attributes:
        item: number of the item.
        path: object, relative to the checkpoint.
        start: first byte in the object.
        length: bytes, at least 1.
        offset: what the item calls the first byte: it counts from wherever it likes.
    """

    item: int
    path: str
    start: int
    length: int
    offset: int = 0


class Segment(NamedTuple):
    """A part of a request that one item needs.

    Attributes:
        item: number of the item.
        start: first byte within the request.
        length: bytes.
        offset: what the item calls the first byte.
    """

    item: int
    start: int
    length: int
    offset: int


class ReadRequest(NamedTuple):
    """One ranged GET.

    Attributes:
        path: object, relative to the checkpoint.
        start: first byte.
        length: bytes fetched.
        segments: where they go, by their start. They overlap only if ``shared``; bytes in none are thrown away.
        shared: whether several items need the same bytes.
    """

    path: str
    start: int
    length: int
    segments: tuple[Segment, ...]
    shared: bool = False


class ChunkRange(NamedTuple):
    """A run of bytes of a chunk that is fetched for a box of it.

    Attributes:
        start: first byte.
        stop: byte behind the last.
        crc: CRC-64/NVME of them, None if it is not known.
    """

    start: int
    stop: int
    crc: int | None


def ranges_of_box(
    sizes: Sequence[int], box: Box, element_size: int, *, blocks: Blocks | None, max_gap: int
) -> list[ChunkRange]:
    """The runs of bytes of a chunk to fetch for a box of it.

    A box that is dense is one run. In others, what lies between two runs is fetched as well if it is at most
    ``max_gap``: asking around it would take longer. Runs are widened to what the recorded checksums can check.

    Args:
        sizes: shape of the chunk.
        box: in it.
        element_size: bytes.
        blocks: the chunk's checksums, None without.
        max_gap: bytes.

    Raises:
        ValueError: the box is not inside the chunk.
    """
    # Runs closer than a block are widened into each other anyway.
    gap = max_gap if blocks is None else max(max_gap, blocks.size)
    runs = [(start * element_size, stop * element_size) for start, stop in runs_of_box(sizes, box, gap // element_size)]
    if blocks is None:
        return [ChunkRange(start, stop, None) for start, stop in runs]
    nbytes = element_size
    for size in sizes:
        nbytes *= size
    merged: list[tuple[int, int]] = []
    for start, stop in runs:
        first = start // blocks.size * blocks.size
        if merged and first - merged[-1][1] <= max_gap:
            first = merged.pop()[0]
        merged.append((first, min(-(-stop // blocks.size) * blocks.size, nbytes)))
    return [ChunkRange(*widen(start, stop, nbytes, blocks)) for start, stop in merged]


# The framing between the raw bytes of two neighbours is less; it is never asked around.
_FRAMING = 4 * 2**10


def plan_requests(
    extents: Iterable[Extent],
    *,
    max_request: int,
    max_gap: int,
    max_waste: float = math.inf,
    max_shared: int | None = None,
) -> list[ReadRequest]:
    """Requests that fetch every byte of every extent, none of them twice.

    Extents of one object that lie close to each other share a request of at most ``max_request`` bytes; longer ones
    are cut into equal pieces.

    Args:
        extents: in any order.
        max_request: bytes of one request at most.
        max_gap: bytes between two extents that are rather fetched and thrown away than asked for around.
        max_waste: bytes thrown away in all, as a share of those needed; the shortest gaps come first. Those that a
            stored tensor has around it anyway (4 KiB) are neither counted nor ever asked around.
        max_shared: bytes of one request at most where extents overlap; None: as ``max_request``.

    Returns:
        Requests, the largest first, so that the tail of the load is short.
    """
    by_path: dict[str, list[Extent]] = {}
    for extent in extents:
        by_path.setdefault(extent.path, []).append(extent)
    groups = {path: list(_groups(sorted(wanted, key=_place))) for path, wanted in by_path.items()}
    longest_gap = min(max_gap, _affordable_gap(groups.values(), max_waste))

    requests: list[ReadRequest] = []
    for path, found in groups.items():
        together: list[Extent] = []
        start = end = 0
        shared = False
        for group, stop in found:
            first = group[0].start
            limit = max_request if len(group) == 1 else min(max_request, max_shared or max_request)
            if together and (first - end > longest_gap or stop - start > limit):
                requests.append(_request(path, start, end, together, shared))
                together, shared = [], False
            if stop - first > limit:
                requests += _split(path, group, stop, limit)
                continue
            if not together:
                start = first
            together += group
            end = stop
            shared = shared or len(group) > 1
        if together:
            requests.append(_request(path, start, end, together, shared))
    requests.sort(key=lambda request: -request.length)
    return requests


_Group = tuple[list[Extent], int]


def _affordable_gap(by_path: Iterable[list[_Group]], max_waste: float) -> float:
    """Gaps up to this many bytes are together at most ``max_waste`` of what is needed."""
    if max_waste == math.inf:
        return math.inf
    needed = 0
    gaps: list[int] = []
    for groups in by_path:
        before = None
        for group, stop in groups:
            first = group[0].start
            needed += stop - first
            if before is not None and first - before > _FRAMING:
                gaps.append(first - before)
            before = stop
    gaps.sort()
    left: float = max_waste * needed
    for index, gap in enumerate(gaps):
        left -= gap
        if left < 0:
            # Those of this length do not all fit: none of them.
            return next((shorter for shorter in reversed(gaps[:index]) if shorter < gap), _FRAMING)
    return math.inf


def _place(extent: Extent) -> tuple[int, int, int]:
    return extent.start, extent.length, extent.item


def _groups(extents: Sequence[Extent]) -> Iterable[_Group]:
    """Extents that overlap, directly or through others, and the byte behind them."""
    group: list[Extent] = []
    stop = 0
    for extent in extents:
        if group and extent.start >= stop:
            yield group, stop
            group = []
        stop = max(stop, extent.start + extent.length) if group else extent.start + extent.length
        group.append(extent)
    if group:
        yield group, stop


def _request(path: str, start: int, end: int, extents: Iterable[Extent], shared: bool) -> ReadRequest:
    segments = tuple([Segment(item, first - start, length, offset) for item, _, first, length, offset in extents])
    return ReadRequest(path, start, end - start, segments, shared)


# Cuts fall on multiples of this many bytes, so that no element of any dtype is divided between two requests.
_ALIGNMENT = 64


def _split(path: str, group: Sequence[Extent], stop: int, max_request: int) -> list[ReadRequest]:
    start = group[0].start
    count = -(-(stop - start) // max_request)
    size = -(-(stop - start) // count)
    size = min(max(1, max_request // _ALIGNMENT) * _ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT)
    requests = []
    for at in range(start, stop, size):
        end = min(at + size, stop)
        clipped = list(_clip(group, at, end))
        requests.append(_request(path, at, end, clipped, len(clipped) > 1))
    return requests


def _clip(group: Iterable[Extent], start: int, stop: int) -> Iterable[Extent]:
    for item, path, first, length, offset in group:
        low, high = max(first, start), min(first + length, stop)
        if low < high:
            yield Extent(item, path, low, high - low, offset + low - first)
