"""One piece of an exchange on one rank: where it is fetched, how it is sent, and where it is received."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from dcp_s3 import errors
from dcp_s3.format.blocks import Range, widen
from dcp_s3.load.assign import Boxes, SharedPiece
from dcp_s3.load.fetch import Fetcher
from dcp_s3.load.items import Transfer, cut_out, elements_of
from dcp_s3.load.plan import ALIGNMENT, Box, box_of, find_section
from dcp_s3.memory import crc64nvme, crc_hex, view_bytes


class Section(NamedTuple):
    """A run of bytes of a box, packed: what an item needs of a part."""

    part: int  # number of the part in its piece
    box: Box  # box of the part's chunk
    start: int  # first byte in the packed box
    stop: int  # the byte after the last


class Piece:
    """A piece that this rank fetches and sends, or receives.

    Args:
        transfers: this rank's items that arrive in pieces, by their numbers in its plan.
        finished: called with each of them when all of it has arrived.

    Attributes:
        owner: the rank that fetches it.
        nbytes: bytes of its parts, which the owner fetches.
    """

    def __init__(
        self, piece: SharedPiece, transfers: Mapping[int, Transfer], finished: Callable[[Transfer], None], url: str
    ) -> None:
        self.owner, self._parts, self._url, self._finished = piece.owner, piece.parts, url, finished
        self.nbytes = sum([part.stop - part.start for part in piece.parts])
        items = [[transfers[number] for number in part.items] for part in piece.parts]
        self._chunks = [mine[0].stored for mine in items]
        boxes = [tuple([box_of(each.item, each.stored) for each in mine]) for mine in items]
        self._transfers = [each for mine in items for each in mine]
        """For each of `_own`, its item."""
        self._own = self._sections(boxes)
        self._starts, self._length = lay_out(self._own)
        self._needs = dict(piece.peers)
        self._messages: dict[int, tuple[torch.Tensor, int]] = {}
        self._fetched: list[Transfer] = []
        """The parts, as the owner fetches them."""
        self._received: memoryview | None = None
        self._in_place = False
        self._inference = torch.is_inference_mode_enabled()  # a property of the thread

    def _sections(self, needs: Sequence[Boxes]) -> list[Section]:
        """What boxes need, given for each part."""
        found = []
        for number, (part, chunk, boxes) in enumerate(zip(self._parts, self._chunks, needs, strict=True)):
            size = chunk.dtype.itemsize
            for box in boxes:
                start, stop = find_section(chunk.sizes, box, part.start // size, part.stop // size)
                found.append(Section(number, box, start * size, stop * size))
        return found

    # --- the owner ----------------------------------------------------------------------------------------

    def fetch(self, fetcher: Fetcher) -> None:
        """Fetch the parts from S3, compare the checksums, and copy what this rank needs. Called on any thread."""
        placed, first = set(), 0
        for number, (part, chunk) in enumerate(zip(self._parts, self._chunks, strict=True)):
            size, crc = part.stop - part.start, None
            if (blocks := chunk.blocks) is not None:
                start, stop, crc = widen(part.start, part.stop, chunk.nbytes, blocks)
                crc = crc if (start, stop) == (part.start, part.stop) else None
            found = self._memory(first) if len(part.items) == 1 else None
            if found is not None and found.nbytes == size:  # it is received where the item belongs
                memory = torch.frombuffer(found, dtype=torch.uint8)
                placed.add(number)
            else:
                memory = torch.empty(size, dtype=torch.uint8, device="cpu")
            array = chunk._replace(base=chunk.base + part.start, sizes=torch.Size((size,)), dtype=torch.uint8)
            item, ranges = self._transfers[first].item, [Range(0, size, crc)]
            # All checksums are needed, those of sent bytes too.
            self._fetched.append(Transfer(item, chunk, None, ranges, memory, array=array, checked=True))
            first += len(part.items)
        fetcher.fetch_alone(self._fetched)
        with torch.inference_mode(self._inference):
            for transfer, section in zip(self._transfers, self._own, strict=True):
                if section.start < section.stop and section.part not in placed:
                    transfer.place(section.start, self._pack(section))

    def _memory(self, number: int) -> memoryview | None:
        """Where one of this rank's sections belongs; None if that is not one run of bytes."""
        transfer, section = self._transfers[number], self._own[number]
        return None if transfer.owned is None else transfer.memory(section.start, section.stop)

    def _pack(self, section: Section, into: torch.Tensor | None = None) -> memoryview:
        """The bytes of a section, which were fetched; copied to ``into`` (uint8) if given."""
        number, box, start, stop = section
        part, chunk, fetched = self._parts[number], self._chunks[number], self._fetched[number].memory
        data, size = fetched(0, part.stop - part.start), chunk.dtype.itemsize
        if stop - start == data.nbytes:
            if into is not None:
                view_bytes(into)[:] = data
            return data
        into = torch.empty(stop - start, dtype=torch.uint8, device="cpu") if into is None else into
        packed, done = into.view(chunk.dtype), 0
        run = elements_of(data, chunk.dtype)
        for within, source in cut_out(run, part.start // size, chunk.sizes, box, (start // size, stop // size)):
            packed[done : done + within.numel].view(within.lengths).copy_(source)
            done += within.numel
        return view_bytes(into)

    def message(self, peer: int) -> tuple[torch.Tensor, int]:
        """The message for ``peer``, one for all that need the same, and the CRC-64/NVME of its sections. For all of one
        part it is the part's own memory."""
        needs = self._needs[peer]
        if id(needs) not in self._messages:
            sections = self._sections(needs)
            starts, length = lay_out(sections)
            first = self._fetched[sections[0].part]
            if len(sections) == 1 and length == first.length:
                message, crc = torch.frombuffer(first.memory(0, length), dtype=torch.uint8), first.checksums[0]
            else:
                message, crc = torch.empty(length, dtype=torch.uint8, device="cpu"), 0
                for section, at in zip(sections, starts, strict=True):
                    if size := section.stop - section.start:
                        crc = crc64nvme(self._pack(section, message[at : at + size]), crc)
            self._messages[id(needs)] = message, crc
        return self._messages[id(needs)]

    def sent(self) -> None:
        """Note that nobody reads the piece's memory any more: this rank's own items may be handed on."""
        self._fetched.clear()
        self._messages.clear()
        self._arrive()

    def _arrive(self) -> None:
        """Count what this rank needs, which is in place; the last of an item finishes it."""
        with torch.inference_mode(self._inference):
            for transfer, section in zip(self._transfers, self._own, strict=True):
                size = section.stop - section.start
                if size and transfer.arrived(section.start, size, 0):
                    if transfer.complete is not None:
                        transfer.complete(transfer)
                    self._finished(transfer)

    # --- the others ---------------------------------------------------------------------------------------

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Memory to receive a message of ``nbytes`` in: the item's own, where that is one run."""
        if nbytes != self._length:
            text = f"rank {self.owner} sends {nbytes} bytes where {self._length} of {self._url} are needed: report it"
            raise errors.PeerReadError(text, url=self._url, rank=self.owner)
        memory = self._memory(0) if len(self._own) == 1 else None
        self._in_place = memory is not None
        if memory is None:
            memory = view_bytes(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
        self._received = memory
        return torch.frombuffer(memory, dtype=torch.uint8)

    def received(self, crc: int) -> None:
        """Copy what was received to its place; PeerReadError if these are not the bytes that were sent."""
        data, self._received = self._received or memoryview(b""), None
        views = [data[at : at + s.stop - s.start] for at, s in zip(self._starts, self._own, strict=True)]
        found = 0
        for view in views:
            found = crc64nvme(view, found) if view.nbytes else found
        if found != crc:
            raise errors.PeerReadError(
                f"{self._transfers[0].item.storage_index.fqn!r} in {self._url} was damaged on its way from rank "
                f"{self.owner}: its CRC-64/NVME is {crc_hex(found)}, sent was {crc_hex(crc)}. Remedy: load again",
                url=self._url,
                rank=self.owner,
            )
        if not self._in_place:
            with torch.inference_mode(self._inference):
                for transfer, section, view in zip(self._transfers, self._own, views, strict=True):
                    if view.nbytes:
                        transfer.place(section.start, view)
        self._arrive()


def lay_out(sections: Sequence[Section]) -> tuple[list[int], int]:
    """Offsets of sections in a message, at multiples of `ALIGNMENT` bytes, and its length; 0 if all are empty."""
    starts, end, filled = [], 0, False
    for _, _, start, stop in sections:
        starts.append(-(-end // ALIGNMENT) * ALIGNMENT)
        end = starts[-1] + stop - start
        filled = filled or stop > start
    return starts, end if filled else 0
