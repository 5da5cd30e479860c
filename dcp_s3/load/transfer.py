"""Bytes of one object on their way to their place: what the engine fetches, verifies and delivers."""

from __future__ import annotations

import bisect
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from dcp_s3 import errors
from dcp_s3.checksum import combine_crc64nvme, crc64nvme
from dcp_s3.format.blocks import Range
from dcp_s3.load.plan import ReadRequest, Segment
from dcp_s3.memory import ReadTarget
from dcp_s3.tensor_memory import view_bytes


class Transfer(ABC):
    """Ranges of one object's bytes: where they go, how many are missing, and whether they are what was saved.

    Offsets count from an origin that the transfer chooses, for example a saved chunk's first byte.

    Args:
        path: path of the object, relative to the checkpoint.
        base: position in the object of offset 0.
        ranges: ranges to fetch, in order, not touching each other.
        owned: offsets (start, stop) of the bytes that can be received in `memory`, in place; None if there are none.
        checked: whether to compute checksums; None: if one is recorded.

    Attributes:
        missing: number of bytes that have not arrived.
        fetched_again: whether this is the second try, because a checksum did not match.
    """

    __slots__ = ("_crcs", "_lock", "base", "checked", "fetched_again", "missing", "owned", "path", "ranges")

    def __init__(
        self,
        path: str,
        base: int,
        ranges: Sequence[Range],
        owned: tuple[int, int] | None,
        *,
        checked: bool | None = None,
    ) -> None:
        self.path = path
        self.base = base
        self.ranges = ranges
        self.owned = owned
        length, known = 0, False  # one loop: there may be many transfers, mostly of one range
        for start, stop, crc in ranges:
            length += stop - start
            known = known or crc is not None
        self.checked = known if checked is None else checked
        self.missing = length
        self.fetched_again = False
        self._crcs: list[tuple[int, int, int]] = []
        self._lock = threading.Lock()

    @property
    def length(self) -> int:
        """Number of bytes to fetch."""
        return sum([stop - start for start, stop, _ in self.ranges])

    def segments(self, ranges: Iterable[Range] | None = None) -> list[Segment]:
        """The segments of the object that ``ranges`` are; None: all ranges."""
        base = self.base
        wanted = self.ranges if ranges is None else ranges
        return [Segment(base + start, base + stop, self) for start, stop, _ in wanted]

    @abstractmethod
    def name_of(self, part: Range) -> str:
        """The name of what a range belongs to, for errors."""

    # --- bytes on their way ---------------------------------------------------------------------------

    def memory(self, start: int, stop: int) -> memoryview:
        """The memory where bytes within `owned` belong. To be overridden where there are such bytes."""
        raise AssertionError(f"{self.path}: no bytes are received in place")

    def put(self, offset: int, data: memoryview) -> None:
        """Put bytes outside of `owned` in place. To be overridden where there are such bytes.

        They are whole elements; ``data`` is reused afterwards.
        """
        raise AssertionError(f"{self.path}: all bytes are received in place")

    def place(self, offset: int, data: memoryview) -> None:
        """Put bytes that were received elsewhere in place."""
        if self.owned is None:
            self.put(offset, data)
            return
        end = offset + data.nbytes
        start, stop = self.owned
        if start <= offset and end <= stop:
            self.memory(offset, end)[:] = data
            return
        start, stop = max(offset, start), min(end, stop)
        if start < stop:
            self.memory(start, stop)[:] = data[start - offset : stop - offset]
        if offset < start:
            self.put(offset, data[: min(start, end) - offset])

    def arrived(self, offset: int, length: int, crc: int) -> bool:
        """Count bytes and remember their checksum; returns True for the last ones."""
        with self._lock:
            self._crcs.append((offset, crc, length))
            self.missing -= length
            return self.missing == 0

    def is_damaged(self, offset: int, length: int, crc: int) -> bool:
        """Whether these bytes are a whole range, with the wrong checksum."""
        if not self.checked:
            return False
        place = bisect.bisect_left(self.ranges, (offset,))
        if place == len(self.ranges):
            return False
        start, stop, expected = self.ranges[place]
        return (start, stop) == (offset, offset + length) and expected is not None and expected != crc

    # --- when all have arrived ------------------------------------------------------------------------

    def mismatches(self) -> Sequence[tuple[Range, int]]:
        """The ranges whose bytes are not what was saved, with the CRC-64/NVME that was found."""
        if not self.checked:
            return []
        if len(self.ranges) == len(self._crcs) == 1:  # most of them, and there may be many
            part, (_, crc, _) = self.ranges[0], self._crcs[0]
            return [] if part.crc is None or part.crc == crc else [(part, crc)]
        return [
            (part, crc)
            for part, crc in zip(self.ranges, self.checksums(), strict=True)
            if part.crc is not None and part.crc != crc
        ]

    def checksums(self) -> list[int]:
        """CRC-64/NVME of each range, as it arrived."""
        pieces = sorted(self._crcs)
        found, at = [], 0
        for _, stop, _ in self.ranges:
            first = at
            while at < len(pieces) and pieces[at][0] < stop:
                at += 1
            one = at - first == 1
            found.append(pieces[first][1] if one else combine_crc64nvme((crc, n) for _, crc, n in pieces[first:at]))
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

    def give_up(self, error: errors.CorruptCheckpointError) -> None:
        """Raise ``error``, or note it: the object has changed, or a range was damaged twice."""
        try:
            raise error
        finally:
            del error  # its traceback has this frame: no cycle


