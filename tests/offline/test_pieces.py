"""Pieces of tensors, and new names."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.offline.pieces import cut, new_names, parse_rules


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


def test_rules_apply_one_after_the_other() -> None:
    names = ["model.a.0", "model.b.10", "optim.x"]
    rules = parse_rules([r"^model\.=", r"(\d+)$=n\1", "n0=zero"])
    assert new_names(names, rules) == {"model.a.0": "a.zero", "model.b.10": "b.n10", "optim.x": "optim.x"}
    assert new_names(names, {}) == dict(zip(names, names, strict=True))
    assert parse_rules(["(?=x)x=y"]) == {"(?=x)x": "y"}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"modle": ""}, r"'modle' matches no name. The closest of 2: 'model.[ab]'"),
        ({r"^model\.c": ""}, r"matches no name. The closest of 2: 'model.[ab]', 'model.[ab]'"),
        ({"[ab]$": "x"}, "'model.a' and 'model.b' would both be called 'model.x'"),
        ({"(": ""}, "cannot rename: missing"),
        ({"a": r"\2"}, "cannot rename: invalid group reference"),
    ],
)
def test_rules_that_cannot_be_meant(rules: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        new_names(["model.a", "model.b"], rules)


@pytest.mark.parametrize(
    ("texts", "message"), [(["x"], "no REGEX=NEW"), (["=x"], "no REGEX"), (["a=", "a=b"], "twice")]
)
def test_texts_that_are_no_rules(texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rules(texts)
