"""The comparison of two checkpoints by their checksums is right about the bytes, and knows all that can be known."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from operator import xor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

from dcp_s3.offline.diff_plan import EntryDiff, Renaming, compare, find_renaming
from tests.offline.cuts import Box, Cut, bytes_of, grid, metadata_of, split


def _compare(tensor: torch.Tensor, cut: Cut, other: torch.Tensor, other_cut: Cut) -> EntryDiff:
    [found] = compare(metadata_of({"x": (tensor, cut)}), metadata_of({"x": (other, other_cut)}))
    return found


# --- any cuts -----------------------------------------------------------------------------------------


def _pieces(tensor: torch.Tensor, cut: Cut) -> list[tuple[list[int], bytes]]:
    """What has a known checksum: numbers of its bytes in the tensor, and the bytes."""
    nbytes = tensor.numel() * tensor.itemsize
    numbers = torch.arange(nbytes).view(*tensor.shape, tensor.itemsize)
    found = []
    for number, box in enumerate(cut.boxes):
        if number in cut.without:
            continue
        part = numbers
        for dim, (start, length) in enumerate(zip(*box, strict=True)):
            part = part.narrow(dim, start, length)
        all_numbers, data = part.reshape(-1).tolist(), bytes_of(tensor, box)
        size = cut.blocks[number] or len(data)
        found += [(all_numbers[i : i + size], data[i : i + size]) for i in range(0, len(data), size)]
    return found


def _expected(tensor: torch.Tensor, cut: Cut, other: torch.Tensor, other_cut: Cut) -> str:
    """What is knowable, byte by byte: in a connected part, every byte has to be shifted alike on both sides, and no two
    of them alike, lest changes of both cancel out."""
    sides = _pieces(tensor, cut), _pieces(other, other_cut)
    where: list[dict[int, tuple[tuple[int, int], int]]] = [
        {byte: ((side, n), len(of) - 1 - i) for n, (of, _) in enumerate(pieces) for i, byte in enumerate(of)}
        for side, pieces in enumerate(sides)
    ]
    edges = defaultdict(list)
    lonely = set()
    for byte in range(tensor.numel() * tensor.itemsize):
        if byte in where[0] and byte in where[1]:
            (one, after_one), (two, after_two) = where[0][byte], where[1][byte]
            edges[one].append((two, after_one - after_two))
            edges[two].append((one, after_two - after_one))
        else:
            lonely |= {side[byte][0] for side in where if byte in side}
    nodes = {(side, n) for side in (0, 1) for n in range(len(sides[side]))}
    knows_all = not cut.without and not other_cut.without
    while nodes:
        first = nodes.pop()
        shifts, waiting, agree = {first: 0}, [first], True
        while waiting:
            node = waiting.pop()
            agree = agree and node not in lonely
            for neighbour, shift in edges[node]:
                if neighbour not in shifts:
                    shifts[neighbour] = shifts[node] + shift
                    waiting.append(neighbour)
                agree = agree and shifts[neighbour] == shifts[node] + shift
        nodes -= shifts.keys()
        if not agree:
            knows_all = False
            continue
        found: list[dict[int, list[int]]] = [defaultdict(list), defaultdict(list)]
        for (side, n), shift in shifts.items():
            for after, value in enumerate(reversed(sides[side][n][1])):
                found[side][shift + after].append(value)
        if any(functools.reduce(xor, found[0][at]) != functools.reduce(xor, found[1][at]) for at in found[0]):
            return "changed"
        knows_all = knows_all and all(len(values) == 1 for values in found[0].values())
    return "same" if knows_all else "unknown"


def _halves(draw: st.DrawFn, box: Box, depth: int) -> list[Box]:
    """Cut a box, then its pieces, each anywhere."""
    offsets, sizes = box
    dims = [dim for dim, size in enumerate(sizes) if size > 1]
    if not depth or not dims or draw(st.integers(0, 3)) == 0:
        return [box]
    dim = draw(st.sampled_from(dims))
    at = draw(st.integers(1, sizes[dim] - 1))
    low = offsets, (*sizes[:dim], at, *sizes[dim + 1 :])
    high = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]), (*sizes[:dim], sizes[dim] - at, *sizes[dim + 1 :])
    return _halves(draw, low, depth - 1) + _halves(draw, high, depth - 1)


@st.composite
def _cuts(draw: st.DrawFn, shape: tuple[int, ...], itemsize: int) -> Cut:
    if draw(st.booleans()):
        boxes = _halves(draw, ((0,) * len(shape), shape), 4)
    else:
        some = [st.lists(st.integers(1, max(1, size - 1)), max_size=3, unique=True) for size in shape]
        boxes = grid(shape, [sorted(draw(each)) if size > 1 else [] for each, size in zip(some, shape, strict=True)])
    boxes = draw(st.permutations(boxes))
    blocks = []
    for _, sizes in boxes:
        possible = [64 * n for n in range(1, math.prod(sizes) * itemsize // 64 + 1) if n <= 8]
        blocks.append(draw(st.sampled_from([None, *possible])))
    without = draw(st.sets(st.integers(0, len(boxes) - 1), max_size=2)) if draw(st.integers(0, 5)) == 0 else set()
    return Cut(boxes, blocks, frozenset(without))


_STACKS = [(4, 2, 8), (4, 4, 8), (4, 6, 8)]


@st.composite
def _stacks(draw: st.DrawFn, rows: int) -> Cut:
    """Matrices of some rows of 64 bytes in one tensor, in blocks of whole rows."""
    boxes = grid((4, rows, 8), [[], sorted(draw(st.sets(st.sampled_from(range(1, rows)), max_size=3))), []])
    return Cut(boxes, [draw(st.sampled_from([None, *(64 * n for n in range(1, 4 * box[1][1]))])) for box in boxes])


@st.composite
def _pairs(draw: st.DrawFn) -> tuple[torch.Tensor, Cut, torch.Tensor, Cut]:
    dtype = draw(st.sampled_from([torch.uint8, torch.float64, torch.float64]))
    shape = draw(
        st.sampled_from(
            [(), (1,), (100,), (8, 8), (2, 64), (16, 32), (4, 4, 8), (3, 8, 8), (2, 3, 5, 7), *_STACKS, *_STACKS]
        )
    )
    tensor = torch.randint(
        0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    changed = tensor.clone()
    how = draw(st.sampled_from(["nothing", "some", "some", "all alike", "rolled"]))
    if how == "some":
        value = draw(st.integers(1, 255))
        for number in draw(st.lists(st.integers(0, tensor.numel() - 1), min_size=1, max_size=4)):
            changed.view(-1)[number] ^= value
    elif how == "all alike":
        changed ^= draw(st.integers(1, 255))
    elif how == "rolled" and shape:
        changed = changed.roll(draw(st.integers(0, max(shape))), dims=draw(st.integers(0, len(shape) - 1)))
    views = [each.view(dtype).view(shape) for each in (tensor, changed)]
    if shape in _STACKS and dtype is torch.float64:
        return views[0], draw(_stacks(shape[1])), views[1], draw(_stacks(shape[1]))
    return views[0], draw(_cuts(shape, dtype.itemsize)), views[1], draw(_cuts(shape, dtype.itemsize))


@settings(max_examples=500)
@given(_pairs())
def test_the_verdict_is_right_and_unknown_only_where_nothing_combines(
    pair: tuple[torch.Tensor, Cut, torch.Tensor, Cut],
) -> None:
    tensor, cut, other, other_cut = pair
    status = _compare(tensor, cut, other, other_cut).status
    equal = bytes_of(tensor, ((0,) * tensor.ndim, tuple(tensor.shape))) == bytes_of(
        other, ((0,) * tensor.ndim, tuple(tensor.shape))
    )
    assert status != ("changed" if equal else "same")
    assert status == _expected(tensor, cut, other, other_cut)


# --- cuts as they occur -------------------------------------------------------------------------------

_BF16 = torch.bfloat16


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _with_one_change(tensor: torch.Tensor) -> torch.Tensor:
    changed = tensor.clone()
    changed.view(-1)[tensor.numel() // 2] += 1
    return changed


_TP_AND_FSDP = [grid((64, 64), [list(range(64 // n, 64, 64 // n)), [32]]) for n in (2, 8)]


@pytest.mark.parametrize(
    ("shape", "one", "two"),
    [
        ((64, 64), split((64, 64), 0, 2), split((64, 64), 0, 4)),
        ((64, 64), split((64, 64), 0, 1), split((64, 64), 0, 7)),
        ((10, 3), split((10, 3), 0, 4), split((10, 3), 0, 3)),
        ((64, 64), *_TP_AND_FSDP),
        ((4, 8, 16), split((4, 8, 16), 1, 2), split((4, 8, 16), 1, 2)[::-1]),
        ((1, 64, 8), split((1, 64, 8), 1, 8), split((1, 64, 8), 1, 3)),
        ((64, 1), split((64, 1), 0, 8), split((64, 1), 0, 5)),
    ],
    ids=["2 and 4 ranks", "1 and 7", "uneven", "rows of columns", "another order", "a dimension of 1", "one column"],
)
def test_rows_cut_into_other_rows_are_compared(shape: tuple[int, ...], one: list[Box], two: list[Box]) -> None:
    tensor = _random(*shape, dtype=_BF16)
    assert _compare(tensor, Cut(one), tensor, Cut(two)).status == "same"
    assert _compare(tensor, Cut(one), _with_one_change(tensor), Cut(two)) == EntryDiff(
        "x", "tensor", "changed", "values", 2 * tensor.numel()
    )


def test_columns_against_rows_are_unknown() -> None:
    tensor = _random(64, 64)
    found = _compare(tensor, Cut(split((64, 64), 0, 2)), tensor, Cut(split((64, 64), 1, 2)))
    assert (found.status, found.what) == ("unknown", "its chunks are cut such that their checksums do not combine")


def test_blocks_that_end_where_chunks_do_help() -> None:
    """Experts in one tensor: whole, or each cut over ranks. A rank's part of an expert is a block of the whole."""
    tensor, changed = _random(8, 16, 32), _with_one_change(_random(8, 16, 32))
    whole, cut = split(tensor.shape, 0, 1), split(tensor.shape, 1, 4)
    without_blocks = Cut(whole)
    with_blocks = Cut(whole, [4 * 32 * 4])
    assert _compare(tensor, without_blocks, tensor, Cut(cut)).status == "unknown"
    assert _compare(tensor, with_blocks, tensor, Cut(cut)).status == "same"
    assert _compare(tensor, with_blocks, changed, Cut(cut)).status == "changed"
    two_experts = Cut(whole, [2 * 16 * 32 * 4])
    assert _compare(tensor, two_experts, tensor, Cut(cut)).status == "unknown"


