"""Which bytes a load needs, and in which requests they are fetched. Pure: no I/O, no tensors.

Items -> stored chunks -> ranges of a chunk -> segments of an object -> requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_s3 import errors
from dcp_s3.format.blocks import Blocks, Range, get_blocks, get_facts, widen
from dcp_s3.format.saved_entries import find_chunk
from dcp_s3.torch_private import StorageInfo

READ_GAP = 256 * 2**10
"""Largest gap in bytes between two ranges of a chunk that a load fetches and throws away, rather than send two
requests: what S3 sends on one connection (90 MB/s) in a tenth of a request's latency (about 30 ms)."""

ITEM_GAP = 64 * 2**10
"""The same between two items: more than lies between the raw bytes of neighbours, and 0.7 ms on a connection."""


# --- boxes of row-major arrays ---------------------------------------------------------------------------


class Box(NamedTuple):
    """A rectangular part of an array."""

    offsets: tuple[int, ...]  # index of the first element in each dimension
    lengths: tuple[int, ...]  # number of elements in each dimension

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous array of ``sizes``."""
    strides = [1] * len(sizes)
    for dim in range(len(sizes) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * max(1, sizes[dim + 1])
    return tuple(strides)


def boxes_of_run(sizes: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Elements ``start`` to ``stop`` (after it) of an array in row-major order, as boxes in that order."""
    if not sizes:
        return [Box((), ())]
    inner = sizes[1:]
    row = math.prod(inner)
    first, skipped = divmod(start, row)
    last, left = divmod(stop, row)

    def in_row(index: int, begin: int, end: int) -> list[Box]:
        return [Box((index, *offsets), (1, *lengths)) for offsets, lengths in boxes_of_run(inner, begin, end)]

    if first == last:
        return in_row(first, skipped, left)
    found = in_row(first, skipped, row) if skipped else []
    first += bool(skipped)
    if first < last:
        found.append(Box((first, *([0] * len(inner))), (last - first, *inner)))
    return found + (in_row(last, 0, left) if left else [])


def covering_run(sizes: Sequence[int], box: Box) -> tuple[int, int]:
    """The first element of a box in the row-major order of its array, and the one after its last; ValueError if the box
    is not inside the array."""
    offsets, lengths = box
    if not len(sizes) == len(offsets) == len(lengths) or any(
        offset < 0 or length < 0 or offset + length > size
        for size, offset, length in zip(sizes, offsets, lengths, strict=True)
    ):
        raise ValueError(f"box at {tuple(offsets)} of {tuple(lengths)} is not inside a chunk of {tuple(sizes)}")
    if 0 in lengths:
        return 0, 0
    strides = row_major_strides(sizes)
    first = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    return first, first + 1 + sum((n - 1) * stride for n, stride in zip(lengths, strides, strict=True))


def find_section(sizes: Sequence[int], box: Box, start: int, stop: int) -> tuple[int, int]:
    """The elements of ``box`` among elements ``start`` to ``stop`` of its array: the first, and the one after the last,
    in the row-major order of the box."""

    def before(position: int) -> int:
        count, left, rest = 0, position, box.numel
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

    return before(start), before(stop)


# --- stored chunks ---------------------------------------------------------------------------------------


class StoredChunk(NamedTuple):
    """A stored item as bytes to be read: the raw bytes of a chunk, or the whole item if it has to be decoded."""

    info: StorageInfo  # where the item is stored
    base: int  # first byte in the object
    nbytes: int  # length in bytes
    sizes: torch.Size  # shape in elements of ``dtype``; of a whole item, the number of bytes
    dtype: torch.dtype
    whole: bool  # whether it is decoded once all of it has arrived; else it is the raw bytes of a tensor
    crc: int | None = None
    """Recorded CRC-64/NVME of all its bytes; None without. That of raw bytes does not cover a whole item."""
    tensor: tuple[torch.dtype, torch.Size] | None = None
    """Dtype and shape of the tensor in a whole item; None for an object, or if its shape is not known."""

    @property
    def blocks(self) -> Blocks | None:
        """Recorded checksums; None without, or without bytes."""
        if self.whole:
            return None if self.crc is None else Blocks(self.nbytes, b"", self.crc)
        return get_blocks(self.info, self.nbytes) if self.nbytes else None


