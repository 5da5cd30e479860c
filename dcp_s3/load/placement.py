"""The memory that receives one request's bytes: in place, or a buffer from which they are copied to their place.

Long runs of bytes are received in place if their destination is one run of CPU memory. Everything else goes through a
buffer of the fetching thread: tensors that are on a device, strided or of another dtype; and short runs. Many of these
are received in one call and copied, which costs less than one call each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from dcp_s3.checksum import crc64nvme
from dcp_s3.load.plan import ReadRequest, Segment
from dcp_s3.load.transfer import Transfer
from dcp_s3.s3.download import ReadTarget
from dcp_s3.tensor_memory import view_bytes

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
