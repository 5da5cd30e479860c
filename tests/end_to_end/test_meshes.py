"""Uneven tensors on meshes of FSDP2 with tensor parallelism and of HSDP: saved on each, loaded on each other; and saves
without collectives, which are what the same saves with collectives are.

What a rank must have of a tensor follows from the tensor's name and from where torch says the rank's box lies.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_s3 import CheckpointManager, S3StorageReader, S3StorageWriter, read_tensors, shard, verify
from dcp_s3.format.metadata import load_metadata
from tests.collectives import counted
from tests.end_to_end.states import assert_same, bits, every_kind, local, sharded_tensors
from tests.end_to_end.test_interchange import download, read_by_torch
from tests.ranks import run_ranks
from tests.servers import S3Server

pytestmark = pytest.mark.servers("memory")


@dataclass(frozen=True)
class Mesh:
    """Of the first ranks; the other ones stand by."""

    kind: str
    """``tp``: FSDP2 over the first dimension, tensor parallelism over the second. ``hsdp``: copies over the first,
    FSDP2 over the second. ``fsdp``: over the second. ``plain``: as one process has it."""
    shape: tuple[int, int] = (1, 1)

    @property
    def ranks(self) -> int:
        return self.shape[0] * self.shape[1]

    def __str__(self) -> str:
        return f"{self.kind}-{self.shape[0]}x{self.shape[1]}"


COLUMNS = Mesh("tp", (1, 4))
"""Its last rank has no column of the 7x5 tensor. torch 2.13 does not gather that one."""


class _Uneven(nn.Module):
    """Shapes that no mesh divides, and fewer elements than ranks have places for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)  # 5x7, and a bias of 5
        self.second = nn.Linear(5, 7, bias=False)  # 7x5
        self.last = nn.Linear(7, 11, bias=False)  # 11x7
        self.three = nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.tensor(0))


class Job:
    """A model and its optimizer on a mesh, whose ranks alone have a state; or one on each rank ``alone``."""

    def __init__(self, mesh: Mesh, alone: bool = False) -> None:
        self.group = None if alone else dist.new_group(list(range(mesh.ranks)))
        self.inside = alone or dist.get_rank() < mesh.ranks
        self.model = _Uneven()
        if not alone:
            names = ("fsdp", "tp") if mesh.kind == "tp" else ("replicate", "shard")
            devices = DeviceMesh("cpu", torch.arange(mesh.ranks).view(mesh.shape), mesh_dim_names=names)
            if self.inside:
                self._place(mesh.kind, devices)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def _place(self, kind: str, devices: DeviceMesh) -> None:
        model = self.model
        if kind == "tp":
            split = {"first": ColwiseParallel(), "second": RowwiseParallel(), "last": ColwiseParallel()}
            parallelize_module(model, devices["tp"], split)
        if kind != "plain":
            over = devices if kind == "hsdp" else devices["fsdp" if kind == "tp" else "shard"]
            for module in (model.first, model.second, model.last, model):
                fully_shard(module, mesh=over)

    def state(self, flattened: bool) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=flattened)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}