def find_stored(metadata: Metadata, index: MetadataIndex, kind: LoadItemType, url: str) -> StoredChunk:
    """The stored item at ``index`` of the checkpoint at ``url``, to be loaded as ``kind``.

    Raises:
        CorruptCheckpointError: the metadata lacks it, or contradicts itself.
    """

    def damaged(what: str) -> errors.CorruptCheckpointError:
        return errors.CorruptCheckpointError(
            f"the metadata of {url} is damaged, or was merged wrongly: {index.fqn!r} at {index.offset} {what}. Remedy: "
            "load an earlier checkpoint",
            url=url,
        )

    info = metadata.storage_data.get(index)
    if info is None:
        raise damaged("lies nowhere")
    (raw_offset, crc), whole = get_facts(info), torch.Size((info.length,))
    whole_crc = crc if raw_offset is None else None
    if kind == LoadItemType.BYTE_IO:
        if info.length == 0:
            raise damaged("has no bytes")
        return StoredChunk(info, info.offset, info.length, whole, torch.uint8, True, whole_crc)
    saved = metadata.state_dict_metadata.get(index.fqn)
    if not isinstance(saved, TensorStorageMetadata):
        raise damaged("is no tensor, but is to be loaded into one")
    dtype, chunk = saved.properties.dtype, find_chunk(saved, index)
    if raw_offset is None or info.transform_descriptors:
        tensor = None if chunk is None else (dtype, chunk.sizes)
        return StoredChunk(info, info.offset, info.length, whole, torch.uint8, True, whole_crc, tensor)
    if chunk is None:
        raise damaged("is none of its chunks")
    nbytes = chunk.sizes.numel() * dtype.itemsize
    if raw_offset + nbytes > info.length:
        raise damaged(f"has {nbytes} bytes at {raw_offset} of an item of {info.length}")
    return StoredChunk(info, info.offset + raw_offset, nbytes, chunk.sizes, dtype, False, crc)


def box_of(item: ReadItem, stored: StoredChunk) -> Box:
    """The box of its stored chunk that ``item`` needs."""
    return Box((0,), (stored.nbytes,)) if stored.whole else Box(item.storage_offsets, item.lengths)


class Segment(NamedTuple):
    """A run of bytes of an object that one item needs."""

    start: int  # first byte in the object
    stop: int  # the byte after the last; a segment is never empty
    item: Any  # item that needs it; ``item.path`` is the object, relative to the checkpoint


class ReadRequest(NamedTuple):
    """One ranged GET."""

    path: str  # path of the object, relative to the checkpoint
    start: int  # first byte in the object
    length: int  # number of bytes fetched
    segments: tuple[Segment, ...]
    """Segments that the bytes go to, in order. They overlap only if ``shared``; bytes in none are dropped."""
    shared: bool = False  # whether several items need the same bytes


def ranges_of_box(
    sizes: Sequence[int], box: Box, element_size: int, *, blocks: Blocks | None, max_gap: int
) -> list[Range]:
    """The runs of bytes of a chunk to fetch for a box of it, widened to what the recorded checksums can check. A gap of
    at most ``max_gap`` bytes between two runs is fetched as well: skipping it would take longer. Raises ValueError if
    the box is not inside the chunk."""
    runs = block_runs(sizes, box, element_size, element_size if blocks is None else blocks.size, max_gap)
    if blocks is None:
        return [Range(start, stop, None) for start, stop in runs]
    nbytes = math.prod(sizes) * element_size
    return [widen(start, stop, nbytes, blocks) for start, stop in runs]


