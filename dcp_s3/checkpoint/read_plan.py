"""Which bytes a load needs, and in which requests they are fetched. Pure: no I/O, no tensors.

Items -> byte extents -> requests. An extent is a run of bytes of one object that one item needs; neighbouring
extents share a request, and long ones are split over several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BoxRange:
    """The bytes of a box inside a row-major chunk.

    Attributes:
        start: bytes from the start of the chunk to the first element of the box.
        length: bytes from there to behind its last element.
        dense: whether these bytes are the box and nothing else.
    """

    start: int
    length: int
    dense: bool


def covering_range(
    chunk_sizes: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], element_size: int
) -> BoxRange:
    """The smallest byte range that covers a box of a chunk.

    Args:
        chunk_sizes: shape of the saved chunk, elements.
        offsets: first element of the box in each dimension.
        lengths: elements of the box in each dimension.
        element_size: bytes.

    Raises:
        ValueError: the box is not inside the chunk.
    """
    if not len(chunk_sizes) == len(offsets) == len(lengths) or any(
        offset < 0 or length < 0 or offset + length > size
        for size, offset, length in zip(chunk_sizes, offsets, lengths, strict=False)
    ):
        raise ValueError(f"box at {tuple(offsets)} of {tuple(lengths)} is not inside a chunk of {tuple(chunk_sizes)}")
    if math.prod(lengths) == 0:
        return BoxRange(0, 0, True)
    strides = row_major_strides(chunk_sizes)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    last = first + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))
    count = last - first + 1
    return BoxRange(first * element_size, count * element_size, count == math.prod(lengths))


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of ``sizes``."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, sizes[dim + 1])
    return tuple(strides)


@dataclass(frozen=True)
class Extent:
    """A run of bytes that one item needs.

    Attributes:
        item: number of the item.
        path: object, relative to the checkpoint.
        start: first byte in the object.
        length: bytes, at least 1.
    """

    item: int
    path: str
    start: int
    length: int


@dataclass(frozen=True)
class Segment:
    """A part of a request: where its bytes go.

    Attributes:
        item: number of the item, None for bytes between items that are thrown away.
        item_offset: first byte within the item's extent.
        length: bytes.
    """

    item: int | None
    item_offset: int
    length: int


@dataclass(frozen=True)
class ReadRequest:
    """One ranged GET.

    Attributes:
        path: object, relative to the checkpoint.
        start: first byte.
        segments: where the bytes go, in order, without holes.
    """

    path: str
    start: int
    segments: tuple[Segment, ...]

    @property
    def length(self) -> int:
        """Bytes fetched."""
        return sum(segment.length for segment in self.segments)


def plan_requests(extents: Iterable[Extent], *, max_request: int, max_gap: int) -> list[ReadRequest]:
    """Requests that fetch every extent.

    Extents of one object that lie less than ``max_gap`` bytes apart share a request of at most ``max_request``
    bytes; longer extents are cut into equal pieces. Extents may overlap (two items of the same bytes): each is
    then fetched for itself.

    Args:
        extents: in any order, at most one per item.
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
        start = end = 0
        segments: list[Segment] = []
        for extent in sorted(wanted, key=lambda e: (e.start, e.length, e.item)):
            gap = extent.start - end
            fits = extent.start + extent.length - start <= max_request
            if segments and (gap < 0 or gap > max_gap or not fits):
                requests.append(ReadRequest(path, start, tuple(segments)))
                segments = []
            if extent.length > max_request:
                requests.extend(_split(extent, max_request))
                continue
            if segments and gap:
                segments.append(Segment(None, 0, gap))
            if not segments:
                start = extent.start
            segments.append(Segment(extent.item, 0, extent.length))
            end = extent.start + extent.length
        if segments:
            requests.append(ReadRequest(path, start, tuple(segments)))
    return sorted(requests, key=lambda request: -request.length)


# Cuts fall on multiples of this many bytes, so that no element of any dtype is divided between two requests.
_ALIGNMENT = 64


def _split(extent: Extent, max_request: int) -> list[ReadRequest]:
    count = -(-extent.length // max_request)
    size = -(-extent.length // count)
    size = min(max(1, max_request // _ALIGNMENT) * _ALIGNMENT, -(-size // _ALIGNMENT) * _ALIGNMENT)
    return [
        ReadRequest(
            extent.path,
            extent.start + offset,
            (Segment(extent.item, offset, min(size, extent.length - offset)),),
        )
        for offset in range(0, extent.length, size)
    ]