def tensors(state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in flatten_state_dict(state)[0].items():
        if isinstance(value, torch.Tensor):
            yield name, value


def expected_part(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return full(name, tensor)
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return full(name, tensor)[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


def full(name: str, tensor: torch.Tensor) -> torch.Tensor:
    seed = zlib.crc32(name.encode())
    if not tensor.dtype.is_floating_point:
        return torch.full(tensor.shape, seed % 1000, dtype=tensor.dtype)
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=tensor.dtype)


@torch.no_grad()
def fill(state: dict[str, Any]) -> None:
    for name, tensor in tensors(state):
        if local(tensor).numel():
            local(tensor).copy_(expected_part(name, tensor))


def assert_loaded(state: dict[str, Any], mesh: Mesh, what: str) -> None:
    for name, tensor in tensors(state):
        found, expected = local(tensor), expected_part(name, tensor)
        # FSDP2's empty shard of a tensor that is split along columns has no rows either.
        assert found.shape == expected.shape or found.numel() == expected.numel() == 0, f"{what}: {name}"
        assert bits(found) == bits(expected), f"{what}: {name}"
    for name, tensor in tensors({"model": state["model"]}):
        if not isinstance(tensor, DTensor) or (mesh == COLUMNS and name == "model.second.weight"):
            continue
        assert bits(tensor.full_tensor().detach()) == bits(full(name, tensor)), f"{what}: {name}, in full"


SAVING = (Mesh("tp", (2, 2)), COLUMNS, Mesh("tp", (4, 1)), Mesh("hsdp", (2, 2)))
LOADING = (*SAVING, Mesh("tp", (2, 1)), Mesh("fsdp", (1, 3)), Mesh("plain"))
FLATTENED = (False, True)


def _save_and_load(root: str, saving: Mesh) -> list[str]:
    jobs = {mesh: Job(mesh) for mesh in LOADING}
    # What makes this mesh: the shards of a rank are not neighbours.
    placements = str(jobs[SAVING[0]].model.first.weight.placements)
    assert "StridedShard" in placements, placements
    same = []
    for flattened in FLATTENED:
        url = f"{root}/{saving}-{flattened}"
        state, group = jobs[saving].state(flattened), jobs[saving].group
        fill(state)
        dcp.save(state, storage_writer=S3StorageWriter(url, process_group=group), process_group=group)
        for mesh, job in jobs.items():
            if job.inside:
                state = job.state(flattened)
                with torch.no_grad():
                    for _, tensor in tensors(state):
                        local(tensor).fill_(-7)
                dcp.load(state, storage_reader=S3StorageReader(url), process_group=job.group)
                assert_loaded(state, mesh, f"{saving} to {mesh}")
            same.append(f"{mesh}-{flattened}")
            dist.barrier()
    return same


@pytest.mark.quick("tp-1x4", "hsdp-2x2")
@pytest.mark.parametrize("saving", SAVING, ids=str)
def test_uneven_meshes_are_resharded_onto_each_other(root: str, saving: Mesh) -> None:
    found = run_ranks(4, _save_and_load, root, saving)
    assert found == [[f"{mesh}-{flattened}" for flattened in FLATTENED for mesh in LOADING]] * 4
    for flattened in FLATTENED:
        stored = {n: t for n, t in read_tensors(f"{root}/{saving}-{flattened}").items() if isinstance(t, torch.Tensor)}
        assert {(5, 7), (7, 5), (11, 7), (5,), (3,)} <= {tuple(tensor.shape) for tensor in stored.values()}
        for name, tensor in stored.items():
            assert torch.equal(tensor, full(name, tensor)), name


MODELS = ("tp", "hsdp", "fsdp", "plain")
"""Kinds of a `Mesh` that a model can be on. The others, with what the shape of the mesh means:

``stages``: (stages of a pipeline, replicas of each), plain tensors. ``hand``: (replicas, shards), by `shard`.
``sharded``: ShardedTensors on two ranks. ``kinds``: one of every kind of entry, on each rank.
"""
WAYS = ("together", "alone", "managed")
"""To save: with collectives, without them, and by a manager without them."""


def rank() -> int:
    return int(os.environ["RANK"])


def make_state(mesh: Mesh) -> dict[str, Any]:
    replica, place = divmod(rank(), mesh.shape[1])
    state: dict[str, Any] = {
        "epoch": 3,
        "loader": {"name": "läuft", "seen": [1, 2, None]},
        f"of_rank_{rank()}": 10 * rank(),
        "rng": {f"{rank()}": torch.zeros(40 + rank(), dtype=torch.int16)},
    }
    if mesh.kind in MODELS:
        state.update(Job(mesh, alone=mesh.kind == "plain").state(flattened=False))
    elif mesh.kind == "stages":
        state[f"stage{replica}"] = Job(mesh, alone=True).state(flattened=True)
    elif mesh.kind == "hand":
        rows = [5 + number for number in range(mesh.shape[1])]
        start, whole = sum(rows[:place]), (sum(rows), 7)
        own = full("weight", torch.empty(whole))[start : start + rows[place]].clone()
        state["weight"] = shard(own, global_shape=whole, offsets=(start, 0))
        state["norm"] = torch.zeros(7)
    elif mesh.kind == "sharded":
        state["given"], state["by_spec"] = sharded_tensors(
            lambda number, *shape: full(("given", "by_spec")[number], torch.empty(shape))
        )
    fill({name: each for name, each in state.items() if name not in ("given", "by_spec", "weight")})
    if mesh.kind == "kinds":
        torch.manual_seed(0)
        state["kinds"] = every_kind()
    return state


def replicas_on(mesh: Mesh) -> Callable[[str], Sequence[int]] | None:
    places = mesh.shape[1]

    def holders(fqn: str) -> Sequence[int]:
        if fqn.startswith(("of_rank_", "rng.")):
            return [rank()]
        if mesh.kind == "stages" and fqn.startswith("stage"):
            first = rank() // places * places
            return range(first, first + places)
        if mesh.kind == "hand" and fqn == "weight":
            return range(rank() % places, mesh.ranks, places)
        return range(mesh.ranks)

    return holders if mesh.kind in ("stages", "hand") else None


def save_in(ways: Sequence[str], mesh: Mesh, root: str) -> dict[str, tuple[list[str], int]]:
    state, replicas = make_state(mesh), replicas_on(mesh)
    called = {}
    for way in ways:
        with counted() as found:
            if way == "managed":
                with CheckpointManager(f"{root}/managed", coordination="s3", replicas=replicas) as manager:
                    manager.save(1, state)
                    manager.wait()
            else:
                writer = S3StorageWriter(url_of(root, way), replicas=replicas)
                dcp.save(state, storage_writer=writer, use_collectives=way == "together")
        called[way] = found.names, found.number
    return called


def url_of(root: str, way: str) -> str:
    return f"{root}/managed/step-00000001" if way == "managed" else f"{root}/{way}"


def look(server: S3Server, bucket: str, url: str) -> tuple[Any, ...]:
    """What a checkpoint consists of, however it was saved; nothing else may be there but the claim of a joint save."""
    prefix = url.split("/", 3)[3] + "/"
    keys = {key.removeprefix(prefix): n for key, n in server.handle.objects(bucket).items() if key.startswith(prefix)}
    metadata = load_metadata(server.handle.read(bucket, f"{prefix}.metadata"), url=url)
    (manifest,) = (json.loads(server.handle.read(bucket, prefix + key)) for key in keys if "manifest-" in key)
    objects = {entry["path"]: entry["size"] for entry in manifest["objects"]}
    assert {key for key in keys if "manifest-" not in key} - {".metadata", ".dcp_s3/claim.json"} == set(objects)
    assert objects == {path: keys[path] for path in objects}
    items = {(index.fqn, index.offset): info.length for index, info in metadata.storage_data.items()}
    assert manifest["items"] == len(items) == len(metadata.storage_data)
    assert sum(items.values()) == sum(objects.values()), "bytes that nothing refers to"
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            boxes = {(tuple(each.offsets), tuple(each.sizes)) for each in entry.chunks}
            assert len(boxes) == len(entry.chunks), name
            tensors[name] = tuple(entry.size), entry.properties.dtype, boxes
    return items, tensors, dict(metadata.planner_data), manifest["world_size"]


def _check(server: S3Server, s3: Any, bucket: str, root: str, tmp_path: Path) -> None:
    urls = {way: url_of(root, way) for way in WAYS}
    reference = look(server, bucket, urls["together"])
    for way, url in urls.items():
        assert look(server, bucket, url) == reference, way
        report = verify(url, full=True)
        assert report.ok, report.problems
    directories = [download(s3, bucket, url.split("/", 3)[3], tmp_path / way) for way, url in urls.items()]
    read = dict(zip(urls, read_by_torch(server, *directories), strict=True))
    for way, state in read.items():
        assert_same(state, read["together"], way)
    for name, value in read["together"].items():
        if isinstance(value, torch.Tensor) and not name.startswith("kinds."):
            assert bits(value) == bits(full(name, value)), name


@pytest.mark.parametrize(
    "mesh", [Mesh(kind, (2, 2)) for kind in ("tp", "hsdp", "stages", "hand")]
    + [Mesh("sharded", (1, 2)), Mesh("kinds", (1, 2))], ids=str,
)  # fmt: skip
def test_without_collectives_the_same_is_stored(
    root: str, bucket: str, s3: Any, memory_server: S3Server, tmp_path: Path, mesh: Mesh
) -> None:
    for called in run_ranks(mesh.ranks, save_in, WAYS, mesh, root):
        assert called["alone"] == (["barrier"], 1), "torch's own barrier, at its end"
        assert called["managed"] == ([], 0)
        assert called["together"][1] > 1
    _check(memory_server, s3, bucket, root, tmp_path)


@pytest.mark.quick("hand-2x2")
@pytest.mark.parametrize("mesh", [Mesh("plain", (1, 2)), Mesh("stages", (2, 1)), Mesh("hand", (2, 2))], ids=str)
def test_without_a_process_group_the_same_is_stored(
    root: str, bucket: str, s3: Any, memory_server: S3Server, tmp_path: Path, mesh: Mesh
) -> None:
    run_ranks(mesh.ranks, save_in, WAYS[:1], mesh, root)
    run_ranks(mesh.ranks, save_in, WAYS[1:], mesh, root, group=False, env={"DCP_S3_RUN_ID": "a-run"})
    _check(memory_server, s3, bucket, root, tmp_path)
