"""One piece of an exchange: where it is fetched, how it is sent, and where it is received."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from dcp_s3 import errors
from dcp_s3.format.blocks import Range, widen
from dcp_s3.load.assign import Boxes, SharedPart, SharedPiece
from dcp_s3.load.fetch import Fetcher
from dcp_s3.load.items import ItemTransfer, Transfer, cut_out, elements_of
from dcp_s3.load.plan import ALIGNMENT, Box, StoredChunk, box_of, find_section
from dcp_s3.memory import combine_crc64nvme, crc64nvme, crc_hex, view_bytes


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Lay parts or sections of these sizes (bytes) into a message, at multiples of `ALIGNMENT`.

    Returns their offsets and the message's length, which is 0 if all are empty.
    """
    starts, end = [], 0
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end if any(sizes) else 0


class ItemSection(NamedTuple):
    """A run of bytes of an item's box, packed: what the item needs of a part."""

    transfer: ItemTransfer
    box: Box
    start: int
    stop: int

    def memory(self) -> memoryview | None:
        """The place of the section; None if it is not one run of bytes."""
        return None if self.transfer.owned is None else self.transfer.memory(self.start, self.stop)


class SharedItems:
    """The items of one rank that arrive in pieces, by their numbers in its plan.

    Args:
        transfers: the items.
        finished: called with each transfer when all of it has arrived.
    """

    def __init__(self, transfers: Mapping[int, ItemTransfer], finished: Callable[[ItemTransfer], None]) -> None:
        self._transfers, self._finished = transfers, finished
        self.inference = torch.is_inference_mode_enabled()  # a property of the thread

    def stored(self, part: SharedPart) -> StoredChunk:
        """How the chunk is stored that a part is of."""
        return self._transfers[part.items[0]].stored

    def sections(self, part: SharedPart) -> Iterator[ItemSection]:
        """What this rank's items need of a part."""
        for number in part.items:
            transfer = self._transfers[number]
            box = box_of(transfer.item, transfer.stored)
            yield ItemSection(transfer, box, *section_of(transfer.stored, box, part))

    def arrived(self, section: ItemSection) -> None:
        """Count a section that is in place; the last one finishes the item."""
        transfer, size = section.transfer, section.stop - section.start
        if size and transfer.arrived(section.start, size, 0):
            transfer.finish()
            self._finished(transfer)


