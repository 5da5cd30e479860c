"""`shard` and `shard_state`: local tensors that know their place in one that is sharded by hand; on one process, and on
ranks, where any number of them loads what any other has saved."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dcp_s3
from dcp_s3 import Fused, S3LoadPlanner, S3StorageReader, S3StorageWriter, errors, read_tensor, shard, shard_state
from dcp_s3.load.planner import AnyBox as Box
from tests.end_to_end.loads import failure, load, save
from tests.end_to_end.states import assert_same, blank, random_values
from tests.end_to_end.test_interchange import download, read_by_torch
from tests.load.test_planner import grid
from tests.ranks import run_ranks
from tests.servers import S3Server

pytestmark = pytest.mark.servers("memory")

SHAPE = (6, 5)
FULL = torch.arange(30.0).view(SHAPE)


def cut(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


def in_boxes(full: torch.Tensor, boxes: list[Box]) -> torch.Tensor:
    parts = [cut(full, box).clone() for box in boxes]
    return shard(parts, global_shape=full.shape, offsets=[offsets for offsets, _ in boxes])


@pytest.mark.parametrize(
    ("shape", "parts"),
    [(SHAPE, (1, 1)), (SHAPE, (6, 1)), (SHAPE, (1, 5)), (SHAPE, (4, 3)), ((), ()), ((0, 3), (1, 1)), ((3, 0), (1, 1))],
)
def test_boxes_are_saved_as_one_tensor_and_loaded_in_place(
    root: str, shape: tuple[int, ...], parts: tuple[int, ...]
) -> None:
    full = torch.arange(float(math.prod(shape))).view(shape) + 1
    save({"w": in_boxes(full, grid(shape, parts))}, root)
    assert torch.equal(read_tensor(root, "w"), full)
    assert dcp_s3.verify(root, full=True).ok
    boxes = grid(shape, (1, 8)[: len(shape)])  # columns, some of which are empty
    for planner in (DefaultLoadPlanner, S3LoadPlanner):
        whole, columns = torch.zeros(shape), [torch.nn.Parameter(torch.zeros(sizes)) for _, sizes in boxes]
        target = shard(columns, global_shape=shape, offsets=[offsets for offsets, _ in boxes])
        for tensor in (whole, target):
            dcp.load({"w": tensor}, storage_reader=S3StorageReader(root), planner=planner())
        assert torch.equal(whole, full)
        assert all(torch.equal(column.detach(), cut(full, box)) for column, box in zip(columns, boxes, strict=True))


def test_another_shape_than_was_saved(root: str) -> None:
    save({"w": FULL}, root)
    state, reader = {"w": shard(torch.zeros(2, 5), global_shape=(7, 5), offsets=(0, 0))}, S3StorageReader(root)
    failure(lambda: load(state, root), match=r"Size mismatch between saved .*6, 5.* and current.*7, 5")
    failure(lambda: dcp.load(state, storage_reader=reader, planner=S3LoadPlanner()), errors.TensorMismatchError)


@pytest.mark.parametrize(
    ("tensors", "shape", "offsets", "message"),
    [
        (torch.zeros(2, 5), SHAPE, (5, 0), r"\(2, 5\) at \(5, 0\) does not lie inside global_shape \(6, 5\)"),
        (torch.zeros(2, 5), SHAPE, (0,), "does not lie inside"),
        (torch.zeros(2, 5), SHAPE, (0.0, 0), "expected whole numbers"),
        (torch.zeros(2, 5), 6, (0, 0), "expected whole numbers"),
        ([torch.zeros(2, 5)], SHAPE, [(0, 0), (2, 0)], "1 tensors with 2 offsets"),
        ([torch.zeros(2, 5)] * 2, SHAPE, [(0, 0), (1, 0)], r"at \(0, 0\) and .* at \(1, 0\) of this rank overlap"),
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


def _by_us(state: Any) -> Any:
    with dcp_s3.S3Stager(asynchronous=True) as stager:
        return stager.stage(state).result(60)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "make_copy",
    [copy.deepcopy, lambda state: DefaultStager(StagingOptions(False, True, False, False)).stage(state), _by_us,
     lambda state: pickle.loads(pickle.dumps(state)), lambda state: {"w": state["w"].clone()}],
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
    of_w = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}
    optim = {"state": {"w": of_w}, "param_groups": [{"lr": 1}]}
    state = {"optim": optim, "list": [torch.ones(2, 3), "text", {"w": layer.weight}], "known": known}
    found = shard_state(state, {"*": -1}, rank=0, world_size=4)
    assert found["optim"]["state"]["w"]["step"] is of_w["step"]
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


# --- on ranks ---

HEAD = 2
"""Elements of a head of attention."""
HEADS = (8, 4, 4)
"""Of q, k and v."""
WORLDS = (4, 2, 1)


def full_state() -> dict[str, torch.Tensor]:
    rows = HEAD * sum(HEADS)
    shapes = {
        "embed.weight": (12, 6), "qkv.weight": (rows, 6), "qkv.bias": (rows,), "dense.weight": (6, 16),
        "norm.weight": (6,), "mlp.gate_up": (2, 5, 16),
    }  # fmt: skip
    model = {name: random_values(seed, *shape) for seed, (name, shape) in enumerate(shapes.items())}
    return {**model, "qkv.weight.exp_avg": model["qkv.weight"] + 1, "embed.weight.step": torch.tensor(7.0)}


def plan_of(world: int) -> dict[str, Any]:
    qkv = tuple(HEAD * heads // world for heads in HEADS)
    return {
        "*norm*": None, "*embed.*": 0, "*qkv.*": Fused(0, qkv), "*dense.*": 1,
        "*gate_up*": Fused(-1, (8 // world, 8 // world)),
    }  # fmt: skip


def local_part(name: str, full: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    """What a rank has of a tensor: cut here by other means than the plan's."""
    if "norm" in name or not full.dim():
        return full.clone()
    if "qkv" in name:
        return torch.cat([part.chunk(world)[rank] for part in full.split([HEAD * heads for heads in HEADS])])
    if "gate_up" in name:
        return torch.cat([part.chunk(world, 2)[rank] for part in full.chunk(2, 2)], 2)
    return full.chunk(world, 1 if "dense" in name else 0)[rank].clone()


