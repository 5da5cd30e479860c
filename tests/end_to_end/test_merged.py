"""Saves without collectives are what the same saves with collectives are, for torch's own reader.

Every value follows from its name, so whoever loads one knows what it must be.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_s3 import CheckpointManager, S3StorageWriter, shard, verify
from dcp_s3.format.metadata import load_metadata
from tests.collectives import counted
from tests.end_to_end import foreign
from tests.end_to_end import test_meshes as meshes
from tests.end_to_end.distributed import sharded_tensors
from tests.end_to_end.states import assert_same, every_kind
from tests.end_to_end.test_interchange import download, run_foreign
from tests.end_to_end.test_meshes import Mesh
from tests.ranks import run_ranks
from tests.servers import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

MODELS = ("tp", "hsdp", "fsdp", "plain")
"""Kinds of a `Mesh` that a model can be on. The others, with what the shape of the mesh means:

``stages``: (stages of a pipeline, replicas of each), plain tensors. ``hand``: (replicas, shards), by `shard`.
``sharded``: ShardedTensors on two ranks. ``kinds``: one of every kind of entry, on each rank.
"""
WAYS = ("together", "alone", "managed")
"""To save: with collectives, without them, and by a manager without them."""


def rank() -> int:
    """This process, with or without a process group."""
    return int(os.environ["RANK"])


def make_state(mesh: Mesh) -> dict[str, Any]:
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


def replicas_on(mesh: Mesh) -> Callable[[str], Sequence[int]] | None:
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


def save_in(ways: Sequence[str], mesh: Mesh, root: str) -> dict[str, tuple[list[str], int]]:
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
    """Each way stored the same, which is what the names say, for torch and for us."""
    urls = {way: url_of(root, way) for way in WAYS}
    reference = look(server, bucket, urls["together"])
    for way, url in urls.items():
        assert look(server, bucket, url) == reference, way
        report = verify(url, full=True)
        assert report.ok, report.problems
    directories = [str(download(s3, bucket, url.split("/", 3)[3], tmp_path / way)) for way, url in urls.items()]
    run_foreign(server, foreign.convert_directories, directories, str(tmp_path / "all.pt"))
    read = dict(zip(urls, torch.load(tmp_path / "all.pt", weights_only=False), strict=True))
    for way, state in read.items():
        assert_same(state, read["together"], way)
    for name, value in read["together"].items():
        if isinstance(value, torch.Tensor) and not name.startswith("kinds."):
            assert torch.equal(meshes.bits(value), meshes.bits(meshes.full(name, value))), name


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
