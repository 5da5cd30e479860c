"""Saves and loads on several ranks: what comes back, on which world size.

What a rank checks it asserts itself; full tensors are made from seeds, so that every process knows them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.format.metadata import load_metadata
from tests.end_to_end.distributed import (
    SMALL_PARTS,
    assert_same,
    distribute,
    manifests,
    random_values,
    rank_of,
    sharded_tensors,
)
from tests.ranks import run_ranks
from tests.relying import BEFORE_2_10
from tests.servers import S3Server

# --- DTensor ---------------------------------------------------------------------------------------------


def _full_tensors() -> dict[str, tuple[torch.Tensor, Any]]:
    """Name -> full tensor and how it is placed on a mesh of one dimension."""
    return {
        "even": (random_values(0, 8, 6), Shard(0)),
        "uneven": (random_values(1, 7, 5, dtype=torch.float64), Shard(0)),
        "columns": (random_values(2, 5, 8), Shard(1)),
        "uneven_columns": (random_values(3, 3, 7, 2, dtype=torch.float16), Shard(1)),
        "replicated": (random_values(4, 1257, 233), Replicate()),
        # More ranks than rows: some have nothing of it.
        "one_row": (random_values(5, 1, 4), Shard(0)),
        "one_number": (torch.tensor([2**62 + 1]), Shard(0)),
        "no_rows": (torch.empty(0, 3), Shard(0)),
        "mask": (torch.arange(13) % 3 == 0, Shard(0)),
        "tiny_floats": (random_values(6, 31, 5, dtype=torch.bfloat16), Shard(0)),
        # 24 MB: several parts on each of four ranks.
        "large": (torch.arange(1000 * 6007, dtype=torch.int32).view(1000, 6007), Shard(0)),
    }


def _save_dtensors(url: str) -> None:
    state = {name: distribute(full, placement) for name, (full, placement) in _full_tensors().items()}
    dcp.save({"model": state}, storage_writer=S3StorageWriter(url, settings=SMALL_PARTS))


def _turned(placement: Any, full: torch.Tensor) -> Any:
    if isinstance(placement, Replicate):
        return Shard(0)
    return Shard(1 - placement.dim) if full.dim() > 1 else Replicate()


def _load_dtensors(url: str) -> None:
    """Into the placements that were saved, and into others."""
    for placed in (lambda placement, full: placement, _turned):
        state = {
            name: distribute(torch.zeros_like(full), placed(placement, full))
            for name, (full, placement) in _full_tensors().items()
        }
        dcp.load({"model": state}, storage_reader=S3StorageReader(url, settings=SMALL_PARTS))
        for name, (full, _) in _full_tensors().items():
            assert_same(name, state[name].full_tensor(), full)


@pytest.mark.quick("4-loaded_on2")
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, (1, 2)), (2, (2, 4, 1)), (4, (4, 2, 3))])
def test_dtensors_are_stored_once_and_load_on_any_world_size(
    root: str, bucket: str, memory_server: S3Server, saved_on: int, loaded_on: tuple[int, ...]
) -> None:
    memory_server.handle.reset_counters()
    run_ranks(saved_on, _save_dtensors, root)
    assert memory_server.handle.counters.requests["UploadPart"] >= max(4, 2 * saved_on)

    metadata = load_metadata(memory_server.handle.read(bucket, "run/.metadata"), url=root)
    elements = sum(full.nbytes for full, _ in _full_tensors().values())
    framing = 2048 * len(metadata.storage_data)
    assert elements < _data_bytes(memory_server, bucket) < elements + framing
    chunks = [index for index in metadata.storage_data if index.fqn == "model.replicated"]
    assert len(chunks) == 1
    assert _full_tensors()["replicated"][0].nbytes > framing  # else a second copy could hide in it

    for world_size in loaded_on:
        run_ranks(world_size, _load_dtensors, root)


def test_dtensors_on_every_server(root: str) -> None:
    run_ranks(2, _save_dtensors, root)
    run_ranks(1, _load_dtensors, root)


def _data_bytes(server: S3Server, bucket: str) -> int:
    return sum(size for key, size in server.handle.objects(bucket).items() if key.endswith(".distcp"))


def _hsdp(full: torch.Tensor) -> DTensor:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    return distribute_tensor(full, mesh, [Replicate(), Shard(0)], src_data_rank=None)


def _save_hsdp(url: str) -> None:
    dcp.save({"w": _hsdp(random_values(0, 301, 5003))}, storage_writer=S3StorageWriter(url, settings=SMALL_PARTS))
    _load_hsdp(url)


def _load_hsdp(url: str) -> None:
    full = random_values(0, 301, 5003)
    zeros = torch.zeros_like(full)
    state = {"w": _hsdp(zeros) if dist.get_world_size() == 4 else distribute(zeros, Shard(0))}
    dcp.load(state, storage_reader=S3StorageReader(url))
    assert_same("w", state["w"].full_tensor(), full)


def test_a_mesh_of_replicas_of_shards_is_stored_once(root: str, bucket: str, memory_server: S3Server) -> None:
    run_ranks(4, _save_hsdp, root)
    assert 301 * 5003 * 4 < _data_bytes(memory_server, bucket) < 301 * 5003 * 4 + 2 * 4096
    run_ranks(2, _load_hsdp, root)


# --- FSDP2, tensor parallelism ---------------------------------------------------------------------------


class _Network(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(13, 62)
        self.second = nn.Linear(62, 18)
        self.last = nn.Linear(18, 1)  # its bias is one number: of four ranks three have none of it
        self.register_buffer("seen", torch.tensor(seed))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(self.first(batch).relu()).relu())


def _parallelise(model: nn.Module, how: str) -> None:
    if how == "plain":
        return
    if how == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    else:
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        parallelize_module(model, both["tensor"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
        mesh = both["data"]
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(random_values(dist.get_rank(), 4, 13)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _make_job(how: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = _Network(seed)
    _parallelise(model, how)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))


def _job_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    """Every entry by its name, DTensors in full, independent of the model."""
    flat, _ = flatten_state_dict(state)
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        if isinstance(value, torch.Tensor)
        else value
        for name, value in flat.items()
    }


def _save_job(url: str, how: str) -> list[dict[str, Any]]:
    """Saves the untrained model to {url}/0 and, after each of two steps, to {url}/1 and {url}/2."""
    model, optimizer = _make_job(how, seed=0)
    if how == "fsdp+tp":
        # What makes this case: the shards of a rank are not neighbours.
        placements = str(model.first.weight.placements)
        assert "StridedShard" in placements, placements
    states = []
    for step in range(3):
        state = _job_state(model, optimizer)
        dcp.save(state, storage_writer=S3StorageWriter(f"{url}/{step}", separate=["model", "optimizer"]))
        states.append(_flat(state))
        _train(model, optimizer)
    return states


def _load_job(url: str, how: str) -> dict[str, Any]:
    model, optimizer = _make_job(how, seed=1)
    state = _job_state(model, optimizer)
    dcp.load(state, storage_reader=S3StorageReader(url))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return _flat(_job_state(model, optimizer))


def _assert_same_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    assert any(name.endswith("exp_avg_sq") for name in expected)
    for name, value in expected.items():
        assert_same(name, found[name], value)


@pytest.mark.quick("2-loaded_on0")
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, (4, 1)), (4, (3,))])
def test_fsdp_model_and_adamw(root: str, memory_server: S3Server, saved_on: int, loaded_on: tuple[int, ...]) -> None:
    (_, _, expected), *_ = run_ranks(saved_on, _save_job, root, "fsdp")
    # Two of ours; get_state_dict gives a new optimizer its state by a step without gradients.
    assert expected["optimizer.state.first.weight.step"] == 3
    for world_size in loaded_on:
        for found in run_ranks(world_size, _load_job, f"{root}/2", "fsdp" if world_size > 1 else "plain"):
            _assert_same_state(found, expected)


@pytest.mark.skipif(BEFORE_2_10, reason="full_tensor() of unevenly strided shards is wrong before torch 2.10")
def test_fsdp_with_tensor_parallelism_loads_without(root: str, memory_server: S3Server) -> None:
    (_, trained, _), *_ = run_ranks(4, _save_job, root, "fsdp+tp")
    for found in run_ranks(2, _load_job, f"{root}/1", "fsdp"):
        _assert_same_state(found, trained)
    (found,) = run_ranks(1, _load_job, f"{root}/1", "plain")
    _assert_same_state(found, trained)
    # The reference for the untrained one is a model that was never distributed.
    (found,) = run_ranks(1, _load_job, f"{root}/0", "plain")
    for name, value in _Network(0).state_dict().items():
        assert_same(name, found[f"model.{name}"], value)


# --- ShardedTensor ---------------------------------------------------------------------------------------


def _save_sharded(url: str) -> None:
    given, by_spec = sharded_tensors(random_values)
    dcp.save({"given": given, "spec": by_spec}, storage_writer=S3StorageWriter(url))


def _load_sharded(url: str, swap: bool) -> None:
    if swap:
        spec = ChunkShardingSpec(dim=1, placements=["rank:1/cpu", "rank:0/cpu"])
        given, by_spec = sharded_tensor.zeros(spec, 8, 6), sharded_tensor.zeros(spec, 7, 3)
    else:
        given, by_spec = sharded_tensors(lambda seed, *shape: torch.zeros(*shape))
    state = {"given": given, "spec": by_spec}
    dcp.load(state, storage_reader=S3StorageReader(url))
    for name, full in (("given", random_values(0, 8, 6)), ("spec", random_values(1, 7, 3))):
        (local,) = state[name].local_shards()
        box = tuple(
            slice(offset, offset + size)
            for offset, size in zip(local.metadata.shard_offsets, local.metadata.shard_sizes, strict=True)
        )
        assert local.tensor.numel() > 0
        assert_same(name, local.tensor, full[box].contiguous())


def _save_and_load_sharded(url: str) -> None:
    _save_sharded(url)
    _load_sharded(url, swap=False)
    _load_sharded(url, swap=True)


def test_sharded_tensors(root: str, memory_server: S3Server) -> None:
    run_ranks(2, _save_and_load_sharded, root)


# --- what every rank has ---------------------------------------------------------------------------------


class _Counter:
    """A Stateful object."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.history = torch.zeros(3, dtype=torch.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        self.history = state["history"].clone()


