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
from dcp_s3.spill import saving as saving_module
from dcp_s3.spill.drain import Drainer
from dcp_s3.spill.store import SpillStore
from tests.faulty import BUCKET, FaultyServer
from tests.ranks import run_ranks
from tests.spill.making import assert_complete

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

URL = f"s3://{BUCKET}/run/step-1"
THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS


@pytest.fixture(autouse=True)
def _settings(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PART_SIZE": "5MiB", "RETRY_ATTEMPTS": "2", "SPILL_AFTER": "2s"}.items():
        monkeypatch.setenv(f"DCP_S3_{name}", value)


def _shard(seed: int) -> dict[str, DTensor]:
    mesh, full = init_device_mesh("cpu", (dist.get_world_size(),)), full_state(seed)["a"]
    return {"a": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)}


def full_state(seed: int) -> dict[str, torch.Tensor]:
    return {"a": torch.arange(3 * 2**20, dtype=torch.float32).view(2, -1) + seed}


def _writer(directories: list[str], **options: Any) -> S3StorageWriter:
    os.environ["DCP_S3_SPILL_DIR"] = directories[dist.get_rank() % len(directories)]
    return S3StorageWriter(URL, settings={"durability": "local"}, **options)


def _save_async(directories: list[str], kind: AsyncCheckpointerType) -> None:
    writer = _writer(directories)
    future: Any = dcp.async_save(_shard(0), storage_writer=writer, async_checkpointer_type=kind)
    future.result()
    writer.wait_committed(timeout=60)
    assert S3Store(BUCKET, writer.settings).exists("run/step-1/.metadata")


@pytest.mark.quick("1-thread")
@pytest.mark.parametrize(("count", "kind"), [(1, THREAD), (2, PROCESS)], ids=["1-thread", "2-process"])
def test_the_ranks_of_an_asynchronous_save_can_wait_for_its_commit(
    tmp_path: Path, kind: AsyncCheckpointerType, count: int
) -> None:
    run_ranks(2, _save_async, [str(tmp_path / str(number)) for number in range(count)], kind, timeout=200)
    assert_complete(URL, full_state(0))


def _overwrite_and_wait(directories: list[str]) -> None:
    for name in ("drain_in_background", "wait_until_drained"):  # the test drains
        setattr(saving_module, name, lambda *_, **__: None)
    dcp.save(_shard(0), storage_writer=S3StorageWriter(URL))
    writer = _writer(directories, overwrite=True)
    dcp.save(_shard(1), storage_writer=writer)
    with pytest.raises(TimeoutError):
        writer.wait_committed(timeout=0.5)
    dist.barrier()
    if dist.get_rank() == 0:
        for path, committed in ((0, []), (1, []), (0, [URL])):  # the commit waits for the objects of both
            assert Drainer(SpillStore(directories[path])).run().committed == committed
    dist.barrier()
    writer.wait_committed(timeout=20)


def test_the_commit_waits_for_all_and_no_rank_takes_the_checkpoint_that_is_overwritten_for_its_own(
    tmp_path: Path,
) -> None:
    paths = [str(tmp_path / str(number)) for number in range(2)]
    run_ranks(2, _overwrite_and_wait, paths)
    assert_complete(URL, full_state(1))
    assert [SpillStore(path).scan() for path in paths] == [[], []]
