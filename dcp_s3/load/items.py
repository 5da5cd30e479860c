"""What a load has to move for one item: ranges of bytes, their checksums, and the place where they belong.

They come as ranges of an object (from S3), or as runs of the item's box (from another rank, `pieces`).
"""

from __future__ import annotations

import bisect
import io
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch.distributed.checkpoint.planner import ReadItem

from dcp_s3 import errors
from dcp_s3.format.blocks import Range
from dcp_s3.load.plan import Box, Segment, StoredChunk, boxes_of_run, covering_run, find_section, row_major_strides
from dcp_s3.memory import combine_crc64nvme, is_direct, view_bytes
from dcp_s3.torch_private import narrow_tensor_by_index


class Transfer:
    """The bytes of one read item. Offsets count from the beginning of an array, which is stored from ``base`` on.

    Args:
        item, stored: item of the load plan, and how it is stored.
        target: the tensor to load into; None for an item that is none.
        ranges: ranges of the array to fetch, in order, not overlapping.
        into: the tensor that receives the elements of ``box``; None: memory that is allocated when bytes arrive, for
            all of an array of bytes.
        array: the array; None: ``stored``.
        box: the box of the array; None: all of it.
        head: number of bytes right before the array that are fetched as well.
        complete: called with the transfer when all is in place and verified; None for nothing. Returns a transfer to
            fetch instead if the bytes are not where they were expected.
        checked: whether to compute checksums although none is recorded.

    Attributes:
        owned: offsets (start, stop) of the bytes that can be received in `memory`, in place; None if there are none.
        length, missing: number of bytes to fetch, and of those that have not arrived.
        loaded: the decoded value of an item that is no tensor.
        fetched_again: whether this is the second try, because a checksum did not match.
        checksums: CRC-64/NVME of each range, as `verify` found it.
    """

    __slots__ = (
        "_array", "_box", "_crcs", "_lock", "base", "checked", "checksums", "complete", "fetched_again", "head", "into",
        "item", "length", "loaded", "missing", "owned", "path", "ranges", "stored", "target",
    )  # fmt: skip

    def __init__(
        self,
        item: ReadItem,
        stored: StoredChunk,
        target: torch.Tensor | None,
        ranges: Sequence[Range],
        into: torch.Tensor | None,
        *,
        array: StoredChunk | None = None,
        box: Box | None = None,
        head: int = 0,
        complete: Callable[[Transfer], Transfer | None] | None = None,
        checked: bool = False,
    ) -> None:
        self.item, self.stored, self.target, self.into = item, stored, target, into
        self._array = array = stored if array is None else array
        self._box = box = Box((0,) * len(array.sizes), array.sizes) if box is None else box
        self.complete, self.head = complete, bytearray(head)
        self.path, self.base = stored.info.relative_path, array.base
        self.owned: tuple[int, int] | None = (0, array.nbytes) if into is None else None
        if into is not None and into.dtype == array.dtype and ranges and is_direct(into):
            size = array.dtype.itemsize
            start, stop = (0, array.sizes.numel()) if box.lengths == array.sizes else covering_run(array.sizes, box)
            self.owned = (start * size, stop * size) if (stop - start) * size == into.nbytes else None
        self.ranges = [Range(-head, 0, None), *ranges] if head else ranges
        length = 0  # one loop: there may be many transfers, mostly of one range
        for start, stop, crc in self.ranges:
            length += stop - start
            checked = checked or crc is not None
        self.length = self.missing = length
        self.checked, self.fetched_again = checked, False
        self.loaded: io.BytesIO | None = None
        self._crcs: list[tuple[int, int, int]] = []
        self.checksums: list[int] = []
        self._lock = threading.Lock()

    def segments(self, ranges: Iterable[Range] | None = None) -> list[Segment]:
        """The segments of the object that ``ranges`` are; None: all ranges."""
        base = self.base
        return [Segment(base + start, base + stop, self) for start, stop, _ in ranges or self.ranges]

    def memory(self, start: int, stop: int) -> memoryview:
        """The memory where bytes within `owned` belong."""
        if self.into is None:
            with self._lock:
                if self.into is None:
                    self.into = allocate((self._array.nbytes,), torch.uint8, self.item.storage_index.fqn, self.path)
        first = self.owned[0] if self.owned else 0
        return view_bytes(self.into)[start - first : stop - first]

    def place(self, offset: int, data: memoryview) -> None:
        """Put bytes that were received elsewhere in place. They are whole elements; ``data`` is reused afterwards."""
        if offset < 0:
            length = min(-offset, data.nbytes)
            at = len(self.head) + offset
            self.head[at : at + length] = data[:length]
            offset, data = 0, data[length:]
        if self.owned is not None:
            start, stop = max(offset, self.owned[0]), min(offset + data.nbytes, self.owned[1])
            if start < stop:  # the other bytes are only for a checksum
                self.memory(start, stop)[:] = data[start - offset : stop - offset]
        elif data.nbytes and self.into is not None:
            sizes, dtype = self._array.sizes, self._array.dtype
            elements, first = elements_of(data, dtype), offset // dtype.itemsize
            section = find_section(sizes, self._box, first, first + elements.numel())
            for part, source in cut_out(elements, first, sizes, self._box, section):
                narrow_tensor_by_index(self.into, part.offsets, part.lengths).copy_(source)

    def arrived(self, offset: int, length: int, crc: int, received: memoryview | None = None) -> bool:
        """Count bytes that are in place, and remember their checksum; returns True for the last ones. What was received
        elsewhere is put in place first, unless it is a whole range, with the wrong checksum."""
        if received is not None:
            at = bisect.bisect_left(self.ranges, (offset,))
            start, stop, expected = self.ranges[at] if at < len(self.ranges) else (0, 0, None)
            if expected in (None, crc) or (start, stop) != (offset, offset + length):
                self.place(offset, received)
        with self._lock:
            self._crcs.append((offset, crc, length))
            self.missing -= length
            return self.missing == 0

    def verify(self) -> list[tuple[Range, int]]:
        """The ranges whose bytes are not what was saved, with the CRC-64/NVME that was found; they can be received
        again. For when all are here."""
        if not self.checked:
            return []
        if len(self._crcs) == 1:  # most of them, and there may be many
            self.checksums = [self._crcs[0][1]]
        else:
            pieces, at = sorted(self._crcs), 0
            self.checksums = []
            for _, stop, _ in self.ranges:
                first, at = at, bisect.bisect_left(pieces, (stop,), at)
                self.checksums.append(combine_crc64nvme((crc, n) for _, crc, n in pieces[first:at]))
        pairs = zip(self.ranges, self.checksums, strict=True)
        wrong = [(part, crc) for part, crc in pairs if part.crc is not None and part.crc != crc]
        for part, _ in wrong:
            self._crcs = [piece for piece in self._crcs if not part.start <= piece[0] < part.stop]
            self.missing += part.stop - part.start
        return wrong


