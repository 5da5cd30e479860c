"""The pieces of an exchange, as seen by the rank that fetches one and by the ranks that receive it."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from dcp_s3 import errors
from dcp_s3.checksum import combine_crc64nvme, crc64nvme, crc_hex
from dcp_s3.format.blocks import Range, widen
from dcp_s3.load.boxes import Box, Section, contains, find_section
from dcp_s3.load.engine import Engine
from dcp_s3.load.item_transfer import ItemTransfer, cut_out, elements_of
from dcp_s3.load.peers.assignment import Peer, SharedPart, SharedPiece, StoredChunk
from dcp_s3.load.transfer import Transfer
from dcp_s3.tensor_memory import view_bytes

_ALIGNMENT = 64
"""Parts and sections begin at multiples of this many bytes of a message, a multiple of any dtype's element size."""


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Lay parts or sections of these sizes (bytes) into a message; returns their offsets and the message's length."""
    starts, end = [], 0
    for size in sizes:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + size
    return starts, end


class SharedItems:
    """The items of one rank that arrive in pieces, by their numbers in its plan, and how each is stored.

    Those ``alone`` share their memory with no other. ``finished`` is called with each when all of it has arrived.
    """

    def __init__(
        self,
        items: Mapping[int, ItemTransfer],
        stored: Mapping[int, StoredChunk],
        alone: Collection[int],
        finished: Callable[[ItemTransfer], None],
    ) -> None:
        self._items, self._alone, self._finished = items, alone, finished
        self.stored = stored
        self.inference = torch.is_inference_mode_enabled()  # a property of the thread

    def __getitem__(self, number: int) -> ItemTransfer:
        return self._items[number]

    def sections(self, part: SharedPart) -> Iterator[tuple[int, ItemTransfer, Section]]:
        """The sections of a part that this rank's items need: number, item, section."""
        for number in part.items:
            yield number, self._items[number], self._items[number].section(part.start, part.stop)

    def memory(self, number: int, section: Section) -> memoryview | None:
        """The place of a section; None if it is not one run of bytes, or shared with another item."""
        return self._items[number].section_memory(section) if number in self._alone else None

    def arrived(self, item: ItemTransfer, section: Section) -> None:
        """Count a section that is in place; the last one finishes the item."""
        if item.section_arrived(section):
            item.finish()
            self._finished(item)


