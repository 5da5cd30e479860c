"""The place of the raw bytes of tensors that other writers stored: as this torch writes them, proven by their own head.

What torch.save writes before a storage is the same for all tensors of one dtype and shape, up to the version of torch.
Where an item is as long as this torch would write it, the place of its bytes is expected; its own head, which is
fetched with them, must say the same.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch

from dcp_s3.format.archive import MAX_HEAD, ArchiveHead, HeadError, parse_head
from dcp_s3.format.framing import Frame, FrameCache, FramingError

SMALL_ITEM = 64 * 2**10
"""Items of up to this many bytes are fetched whole."""


class ItemKind(NamedTuple):
    """Properties of items whose heads should be the same."""

    dtype: torch.dtype
    """Dtype of the saved tensor."""
    shape: tuple[int, ...]
    """Shape of the saved chunk."""
    length: int
    """Length of the item in bytes."""


class ArchiveHeads:
    """Heads by kind, as this torch writes them, and those of items. Thread-safe."""

    def __init__(self) -> None:
        self._frames = FrameCache()
        self._parsed: dict[ItemKind, tuple[bytes, ArchiveHead]] = {}

    def _frame(self, kind: ItemKind) -> Frame | None:
        """What this torch writes around the bytes of a contiguous tensor; None if it cannot be told."""
        with contextlib.suppress(FramingError, RuntimeError, MemoryError):  # RuntimeError: torch lacks that much memory
            return self._frames.get(kind.dtype, torch.Size(kind.shape))
        return None

    def expect(self, kind: ItemKind) -> ArchiveHead | None:
        """The head of items of ``kind`` if they are as long as this torch would write them; None if they are not."""
        if kind not in self._parsed:
            frame = self._frame(kind)
            if frame is None or frame.length != kind.length:
                return None
            with contextlib.suppress(HeadError):
                self._parsed[kind] = frame.header, parse_head(frame.header)
        known = self._parsed.get(kind)
        return None if known is None else known[1]

    def find(self, kind: ItemKind, data: bytes | memoryview) -> ArchiveHead | None:
        """The head of an item of ``kind`` that begins with ``data``: 2 us if it is expected, else 35 us.

        None if there is no head, or it is of another kind.
        """
        expected = self.expect(kind)
        if expected is not None and bytes(data[: expected.length]) == self._parsed[kind][0]:
            return expected
        with contextlib.suppress(HeadError):
            return _read(kind, bytes(data[:MAX_HEAD]))
        return None

    def find_fault(self, kind: ItemKind, raw_offset: int, data: bytes) -> str | None:
        """How the head that is ``data`` differs from that of a contiguous tensor of ``kind`` at ``raw_offset``."""
        frame = self._frame(kind)
        if frame is not None and frame.header == data:
            return None  # also of dtypes that `parse_head` does not know
        try:
            head = _read(kind, data)
        except HeadError as error:
            return str(error)
        if not head.is_row_major or head.raw_offset != raw_offset:
            return f"its bytes begin at {head.raw_offset}, the metadata has {raw_offset}"
        return None


def _read(kind: ItemKind, data: bytes) -> ArchiveHead:
    head = parse_head(data)
    if (head.dtype, head.shape) != (kind.dtype, tuple(kind.shape)):
        raise HeadError(f"it is a {head.dtype} of {head.shape}, the metadata has {kind.dtype} of {tuple(kind.shape)}")
    if head.raw_offset + head.nbytes > kind.length:
        raise HeadError(f"its {head.nbytes} bytes from {head.raw_offset} on are not in its {kind.length} bytes")
    return head
