"""Bytes of one object on their way to their place: where they go, and whether they are what was saved."""

from __future__ import annotations

import bisect
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import torch

from dcp_s3.checksum import combine_crc64nvme, crc64nvme
from dcp_s3.format.blocks import Range
from dcp_s3.load.plan import ReadRequest, Segment
from dcp_s3.memory import ReadTarget
from dcp_s3.tensor_memory import view_bytes


class Transfer(ABC):
    """Ranges of one object's bytes: where they go, how many are missing, and their checksums.

    Offsets count from an origin that the transfer chooses, for example a saved chunk's first byte.

    Args:
        path: path of the object, relative to the checkpoint.
        base: position in the object of offset 0.
        ranges: ranges to fetch, in order, not touching each other.
        owned: offsets (start, stop) of the bytes that can be received in `memory`, in place; None if there are none.
        checked: whether to compute checksums although none is recorded.

    Attributes:
        length: number of bytes to fetch.
        missing: number of bytes that have not arrived.
        fetched_again: whether this is the second try, because a checksum did not match.
    """

    __slots__ = ("_crcs", "_lock", "base", "checked", "fetched_again", "length", "missing", "owned", "path", "ranges")

    def __init__(
        self, path: str, base: int, ranges: Sequence[Range], owned: tuple[int, int] | None, *, checked: bool = False
    ) -> None:
        self.path, self.base, self.ranges, self.owned = path, base, ranges, owned
        length = 0  # one loop: there may be many transfers, mostly of one range
        for start, stop, crc in ranges:
            length += stop - start
            checked = checked or crc is not None
        self.length = self.missing = length
        self.checked = checked
        self.fetched_again = False
        self._crcs: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    def segments(self, ranges: Iterable[Range] | None = None) -> list[Segment]:
        """The segments of the object that ``ranges`` are; None: all ranges."""
        base = self.base
        return [Segment(base + start, base + stop, self) for start, stop, _ in ranges or self.ranges]

    @abstractmethod
    def name_of(self, part: Range) -> str:
        """The name of what a range belongs to, for errors."""

    def memory(self, start: int, stop: int) -> memoryview:
        """The memory where bytes within `owned` belong. To be overridden where there are such bytes."""
        raise NotImplementedError

    def place(self, offset: int, data: memoryview) -> None:
        """Put bytes that were received elsewhere in place: here, those within `owned`.

        They are whole elements; ``data`` is reused afterwards.
        """
        if self.owned is not None:
            start, stop = max(offset, self.owned[0]), min(offset + data.nbytes, self.owned[1])
            if start < stop:
                self.memory(start, stop)[:] = data[start - offset : stop - offset]

    def arrived(self, offset: int, length: int, crc: int) -> bool:
        """Count bytes that are in place and remember their checksum; returns True for the last ones."""
        with self._lock:
            self._crcs.append((offset, crc, length))
            self.missing -= length
            return self.missing == 0

    def is_damaged(self, offset: int, length: int, crc: int) -> bool:
        """Whether these bytes are a whole range, with the wrong checksum."""
        at = bisect.bisect_left(self.ranges, (offset,))
        start, stop, expected = self.ranges[at] if at < len(self.ranges) else (0, 0, None)
        return (start, stop) == (offset, offset + length) and expected is not None and expected != crc

    def mismatches(self) -> Sequence[tuple[Range, int]]:
        """The ranges whose bytes are not what was saved, with the CRC-64/NVME that was found. For when all are here."""
        if not self.checked:
            return []
        pairs = zip(self.ranges, self.checksums(), strict=True)
        return [(part, crc) for part, crc in pairs if part.crc is not None and part.crc != crc]

    def checksums(self) -> list[int]:
        """CRC-64/NVME of each range, as it arrived."""
        if len(self._crcs) == 1:  # most of them, and there may be many
            return [self._crcs[0][1]]
        pieces = sorted(self._crcs)
        found, at = [], 0
        for _, stop, _ in self.ranges:
            first = at
            while at < len(pieces) and pieces[at][0] < stop:
                at += 1
            found.append(combine_crc64nvme((crc, n) for _, crc, n in pieces[first:at]))
        return found

    def forget(self, part: Range) -> None:
        """Prepare to receive a range again."""
        with self._lock:
            self._crcs = [piece for piece in self._crcs if not part.start <= piece[0] < part.stop]
            self.missing += part.stop - part.start

    def finish(self) -> Transfer | None:
        """Complete the transfer: all bytes are in place, and verified.

        Returns:
            A transfer to fetch instead, if the bytes are not where they were expected.
        """
        return None


