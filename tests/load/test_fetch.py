"""Which bytes a load fetches, how they get to their place, and when it gives up: without a server."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_s3 import errors
from dcp_s3.format.blocks import Blocks, Range, cuts_between, make_storage_info, pack_crcs
from dcp_s3.load.items import Transfer
from dcp_s3.load.plan import Box, ReadRequest, StoredChunk, halve, plan_requests, ranges_of_box
from dcp_s3.memory import crc64nvme, view_bytes
from tests.load.sources import URL, MemoryFetcher

_BLOCK = 64
_PATH = "__0_0.distcp"


@st.composite
def boxes_in(draw: st.DrawFn, sizes: tuple[int, ...]) -> Box:
    offsets = tuple(draw(st.integers(0, max(0, size - 1))) for size in sizes)
    return Box(offsets, tuple(draw(st.integers(0, n - o)) for n, o in zip(sizes, offsets, strict=True)))


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

    def transfer(self, *, checked: bool, max_gap: int) -> Transfer:
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
        return Transfer(item, stored, self.target, ranges, self.target, box=self.box)


@st.composite
def objects(draw: st.DrawFn) -> tuple[bytes, list[Placed]]:
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
    with mock.patch("dcp_s3.load.plan.SMALL_HALF", 100):  # as where there are more threads than requests
        requests = [half for request in requests for half in halve(request) or (request,)]
    for request in requests:
        assert request.length <= max_request
        end = request.start
        for start, stop, _ in request.segments:
            assert start - end <= max_gap
            end = max(end, stop)
    random.Random(seed).shuffle(requests)
    complete = [id(transfer) for request in requests for transfer in received(data, request)]
    assert sorted(complete) == sorted(id(transfer) for transfer in transfers if transfer.ranges)


def received(data: bytes, request: ReadRequest) -> list[Transfer]:
    fetcher = MemoryFetcher({_PATH: data})
    complete = fetcher.receive(request)
    assert fetcher.asked == [(_PATH, request.start, request.length)]
    return complete


@given(objects(), st.booleans(), st.sampled_from([64, 128, 1000]), st.sampled_from([0, 30, 500]), st.integers(0, 99))
def test_every_byte_gets_to_its_place(
    stored: tuple[bytes, list[Placed]], checked: bool, max_request: int, max_gap: int, seed: int
) -> None:
    data, items = stored
    transfers = [item.transfer(checked=checked, max_gap=max_gap) for item in items]
    receive_all(data, transfers, max_request=max_request, max_gap=max_gap, seed=seed)
    for item, transfer in zip(items, transfers, strict=True):
        assert torch.equal(item.target, item.expected)
        assert transfer.verify() == []
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
        wrong = list(transfer.verify())
        assert [part for part, _ in wrong] == hit
        for part, found in wrong:
            assert found != part.crc
            (request,) = plan_requests(transfer.segments([part]), max_request=10**6, max_gap=0)
            assert request.start <= at < request.start + request.length
            assert received(data, request) == [transfer]
        assert transfer.verify() == []
        assert torch.equal(item.target, item.expected)


@pytest.mark.parametrize("kind", ["cast", "strided"])
def test_what_never_matches_does_not_get_into_a_tensor_through_a_buffer(kind: str) -> None:
    chunk = torch.arange(1, 101, dtype=torch.float32)
    item = Placed(chunk, 0, Box((0,), (100,)), kind)
    damaged = bytearray(view_bytes(chunk))
    damaged[-1] ^= 1
    with pytest.raises(errors.CorruptCheckpointError, match="twice"):
        fetch(MemoryFetcher({_PATH: bytes(damaged)}), requests_for(item.transfer(checked=True, max_gap=0)))
    assert not item.target.any()


# --- by threads ----------------------------------------------------------------------------------------

DATA = bytes(range(256)) * 2048
SIZE = len(DATA)


class Bytes(Transfer):
    """A run of an object into memory of its own."""

    def __init__(self, start: int, length: int, *, crc: int | None = None) -> None:
        crc = crc64nvme(DATA[start : start + length]) if crc is None else crc
        index, size = MetadataIndex(f"at{start}"), torch.Size((length,))
        item = ReadItem(LoadItemType.TENSOR, index, size, index, size, size)
        stored = StoredChunk(make_storage_info("a", start, length), start, length, size, torch.uint8, False)
        self.data = torch.zeros(length, dtype=torch.uint8)
        super().__init__(item, stored, self.data, [Range(0, length, crc)], self.data)


def requests_for(*transfers: Transfer, max_request: int = 2**17) -> list[ReadRequest]:
    return plan_requests([s for each in transfers for s in each.segments()], max_request=max_request, max_gap=0)


def fetch(source: MemoryFetcher, requests: list[ReadRequest], *, threads: int = 3) -> list[Transfer]:
    with contextlib.closing(source.fetch(requests, threads=threads)) as arrivals:
        return list(arrivals)


def flip(*places: int, times: int) -> Callable[[str, int, bytearray], None]:
    left = dict.fromkeys(places, times)

    def damage(_: str, start: int, data: bytearray) -> None:
        for place in places:
            if start <= place < start + len(data) and left[place]:
                left[place] -= 1
                data[place - start] ^= 1

    return damage


def test_where_there_are_more_threads_than_requests_they_get_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_s3.load.plan.SMALL_HALF", 1000)
    transfers = [Bytes(start, 100_000) for start in (0, 200_000)]
    source = MemoryFetcher({"a": DATA})
    finished = fetch(source, requests_for(*transfers), threads=8)
    assert sorted(each.base for each in finished) == [0, 200_000]
    assert all(bytes(view_bytes(each.data)) == DATA[each.base :][:100_000] for each in transfers)
    asked = sorted((start, start + length) for _, start, length in source.asked)
    assert sum(stop - start for start, stop in asked) == 200_000, "each byte once"
    assert len(asked) > 4


def test_gaps_beside_short_segments_are_not_in_their_checksums() -> None:
    transfers = [Bytes(0, 50), Bytes(60, 50), Bytes(200, 1000), Bytes(1250, 50)]
    (request,) = plan_requests([s for each in transfers for s in each.segments()], max_request=2**17, max_gap=100)
    source = MemoryFetcher({"a": DATA})
    assert sorted(each.base for each in source.receive(request)) == [0, 60, 200, 1250]
    for each in transfers:
        assert (each.verify(), bytes(view_bytes(each.data))) == ([], DATA[each.base :][: each.length])


def test_what_does_not_match_is_fetched_once_more_and_not_from_the_disk(caplog: pytest.LogCaptureFixture) -> None:
    source = MemoryFetcher({"a": DATA}, damage=flip(150_000, times=1))
    transfers = [Bytes(0, 100_000), Bytes(100_000, 100_000)]
    assert fetch(source, requests_for(*transfers)).count(transfers[1]) == 1
    assert bytes(view_bytes(transfers[1].data)) == DATA[100_000:200_000]
    assert source.distrusted == ["a"]
    assert sum(size for _, _, size in source.asked) == 300_000
    assert f"checksum of 'at100000' in {URL} does not match; fetching it again" in caplog.text


def test_an_error_of_the_caller_cancels_what_is_under_way_and_waits_for_it() -> None:
    source = MemoryFetcher({"a": DATA}, damage=lambda *_: time.sleep(0.1))
    requests = requests_for(*(Bytes(start, 50_000) for start in range(0, 500_000, 50_000)), max_request=50_000)
    with contextlib.suppress(ZeroDivisionError), contextlib.closing(source.fetch(requests, threads=2)) as arrivals:
        next(arrivals)
        raise ZeroDivisionError
    assert source._cancel.is_set()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dcp_s3-download")]
    assert len(source.asked) < 5


def test_an_error_keeps_nothing_alive() -> None:
    """The garbage collector is paused while a load runs."""
    transfer = Bytes(0, 100_000, crc=1)
    known, raised = weakref.ref(transfer), []
    gc.disable()
    try:
        try:
            fetch(MemoryFetcher({"a": DATA}), requests_for(transfer))
        except errors.CorruptCheckpointError as error:
            raised.append(str(error))
        del transfer
        assert len(raised) == 1
        assert known() is None
    finally:
        gc.enable()
