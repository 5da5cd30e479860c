"""Several ranks, with a spill directory each or one for all: the commit waits for what every rank has on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dcp_s3 import S3StorageWriter
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.spill import saving as saving_module
from dcp_s3.spill.drain import Drainer, DrainReport
from dcp_s3.spill.store import SpillStore
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.spill.making import allow_all, assert_complete, refuse_all

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

URL = f"s3://{BUCKET}/run/step-1"
THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
MIB = 2**20


@pytest.fixture(autouse=True)
def _settings(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PART_SIZE": "5MiB", "RETRY_ATTEMPTS": "2", "SPILL_AFTER": "2s"}.items():
        monkeypatch.setenv(f"DCP_S3_{name}", value)


def full_state(seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: torch.arange(6 * MIB // 4, dtype=torch.float32).view(2, -1) + seed + n for n, name in enumerate("ab")}


def _shard(seed: int = 0) -> dict[str, DTensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None) for name, full in full_state(seed).items()
    }


def _use(directories: list[str], *, drain: bool) -> None:
    os.environ["DCP_S3_SPILL_DIR"] = directories[dist.get_rank() % len(directories)]
    if not drain:  # the test does
        for name in ("drain_in_background", "wait_until_drained"):
            setattr(saving_module, name, lambda *_, **__: None)


def _save(directories: list[str], durability: str, drain: bool) -> None:
    _use(directories, drain=drain)
    writer = S3StorageWriter(URL, max_objects=1, settings={"durability": durability})
    dcp.save(_shard(), storage_writer=writer)


def directories_of(tmp_path: Path, count: int) -> list[str]:
    return [str(tmp_path / f"spill-{number}") for number in range(count)]


def drain(path: str) -> DrainReport:
    return Drainer(SpillStore(path)).run()


def is_visible(name: str = ".metadata") -> bool:
    return S3Store(BUCKET, Settings()).exists(f"run/step-1/{name}")


def refuse_rank_1(request: Any) -> Fault | None:
    return refuse_all(request) if "/__1_" in request.key else None


def ranks_in(path: str) -> list[str]:
    """Whose data waits there."""
    return sorted(each.entry.path.split("_")[2] for save in SpillStore(path).scan() for each in save.journal.objects)


@pytest.mark.quick("0-s3", "1-local")
@pytest.mark.parametrize("durability", ["local", "s3"])
@pytest.mark.parametrize("first", [0, 1])
def test_the_commit_waits_for_every_directory(
    faulty: FaultyServer, tmp_path: Path, first: int, durability: str
) -> None:
    """With durability ``s3`` one rank spills, with ``local`` both."""
    paths = directories_of(tmp_path, 2)
    faulty.rule = refuse_rank_1
    run_ranks(2, _save, paths, durability, False)
    faulty.rule = allow_all
    assert [ranks_in(path) for path in paths] == [["0"] if durability == "local" else [], ["1"]]
    commits = [save.journal.commit is not None for save in SpillStore(paths[0]).scan()]
    assert any(commits), "the coordinator's directory holds the commit"
    drain(paths[first])
    assert not is_visible()
    drain(paths[1 - first])
    assert is_visible() == (first == 1)
    drain(paths[0])
    assert_complete(URL, full_state())
    assert [SpillStore(path).scan() for path in paths] == [[], []]
    assert faulty.s3.open_uploads(BUCKET) == []


def _save_async(directories: list[str], kind: AsyncCheckpointerType) -> None:
    _use(directories, drain=True)
    writer = S3StorageWriter(URL, settings={"durability": "local"})
    future: Any = dcp.async_save(_shard(), storage_writer=writer, async_checkpointer_type=kind)
    future.result()
    writer.wait_committed(timeout=60)
    assert S3Store(BUCKET, writer.settings).exists("run/step-1/.metadata")


@pytest.mark.quick("1-thread")
@pytest.mark.parametrize(("count", "kind"), [(1, THREAD), (2, PROCESS)], ids=["1-thread", "2-process"])
def test_the_ranks_of_an_asynchronous_save_can_wait_for_its_commit(
    tmp_path: Path, kind: AsyncCheckpointerType, count: int
) -> None:
    run_ranks(2, _save_async, directories_of(tmp_path, count), kind, timeout=200)
    assert_complete(URL, full_state())


def _overwrite_and_wait(directories: list[str]) -> None:
    _use(directories, drain=False)
    writer = S3StorageWriter(URL, overwrite=True, settings={"durability": "local"})
    dcp.save(_shard(1), storage_writer=writer)
    with pytest.raises(TimeoutError):
        writer.wait_committed(timeout=0.5)
    dist.barrier()
    if dist.get_rank() == 0:
        for path in reversed(directories):
            drain(path)
    dist.barrier()
    writer.wait_committed(timeout=20)


def test_no_rank_takes_the_checkpoint_that_is_overwritten_for_its_own(tmp_path: Path) -> None:
    paths = directories_of(tmp_path, 2)
    run_ranks(2, _save, paths, "s3", False)
    assert_complete(URL, full_state())
    run_ranks(2, _overwrite_and_wait, paths)
    assert_complete(URL, full_state(1))
