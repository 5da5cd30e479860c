"""What a load has to move: ranges of bytes of an object, their checksums, and where each item of the plan belongs.

Items come as ranges of the object (from S3), or as runs of the item's box (from another rank, `exchange`).
"""

from __future__ import annotations

import bisect
import io
import math
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.distributed.checkpoint.planner import ReadItem

from dcp_s3 import errors
from dcp_s3.format.blocks import Range
from dcp_s3.load.plan import (
    Box,
    Segment,
    StoredChunk,
    boxes_of_run,
    covering_run,
    find_section,
    row_major_strides,
)
from dcp_s3.memory import combine_crc64nvme, is_direct, view_bytes
from dcp_s3.torch_private import narrow_tensor_by_index


class Transfer(ABC):
    """Ranges of one object's bytes: where they go, how many are missing, and their checksums.

    Offsets count from an origin that the transfer chooses, for example a saved chunk's first byte.

    Args:
        path: path of the object, relative to the checkpoint.
        base: position in the object of offset 0.
        ranges: ranges to fetch, in order, not overlapping.
        owned: offsets (start, stop) of the bytes that can be received in `memory`, in place; None if there are none.
        checked: whether to compute checksums although none is recorded.

    Attributes:
        length: number of bytes to fetch.
        missing: number of bytes that have not arrived.
        fetched_again: whether this is the second try, because a checksum did not match.
    """

    __slots__ = ("_crcs", "_lock", "base", "checked", "fetched_again", "length", "missing", "owned", "path", "ranges")

    def __init__(
        self, path: str, base: int, ranges: Sequence[Range], owned: tuple[int, int] | None, *, checked: bool = False
    ) -> None:
        self.path, self.base, self.ranges, self.owned = path, base, ranges, owned
        length = 0  # one loop: there may be many transfers, mostly of one range
        for start, stop, crc in ranges:
            length += stop - start
            checked = checked or crc is not None
        self.length = self.missing = length
        self.checked = checked
        self.fetched_again = False
        self._crcs: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    def segments(self, ranges: Iterable[Range] | None = None) -> list[Segment]:
        """The segments of the object that ``ranges`` are; None: all ranges."""
        base = self.base
        return [Segment(base + start, base + stop, self) for start, stop, _ in ranges or self.ranges]

    @abstractmethod
    def name_of(self, part: Range) -> str:
        """The name of what a range belongs to, for errors."""

    def memory(self, start: int, stop: int) -> memoryview:
        """The memory where bytes within `owned` belong. To be overridden where there are such bytes."""
        raise NotImplementedError

    def place(self, offset: int, data: memoryview) -> None:
        """Put bytes that were received elsewhere in place: here, those within `owned`.

        They are whole elements; ``data`` is reused afterwards.
        """
        if self.owned is not None:
            start, stop = max(offset, self.owned[0]), min(offset + data.nbytes, self.owned[1])
            if start < stop:
                self.memory(start, stop)[:] = data[start - offset : stop - offset]

    def arrived(self, offset: int, length: int, crc: int) -> bool:
        """Count bytes that are in place and remember their checksum; returns True for the last ones."""
        with self._lock:
            self._crcs.append((offset, crc, length))
            self.missing -= length
            return self.missing == 0

    def is_damaged(self, offset: int, length: int, crc: int) -> bool:
        """Whether these bytes are a whole range, with the wrong checksum."""
        at = bisect.bisect_left(self.ranges, (offset,))
        start, stop, expected = self.ranges[at] if at < len(self.ranges) else (0, 0, None)
        return (start, stop) == (offset, offset + length) and expected is not None and expected != crc

    def mismatches(self) -> Sequence[tuple[Range, int]]:
        """The ranges whose bytes are not what was saved, with the CRC-64/NVME that was found. For when all are here."""
        if not self.checked:
            return []
        pairs = zip(self.ranges, self.checksums(), strict=True)
        return [(part, crc) for part, crc in pairs if part.crc is not None and part.crc != crc]

    def checksums(self) -> list[int]:
        """CRC-64/NVME of each range, as it arrived."""
        if len(self._crcs) == 1:  # most of them, and there may be many
            return [self._crcs[0][1]]
        pieces, found, at = sorted(self._crcs), [], 0
        for _, stop, _ in self.ranges:
            first, at = at, bisect.bisect_left(pieces, (stop,), at)
            found.append(combine_crc64nvme((crc, n) for _, crc, n in pieces[first:at]))
        return found

    def forget(self, part: Range) -> None:
        """Prepare to receive a range again."""
        with self._lock:
            self._crcs = [piece for piece in self._crcs if not part.start <= piece[0] < part.stop]
            self.missing += part.stop - part.start

    def finish(self) -> Transfer | None:
        """Complete the transfer: all bytes are in place, and verified.

        Returns:
            A transfer to fetch instead, if the bytes are not where they were expected.
        """
        return None


