"""The life of checkpoints in a directory bucket (S3 Express One Zone), as the in-memory server knows them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageReader, S3StorageWriter, latest, list_checkpoints, prune
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.faulty import FaultyServer

BUCKET = "training--use1-az4--x-s3"
RUN = f"s3://{BUCKET}/run"
MIB = 2**20


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoints_are_saved_found_loaded_replaced_and_pruned(faulty: FaultyServer) -> None:
    faulty.s3.create_bucket(BUCKET)
    store = S3Store(BUCKET, Settings())

    def state(value: float) -> dict[str, torch.Tensor]:
        return {"large": torch.full((3 * MIB,), value), "small": torch.full((9,), value)}

    for step in (1, 2, 3, 3):
        writer = S3StorageWriter(f"{RUN}/step-{step}", overwrite=True, settings={"part_size": "5MiB"})
        dcp.save(state(step), storage_writer=writer)
    store.client.create_multipart_upload(Bucket=BUCKET, Key="run/step-2/left-open")
    for upload in store.uploads("run/step-2/left"):
        store.abort(upload)
    assert [info.name for info in list_checkpoints(RUN)] == ["step-1", "step-2", "step-3"]
    found = latest(RUN)
    assert found is not None
    loaded = state(0)
    dcp.load(loaded, storage_reader=S3StorageReader(str(found.url)))
    assert all(torch.equal(loaded[name], value) for name, value in state(3).items())
    assert prune(RUN, "latest:1", grace=0, force=True).ok
    assert [info.name for info in list_checkpoints(RUN)] == ["step-3"]
    assert {key.split("/")[1] for key in faulty.s3.objects(BUCKET)} == {"step-3"}
    assert faulty.s3.open_uploads(BUCKET) == []
    assert faulty.s3._operations.refused == [], "nothing was asked for that such a bucket does not take"