class OwnedPiece(Transfer):
    """A piece that this rank fetches and sends.

    Offsets count from the beginning of the object. A part is a range.
    """

    __slots__ = ("_bytes", "_engine", "_items", "_own", "_part_crcs", "_parts", "_sections", "_starts",
                 "nbytes", "number")  # fmt: skip

    def __init__(self, piece: SharedPiece, items: SharedItems, engine: Engine) -> None:
        self.number = piece.number
        self._parts, self._items, self._engine = piece.parts, items, engine
        self._starts, self.nbytes = lay_out([part.stop - part.start for part in piece.parts])
        self._sections = {peer.rank: self._sections_of(peer) for peer in piece.peers}
        self._bytes: memoryview | None = None
        self._own = False
        self._part_crcs: list[int] = []
        ranges = [_range_of(items.stored[part.items[0]], part) for part in piece.parts]
        path = items.stored[piece.parts[0].items[0]].path
        # All checksums are needed, those of sent bytes too.
        super().__init__(path, 0, ranges, (ranges[0].start, ranges[-1].stop), checked=True)

    def _sections_of(self, peer: Peer) -> list[tuple[int, Box | None, Section, int]]:
        """The sections that a peer receives: number of the part, box (None: all of the part), elements, bytes."""
        found: list[tuple[int, Box | None, Section, int]] = []
        for number, part in enumerate(self._parts):
            needs = None if peer.needs is None else peer.needs[number]
            stored = self._items.stored[part.items[0]]
            first, last = part.start // stored.itemsize, part.stop // stored.itemsize
            if needs is None:
                found.append((number, None, Section(first, last), part.stop - part.start))
                continue
            for box in (Box(*need) for need in needs):
                section = find_section(stored.sizes, box, first, last)
                found.append((number, box, section, (section.stop - section.start) * stored.itemsize))
        return found

    def name_of(self, part: Range) -> str:
        number = self.ranges.index(part)
        return self._items[self._parts[number].items[0]].name_of(part)

    def fetch(self) -> None:
        """Fetch the piece from S3 and compare the checksums. Called on any thread."""
        memory = self._own_memory()
        self._own = memory is not None
        self._bytes = memory if memory is not None else _new_memory(self.nbytes)
        self._engine.fetch_alone(self)

    def _own_memory(self) -> memoryview | None:
        """The memory of this rank's own item, if that is the whole piece."""
        if len(self._parts) != 1 or len(self._parts[0].items) != 1:
            return None
        part = self._parts[0]
        ((number, item, section),) = self._items.sections(part)
        size = item.dtype.itemsize
        if not contains(item.sizes, item.box, part.start // size, part.stop // size):
            return None
        return self._items.memory(number, section)

    def memory(self, start: int, stop: int) -> memoryview:
        number = bisect.bisect_right(self.ranges, start, key=lambda part: part.start) - 1
        first = self._starts[number] + start - self.ranges[number].start
        return self._view(first, first + stop - start)

    def put(self, offset: int, data: memoryview) -> None:
        """See `Transfer`. Does nothing: everything is received in place."""

    def _view(self, start: int, stop: int) -> memoryview:
        if self._bytes is None:
            raise RuntimeError(f"piece {self.number} is not there")
        return self._bytes[start:stop]

    def _part(self, number: int) -> memoryview:
        start, part = self._starts[number], self._parts[number]
        return self._view(start, start + part.stop - part.start)

    def finish(self) -> None:
        """See `Transfer`. Copies the sections that this rank needs."""
        self._part_crcs = self.checksums()
        if self._own:
            return
        with torch.inference_mode(self._items.inference):
            for number, part in enumerate(self._parts):
                for _, item, _ in self._items.sections(part):
                    item.place(part.start, self._part(number))

    def message(self, peer: int) -> tuple[torch.Tensor, int]:
        """The message for ``peer``, and the CRC-64/NVME of its sections.

        For the whole piece it is the piece's own memory.
        """
        sections = self._sections[peer]
        if all(box is None for _, box, _, _ in sections):
            sizes = [part.stop - part.start for part in self._parts]
            whole = torch.frombuffer(self._view(0, self.nbytes), dtype=torch.uint8)
            return whole, combine_crc64nvme(zip(self._part_crcs, sizes, strict=True))
        starts, length = lay_out([size for *_, size in sections])
        if not any(size for *_, size in sections):
            length = 0
        packed = torch.empty(length, dtype=torch.uint8, device="cpu")
        crc = 0
        for (number, box, section, size), at in zip(sections, starts, strict=True):
            if not size:
                continue
            into = packed[at : at + size]
            if box is None:
                view_bytes(into)[:] = self._part(number)
            else:
                self._pack(number, box, section, into)
            crc = crc64nvme(view_bytes(into), crc)
        return packed, crc

    def _pack(self, number: int, box: Box, section: Section, into: torch.Tensor) -> None:
        item, start = self._items[self._parts[number].items[0]], self._parts[number].start
        elements, done = into.view(item.dtype), 0
        run, first = elements_of(self._part(number), item.dtype), start // item.dtype.itemsize
        for part, source in cut_out(run, first, item.sizes, box, section):
            elements[done : done + part.numel].view(part.lengths).copy_(source)
            done += part.numel

    def sent(self) -> None:
        """Note that nobody reads the piece's memory any more: this rank's own items may be handed on."""
        self._bytes = None
        with torch.inference_mode(self._items.inference):
            for part in self._parts:
                for _, item, section in self._items.sections(part):
                    self._items.arrived(item, section)


class ReceivedPiece:
    """A piece that another rank sends."""

    def __init__(self, piece: SharedPiece, items: SharedItems, url: str) -> None:
        self.owner, self._url = piece.owner, url
        self._items = items
        self._sections = [found for part in piece.parts for found in items.sections(part)]
        self._sizes = [item.section_bytes(section) for _, item, section in self._sections]
        self._starts, self.nbytes = lay_out(self._sizes)
        if not any(self._sizes):
            self.nbytes = 0
        self._bytes = memoryview(b"")
        self._direct = False

    def buffer(self) -> torch.Tensor:
        """Memory to receive the piece in: the item's own, where that is one run."""
        memory = None
        if len(self._sections) == 1:
            number, _, section = self._sections[0]
            memory = self._items.memory(number, section)
        self._direct = memory is not None
        self._bytes = memory if memory is not None else _new_memory(self.nbytes)
        return torch.frombuffer(self._bytes, dtype=torch.uint8)

    def received(self, crc: int) -> None:
        """Copy the piece to its place.

        Raises:
            PeerReadError: these are not the bytes that were sent.
        """
        received, self._bytes = self._bytes, memoryview(b"")
        views = [received[at : at + size] for at, size in zip(self._starts, self._sizes, strict=True)]
        found = 0
        for view in views:
            found = crc64nvme(view, found) if view.nbytes else found
        if found != crc:
            _, item, _ = self._sections[0]
            raise errors.PeerReadError(
                f"{item.item.storage_index.fqn!r} in {self._url} was damaged on its way from rank {self.owner}: its "
                f"CRC-64/NVME is {crc_hex(found)}, sent was {crc_hex(crc)}. Remedy: load again",
                url=self._url,
                rank=self.owner,
            )
        with torch.inference_mode(self._items.inference):
            for (_, item, section), view in zip(self._sections, views, strict=True):
                if view.nbytes and not self._direct:
                    item.scatter(section, view)
                self._items.arrived(item, section)


def _new_memory(size: int) -> memoryview:
    return view_bytes(torch.empty(size, dtype=torch.uint8, device="cpu"))


def _range_of(stored: StoredChunk, part: SharedPart) -> Range:
    """A part as a range of the object, with its checksum if known."""
    crc = None
    if stored.blocks is not None:
        start, stop, crc = widen(part.start, part.stop, stored.nbytes, stored.blocks)
        crc = crc if (start, stop) == (part.start, part.stop) else None
    return Range(stored.base + part.start, stored.base + part.stop, crc)
