"""Where the bytes of one request are received: in place, or in a buffer from which they are brought to their place.

In place are long runs of bytes whose destination is one run of CPU memory. Everything else goes through a buffer of the
thread that fetches: tensors on a device, strided, of another dtype; and short runs, many of which are received in one
call and copied, which costs less than a call for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from dcp_s3.checksum import crc64nvme
from dcp_s3.load.item_transfer import ItemTransfer
from dcp_s3.load.plan import ReadRequest, Segment
from dcp_s3.s3.download import Target
from dcp_s3.tensor_memory import view_bytes

# Bytes from which on a run is received by itself.
_LONG = 64 * 2**10
_ALIGNMENT = 64


class Buffer:
    """Memory of one thread through which requests go; grows to the largest.

    Args:
        pin: whether it is to be page-locked, for copies to a device.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._tensor = torch.empty(0, dtype=torch.uint8)
        self._view = memoryview(b"")

    def reserve(self, size: int) -> None:
        """Make it ``size`` bytes at least; its contents are lost."""
        if self._tensor.numel() < size:
            self._tensor, self._view = torch.empty(0, dtype=torch.uint8), memoryview(b"")
            self._tensor = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
            self._view = view_bytes(self._tensor)

    def view(self, start: int, stop: int) -> memoryview:
        """The bytes from ``start`` to ``stop``."""
        return self._view[start:stop]

    def tensor(self, start: int, stop: int) -> torch.Tensor:
        """The same as a tensor, uint8."""
        return self._tensor[start:stop]


class _Run(NamedTuple):
    """A run of bytes of one item that is received by itself.

    Attributes:
        start: first byte within the request.
        stop: the byte behind the last.
        transfer: the item.
        offset: what the item calls the first byte.
        in_place: whether it is received where it belongs.
    """

    start: int
    stop: int
    transfer: ItemTransfer
    offset: int
    in_place: bool


class _Piece(NamedTuple):
    """A run of bytes of one item, once it has been received.

    Attributes:
        transfer: the item.
        offset: what the item calls the first byte.
        length: bytes.
        target: the memory of its own that it was received in, None if others are in the same.
        place: where it is in the buffer, None if it is in place.
    """

    transfer: ItemTransfer
    offset: int
    length: int
    target: Target | None
    place: int | None


class Reception:
    """The memory that one request is received in, and what is to be done when it is there.

    Args:
        request: the request.
        transfers: all items of the plan.
        buffer: of this thread; what is in it is lost.

    Attributes:
        targets: to be filled, in order.
    """

    def __init__(self, request: ReadRequest, transfers: Sequence[ItemTransfer], buffer: Buffer) -> None:
        self._buffer = buffer
        self._pieces: list[_Piece] = []
        self.targets: list[Target] = []
        runs = list(_long_runs(request, transfers))
        buffered = request.length - sum([run.stop - run.start for run in runs if run.in_place])
        if buffered:
            buffer.reserve(buffered + _ALIGNMENT * (2 * len(runs) + 1))
        regions: list[tuple[int, int]] = []  # of many runs: (first byte within the request, place in the buffer)
        at = place = 0
        for start, stop, transfer, offset, in_place in runs:
            if at < start:
                regions.append((at, place))
                self.targets.append(Target(buffer.view(place, place + start - at)))
                place = _aligned(place + start - at)
            if in_place:
                target = Target(transfer.memory(offset, offset + stop - start), checksum=transfer.checked)
                self._pieces.append(_Piece(transfer, offset, stop - start, target, None))
            else:
                target = Target(buffer.view(place, place + stop - start), checksum=transfer.checked)
                self._pieces.append(_Piece(transfer, offset, stop - start, target, place))
                place = _aligned(place + stop - start)
            self.targets.append(target)
            at = stop
        if at < request.length:
            regions.append((at, place))
            self.targets.append(Target(buffer.view(place, place + request.length - at)))
        self._add_short(request, transfers, regions)

    def _add_short(
        self, request: ReadRequest, transfers: Sequence[ItemTransfer], regions: Sequence[tuple[int, int]]
    ) -> None:
        region = 0
        for segment in request.segments:
            if _is_short(segment, request):
                while region + 1 < len(regions) and regions[region + 1][0] <= segment.start:
                    region += 1
                first, place = regions[region]
                item, start, length, offset = segment
                self._pieces.append(_Piece(transfers[item], offset, length, None, place + start - first))

    def deliver(self) -> list[ItemTransfer]:
        """Bring what was received to its place; the items of which these were the last bytes.

        A range that came in one piece and is damaged never gets there.
        """
        complete = []
        for transfer, offset, length, target, place in self._pieces:
            crc = 0
            if target is not None:
                crc = target.crc or 0
            elif place is not None and transfer.checked:
                crc = crc64nvme(self._buffer.view(place, place + length))
            if place is not None and not transfer.is_damaged(offset, length, crc):
                self._place(transfer, offset, length, place)
            if transfer.arrived(offset, length, crc):
                complete.append(transfer)
        return complete

    def _place(self, transfer: ItemTransfer, offset: int, length: int, place: int) -> None:
        if transfer.owned is None:
            if not transfer.take(offset, self._buffer.view(place, place + length)):
                transfer.put(offset, self._buffer.tensor(place, place + length))
            return
        start, stop = max(offset, transfer.owned[0]), min(offset + length, transfer.owned[1])
        if start < stop:
            first = place + start - offset
            transfer.memory(start, stop)[:] = self._buffer.view(first, first + stop - start)
        if offset < start:
            transfer.put(offset, self._buffer.tensor(place, place + min(start - offset, length)))


def _is_short(segment: Segment, request: ReadRequest) -> bool:
    return segment.length < _LONG or request.shared


def _long_runs(request: ReadRequest, transfers: Sequence[ItemTransfer]) -> Iterator[_Run]:
    for segment in request.segments:
        if _is_short(segment, request):
            continue
        item, first, length, offset = segment
        transfer, stop = transfers[item], offset + length
        # What is fetched for a checksum only stands before and behind what has its place in memory.
        start_owned, stop_owned = transfer.owned or (stop, stop)
        low, high = (min(max(at, offset), stop) for at in (start_owned, stop_owned))
        for start, end, in_place in ((offset, low, False), (low, high, True), (high, stop, False)):
            if start < end:
                yield _Run(first + start - offset, first + end - offset, transfer, start, in_place)


def _aligned(place: int) -> int:
    return -(-place // _ALIGNMENT) * _ALIGNMENT
