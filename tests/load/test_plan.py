"""Which bytes a load needs: boxes, the runs that they are, and the requests for them."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.format.blocks import Blocks, cuts_between, pack_crcs
from dcp_s3.load.boxes import Box, covering_run
from dcp_s3.load.plan import SMALL_HALF, ReadRequest, Segment, halve, plan_requests, ranges_of_box
from dcp_s3.memory import crc64nvme

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
