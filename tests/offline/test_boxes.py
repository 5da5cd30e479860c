"""Indices into saved tensors select what numpy's do; pieces are all of a tensor."""

from __future__ import annotations

import math
from types import EllipsisType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.offline.boxes import cut, select


def _part() -> st.SearchStrategy[int | slice]:
    ends = st.none() | st.integers(-7, 7)
    return st.integers(-6, 5) | st.builds(slice, ends, ends, st.sampled_from([None, 1]))


@given(
    shape=st.lists(st.integers(0, 5), max_size=4),
    before=st.lists(_part(), max_size=3),
    after=st.none() | st.lists(_part(), max_size=2),
)
def test_what_numpy_selects(shape: list[int], before: list[Any], after: list[Any] | None) -> None:
    index: tuple[int | slice | EllipsisType, ...] = (*before, *([] if after is None else [..., *after]))
    array = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    try:
        expected = array[index]
    except IndexError:
        with pytest.raises(IndexError):
            select(index, shape)
        return
    found = select(index, shape)
    box = array[tuple(slice(o, o + n) for o, n in zip(found.offsets, found.lengths, strict=True))]
    assert box.shape == found.lengths
    assert found.shape == expected.shape
    assert np.array_equal(box.reshape(found.shape), expected)


@pytest.mark.parametrize("index", [None, (), ..., slice(None)])
def test_everything(index: Any) -> None:
    assert select(index, (2, 3)).lengths == (2, 3)


@pytest.mark.parametrize("number", [np.int64(1), torch.tensor(1)])
def test_numbers_of_other_libraries(number: Any) -> None:
    assert select((number, slice(number, None)), (2, 3)).offsets == (1, 1)


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (2, "2 is out of range for dimension 0 of 2 elements"),
        ((0, -4), "-4 is out of range for dimension 1 of 3 elements"),
        ((0, 0, 0), "3 parts, the tensor 2 dimensions"),
        (slice(None, None, 2), "step in dimension 0 is 2"),
        ((0, slice(None, None, -1)), "step in dimension 1 is -1"),
        ((..., 0, ...), "more than one Ellipsis"),
        (True, "True in dimension 0 is neither"),
        ((None, 0), "None in dimension 0 is neither"),
        (1.5, "1.5 in dimension 0 is neither"),
        ([0, 1], r"\[0, 1\] in dimension 0 is neither"),
        (np.array([0, 1]), "is not one whole number"),
        (slice(0.5, 1), "not made of whole numbers"),
        (slice(None, None, "x"), "not made of whole numbers"),
    ],
    ids=str,
)
def test_what_can_not_be_read(index: Any, reason: str) -> None:
    with pytest.raises(IndexError, match=reason):
        select(index, (2, 3))


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 60))
def test_pieces_are_the_elements_in_order(shape: list[int], most: int) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    found = []
    for box in cut(shape, most):
        assert 0 < math.prod(box.lengths) <= most
        piece = numbers
        for dim, (start, length) in enumerate(zip(box.offsets, box.lengths, strict=True)):
            piece = piece.narrow(dim, start, length)
        found += piece.flatten().tolist()
    assert found == list(range(math.prod(shape)))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 60))
def test_there_are_not_many_more_pieces_than_needed(shape: list[int], most: int) -> None:
    count = len(list(cut(shape, most)))
    inner = math.prod(shape[1:])
    if inner <= most:
        assert count == math.ceil(shape[0] / (most // inner))
