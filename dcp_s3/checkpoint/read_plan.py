"""Which bytes a load needs, and in which requests they are fetched. Pure: no I/O, no tensors.

Items -> ranges of a chunk -> extents of an object -> requests. An extent is a run of bytes of one object that one item
needs; neighbouring extents share a request, long ones are split over several, those that overlap are fetched once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dcp_s3.checkpoint.blocks import Blocks, widen
from dcp_s3.checkpoint.boxes import Box, runs_of_box


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
    runs = [
        (start * element_size, stop * element_size) for start, stop in runs_of_box(sizes, box, max_gap // element_size)
    ]
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


def plan_requests(extents: Iterable[Extent], *, max_request: int, max_gap: int) -> list[ReadRequest]:
    """Requests that fetch every byte of every extent, none of them twice.

    Extents of one object that lie at most ``max_gap`` bytes apart share a request of at most ``max_request`` bytes;
    longer ones are cut into equal pieces.

    Args:
        extents: in any order.
        max_request: bytes of one request at most.
        max_gap: bytes between two extents that are rather fetched and thrown away than asked for around.

    Returns:
        Requests, the largest first, so that the tail of the load is short.
    """
    by_path: dict[str, list[Extent]] = {}
    for extent in extents:
        by_path.setdefault(extent.path, []).append(extent)

    requests: list[ReadRequest] = []
    for path, wanted in by_path.items():
        wanted.sort(key=_place)
        together: list[Extent] = []
        start = end = 0
        shared = False
        for group, stop in _groups(wanted):
            first = group[0].start
            if together and (first - end > max_gap or stop - start > max_request):
                requests.append(_request(path, start, end, together, shared))
                together, shared = [], False
            if stop - first > max_request:
                requests += _split(path, group, stop, max_request)
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


def _place(extent: Extent) -> tuple[int, int, int]:
    return extent.start, extent.length, extent.item


def _groups(extents: Sequence[Extent]) -> Iterable[tuple[list[Extent], int]]:
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
    return [
        _request(path, at, min(at + size, stop), _clip(group, at, min(at + size, stop)), len(group) > 1)
        for at in range(start, stop, size)
    ]


def _clip(group: Iterable[Extent], start: int, stop: int) -> Iterable[Extent]:
    for item, path, first, length, offset in group:
        low, high = max(first, start), min(first + length, stop)
        if low < high:
            yield Extent(item, path, low, high - low, offset + low - first)
