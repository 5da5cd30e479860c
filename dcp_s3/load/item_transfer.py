"""One read item: which bytes it needs, and how they come to their place."""

from __future__ import annotations

import bisect
import io
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch.distributed.checkpoint.planner import ReadItem

from dcp_s3.checksum import combine_crc64nvme
from dcp_s3.format.archive import ArchiveHead
from dcp_s3.load.archive_heads import HeadProof
from dcp_s3.load.boxes import Box, boxes_of_run, covering_run, intersect
from dcp_s3.load.plan import ChunkRange, Extent, ranges_of_box
from dcp_s3.tensor_memory import is_direct, view_bytes
from dcp_s3.torch_private import StorageInfo, narrow_tensor_by_index


class ItemTransfer(ABC):
    """One read item: where its bytes lie, what is to be checked, and where they go.

    The bytes have an offset of the item's own: `TensorTransfer` counts from the beginning of the saved chunk,
    `StreamTransfer` from that of the stored item.

    Attributes:
        item: of the load plan.
        extents: what is to be fetched.
        ranges: the runs of bytes in them, with their checksums.
        target: the tensor to load into, None for an item that is not a tensor.
        loaded: what an item that is not a tensor came out as.
        checked: whether there is a checksum.
        owned: (start, stop) of the bytes that can be received in `memory`, where they belong; None if there are none.
    """

    __slots__ = ("_crcs", "_lock", "_missing", "checked", "extents", "item", "loaded", "owned", "ranges", "target")

    def __init__(
        self,
        item: ReadItem,
        extents: Sequence[Extent],
        ranges: Sequence[ChunkRange],
        target: torch.Tensor | None,
        owned: tuple[int, int] | None,
    ) -> None:
        self.item = item
        self.extents = extents
        self.ranges = ranges
        self.target = target
        self.loaded: io.BytesIO | None = None
        self.owned = owned
        self.checked = any(part.crc is not None for part in ranges)
        self._missing = sum([extent.length for extent in extents])
        self._crcs: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    @abstractmethod
    def memory(self, start: int, stop: int) -> memoryview:
        """The place of bytes within `owned`."""

    def take(self, offset: int, data: memoryview) -> bool:
        """Bring bytes to their place without torch, which costs more than the bytes of a small item; else False."""
        return False

    @abstractmethod
    def put(self, offset: int, data: torch.Tensor) -> None:
        """Bring bytes outside of `owned` (uint8, from ``offset`` on) to their place."""

    def arrived(self, offset: int, length: int, crc: int) -> bool:
        """Count bytes and remember their checksum; True when these were the last."""
        with self._lock:
            self._crcs.append((offset, crc, length))
            self._missing -= length
            return self._missing == 0

    def is_damaged(self, offset: int, length: int, crc: int) -> bool:
        """Whether these bytes are a range of this item with another checksum."""
        if not self.checked:
            return False
        place = bisect.bisect_left(self.ranges, (offset,))
        if place == len(self.ranges):
            return False
        start, stop, expected = self.ranges[place]
        return (start, stop) == (offset, offset + length) and expected is not None and expected != crc

    def mismatches(self) -> list[tuple[ChunkRange, int]]:
        """The ranges whose bytes are not what was saved, with the CRC-64/NVME that was found."""
        if not self.checked:
            return []
        wrong = []
        pieces = sorted(self._crcs)
        at = 0
        for part in self.ranges:
            first = at
            while at < len(pieces) and pieces[at][0] < part.stop:
                at += 1
            found = (
                pieces[first][1] if at - first == 1 else combine_crc64nvme((crc, n) for _, crc, n in pieces[first:at])
            )
            if part.crc is not None and found != part.crc:
                wrong.append((part, found))
        return wrong

    def forget(self, part: ChunkRange) -> Extent:
        """Make ready to receive a range again; where it lies."""
        with self._lock:
            self._crcs = [piece for piece in self._crcs if not part.start <= piece[0] < part.stop]
            self._missing += part.stop - part.start
        return self.extent_of(part)

    def extent_of(self, part: ChunkRange) -> Extent:
        """Where a range lies in its object."""
        found = next(extent for extent in self.extents if extent.offset <= part.start < extent.offset + extent.length)
        skipped = part.start - found.offset
        return found._replace(start=found.start + skipped, length=part.stop - part.start, offset=part.start)

    def finish(self) -> ItemTransfer | None:
        """All bytes are at their place, and right.

        Returns:
            What is to be fetched instead, if they are not where they were expected.
        """
        return None


