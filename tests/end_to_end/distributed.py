"""What the tests of several ranks save and load, and look for afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.servers import S3Server

SMALL_PARTS = {"part_size": "5MiB"}


def random_values(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def distribute(full: torch.Tensor, *placements: Any) -> DTensor:
    """Over all ranks; of two placements the first is over two groups of them, if their number is even."""
    world = dist.get_world_size()
    shape = (world,) if len(placements) == 1 or world % 2 else (2, world // 2)
    mesh = init_device_mesh("cpu", shape)
    return distribute_tensor(full, mesh, placements[-len(shape) :], src_data_rank=None)


def manifests(server: S3Server, bucket: str) -> list[dict[str, Any]]:
    keys = [key for key in server.handle.objects(bucket) if "/manifest-" in key]
    return [json.loads(server.handle.read(bucket, key)) for key in keys]


def rank_of(key: str) -> int:
    match = re.search(r"__(\d+)_\d+-[0-9a-f]+\.distcp$", key)
    assert match, key
    return int(match[1])


def sharded_tensors(value: Callable[..., torch.Tensor]) -> tuple[Any, Any]:
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


def failures_by_rank(outcome: Sequence[BaseException | None]) -> dict[int, BaseException]:
    """What failed on which rank; every rank must have been told the same."""
    told = []
    for error in outcome:
        assert isinstance(error, CheckpointException), repr(error)
        told.append({rank: (type(cause), str(cause)) for rank, (cause, _) in error.failures.items()})
    assert all(each == told[0] for each in told), told
    first = outcome[0]
    assert isinstance(first, CheckpointException)
    return {rank: cause for rank, (cause, _) in first.failures.items()}