class ItemTransfer(Transfer):
    """One read item.

    Attributes:
        item: item of the load plan.
        stored: how it is stored.
        target: the tensor to load into, None for an item that is not a tensor.
        loaded: the decoded value of an item that is not a tensor.
    """

    __slots__ = ("item", "loaded", "stored", "target")

    item: ReadItem
    stored: StoredChunk
    target: torch.Tensor | None
    loaded: io.BytesIO | None

    def name_of(self, part: Range) -> str:
        return self.item.storage_index.fqn


class TensorTransfer(ItemTransfer):
    """Loads a box of an array of raw bytes, whose place is known, into a tensor.

    Args:
        ranges: ranges of the array to fetch.
        array: the array; None: ``stored``. Or the item's box of it, packed, as it comes from another rank.
        head: bytes right before the array that are fetched as well, to prove that the array is where it is expected.
        check: called with the head when all has arrived; returns the transfer to fetch instead, or raises.
    """

    __slots__ = ("_array", "_box", "_check", "_head", "_target")

    def __init__(
        self,
        item: ReadItem,
        stored: StoredChunk,
        target: torch.Tensor,
        box: Box,
        ranges: Sequence[Range],
        *,
        array: StoredChunk | None = None,
        head: int = 0,
        check: Callable[[bytes], Transfer | None] | None = None,
    ) -> None:
        self.item, self.stored, self.target, self.loaded = item, stored, target, None
        self._array = array = stored if array is None else array
        self._box, self._target, self._head, self._check = box, target, bytearray(head), check
        dtype, owned = array.dtype, None
        if dtype == target.dtype and ranges and is_direct(target):
            size = dtype.itemsize
            start, stop = (0, array.sizes.numel()) if box.lengths == array.sizes else covering_run(array.sizes, box)
            owned = (start * size, stop * size) if (stop - start) * size == target.nbytes else None
        if head:
            ranges = [Range(-head, 0, None), *ranges]
        super().__init__(stored.info.relative_path, array.base, ranges, owned)

    def memory(self, start: int, stop: int) -> memoryview:
        first = self.owned[0] if self.owned else 0
        return view_bytes(self._target)[start - first : stop - first]

    def place(self, offset: int, data: memoryview) -> None:
        if offset < 0:
            length = min(-offset, data.nbytes)
            at = len(self._head) + offset
            self._head[at : at + length] = data[:length]
            offset, data = 0, data[length:]
        if self.owned is not None or not data.nbytes:
            super().place(offset, data)  # the other bytes are only for a checksum
            return
        sizes, dtype = self._array.sizes, self._array.dtype
        elements, first = elements_of(data, dtype), offset // dtype.itemsize
        section = find_section(sizes, self._box, first, first + elements.numel())
        for part, source in cut_out(elements, first, sizes, self._box, section):
            narrow_tensor_by_index(self._target, part.offsets, part.lengths).copy_(source)

    def finish(self) -> Transfer | None:
        return None if self._check is None else self._check(bytes(self._head))


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
        self.item, self.stored, self.target, self.loaded = item, stored, target, None
        self._decode: Callable[[torch.Tensor], io.BytesIO | None] | None = decode
        self._buffer: torch.Tensor | None = None
        size = stored.nbytes
        ranges = [Range(0, size, stored.crc)] if size else []
        super().__init__(stored.info.relative_path, stored.base, ranges, (0, size))

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


def elements_of(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as elements; copies them only if they are not aligned."""
    found = torch.frombuffer(data, dtype=torch.uint8)
    return (found.clone() if found.data_ptr() % dtype.itemsize else found).view(dtype)


def cut_out(
    elements: torch.Tensor, first: int, sizes: Sequence[int], box: Box, section: tuple[int, int]
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Cut a section of an array's box out of a run of that array, from element ``first`` on.

    Yields:
        The boxes, within ``box``, that the section consists of, in order, each with its elements.
    """
    if section[0] >= section[1]:
        return
    strides = row_major_strides(sizes)
    begin = elements.storage_offset() - first + sum(map(operator.mul, box.offsets, strides))
    for part in boxes_of_run(tuple(box.lengths), *section):
        yield part, elements.as_strided(part.lengths, strides, begin + sum(map(operator.mul, part.offsets, strides)))


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
