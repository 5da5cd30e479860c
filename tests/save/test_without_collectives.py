"""Saves without collectives, as `dcp.save` makes them."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageWriter, errors, latest, list_checkpoints
from tests.ranks import run_ranks


def _names() -> dict[str, torch.Tensor]:
    return {f"rank-{dist.get_rank()}-{number}": torch.ones(2) for number in range(12)}


def _save(url: str) -> S3StorageWriter:
    writer = S3StorageWriter(url)
    dcp.save(_names(), storage_writer=writer, use_collectives=False)
    return writer


def _alone(root: str) -> None:
    if dist.get_rank() == 1:  # the other one makes no save
        dcp.save(_names(), storage_writer=S3StorageWriter(root), no_dist=True)


@pytest.mark.servers("memory")
def test_a_rank_that_saves_without_the_others_does_not_wait_for_them(root: str) -> None:
    run_ranks(2, _alone, root)


def _over_another(root: str) -> None:
    first, second = (S3StorageWriter(root, overwrite=True) for _ in range(2))
    for writer in (first, second):
        dcp.save(_names(), storage_writer=writer, use_collectives=False)
    second.wait_committed(60)
    with pytest.raises(errors.CheckpointError, match="replaced or deleted"):
        first.wait_committed(60)


@pytest.mark.servers("memory", "moto")
def test_a_save_that_was_replaced_is_not_waited_for(root: str) -> None:
    run_ranks(2, _over_another, root)


def _on_such_a_store(root: str) -> str:
    with pytest.raises(errors.SaveProtocolError) as refused:
        dcp.save(_names(), storage_writer=S3StorageWriter(root), use_collectives=False)
    return str(refused.value)


@pytest.mark.servers("rclone", "rgw")
def test_a_store_without_conditional_writes_is_refused(root: str) -> None:
    assert all("conditional writes" in told for told in run_ranks(2, _on_such_a_store, root))
    assert list_checkpoints(root) == []


def _again_without_a_step(root: str) -> str:
    for step in (1, 2):
        writer = S3StorageWriter(f"{root}/last", overwrite=True, step=step)
        dcp.async_save(_names(), storage_writer=writer, use_collectives=False).result()  # type: ignore[union-attr]
    writer = S3StorageWriter(f"{root}/best", overwrite=True)
    dcp.async_save(_names(), storage_writer=writer, use_collectives=False).result()  # type: ignore[union-attr]
    with pytest.raises(BaseException, match=r"Remedy: S3StorageWriter\(url, step=...\)"):
        dcp.async_save(_names(), storage_writer=writer, use_collectives=False).result()  # type: ignore[union-attr]
    for _ in range(2):  # in lockstep nothing is needed
        dcp.save(_names(), storage_writer=S3StorageWriter(f"{root}/best", overwrite=True), use_collectives=False)
    return "done"


@pytest.mark.servers("memory")
def test_an_asynchronous_save_to_a_url_that_was_saved_to_needs_a_step(root: str) -> None:
    assert run_ranks(2, _again_without_a_step, root) == ["done", "done"]
    assert {info.name for info in list_checkpoints(root) if info.committed} == {"best", "last"}


def _without_its_group(root: str, use_collectives: bool) -> str:
    writer, state = S3StorageWriter(root), _names()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    with pytest.raises((CheckpointException, errors.SaveProtocolError)) as caught:
        dcp.save(state, storage_writer=writer, use_collectives=use_collectives)
    return str(caught.value)


@pytest.mark.servers("memory")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("use_collectives", [True, False])
def test_one_rank_is_not_taken_for_all_when_the_group_is_gone(root: str, use_collectives: bool) -> None:
    for text in run_ranks(2, _without_its_group, root, use_collectives):
        assert "before destroy_process_group()" in text
    assert latest(root) is None


def _in_a_group_of_some(root: str) -> list[str]:
    group = dist.new_group([1, 2])
    told = []
    for process_group in (None, group) if dist.get_rank() else ():
        writer = S3StorageWriter(root, process_group=process_group)
        with pytest.raises(errors.SaveProtocolError) as caught:
            dcp.save(_names(), storage_writer=writer, process_group=group, use_collectives=False)
        told.append(str(caught.value))
    return told


@pytest.mark.servers("memory")
def test_a_save_of_some_ranks_of_the_job_is_refused(root: str) -> None:
    _, *told = run_ranks(3, _in_a_group_of_some, root)
    assert all(
        "without collectives all ranks of the job save together. Remedy: " in text for each in told for text in each
    )