# Runs of at least this many bytes are received by themselves.
_LONG = 64 * 2**10
_ALIGNMENT = 64


class Buffer:
    """Memory of one thread that requests go through; grows to the largest.

    Args:
        pin: whether to page-lock it, for copies to a device.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._view = memoryview(b"")

    def reserve(self, size: int) -> None:
        """Make it ``size`` bytes at least; its contents are lost."""
        if self._view.nbytes < size:
            self._view = memoryview(b"")  # the old memory is freed first
            self._view = view_bytes(torch.empty(size, dtype=torch.uint8, pin_memory=self._pin))

    def view(self, start: int, stop: int) -> memoryview:
        """The bytes from ``start`` to ``stop``."""
        return self._view[start:stop]


class _ReceivedSegment(NamedTuple):
    """A segment, or a part of one, once received."""

    segment: Segment
    target: ReadTarget | None  # memory that received it alone, None if it shares memory with others
    place: int | None  # offset of its first byte in the buffer, None if it is in place


class Reception:
    """The memory that receives one request, and the work to do when it has arrived.

    Args:
        request: request whose items are of class `Transfer`.
        buffer: buffer of this thread; its contents are lost.

    Attributes:
        targets: memory to be filled, in order.
    """

    def __init__(self, request: ReadRequest, buffer: Buffer) -> None:
        self._buffer = buffer
        self._received: list[_ReceivedSegment] = []
        self.targets: list[ReadTarget] = []
        runs = list(_long_runs(request))
        buffered = request.length - sum([run.stop - run.start for run, in_place in runs if in_place])
        if buffered:
            buffer.reserve(buffered + _ALIGNMENT * (2 * len(runs) + 1))
        regions: list[tuple[int, int]] = []  # many runs: (first byte in the object, place in the buffer)
        at, place = request.start, 0
        for run, in_place in runs:
            (start, stop, transfer), size = run, run.stop - run.start
            if at < start:
                regions.append((at, place))
                self.targets.append(ReadTarget(buffer.view(place, place + start - at)))
                place = _aligned(place + start - at)
            if in_place:
                memory = transfer.memory(start - transfer.base, stop - transfer.base)
                target = ReadTarget(memory, checksum=transfer.checked)
                self._received.append(_ReceivedSegment(run, target, None))
            else:
                target = ReadTarget(buffer.view(place, place + size), checksum=transfer.checked)
                self._received.append(_ReceivedSegment(run, target, place))
                place = _aligned(place + size)
            self.targets.append(target)
            at = stop
        end = request.start + request.length
        if at < end:
            regions.append((at, place))
            self.targets.append(ReadTarget(buffer.view(place, place + end - at)))
        self._add_short(request, regions)

    def _add_short(self, request: ReadRequest, regions: Sequence[tuple[int, int]]) -> None:
        region = 0
        for segment in request.segments:
            if _is_short(segment, request):
                start = segment[0]
                if start == segment[1]:
                    self._received.append(_ReceivedSegment(segment, None, None))
                    continue
                while region + 1 < len(regions) and regions[region + 1][0] <= start:
                    region += 1
                first, place = regions[region]
                self._received.append(_ReceivedSegment(segment, None, place + start - first))

    def deliver(self) -> list[Transfer]:
        """Put what was received in place; returns the transfers that this completed.

        A range that came in one piece and is damaged is never put in place.
        """
        complete = []
        view = self._buffer.view
        for (start, stop, transfer), target, place in self._received:
            offset, length, crc = start - transfer.base, stop - start, 0
            if place is None:
                crc = (target.crc or 0) if target is not None else 0
            else:
                data = view(place, place + length)
                if target is not None:
                    crc = target.crc or 0
                elif transfer.checked:
                    crc = crc64nvme(data)
                if not transfer.is_damaged(offset, length, crc):
                    transfer.place(offset, data)
            if transfer.arrived(offset, length, crc):
                complete.append(transfer)
        return complete


def _is_short(segment: Segment, request: ReadRequest) -> bool:
    return segment[1] - segment[0] < _LONG or request.shared


def _long_runs(request: ReadRequest) -> Iterator[tuple[Segment, bool]]:
    """Yield the runs that are received by themselves, and whether in place."""
    for segment in request.segments:
        if _is_short(segment, request):
            continue
        start, stop, transfer = segment
        # Bytes fetched only for a checksum lie before and after those that have a place in memory.
        owned = (stop, stop) if transfer.owned is None else [transfer.base + offset for offset in transfer.owned]
        low, high = (min(max(at, start), stop) for at in owned)
        for first, end, in_place in ((start, low, False), (low, high, True), (high, stop, False)):
            if first < end:
                yield Segment(first, end, transfer), in_place


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT
