"""Uneven tensors on meshes of FSDP2 with tensor parallelism and of HSDP: saved on each, loaded on each other.

Each mesh that saves has one pool of four ranks, which does all loads too (`tests.end_to_end.meshes`).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageReader, S3StorageWriter, read_tensors
from tests.end_to_end.meshes import COLUMNS, Job, Mesh, assert_loaded, fill, full, spoil
from tests.ranks import run_ranks

pytestmark = pytest.mark.servers("memory")


SAVING = (Mesh("tp", (2, 2)), COLUMNS, Mesh("tp", (4, 1)), Mesh("hsdp", (2, 2)))
LOADING = (*SAVING, Mesh("tp", (2, 1)), Mesh("fsdp", (1, 3)), Mesh("plain"))
FLATTENED = (False, True)


def _save_and_load(root: str, saving: Mesh) -> list[str]:
    """Saves, and loads on every mesh. Returns the loads that gave every bit back."""
    jobs = {mesh: Job(mesh) for mesh in LOADING}
    # What makes this mesh: the shards of a rank are not neighbours.
    placements = str(jobs[SAVING[0]].model.first.weight.placements)
    assert "StridedShard" in placements, placements
    same = []
    for flattened in FLATTENED:
        url = f"{root}/{saving}-{flattened}"
        state = jobs[saving].state(flattened)
        fill(state)
        dcp.save(
            state,
            storage_writer=S3StorageWriter(url, process_group=jobs[saving].group),
            process_group=jobs[saving].group,
        )
        for mesh, job in jobs.items():
            if job.inside:
                state = job.state(flattened)
                spoil(state)
                dcp.load(state, storage_reader=S3StorageReader(url), process_group=job.group)
                assert_loaded(state, mesh, f"{saving} to {mesh}")
            same.append(f"{mesh}-{flattened}")
            dist.barrier()
    return same


@pytest.mark.quick("tp-1x4", "hsdp-2x2")
@pytest.mark.parametrize("saving", SAVING, ids=str)
def test_uneven_meshes_are_resharded_onto_each_other(root: str, saving: Mesh) -> None:
    """What is saved without collectives is the same, see `test_merged`."""
    found = run_ranks(4, _save_and_load, root, saving)
    assert found == [[f"{mesh}-{flattened}" for flattened in FLATTENED for mesh in LOADING]] * 4
    for flattened in FLATTENED:
        stored = {n: t for n, t in read_tensors(f"{root}/{saving}-{flattened}").items() if isinstance(t, torch.Tensor)}
        assert {(5, 7), (7, 5), (11, 7), (5,), (3,)} <= {tuple(tensor.shape) for tensor in stored.values()}
        for name, tensor in stored.items():
            assert torch.equal(tensor, full(name, tensor)), name
