"""Boxes of row-major arrays, and the runs that they are."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.load.boxes import Box, covering_run, row_major_strides, runs_of_box


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


@given(chunks_and_boxes(), st.integers(0, 40))
def test_runs_cover_a_box_and_take_along_gaps_up_to_the_limit(chunk: tuple[tuple[int, ...], Box], max_gap: int) -> None:
    wanted = positions(*chunk)
    runs = runs_of_box(*chunk, max_gap)
    expected: list[tuple[int, int]] = []
    for at in wanted:
        if expected and at - expected[-1][1] <= max_gap:
            expected[-1] = (expected[-1][0], at + 1)
        else:
            expected.append((at, at + 1))
    assert runs == expected


@pytest.mark.parametrize(
    ("sizes", "offsets", "lengths"), [([3], (2,), (2,)), ([3], (-1,), (1,)), ([3, 3], (0,), (3,)), ([3], (0,), (-1,))]
)
def test_a_box_outside_of_its_chunk(sizes: list[int], offsets: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not inside"):
        covering_run(sizes, Box(offsets, lengths))


@given(st.lists(st.integers(0, 5), max_size=4))
def test_strides_are_those_of_torch(sizes: list[int]) -> None:
    assert row_major_strides(sizes) == torch.empty(sizes).stride()
