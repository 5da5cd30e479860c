"""The items of one rank that come by pieces: where their bytes go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import torch

from dcp_s3.format.blocks import Blocks
from dcp_s3.load.boxes import Box, row_major_strides
from dcp_s3.load.peers.assignment import StoredChunk
from dcp_s3.load.peers.box_sections import Section, Strip, find_section, strips_of
from dcp_s3.tensor_memory import is_direct, view_bytes


class SharedItem:
    """A read item that comes by pieces.

    Args:
        name: of the stored item, for errors.
        stored: what it is read from.
        blocks: checksums of that; None without.
        box: what the item needs of it.
        target: the tensor of the box; of an item that is read as a whole, uint8 memory for its bytes.
        dtype: of the stored elements; uint8 for an item that is read as a whole.
        exclusive: whether nothing else is loaded into the target's memory.
        finish: called when all is there.
    """

    def __init__(
        self,
        name: str,
        stored: StoredChunk,
        blocks: Blocks | None,
        box: Box,
        target: Callable[[], torch.Tensor],
        dtype: torch.dtype,
        *,
        exclusive: bool,
        finish: Callable[[], None],
    ) -> None:
        self.name, self.stored, self.blocks, self.box, self.dtype = name, stored, blocks, box, dtype
        self._make_target: Callable[[], torch.Tensor] | None = target
        self._target: torch.Tensor | None = None
        self._exclusive = exclusive
        self._finish = finish
        self._missing = box.numel
        self._lock = threading.Lock()

    @property
    def target(self) -> torch.Tensor:
        """The tensor to load into."""
        with self._lock:
            if self._target is None:
                if self._make_target is None:
                    raise RuntimeError(f"{self.name!r} has been handed on")
                self._target = self._make_target()
            return self._target

    def section(self, start: int, stop: int) -> Section:
        """What it needs of bytes ``start`` to ``stop`` of the stored chunk."""
        size = self.stored.itemsize
        return find_section(self.stored.sizes, self.box, start // size, stop // size)

    def section_bytes(self, section: Section) -> int:
        """Bytes of a section as stored."""
        return (section.stop - section.start) * self.stored.itemsize

    def memory_of(self, section: Section) -> memoryview | None:
        """The target's memory of a section; None if it is not one run of bytes as they are stored."""
        target = self.target
        if not self._exclusive or target.dtype != self.dtype or not is_direct(target):
            return None
        size = self.stored.itemsize
        return view_bytes(target)[section.start * size : section.stop * size]

    def scatter(self, section: Section, packed: torch.Tensor) -> None:
        """Copy a section to its place from ``packed``, its bytes one after the other."""
        done = 0
        for strip in strips_of(self.stored.sizes, self.box, section):
            count = strip.numel * self.stored.itemsize
            self._narrow(strip.offsets, strip.lengths).copy_(
                packed[done : done + count].view(self.dtype).view(strip.lengths)
            )
            done += count

    def take(self, section: Section, run: torch.Tensor, start: int) -> None:
        """Copy a section to its place from ``run``, the bytes of the stored chunk from ``start`` on."""
        for strip, source in strips_in(self.stored, self.box, section, run.view(self.dtype), start):
            self._narrow(strip.offsets, strip.lengths).copy_(source)

    def _narrow(self, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        found = self.target
        for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
            if length != found.shape[dim]:
                found = found.narrow(dim, offset, length)
        return found

    def arrived(self, section: Section) -> None:
        """Count a section that is at its place; after the last the item is finished, its memory let go."""
        with self._lock:
            self._missing -= section.stop - section.start
            done = self._missing == 0 and section.stop > section.start
        if done:
            self._finish()
            with self._lock:
                self._target = self._make_target = None


def strips_in(
    stored: StoredChunk, box: Box, section: Section, run: torch.Tensor, start: int
) -> Iterator[tuple[Strip, torch.Tensor]]:
    """The boxes of a section, each with its elements in ``run``: those of the chunk from byte ``start`` on."""
    strides = row_major_strides(stored.sizes)
    begin = run.storage_offset() - start // stored.itemsize
    for strip in strips_of(stored.sizes, box, section):
        yield strip, run.as_strided(strip.lengths, strides, begin + strip.position)
