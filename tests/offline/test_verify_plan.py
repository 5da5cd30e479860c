"""What the checksums of ranges say of an object: pure functions."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.checksum import crc64nvme, crc64nvme_between, crc_hex
from dcp_s3.offline.verify_plan import Mismatch, ObjectScan, StoredData, StoredItem, group_items


def item(start: int, length: int, crc: int | None) -> StoredItem:
    return StoredItem(f"at{start}", "object", start, length, None, False, (), crc, start, length)


def scan_of(data: bytes, items: list[StoredItem], *, crc: str | None) -> ObjectScan:
    return ObjectScan(StoredData("object", len(data), crc, tuple(items)))


def feed(scan: ObjectScan, data: bytes, *, part: int, block: int, order: random.Random) -> int:
    """What a reader does; the number of ranges after which the scan said that it was complete."""
    ranges = [(start, min(part, len(data) - start)) for start in range(0, max(1, len(data)), part)]
    order.shuffle(ranges)
    complete = []
    for start, length in ranges:
        at, crcs = start, []
        for size in scan.segments(start, length, block):
            assert 0 < size <= block
            crcs.append((crc64nvme(data[at : at + size]), size))
            at += size
        assert at == start + length
        complete.append(scan.arrived(scan.join(start, crcs)))
    assert complete.count(True) == 1
    return complete.index(True) + 1 - len(ranges)


PLACES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=12)


@given(
    data=st.binary(max_size=300),
    places=PLACES,
    part=st.integers(1, 400),
    block=st.integers(1, 50),
    seed=st.integers(0, 9),
    flip=st.integers(0, 299),
)
def test_exactly_what_covers_a_changed_byte_does_not_match(
    data: bytes, places: list[tuple[int, int]], part: int, block: int, seed: int, flip: int
) -> None:
    """Items may lie anywhere, also one over another."""
    spans = [sorted((min(a, len(data)), min(b, len(data)))) for a, b in places]
    items = [item(a, b - a, crc64nvme(data[a:b])) for a, b in spans]
    order = random.Random(seed)
    scan = scan_of(data, items, crc=crc_hex(crc64nvme(data)))
    assert feed(scan, data, part=part, block=block, order=order) == 0
    assert not scan.mismatch().any
    if flip < len(data):
        changed = data[:flip] + bytes([data[flip] ^ 1]) + data[flip + 1 :]
        scan = scan_of(data, items, crc=crc_hex(crc64nvme(data)))
        feed(scan, changed, part=part, block=block, order=order)
        found = scan.mismatch()
        assert found.items == {n: crc64nvme(changed[a:b]) for n, (a, b) in enumerate(spans) if a <= flip < b}
        assert found.whole == crc_hex(crc64nvme(changed))


def test_without_a_recorded_checksum_there_is_nothing_to_match() -> None:
    data = bytes(range(100))
    scan = scan_of(data, [item(10, 20, crc64nvme(data[10:30])), item(30, 5, None)], crc=None)
    feed(scan, data[:50] + b"x" * 50, part=7, block=4, order=random.Random(0))
    assert not scan.mismatch().any


def test_an_empty_item_has_the_checksum_of_nothing() -> None:
    scan = scan_of(b"abc", [item(3, 0, 0), item(0, 0, 5)], crc=None)
    feed(scan, b"abc", part=2, block=2, order=random.Random(0))
    assert scan.mismatch().items == {1: 0}


def test_a_range_is_not_held_by_an_empty_object() -> None:
    scan = scan_of(b"", [], crc=crc_hex(0))
    assert scan.segments(0, 0, 10) == []
    assert scan.arrived(())
    assert not scan.mismatch().any
    assert scan_of(b"", [], crc=crc_hex(1)).mismatch().whole == crc_hex(0)


def test_only_what_fails_twice_is_confirmed() -> None:
    first = Mismatch({0: 1, 2: 3}, "aa")
    assert first.confirmed_by(Mismatch({2: 4, 5: 6}, "bb")) == Mismatch({2: 4}, "bb")
    assert not first.confirmed_by(Mismatch({}, None)).any
    assert Mismatch({0: 1}, None).confirmed_by(Mismatch({0: 1}, "bb")) == Mismatch({0: 1}, None)


@given(before=st.binary(max_size=60), rest=st.binary(max_size=60))
def test_the_checksum_of_the_rest(before: bytes, rest: bytes) -> None:
    assert crc64nvme_between(crc64nvme(before), crc64nvme(before + rest), len(rest)) == crc64nvme(rest)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1, [[0], [10], [20], [50]]), (20, [[0, 10], [20], [50]]), (30, [[0, 10, 20], [50]]), (999, [[0, 10, 20], [50]])],
)
def test_neighbours_share_a_request(limit: int, expected: list[list[int]]) -> None:
    items = [item(start, 10, None) for start in (20, 0, 50, 10)]
    assert [[one.start for one in group] for group in group_items(items, limit)] == expected