def test_a_change_everywhere_does_not_cancel_out() -> None:
    """With blocks that belong to two ranks there is a combination, but it shifts different experts alike."""
    tensor, cut = torch.zeros(8, 16, 32), Cut(split((8, 16, 32), 1, 4))
    whole = Cut(split(tensor.shape, 0, 1), [2 * 4 * 32 * 4])
    assert _compare(tensor, whole, tensor, cut).status == "unknown"
    for changed in (torch.ones_like(tensor), _with_one_change(tensor)):
        assert _compare(tensor, whole, changed, cut).status != "same"
    assert _compare(tensor, whole, _with_one_change(tensor), cut).status == "changed"


def test_what_has_no_checksum_is_unknown_and_says_where() -> None:
    tensor = _random(64, 64)
    rows = split((64, 64), 0, 2)
    found = _compare(tensor, Cut(rows, (), frozenset({1})), tensor, Cut(rows))
    assert (found.status, found.what) == ("unknown", "no checksum in A")
    found = _compare(tensor, Cut(rows), tensor, Cut(split((64, 64), 0, 4), (), frozenset({1})))
    assert (found.status, found.what) == ("unknown", "no checksum in B")
    found = _compare(_with_one_change(tensor), Cut(rows, (), frozenset({0})), tensor, Cut(rows))
    assert found.status == "changed"  # the other chunk tells


