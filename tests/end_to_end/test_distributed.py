"""Saves and loads on several ranks: what comes back, on which world size; and what the ranks are told, and what is left
on S3, when one of them fails. (Models on meshes are in `test_meshes`.)

What a rank checks it asserts itself; full tensors are made from seeds, so that every process knows them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.format.metadata import load_metadata
from tests.end_to_end.distributed import (
    SMALL_PARTS,
    distribute,
    failures_by_rank,
    manifests,
    random_values,
    rank_of,
)  # fmt: skip
from tests.end_to_end.states import assert_same
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.servers import S3Server


def _subgroup_job(url: str) -> None:
    members = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    state = {"w": random_values(0, 9, 4), f"of_{dist.get_rank()}": dist.get_rank()}
    dcp.save(state, storage_writer=S3StorageWriter(url), process_group=members)
    found = {"w": torch.zeros(9, 4), "of_1": 0, "of_2": 0}
    dcp.load(found, storage_reader=S3StorageReader(url), process_group=members)
    assert_same(found, {"w": random_values(0, 9, 4), "of_1": 1, "of_2": 2})


def test_a_process_group_that_is_a_part_of_the_world(root: str, bucket: str, memory_server: S3Server) -> None:
    run_ranks(3, _subgroup_job, root)
    (manifest,) = manifests(memory_server, bucket)
    assert manifest["world_size"] == 2
    # Ranks are numbered within the group.
    assert _ranks_with_objects(memory_server.handle.objects(bucket)) == {0, 1}


# --- failures --------------------------------------------------------------------------------------------


def _large_state(fill: float) -> dict[str, Any]:
    """Four entries; on each of two ranks 6 MB of each, so that each becomes an object of several parts."""
    return {f"e{n}": distribute(torch.full((2, 1_500_000), fill + n), Shard(0)) for n in range(4)}


def _ranks_with_objects(keys: Any) -> set[int]:
    return {rank_of(key) for key in keys if key.endswith(".distcp")}


def _overwrite_failing(url: str) -> CheckpointException:
    writer = S3StorageWriter(url, overwrite=True, settings={**SMALL_PARTS, "retry_attempts": 2})
    dcp.save(_large_state(1.0), storage_writer=writer)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(_large_state(5.0), storage_writer=writer)
    state = _large_state(0.0)
    dcp.load(state, storage_reader=S3StorageReader(url))
    for name, value in _large_state(1.0).items():  # the one that was to be overwritten is whole
        assert_same(state[name].to_local(), value.to_local(), name)
    return caught.value


@pytest.mark.parametrize(
    ("rank", "fault", "expected"),
    [
        (1, Fault.error(403, "AccessDenied"), errors.AccessDeniedError),
        (0, Fault.error_in_200("InternalError"), errors.TransferError),
    ],
)
def test_s3_refuses_one_object_of_one_rank(
    faulty: FaultyServer, rank: int, fault: Fault, expected: type[BaseException]
) -> None:
    operation = "CompleteMultipartUpload"
    committed = []

    def rule(request: Any) -> Fault | None:
        if request.operation == "PutObject" and request.key == "run/.metadata":
            committed.append(request.key)
        # Only the last object: those before it may be complete by then.
        return fault if committed and request.operation == operation and f"__{rank}_3-" in request.key else None

    faulty.rule = rule
    failures = failures_by_rank(run_ranks(2, _overwrite_failing, f"s3://{BUCKET}/run"))
    assert set(failures) == {rank}
    assert isinstance(failures[rank], expected)
    assert f"__{rank}_3-" in str(failures[rank])
    assert len(committed) == 1
    assert faulty.s3.open_uploads(BUCKET) == []
    keys = set(faulty.s3.objects(BUCKET))
    metadata = load_metadata(faulty.s3.read(BUCKET, "run/.metadata"), url="here")
    left = keys - {f"run/{info.relative_path}" for info in metadata.storage_data.values()}
    assert _ranks_with_objects(left) <= {1 - rank}
    assert len([key for key in keys if "manifest" in key]) == 1
