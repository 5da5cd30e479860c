"""The items of a load plan on their way: which bytes each needs, and how they come to their place.

They come as ranges of the object (from S3), or as runs of the item's box (from another rank, `load/peers`).
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed.checkpoint.planner import ReadItem

from dcp_s3 import errors
from dcp_s3.format.archive import ArchiveHead
from dcp_s3.format.blocks import Range
from dcp_s3.load.boxes import Box, Section, boxes_of_section, covering_run, find_section, row_major_strides
from dcp_s3.load.plan import StoredChunk
from dcp_s3.load.transfer import Transfer
from dcp_s3.tensor_memory import is_direct, view_bytes
from dcp_s3.torch_private import narrow_tensor_by_index


class ItemTransfer(Transfer):
    """One read item.

    Attributes:
        item: item of the load plan.
        stored: how it is stored.
        target: the tensor to load into, None for an item that is not a tensor.
        loaded: the decoded value of an item that is not a tensor.
    """

    __slots__ = ("item", "loaded", "stored", "target")

    def __init__(
        self,
        item: ReadItem,
        stored: StoredChunk,
        base: int,
        ranges: Sequence[Range],
        target: torch.Tensor | None,
        owned: tuple[int, int] | None,
    ) -> None:
        super().__init__(stored.info.relative_path, base, ranges, owned)
        self.item, self.stored, self.target = item, stored, target
        self.loaded: io.BytesIO | None = None

    def name_of(self, part: Range) -> str:
        return self.item.storage_index.fqn


class TensorTransfer(ItemTransfer):
    """Loads a box of an array of raw bytes, whose place is known, into a tensor.

    The array is the saved chunk; or the item's box of it, packed, as it comes from another rank.

    Args:
        base: position in the object of the array's first byte.
        ranges: ranges of the array to fetch.
        sizes, dtype: shape and dtype of the array.
        box: the box of the array.
        into: ``target`` with its dimensions in the order of the array's; None: they are.
    """

    __slots__ = ("_box", "_dtype", "_into", "_sizes")

    def __init__(
        self,
        item: ReadItem,
        stored: StoredChunk,
        base: int,
        ranges: Sequence[Range],
        target: torch.Tensor,
        sizes: Sequence[int],
        dtype: torch.dtype,
        box: Box,
        into: torch.Tensor | None = None,
    ) -> None:
        self._into = into = target if into is None else into
        self._sizes, self._dtype, self._box = sizes, dtype, box
        owned = None
        if dtype == into.dtype and ranges and is_direct(into):
            if is_whole(box, sizes):
                owned = 0, into.nbytes
            else:
                start, stop = covering_run(sizes, box)
                start, stop = start * dtype.itemsize, stop * dtype.itemsize
                owned = (start, stop) if stop - start == into.nbytes else None
        super().__init__(item, stored, base, ranges, target, owned)

    def memory(self, start: int, stop: int) -> memoryview:
        first = self.owned[0] if self.owned else 0
        return view_bytes(self._into)[start - first : stop - first]

    def place(self, offset: int, data: memoryview) -> None:
        if self.owned is not None or not data.nbytes:
            super().place(offset, data)  # the other bytes are only for a checksum
            return
        elements, first = elements_of(data, self._dtype), offset // self._dtype.itemsize
        section = find_section(self._sizes, self._box, first, first + elements.numel())
        for part, source in cut_out(elements, first, self._sizes, self._box, section):
            narrow_tensor_by_index(self._into, part.offsets, part.lengths).copy_(source)


class HeadedTransfer(TensorTransfer):
    """Loads a box of a chunk from the place where its bytes are expected; the head of its item must prove the place.

    The head is fetched, too. It lies before byte 0 of the chunk, from ``-raw_offset`` on.

    Args:
        head: bytes of the head.
        raw_offset: bytes from the beginning of the head to the chunk.
        ranges: ranges of the chunk.
        check: called with the head when all has arrived; returns the transfer to fetch instead, or raises.
    """

    __slots__ = ("_check", "_head", "_raw_offset")

    def __init__(
        self,
        item: ReadItem,
        stored: StoredChunk,
        base: int,
        ranges: Sequence[Range],
        target: torch.Tensor,
        sizes: Sequence[int],
        dtype: torch.dtype,
        box: Box,
        into: torch.Tensor | None = None,
        *,
        head: int,
        raw_offset: int,
        check: Callable[[bytes], Transfer | None],
    ) -> None:
        start, stop = -raw_offset, head - raw_offset
        # Cuts fall on multiples of 64 bytes from where a range begins, and must not divide elements.
        if ranges and ranges[0].start == stop and ranges[0].crc is None and head % 64 == 0:
            ranges = [Range(start, ranges[0].stop, None), *ranges[1:]]
        else:
            ranges = [Range(start, stop, None), *ranges]
        super().__init__(item, stored, base, ranges, target, sizes, dtype, box, into)
        self._head, self._raw_offset, self._check = bytearray(head), raw_offset, check

    def place(self, offset: int, data: memoryview) -> None:
        if offset < 0:
            start = offset + self._raw_offset
            end = min(start + data.nbytes, len(self._head))
            self._head[start:end] = data[: end - start]
            offset, data = 0, data[-offset:]
        super().place(offset, data)

    def finish(self) -> Transfer | None:
        return self._check(bytes(self._head))


class StreamTransfer(ItemTransfer):
    """A whole stored item, decoded when all of it has arrived: ``decode`` is called with its bytes (uint8).

    What it returns, if anything, is ``loaded``.
    """

    __slots__ = ("_buffer", "_decode")

    def __init__(
        self,
        item: ReadItem,
        stored: StoredChunk,
        target: torch.Tensor | None,
        decode: Callable[[torch.Tensor], io.BytesIO | None],
    ) -> None:
        size = stored.nbytes
        super().__init__(item, stored, stored.base, [Range(0, size, stored.crc)] if size else [], target, (0, size))
        self._decode: Callable[[torch.Tensor], io.BytesIO | None] | None = decode
        self._buffer: torch.Tensor | None = None

    def memory(self, start: int, stop: int) -> memoryview:
        with self._lock:
            if self._buffer is None:
                self._buffer = allocate((self.length,), torch.uint8, self.item.storage_index.fqn, self.path)
            return view_bytes(self._buffer)[start:stop]

    def place(self, offset: int, data: memoryview) -> None:
        if data.nbytes == self.length and self._decode is not None:  # in one piece, with the right checksum
            decode, self._decode = self._decode, None
            self.loaded = decode(torch.frombuffer(data, dtype=torch.uint8))
        else:
            super().place(offset, data)

    def finish(self) -> None:
        """Decode the item, unless it came in one piece."""
        buffer, self._buffer = self._buffer, None
        if self._decode is not None:
            self.loaded = self._decode(torch.empty(0, dtype=torch.uint8) if buffer is None else buffer)


# --- elements of boxes ------------------------------------------------------------------------------


def is_whole(box: Box, sizes: Sequence[int]) -> bool:
    """Whether a box is all of a saved chunk of ``sizes``."""
    return tuple(box.lengths) == tuple(sizes) and not any(box.offsets)


def elements_of(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as elements; copies them only if they are not aligned."""
    found = torch.frombuffer(data, dtype=torch.uint8)
    return (found.clone() if found.data_ptr() % dtype.itemsize else found).view(dtype)


