"""Which bytes a load needs, and in which requests."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.checkpoint.read_plan import (
    Extent,
    ReadRequest,
    covering_range,
    plan_requests,
    row_major_strides,
)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    sizes = draw(st.lists(st.integers(1, 6), max_size=4))
    offsets = [draw(st.integers(0, size - 1)) for size in sizes]
    lengths = [draw(st.integers(0, size - offset)) for size, offset in zip(sizes, offsets, strict=True)]
    return sizes, offsets, lengths


@given(boxes(), st.sampled_from([1, 2, 4, 8]))
def test_the_covering_range_is_the_smallest_and_dense_when_it_says_so(
    box: tuple[list[int], list[int], list[int]], element_size: int
) -> None:
    sizes, offsets, lengths = box
    positions = torch.arange(math.prod(sizes)).reshape(sizes)
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        positions = positions.narrow(dim, offset, length)
    wanted = positions.flatten().tolist()
    found = covering_range(sizes, offsets, lengths, element_size)
    if not wanted:
        assert (found.length, found.dense) == (0, True)
        return
    assert found.start == min(wanted) * element_size
    assert found.length == (max(wanted) - min(wanted) + 1) * element_size
    assert found.dense == (len(wanted) * element_size == found.length)


@pytest.mark.parametrize(
    ("sizes", "offsets", "lengths"), [([3], [2], [2]), ([3], [-1], [1]), ([3, 3], [0], [3]), ([3], [0], [-1])]
)
def test_a_box_outside_of_its_chunk(sizes: list[int], offsets: list[int], lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="not inside"):
        covering_range(sizes, offsets, lengths, 4)


@given(st.lists(st.integers(0, 5), max_size=4))
def test_strides_are_those_of_torch(sizes: list[int]) -> None:
    assert row_major_strides(sizes) == torch.empty(sizes).stride()


@st.composite
def extents(draw: st.DrawFn) -> list[Extent]:
    number = draw(st.integers(0, 25))
    return [
        Extent(i, draw(st.sampled_from("ab")), draw(st.integers(0, 5000)), draw(st.integers(1, 3000)))
        for i in range(number)
    ]


@given(extents(), st.integers(64, 2000), st.integers(0, 500))
def test_every_needed_byte_is_fetched_once_for_each_item_and_waste_is_bounded(
    wanted: list[Extent], max_request: int, max_gap: int
) -> None:
    requests = plan_requests(wanted, max_request=max_request, max_gap=max_gap)
    received: dict[int, list[tuple[int, int]]] = {extent.item: [] for extent in wanted}
    for request in requests:
        assert 0 < request.length <= max_request
        place = request.start
        for segment in request.segments:
            assert segment.length > 0
            if segment.item is None:
                assert segment.length <= max_gap
            else:
                extent = wanted[segment.item]
                assert request.path == extent.path
                assert place == extent.start + segment.item_offset
                received[segment.item].append((segment.item_offset, segment.length))
            place += segment.length
        assert request.segments[0].item is not None
        assert request.segments[-1].item is not None
    for extent in wanted:
        pieces = sorted(received[extent.item])
        assert sum(length for _, length in pieces) == extent.length
        assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(pieces))
        assert pieces[0][0] == 0
    assert [request.length for request in requests] == sorted((r.length for r in requests), reverse=True)


def test_neighbours_share_a_request_and_far_ones_do_not() -> None:
    near = [Extent(0, "a", 0, 10), Extent(1, "a", 15, 10), Extent(2, "a", 200, 10)]
    requests = plan_requests(near, max_request=1000, max_gap=20)
    assert sorted((r.start, r.length, len(r.segments)) for r in requests) == [(0, 25, 3), (200, 10, 1)]


def test_a_long_extent_is_cut_into_equal_aligned_pieces() -> None:
    requests = plan_requests([Extent(0, "a", 7, 1000)], max_request=400, max_gap=0)
    lengths = sorted(request.length for request in requests)
    assert sum(lengths) == 1000
    assert all((request.start - 7) % 64 == 0 for request in requests)
    assert lengths[-1] - lengths[0] <= 64 * 3


def test_nothing_to_read() -> None:
    assert plan_requests([], max_request=10, max_gap=0) == []
    assert ReadRequest("a", 0, ()).length == 0