def _save_replicated(url: str) -> None:
    counter = _Counter(41)
    counter.history += 7
    state = {
        "tensor": random_values(0, 100, 7),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "nested": {"list": [1, "two", None, random_values(1, 3)], "epoch": 3},
        "generator": torch.Generator().manual_seed(5).get_state(),
        "counter": counter,
        f"only_rank_{dist.get_rank()}": dist.get_rank() * 10,
    }
    dcp.save(state, storage_writer=S3StorageWriter(url))


def _load_replicated(url: str, saved_on: int) -> None:
    counter = _Counter(0)
    state: dict[str, Any] = {
        "tensor": torch.zeros(100, 7),
        "scalar": torch.tensor(0.0, dtype=torch.float64),
        "nested": {"list": [0, "", 0, torch.zeros(3)], "epoch": 0},
        "generator": torch.zeros_like(torch.Generator().get_state()),
        "counter": counter,
        **{f"only_rank_{rank}": -1 for rank in range(saved_on)},
    }
    dcp.load(state, storage_reader=S3StorageReader(url))
    assert_same("tensor", state["tensor"], random_values(0, 100, 7))
    assert_same("scalar", state["scalar"], torch.tensor(2.5, dtype=torch.float64))
    assert state["nested"]["list"][:3] == [1, "two", None]
    assert_same("nested", state["nested"]["list"][3], random_values(1, 3))
    assert state["nested"]["epoch"] == 3
    assert_same("generator", state["generator"], torch.Generator().manual_seed(5).get_state())
    assert counter.count == 41
    assert_same("history", counter.history, torch.full((3,), 7))
    assert [state[f"only_rank_{rank}"] for rank in range(saved_on)] == [10 * rank for rank in range(saved_on)]