def local_state(rank: int, world: int) -> dict[str, torch.Tensor]:
    return {name: local_part(name, full, rank, world).contiguous() for name, full in full_state().items()}


def in_dtensors(full: dict[str, torch.Tensor], mesh: DeviceMesh, columns: bool) -> dict[str, Any]:
    def place(tensor: torch.Tensor) -> Any:
        return Replicate() if not tensor.dim() else Shard(tensor.dim() - 1 if columns else 0)

    return {name: distribute_tensor(each, mesh, [place(each)], src_data_rank=None) for name, each in full.items()}


def _load_shards(url: str, planner: Any, group: Any) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    local = {name: torch.full_like(part, -1) for name, part in local_state(rank, world).items()}
    state = shard_state({"model": local}, plan_of(world), group=group)
    dcp.load(state, storage_reader=S3StorageReader(url), process_group=group, planner=planner)
    assert_same(local, local_state(rank, world))  # in the model's own memory


def _load_plain(url: str, group: Any) -> None:
    state = blank({"model": full_state()})
    dcp.load(state, storage_reader=S3StorageReader(url), process_group=group)
    assert_same(state["model"], full_state())


def _load_dtensors(url: str, mesh: DeviceMesh, columns: bool) -> None:
    state = load({"model": in_dtensors(blank(full_state()), mesh, columns)}, url)
    assert_same({name: each.full_tensor() for name, each in state["model"].items()}, full_state())


def _save_shards(url: str, group: Any) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    state = shard_state({"model": local_state(rank, world)}, plan_of(world), group=group)
    dcp.save(state, storage_writer=S3StorageWriter(url), process_group=group)


