"""One read item on its way: which bytes it needs, and how they come to their place.

They come as ranges of the object (from S3), or as sections of the item's box (from another rank, `load/peers`).
"""

from __future__ import annotations

import io
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.distributed.checkpoint.planner import ReadItem

from dcp_s3 import errors
from dcp_s3.format.archive import ArchiveHead
from dcp_s3.format.blocks import Range
from dcp_s3.load.archive_heads import HeadProof
from dcp_s3.load.boxes import Box, Section, boxes_of_section, covering_run, find_section, row_major_strides
from dcp_s3.load.plan import ranges_of_box
from dcp_s3.load.transfer import Transfer
from dcp_s3.tensor_memory import is_direct, view_bytes
from dcp_s3.torch_private import StorageInfo, narrow_tensor_by_index


class ItemTransfer(Transfer):
    """One read item.

    Offsets of a `TensorTransfer` count from the beginning of the saved chunk; those of a `StreamTransfer`
    count from the beginning of the stored item.

    Attributes:
        item: item of the load plan.
        target: the tensor to load into, None for an item that is not a tensor.
        loaded: the decoded value of an item that is not a tensor.
        sizes: shape of the stored data that is read: of the chunk, or (bytes,) for a whole item.
        dtype: dtype of the stored data; uint8 for a whole item.
    """

    __slots__ = ("dtype", "item", "loaded", "sizes", "target")

    def __init__(
        self,
        item: ReadItem,
        path: str,
        base: int,
        ranges: Sequence[Range],
        target: torch.Tensor | None,
        owned: tuple[int, int] | None,
        sizes: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(path, base, ranges, owned)
        self.item = item
        self.target = target
        self.loaded: io.BytesIO | None = None
        self.sizes = sizes
        self.dtype = dtype

    @property
    def box(self) -> Box:
        """The box of the stored data that the item needs."""
        return Box((0,) * len(self.sizes), tuple(self.sizes))

    def name_of(self, part: Range) -> str:
        return self.item.storage_index.fqn

    # --- by sections ----------------------------------------------------------------------------------

    def expect_sections(self, expected: bool) -> None:
        """Set whether all of its box comes by sections, not by ranges. Call it before anything arrives."""
        self.missing = self.box.numel * self.dtype.itemsize if expected else self.length

    def section(self, start: int, stop: int) -> Section:
        """The section that the item needs of stored bytes ``start`` to ``stop``."""
        size = self.dtype.itemsize
        return find_section(self.sizes, self.box, start // size, stop // size)

    def section_bytes(self, section: Section) -> int:
        """Bytes of a section as stored."""
        return (section.stop - section.start) * self.dtype.itemsize

    @abstractmethod
    def section_memory(self, section: Section) -> memoryview | None:
        """The place of a section; None if it is not one run of bytes as they are stored."""

    @abstractmethod
    def scatter(self, section: Section, packed: memoryview) -> None:
        """Copy a section, its elements one after the other, to its place."""

    def section_arrived(self, section: Section) -> bool:
        """Count a section that is in place; True when it was the last."""
        size = self.section_bytes(section)
        with self._lock:
            self.missing -= size
            return self.missing == 0 and size > 0


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


def is_whole(item: ReadItem, sizes: torch.Size) -> bool:
    """Whether an item needs all of a saved chunk of ``sizes``."""
    return item.lengths == sizes and not any(item.storage_offsets)


def elements_of(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as elements; copies them only if they are not aligned."""
    found = torch.frombuffer(data, dtype=torch.uint8)
    return (found.clone() if found.data_ptr() % dtype.itemsize else found).view(dtype)


def cut_out(
    elements: torch.Tensor, first: int, sizes: Sequence[int], box: Box, section: Section
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Cut a section of an array's box out of a run of that array.

    Yields:
        The boxes, within ``box``, that the section consists of, in order, each with its elements.
    """
    strides = row_major_strides(sizes)
    begin = elements.storage_offset() - first
    for part, position in boxes_of_section(sizes, box, section):
        yield part, elements.as_strided(part.lengths, strides, begin + position)


class TensorTransfer(ItemTransfer):
    """Loads a box of a saved chunk, whose raw bytes' place is known, into a tensor.

    ``box`` is in the chunk; None: the one that the item names. ``order`` has the dimension of ``target`` for each
    dimension of the box; None: the same.
    """

    __slots__ = ("_box", "_into")

    def __init__(
        self,
        item: ReadItem,
        path: str,
        raw_start: int,
        ranges: Sequence[Range],
        target: torch.Tensor,
        sizes: torch.Size,
        dtype: torch.dtype,
        *,
        box: Box | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        self._box = box
        self._into = into = target if order is None else target.permute(*order)
        owned = None
        if dtype == into.dtype and ranges and is_direct(into):
            nbytes = into.nbytes
            if box is None and is_whole(item, sizes):
                owned = 0, nbytes
            else:
                start, stop = covering_run(sizes, box or Box(item.storage_offsets, item.lengths))
                start, stop = start * dtype.itemsize, stop * dtype.itemsize
                owned = (start, stop) if stop - start == nbytes else None
        super().__init__(item, path, raw_start, ranges, target, owned, sizes, dtype)

    @property
    def box(self) -> Box:
        return self._box or Box(self.item.storage_offsets, self.item.lengths)

    def memory(self, start: int, stop: int) -> memoryview:
        first = self.owned[0] if self.owned else 0
        return view_bytes(self._into)[start - first : stop - first]

    def put(self, offset: int, data: memoryview) -> None:
        if self.owned is not None:
            return  # what is needed is received in place; these bytes are only for a checksum
        elements, first = elements_of(data, self.dtype), offset // self.dtype.itemsize
        section = find_section(self.sizes, self.box, first, first + elements.numel())
        for part, source in cut_out(elements, first, self.sizes, self.box, section):
            narrow_tensor_by_index(self._into, part.offsets, part.lengths).copy_(source)

    def section_memory(self, section: Section) -> memoryview | None:
        if self._into.dtype != self.dtype or not is_direct(self._into):
            return None
        size = self.dtype.itemsize
        return view_bytes(self._into)[section.start * size : section.stop * size]

    def scatter(self, section: Section, packed: memoryview) -> None:
        elements, done = elements_of(packed, self.dtype), 0
        for part, _ in boxes_of_section(self.sizes, self.box, section):
            source = elements[done : done + part.numel].view(part.lengths)
            narrow_tensor_by_index(self._into, part.offsets, part.lengths).copy_(source)
            done += part.numel


class ArchivedTransfer(TensorTransfer):
    """Loads a box of a chunk that another writer stored, from the place where its bytes are expected.

    The head of the item is fetched too. It lies before byte 0 of the chunk, and must prove the place.

    ``instead`` makes the transfer to try if the proof fails, from the head that was found, if any.
    """

    __slots__ = ("_instead", "_proof")

    def __init__(
        self,
        item: ReadItem,
        info: StorageInfo,
        target: torch.Tensor,
        proof: HeadProof,
        *,
        max_gap: int,
        instead: Callable[[ArchiveHead | None], ItemTransfer],
    ) -> None:
        head = proof.expected
        # Row-major, like everything else: the dimensions in stored order.
        order = None if head.is_row_major else head.order
        offsets, lengths, sizes = (
            torch.Size(values if order is None else [values[dim] for dim in order])
            for values in (item.storage_offsets, item.lengths, head.shape)
        )
        box = Box(offsets, lengths)
        ranges = ranges_of_box(sizes, box, head.dtype.itemsize, blocks=None, max_gap=max_gap)
        super().__init__(
            item, info.relative_path, info.offset + head.raw_offset, _with_head(ranges, head), target, sizes,
            head.dtype, box=box, order=order,
        )  # fmt: skip
        self._proof = proof
        self._instead = instead

    def put(self, offset: int, data: memoryview) -> None:
        if offset < 0:
            self._proof.put(offset, data)
            data = data[-offset:]
            offset = 0
        if data.nbytes:
            super().put(offset, data)

    def finish(self) -> ItemTransfer | None:
        return None if self._proof.holds() else self._instead(self._proof.found())


class ProvenTransfer(TensorTransfer):
    """Loads a box of a chunk whose place and dtype are recorded by metadata that no checksum proves.

    The head of the item is fetched too, and must say the same.

    ``find_fault`` returns how a head differs from what the metadata says; None: it does not.
    """

    __slots__ = ("_find_fault", "_head", "_url")

    def __init__(
        self,
        item: ReadItem,
        info: StorageInfo,
        raw_offset: int,
        ranges: Sequence[Range],
        target: torch.Tensor,
        sizes: torch.Size,
        dtype: torch.dtype,
        *,
        find_fault: Callable[[bytes], str | None],
        url: str,
    ) -> None:
        super().__init__(
            item, info.relative_path, info.offset + raw_offset, [Range(-raw_offset, 0, None), *ranges], target, sizes,
            dtype,
        )  # fmt: skip
        self._head = bytearray(raw_offset)
        self._find_fault = find_fault
        self._url = url

    def put(self, offset: int, data: memoryview) -> None:
        if offset >= 0:
            super().put(offset, data)
        else:
            start = len(self._head) + offset
            self._head[start : start + data.nbytes] = data

    def finish(self) -> ItemTransfer | None:
        fault = self._find_fault(bytes(self._head))
        if fault is not None:
            raise errors.CorruptCheckpointError(
                f"the metadata of {self._url} is damaged: where it places {self.item.storage_index.fqn!r}, {fault}. "
                "Remedy: load an earlier checkpoint",
                url=self._url,
            )
        return None


def _with_head(ranges: Sequence[Range], head: ArchiveHead) -> list[Range]:
    """Add the head of an item: in one run with the beginning of the chunk, if that is needed."""
    start, stop = -head.raw_offset, head.length - head.raw_offset
    # Cuts fall on multiples of 64 bytes from where a range begins, and must not divide elements.
    if ranges and ranges[0].start == stop and head.length % 64 == 0:
        return [Range(start, ranges[0].stop, None), *ranges[1:]]
    return [Range(start, stop, None), *ranges]


class StreamTransfer(ItemTransfer):
    """A whole stored item, decoded when all of it has arrived.

    ``decode`` is called with the item's bytes (uint8). ``unpack`` is like it, for a small item without checksum: called
    when the item has come in one piece, with its bytes in somebody else's memory. Returns whether it could.
    """

    __slots__ = ("_buffer", "_decode", "_unpack", "_unpacked")

    def __init__(
        self,
        item: ReadItem,
        info: StorageInfo,
        crc: int | None,
        target: torch.Tensor | None,
        decode: Callable[[StreamTransfer, torch.Tensor], None],
        unpack: Callable[[memoryview], bool] | None = None,
    ) -> None:
        size = info.length
        ranges = [Range(0, size, crc)] if size else []
        owned = (0, size) if unpack is None else None
        super().__init__(item, info.relative_path, info.offset, ranges, target, owned, (size,), torch.uint8)
        self._decode = decode
        self._unpack = unpack
        self._unpacked = False
        self._buffer: torch.Tensor | None = None

    def memory(self, start: int, stop: int) -> memoryview:
        with self._lock:
            if self._buffer is None:
                self._buffer = allocate(self.sizes, torch.uint8, self.item.storage_index.fqn, self.path)
            return view_bytes(self._buffer)[start:stop]

    def put(self, offset: int, data: memoryview) -> None:
        if self._unpack is not None and data.nbytes == self.sizes[0]:
            self._unpacked = self._unpack(data)
        if not self._unpacked:
            self.scatter(Section(offset, offset + data.nbytes), data)

    def section_memory(self, section: Section) -> memoryview | None:
        return self.memory(*section)

    def scatter(self, section: Section, packed: memoryview) -> None:
        self.memory(*section)[:] = packed

    def finish(self) -> ItemTransfer | None:
        """Decode the item."""
        if not self._unpacked:
            self._decode(self, torch.empty(0, dtype=torch.uint8) if self._buffer is None else self._buffer)
        self._buffer = None
        return None