def cut_out(
    elements: torch.Tensor, first: int, sizes: Sequence[int], box: Box, section: Section
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Cut a section of an array's box out of a run of that array, from element ``first`` on.

    Yields:
        The boxes, within ``box``, that the section consists of, in order, each with its elements.
    """
    strides = row_major_strides(sizes)
    begin = elements.storage_offset() - first
    for part, position in boxes_of_section(sizes, box, section):
        yield part, elements.as_strided(part.lengths, strides, begin + position)


def tensor_in(head: ArchiveHead, item: torch.Tensor) -> torch.Tensor:
    """The tensor in a stored item (uint8) that has ``head``; mostly without a copy."""
    raw = item[head.raw_offset : head.raw_offset + head.nbytes]
    is_aligned = not (raw.storage_offset() % head.dtype.itemsize or raw.data_ptr() % head.dtype.itemsize)
    elements = (raw if is_aligned else raw.clone()).view(head.dtype)
    if head.is_row_major:
        return elements.view(head.shape)
    places = [head.order.index(dim) for dim in range(len(head.shape))]
    return elements.view([head.shape[dim] for dim in head.order]).permute(places)


def allocate(sizes: Sequence[int], dtype: torch.dtype, fqn: str, where: str) -> torch.Tensor:
    """Memory for what metadata says that an item has.

    Raises:
        CorruptCheckpointError: there is not so much.
    """
    try:
        return torch.empty(tuple(sizes), dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        raise errors.CorruptCheckpointError(
            f"{fqn!r} in {where} should have {math.prod(sizes) * dtype.itemsize} bytes according to the metadata: "
            f"memory for that cannot be had ({str(error).partition('. ')[0][:200]}). If it cannot be that large, the "
            "metadata is damaged: load an earlier checkpoint; else load it where there is more memory",
            url=where,
        ) from None
