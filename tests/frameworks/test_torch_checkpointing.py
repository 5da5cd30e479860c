"""torch-checkpointing with S3Storage: its manager, its savers and its own tests."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch_checkpointing.checkpoint_manager import CheckpointManager
from torch_checkpointing.checkpoint_writer import CheckpointWriterConfig
from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.metadata_manager import DefaultMetadataManager
from torch_checkpointing.schema import ItemSpec
from torch_checkpointing.staging import CheckpointStagerConfig
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

from dcp_s3 import errors, latest, list_checkpoints, pin, prune, remove, unpin, verify
from dcp_s3.integrations.torch_checkpointing import S3StorageConfig, commit
from dcp_s3.retention.policy import KeepLatest
from tests.end_to_end.states import assert_same
from tests.faulty import BUCKET, FaultyServer, close_clients
from tests.frameworks.ranks import run_ranks
from tests.killing import Shooting, Shot, access_key, begin, new_process, running, wait_until_quiet

ROOT = f"s3://{BUCKET}/run"


def client() -> Any:
    return boto3.client("s3", endpoint_url=os.environ["DCP_S3_ENDPOINT_URL"])


def manager(*, asynchronous: bool = False, in_place: bool = True, **options: Any) -> CheckpointManager:
    writer = CheckpointWriterConfig(write_to_temp_dir=not in_place)
    staging = CheckpointStagerConfig(use_pinned_memory=False, use_non_blocking_copy=False)
    save: Any = SyncCheckpointSaverConfig(writer_config=writer)
    if asynchronous:
        save = AsyncCheckpointSaverConfig(writer_config=writer, staging_config=staging)
    options = {"storage_config": S3StorageConfig(ROOT), "finalize_callback": commit, **options}
    return CheckpointManager.Config(save=save, **options).build()


def state(step: int) -> dict[str, Any]:
    model = {f"layer{n}.weight": torch.full((200, 500), float(100 * step + n)) for n in range(3)}
    return {"model": model, "step": step}


def load(name: str, made: CheckpointManager | None = None) -> dict[str, Any]:
    empty = {key: torch.zeros_like(value) for key, value in state(0)["model"].items()}
    return dict((made or manager()).load(name, into={"model": empty, "step": None}))


def test_saved_checkpoints_load_and_are_listed_verified_and_pruned(faulty: FaultyServer) -> None:
    made = manager()
    for step in (1, 2, 3):
        made.save(f"step-{step}", state(step))
    made.close()
    for step in (1, 2, 3):
        assert_same(load(f"step-{step}"), state(step))
    assert [(each.name, each.step, each.committed) for each in list_checkpoints(ROOT)] == [
        (f"step-{step}", step, True) for step in (1, 2, 3)
    ]
    assert latest(ROOT).name == "step-3"
    assert verify(f"{ROOT}/step-2", full=True).ok
    pin(f"{ROOT}/step-1")
    assert [each.name for each in prune(ROOT, KeepLatest(1)).deleted] == ["step-2"]
    assert_same(load("step-1"), state(1))
    with pytest.raises(FileNotFoundError):
        load("step-2")
    left = [each["Key"] for each in client().list_objects_v2(Bucket=BUCKET)["Contents"]]
    assert not [key for key in left if "step-2" in key]


def test_the_files_are_those_that_local_storage_writes(faulty: FaultyServer, tmp_path: Path) -> None:
    manager().save("step-1", state(1))
    s3 = client()
    for each in s3.list_objects_v2(Bucket=BUCKET, Prefix="run/step-1/")["Contents"]:
        path = tmp_path / each["Key"].removeprefix("run/")
        path.parent.mkdir(parents=True, exist_ok=True)
        s3.download_file(BUCKET, each["Key"], str(path))
    local = manager(storage_config=LocalFileSystemStorageConfig(use_direct_io=False), finalize_callback=None)
    assert_same(load(str(tmp_path / "step-1"), local), state(1))


def test_without_a_commit_there_is_no_checkpoint(faulty: FaultyServer) -> None:
    manager(finalize_callback=None).save("step-1", state(1))
    storage = S3StorageConfig(ROOT).create_storage()
    assert not storage.exists(Path("step-1"))
    assert storage.ls(Path()) == []
    with pytest.raises(FileNotFoundError):
        load("step-1")


def test_a_committed_checkpoint_is_neither_overwritten_nor_damaged_unseen(faulty: FaultyServer) -> None:
    manager().save("step-1", state(1))
    with pytest.raises(FileExistsError, match="committed"):
        manager().save("step-1", state(2))
    assert_same(load("step-1"), state(1))
    s3 = client()
    data = s3.get_object(Bucket=BUCKET, Key="run/step-1/model_0.pt")["Body"].read()
    s3.put_object(Bucket=BUCKET, Key="run/step-1/model_0.pt", Body=data[:-3] + b"???")
    with pytest.raises(errors.CorruptCheckpointError, match="model_0"):
        load("step-1")


def test_what_cannot_be_is_told_before_anything_is_written(faulty: FaultyServer) -> None:
    with pytest.raises(errors.SaveProtocolError, match="write_to_temp_dir=False"):
        manager(in_place=False).save("step-1", state(1))
    for name in ("/step-2", f"s3://{BUCKET}/other/step-2", "../step-2"):
        with pytest.raises(errors.InvalidURLError, match="not below"):
            manager().save(name, state(2))


def test_rmdir_deletes_a_checkpoint_and_respects_pins(faulty: FaultyServer) -> None:
    made, storage = manager(), S3StorageConfig(ROOT).create_storage()
    made.save("step-1", state(1))
    pin(f"{ROOT}/step-1")
    with pytest.raises(errors.CheckpointProtectedError):
        storage.rmdir(Path("step-1"))
    unpin(f"{ROOT}/step-1")
    storage.rmdir(Path("step-1"))
    assert "Contents" not in client().list_objects_v2(Bucket=BUCKET)


# --- ranks ----------------------------------------------------------------------------------------------


def _weights() -> torch.Tensor:
    return torch.arange(12 * 18, dtype=torch.float32).reshape(12, 18)


def _gather(_: object, data: object, group: dist.ProcessGroup | None) -> dict[int, Any]:
    """As in its DefaultMetadataManager, which only knows CUDA."""
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, data, group=group)
    return dict(enumerate(found))


def _save_on_ranks(dim: int) -> None:
    DefaultMetadataManager._all_gather_pickled_data = _gather
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = {"weight": distribute_tensor(_weights(), mesh, [Shard(dim)])}
    made = manager(asynchronous=True, items={"model": ItemSpec(resharder=DefaultResharder())})
    future = made.save("step-5", {"model": value, "step": 5})
    future.result(timeout=240)
    made.close()


def _load_on_ranks(dim: int) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = {"weight": distribute_tensor(torch.zeros(12, 18), mesh, [Shard(dim)])}
    made = manager(items={"model": ItemSpec(resharder=DefaultResharder())})
    return made.load("step-5", into={"model": value})["model"]["weight"].full_tensor()


def test_an_asynchronous_save_of_two_ranks_loads_on_three_in_another_dimension(faulty: FaultyServer) -> None:
    run_ranks(2, _save_on_ranks, 0)
    [info] = list_checkpoints(ROOT)
    assert (info.step, info.world_size) == (5, 2)
    for found in run_ranks(3, _load_on_ranks, 1):
        assert torch.equal(found, _weights())


# --- kills ----------------------------------------------------------------------------------------------


def _save_step_2(environment: dict[str, str], output: Path) -> None:
    begin(environment, output)
    manager().save("step-2", state(2))


@pytest.mark.parametrize("applied", [False, True])
def test_killed_at_any_request_the_old_one_loads_and_the_new_one_is_whole_or_not_there(
    faulty: FaultyServer, tmp_path: Path, applied: bool
) -> None:
    manager().save("step-1", state(1))
    environment = {**os.environ, "AWS_ACCESS_KEY_ID": access_key(0)}
    count, outcomes = 0, []
    while not outcomes or outcomes[-1] != "not hit":
        count += 1
        close_clients()  # only the process that is killed is connected
        with running([new_process(_save_step_2, environment, tmp_path / f"{count}.log")]) as processes:
            shooting = Shooting(processes, [Shot(0, count, applied)])
            with shooting.on(faulty):
                processes[0].join()
                wait_until_quiet(faulty)
        assert_same(load("step-1"), state(1))
        if S3StorageConfig(ROOT).create_storage().exists(Path("step-2")):
            assert_same(load("step-2"), state(2))
            outcomes.append("committed" if shooting.hit else "not hit")
            remove(f"{ROOT}/step-2", force=True)
        else:
            outcomes.append("not there")
            assert [each.name for each in list_checkpoints(ROOT) if each.committed] == ["step-1"]
    assert outcomes.count("not there") > 5, outcomes
