"""Saves that overlap, of ranks that do not wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_s3
from dcp_s3 import CheckpointManager, errors
from tests.ranks import run_ranks


def _saves(root: str, overlap: Any, steps: int) -> int:
    with CheckpointManager(root, coordination="s3", overlap=overlap, settings={"rank_timeout": 5.0}) as manager:
        for step in range(1, steps + 1):
            state = {"shared": torch.full((4,), float(step)), f"own-{dist.get_rank()}": torch.full((2,), float(step))}
            manager.save(step, state)
    return dcp_s3.stats().saves.superseded


@pytest.mark.servers("memory")
def test_they_queue(server: Any, root: str) -> None:
    assert run_ranks(2, _saves, root, "queue", 4) == [0, 0]
    assert [info.step for info in dcp_s3.list_checkpoints(root)] == [1, 2, 3, 4]


@pytest.mark.servers("memory")
def test_what_any_rank_supersedes_ends_quietly_on_all(server: Any, root: str) -> None:
    run_ranks(2, _saves, root, "supersede", 8)
    found = [info.step for info in dcp_s3.list_checkpoints(root) if info.committed]
    assert found
    assert found[-1] == 8
    for step in found:
        state = {"shared": torch.zeros(4), "own-0": torch.zeros(2), "own-1": torch.zeros(2)}
        with CheckpointManager(root, read_only=True) as manager:
            assert manager.restore(state, step=step) == step
        assert all(torch.equal(each, torch.full_like(each, float(step))) for each in state.values())


class _Uncopyable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not this one")

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not this one")


def _stage_badly_then_save_again(root: str, overlap: Any) -> str:
    rank, told = dist.get_rank(), ""
    settings = {"rank_timeout": 0.3}
    with CheckpointManager(root, coordination="s3", overlap=overlap, overwrite=True, settings=settings) as manager:
        for bad in (True, False):
            state = {"shared": torch.ones(4), f"own-{rank}": torch.full((2,), float(rank))}
            if bad and rank == 1:
                state["bad"] = _Uncopyable()  # type: ignore[assignment]
            try:
                manager.save(1, state)
                manager.wait()
            except errors.DcpS3Error as error:
                told += f"{type(error).__name__} "
            dist.barrier()
    return told.strip()


@pytest.mark.servers("memory")
@pytest.mark.parametrize("overlap", ["wait", "queue"])
def test_after_staging_failed_on_one_rank_all_can_save_that_step_again(server: Any, root: str, overlap: str) -> None:
    assert run_ranks(2, _stage_badly_then_save_again, root, overlap) == ["SaveFailedError", "StagingError"]
    assert [info.committed for info in dcp_s3.list_checkpoints(root)] == [True]