def _replace_infos(metadata: Metadata, **fields: object) -> Metadata:
    for info in metadata.storage_data.values():
        vars(info).update(fields)
    return metadata


def test_encoded_chunks_are_the_same_only_if_their_stored_bytes_are() -> None:
    tensor, changed = _random(8, 8), _with_one_change(_random(8, 8))
    encoded = [
        _replace_infos(
            metadata_of({"x": (each, Cut(split((8, 8), 0, n)))}), raw_offset=None, transform_descriptors=["z"]
        )
        for each, n in ((tensor, 2), (tensor, 2), (changed, 2), (tensor, 4))
    ]
    assert [compare(encoded[0], other)[0].status for other in encoded] == ["same", "same", "unknown", "unknown"]
    assert compare(encoded[0], encoded[2])[0].what == "it was encoded before it was stored"
    plain = metadata_of({"x": (tensor, Cut(split((8, 8), 0, 2)))})
    assert compare(encoded[0], plain)[0].status == "unknown"


def test_chunks_that_contradict_each_other_prove_nothing() -> None:
    tensor = torch.zeros(8)
    whole = [((0,), (8,))]
    for wrong in ([((0,), (4,)), ((2,), (4,))], [((0,), (4,))], [((0,), (4,)), ((4,), (2,))]):
        found = _compare(tensor, Cut(wrong), tensor, Cut(whole))
        assert (found.status, found.what) == ("unknown", "its chunks do not cover it, each element once")
    for boxes in ([((0, 0), (8, 1))], [((-4,), (8,))], [((4,), (8,))], [((0,), (-8,)), ((0,), (16,))]):
        hostile, honest = (metadata_of({"x": (tensor, Cut(whole))}) for _ in range(2))
        saved: Any = hostile.state_dict_metadata["x"]
        saved.chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        for pair in ((hostile, honest), (honest, hostile)):
            assert [each.status for each in compare(*pair)] == ["unknown"]
    for half in ([], [((0,), (4,))]):  # the same hole in both
        found = _compare(tensor, Cut(half), tensor, Cut(half))
        assert found.status == "unknown"