# --- elements of boxes ------------------------------------------------------------------------------


def elements_of(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """View bytes as elements; copies them only if they are not aligned."""
    found = torch.frombuffer(data, dtype=torch.uint8)
    return (found.clone() if found.data_ptr() % dtype.itemsize else found).view(dtype)


def cut_out(
    elements: torch.Tensor, first: int, sizes: Sequence[int], box: Box, section: tuple[int, int]
) -> Iterator[tuple[Box, torch.Tensor]]:
    """Cut a section of an array's box out of a run of that array, from element ``first`` on: yields the boxes, within
    ``box``, that the section consists of, in order, each with its elements."""
    if section[0] >= section[1]:
        return
    strides = row_major_strides(sizes)
    begin = elements.storage_offset() - first + sum(map(operator.mul, box.offsets, strides))
    for part in boxes_of_run(tuple(box.lengths), *section):
        yield part, elements.as_strided(part.lengths, strides, begin + sum(map(operator.mul, part.offsets, strides)))


def allocate(sizes: Sequence[int], dtype: torch.dtype, fqn: str, where: str) -> torch.Tensor:
    """Memory for what metadata says that an item has; CorruptCheckpointError if there is not so much."""
    try:
        return torch.empty(tuple(sizes), dtype=dtype)
    except (RuntimeError, MemoryError) as error:
        raise errors.CorruptCheckpointError(
            f"{fqn!r} in {where} should have {math.prod(sizes) * dtype.itemsize} bytes according to the metadata: "
            f"memory for that cannot be had ({str(error).partition('. ')[0][:200]}). If it cannot be that large, the "
            "metadata is damaged: load an earlier checkpoint; else load it where there is more memory",
            url=where,
        ) from None
