"""Which bytes a load fetches, how they get to their place, and when it gives up: without a server."""

from __future__ import annotations

import contextlib
import gc
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
from dcp_s3.format.blocks import Range, make_storage_info
from dcp_s3.load.items import Transfer
from dcp_s3.load.plan import Box, ReadRequest, StoredChunk, halve, plan_requests
from dcp_s3.load.read import LoadExecutor
from dcp_s3.memory import crc64nvme, view_bytes
from dcp_s3.torch_private import ReaderTransforms
from tests.load.sources import KINDS, PATH, URL, Case, MemoryFetcher, cases, make_case


@pytest.fixture(autouse=True, scope="module")
def _runs_of_a_few_bytes_are_long() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcp_s3.load.fetch._LONG", 100)
        yield


def transfers_of(case: Case, kind: str, *, max_gap: int = 0) -> list[Transfer]:
    """Of all that is wanted."""
    targets = [case.target(want, kind) for wants in case.wants for want in wants]
    planner = mock.Mock(resolve_tensor=mock.Mock(side_effect=targets))
    executor = LoadExecutor(MemoryFetcher({}), case.metadata, ReaderTransforms(None))
    with mock.patch("dcp_s3.load.read.READ_GAP", max_gap):
        return executor.prepare([item for plan in case.plans for item in plan], planner)[0]


def check(case: Case, transfers: Sequence[Transfer]) -> None:
    for want, transfer in zip([want for wants in case.wants for want in wants], transfers, strict=True):
        assert transfer.target is not None
        case.check(want, transfer.target)
        assert transfer.verify() == []


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
    fetcher = MemoryFetcher({PATH: data})
    complete = fetcher.receive(request)
    assert fetcher.asked == [(PATH, request.start, request.length)]
    return complete


@given(
    st.booleans().flatmap(lambda checked: cases(0, checked)), st.sampled_from(KINDS),
    st.sampled_from([64, 128, 1000]), st.sampled_from([0, 30, 500]), st.integers(0, 99),
)  # fmt: skip
def test_every_byte_gets_to_its_place(case: Case, kind: str, max_request: int, max_gap: int, seed: int) -> None:
    transfers = transfers_of(case, kind, max_gap=max_gap)
    receive_all(case.stored, transfers, max_request=max_request, max_gap=max_gap, seed=seed)
    check(case, transfers)
    for transfer in transfers:
        is_read = transfer.target is not None and transfer.target.numel() > 0
        assert transfer.checked == (transfer.stored.crc is not None and is_read)


@given(cases(0), st.sampled_from(KINDS), st.sampled_from([64, 1000]), st.data())
def test_a_changed_byte_that_is_fetched_is_noticed_and_repaired(
    case: Case, kind: str, max_request: int, draw: st.DataObject
) -> None:
    transfers, at = transfers_of(case, kind), draw.draw(st.integers(0, len(case.stored) - 1))
    damaged = bytearray(case.stored)
    damaged[at] ^= 1
    receive_all(bytes(damaged), transfers, max_request=max_request, max_gap=0, seed=0)
    for transfer in transfers:
        hit = [part for part in transfer.ranges if part.start <= at - transfer.base < part.stop]
        wrong = list(transfer.verify())
        assert [part for part, _ in wrong] == hit
        for part, found in wrong:
            assert found != part.crc
            (request,) = plan_requests(transfer.segments([part]), max_request=10**6, max_gap=0)
            assert request.start <= at < request.start + request.length
            assert received(case.stored, request) == [transfer]
    check(case, transfers)


@pytest.mark.parametrize("kind", ["cast", "strided"])
def test_what_never_matches_does_not_get_into_a_tensor_through_a_buffer(kind: str) -> None:
    case = make_case({"t": torch.arange(1, 101, dtype=torch.float32)}, [[("t", Box((0,), (100,)))]])
    damaged = bytearray(case.stored)
    damaged[200] ^= 1
    (transfer,) = transfers_of(case, kind)
    with pytest.raises(errors.CorruptCheckpointError, match="twice"):
        fetch(MemoryFetcher({PATH: bytes(damaged)}), requests_for(transfer))
    assert transfer.target is not None
    assert not transfer.target.any()


# --- by threads ----------------------------------------------------------------------------------------

DATA = bytes(range(256)) * 2048
SIZE = len(DATA)


class Bytes(Transfer):
    """A run of an object into memory of its own, with a checksum for each block of it."""

    def __init__(self, start: int, length: int, *, block: int = SIZE) -> None:
        blocks = [(first, min(first + block, length)) for first in range(0, length, block)]
        ranges = [Range(first, last, crc64nvme(DATA[start + first : start + last])) for first, last in blocks]
        index, size = MetadataIndex(f"at{start}"), torch.Size((length,))
        item = ReadItem(LoadItemType.TENSOR, index, size, index, size, size)
        stored = StoredChunk(make_storage_info("a", start, length), start, length, size, torch.uint8, False)
        self.data = torch.zeros(length, dtype=torch.uint8)
        super().__init__(item, stored, self.data, ranges, self.data)


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
    transfers = [Bytes(0, 100_000), Bytes(100_000, 100_000, block=20_000)]
    assert fetch(source, requests_for(*transfers)).count(transfers[1]) == 1
    assert bytes(view_bytes(transfers[1].data)) == DATA[100_000:200_000]
    assert source.distrusted == ["a"]
    assert sum(size for _, _, size in source.asked) == 220_000, "only the block that did not match"
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
    transfer = Bytes(0, 100_000)
    known, raised = weakref.ref(transfer), []
    gc.disable()
    try:
        try:
            fetch(MemoryFetcher({"a": bytes(SIZE)}), requests_for(transfer))
        except errors.CorruptCheckpointError as error:
            raised.append(str(error))
        del transfer
        assert len(raised) == 1
        assert known() is None
    finally:
        gc.enable()