class Buffer:
    """Memory of one thread that requests go through; grows to the largest. ``pin``: page-locked, for a device."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._view = memoryview(b"")

    def reserve(self, size: int) -> memoryview:
        """``size`` bytes at least; what was in it is lost."""
        if self._view.nbytes < size:
            self._view = memoryview(b"")  # the old memory is freed first
            self._view = view_bytes(torch.empty(size, dtype=torch.uint8, pin_memory=self._pin))
        return self._view


# Runs of at least this many bytes are received by themselves.
_LONG = 64 * 2**10
_ALIGNMENT = 64


class Reception:
    """The memory that receives one request, and the work to do when it has arrived.

    Attributes:
        targets: memory to be filled, in order.
    """

    def __init__(self, request: ReadRequest, buffer: Buffer) -> None:
        self.targets: list[ReadTarget] = []
        self._received: list[tuple[Segment, ReadTarget | None, memoryview | None]] = []
        """Each with the target that received it alone, if one did, and its part of the buffer, if it is in there."""
        runs = list(_runs(request))
        rest = memoryview(b"")
        if size := sum([_aligned(stop - start) for start, stop, _, direct in runs if not direct]):
            rest = buffer.reserve(size)
        regions: list[tuple[int, memoryview]] = []  # many runs: first byte in the object, memory
        for start, stop, transfer, direct in runs:
            if direct and transfer is not None:
                view = transfer.memory(start - transfer.base, stop - transfer.base)
            else:
                view = rest[: stop - start]
                rest = rest[_aligned(stop - start) :]
            target = ReadTarget(view, checksum=transfer is not None and transfer.checked)
            self.targets.append(target)
            if transfer is None:
                regions.append((start, view))
            else:
                self._received.append((Segment(start, stop, transfer), target, None if direct else view))
        region = 0
        for segment in request.segments:
            start, stop, _ = segment
            if start < stop and _is_long(segment, request):
                continue
            while region + 1 < len(regions) and regions[region + 1][0] <= start:
                region += 1
            view = regions[region][1][start - regions[region][0] :][: stop - start] if start < stop else memoryview(b"")
            self._received.append((segment, None, view))

    def deliver(self) -> list[Transfer]:
        """Put what was received in place; returns the transfers that this completed.

        A range that came into the buffer in one piece and is damaged is never put in place.
        """
        complete = []
        for (start, stop, transfer), target, view in self._received:
            crc = 0
            if target is not None:
                crc = target.crc or 0
            elif view is not None and transfer.checked:
                crc = crc64nvme(view)
            offset = start - transfer.base
            if view is not None and not (transfer.checked and transfer.is_damaged(offset, stop - start, crc)):
                transfer.place(offset, view)
            if transfer.arrived(offset, stop - start, crc):
                complete.append(transfer)
        return complete


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _is_long(segment: Segment, request: ReadRequest) -> bool:
    return segment[1] - segment[0] >= _LONG and not request.shared


def _runs(request: ReadRequest) -> Iterator[tuple[int, int, Transfer | None, bool]]:
    """Cut a request into runs, each received by itself: first byte, end, transfer, and whether in place.

    Short segments and gaps between two long ones are one run, without a transfer.
    """
    at, end = request.start, request.start + request.length
    for segment in request.segments:
        if not _is_long(segment, request):
            continue
        start, stop, transfer = segment
        if at < start:
            yield at, start, None, False
        # Bytes fetched only for a checksum lie before and after those that have a place in memory.
        owned = (stop, stop) if transfer.owned is None else [transfer.base + offset for offset in transfer.owned]
        low, high = (min(max(place, start), stop) for place in owned)
        for first, last, direct in ((start, low, False), (low, high, True), (high, stop, False)):
            if first < last:
                yield first, last, transfer, direct
        at = stop
    if at < end:
        yield at, end, None, False
