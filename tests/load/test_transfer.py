"""Items, from the bytes of their requests to their place: without a server."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_s3.format.blocks import Blocks, cuts_between, make_storage_info, pack_crcs
from dcp_s3.load.boxes import Box
from dcp_s3.load.fetch import Buffer, Reception
from dcp_s3.load.items import ItemTransfer, TensorTransfer, Transfer
from dcp_s3.load.plan import ReadRequest, StoredChunk, plan_requests, ranges_of_box
from dcp_s3.memory import crc64nvme, view_bytes
from tests.load.test_plan import boxes_in

_BLOCK = 64
_PATH = "__0_0.distcp"


@pytest.fixture(autouse=True, scope="module")
def _runs_of_a_few_bytes_are_long() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcp_s3.load.fetch._LONG", 100)
        yield


class Item:
    """A saved chunk, a box of it, and a tensor to load that into."""

    def __init__(self, chunk: torch.Tensor, start: int, box: Box, kind: str) -> None:
        self.chunk, self.start, self.box = chunk, start, box
        self.expected = chunk
        for dim, (offset, length) in enumerate(zip(*box, strict=True)):
            self.expected = self.expected.narrow(dim, offset, length)
        if kind == "cast":
            self.expected = self.expected.to(torch.float64)
        self.target = torch.zeros_like(self.expected, memory_format=torch.contiguous_format)
        if kind == "strided" and self.target.dim():
            self.target = torch.zeros(*self.target.shape, 2, dtype=self.target.dtype)[..., 1]

    def transfer(self, *, checked: bool, max_gap: int) -> ItemTransfer:
        data = bytes(view_bytes(self.chunk.contiguous()))
        blocks = None
        if checked and data:
            cuts = cuts_between(0, len(data), _BLOCK)
            blocks = Blocks(_BLOCK, pack_crcs(crc64nvme(data[:cut]) for cut in cuts), crc64nvme(data))
        sizes, dtype = self.chunk.shape, self.chunk.dtype
        ranges = ranges_of_box(sizes, self.box, dtype.itemsize, blocks=blocks, max_gap=max_gap)
        index = MetadataIndex("w", sizes)
        offsets, lengths = map(torch.Size, self.box)
        item = ReadItem(LoadItemType.TENSOR, index, offsets, index, offsets, lengths)
        stored = StoredChunk(
            make_storage_info(_PATH, self.start, len(data)), self.start, len(data), sizes, dtype, False
        )
        return TensorTransfer(item, stored, self.target, self.box, ranges)


@st.composite
def objects(draw: st.DrawFn) -> tuple[bytes, list[Item]]:
    """An object of chunks, and items that load boxes of them: several from the same chunk, too."""
    data, items = b"", []
    for _ in range(draw(st.integers(1, 4))):
        sizes = tuple(draw(st.lists(st.integers(1, 12), max_size=3)))
        dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128]))
        numbers = torch.arange(math.prod(sizes), dtype=torch.float32) % 251 + 1
        chunk = numbers.to(dtype).reshape(sizes)
        data += b"x" * draw(st.integers(0, 70))
        kinds = ["plain", "strided"] if dtype.is_complex else ["plain", "strided", "cast"]
        items += [
            Item(chunk, len(data), draw(boxes_in(sizes)), draw(st.sampled_from(kinds)))
            for _ in range(draw(st.integers(1, 3)))
        ]
        data += bytes(view_bytes(chunk.contiguous()))
    return data, items


def receive_all(data: bytes, transfers: Sequence[Transfer], *, max_request: int, max_gap: int, seed: int) -> None:
    segments = [segment for transfer in transfers for segment in transfer.segments()]
    requests = plan_requests(segments, max_request=max_request, max_gap=max_gap)
    random.Random(seed).shuffle(requests)
    buffer = Buffer(pin=False)
    complete: list[Transfer] = []
    for request in requests:
        complete += receive(data, request, buffer)
    assert sorted(map(id, complete)) == sorted(id(transfer) for transfer in transfers if transfer.ranges)


def receive(data: bytes, request: ReadRequest, buffer: Buffer) -> list[Transfer]:
    reception = Reception(request, buffer)
    at = request.start
    for target in reception.targets:
        target.view[:] = data[at : at + target.view.nbytes]
        target.received(0, target.view.nbytes)
        at += target.view.nbytes
    assert at == request.start + request.length
    return reception.deliver()


@given(objects(), st.booleans(), st.sampled_from([64, 128, 1000]), st.sampled_from([0, 30, 500]), st.integers(0, 99))
def test_every_byte_gets_to_its_place(
    stored: tuple[bytes, list[Item]], checked: bool, max_request: int, max_gap: int, seed: int
) -> None:
    data, items = stored
    transfers = [item.transfer(checked=checked, max_gap=max_gap) for item in items]
    receive_all(data, transfers, max_request=max_request, max_gap=max_gap, seed=seed)
    for item, transfer in zip(items, transfers, strict=True):
        assert torch.equal(item.target, item.expected)
        assert transfer.mismatches() == []
        assert transfer.checked == (checked and item.box.numel > 0)


@given(objects(), st.sampled_from([64, 1000]), st.data())
def test_a_changed_byte_that_is_fetched_is_noticed_and_repaired(
    stored: tuple[bytes, list[Item]], max_request: int, draw: st.DataObject
) -> None:
    data, items = stored
    transfers = [item.transfer(checked=True, max_gap=0) for item in items]
    at = draw.draw(st.integers(0, len(data) - 1))
    damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    receive_all(damaged, transfers, max_request=max_request, max_gap=0, seed=0)
    for item, transfer in zip(items, transfers, strict=True):
        hit = [part for part in transfer.ranges if part.start <= at - item.start < part.stop]
        wrong = list(transfer.mismatches())
        assert [part for part, _ in wrong] == hit
        for part, found in wrong:
            assert found != part.crc
            transfer.forget(part)
            (request,) = plan_requests(transfer.segments([part]), max_request=10**6, max_gap=0)
            assert request.start <= at < request.start + request.length
            assert receive(data, request, Buffer(pin=False)) == [transfer]
        assert transfer.mismatches() == []
        assert torch.equal(item.target, item.expected)


def test_a_range_that_came_in_one_piece_and_is_damaged_never_gets_to_its_place() -> None:
    item = Item(torch.arange(6, dtype=torch.float32), 0, Box((0,), (6,)), "strided")
    transfer = item.transfer(checked=True, max_gap=0)
    receive_all(bytes(24), [transfer], max_request=10**6, max_gap=0, seed=0)
    assert len(transfer.mismatches()) == 1
    assert not item.target.any()