def is_whole(item: ReadItem, sizes: torch.Size) -> bool:
    """Whether an item needs all of a saved chunk of ``sizes``."""
    return item.lengths == sizes and not any(item.storage_offsets)


class TensorTransfer(ItemTransfer):
    """A box of a saved chunk, whose raw bytes' place is known, into a tensor.

    Args:
        number: of the item.
        item: of the load plan.
        path: object, relative to the checkpoint.
        raw_start: first byte of the chunk in the object.
        ranges: bytes of the chunk to fetch.
        target: the tensor to load into, of the shape of the box.
        sizes: shape of the chunk.
        dtype: of the chunk.
    """

    __slots__ = ("_dtype", "_sizes")

    def __init__(
        self,
        number: int,
        item: ReadItem,
        path: str,
        raw_start: int,
        ranges: Sequence[ChunkRange],
        target: torch.Tensor,
        sizes: torch.Size,
        dtype: torch.dtype,
    ) -> None:
        self._sizes = sizes
        self._dtype = dtype
        owned = None
        if dtype == target.dtype and ranges and is_direct(target):
            nbytes = target.nbytes
            if is_whole(item, sizes):
                owned = 0, nbytes
            else:
                start, stop = covering_run(sizes, Box(item.storage_offsets, item.lengths))
                start, stop = start * dtype.itemsize, stop * dtype.itemsize
                owned = (start, stop) if stop - start == nbytes else None
        extents = [Extent(number, path, raw_start + start, stop - start, start) for start, stop, _ in ranges]
        super().__init__(item, extents, ranges, target, owned)

    def memory(self, start: int, stop: int) -> memoryview:
        """See `ItemTransfer`."""
        first = self.owned[0] if self.owned else 0
        return view_bytes(cast(torch.Tensor, self.target))[start - first : stop - first]

    def put(self, offset: int, data: torch.Tensor) -> None:
        """See `ItemTransfer`. The bytes are whole elements."""
        if self.owned is not None or self.target is None:
            return  # what is needed is received in place; this is there for a checksum
        if data.storage_offset() % self._dtype.itemsize:
            data = data.clone()
        elements = data.view(self._dtype)
        first = offset // self._dtype.itemsize
        box = Box(self.item.storage_offsets, self.item.lengths)
        for run in boxes_of_run(self._sizes, first, first + elements.numel()):
            source, elements = elements[: run.numel], elements[run.numel :]
            wanted = intersect(run, box)
            if wanted is not None:
                place = [start - own for start, own in zip(wanted.offsets, box.offsets, strict=True)]
                within = [start - own for start, own in zip(wanted.offsets, run.offsets, strict=True)]
                narrow_tensor_by_index(self.target, place, wanted.lengths).copy_(
                    narrow_tensor_by_index(source.view(run.lengths), within, wanted.lengths)
                )