def block_runs(sizes: Sequence[int], box: Box, element_size: int, block: int, max_gap: int) -> list[tuple[int, int]]:
    """The runs of bytes of a chunk, in whole blocks, that have a box of it, more than ``max_gap`` apart; ValueError if
    the box is not inside the chunk."""
    start, stop = covering_run(sizes, box)
    if start == stop:
        return []
    strides, nbytes = row_major_strides(sizes), math.prod(sizes) * element_size
    gap = max(max_gap, block - 1) // element_size  # runs closer than a block are merged anyway
    # From the innermost dimension outwards: a run spans the box in all dimensions from ``dim`` on.
    dim, span = len(sizes), 1
    while dim > 0 and (box.lengths[dim - 1] == 1 or strides[dim - 1] - span <= gap):
        dim -= 1
        span += (box.lengths[dim] - 1) * strides[dim]
    starts = [start]
    for outer in range(dim):
        starts = [at + index * strides[outer] for at in starts for index in range(box.lengths[outer])]
    merged: list[tuple[int, int]] = []
    for at in starts:
        first = at * element_size // block * block
        if merged and first - merged[-1][1] <= max_gap:
            first = merged.pop()[0]
        merged.append((first, min(-(-(at + span) * element_size // block) * block, nbytes)))
    return merged


def plan_requests(
    segments: Iterable[Segment], *, max_request: int, max_gap: int = ITEM_GAP, max_shared: int | None = None
) -> list[ReadRequest]:
    """Plan requests that fetch every byte of every segment exactly once, the largest first.

    Segments of one object that lie close to each other share a request of at most ``max_request`` bytes; longer ones
    are cut into equal pieces.

    Args:
        max_gap: longest gap (bytes) between two segments that is fetched and dropped rather than skipped.
        max_shared: maximum bytes of one request where segments overlap; None: ``max_request``.
    """
    by_path: dict[str, list[Segment]] = {}
    for segment in segments:
        by_path.setdefault(segment[2].path, []).append(segment)
    requests: list[ReadRequest] = []
    for path, wanted in by_path.items():
        together: list[Segment] = []
        start = end = 0
        shared = False
        groups: list[tuple[list[Segment], int]] = []  # that overlap, directly or through others; the byte after them
        for segment in sorted(wanted, key=itemgetter(0, 1)):
            if groups and segment[0] < groups[-1][1]:
                overlapping, last = groups.pop()
                overlapping.append(segment)
                groups.append((overlapping, max(last, segment[1])))
            else:
                groups.append(([segment], segment[1]))
        for group, stop in groups:
            first = group[0][0]
            limit = max_request if len(group) == 1 else min(max_request, max_shared or max_request)
            if together and (first - end > max_gap or stop - start > limit):
                requests.append(ReadRequest(path, start, end - start, tuple(together), shared))
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
            requests.append(ReadRequest(path, start, end - start, tuple(together), shared))
    requests.sort(key=lambda request: -request.length)
    return requests


ALIGNMENT = 64
"""Requests are cut at multiples of this many bytes, so that no element of any dtype is split."""


def _split(path: str, group: Sequence[Segment], stop: int, max_request: int) -> list[ReadRequest]:
    start = group[0].start
    count = -(-(stop - start) // max_request)
    size = -(-(stop - start) // count)
    size = min(max(1, max_request // ALIGNMENT) * ALIGNMENT, -(-size // ALIGNMENT) * ALIGNMENT)
    requests = []
    for at in range(start, stop, size):
        end = min(at + size, stop)
        clipped = tuple(_clip(group, at, end))
        requests.append(ReadRequest(path, at, end - at, clipped, len(clipped) > 1))
    return requests


SMALL_HALF = 8 * 2**20
"""Bytes below which a request is not worth halving."""


def halve(request: ReadRequest) -> tuple[ReadRequest, ReadRequest] | None:
    """Two requests for the bytes of one, about equal; None if it is small, or several items need the same bytes."""
    middle = request.start + request.length // 2
    if request.shared or request.length < 2 * SMALL_HALF:
        return None
    start = next(segment.start for segment in request.segments if segment.stop > middle)
    # Inside a segment: after a whole number of elements. Otherwise in the gap before it, which is not fetched then.
    cut = start + max(0, middle - start) // ALIGNMENT * ALIGNMENT
    end = request.start + request.length
    before, after = tuple(_clip(request.segments, request.start, cut)), tuple(_clip(request.segments, cut, end))
    if not before or not after:
        return None
    return (
        ReadRequest(request.path, request.start, before[-1].stop - request.start, before),
        ReadRequest(request.path, cut, end - cut, after),
    )


def _clip(group: Iterable[Segment], start: int, stop: int) -> Iterable[Segment]:
    for first, last, item in group:
        low, high = max(first, start), min(last, stop)
        if low < high:
            yield Segment(low, high, item)
