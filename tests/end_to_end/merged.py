"""States that several ranks save without collectives, and what is stored of them.

Every value follows from its name, so whoever loads one knows what it must be.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import Replicate, Shard

from dcp_s3 import CheckpointManager, S3StorageReader, S3StorageWriter, shard
from dcp_s3.format.metadata import load_metadata
from tests.collectives import counted
from tests.end_to_end import meshes
from tests.end_to_end.distributed import distribute, sharded_tensors
from tests.end_to_end.states import every_kind
from tests.servers import S3Server

MODELS = ("tp", "hsdp", "fsdp", "plain")
"""Kinds of a `meshes.Mesh` that a model can be on. The others, with what the shape of the mesh means:

``stages``: (stages of a pipeline, replicas of each), plain tensors. ``hand``: (replicas, shards), by `shard`.
``sharded``: ShardedTensors on two ranks. ``kinds``: one of every kind of entry, on each rank.
"""
WAYS = ("together", "alone", "managed")
"""To save: with collectives, without them, and by a manager without them."""


def rank() -> int:
    """This process, with or without a process group."""
    return int(os.environ["RANK"])


def make_state(mesh: meshes.Mesh) -> dict[str, Any]:
    """This rank's state, with what all ranks have, and what only this one has."""
    replica, place = divmod(rank(), mesh.shape[1])
    state: dict[str, Any] = {
        "epoch": 3,
        "loader": {"name": "läuft", "seen": [1, 2, None]},
        f"of_rank_{rank()}": 10 * rank(),
        "rng": {f"{rank()}": torch.zeros(40 + rank(), dtype=torch.int16)},
    }
    if mesh.kind in MODELS:
        state.update(meshes.Job(mesh, alone=mesh.kind == "plain").state(flattened=False))
    elif mesh.kind == "stages":
        state[f"stage{replica}"] = meshes.Job(mesh, alone=True).state(flattened=True)
    elif mesh.kind == "hand":
        rows = [5 + number for number in range(mesh.shape[1])]
        start, whole = sum(rows[:place]), (sum(rows), 7)
        own = meshes.full("weight", torch.empty(whole))[start : start + rows[place]].clone()
        state["weight"] = shard(own, global_shape=whole, offsets=(start, 0))
        state["norm"] = torch.zeros(7)
    elif mesh.kind == "sharded":
        state["given"], state["by_spec"] = sharded_tensors(
            lambda seed, *shape: meshes.full(("given", "by_spec")[seed], torch.empty(shape))
        )
    meshes.fill({name: each for name, each in state.items() if name not in ("given", "by_spec", "weight")})
    if mesh.kind == "kinds":
        torch.manual_seed(0)
        state["kinds"] = every_kind()
    return state


def replicas_on(mesh: meshes.Mesh) -> Callable[[str], Sequence[int]] | None:
    """Who holds the same, where that has to be said."""
    places = mesh.shape[1]
    everyone = range(mesh.ranks)

    def holders(fqn: str) -> Sequence[int]:
        if fqn.startswith(("of_rank_", "rng.")):
            return [rank()]
        if mesh.kind == "stages" and fqn.startswith("stage"):
            first = rank() // places * places
            return range(first, first + places)
        if mesh.kind == "hand" and fqn == "weight":
            return range(rank() % places, mesh.ranks, places)
        return everyone

    return holders if mesh.kind in ("stages", "hand") else None


def save_in(ways: Sequence[str], mesh: meshes.Mesh, root: str) -> dict[str, tuple[list[str], int]]:
    """Save the state in each way. Returns the collectives of each: what was called, and what the group counted."""
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
    """URL of the checkpoint that was saved in that way."""
    return f"{root}/managed/step-00000001" if way == "managed" else f"{root}/{way}"


# --- what is stored --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """What a checkpoint consists of, however it was saved."""

    items: dict[tuple[str, tuple[int, ...] | None], int]
    """Bytes of each, by name and offset."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype, frozenset[tuple[tuple[int, ...], tuple[int, ...]]]]]
    """Shape, dtype, and boxes."""
    paths: dict[str, Any]
    """Where each name is in the nested state."""
    ranks: int
    data: int
    """Bytes of all data objects."""


def look(server: S3Server, bucket: str, url: str) -> Stored:
    """What is at a URL, and nothing else may be there but the claim of a save without collectives."""
    prefix = url.split("/", 3)[3] + "/"
    keys = {key.removeprefix(prefix): n for key, n in server.handle.objects(bucket).items() if key.startswith(prefix)}
    metadata = load_metadata(server.handle.read(bucket, f"{prefix}.metadata"), url=url)
    (manifest,) = (json.loads(server.handle.read(bucket, prefix + key)) for key in keys if "manifest-" in key)
    objects = {entry["path"]: entry["size"] for entry in manifest["objects"]}
    assert {key for key in keys if "manifest-" not in key} - {".metadata", ".dcp_s3/claim.json"} == set(objects)
    assert objects == {path: keys[path] for path in objects}
    assert manifest["items"] == len(metadata.storage_data)

    items: dict[tuple[str, tuple[int, ...] | None], int] = {}
    tensors = {}
    for index, stored in metadata.storage_data.items():
        offset = None if index.offset is None else tuple(index.offset)
        items[index.fqn, offset] = stored.length
        entry = metadata.state_dict_metadata[index.fqn]
        if isinstance(entry, TensorStorageMetadata):
            assert index.index is not None
            assert tuple(entry.chunks[index.index].offsets) == offset
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            boxes = frozenset((tuple(each.offsets), tuple(each.sizes)) for each in entry.chunks)
            assert len(boxes) == len(entry.chunks), name
            tensors[name] = tuple(entry.size), entry.properties.dtype, boxes
    assert len(items) == len(metadata.storage_data)
    assert sum(items.values()) == sum(objects.values()), "bytes that nothing refers to"
    return Stored(items, tensors, dict(metadata.planner_data), manifest["world_size"], sum(objects.values()))


# --- loads -----------------------------------------------------------------------------------------------


def load_resharded(urls: Sequence[str]) -> list[str]:
    """Load all tensors of checkpoints over all ranks, by rows and by columns. Returns the names of those compared."""
    compared = []
    for url in urls:
        metadata = S3StorageReader(url).read_metadata()
        wholes = {
            name: torch.zeros(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and is_known(name)
        }
        for dim in (0, 1):
            state = {
                name: distribute(whole, Shard(dim) if whole.dim() > dim else Replicate())
                for name, whole in wholes.items()
            }
            dcp.load(state, storage_reader=S3StorageReader(url), no_dist=dim == 0)
            for name, found in state.items():
                expected = meshes.expected_part(name, found)
                assert torch.equal(meshes.bits(meshes.local(found)), meshes.bits(expected)), (url, name, dim)
                compared.append(name)
    dist.barrier()
    return compared


def is_known(name: str) -> bool:
    """Whether `meshes.full` says what a tensor of that name must be."""
    return not name.startswith("kinds.")
