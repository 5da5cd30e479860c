"""dcp.async_save: what is saved is the state at the call, saves may overlap, and nothing is left running."""

from __future__ import annotations

import os
import pickle
import threading
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3Stager, S3StorageReader, S3StorageWriter, errors
from tests.end_to_end.loads import assert_loads
from tests.ranks import run_ranks
from tests.servers import S3Server
from tests.stage.making import PROCESS, UntilFile, WaitingPlanner

pytestmark = pytest.mark.servers("memory")

_PATIENCE_SECONDS = 60


def _make_state() -> dict[str, Any]:
    base = torch.arange(24.0).view(4, 6)
    return {
        "parameter": nn.Parameter(torch.arange(1000.0)),
        "bfloat16": torch.arange(100).to(torch.bfloat16),
        "view": base[:, 1:3],
        "base": base,
        "nested": {"step": torch.tensor(3), "list": [torch.ones(2), "text"]},
        "epoch": 7,
    }


def _change(state: dict[str, Any]) -> None:
    """Everything, in place, as training does."""
    with torch.no_grad():
        for tensor in (state["parameter"], state["bfloat16"], state["base"], state["nested"]["step"]):
            tensor.add_(1)
        state["nested"]["list"][0].zero_()
    state["nested"]["list"][1] = "changed"
    state["nested"]["added"] = 1
    state["epoch"] = 8


def _own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dcp_s3-")]


def test_changes_after_async_save_returned_are_not_saved(root: str) -> None:
    """By torch's stager-less call, whose copy the writer makes; all ways of staging: tests/stage."""
    state, go = _make_state(), threading.Event()
    planner = WaitingPlanner(lambda: go.wait(_PATIENCE_SECONDS))
    future: Any = dcp.async_save(state, storage_writer=S3StorageWriter(root), planner=planner)
    _change(state)
    assert not future.done()
    go.set()
    future.result(_PATIENCE_SECONDS)
    assert_loads(root, _make_state())
    assert _own_threads() == []


@pytest.mark.soak
@pytest.mark.servers("moto", "rclone", "rgw", "external")
def test_async_save_on_every_server(root: str) -> None:
    state = _make_state()
    saving: Any = dcp.async_save(state, storage_writer=S3StorageWriter(root))
    _change(state)
    saving.result(_PATIENCE_SECONDS)
    assert_loads(root, _make_state())


# --- AsyncCheckpointerType.PROCESS -----------------------------------------------------------------------


def _save_in_processes(url: str, directory: str) -> None:
    go = Path(directory, f"go-{dist.get_rank()}")
    state = _make_state()

    def save(value: Any, writer: S3StorageWriter, **options: Any) -> Any:
        how: Any = {"process_group": dist.group.WORLD, "async_checkpointer_type": PROCESS}
        return dcp.async_save(value, storage_writer=writer, **how, **options)

    writer = S3StorageWriter(url, settings={"part_size": "5MiB"}, metrics={"loss": 0.5})
    future = save(state, writer, planner=WaitingPlanner(UntilFile(go)))
    _change(state)
    assert not future.done()
    go.touch()
    metadata = future.result(_PATIENCE_SECONDS)
    assert metadata.storage_meta.checkpoint_id == url
    assert_loads(url, _make_state())

    # The same process, another stager, a writer that gets its URL with the save.
    second = {"w": torch.full((3,), 4.0)}
    save(second, S3StorageWriter(), checkpoint_id=f"{url}-second", async_stager=S3Stager()).result(_PATIENCE_SECONDS)
    assert_loads(f"{url}-second", second)

    # And what failed there is told here, on every rank.
    missing = S3StorageWriter("s3://no-such-bucket-here/run")
    for writer, expected in (
        (S3StorageWriter(url), errors.CheckpointExistsError),
        (missing, errors.BucketNotFoundError),
    ):
        with pytest.raises(CheckpointException) as caught:
            save(second, writer).result(_PATIENCE_SECONDS)
        assert isinstance(caught.value.failures[0][0], expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_saves_in_another_process(root: str, tmp_path: Path, world_size: int) -> None:
    run_ranks(world_size, _save_in_processes, root, str(tmp_path))


# --- the writer travels ----------------------------------------------------------------------------------


def test_a_writer_that_was_pickled_writes(root: str, memory_server: S3Server) -> None:
    writer = S3StorageWriter(root, overwrite=True, metrics={"loss": 1.5}, separate=["a"], settings={"concurrency": 3})
    dcp.save({"a": torch.zeros(3)}, storage_writer=writer)  # it has clients by now
    assert memory_server.secret_key.encode() not in pickle.dumps(writer)
    copy = pickle.loads(pickle.dumps(writer))
    assert copy.settings == writer.settings
    assert copy.settings.concurrency == 3
    assert (copy.overwrite, copy.metrics, copy.separate, copy.checkpoint_id) == (True, {"loss": 1.5}, [["a"]], root)
    dcp.save({"a": torch.ones(3)}, storage_writer=copy)
    found = {"a": torch.zeros(3)}
    dcp.load(found, storage_reader=pickle.loads(pickle.dumps(S3StorageReader(root))))
    assert torch.equal(found["a"], torch.ones(3))


def _save_and_fork(url: str) -> None:
    writer = S3StorageWriter(settings={"retry_attempts": 1})
    dcp.save({"w": torch.full((3,), 1.0)}, checkpoint_id=f"{url}/parent", storage_writer=writer)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            dcp.save({"w": torch.full((3,), 2.0)}, checkpoint_id=f"{url}/child", storage_writer=writer, no_dist=True)
            status = 0
        except BaseException:  # noqa: BLE001 - whatever it is, the child must end here
            traceback.print_exc()
        finally:
            os._exit(status)
    # At the same time, over the connection that the parent had.
    dcp.save({"w": torch.full((3,), 3.0)}, checkpoint_id=f"{url}/again", storage_writer=writer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for name, value in (("parent", 1.0), ("child", 2.0), ("again", 3.0)):
        assert_loads(f"{url}/{name}", {"w": torch.full((3,), value)})


def test_a_writer_survives_fork(root: str) -> None:
    run_ranks(1, _save_and_fork, root, timeout=60)
