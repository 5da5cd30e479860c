"""Where the raw bytes of tensors lie that other writers stored: expected by class, proven by each item's own bytes.

What torch.save writes before a storage is the same for all tensors of one dtype and shape, up to the version of torch.
So where an item's bytes are is expected (because its length is that of what this torch would write, or because another
item of its class was looked at), and its own head, which is fetched with them, must say the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple

import torch

from dcp_s3.format.archive import MAX_HEAD, ArchiveHead, HeadError, parse_head
from dcp_s3.format.blocks import Range
from dcp_s3.format.framing import FrameCache, FramingError
from dcp_s3.load.transfer import Transfer

SMALL_ITEM = 64 * 2**10
"""Bytes up to which an item is rather fetched whole than looked at, or in parts."""

PROBE_SIZE = 4 * 2**10
"""Bytes of the first look at an item; a second one takes `MAX_HEAD`."""

_MAX_KNOWN = 4096
_MAX_KNOWN_OF_A_KIND = 4


class ItemKind(NamedTuple):
    """What items have in common whose heads should be the same."""

    dtype: torch.dtype
    """Of the saved tensor."""
    shape: tuple[int, ...]
    """Of the saved chunk."""
    length: int
    """Of the item, bytes."""


class ArchiveHeads:
    """The heads that are known, by kind. Safe to use from several threads."""

    def __init__(self) -> None:
        self._frames = FrameCache()
        self._lock = threading.Lock()
        self._known: dict[ItemKind, list[tuple[bytes, ArchiveHead]]] = {}
        self._count = 0

    def expect(self, kind: ItemKind) -> ArchiveHead | None:
        """What items of ``kind`` should begin with; None if nothing is known of them."""
        known = self._known.get(kind)
        if known is None:
            self._predict(kind)
            known = self._known.setdefault(kind, [])
        return known[0][1] if known else None

    def _predict(self, kind: ItemKind) -> None:
        """From what this torch would write, if that is as long."""
        try:
            frame = self._frames.get(kind.dtype, torch.Size(kind.shape))
            if frame.length == kind.length:
                self.read(kind, frame.header)
        except (FramingError, HeadError, RuntimeError, MemoryError):  # RuntimeError: torch has not so much memory
            pass

    def read(self, kind: ItemKind, data: bytes | memoryview) -> ArchiveHead:
        """The head of an item of ``kind`` that begins with ``data``: 0.5 us if it is known, else 35.

        Raises:
            HeadError: it has none, or is not of this kind.
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

    def find(self, kind: ItemKind, data: bytes | memoryview) -> ArchiveHead | None:
        """As `read`; None instead of an error."""
        try:
            return self.read(kind, data)
        except HeadError:
            return None


class HeadProof:
    """The head of one item as it arrives, to be compared with the expected one.

    Args:
        heads: what is known.
        kind: of the item.
        expected: what was relied on when the item's bytes were asked for.
    """

    __slots__ = ("_heads", "_kind", "_received", "expected")

    def __init__(self, heads: ArchiveHeads, kind: ItemKind, expected: ArchiveHead) -> None:
        self._heads = heads
        self._kind = kind
        self.expected = expected
        self._received = bytearray(expected.length)

    def put(self, offset: int, data: memoryview) -> None:
        """Take bytes that begin in the head, ``offset`` bytes (negative) before the tensor's own."""
        start = offset + self.expected.raw_offset
        end = min(start + data.nbytes, self.expected.length)
        self._received[start:end] = data[: end - start]

    def holds(self) -> bool:
        """Whether the item is as expected. All of the head has arrived."""
        return self.found() == self.expected

    def found(self) -> ArchiveHead | None:
        """What the item has; None if that can not be told from so many bytes."""
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
    """The beginning of an item, from which `ArchiveHeads` learns what those of its kind begin with.

    Args:
        heads: to tell. An item that has no head is passed over.
        kind: of the item.
        path: object, relative to the checkpoint.
        start: first byte of the item in the object.
        size: bytes to look at; a longer look follows if they do not suffice.
    """

    __slots__ = ("_data", "_heads", "kind")

    def __init__(self, heads: ArchiveHeads, kind: ItemKind, path: str, start: int, size: int = PROBE_SIZE) -> None:
        size = min(size, kind.length)
        super().__init__(path, start, [Range(0, size, None)], (0, size))
        self._heads = heads
        self._data = bytearray(size)
        self.kind = kind

    def name_of(self, part: Range) -> str:
        """See `Transfer`."""
        return f"the head of an item in {self.path}"

    def memory(self, start: int, stop: int) -> memoryview:
        """See `Transfer`."""
        return memoryview(self._data)[start:stop]

    def put(self, offset: int, data: memoryview) -> None:
        """See `Transfer`. Nothing: all is received in place."""

    def finish(self) -> HeadProbe | None:
        """See `Transfer`."""
        try:
            self._heads.read(self.kind, memoryview(self._data))
        except HeadError as error:
            if error.truncated and len(self._data) < min(MAX_HEAD, self.kind.length):
                return HeadProbe(self._heads, self.kind, self.path, self.base, MAX_HEAD)
        return None


def one_of_each_kind(heads: ArchiveHeads, probes: Iterable[HeadProbe]) -> list[HeadProbe]:
    """One of each kind of which nothing is known, in the order given."""
    chosen: dict[ItemKind, HeadProbe] = {}
    for probe in probes:
        if probe.kind not in chosen and heads.expect(probe.kind) is None:
            chosen[probe.kind] = probe
    return list(chosen.values())
