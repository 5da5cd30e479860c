"""The pieces of an exchange, as the rank that fetches one and the ranks that get it see them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from dcp_s3 import errors
from dcp_s3.checksum import combine_crc64nvme, crc64nvme, crc_hex
from dcp_s3.format.blocks import widen
from dcp_s3.load.boxes import Box
from dcp_s3.load.peers.assignment import Peer, SharedPiece
from dcp_s3.load.peers.box_sections import Section, contains, find_section, lay_out
from dcp_s3.load.peers.shared_items import SharedItem, strips_in
from dcp_s3.s3.download import Target
from dcp_s3.tensor_memory import view_bytes

logger = logging.getLogger(__name__)

Receive = Callable[[str, int, list[Target]], None]
"""Fetches the bytes of an object (path, first byte) that fill targets."""
Items = Mapping[int, SharedItem]
"""The shared items of this rank, by their numbers in its plan."""


class OwnedPiece:
    """A piece that this rank fetches and sends.

    Args:
        piece: as the assignment has it.
        items: of this rank.
        receive: fetches from S3, or from the disk.
        distrust: called with the path of an object of which bytes were not what they should be.
        url: of the checkpoint, for errors.
    """

    def __init__(
        self, piece: SharedPiece, items: Items, receive: Receive, distrust: Callable[[str], None], url: str
    ) -> None:
        self.number = piece.number
        self._parts, self._items = piece.parts, items
        self._receive, self._distrust, self._url = receive, distrust, url
        self._inference = torch.is_inference_mode_enabled()  # a property of the thread
        self._starts, self.nbytes = lay_out([part.stop - part.start for part in piece.parts])
        self._stored = [items[part.items[0]].stored for part in piece.parts]
        self._sections = {peer.rank: self._sections_of(peer) for peer in piece.peers}
        self._sections = {rank: found for rank, found in self._sections.items() if _total(found)}
        self.peers = sorted(self._sections)
        self._buffer = _nothing()
        self._crcs: list[int] = []

    def _sections_of(self, peer: Peer) -> list[tuple[int, Box | None, Section, int]]:
        """What a peer gets: number of the part, box (None: all of the part), elements, bytes."""
        found: list[tuple[int, Box | None, Section, int]] = []
        for number, part in enumerate(self._parts):
            needs = None if peer.needs is None else peer.needs[number]
            stored = self._stored[number]
            first, last = part.start // stored.itemsize, part.stop // stored.itemsize
            if needs is None:
                found.append((number, None, Section(first, last), part.stop - part.start))
                continue
            for box in (Box(*need) for need in needs):
                section = find_section(stored.sizes, box, first, last)
                found.append((number, box, section, (section.stop - section.start) * stored.itemsize))
        return found

    def fetch(self) -> None:
        """Get it from S3 and compare the checksums.

        Raises:
            CorruptCheckpointError: twice a part was not what was written.
            StorageError: S3 failed for good.
        """
        memory = self._own_memory()
        direct = memory is not None
        if memory is None:
            buffer = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
            memory = view_bytes(buffer)
        else:
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
        targets: list[Target] = []
        wanted: list[Target] = []
        position = begin = self._object_start(0)
        for number, part in enumerate(self._parts):
            start, at = self._object_start(number), self._starts[number]
            if start > position:
                targets.append(Target(memoryview(bytearray(start - position))))
            wanted.append(Target(memory[at : at + part.stop - part.start], checksum=True))
            targets.append(wanted[-1])
            position = start + part.stop - part.start
        self._receive(self._stored[0].path, begin, targets)
        self._crcs = [self._verify(number, target) for number, target in enumerate(wanted)]
        self._buffer = buffer
        if direct:
            return
        with torch.inference_mode(self._inference):
            for number, item, section in self._own_sections():
                item.take(section, self._run(number), self._parts[number].start)

    def _own_sections(self) -> Iterator[tuple[int, SharedItem, Section]]:
        for number, part in enumerate(self._parts):
            for item in (self._items[index] for index in part.items):
                yield number, item, item.section(part.start, part.stop)

    def _object_start(self, number: int) -> int:
        return self._stored[number].base + self._parts[number].start

    def _own_memory(self) -> memoryview | None:
        """Memory of this rank's own item, if that is all of the piece."""
        if len(self._parts) != 1 or len(self._parts[0].items) != 1:
            return None
        part, item = self._parts[0], self._items[self._parts[0].items[0]]
        size = item.stored.itemsize
        if not contains(item.stored.sizes, item.box, part.start // size, part.stop // size):
            return None
        return item.memory_of(item.section(part.start, part.stop))

    def _verify(self, number: int, target: Target) -> int:
        """The checksum of a part; damage on the way is given one more chance, damage at rest is an error."""
        part, stored = self._parts[number], self._stored[number]
        item = self._items[part.items[0]]
        expected = None
        if item.blocks is not None:
            checked = widen(part.start, part.stop, stored.nbytes, item.blocks)
            expected = checked.crc if (checked.start, checked.stop) == (part.start, part.stop) else None
        if expected is None or target.crc == expected:
            return target.crc or 0
        logger.warning("checksum of %r in %s does not match; fetching it again", item.name, self._url)
        self._distrust(stored.path)
        start = self._object_start(number)
        again = Target(target.view, checksum=True)
        self._receive(stored.path, start, [again])
        if again.crc != expected:
            raise errors.CorruptCheckpointError(
                f"{item.name!r} in {self._url}: bytes {start} to {start + again.view.nbytes - 1} of {stored.path} have "
                f"CRC-64/NVME {crc_hex(again.crc or 0)}, recorded was {crc_hex(expected)}, twice. The stored data is "
                "damaged: load an earlier checkpoint",
                url=self._url,
            )
        return expected

    def message(self, peer: int) -> tuple[torch.Tensor, int]:
        """What ``peer`` gets, and its CRC-64/NVME: the buffer itself where that is all of it."""
        sections = self._sections[peer]
        sizes = [part.stop - part.start for part in self._parts]
        if all(box is None for _, box, _, _ in sections):
            return self._buffer, combine_crc64nvme(zip(self._crcs, sizes, strict=True))
        starts, length = lay_out([size for *_, size in sections])
        packed = torch.empty(length, dtype=torch.uint8, device="cpu")
        crc = 0
        for (number, box, section, size), at in zip(sections, starts, strict=True):
            into, run = packed[at : at + size], self._run(number)
            if box is None:
                into.copy_(run)
            else:
                self._pack(number, box, section, run, into)
            if size:
                crc = crc64nvme(view_bytes(into), crc)
        return packed, crc

    def _run(self, number: int) -> torch.Tensor:
        """The bytes of a part."""
        start, part = self._starts[number], self._parts[number]
        return self._buffer[start : start + part.stop - part.start]

    def _pack(self, number: int, box: Box, section: Section, run: torch.Tensor, into: torch.Tensor) -> None:
        item, part = self._items[self._parts[number].items[0]], self._parts[number]
        elements, done = into.view(item.dtype), 0
        for strip, source in strips_in(item.stored, box, section, run.view(item.dtype), part.start):
            elements[done : done + strip.numel].view(strip.lengths).copy_(source)
            done += strip.numel

    def sent(self) -> None:
        """Nobody reads its memory any more: this rank's own items may be handed on."""
        self._buffer = _nothing()
        with torch.inference_mode(self._inference):
            for _, item, section in self._own_sections():
                item.arrived(section)
        self._items, self._stored = {}, []


class ReceivedPiece:
    """A piece that another rank sends.

    Args:
        piece: as the assignment has it.
        items: of this rank.
        url: of the checkpoint, for errors.
    """

    def __init__(self, piece: SharedPiece, items: Items, url: str) -> None:
        self.number, self.owner, self._url = piece.number, piece.owner, url
        self._inference = torch.is_inference_mode_enabled()
        self._sections: list[tuple[SharedItem, Section, int]] = []
        for part in piece.parts:
            for item in (items[number] for number in part.items):
                section = item.section(part.start, part.stop)
                self._sections.append((item, section, item.section_bytes(section)))
        self._starts, self.nbytes = lay_out([size for *_, size in self._sections])
        if not _total(self._sections):
            self.nbytes = 0
        self._buffer = _nothing()
        self._direct = False

    def buffer(self) -> torch.Tensor:
        """Where to receive it: the item's own memory, where that is one run."""
        memory = None
        if len(self._sections) == 1:
            item, section, _ = self._sections[0]
            memory = item.memory_of(section)
        self._direct = memory is not None
        self._buffer = (
            torch.frombuffer(memory, dtype=torch.uint8)
            if memory is not None
            else torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        )
        return self._buffer

    def received(self, crc: int) -> None:
        """Bring it to its place.

        Raises:
            PeerReadError: these are not the bytes that were sent.
        """
        buffer, self._buffer = self._buffer, _nothing()
        views = [buffer[at : at + size] for at, (*_, size) in zip(self._starts, self._sections, strict=True)]
        found = 0
        for view in views:
            if view.numel():
                found = crc64nvme(view_bytes(view), found)
        if found != crc:
            raise errors.PeerReadError(
                f"{self._sections[0][0].name!r} in {self._url} was damaged on its way from rank {self.owner}: its "
                f"CRC-64/NVME is {crc_hex(found)}, sent was {crc_hex(crc)}. Remedy: load again",
                url=self._url,
                rank=self.owner,
            )
        with torch.inference_mode(self._inference):
            for (item, section, _), view in zip(self._sections, views, strict=True):
                if not self._direct:
                    item.scatter(section, view)
                item.arrived(section)


def _total(sections: Sequence[tuple[object, ...]]) -> int:
    return sum(int(section[-1]) for section in sections)  # type: ignore[call-overload]


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")
