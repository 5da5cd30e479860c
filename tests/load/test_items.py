"""Which bytes a load fetches, in which requests, and how they get to their place: without a server."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_s3.format.blocks import Blocks, cuts_between, make_storage_info, pack_crcs
from dcp_s3.load.fetch import Buffer, Reception
from dcp_s3.load.items import ItemTransfer, TensorTransfer, Transfer
from dcp_s3.load.plan import (
    SMALL_HALF,
    Box,
    ReadRequest,
    Segment,
    StoredChunk,
    covering_run,
    halve,
    plan_requests,
    ranges_of_box,
)
from dcp_s3.memory import crc64nvme, view_bytes

_BLOCK = 64


@st.composite
def boxes_in(draw: st.DrawFn, sizes: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, max(0, size - 1))) for size in sizes)
    return Box(offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(sizes, offsets, strict=True)))


@st.composite
def chunks_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    sizes = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    return sizes, draw(boxes_in(sizes))


def positions(sizes: tuple[int, ...], box: Box) -> list[int]:
    """The elements of a box in the row-major order of its array."""
    found = torch.arange(math.prod(sizes)).reshape(sizes)
    for dim, (offset, length) in enumerate(zip(*box, strict=True)):
        found = found.narrow(dim, offset, length)
    return list(found.flatten().tolist())


@given(chunks_and_boxes())
def test_the_covering_run_is_the_smallest(chunk: tuple[tuple[int, ...], Box]) -> None:
    wanted = positions(*chunk)
    assert covering_run(*chunk) == ((min(wanted), max(wanted) + 1) if wanted else (0, 0))


@pytest.mark.parametrize(
    ("sizes", "offsets", "lengths"), [([3], (2,), (2,)), ([3], (-1,), (1,)), ([3, 3], (0,), (3,)), ([3], (0,), (-1,))]
)
def test_a_box_outside_of_its_chunk(sizes: list[int], offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not inside"):
        covering_run(sizes, Box(offsets, lengths))


@given(chunks_and_boxes(), st.sampled_from([1, 2, 4, 8]), st.integers(0, 200), st.booleans())
def test_the_ranges_of_a_box_cover_it_lie_apart_and_are_checked(
    chunk: tuple[tuple[int, ...], Box], element_size: int, max_gap: int, checked: bool
) -> None:
    sizes, box = chunk
    nbytes = math.prod(sizes) * element_size
    data = bytes(index * 7 % 251 for index in range(nbytes))
    cuts = cuts_between(0, nbytes, _BLOCK)
    blocks = Blocks(_BLOCK, pack_crcs(crc64nvme(data[:cut]) for cut in cuts), crc64nvme(data)) if checked else None
    found = ranges_of_box(sizes, box, element_size, blocks=blocks, max_gap=max_gap)
    wanted = [at * element_size + byte for at in positions(sizes, box) for byte in range(element_size)]
    fetched = [byte for part in found for byte in range(part.start, part.stop)]
    assert set(wanted) <= set(fetched) <= set(range(nbytes))
    assert len(fetched) == len(set(fetched))
    for part in found:
        inside = [byte for byte in wanted if part.start <= byte < part.stop]
        margin = _BLOCK - 1 if checked else 0
        assert part.start >= inside[0] - margin
        assert part.stop - 1 <= inside[-1] + margin
        assert all(b - a - 1 <= max_gap + 2 * margin for a, b in itertools.pairwise(inside))
        assert part.crc == (crc64nvme(data[part.start : part.stop]) if checked else None)
    if not checked:
        assert all(b.start - a.stop > max_gap - element_size for a, b in itertools.pairwise(found))


class Item(NamedTuple):
    number: int
    path: str


def segment(number: int, path: str, start: int, length: int) -> Segment:
    return Segment(start, start + length, Item(number, path))


@st.composite
def segments(draw: st.DrawFn) -> list[Segment]:
    number = draw(st.integers(0, 25))
    return [
        segment(i, draw(st.sampled_from("ab")), draw(st.integers(0, 5000)), draw(st.integers(1, 3000)))
        for i in range(number)
    ]


@given(segments(), st.integers(64, 2000), st.integers(0, 500))
def test_every_needed_byte_is_fetched_once_and_waste_is_bounded(
    wanted: list[Segment], max_request: int, max_gap: int
) -> None:
    requests = plan_requests(wanted, max_request=max_request, max_gap=max_gap)
    received: dict[int, list[tuple[int, int]]] = {each.item.number: [] for each in wanted}
    for request in requests:
        assert 0 < request.length <= max_request
        end = request.start
        for start, stop, item in request.segments:
            assert start < stop
            assert request.path == item.path
            received[item.number].append((start, stop))
            assert start - end <= max_gap
            assert start >= end or request.shared
            end = max(end, stop)
        assert request.segments[0].start == request.start
        assert end == request.start + request.length
        overlaps = (b.start < a.stop for a, b in itertools.combinations(request.segments, 2))
        assert request.shared == any(overlaps)
    for start, stop, item in wanted:
        pieces = sorted(received[item.number])
        assert (pieces[0][0], pieces[-1][1]) == (start, stop)
        assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    for path in "ab":
        spans = sorted((r.start, r.start + r.length) for r in requests if r.path == path)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert [request.length for request in requests] == sorted((r.length for r in requests), reverse=True)


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 60 * 2**20 // 64)), min_size=1, max_size=8),
    st.integers(1, 2**40),
)
def test_the_halves_of_a_request_have_its_segments(parts: list[tuple[int, int]], start: int) -> None:
    segments, at = [], start
    for gap, elements in parts:
        at += gap if segments else 0
        segments.append(Segment(at, at + 64 * elements, object()))
        at = segments[-1].stop
    request = ReadRequest("a", start, at - start, tuple(segments))
    halves = halve(request)
    if halves is None:
        # Small, or its middle is before the first element behind the first segment's start.
        assert request.length < 2 * SMALL_HALF or segments[0].stop > start + request.length // 2 - 64
        return
    assert request.length >= 2 * SMALL_HALF
    pieces = [segment for half in halves for segment in half.segments]
    for segment in segments:
        own = [piece for piece in pieces if piece.item is segment.item]
        assert own[0].start == segment.start
        assert own[-1].stop == segment.stop
        assert all(one.stop == other.start for one, other in itertools.pairwise(own))
        assert all((piece.start - segment.start) % 64 == 0 for piece in own)
    for half in halves:
        assert half.start == half.segments[0].start
        assert half.start + half.length == half.segments[-1].stop
        assert not half.shared
    assert halves[0].start + halves[0].length <= halves[1].start
    middle = request.start + request.length // 2
    assert halves[0].start + halves[0].length <= middle + 64


_PATH = "__0_0.distcp"


@pytest.fixture(autouse=True, scope="module")
def _runs_of_a_few_bytes_are_long() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcp_s3.load.fetch._LONG", 100)
        yield


class Placed:
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
def objects(draw: st.DrawFn) -> tuple[bytes, list[Placed]]:
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
            Placed(chunk, len(data), draw(boxes_in(sizes)), draw(st.sampled_from(kinds)))
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
    stored: tuple[bytes, list[Placed]], checked: bool, max_request: int, max_gap: int, seed: int
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
    stored: tuple[bytes, list[Placed]], max_request: int, draw: st.DataObject
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
    item = Placed(torch.arange(6, dtype=torch.float32), 0, Box((0,), (6,)), "strided")
    transfer = item.transfer(checked=True, max_gap=0)
    receive_all(bytes(24), [transfer], max_request=10**6, max_gap=0, seed=0)
    assert len(transfer.mismatches()) == 1
    assert not item.target.any()
