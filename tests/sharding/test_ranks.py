"""Hand-sharded states on ranks: saved by some, loaded by others, in one pool of four."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_s3 import (
    Fused,
    S3LoadPlanner,
    S3StorageReader,
    S3StorageWriter,
    errors,
    list_checkpoints,
    read_tensor,
    read_tensors,
    shard,
    shard_state,
    verify,
)
from tests.end_to_end.foreign import read_tensors_from_directory
from tests.end_to_end.states import random_values
from tests.end_to_end.test_interchange import download, run_foreign
from tests.ranks import run_ranks
from tests.servers import S3Server

pytestmark = pytest.mark.servers("memory")


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


def local_state(rank: int, world: int, blank: bool = False) -> dict[str, torch.Tensor]:
    state = {name: local_part(name, full, rank, world).contiguous() for name, full in full_state().items()}
    return {name: torch.full_like(part, -1) for name, part in state.items()} if blank else state


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def in_dtensors(full: dict[str, torch.Tensor], mesh: DeviceMesh, columns: bool) -> dict[str, Any]:
    def place(tensor: torch.Tensor) -> Any:
        return Replicate() if not tensor.dim() else Shard(tensor.dim() - 1 if columns else 0)

    return {name: distribute_tensor(each, mesh, [place(each)], src_data_rank=None) for name, each in full.items()}


class _Groups:
    def __init__(self) -> None:
        self.groups = {world: dist.new_group(list(range(world))) for world in WORLDS}
        self.rank = dist.get_rank()

    def run(self, world: int, work: Callable[..., None], *args: Any) -> None:
        if self.rank < world:
            work(*args, self.groups[world])
        dist.barrier()


def _load_shards(url: str, planner: Any, group: Any) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    local = local_state(rank, world, blank=True)
    state = shard_state({"model": local}, plan_of(world), group=group)
    dcp.load(state, storage_reader=S3StorageReader(url), process_group=group, planner=planner)
    assert_equal(local, local_state(rank, world))  # in the model's own memory


def _load_plain(url: str, group: Any) -> None:
    state = {"model": {name: torch.zeros_like(each) for name, each in full_state().items()}}
    dcp.load(state, storage_reader=S3StorageReader(url), process_group=group)
    assert_equal(state["model"], full_state())


def _load_dtensors(url: str, mesh: DeviceMesh, columns: bool) -> None:
    blank = {name: torch.zeros_like(each) for name, each in full_state().items()}
    state = {"model": in_dtensors(blank, mesh, columns)}
    dcp.load(state, storage_reader=S3StorageReader(url))
    assert_equal({name: each.full_tensor() for name, each in state["model"].items()}, full_state())


def _save_shards(url: str, group: Any) -> None:
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    state = shard_state({"model": local_state(rank, world)}, plan_of(world), group=group)
    dcp.save(state, storage_writer=S3StorageWriter(url), process_group=group)


def _reshard(root: str) -> None:
    groups, mesh = _Groups(), init_device_mesh("cpu", (4,))
    for saved in (4, 2):
        url = f"{root}/tp{saved}"
        groups.run(saved, _save_shards, url)
        for loaded in WORLDS:
            planner = S3LoadPlanner() if (saved + loaded) % 2 else DefaultLoadPlanner()
            groups.run(loaded, _load_shards, url, planner)
        groups.run(1, _load_plain, url)
        _load_dtensors(url, mesh, columns=saved == 2)
    # The reverse.
    dcp.save({"model": full_state()}, storage_writer=S3StorageWriter(f"{root}/plain"))
    dtensors = in_dtensors(full_state(), mesh, columns=True)
    dcp.save({"model": dtensors}, storage_writer=S3StorageWriter(f"{root}/dtensors"))
    for loaded in (4, 2):
        groups.run(loaded, _load_shards, f"{root}/plain", DefaultLoadPlanner())
        groups.run(loaded, _load_shards, f"{root}/dtensors", S3LoadPlanner())


def test_any_number_of_ranks_loads_what_any_other_saved(
    root: str, bucket: str, s3: Any, memory_server: S3Server, tmp_path: Path
) -> None:
    run_ranks(4, _reshard, root)
    for world in (4, 2):
        url = f"{root}/tp{world}"
        assert_equal(read_tensors(url), {f"model.{name}": each for name, each in full_state().items()})
        assert verify(url, full=True).ok
    assert torch.equal(
        read_tensor(f"{root}/tp2", "model.qkv.weight", (slice(3, 20), slice(1, 4))),
        full_state()["qkv.weight"][3:20, 1:4],
    )
    shapes = {f"model.{name}": tuple(each.shape) for name, each in full_state().items()}
    directory = download(s3, bucket, "run/tp4", tmp_path)
    found = run_foreign(memory_server, read_tensors_from_directory, str(directory), shapes)
    assert_equal(found, {f"model.{name}": each for name, each in full_state().items()})


_BOXES: dict[str, tuple[list[tuple[int, int, int]], str]] = {
    "hole": ([(0, 3, 8), (4, 4, 8)], "layer.w invalid fill"),
    "overlap": ([(0, 5, 8), (4, 4, 8)], "layer.w has overlapping chunks"),
    "filled whole": ([(0, 2, 4), (2, 2, 8)], r"'layer.w' has shape \(4,\) on rank 0, but \(8,\) on rank 1"),
    "an empty one": ([(0, 0, 8), (0, 8, 8)], ""),
}
"""(First, length, length of the whole) of what each rank saves of a tensor; and what is wrong with them."""


def _save_boxes(root: str) -> None:
    for name, (boxes, message) in _BOXES.items():
        first, length, whole = boxes[dist.get_rank()]
        state = {"layer": {"w": shard(torch.zeros(length), global_shape=(whole,), offsets=(first,))}}
        with pytest.raises(CheckpointException, match=message) if message else nullcontext():
            dcp.save(state, storage_writer=S3StorageWriter(f"{root}/{name}"))


def test_boxes_of_ranks_that_do_not_fit_each_other(root: str) -> None:
    run_ranks(2, _save_boxes, root)
    assert [info.name for info in list_checkpoints(root) if info.committed] == ["an empty one"]


_UNEQUAL: list[tuple[list[tuple[int, ...]], list[dict[str, Any]]]] = [
    ([(2, 4), (3, 4)], [{"*": 0}] * 2),
    ([(2, 4)] * 2, [{"*": 0}, {"*": 1}]),
    ([(2, 4)] * 2, [{"*": None}, {"*": 0}]),
    ([(2, 4)] * 2, [{"*": Fused(0, (1, 1), (1, 2))}, {"*": Fused(0, (2, 0), (1, 2))}]),
]
"""Shape and plan of each rank."""


def _refused_everywhere() -> list[str]:
    rank, found = dist.get_rank(), []
    for shapes, plans in _UNEQUAL:
        with pytest.raises(errors.ShardingError) as caught:
            shard_state({"w": torch.zeros(shapes[rank])}, plans[rank], group=dist.group.WORLD)
        assert caught.value.fqn == "w"
        found.append(str(caught.value))
    alone = dist.new_group([0])
    if rank == 1:
        with pytest.raises(errors.ShardingError, match="expected group, on its ranks only"):
            shard_state({"w": torch.zeros(2)}, {"*": 0}, group=alone)
    return found


def test_all_ranks_are_told_what_differs() -> None:
    first, second = run_ranks(2, _refused_everywhere)
    assert first == second
    assert all("'w' is split differently on the ranks" in text for text in first)
