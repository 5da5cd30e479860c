"""`shard`: a local tensor that knows its place; `shard_state`: the tensors of a state."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from dcp_s3 import Fused, S3LoadPlanner, S3Stager, S3StorageReader, errors, read_tensor, shard, shard_state, verify
from dcp_s3.load.planner import AnyBox as Box
from tests.end_to_end.loads import failure, save
from tests.load.test_planner import grid
from tests.servers import S3Server

pytestmark = pytest.mark.servers("memory")

SHAPE = (6, 5)
FULL = torch.arange(30.0).view(SHAPE)


def cut(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


def in_boxes(full: torch.Tensor, boxes: list[Box]) -> torch.Tensor:
    parts = [cut(full, box).clone() for box in boxes]
    return shard(parts, global_shape=full.shape, offsets=[offsets for offsets, _ in boxes])


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


@pytest.mark.parametrize(
    ("tensors", "shape", "offsets", "message"),
    [
        (torch.zeros(2, 5), SHAPE, (5, 0), r"\(2, 5\) at \(5, 0\) does not lie inside global_shape \(6, 5\)"),
        (torch.zeros(2, 5), SHAPE, (0,), "does not lie inside"),
        (torch.zeros(2, 5), SHAPE, (0.0, 0), "expected whole numbers"),
        (torch.zeros(2, 5), 6, (0, 0), "expected whole numbers"),
        ([torch.zeros(2, 5)], SHAPE, [(0, 0), (2, 0)], "1 tensors with 2 offsets"),
        (
            [torch.zeros(2, 5)] * 2,
            SHAPE,
            [(0, 0), (1, 0)],
            r"at \(0, 0\) and .* at \(1, 0\) of this rank overlap",
        ),
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


# --- whole states: what a plan makes of one, without ranks ------------------------------------------------


def boxes_of(value: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [(offsets, tuple(box.shape)) for offsets, box in zip(value.offsets, value.boxes, strict=True)]


def shards_of(shape: tuple[int, ...], split: Any, rank: int, world_size: int) -> Any:
    return shard_state({"w": torch.zeros(shape)}, {"w": split}, rank=rank, world_size=world_size)["w"]


def test_names_come_before_patterns_and_the_first_pattern_counts() -> None:
    model = {"a.weight": torch.zeros(2, 3), "b.weight": torch.zeros(2, 3), "norm": torch.zeros(3)}
    plan = {"*.weight": 0, "model.b*": None, "model.b.weight": 1, "*": None}
    found = shard_state({"model": model, "step": 3}, plan, rank=1, world_size=2)
    assert found["step"] == 3
    assert found["model"]["norm"] is model["norm"]
    assert boxes_of(found["model"]["a.weight"]) == [((2, 0), (2, 3))]
    assert boxes_of(found["model"]["b.weight"]) == [((0, 3), (2, 3))]
    assert found["model"]["b.weight"].shape == (2, 6)
    assert set(found["model"]) == set(model)


def test_optimizers_and_what_is_exempt() -> None:
    layer = nn.Linear(3, 2)
    known = shard(torch.zeros(1), global_shape=(4,), offsets=(2,))
    state = {
        "optim": {
            "state": {"w": {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}},
            "param_groups": [{"lr": 1}],
        },
        "list": [torch.ones(2, 3), "text", {"w": layer.weight}],
        "known": known,
    }
    found = shard_state(state, {"*": -1}, rank=0, world_size=4)
    assert found["optim"]["state"]["w"]["step"] is state["optim"]["state"]["w"]["step"]  # type: ignore[index]
    assert found["optim"]["param_groups"] == [{"lr": 1}]
    assert found["known"] is known
    inner = found["optim"]["state"]["w"]["exp_avg"], found["list"][0], found["list"][2]["w"]
    assert [tuple(each.shape) for each in inner] == [(2, 12)] * 3
    # Loads go into the model.
    assert inner[2].boxes[0].data_ptr() == layer.weight.data_ptr()


def test_fewer_heads_than_ranks() -> None:
    """4 ranks, 2 heads of k and v: ranks 0 and 1 hold the first, 2 and 3 the second."""
    found = [boxes_of(shards_of((4,), Fused(0, (2, 1, 1), copies=(1, 2, 2)), rank, 4)) for rank in range(4)]
    assert [places[0] for places in found] == [((2 * rank,), (2,)) for rank in range(4)]
    assert [places[1] for places in found] == [((8,), (1,)), ((8,), (1,)), ((9,), (1,)), ((9,), (1,))]
    assert [places[2] for places in found] == [((10,), (1,)), ((10,), (1,)), ((11,), (1,)), ((11,), (1,))]


@given(st.data())
def test_the_shards_of_all_ranks_hold_each_element_once(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 6))
    dims = data.draw(st.integers(1, 3))
    shape = data.draw(st.lists(st.integers(1, 4), min_size=dims, max_size=dims))
    dim = data.draw(st.integers(0, dims - 1))
    copies = data.draw(st.lists(st.sampled_from([c for c in range(1, 7) if world % c == 0]), min_size=1, max_size=4))
    lengths = [data.draw(st.integers(0, 3)) for _ in copies]
    shape[dim] = sum(lengths)
    seen: dict[tuple[int, ...], set[tuple[Any, Any]]] = {}
    for rank in range(world):
        found = shards_of(tuple(shape), Fused(dim, tuple(lengths), tuple(copies)), rank, world)
        for offsets, sizes in boxes_of(found):
            for element in torch.ones(sizes).nonzero().tolist():
                where = tuple(o + e for o, e in zip(offsets, element, strict=True))
                seen.setdefault(where, set()).add((offsets, sizes))
    # Held more than once only as the same box, which DCP saves once.
    assert all(len(boxes) == 1 for boxes in seen.values())
    assert len(seen) == found.numel()


_W = {"m": {"w": torch.zeros(4, 3)}}
_HERE = {"rank": 0, "world_size": 2}


@pytest.mark.parametrize(
    ("state", "plan", "place", "message"),
    [
        (_W, {}, _HERE, r"the plan does not say how 'm\.w' is split"),
        (_W, {"m.w": 2}, _HERE, r"splits 'm\.w' along 2, which is no dimension of \(4, 3\)"),
        (_W, {"m.w": True}, _HERE, "along True, which is no dimension"),
        (_W, {"m.w": Fused(2, (4,))}, _HERE, "along 2, which is no dimension"),
        (_W, {"m.w": Fused(0, (2, 1))}, _HERE, r"'m\.w' has length 4 along 0, but the plan has parts of \(2, 1\)"),
        (_W, {"m.w": Fused(0, (2, 2), copies=(1,))}, _HERE, r"with \(1,\) copies"),
        (_W, {"m.w": Fused(0, (2, 2), copies=(1, 3))}, _HERE, r"with \(1, 3\) copies on 2 ranks"),
        ({"m": nn.Linear(2, 2)}, {"*": 0}, _HERE, r"'m' is a Linear\. Remedy: pass its state_dict\(\)"),
        ({"m": (torch.zeros(2), 1)}, {"*": 0}, _HERE, "'m' is a tuple of tensors"),
        ({"m": torch.eye(3).to_sparse()}, {"*": 0}, _HERE, "'m' is torch.sparse_coo, expected a dense tensor"),
        (_W, {"*": 0}, {}, "expected group"),
        (_W, {"*": 0}, {"rank": 0}, "expected group"),
        (_W, {"*": 0}, {"world_size": 2}, "expected group"),
        (_W, {"*": 0}, {"rank": 2, "world_size": 2}, "expected group"),
    ],
)
def test_states_plans_and_places_that_do_not_fit(state: Any, plan: Any, place: Any, message: str) -> None:
    with pytest.raises(errors.ShardingError, match=message) as caught:
        shard_state(state, plan, **place)
    assert caught.value.fqn == ("" if place is not _HERE else "m.w" if state is _W else "m")
