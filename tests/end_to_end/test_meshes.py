"""Uneven tensors on meshes of FSDP2 with tensor parallelism and of HSDP: saved on each, loaded on each other.

Each mesh that saves has one pool of four ranks, which does all loads too. What a rank must have of a tensor follows
from the tensor's name and from where torch says the rank's box lies; what the model's tensors are in full, from torch's
own gathering, which does not ask for the boxes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dcp_s3 import S3StorageReader, S3StorageWriter, read_tensors
from tests.ranks import run_ranks
from tests.servers import S3Server


@dataclass(frozen=True)
class _Mesh:
    """Of the first ranks; the other ones stand by."""

    kind: str
    """``tp``: FSDP2 over the first dimension, tensor parallelism over the second. ``hsdp``: copies over the first,
    FSDP2 over the second. ``plain``: a model of one process."""
    shape: tuple[int, int] = (1, 1)

    @property
    def ranks(self) -> int:
        return self.shape[0] * self.shape[1]

    def __str__(self) -> str:
        return f"{self.kind}-{self.shape[0]}x{self.shape[1]}"


_COLUMNS = _Mesh("tp", (1, 4))
"""Its last rank has no column of the 7x5 tensor. torch 2.13 does not gather that one."""
SAVING = (
    _Mesh("tp", (2, 2)),
    _COLUMNS,
    _Mesh("tp", (4, 1)),
    _Mesh("hsdp", (2, 2)),
)
LOADING = (*SAVING, _Mesh("tp", (2, 1)), _Mesh("plain"))
FLATTENED = (False, True)


class _Uneven(nn.Module):
    """Shapes that no mesh divides, and fewer elements than ranks have places for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)  # 5x7, and a bias of 5
        self.second = nn.Linear(5, 7, bias=False)  # 7x5
        self.last = nn.Linear(7, 11, bias=False)  # 11x7
        self.three = nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.tensor(0))


class _Job:
    """A model and its optimizer on a mesh. All ranks make it; those outside of the mesh have no state."""

    def __init__(self, mesh: _Mesh) -> None:
        self.mesh = mesh
        self.group = dist.new_group(list(range(mesh.ranks)))
        self.inside = dist.get_rank() < mesh.ranks
        names = ("fsdp", "tp") if mesh.kind == "tp" else ("replicate", "shard")
        devices = DeviceMesh("cpu", torch.arange(mesh.ranks).view(mesh.shape), mesh_dim_names=names)
        self.model = _Uneven()
        if not self.inside:
            return
        if mesh.kind == "tp":
            split = {"first": ColwiseParallel(), "second": RowwiseParallel(), "last": ColwiseParallel()}
            parallelize_module(self.model, devices["tp"], split)
        if mesh.kind != "plain":
            over = devices["fsdp"] if mesh.kind == "tp" else devices
            for layer in (self.model.first, self.model.second, self.model.last):
                fully_shard(layer, mesh=over)
            fully_shard(self.model, mesh=over)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def state(self, flattened: bool) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=flattened)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer}


def _tensors(state: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in flatten_state_dict(state)[0].items():
        if isinstance(value, torch.Tensor):
            yield name, value


def _expected(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """What this rank must have of a tensor."""
    full = _full(name, tensor)
    if not isinstance(tensor, DTensor):
        return full
    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return full[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


def _full(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor."""
    seed = zlib.crc32(name.encode())
    if not tensor.dtype.is_floating_point:
        return torch.full(tensor.shape, seed % 1000, dtype=tensor.dtype)
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed), dtype=tensor.dtype)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


@torch.no_grad()
def _fill(state: dict[str, Any]) -> None:
    for name, tensor in _tensors(state):
        if _local(tensor).numel():
            _local(tensor).copy_(_expected(name, tensor))


@torch.no_grad()
def _spoil(state: dict[str, Any]) -> None:
    for _, tensor in _tensors(state):
        _local(tensor).fill_(-7)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _assert_loaded(state: dict[str, Any], mesh: _Mesh, what: str) -> None:
    for name, tensor in _tensors(state):
        found, expected = _local(tensor), _expected(name, tensor)
        # FSDP2's empty shard of a tensor that is split along columns has no rows either.
        assert found.shape == expected.shape or found.numel() == expected.numel() == 0, f"{what}: {name}"
        assert torch.equal(_bits(found), _bits(expected)), f"{what}: {name}"
    for name, tensor in _tensors({"model": state["model"]}):
        if not isinstance(tensor, DTensor) or (mesh == _COLUMNS and name == "model.second.weight"):
            continue
        assert torch.equal(_bits(tensor.full_tensor().detach()), _bits(_full(name, tensor))), f"{what}: {name}, in full"


def _save_and_load(root: str, saving: _Mesh) -> list[str]:
    """Saves, and loads on every mesh. Returns the loads that gave every bit back."""
    jobs = {mesh: _Job(mesh) for mesh in LOADING}
    # What makes this mesh: the shards of a rank are not neighbours.
    placements = str(jobs[SAVING[0]].model.first.weight.placements)
    assert "StridedShard" in placements, placements
    same = []
    for flattened in FLATTENED:
        url = f"{root}/{saving}-{flattened}"
        state = jobs[saving].state(flattened)
        _fill(state)
        dcp.save(state, storage_writer=S3StorageWriter(url), process_group=jobs[saving].group)
        for mesh, job in jobs.items():
            if job.inside:
                state = job.state(flattened)
                _spoil(state)
                dcp.load(state, storage_reader=S3StorageReader(url), process_group=job.group)
                _assert_loaded(state, mesh, f"{saving} to {mesh}")
            same.append(f"{mesh}-{flattened}")
            dist.barrier()
    return same


@pytest.mark.parametrize("saving", SAVING, ids=str)
def test_uneven_meshes_are_resharded_onto_each_other(root: str, memory_server: S3Server, saving: _Mesh) -> None:
    found = run_ranks(4, _save_and_load, root, saving)
    assert found == [[f"{mesh}-{flattened}" for flattened in FLATTENED for mesh in LOADING]] * 4
    for flattened in FLATTENED:
        stored = {n: t for n, t in read_tensors(f"{root}/{saving}-{flattened}").items() if isinstance(t, torch.Tensor)}
        assert {(5, 7), (7, 5), (11, 7), (5,), (3,)} <= {tuple(tensor.shape) for tensor in stored.values()}
        for name, tensor in stored.items():
            assert torch.equal(tensor, _full(name, tensor)), name