@pytest.mark.quick("4-1")
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 2), (4, 1)])
def test_replicated_tensors_objects_and_stateful(
    root: str, bucket: str, memory_server: S3Server, saved_on: int, loaded_on: int
) -> None:
    run_ranks(saved_on, _save_replicated, root)
    manifest = manifests(memory_server, bucket)
    assert [m["world_size"] for m in manifest] == [saved_on]
    assert _data_bytes(memory_server, bucket) < 100 * 7 * 4 * 2 + 20 * 4096
    run_ranks(loaded_on, _load_replicated, root, saved_on)


def _subgroup_job(url: str) -> None:
    members = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    state = {"w": random_values(0, 9, 4), f"of_{dist.get_rank()}": dist.get_rank()}
    dcp.save(state, storage_writer=S3StorageWriter(url), process_group=members)
    found = {"w": torch.zeros(9, 4), "of_1": 0, "of_2": 0}
    dcp.load(found, storage_reader=S3StorageReader(url), process_group=members)
    assert_same("w", found["w"], random_values(0, 9, 4))
    assert (found["of_1"], found["of_2"]) == (1, 2)


def test_a_process_group_that_is_a_part_of_the_world(root: str, bucket: str, memory_server: S3Server) -> None:
    run_ranks(3, _subgroup_job, root)
    (manifest,) = manifests(memory_server, bucket)
    assert manifest["world_size"] == 2
    # Ranks are numbered within the group.
    assert {rank_of(key) for key in memory_server.handle.objects(bucket) if key.endswith(".distcp")} == {0, 1}
