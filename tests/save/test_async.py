"""dcp.async_save on servers and by another process; and a writer that travels to one. More: tests/stage."""

from __future__ import annotations

import copy
import os
import pickle
import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3Stager, S3StorageReader, S3StorageWriter, errors
from tests.end_to_end.loads import assert_loads
from tests.ranks import run_ranks
from tests.servers import S3Server
from tests.stage.making import PROCESS

pytestmark = pytest.mark.servers("memory")

_PATIENCE_SECONDS = 60


@pytest.mark.soak
@pytest.mark.servers("moto", "rclone", "rgw", "external")
def test_async_save_on_every_server(root: str) -> None:
    state = {"w": torch.arange(1000.0), "nested": {"list": [torch.ones(2), "text"]}, "epoch": 7}
    expected = copy.deepcopy(state)
    saving: Any = dcp.async_save(state, storage_writer=S3StorageWriter(root))
    state["w"].zero_()  # type: ignore[attr-defined]
    saving.result(_PATIENCE_SECONDS)
    assert_loads(root, expected)


# --- AsyncCheckpointerType.PROCESS -----------------------------------------------------------------------


def _save_in_processes(url: str) -> None:
    def save(writer: S3StorageWriter, **options: Any) -> Any:
        how: Any = {"process_group": dist.group.WORLD, "async_checkpointer_type": PROCESS}
        return dcp.async_save(state, storage_writer=writer, **how, **options).result(_PATIENCE_SECONDS)  # type: ignore[union-attr]

    state = {"w": torch.full((3,), 4.0)}
    metadata = save(S3StorageWriter(url, settings={"part_size": "5MiB"}))
    assert metadata.storage_meta.checkpoint_id == url
    assert_loads(url, state)
    # The same process, another stager, a writer that gets its URL with the save.
    save(S3StorageWriter(), checkpoint_id=f"{url}-second", async_stager=S3Stager())
    assert_loads(f"{url}-second", state)
    # And what failed there is told here, on every rank.
    for writer, expected in (
        (S3StorageWriter(url), errors.CheckpointExistsError),
        (S3StorageWriter("s3://no-such-bucket-here/run"), errors.BucketNotFoundError),
    ):
        with pytest.raises(CheckpointException) as caught:
            save(writer)
        assert isinstance(caught.value.failures[0][0], expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_saves_in_another_process(root: str, world_size: int) -> None:
    run_ranks(world_size, _save_in_processes, root)


# --- the writer travels ----------------------------------------------------------------------------------


def test_a_writer_that_was_pickled_writes(root: str, memory_server: S3Server) -> None:
    writer = S3StorageWriter(root, overwrite=True, metrics={"loss": 1.5}, separate=["a"], settings={"concurrency": 3})
    dcp.save({"a": torch.zeros(3)}, storage_writer=writer)  # it has clients by now
    assert memory_server.secret_key.encode() not in pickle.dumps(writer)
    copy = pickle.loads(pickle.dumps(writer))
    assert copy.settings == writer.settings
    assert copy.settings.concurrency == 3
    assert (copy.overwrite, copy.metrics, copy.separate, copy.checkpoint_id) == (True, {"loss": 1.5}, ["a"], root)
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


@pytest.mark.parametrize("separate", ["model.", [["model."]]])
def test_separate_is_a_list_of_beginnings(separate: Any) -> None:
    with pytest.raises(errors.SettingsError, match=r"separate = .*beginnings of FQNs"):
        S3StorageWriter("s3://bucket/x", separate=separate)
