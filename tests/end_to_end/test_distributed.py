"""Saves and loads on several ranks: what comes back, on which world size, and what is left when a rank fails.

What a rank checks it asserts itself; full tensors are made from seeds, so that every process knows them.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.format.metadata import load_metadata
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import resolve_settings
from dcp_s3.url import parse_url
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.servers import S3Server

SMALL_PARTS = {"part_size": "5MiB"}


# --- DTensor ---------------------------------------------------------------------------------------------


def _random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _full_tensors() -> dict[str, tuple[torch.Tensor, Any]]:
    """Name -> full tensor and how it is placed on a mesh of one dimension."""
    return {
        "even": (_random(0, 8, 6), Shard(0)),
        "uneven": (_random(1, 7, 5, dtype=torch.float64), Shard(0)),
        "columns": (_random(2, 5, 8), Shard(1)),
        "uneven_columns": (_random(3, 3, 7, 2, dtype=torch.float16), Shard(1)),
        "replicated": (_random(4, 1257, 233), Replicate()),
        # More ranks than rows: some have nothing of it.
        "one_row": (_random(5, 1, 4), Shard(0)),
        "one_number": (torch.tensor([2**62 + 1]), Shard(0)),
        "no_rows": (torch.empty(0, 3), Shard(0)),
        "mask": (torch.arange(13) % 3 == 0, Shard(0)),
        "tiny_floats": (_random(6, 31, 5, dtype=torch.bfloat16), Shard(0)),
        # 24 MB: several parts on each of four ranks.
        "large": (torch.arange(1000 * 6007, dtype=torch.int32).view(1000, 6007), Shard(0)),
    }


def _distribute(full: torch.Tensor, placement: Any) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(full, mesh, [placement], src_data_rank=None)


def _save_dtensors(url: str) -> None:
    state = {name: _distribute(full, placement) for name, (full, placement) in _full_tensors().items()}
    dcp.save({"model": state}, storage_writer=S3StorageWriter(url, settings=SMALL_PARTS))


def _turned(placement: Any, full: torch.Tensor) -> Any:
    if isinstance(placement, Replicate):
        return Shard(0)
    return Shard(1 - placement.dim) if full.dim() > 1 else Replicate()


def _load_dtensors(url: str) -> None:
    """Into the placements that were saved, and into others."""
    for placed in (lambda placement, full: placement, _turned):
        state = {
            name: _distribute(torch.zeros_like(full), placed(placement, full))
            for name, (full, placement) in _full_tensors().items()
        }
        dcp.load({"model": state}, storage_reader=S3StorageReader(url, settings=SMALL_PARTS))
        for name, (full, _) in _full_tensors().items():
            _assert_same(name, state[name].full_tensor(), full)


def _assert_same(name: str, found: Any, expected: Any) -> None:
    assert type(found) is type(expected), f"{name}: {type(found)}"
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype, f"{name}: {found.dtype}"
        assert found.shape == expected.shape, f"{name}: {found.shape}"
        assert torch.equal(found, expected), name
    else:
        assert found == expected, name


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
    dcp.save({"w": _hsdp(_random(0, 301, 5003))}, storage_writer=S3StorageWriter(url, settings=SMALL_PARTS))
    _load_hsdp(url)


def _load_hsdp(url: str) -> None:
    full = _random(0, 301, 5003)
    zeros = torch.zeros_like(full)
    state = {"w": _hsdp(zeros) if dist.get_world_size() == 4 else _distribute(zeros, Shard(0))}
    dcp.load(state, storage_reader=S3StorageReader(url))
    _assert_same("w", state["w"].full_tensor(), full)


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
    model(_random(dist.get_rank(), 4, 13)).square().sum().backward()
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
        _assert_same(name, found[name], value)


@pytest.mark.quick("2-loaded_on0")
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(2, (4, 1)), (4, (3,))])
def test_fsdp_model_and_adamw(root: str, memory_server: S3Server, saved_on: int, loaded_on: tuple[int, ...]) -> None:
    (_, _, expected), *_ = run_ranks(saved_on, _save_job, root, "fsdp")
    # Two of ours; get_state_dict gives a new optimizer its state by a step without gradients.
    assert expected["optimizer.state.first.weight.step"] == 3
    for world_size in loaded_on:
        for found in run_ranks(world_size, _load_job, f"{root}/2", "fsdp" if world_size > 1 else "plain"):
            _assert_same_state(found, expected)


def test_fsdp_with_tensor_parallelism_loads_without(root: str, memory_server: S3Server) -> None:
    (_, trained, _), *_ = run_ranks(4, _save_job, root, "fsdp+tp")
    for found in run_ranks(2, _load_job, f"{root}/1", "fsdp"):
        _assert_same_state(found, trained)
    (found,) = run_ranks(1, _load_job, f"{root}/1", "plain")
    _assert_same_state(found, trained)
    # The reference for the untrained one is a model that was never distributed.
    (found,) = run_ranks(1, _load_job, f"{root}/0", "plain")
    for name, value in _Network(0).state_dict().items():
        _assert_same(name, found[f"model.{name}"], value)


# --- ShardedTensor ---------------------------------------------------------------------------------------


def _sharded(value: Any) -> tuple[Any, Any]:
    """A ShardedTensor of given shards (3 + 5 rows), and one of a sharding spec (7 rows: 4 + 3)."""
    rank = dist.get_rank()
    start, rows = ((0, 3), (3, 5))[rank]
    shard = sharded_tensor.Shard(
        tensor=value(0, 8, 6)[start : start + rows].clone(),
        metadata=ShardMetadata([start, 0], [rows, 6], f"rank:{rank}/cpu"),
    )
    given = sharded_tensor.init_from_local_shards([shard], 8, 6)
    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    by_spec = sharded_tensor.zeros(spec, 7, 3)
    for local in by_spec.local_shards():
        first = local.metadata.shard_offsets[0]
        local.tensor.copy_(value(1, 7, 3)[first : first + local.metadata.shard_sizes[0]])
    return given, by_spec


def _save_sharded(url: str) -> None:
    given, by_spec = _sharded(_random)
    dcp.save({"given": given, "spec": by_spec}, storage_writer=S3StorageWriter(url))


def _load_sharded(url: str, swap: bool) -> None:
    if swap:
        spec = ChunkShardingSpec(dim=1, placements=["rank:1/cpu", "rank:0/cpu"])
        given, by_spec = sharded_tensor.zeros(spec, 8, 6), sharded_tensor.zeros(spec, 7, 3)
    else:
        given, by_spec = _sharded(lambda seed, *shape: torch.zeros(*shape))
    state = {"given": given, "spec": by_spec}
    dcp.load(state, storage_reader=S3StorageReader(url))
    for name, full in (("given", _random(0, 8, 6)), ("spec", _random(1, 7, 3))):
        (local,) = state[name].local_shards()
        box = tuple(
            slice(offset, offset + size)
            for offset, size in zip(local.metadata.shard_offsets, local.metadata.shard_sizes, strict=True)
        )
        assert local.tensor.numel() > 0
        _assert_same(name, local.tensor, full[box].contiguous())


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
        "tensor": _random(0, 100, 7),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "nested": {"list": [1, "two", None, _random(1, 3)], "epoch": 3},
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
    _assert_same("tensor", state["tensor"], _random(0, 100, 7))
    _assert_same("scalar", state["scalar"], torch.tensor(2.5, dtype=torch.float64))
    assert state["nested"]["list"][:3] == [1, "two", None]
    _assert_same("nested", state["nested"]["list"][3], _random(1, 3))
    assert state["nested"]["epoch"] == 3
    _assert_same("generator", state["generator"], torch.Generator().manual_seed(5).get_state())
    assert counter.count == 41
    _assert_same("history", counter.history, torch.full((3,), 7))
    assert [state[f"only_rank_{rank}"] for rank in range(saved_on)] == [10 * rank for rank in range(saved_on)]


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 2), (4, 1)])
def test_replicated_tensors_objects_and_stateful(
    root: str, bucket: str, memory_server: S3Server, saved_on: int, loaded_on: int
) -> None:
    run_ranks(saved_on, _save_replicated, root)
    manifest = _manifests(memory_server, bucket)
    assert [m["world_size"] for m in manifest] == [saved_on]
    assert _data_bytes(memory_server, bucket) < 100 * 7 * 4 * 2 + 20 * 4096
    run_ranks(loaded_on, _load_replicated, root, saved_on)


def _manifests(server: S3Server, bucket: str) -> list[dict[str, Any]]:
    keys = [key for key in server.handle.objects(bucket) if "/manifest-" in key]
    return [json.loads(server.handle.read(bucket, key)) for key in keys]


def _subgroup_job(url: str) -> None:
    members = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    state = {"w": _random(0, 9, 4), f"of_{dist.get_rank()}": dist.get_rank()}
    dcp.save(state, storage_writer=S3StorageWriter(url), process_group=members)
    found = {"w": torch.zeros(9, 4), "of_1": 0, "of_2": 0}
    dcp.load(found, storage_reader=S3StorageReader(url), process_group=members)
    _assert_same("w", found["w"], _random(0, 9, 4))
    assert (found["of_1"], found["of_2"]) == (1, 2)


def test_a_process_group_that_is_a_part_of_the_world(root: str, bucket: str, memory_server: S3Server) -> None:
    run_ranks(3, _subgroup_job, root)
    (manifest,) = _manifests(memory_server, bucket)
    assert manifest["world_size"] == 2
    # Ranks are numbered within the group.
    assert {_rank_of(key) for key in memory_server.handle.objects(bucket) if key.endswith(".distcp")} == {0, 1}


def _rank_of(key: str) -> int:
    match = re.search(r"__(\d+)_\d+-[0-9a-f]+\.distcp$", key)
    assert match, key
    return int(match[1])


# --- without collectives ---------------------------------------------------------------------------------


def _own_state(seed: int) -> dict[str, Any]:
    return {
        "sharded": _distribute(_random(seed, 7, 3), Shard(0)),
        "own": _random(seed + dist.get_rank(), 5),
        "rank": dist.get_rank() + seed,
    }


def _save_alone(url: str, seed: int, overwrite: bool = False) -> BaseException | None:
    writer = S3StorageWriter(url, overwrite=overwrite)
    try:
        dcp.save(_own_state(seed), storage_writer=writer, use_collectives=False)
    except BaseException as error:  # noqa: BLE001 - CheckpointException is no Exception
        return error
    return None


def _save_together(url: str, seed: int, overwrite: bool = False) -> BaseException | None:
    writer = S3StorageWriter(url, overwrite=overwrite)
    try:
        dcp.save({"shared": _random(seed, 4)}, storage_writer=writer)
    except CheckpointException as error:
        return error
    return None


def _load_together(url: str, seed: int) -> None:
    state = {"shared": torch.zeros(4)}
    dcp.load(state, storage_reader=S3StorageReader(url))
    _assert_same("shared", state["shared"], _random(seed, 4))


def _load_alone(url: str, seed: int) -> None:
    state = {"sharded": _distribute(torch.zeros(7, 3), Shard(0)), "own": torch.zeros(5), "rank": -1}
    dcp.load(state, storage_reader=S3StorageReader(url))
    _assert_same("sharded", state["sharded"].full_tensor(), _random(seed, 7, 3))
    _assert_same("own", state["own"], _random(seed + dist.get_rank(), 5))
    assert state["rank"] == dist.get_rank() + seed


def _alone_again_and_again(url: str) -> None:
    assert _save_alone(url, 10) is None
    _load_alone(url, 10)
    # Each commits for itself: a replacement that is cut off would be a mixture.
    for overwrite in (False, True):
        refused = _save_alone(url, 20, overwrite)
        assert isinstance(refused, errors.CheckpointExistsError), repr(refused)
        assert url in str(refused)
    dist.barrier()
    _load_alone(url, 10)


def test_without_collectives_each_rank_commits_for_itself(root: str, bucket: str, memory_server: S3Server) -> None:
    run_ranks(2, _alone_again_and_again, root)
    keys = list(memory_server.handle.objects(bucket))
    assert {"run/__0.metadata", "run/__1.metadata"} <= set(keys)
    assert "run/.metadata" not in keys
    assert sorted((m["rank"], m["world_size"]) for m in _manifests(memory_server, bucket)) == [(0, 2), (1, 2)]
    # Nothing is left of the saves that were refused.
    assert sorted(_rank_of(key) for key in keys if key.endswith(".distcp")) == [0, 1]


def _alone_over_together(url: str) -> None:
    assert _save_together(url, 1) is None
    for overwrite in (False, True):
        refused = _save_alone(url, 10, overwrite)
        assert isinstance(refused, errors.CheckpointExistsError), repr(refused)
    _load_together(url, 1)


def _together_over_alone(url: str) -> None:
    assert _save_alone(url, 10) is None
    refused = _save_together(url, 1)
    assert isinstance(refused, CheckpointException), repr(refused)
    assert isinstance(refused.failures[0][0], errors.CheckpointExistsError)
    _load_alone(url, 10)
    assert _save_together(url, 2, overwrite=True) is None
    _load_together(url, 2)


def test_without_collectives_no_checkpoint_of_all_ranks_is_hidden(root: str, memory_server: S3Server) -> None:
    run_ranks(2, _alone_over_together, root)


def test_with_collectives_the_checkpoints_of_single_ranks_are_replaced(
    root: str, bucket: str, memory_server: S3Server
) -> None:
    run_ranks(2, _together_over_alone, root)
    keys = set(memory_server.handle.objects(bucket))
    assert "run/.metadata" in keys
    assert len(keys) == 3, keys  # and a manifest, and the data


def _load_with_one_missing(url: str) -> BaseException | None:
    assert _save_alone(url, 10) is None
    bucket = S3Store(parse_url(url).bucket, resolve_settings(None))
    dist.barrier()
    if dist.get_rank() == 0:
        bucket.delete([parse_url(url).key("__1.metadata")])
    dist.barrier()
    own = torch.zeros(5)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"own": own}, storage_reader=S3StorageReader(url))
    assert torch.equal(own, torch.zeros(5))
    return caught.value


def test_without_collectives_a_rank_without_metadata_fails_the_load(root: str, memory_server: S3Server) -> None:
    failures = _failures(run_ranks(2, _load_with_one_missing, root))
    assert set(failures) == {1}
    assert isinstance(failures[1], errors.CheckpointNotFoundError)
    assert root in str(failures[1])
    assert "__1.metadata" in str(failures[1])  # not only the .metadata that such a checkpoint never has


# --- failures --------------------------------------------------------------------------------------------


class _BrokenPlanner(DefaultSavePlanner):
    """Fails on one rank, at its last item, when most of its objects are complete."""

    def __init__(self, rank: int, entry: str) -> None:
        super().__init__()
        self._broken_rank = rank
        self._entry = entry

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if dist.get_rank() == self._broken_rank and write_item.index.fqn == self._entry:
            raise ValueError(f"no data for {write_item.index.fqn}")
        return super().resolve_data(write_item)


class _WrongPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        return "text" if dist.get_rank() == 1 else super().resolve_data(write_item)


def _large_state(fill: float) -> dict[str, Any]:
    """Four entries; on each of two ranks 6 MB of each, so that each becomes an object of several parts."""
    return {f"e{n}": _distribute(torch.full((2, 1_500_000), fill + n), Shard(0)) for n in range(4)}


def _save_failing(url: str, planner: Any = None, overwrite: bool = False, fill: float = 1.0) -> BaseException | None:
    writer = S3StorageWriter(url, overwrite=overwrite, settings={**SMALL_PARTS, "retry_attempts": 2})
    try:
        dcp.save(_large_state(fill), storage_writer=writer, planner=planner)
    except BaseException as error:  # noqa: BLE001 - CheckpointException is no Exception
        return error
    return None


def _load_large(url: str, fill: float) -> None:
    state = _large_state(0.0)
    dcp.load(state, storage_reader=S3StorageReader(url))
    for name, value in _large_state(fill).items():
        _assert_same(name, state[name].full_tensor(), value.full_tensor())


def _failures(outcome: Sequence[BaseException | None]) -> dict[int, BaseException]:
    """What failed on which rank; every rank must have been told the same."""
    told = []
    for error in outcome:
        assert isinstance(error, CheckpointException), repr(error)
        told.append({rank: (type(cause), str(cause)) for rank, (cause, _) in error.failures.items()})
    assert all(each == told[0] for each in told), told
    first = outcome[0]
    assert isinstance(first, CheckpointException)
    return {rank: cause for rank, (cause, _) in first.failures.items()}


def _ranks_with_objects(keys: Any) -> set[int]:
    return {_rank_of(key) for key in keys if key.endswith(".distcp")}


def _objects_of(data: bytes) -> set[str]:
    """Keys of the objects to which a .metadata refers."""
    metadata = load_metadata(data, url="here")
    return {f"run/{info.relative_path}" for info in metadata.storage_data.values()}


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with serve(monkeypatch) as server:
        yield server


def test_a_planner_that_raises_on_one_rank(root: str, bucket: str, memory_server: S3Server) -> None:
    failures = _failures(run_ranks(2, _save_failing, root, _BrokenPlanner(1, "e3")))
    assert set(failures) == {1}
    assert isinstance(failures[1], ValueError)
    assert "no data for e3" in str(failures[1])
    keys = memory_server.handle.objects(bucket)
    assert "run/.metadata" not in keys
    assert not _manifests(memory_server, bucket)
    assert 1 not in _ranks_with_objects(keys)
    assert memory_server.handle.open_uploads(bucket) == []


def test_a_planner_that_returns_what_cannot_be_stored(root: str, bucket: str, memory_server: S3Server) -> None:
    failures = _failures(run_ranks(2, _save_failing, root, _WrongPlanner()))
    assert set(failures) == {1}
    assert isinstance(failures[1], errors.SaveProtocolError)
    assert "run/.metadata" not in memory_server.handle.objects(bucket)


def _overwrite_failing(url: str) -> BaseException | None:
    assert _save_failing(url, fill=1.0) is None
    error = _save_failing(url, overwrite=True, fill=5.0)
    _load_large(url, 1.0)  # the one that was to be overwritten is whole
    return error


@pytest.mark.parametrize(
    ("rank", "operation", "fault", "expected"),
    [
        (1, "UploadPart", Fault.error(403, "AccessDenied"), errors.AccessDeniedError),
        (1, "CompleteMultipartUpload", Fault.error(403, "AccessDenied"), errors.AccessDeniedError),
        (0, "CompleteMultipartUpload", Fault.error_in_200("InternalError"), errors.TransferError),
    ],
)
def test_s3_refuses_one_object_of_one_rank(
    faulty: FaultyServer, rank: int, operation: str, fault: Fault, expected: type[BaseException]
) -> None:
    committed = []

    def rule(request: Any) -> Fault | None:
        if request.operation == "PutObject" and request.key == "run/.metadata":
            committed.append(request.key)
        # Only the last object: those before it may be complete by then.
        return fault if committed and request.operation == operation and f"__{rank}_3-" in request.key else None

    faulty.rule = rule
    failures = _failures(run_ranks(2, _overwrite_failing, f"s3://{BUCKET}/run"))
    assert set(failures) == {rank}
    assert isinstance(failures[rank], expected)
    assert f"__{rank}_3-" in str(failures[rank])
    assert len(committed) == 1
    assert faulty.s3.open_uploads(BUCKET) == []
    keys = set(faulty.s3.objects(BUCKET))
    left = keys - _objects_of(faulty.s3.read(BUCKET, "run/.metadata"))
    assert _ranks_with_objects(left) <= {1 - rank}
    assert len([key for key in keys if "manifest" in key]) == 1


def _commit_failing(url: str) -> list[BaseException | None]:
    outcome = [_save_failing(url, fill=fill) for fill in (1.0, 2.0, 3.0)]
    _load_large(url, 3.0)
    return outcome


def test_s3_refuses_the_commit(faulty: FaultyServer) -> None:
    refused: list[str] = []

    def rule(request: Any) -> Fault | None:
        for name in ("manifest-", ".metadata"):
            if request.operation == "PutObject" and name in request.key and name not in refused:
                refused.append(name)
                return Fault.error(403, "AccessDenied")
        return None

    faulty.rule = rule
    outcome = run_ranks(2, _commit_failing, f"s3://{BUCKET}/run")
    assert refused == ["manifest-", ".metadata"]
    for attempt in (0, 1):
        failures = _failures([told[attempt] for told in outcome])
        assert set(failures) == {0}
        assert isinstance(failures[0], errors.AccessDeniedError)
    # The URL was still free after both.
    assert [told[2] for told in outcome] == [None, None]
    assert faulty.s3.open_uploads(BUCKET) == []


def _save_three_times(url: str) -> BaseException | None:
    assert _save_together(url, 1) is None
    error = _save_together(url, 2)
    _load_together(url, 1)
    assert _save_together(url, 3, overwrite=True) is None
    _load_together(url, 3)
    return error


def test_every_rank_is_told_that_a_checkpoint_exists(root: str, s3: Any, bucket: str) -> None:
    failures = _failures(run_ranks(2, _save_three_times, root))
    assert isinstance(failures[0], errors.CheckpointExistsError)
    # One checkpoint: .metadata, manifest, data.
    assert len(_keys(s3, bucket)) == 3


def _keys(client: Any, bucket: str) -> set[str]:
    return {found["Key"] for found in client.list_objects_v2(Bucket=bucket).get("Contents", [])}


def _load_nothing(url: str) -> BaseException | None:
    try:
        dcp.load({"w": torch.zeros(1)}, storage_reader=S3StorageReader(url))
    except CheckpointException as error:
        return error
    return None


@pytest.mark.parametrize(
    ("where", "expected"),
    [("{root}", errors.CheckpointNotFoundError), ("s3://no-such-bucket-here/run", errors.BucketNotFoundError)],
)
def test_every_rank_is_told_that_there_is_nothing_to_load(
    root: str, memory_server: S3Server, where: str, expected: type[BaseException]
) -> None:
    failures = _failures(run_ranks(2, _load_nothing, where.format(root=root)))
    assert set(failures) == {0, 1}
    assert {type(error) for error in failures.values()} == {expected}


def _load_failing(url: str) -> BaseException | None:
    assert _save_failing(url) is None
    try:
        dcp.load(_large_state(0.0), storage_reader=S3StorageReader(url))
    except CheckpointException as error:
        return error
    return None


def test_a_read_that_fails_on_one_rank_is_told_to_all(faulty: FaultyServer) -> None:
    # In equal worlds only rank 1 reads what rank 1 wrote.
    fault = Fault.error(403, "AccessDenied")
    faulty.rule = lambda request: fault if request.operation == "GetObject" and "__1_" in request.key else None
    failures = _failures(run_ranks(2, _load_failing, f"s3://{BUCKET}/run"))
    assert set(failures) == {1}
    assert isinstance(failures[1], errors.AccessDeniedError)
