"""The place of the raw bytes of tensors that other writers stored: expected by kind, proven by each item's own head.

What torch.save writes before a storage is the same for all tensors of one dtype and shape, up to the version of torch.
So the place of an item's bytes is expected: because its length is what this torch would write, or because another item
of its kind was looked at. Its own head, which is fetched with the bytes, must say the same.
"""

from __future__ import annotations

import contextlib
import threading
from typing import NamedTuple

import torch

from dcp_s3.format.archive import MAX_HEAD, ArchiveHead, HeadError, parse_head
from dcp_s3.format.framing import FrameCache, FramingError
from dcp_s3.load.fetch import Fetcher
from dcp_s3.memory import ReadTarget
from dcp_s3.torch_private import StorageInfo

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
        if kind not in self._known:
            self._known[kind] = []
            # RuntimeError: torch lacks that much memory.
            with contextlib.suppress(FramingError, HeadError, RuntimeError, MemoryError):
                frame = self._frames.get(kind.dtype, torch.Size(kind.shape))
                if frame.length == kind.length:  # as this torch would write it
                    self.read(kind, frame.header)
        known = self._known[kind]
        return known[0][1] if known else None

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

    def find(self, kind: ItemKind, data: bytes | memoryview) -> ArchiveHead | None:
        """Like `read`, with None instead of an error."""
        try:
            return self.read(kind, data)
        except HeadError:
            return None

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

    def look(self, fetcher: Fetcher, kind: ItemKind, info: StorageInfo) -> None:
        """Learn the head of an item of ``kind``, by one ranged GET, or two if it is long.

        Raises:
            CorruptCheckpointError, StorageError: see `Fetcher.read`. An item without a head is none.
        """
        for most in (PROBE_SIZE, MAX_HEAD):
            data = memoryview(bytearray(min(most, kind.length)))
            fetcher.read(info.relative_path, info.offset, [ReadTarget(data)])
            try:
                self.read(kind, data)
                return
            except HeadError as error:
                if not error.truncated or data.nbytes == kind.length:
                    return
