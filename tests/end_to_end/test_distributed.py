"""Saves and loads on several ranks: what comes back, on which world size; and what the ranks are told, and what is left
on S3, when one of them fails. (Models on meshes are in `test_meshes`.)

What a rank checks it asserts itself; full tensors are made from seeds, so that every process knows them.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import Replicate, Shard

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.format.metadata import load_metadata
from tests.end_to_end.distributed import (
    SMALL_PARTS,
    distribute,
    failures_by_rank,
    load_together,
    manifests,
    random_values,
    rank_of,
    save_together,
)  # fmt: skip
from tests.end_to_end.states import assert_same
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.servers import S3Server

# --- DTensor ---------------------------------------------------------------------------------------------


def _full_tensors() -> dict[str, tuple[torch.Tensor, tuple[Any, ...]]]:
    """Name -> full tensor and how it is placed on a mesh."""
    return {
        "even": (random_values(0, 8, 6), (Shard(0),)),
        "uneven": (random_values(1, 7, 5, dtype=torch.float64), (Shard(0),)),
        "columns": (random_values(2, 5, 8), (Shard(1),)),
        "uneven_columns": (random_values(3, 3, 7, 2, dtype=torch.float16), (Shard(1),)),
        "replicated": (random_values(4, 1257, 233), (Replicate(),)),
        "replicas of shards": (random_values(7, 301, 1003), (Replicate(), Shard(0))),
        # More ranks than rows: some have nothing of it.
        "one_row": (random_values(5, 1, 4), (Shard(0),)),
        "one_number": (torch.tensor([2**62 + 1]), (Shard(0),)),
        "no_rows": (torch.empty(0, 3), (Shard(0),)),
        "mask": (torch.arange(13) % 3 == 0, (Shard(0),)),
        "tiny_floats": (random_values(6, 31, 5, dtype=torch.bfloat16), (Shard(0),)),
        # 24 MB: several parts on each of four ranks.
        "large": (torch.arange(1000 * 6007, dtype=torch.int32).view(1000, 6007), (Shard(0),)),
    }


def _save_dtensors(url: str) -> None:
    state = {name: distribute(full, *placements) for name, (full, placements) in _full_tensors().items()}
    dcp.save({"model": state}, storage_writer=S3StorageWriter(url, settings=SMALL_PARTS))


def _turned(placement: Any, full: torch.Tensor) -> Any:
    if isinstance(placement, Replicate):
        return Shard(0)
    return Shard(1 - placement.dim) if full.dim() > 1 else Replicate()


def _load_dtensors(url: str) -> None:
    """Into the placements that were saved, and into others."""
    for turn in (False, True):
        state = {
            name: distribute(torch.zeros_like(full), *([_turned(placements[-1], full)] if turn else placements))
            for name, (full, placements) in _full_tensors().items()
        }
        dcp.load({"model": state}, storage_reader=S3StorageReader(url, settings=SMALL_PARTS))
        for name, (full, _) in _full_tensors().items():
            assert_same(state[name].full_tensor(), full, name)


@pytest.mark.quick("4-loaded_on2")
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, (1, 2)), (2, (2, 4, 1)), (4, (4, 2, 3))])
def test_dtensors_are_stored_once_and_load_on_any_world_size(
    root: str, bucket: str, memory_server: S3Server, saved_on: int, loaded_on: tuple[int, ...]
) -> None:
    memory_server.handle.reset_counters()
    run_ranks(saved_on, _save_dtensors, root)
    assert memory_server.handle.counters.requests["UploadPart"] >= max(4, 2 * saved_on)

    metadata = load_metadata(memory_server.handle.read(bucket, "run/.metadata"), url=root)
    tensors = {name: full.nbytes for name, (full, _) in _full_tensors().items()}
    framing = 2048 * len(metadata.storage_data)
    assert sum(tensors.values()) < _data_bytes(memory_server, bucket) < sum(tensors.values()) + framing
    assert len([index for index in metadata.storage_data if index.fqn == "model.replicated"]) == 1
    # Else a second copy could hide in the framing.
    assert min(tensors["replicated"], tensors["replicas of shards"]) > framing
    for world_size in loaded_on:
        run_ranks(world_size, _load_dtensors, root)


@pytest.mark.soak
@pytest.mark.servers("moto", "rclone", "rgw", "external")
def test_dtensors_on_every_server(root: str) -> None:
    run_ranks(2, _save_dtensors, root)
    run_ranks(1, _load_dtensors, root)


def _data_bytes(server: S3Server, bucket: str) -> int:
    return sum(size for key, size in server.handle.objects(bucket).items() if key.endswith(".distcp"))


# --- what every rank has ---------------------------------------------------------------------------------


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


class _Broken(DefaultSavePlanner):
    """On rank 1, raises at the last item, when most of its objects are complete, or returns what cannot be stored."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self._raises = raises

    def resolve_data(self, write_item: WriteItem) -> Any:
        if dist.get_rank() == 1 and not self._raises:
            return "text"
        if dist.get_rank() == 1 and write_item.index.fqn == "e3":
            raise ValueError("no data for e3")
        data: torch.Tensor | io.BytesIO = super().resolve_data(write_item)
        return data


