"""Without collectives, and without merging, each rank commits, and loads, for itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import resolve_settings
from dcp_s3.url import parse_url
from tests.end_to_end.distributed import (
    assert_same,
    distribute,
    failures_by_rank,
    load_together,
    manifests,
    random_values,
    rank_of,
    save_together,
)
from tests.ranks import run_ranks
from tests.servers import S3Server
from tests.single_ranks import committing_alone


def _own_state(seed: int) -> dict[str, Any]:
    return {
        "sharded": distribute(random_values(seed, 7, 3), Shard(0)),
        "own": random_values(seed + dist.get_rank(), 5),
        "rank": dist.get_rank() + seed,
    }


def _save_alone(url: str, seed: int, overwrite: bool = False) -> BaseException | None:
    writer = S3StorageWriter(url, overwrite=overwrite)
    try:
        with committing_alone():
            dcp.save(_own_state(seed), storage_writer=writer, use_collectives=False)
    except BaseException as error:  # noqa: BLE001 - CheckpointException is no Exception
        return error
    return None


def _load_alone(url: str, seed: int) -> None:
    state = {"sharded": distribute(torch.zeros(7, 3), Shard(0)), "own": torch.zeros(5), "rank": -1}
    dcp.load(state, storage_reader=S3StorageReader(url))
    assert_same("sharded", state["sharded"].full_tensor(), random_values(seed, 7, 3))
    assert_same("own", state["own"], random_values(seed + dist.get_rank(), 5))
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
    assert sorted((m["rank"], m["world_size"]) for m in manifests(memory_server, bucket)) == [(0, 2), (1, 2)]
    # Nothing is left of the saves that were refused.
    assert sorted(rank_of(key) for key in keys if key.endswith(".distcp")) == [0, 1]


def _alone_over_together(url: str) -> None:
    assert save_together(url, 1) is None
    for overwrite in (False, True):
        refused = _save_alone(url, 10, overwrite)
        assert isinstance(refused, errors.CheckpointExistsError), repr(refused)
    load_together(url, 1)


def _together_over_alone(url: str) -> None:
    assert _save_alone(url, 10) is None
    refused = save_together(url, 1)
    assert isinstance(refused, CheckpointException), repr(refused)
    assert isinstance(refused.failures[0][0], errors.CheckpointExistsError)
    _load_alone(url, 10)
    assert save_together(url, 2, overwrite=True) is None
    load_together(url, 2)


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
    failures = failures_by_rank(run_ranks(2, _load_with_one_missing, root))
    assert set(failures) == {1}
    assert isinstance(failures[1], errors.CheckpointNotFoundError)
    assert root in str(failures[1])
    assert "__1.metadata" in str(failures[1])  # not only the .metadata that such a checkpoint never has