def test_a_scalar_an_empty_tensor_and_a_foreign_index() -> None:
    scalar, empty = torch.tensor(3.0), torch.empty(0, 4)
    assert _compare(scalar, Cut([((), ())]), scalar, Cut([((), ())])).status == "same"
    assert _compare(scalar, Cut([((), ())]), scalar + 1, Cut([((), ())])).status == "changed"
    assert _compare(empty, Cut([((0, 0), (0, 4))]), empty, Cut([])).status == "same"
    one, two = (metadata_of({"x": (torch.ones(4), Cut([((0,), (4,))]))}) for _ in range(2))
    two.storage_data = {dataclasses.replace(index, offset=None): info for index, info in two.storage_data.items()}
    assert compare(one, two)[0].status == "same"


# --- entries ------------------------------------------------------------------------------------------


def test_names_shapes_dtypes_and_objects() -> None:
    def cut(tensor: torch.Tensor) -> tuple[torch.Tensor, Cut]:
        return tensor, Cut(split(tensor.shape, 0, 1))

    a = metadata_of(
        {
            "gone": cut(torch.ones(4)),
            "shape": cut(torch.ones(4)),
            "dtype": cut(torch.ones(4)),
            "kind": cut(torch.ones(2)),
        },
        {"step": b"10", "config": b"same", "other": b"12"},
    )
    b = metadata_of(
        {"new": cut(torch.ones(2, 2)), "shape": cut(torch.ones(2, 2)), "dtype": cut(torch.ones(4, dtype=_BF16))},
        {"step": b"11", "config": b"same", "other": b"123", "kind": b""},
    )
    assert [(each.fqn, each.status, each.what, each.size) for each in compare(a, b)] == [
        ("gone", "only in A", "", 16),
        ("shape", "changed", "shape 4 -> 2x2", 16),
        ("dtype", "changed", "dtype float32 -> bfloat16", 16),
        ("kind", "changed", "kind tensor -> bytes", 8),
        ("step", "changed", "bytes", 2),
        ("config", "same", "", 4),
        ("other", "changed", "bytes", 2),
        ("new", "only in B", "", 16),
    ]
    assert [each.fqn for each in compare(a, b, lambda name: name in ("step", "new"))] == ["step", "new"]


def test_an_object_without_checksum_is_changed_only_if_its_length_is() -> None:
    one, two, longer = (metadata_of({}, {"x": data}) for data in (b"12", b"13", b"123"))
    _replace_infos(one, crc64nvme=None)
    assert compare(one, two)[0].what == "no checksum in A"
    assert compare(one, longer)[0].status == "changed"


def test_a_renamed_prefix_is_found() -> None:
    names = ["layers.0.weight", "layers.1.weight", "norm"]
    model = [f"model.{name}" for name in names]
    train = [f"train.model.{name}" for name in names]
    assert find_renaming(model, train) == Renaming("", "train.", 3)
    assert find_renaming(train, model) == Renaming("train.", "", 3)
    assert find_renaming(names, model) == Renaming("", "model.", 3)
    assert find_renaming([f"a.{name}" for name in names], [*(f"b.c.{n}" for n in names), "b.c.x"]) == Renaming(
        "a.", "b.c.", 3
    )
    assert find_renaming(names, ["layers.0.weight.x", "y"]) is None
    assert find_renaming(names, []) is None
    assert str(find_renaming(names, model)) == "3 names would be equal if the prefix '' in A were 'model.'"
