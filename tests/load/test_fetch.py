"""What is fetched, what comes back, and when it gives up. Without a server."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest

from dcp_s3 import errors
from dcp_s3.format.blocks import Range
from dcp_s3.load.items import Transfer
from dcp_s3.load.plan import ReadRequest, plan_requests
from dcp_s3.memory import crc64nvme
from tests.load.sources import URL, MemoryFetcher

DATA = bytes(range(256)) * 2048
SIZE = len(DATA)


class Bytes(Transfer):
    """A run of an object into memory of its own."""

    def __init__(self, start: int, length: int, *, crc: int | None = None, path: str = "a") -> None:
        crc = crc64nvme(DATA[start : start + length]) if crc is None else crc
        super().__init__(path, start, [Range(0, length, crc)], (0, length))
        self.data = bytearray(length)

    def name_of(self, part: Range) -> str:
        return f"at{self.base}"

    def memory(self, start: int, stop: int) -> memoryview:
        return memoryview(self.data)[start:stop]


def requests_for(*transfers: Transfer, max_request: int = 2**17) -> list[ReadRequest]:
    return plan_requests([s for each in transfers for s in each.segments()], max_request=max_request, max_gap=0)


def fetch(source: MemoryFetcher, requests: list[ReadRequest], *, threads: int = 3) -> list[Transfer]:
    with source.fetch(requests, threads=threads) as arrivals:
        return list(arrivals)


def flip(*places: int, times: int) -> Callable[[str, int, bytearray], None]:
    """Changes these bytes of what is received, the first so many times."""
    left = dict.fromkeys(places, times)

    def damage(_: str, start: int, data: bytearray) -> None:
        for place in places:
            if start <= place < start + len(data) and left[place]:
                left[place] -= 1
                data[place - start] ^= 1

    return damage


def test_all_come_to_their_place_and_each_is_finished_once() -> None:
    transfers = [Bytes(start, 100_000) for start in range(0, 500_000, 100_000)]
    finished = fetch(MemoryFetcher({"a": DATA}), requests_for(*transfers))
    assert sorted(map(id, finished)) == sorted(map(id, transfers))
    assert all(transfer.data == DATA[transfer.base : transfer.base + 100_000] for transfer in transfers)


def test_where_there_are_more_threads_than_requests_they_get_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_s3.load.plan.SMALL_HALF", 1000)
    transfers = [Bytes(start, 100_000) for start in (0, 200_000)]
    source = MemoryFetcher({"a": DATA})
    finished = fetch(source, requests_for(*transfers), threads=8)
    assert sorted(each.base for each in finished) == [0, 200_000]
    assert all(bytes(each.data) == DATA[each.base :][:100_000] for each in transfers)
    asked = sorted((start, start + length) for _, start, length in source.asked)
    assert sum(stop - start for start, stop in asked) == 200_000, "each byte once"
    assert len(asked) > 4


def test_what_does_not_match_is_fetched_once_more_and_not_from_the_disk(caplog: pytest.LogCaptureFixture) -> None:
    source = MemoryFetcher({"a": DATA}, damage=flip(150_000, times=1))
    transfers = [Bytes(0, 100_000), Bytes(100_000, 100_000)]
    assert fetch(source, requests_for(*transfers)).count(transfers[1]) == 1
    assert transfers[1].data == DATA[100_000:200_000]
    assert source.distrusted == ["a"]
    assert sum(size for _, _, size in source.asked) == 300_000
    assert f"checksum of 'at100000' in {URL} does not match; fetching it again" in caplog.text


def test_what_does_not_match_twice_is_an_error() -> None:
    source = MemoryFetcher({"a": DATA}, damage=flip(150_000, times=2))
    with pytest.raises(errors.CorruptCheckpointError, match=r"bytes 100000 to 199999 of a have CRC.*twice"):
        fetch(source, requests_for(Bytes(100_000, 100_000)))


def test_what_is_to_be_fetched_instead_is_fetched_and_finished() -> None:
    class Elsewhere(Bytes):
        def finish(self) -> Transfer:
            return instead

    instead = Bytes(300_000, 10)
    assert fetch(MemoryFetcher({"a": DATA}), requests_for(Elsewhere(0, 10)), threads=1) == [instead]
    assert instead.data == DATA[300_000:300_010]


def test_an_error_of_the_caller_cancels_what_is_under_way() -> None:
    source = MemoryFetcher({"a": DATA})

    def take() -> None:
        with source.fetch(requests_for(Bytes(0, SIZE)), threads=1) as arrivals:
            next(arrivals)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        take()
    assert source._cancel.is_set()


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