class ArchivedTransfer(ItemTransfer):
    """A box of a chunk that another writer stored, whose place is expected.

    The head of the item comes along, before byte 0 of the chunk, and must prove it.

    Args:
        number: of the item.
        item: of the load plan.
        info: where it is stored.
        target: the tensor to load into, of the shape of the box.
        proof: of the place.
        max_gap: bytes between two ranges of the chunk that are rather fetched than asked around.
        instead: makes the transfer to be tried if the proof fails, from the head that was found, if any.
    """

    __slots__ = ("_inner", "_instead", "_proof")

    def __init__(
        self,
        number: int,
        item: ReadItem,
        info: StorageInfo,
        target: torch.Tensor,
        proof: HeadProof,
        *,
        max_gap: int,
        instead: Callable[[ArchiveHead | None], ItemTransfer],
    ) -> None:
        head, inner_item, into = proof.expected, item, target
        sizes = torch.Size(head.shape)
        if not head.is_row_major:
            # Row-major, as everything else is, with the dimensions in the order in which they are stored.
            offsets, lengths, sizes = (
                torch.Size(values[dim] for dim in head.order) for values in (item.storage_offsets, item.lengths, sizes)
            )
            inner_item = replace(item, storage_offsets=offsets, lengths=lengths)
            into = target.permute(head.order)
        box = Box(inner_item.storage_offsets, inner_item.lengths)
        ranges = ranges_of_box(sizes, box, head.dtype.itemsize, blocks=None, max_gap=max_gap)
        raw_start = info.offset + head.raw_offset
        self._inner = TensorTransfer(number, inner_item, info.relative_path, raw_start, ranges, into, sizes, head.dtype)
        self._proof = proof
        self._instead = instead
        extents = _with_head(self._inner.extents, number, info, head)
        super().__init__(item, extents, ranges, target, self._inner.owned)

    def memory(self, start: int, stop: int) -> memoryview:
        """See `ItemTransfer`."""
        return self._inner.memory(start, stop)

    def put(self, offset: int, data: torch.Tensor) -> None:
        """See `ItemTransfer`."""
        if offset < 0:
            self._proof.put(offset, view_bytes(data))
            data = data[-offset:]
            offset = 0
        if data.numel():
            self._inner.put(offset, data)

    def finish(self) -> ItemTransfer | None:
        """See `ItemTransfer`."""
        return None if self._proof.holds() else self._instead(self._proof.found())


def _with_head(extents: Sequence[Extent], number: int, info: StorageInfo, head: ArchiveHead) -> list[Extent]:
    """The head of an item comes along: in one run with the beginning of the chunk, if that is needed."""
    first = Extent(number, info.relative_path, info.offset, head.length, -head.raw_offset)
    # Cuts fall on multiples of 64 bytes from where an extent begins, and must not divide elements.
    if extents and extents[0].start == info.offset + head.length and head.length % 64 == 0:
        return [first._replace(length=head.length + extents[0].length), *extents[1:]]
    return [first, *extents]


class StreamTransfer(ItemTransfer):
    """A whole stored item, decoded when it is there.

    Args:
        number: of the item.
        item: of the load plan.
        info: where it is stored.
        crc: CRC-64/NVME of the item, None if it is not known.
        target: the tensor to load into, None for an item that is not a tensor.
        decode: called with the item's bytes (uint8).
        unpack: as ``decode``, of a small item without checksum: called when it has come in one piece, with its bytes
            in somebody else's memory. Returns whether it could.
    """

    __slots__ = ("_buffer", "_decode", "_size", "_unpack", "_unpacked")

    def __init__(
        self,
        number: int,
        item: ReadItem,
        info: StorageInfo,
        crc: int | None,
        target: torch.Tensor | None,
        decode: Callable[[StreamTransfer, torch.Tensor], None],
        unpack: Callable[[memoryview], bool] | None = None,
    ) -> None:
        size = info.length
        extents = [Extent(number, info.relative_path, info.offset, size)] if size else []
        owned = (0, size) if unpack is None else None
        super().__init__(item, extents, [ChunkRange(0, size, crc)] if size else [], target, owned)
        self._size = size
        self._decode = decode
        self._unpack = unpack
        self._unpacked = False
        self._buffer: torch.Tensor | None = None

    def memory(self, start: int, stop: int) -> memoryview:
        """See `ItemTransfer`."""
        with self._lock:
            if self._buffer is None:
                self._buffer = torch.empty(self._size, dtype=torch.uint8)
            return view_bytes(self._buffer)[start:stop]

    def take(self, offset: int, data: memoryview) -> bool:
        """See `ItemTransfer`."""
        if self._unpack is not None and data.nbytes == self._size:
            self._unpacked = self._unpack(data)
        if not self._unpacked:
            self.memory(offset, offset + data.nbytes)[:] = data
        return True

    def put(self, offset: int, data: torch.Tensor) -> None:
        """See `ItemTransfer`."""
        self.take(offset, view_bytes(data))

    def finish(self) -> ItemTransfer | None:
        """Decode the item."""
        if not self._unpacked:
            self._decode(self, torch.empty(0, dtype=torch.uint8) if self._buffer is None else self._buffer)
        self._buffer = None
        return None