def _reshard(root: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    groups = {world: dist.new_group(list(range(4 - world, 4))) for world in WORLDS}  # whose numbers are not the ranks'

    def run(world: int, work: Callable[..., None], *args: Any) -> None:
        if dist.get_rank() >= 4 - world:
            work(*args, groups[world])
        dist.barrier()

    for saved in (4, 2):
        url = f"{root}/tp{saved}"
        run(saved, _save_shards, url)
        for loaded in WORLDS:
            planner = S3LoadPlanner() if (saved + loaded) % 2 else DefaultLoadPlanner()
            run(loaded, _load_shards, url, planner)
        run(1, _load_plain, url)
        _load_dtensors(url, mesh, columns=saved == 2)
    # The reverse.
    save({"model": full_state()}, f"{root}/plain")
    save({"model": in_dtensors(full_state(), mesh, columns=True)}, f"{root}/dtensors")
    for loaded in (4, 2):
        run(loaded, _load_shards, f"{root}/plain", DefaultLoadPlanner())
        run(loaded, _load_shards, f"{root}/dtensors", S3LoadPlanner())


def test_any_number_of_ranks_loads_what_any_other_saved(
    root: str, bucket: str, s3: Any, memory_server: S3Server, tmp_path: Path
) -> None:
    run_ranks(4, _reshard, root)
    sizes = {info.name: info.world_size for info in dcp_s3.list_checkpoints(root)}
    for world in (4, 2):
        url = f"{root}/tp{world}"
        assert_same(dcp_s3.read_tensors(url), {f"model.{name}": each for name, each in full_state().items()})
        assert dcp_s3.verify(url, full=True).ok
        # Ranks are numbered within the group.
        names = [key.partition("/__")[2] for key in memory_server.handle.objects(bucket) if f"/tp{world}/__" in key]
        assert {int(name.partition("_")[0]) for name in names} == set(range(sizes[f"tp{world}"])) == set(range(world))
    part = slice(3, 20), slice(1, 4)
    assert torch.equal(read_tensor(f"{root}/tp2", "model.qkv.weight", part), full_state()["qkv.weight"][part])
    [found] = read_by_torch(memory_server, download(s3, bucket, "run/tp4", tmp_path))
    assert_same(found, {f"model.{name}": each for name, each in full_state().items()})


_BOXES: dict[str, tuple[list[tuple[int, int, int]], str]] = {
    "hole": ([(0, 3, 8), (4, 4, 8)], "layer.w invalid fill"),
    "overlap": ([(0, 5, 8), (4, 4, 8)], "layer.w has overlapping chunks"),
    "filled whole": ([(0, 2, 4), (2, 2, 8)], r"'layer.w' has shape \(4,\) on rank 0, but \(8,\) on rank 1"),
    "an empty one": ([(0, 0, 8), (0, 8, 8)], ""),
}
"""(First, length, length of the whole) of what each rank saves of a tensor; and what is wrong with them."""


_UNEQUAL: list[tuple[list[tuple[int, ...]], list[dict[str, Any]]]] = [
    ([(2, 4), (3, 4)], [{"*": 0}] * 2),
    ([(2, 4)] * 2, [{"*": 0}, {"*": 1}]),
    ([(2, 4)] * 2, [{"*": None}, {"*": 0}]),
    ([(2, 4)] * 2, [{"*": Fused(0, (1, 1), (1, 2))}, {"*": Fused(0, (2, 0), (1, 2))}]),
]
"""Shape and plan of each rank."""


def _refused_on_two(root: str) -> list[str]:
    rank, told = dist.get_rank(), []
    for name, (boxes, message) in _BOXES.items():
        first, length, whole = boxes[rank]
        state = {"layer": {"w": shard(torch.zeros(length), global_shape=(whole,), offsets=(first,))}}
        with pytest.raises(CheckpointException, match=message) if message else nullcontext():
            save(state, f"{root}/{name}")
    for shapes, plans in _UNEQUAL:
        with pytest.raises(errors.ShardingError, match="'w' is split differently on the ranks") as caught:
            shard_state({"w": torch.zeros(shapes[rank])}, plans[rank], group=dist.group.WORLD)
        assert caught.value.fqn == "w"
        told.append(str(caught.value))
    alone = dist.new_group([0])
    if rank == 1:
        with pytest.raises(errors.ShardingError, match="expected group, on its ranks only"):
            shard_state({"w": torch.zeros(2)}, {"*": 0}, group=alone)
    return told


def test_what_ranks_hold_that_does_not_fit_each_other_is_told_to_all(root: str) -> None:
    first, second = run_ranks(2, _refused_on_two, root)
    assert first == second
    assert [info.name for info in dcp_s3.list_checkpoints(root) if info.committed] == ["an empty one"]
