"""The tree of saved names: sums, alike layers, and names that are no tree."""

from __future__ import annotations

import json
import math
from types import EllipsisType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.format.saved_entries import SavedEntry
from dcp_s3.offline.boxes import cut, select
from dcp_s3.offline.inspect import TreeNode, build_tree
from dcp_s3.units import format_count


def _tensor(fqn: str, *shape: int, dtype: str = "bfloat16", chunks: int = 1, size: int = 100) -> SavedEntry:
    return SavedEntry(fqn, "tensor", dtype, shape, chunks, size)


def _model(layers: int, different: int = -1) -> list[SavedEntry]:
    found = [_tensor("model.embed", 100, 8)]
    for number in range(layers):
        found += [
            _tensor(f"model.layers.{number}.attention.wq", 8, 8, chunks=2),
            _tensor(f"model.layers.{number}.norm", 9 if number == different else 8, dtype="float32", size=50),
        ]
    return [*found, SavedEntry("step", "bytes", None, None, 1, 10)]


def _lines(node: TreeNode, indent: int = 0) -> list[str]:
    repeats = f" x{node.repeats}" if node.repeats > 1 else ""
    found = [f"{'  ' * indent}{node.name}{repeats} {node.parameters} {node.size} {node.chunks}"]
    return found + [line for child in node.children for line in _lines(child, indent + 1)]


def test_alike_layers_are_one_node_with_their_sums() -> None:
    assert _lines(build_tree(_model(32))) == [
        " 3104 4910 98",
        "  model 3104 4900 97",
        "    embed 800 100 1",
        "    layers.0..31 x32 2304 4800 96",
        "      attention.wq 2048 3200 64",
        "      norm 256 1600 32",
        "  step 0 10 1",
    ]


def test_a_layer_that_is_not_alike_stays_apart() -> None:
    [layers] = [node for node in build_tree(_model(6, different=3)).children[0].children if node.name == "layers"]
    assert [(node.name, node.repeats) for node in layers.children] == [("0..2,4..5", 5), ("3", 1)]
    assert layers.children[0].dtypes == ("bfloat16", "float32")  # by bytes


def test_without_collapsing_every_layer_is_there_in_the_order_of_numbers() -> None:
    shuffled = sorted(_model(12), key=lambda entry: entry.fqn)  # 0, 1, 10, 11, 2
    [layers] = [n for n in build_tree(shuffled, collapse=False).children[0].children if n.name == "layers"]
    assert [node.name for node in layers.children] == [str(number) for number in range(12)]


def test_experts_within_layers() -> None:
    entries = [_tensor(f"layers.{i}.experts.{j}.w", 4, 4) for i in range(3) for j in range(8)]
    assert _lines(build_tree(entries)) == [
        " 384 2400 24",
        "  layers.0..2.experts.0..7.w x24 384 2400 24",
    ]
    entries += [_tensor(f"layers.{i}.norm", 4, size=0) for i in range(3)]
    assert _lines(build_tree(entries))[1:3] == [
        "  layers.0..2 x3 396 2400 27",
        "    experts.0..7.w x8 384 2400 24",
    ]


def test_a_name_may_also_begin_others() -> None:
    tree = build_tree([_tensor("a", 2), _tensor("a.b", 3), _tensor("", 4), _tensor("..", 5)])
    assert [(node.name, node.shape, len(node.children)) for node in tree.children][:2] == [
        ("a", (2,), 0),
        ("a.b", (3,), 0),
    ]
    assert tree.parameters == 14
    assert tree.entries == 4


def test_a_hostile_name_is_no_deep_recursion() -> None:
    assert build_tree([_tensor("." * 100_000, 1), _tensor("9" * 10_000, 1)]).entries == 2


def test_depth_and_json() -> None:
    tree = build_tree(_model(2))
    assert [each["name"] for each in tree.to_dict(1)["children"]] == ["model", "step"]
    assert tree.to_dict(1)["children"][0]["children"] == []
    assert json.loads(json.dumps(tree.to_dict()))["children"][0]["children"][1]["repeats"] == 2
    assert repr(tree) == "TreeNode('', 6 entries, 944 parameters, 410 B)"


_names = st.lists(
    st.lists(st.sampled_from(["a", "b", "0", "1", "2", "10", ""]), min_size=1, max_size=4).map(".".join),
    unique=True, min_size=1, max_size=20,
)  # fmt: skip


@given(_names, st.integers(0, 3))
def test_sums_add_up_and_nothing_is_lost(names: list[str], kinds: int) -> None:
    entries = [_tensor(name, 1 + len(name) % (kinds + 1), size=len(name), chunks=2) for name in names]

    def check(node: TreeNode) -> None:
        if node.children:
            for field in ("parameters", "size", "entries", "chunks"):
                assert getattr(node, field) == sum(getattr(child, field) for child in node.children)
        for child in node.children:
            check(child)

    for collapse in (True, False):
        tree = build_tree(entries, collapse=collapse)
        check(tree)
        assert tree.entries == len(entries)
        assert tree.size == sum(entry.size for entry in entries)


def test_counts() -> None:
    counts = {0: "0", 999: "999", 1000: "1K", 999_499: "999K", 999_500: "1M", 8_030_261_248: "8.03B", 2 * 10**12: "2T"}
    assert {count: format_count(count) for count in counts} == counts


# --- boxes ----------------------------------------------------------------------------------------------


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
