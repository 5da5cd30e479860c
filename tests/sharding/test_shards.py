"""`shard`: a local tensor that knows its place."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import dcp_s3
from dcp_s3 import S3LoadPlanner, S3Stager, S3StorageReader, S3StorageWriter, errors, read_tensor, shard, verify
from dcp_s3.load.boxes import AnyBox as Box
from tests.end_to_end.loads import failure, save
from tests.load.test_planner import details, grid, make_plan, saved_as
from tests.servers import S3Server

pytestmark = pytest.mark.servers("memory")

SHAPE = (6, 5)
FULL = torch.arange(30.0).view(SHAPE)


def cut(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


def in_boxes(full: torch.Tensor, boxes: list[Box]) -> torch.Tensor:
    parts = [cut(full, box).clone() for box in boxes]
    return shard(parts, global_shape=full.shape, offsets=[offsets for offsets, _ in boxes])


def write_items(value: Any, fqn: str = "w") -> list[WriteItem]:
    items: list[WriteItem] = value.__create_write_items__(fqn, value)
    return items


# --- saved and loaded -------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [(1, 1), (6, 1), (1, 5), (4, 3)])
def test_boxes_are_saved_as_one_tensor_and_loaded_in_place(root: str, parts: tuple[int, int]) -> None:
    save({"w": in_boxes(FULL, grid(SHAPE, parts))}, root)
    assert torch.equal(read_tensor(root, "w"), FULL)
    assert verify(root, full=True).ok
    whole = torch.zeros(SHAPE)
    columns = [torch.nn.Parameter(torch.zeros(6, n)) for n in (2, 0, 3)]
    target = shard(columns, global_shape=SHAPE, offsets=[(0, 0), (0, 2), (0, 2)])
    for planner in (DefaultLoadPlanner(), S3LoadPlanner()):
        for tensor in (whole, *columns):
            tensor.detach().zero_()
        state = {"w": whole}
        dcp.load(state, storage_reader=S3StorageReader(root), planner=planner)
        dcp.load({"w": target}, storage_reader=S3StorageReader(root), planner=type(planner)())
        assert torch.equal(whole, FULL)
        assert torch.equal(torch.cat([column.detach() for column in columns], 1), FULL)


def test_a_part_is_loaded_alone() -> None:
    """Nothing that other ranks hold is planned."""
    part = torch.zeros(2, 5)
    state = {"w": shard(part, global_shape=SHAPE, offsets=(3, 0))}
    metadata = Metadata({"w": saved_as(SHAPE, grid(SHAPE, (6, 1)))})
    for planner in (DefaultLoadPlanner(), S3LoadPlanner()):
        items = make_plan(planner, state, metadata).items
        assert [tuple(item.storage_index.offset) for item in items] == [(3, 0), (4, 0)]  # type: ignore[arg-type]
        assert planner.resolve_tensor(items[1]).data_ptr() == part[1:].data_ptr()


@pytest.mark.parametrize("shape", [(), (0, 3), (3, 0)], ids=str)
def test_tensors_of_no_dimension_and_of_no_element(root: str, shape: tuple[int, ...]) -> None:
    def place(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"w": shard(tensor, global_shape=shape, offsets=[0] * len(shape))}

    value = torch.full(shape, 7.0)
    save(place(value), root)
    assert torch.equal(read_tensor(root, "w"), value)
    for planner in (DefaultLoadPlanner(), S3LoadPlanner()):
        found = torch.zeros(shape)
        dcp.load(place(found), storage_reader=S3StorageReader(root), planner=planner)
        assert torch.equal(found, value)


def test_another_shape_than_was_saved(root: str) -> None:
    save({"w": FULL}, root)
    state, reader = {"w": shard(torch.zeros(2, 5), global_shape=(7, 5), offsets=(0, 0))}, S3StorageReader(root)
    with pytest.raises(CheckpointException, match=r"Size mismatch between saved .*6, 5.* and current.*7, 5"):
        dcp.load(state, storage_reader=reader)
    failure(lambda: dcp.load(state, storage_reader=reader, planner=S3LoadPlanner()), errors.TensorMismatchError)


# --- planners ---------------------------------------------------------------------------------------------


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box], list[Box]]:
    """A shape, and two ways to cut it."""
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=3)))
    one, other = ([draw(st.integers(1, 4)) for _ in shape] for _ in range(2))
    return shape, draw(st.permutations(grid(shape, tuple(one)))), grid(shape, tuple(other))


@settings(max_examples=60)
@given(cuts=tilings(), ranks=st.integers(1, 3))
def test_torchs_planner_and_ours_plan_the_same_of_it(
    cuts: tuple[tuple[int, ...], list[Box], list[Box]], ranks: int
) -> None:
    shape, saved, local = cuts
    values = torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    metadata = Metadata({"w": saved_as(shape, saved)})
    found = torch.zeros(shape)
    for rank in range(ranks):
        boxes = local[rank::ranks]
        if not boxes:
            continue
        parts = [torch.zeros(size) for _, size in boxes]
        state = {"w": shard(parts, global_shape=shape, offsets=[offsets for offsets, _ in boxes])}
        ours, theirs = S3LoadPlanner(), DefaultLoadPlanner()
        plan = make_plan(ours, state, metadata)
        assert details(plan.items) == details(make_plan(theirs, state, metadata).items)
        for item in plan.items:
            assert item.storage_index.offset is not None
            source = cut(values, saved[item.storage_index.index or 0])
            box = tuple(item.storage_offsets), tuple(item.lengths)
            ours.resolve_tensor(item).copy_(cut(source, box))
        for box, part in zip(boxes, parts, strict=True):
            cut(found, box).copy_(part)
    assert torch.equal(found, values)


def test_an_empty_box_does_not_hide_the_one_that_begins_there() -> None:
    empty, rows = (shard(torch.zeros(n, 5), global_shape=SHAPE, offsets=(0, 0)) for n in (0, 6))
    assert write_items(rows)[0].index == MetadataIndex("w", torch.Size((0, 0)))
    # Alone it has to say that there is such a tensor.
    (chunk,) = empty.__create_chunk_list__()  # type: ignore[attr-defined]
    assert (tuple(chunk.offsets), tuple(chunk.sizes)) == (SHAPE, (0, 0))
    assert empty.__get_tensor_shard__(MetadataIndex("w", chunk.offsets)).shape == (0, 0)  # type: ignore[attr-defined]


# --- what does not fit ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "shape", "offsets", "message"),
    [
        (torch.zeros(2, 5), SHAPE, (5, 0), r"\(2, 5\) at \(5, 0\) does not lie inside global_shape \(6, 5\)"),
        (torch.zeros(0, 5), SHAPE, (7, 0), "does not lie inside"),
        (torch.zeros(2, 5), SHAPE, (-1, 0), "does not lie inside"),
        (torch.zeros(2, 5), (-6, 5), (0, 0), "does not lie inside"),
        (torch.zeros(2, 5), SHAPE, (0,), "does not lie inside"),
        (torch.zeros(2, 5), (6, 5, 1), (0, 0), "does not lie inside"),
        (torch.zeros(2, 5), SHAPE, (0.0, 0), "expected whole numbers"),
        (torch.zeros(2, 5), 6, (0, 0), "expected whole numbers"),
        ([], SHAPE, [], "0 tensors with 0 offsets"),
        ([torch.zeros(2, 5)], SHAPE, [(0, 0), (2, 0)], "1 tensors with 2 offsets"),
        (
            [torch.zeros(2, 5)] * 2,
            SHAPE,
            [(0, 0), (1, 0)],
            r"at \(0, 0\) and .* at \(1, 0\) of this rank overlap",
        ),
        ([torch.zeros(2, 5)] * 2, SHAPE, [(0, 0), (0, 0)], "of this rank overlap"),
        ([torch.zeros(2, 5), torch.zeros(2, 5).half()], SHAPE, [(0, 0), (2, 0)], "float32 .* and torch.float16"),
        ([torch.zeros(2, 5), 3], SHAPE, [(0, 0), (2, 0)], "a int cannot be a shard"),
        (torch.eye(5).to_sparse(), (5, 5), (0, 0), "expected a dense local tensor"),
        (shard(FULL, global_shape=SHAPE, offsets=(0, 0)), SHAPE, (0, 0), "a LocalShards cannot be a shard"),
    ],
)
def test_arguments_that_do_not_fit(tensors: Any, shape: Any, offsets: Any, message: str) -> None:
    with pytest.raises(errors.ShardingError, match=message):
        shard(tensors, global_shape=shape, offsets=offsets)


@pytest.mark.parametrize("launched", [1, 2])
def test_a_hole_is_an_error_where_there_are_no_other_ranks(
    root: str, bucket: str, memory_server: S3Server, monkeypatch: pytest.MonkeyPatch, launched: int
) -> None:
    """Also if a launcher has started several, and none of them has called init_process_group."""
    if launched > 1:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(launched))
    state = {"a": {"w": in_boxes(FULL, grid(SHAPE, (6, 1))[1:]), "whole": in_boxes(FULL, grid(SHAPE, (6, 1)))}}
    error = failure(lambda: save(state, root), errors.ShardingError)
    assert error.fqn == "a.w"
    assert "hold 25 of its 30 elements" in str(error)
    assert not memory_server.handle.objects(bucket)
    del state["a"]["w"]
    save(state, root)


def test_nothing_is_computed_with_it_and_a_box_that_is_not_there_is_named() -> None:
    value: Any = shard(FULL, global_shape=SHAPE, offsets=(0, 0))
    for compute in (lambda: value + 1, lambda: value.copy_(FULL), lambda: value[0], lambda: FULL @ value.t()):
        with pytest.raises(errors.ShardingError, match="compute with the tensor that it was made of"):
            compute()
    with pytest.raises(errors.ShardingError, match="'w' has no box at"):
        value.__get_tensor_shard__(MetadataIndex("w", [1, 0]))


# --- copies -----------------------------------------------------------------------------------------------


def _by_torch(state: Any) -> Any:
    stager = DefaultStager(StagingOptions(False, True, False, False))
    return stager.stage(state)


def _by_us(state: Any) -> Any:
    with S3Stager(asynchronous=True) as stager:
        return stager.stage(state).result(60)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "make_copy",
    [copy.deepcopy, _by_torch, _by_us, lambda state: pickle.loads(pickle.dumps(state)),
     lambda state: {"w": state["w"].clone()}],
    ids=["deepcopy", "DefaultStager", "S3Stager", "pickle", "clone"],
)  # fmt: skip
def test_a_copy_is_the_same_and_apart(make_copy: Callable[[Any], Any]) -> None:
    local = torch.nn.Parameter(FULL[1:5, ::2].clone())  # columns 0, 2, 4 next to each other
    rows = torch.split(local, [1, 3])
    found = make_copy({"w": shard(rows, global_shape=(9, 3), offsets=[(8, 0), (2, 0)])})["w"]
    expected = local.detach().clone()
    local.detach().zero_()
    assert (found.shape, found.dtype, found.offsets) == ((9, 3), torch.float32, ((8, 0), (2, 0)))
    assert torch.equal(torch.cat(found.boxes), expected)


@pytest.mark.parametrize("stager", ["writer", "torch"])
def test_asynchronous_saves(root: str, stager: str) -> None:
    local = FULL.clone()
    saving: Any = dcp.async_save(
        {"w": shard(local.split(3), global_shape=SHAPE, offsets=[(0, 0), (3, 0)])},
        storage_writer=S3StorageWriter(root),
        async_stager=None if stager == "writer" else DefaultStager(StagingOptions(False, True, False, False)),
    )
    local.zero_()
    saving.result(120)
    assert torch.equal(read_tensor(root, "w"), FULL)


def test_torchs_own_storage_takes_it(tmp_path: Any) -> None:
    """By FileSystemWriter, which makes whole tensors if it stages: that is refused."""
    value = in_boxes(FULL, grid(SHAPE, (4, 3)))
    with pytest.raises(errors.ShardingError, match="compute with the tensor that it was made of"):
        dcp.async_save({"w": value}, storage_writer=dcp.FileSystemWriter(tmp_path))
    with S3Stager() as stager:
        saving: Any = dcp.async_save({"w": value}, storage_writer=dcp.FileSystemWriter(tmp_path), async_stager=stager)
        getattr(saving, "upload_completion", saving).result(120)
    target: Any = in_boxes(torch.zeros(SHAPE), grid(SHAPE, (1, 2)))
    dcp.load({"w": target}, storage_reader=dcp.FileSystemReader(tmp_path))
    assert torch.equal(torch.cat(target.boxes, 1), FULL)


# --- plans of the documentation -------------------------------------------------------------------------


_PAGE = (Path(__file__).resolve().parents[2] / "docs" / "hand-sharded.md").read_text()
_TP, _HIDDEN, _WIDE, _WORDS = 4, 16, 64, 40


def _documented(name: str) -> dict[str, Any]:
    (block,) = [block for block in re.findall(r"```python\n(.*?)```", _PAGE, re.DOTALL) if f"{name} = {{" in block]
    values: dict[str, Any] = {"dcp_s3": dcp_s3, "hidden": _HIDDEN, "tp": _TP}
    exec(block, values)
    found: dict[str, Any] = values[name]
    return found


# Of the whole model; a dimension that is split is the first to differ from a rank's.
_GPT2 = {
    "transformer.wte.weight": ((_WORDS, _HIDDEN), 0), "transformer.wpe.weight": ((32, _HIDDEN), None),
    "transformer.h.0.ln_1.weight": ((_HIDDEN,), None), "transformer.h.0.ln_1.bias": ((_HIDDEN,), None),
    "transformer.h.0.attn.c_attn.weight": ((_HIDDEN, 3 * _HIDDEN), 1),
    "transformer.h.0.attn.c_attn.bias": ((3 * _HIDDEN,), 0),
    "transformer.h.0.attn.c_proj.weight": ((_HIDDEN, _HIDDEN), 0),
    "transformer.h.0.attn.c_proj.bias": ((_HIDDEN,), None),
    "transformer.h.0.mlp.c_fc.weight": ((_HIDDEN, _WIDE), 1), "transformer.h.0.mlp.c_fc.bias": ((_WIDE,), 0),
    "transformer.h.0.mlp.c_proj.weight": ((_WIDE, _HIDDEN), 0), "transformer.h.0.mlp.c_proj.bias": ((_HIDDEN,), None),
    "transformer.ln_f.weight": ((_HIDDEN,), None), "lm_head.weight": ((_WORDS, _HIDDEN), 0),
}  # fmt: skip


def test_the_documented_plans_say_how_their_models_are_split() -> None:
    llama = {"layers.0.self_attn.q_proj.weight": torch.zeros(4, 16), "norm.weight": torch.zeros(16)}
    found = dcp_s3.shard_state({"model": llama}, _documented("llama"), rank=1, world_size=_TP)["model"]
    assert [tuple(each.shape) for each in found.values()] == [(16, 16), (16,)]

    def local(shape: tuple[int, ...], dim: int | None) -> torch.Tensor:
        return torch.zeros([n // _TP if d == dim else n for d, n in enumerate(shape)])

    weights = {fqn: local(*whole) for fqn, whole in _GPT2.items()}
    moments = {fqn: {"exp_avg": each.clone(), "step": torch.tensor(1.0)} for fqn, each in weights.items()}
    state = {"model": weights, "optimizer": {"state": moments}}
    found = dcp_s3.shard_state(state, _documented("gpt2"), rank=1, world_size=_TP)
    for fqn, (shape, dim) in _GPT2.items():
        for each in (found["model"][fqn], found["optimizer"]["state"][fqn]["exp_avg"]):
            assert tuple(each.shape) == shape, fqn
            assert (type(each) is torch.Tensor) == (dim is None), fqn
    assert len(found["model"]["transformer.h.0.attn.c_attn.weight"].boxes) == 3
