"""The place of the raw bytes of tensors that other writers stored: expected by kind, proven by each item's own head.

What torch.save writes before a storage is the same for all tensors of one dtype and shape, up to the version of torch.
So the place of an item's bytes is expected: because its length is what this torch would write, or because another item
of its kind was looked at. Its own head, which is fetched with the bytes, must say the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import NamedTuple

import torch

from dcp_s3.format.archive import MAX_HEAD, ArchiveHead, HeadError, parse_head
from dcp_s3.format.blocks import Range
from dcp_s3.format.framing import FrameCache, FramingError
from dcp_s3.load.transfer import Transfer

SMALL_ITEM = 64 * 2**10
"""Items of up to this many bytes are fetched whole, without a look first and not in parts."""

PROBE_SIZE = 4 * 2**10
"""Bytes fetched in a first look at an item; a second look fetches `MAX_HEAD`."""

_MAX_KNOWN = 4096
_MAX_KNOWN_OF_A_KIND = 4


class ItemKind(NamedTuple):
    """Properties of items whose heads should be the same."""

    dtype: torch.dtype
    """Dtype of the saved tensor."""
    shape: tuple[int, ...]
    """Shape of the saved chunk."""
    length: int
    """Length of the item in bytes."""


class ArchiveHeads:
    """The known heads, by kind. Thread-safe."""

    def __init__(self) -> None:
        self._frames = FrameCache()
        self._lock = threading.Lock()
        self._known: dict[ItemKind, list[tuple[bytes, ArchiveHead]]] = {}
        self._count = 0

    def expect(self, kind: ItemKind) -> ArchiveHead | None:
        """The head that items of ``kind`` should have; None if nothing is known of them."""
        known = self._known.get(kind)
        if known is None:
            self._predict(kind)
            known = self._known.setdefault(kind, [])
        return known[0][1] if known else None

    def _predict(self, kind: ItemKind) -> None:
        """Learn the head that this torch would write, if the item would be as long."""
        try:
            frame = self._frames.get(kind.dtype, torch.Size(kind.shape))
            if frame.length == kind.length:
                self.read(kind, frame.header)
        except (FramingError, HeadError, RuntimeError, MemoryError):  # RuntimeError: torch lacks that much memory
            pass

    def read(self, kind: ItemKind, data: bytes | memoryview) -> ArchiveHead:
        """The head of an item of ``kind`` that begins with ``data``: 0.5 us if it is known, else 35 us.

        Raises:
            HeadError: there is no head, or it is of another kind.
        """
        for known, head in self._known.get(kind, ()):
            if data[: len(known)] == known if isinstance(data, bytes) else bytes(data[: len(known)]) == known:
                return head
        data = bytes(data[:MAX_HEAD])
        head = parse_head(data)
        if (head.dtype, head.shape) != (kind.dtype, tuple(kind.shape)):
            raise HeadError(
                f"it is a {head.dtype} of {head.shape}, the metadata has {kind.dtype} of {tuple(kind.shape)}"
            )
        if head.raw_offset + head.nbytes > kind.length:
            raise HeadError(f"its {head.nbytes} bytes from {head.raw_offset} on are not in its {kind.length} bytes")
        with self._lock:
            same = self._known.setdefault(kind, [])
            if self._count < _MAX_KNOWN and len(same) < _MAX_KNOWN_OF_A_KIND:
                same.append((data[: head.length], head))
                self._count += 1
        return head

    def find_fault(self, kind: ItemKind, raw_offset: int, data: bytes) -> str | None:
        """How the head that is ``data`` differs from that of a contiguous tensor of ``kind`` at ``raw_offset``."""
        with contextlib.suppress(FramingError, RuntimeError, MemoryError):
            if self._frames.get(kind.dtype, torch.Size(kind.shape)).header == data:
                return None  # as this torch writes them, also of dtypes that `parse_head` does not know
        try:
            head = self.read(kind, data)
        except HeadError as error:
            return str(error)
        if not head.is_row_major or head.raw_offset != raw_offset:
            return f"its bytes begin at {head.raw_offset}, the metadata has {raw_offset}"
        return None

    def find(self, kind: ItemKind, data: bytes | memoryview) -> ArchiveHead | None:
        """Like `read`, with None instead of an error."""
        try:
            return self.read(kind, data)
        except HeadError:
            return None


class HeadProof:
    """The head of one item as it arrives, compared with the expected one."""

    __slots__ = ("_heads", "_kind", "_received", "expected")

    def __init__(self, heads: ArchiveHeads, kind: ItemKind, expected: ArchiveHead) -> None:
        self._heads = heads
        self._kind = kind
        self.expected = expected
        self._received = bytearray(expected.length)

    def put(self, offset: int, data: memoryview) -> None:
        """Take bytes that begin in the head, at ``offset`` (negative) from the tensor's own bytes."""
        start = offset + self.expected.raw_offset
        end = min(start + data.nbytes, self.expected.length)
        self._received[start:end] = data[: end - start]

    def holds(self) -> bool:
        """Whether the item is as expected. Call it when all of the head has arrived."""
        return self.found() == self.expected

    def found(self) -> ArchiveHead | None:
        """The head that the item has; None if the bytes are too few to tell."""
        return self._heads.find(self._kind, bytes(self._received))


def read_tensor(head: ArchiveHead, item: torch.Tensor) -> torch.Tensor:
    """The tensor in an item (uint8) that has ``head``; mostly without a copy."""
    raw = item[head.raw_offset : head.raw_offset + head.nbytes]
    if raw.storage_offset() % head.dtype.itemsize:
        raw = raw.clone()
    elements = raw.view(head.dtype)
    if head.is_row_major:
        return elements.view(head.shape)
    places = [head.order.index(dim) for dim in range(len(head.shape))]
    return elements.view([head.shape[dim] for dim in head.order]).permute(places)


class HeadProbe(Transfer):
    """The beginning of an item, from which `ArchiveHeads` learns the head of its kind.

    An item without a head is skipped; if the bytes are too few, a longer look follows.
    """

    __slots__ = ("_data", "_heads", "kind")

    def __init__(self, heads: ArchiveHeads, kind: ItemKind, path: str, start: int, size: int = PROBE_SIZE) -> None:
        size = min(size, kind.length)
        super().__init__(path, start, [Range(0, size, None)], (0, size))
        self._heads = heads
        self._data = bytearray(size)
        self.kind = kind

    def name_of(self, part: Range) -> str:
        return f"the head of an item in {self.path}"

    def memory(self, start: int, stop: int) -> memoryview:
        return memoryview(self._data)[start:stop]

    def put(self, offset: int, data: memoryview) -> None:
        """See `Transfer`. Does nothing: everything is received in place."""

    def finish(self) -> HeadProbe | None:
        try:
            self._heads.read(self.kind, memoryview(self._data))
        except HeadError as error:
            if error.truncated and len(self._data) < min(MAX_HEAD, self.kind.length):
                return HeadProbe(self._heads, self.kind, self.path, self.base, MAX_HEAD)
        return None


def one_of_each_kind(heads: ArchiveHeads, probes: Iterable[HeadProbe]) -> list[HeadProbe]:
    """Pick one probe of each unknown kind, in the order given."""
    chosen: dict[ItemKind, HeadProbe] = {}
    for probe in probes:
        if probe.kind not in chosen and heads.expect(probe.kind) is None:
            chosen[probe.kind] = probe
    return list(chosen.values())