def section_of(stored: StoredChunk, box: Box, part: SharedPart) -> tuple[int, int]:
    """The bytes of a packed box that are in a part of its chunk."""
    size = stored.dtype.itemsize
    start, stop = find_section(stored.sizes, box, part.start // size, part.stop // size)
    return start * size, stop * size


class OwnedPiece(Transfer):
    """A piece that this rank fetches and sends.

    Offsets count from the beginning of the object. A part is a range.
    """

    __slots__ = ("_bytes", "_fetcher", "_items", "_messages", "_needs", "_own", "_parts", "_starts", "nbytes")

    def __init__(self, piece: SharedPiece, items: SharedItems, fetcher: Fetcher) -> None:
        self._parts, self._items, self._fetcher = piece.parts, items, fetcher
        self._starts, self.nbytes = lay_out([part.stop - part.start for part in piece.parts])
        self._needs = {peer.rank: peer.needs for peer in piece.peers}
        self._messages: dict[int, tuple[torch.Tensor, int]] = {}
        self._bytes = memoryview(b"")
        self._own = False
        ranges = []
        for part in piece.parts:
            stored, crc = items.stored(part), None
            if (blocks := stored.blocks) is not None:
                start, stop, crc = widen(part.start, part.stop, stored.nbytes, blocks)
                crc = crc if (start, stop) == (part.start, part.stop) else None
            ranges.append(Range(stored.base + part.start, stored.base + part.stop, crc))
        path = items.stored(piece.parts[0]).info.relative_path
        # All checksums are needed, those of sent bytes too.
        super().__init__(path, 0, ranges, (ranges[0].start, ranges[-1].stop), checked=True)

    def name_of(self, part: Range) -> str:
        return next(self._items.sections(self._parts[self.ranges.index(part)])).transfer.name_of(part)

    def fetch(self) -> None:
        """Fetch the piece from S3 and compare the checksums. Called on any thread."""
        memory = None  # that of this rank's own item, if that is the whole piece
        sections = list(self._items.sections(self._parts[0]))
        if len(self._parts) == 1 and len(sections) == 1 and sections[0].stop - sections[0].start == self.nbytes:
            memory = sections[0].memory()
        self._own = memory is not None
        self._bytes = _new_memory(self.nbytes) if memory is None else memory
        self._fetcher.fetch_alone(self)

    def memory(self, start: int, stop: int) -> memoryview:
        number = bisect.bisect_right(self.ranges, start, key=lambda part: part.start) - 1
        first = self._starts[number] + start - self.ranges[number].start
        return self._bytes[first : first + stop - start]

    def _pack(self, number: int, box: Box, start: int, stop: int, into: torch.Tensor | None = None) -> memoryview:
        """Bytes ``start`` to ``stop`` of a packed box, which are in this part, copied to ``into`` (uint8) if given."""
        part = self._parts[number]
        stored = self._items.stored(part)
        data = self._bytes[self._starts[number] :][: part.stop - part.start]
        if into is None:
            if stop - start == data.nbytes:
                return data
            into = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        packed, done, size = into.view(stored.dtype), 0, stored.dtype.itemsize
        run, section = elements_of(data, stored.dtype), (start // size, stop // size)
        for within, source in cut_out(run, part.start // size, stored.sizes, box, section):
            packed[done : done + within.numel].view(within.lengths).copy_(source)
            done += within.numel
        return view_bytes(into)

    def finish(self) -> None:
        """Copy the sections that this rank needs."""
        if self._own:
            return
        with torch.inference_mode(self._items.inference):
            for number, part in enumerate(self._parts):
                for transfer, box, start, stop in self._items.sections(part):
                    if start < stop:
                        transfer.place(start, self._pack(number, box, start, stop))

    def message(self, peer: int) -> tuple[torch.Tensor, int]:
        """The message for ``peer``, and the CRC-64/NVME of its sections: one for all peers that need the same.

        For the whole piece it is the piece's own memory.
        """
        needs = self._needs[peer]
        if id(needs) not in self._messages:
            self._messages[id(needs)] = self._make_message(needs)
        return self._messages[id(needs)]

    def _make_message(self, needs: Sequence[Boxes]) -> tuple[torch.Tensor, int]:
        found = [
            (number, box, *section_of(self._items.stored(part), box, part))
            for number, (part, boxes) in enumerate(zip(self._parts, needs, strict=True))
            for box in boxes
        ]
        sizes = [part.stop - part.start for part in self._parts]
        if [stop - start for *_, start, stop in found] == sizes:
            whole = torch.frombuffer(self._bytes, dtype=torch.uint8)
            return whole, combine_crc64nvme(zip(self.checksums(), sizes, strict=True))
        starts, length = lay_out([stop - start for *_, start, stop in found])
        message, crc = torch.empty(length, dtype=torch.uint8, device="cpu"), 0
        for (number, box, start, stop), at in zip(found, starts, strict=True):
            if start < stop:
                crc = crc64nvme(self._pack(number, box, start, stop, message[at : at + stop - start]), crc)
        return message, crc

    def sent(self) -> None:
        """Note that nobody reads the piece's memory any more: this rank's own items may be handed on."""
        self._bytes = memoryview(b"")
        self._messages.clear()
        with torch.inference_mode(self._items.inference):
            for part in self._parts:
                for section in self._items.sections(part):
                    self._items.arrived(section)


class ReceivedPiece:
    """A piece that another rank sends."""

    def __init__(self, piece: SharedPiece, items: SharedItems, url: str) -> None:
        self.owner, self._url, self._items = piece.owner, url, items
        self._sections = [found for part in piece.parts for found in items.sections(part)]
        self._starts, self.nbytes = lay_out([section.stop - section.start for section in self._sections])
        self._bytes = memoryview(b"")
        self._direct = False

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory to receive the piece of ``nbytes`` in: the item's own, where that is one run."""
        if nbytes != self.nbytes:
            text = f"rank {self.owner} sends {nbytes} bytes where {self.nbytes} of {self._url} are needed: report it"
            raise errors.PeerReadError(text, url=self._url, rank=self.owner)
        memory = self._sections[0].memory() if len(self._sections) == 1 else None
        self._direct = memory is not None
        self._bytes = _new_memory(self.nbytes) if memory is None else memory
        return torch.frombuffer(self._bytes, dtype=torch.uint8)

    def received(self, crc: int) -> None:
        """Copy the piece to its place.

        Raises:
            PeerReadError: these are not the bytes that were sent.
        """
        received, self._bytes = self._bytes, memoryview(b"")
        views = [received[at : at + s.stop - s.start] for at, s in zip(self._starts, self._sections, strict=True)]
        found = 0
        for view in views:
            found = crc64nvme(view, found) if view.nbytes else found
        if found != crc:
            name = self._sections[0].transfer.item.storage_index.fqn
            raise errors.PeerReadError(
                f"{name!r} in {self._url} was damaged on its way from rank {self.owner}: its CRC-64/NVME is "
                f"{crc_hex(found)}, sent was {crc_hex(crc)}. Remedy: load again",
                url=self._url,
                rank=self.owner,
            )
        with torch.inference_mode(self._items.inference):
            for section, view in zip(self._sections, views, strict=True):
                if view.nbytes and not self._direct:
                    section.transfer.place(section.start, view)
                self._items.arrived(section)


def _new_memory(size: int) -> memoryview:
    return view_bytes(torch.empty(size, dtype=torch.uint8, device="cpu"))