def _large_state(fill: float) -> dict[str, Any]:
    """Four entries; on each of two ranks 6 MB of each, so that each becomes an object of several parts."""
    return {f"e{n}": distribute(torch.full((2, 1_500_000), fill + n), Shard(0)) for n in range(4)}


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
        assert_same(state[name].to_local(), value.to_local(), name)


def _ranks_with_objects(keys: Any) -> set[int]:
    return {rank_of(key) for key in keys if key.endswith(".distcp")}


@pytest.mark.parametrize(("raises", "expected"), [(True, ValueError), (False, errors.SaveProtocolError)])
def test_a_planner_that_fails_on_one_rank(
    root: str, bucket: str, memory_server: S3Server, raises: bool, expected: type[BaseException]
) -> None:
    failures = failures_by_rank(run_ranks(2, _save_failing, root, _Broken(raises)))
    assert set(failures) == {1}
    assert isinstance(failures[1], expected)
    assert not raises or "no data for e3" in str(failures[1])
    keys = memory_server.handle.objects(bucket)
    assert "run/.metadata" not in keys
    assert not manifests(memory_server, bucket)
    assert 1 not in _ranks_with_objects(keys)
    assert memory_server.handle.open_uploads(bucket) == []


def _overwrite_failing(url: str) -> BaseException | None:
    assert _save_failing(url, fill=1.0) is None
    error = _save_failing(url, overwrite=True, fill=5.0)
    _load_large(url, 1.0)  # the one that was to be overwritten is whole
    return error


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


def _load_failing(url: str) -> BaseException | None:
    try:
        dcp.load(_large_state(0.0), storage_reader=S3StorageReader(url))
    except CheckpointException as error:
        return error
    return None


def _load_nothing_then_save_three_times(url: str) -> list[BaseException | None]:
    nothing = _load_failing(url)
    assert save_together(url, 1) is None
    exists = save_together(url, 2)
    load_together(url, 1)
    assert save_together(url, 3, overwrite=True) is None
    load_together(url, 3)
    return [nothing, exists]


def test_every_rank_is_told_that_a_checkpoint_is_not_there_or_that_it_is(root: str, s3: Any, bucket: str) -> None:
    nothing, exists = zip(*run_ranks(2, _load_nothing_then_save_three_times, root), strict=True)
    failures = failures_by_rank(nothing)
    assert [type(failures[rank]) for rank in (0, 1)] == [errors.CheckpointNotFoundError] * 2
    assert isinstance(failures_by_rank(exists)[0], errors.CheckpointExistsError)
    # One checkpoint: .metadata, manifest, data.
    assert s3.list_objects_v2(Bucket=bucket)["KeyCount"] == 3
