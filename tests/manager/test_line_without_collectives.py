"""Saves that overlap, of ranks that do not wait for each other."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_s3
from dcp_s3 import CheckpointManager, S3StorageReader, SaveEvery, errors
from tests.ranks import run_ranks


def _saves(root: str, steps: int) -> None:
    with CheckpointManager(root, coordination="s3", overlap="queue", settings={"rank_timeout": 5.0}) as manager:
        for step in range(1, steps + 1):
            state = {"shared": torch.full((4,), float(step)), f"own-{dist.get_rank()}": torch.full((2,), float(step))}
            manager.save(step, state)


@pytest.mark.servers("memory")
def test_they_queue(server: Any, root: str) -> None:
    run_ranks(2, _saves, root, 4)
    assert [info.step for info in dcp_s3.list_checkpoints(root)] == [1, 2, 3, 4]


class _Uncopyable:
    def __reduce__(self) -> Any:
        raise RuntimeError("not this one")

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("not this one")


class _Stateless:
    """A Stateful that has no state yet."""

    def state_dict(self) -> Any:
        raise RuntimeError("out of memory")

    def load_state_dict(self, state: Any) -> None:
        """Nothing."""


def _save(manager: CheckpointManager, step: int, **bad: Any) -> str:
    """What it raised."""
    rank = dist.get_rank()
    state = {"shared": torch.full((4,), float(step)), f"own-{rank}": torch.full((2,), float(step))}
    try:
        manager.save(step, {**state, **bad})
    except errors.DcpS3Error as error:
        return type(error).__name__
    return "begun"


def _fail_then_save_again(root: str, overlap: Any, fails: Any, together: bool) -> list[str]:
    bad = {"bad": fails()} if dist.get_rank() == 1 else {}
    settings = {"rank_timeout": 0.3 if together else 20.0}
    with CheckpointManager(root, coordination="s3", overlap=overlap, overwrite=True, settings=settings) as manager:
        told = [_save(manager, 1, **bad)]
        if together:  # all have given it up
            if not bad:
                with pytest.raises(errors.SaveFailedError):
                    manager.wait()
            dist.barrier()
        if together or bad:
            told.append(_save(manager, 1))
        manager.wait()
    return told


def _save_on(root: str, overlap: Any) -> list[str]:
    """A training that logs what a save raises, and goes on; one rank cannot make its state once."""
    bad = {"bad": _Stateless()} if dist.get_rank() == 1 else {}
    policy = SaveEvery(steps=1) | SaveEvery(seconds=3600)
    settings = {"rank_timeout": 0.3}
    with CheckpointManager(root, coordination="s3", overlap=overlap, should_save=policy, settings=settings) as manager:
        told = [_save(manager, 1, **bad), *(_save(manager, step) for step in (2, 3, 4))]
        manager.wait()
    return told


@pytest.mark.servers("memory")
@pytest.mark.parametrize("overlap", ["wait", "queue"])
def test_after_one_rank_failed_alone_the_next_saves_are_whole(server: Any, root: str, overlap: str) -> None:
    first, second = run_ranks(2, _save_on, root, overlap)
    assert second == ["SaveFailedError", "begun", "begun", "begun"]
    assert sorted(first) == ["SaveFailedError", "begun", "begun", "begun"], "each failure is raised once"
    assert first[0] == "begun"
    assert [info.step for info in dcp_s3.list_checkpoints(root) if info.committed] == [2, 3, 4]


def _end_the_group_early(root: str, overlap: Any) -> None:
    rank = dist.get_rank()
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    with CheckpointManager(root, coordination="s3", overlap=overlap) as manager:
        for step in (1, 2):
            manager.save(step, {"shared": torch.zeros(4), f"own-{rank}": torch.full((1 << 20,), float(step))})
        dist.destroy_process_group()


@pytest.mark.servers("memory")
@pytest.mark.parametrize("overlap", ["wait", "queue"])
def test_what_was_called_with_a_group_is_saved_by_all_of_it(server: Any, root: str, overlap: str) -> None:
    run_ranks(2, _end_the_group_early, root, overlap)
    found = [info for info in dcp_s3.list_checkpoints(root) if info.committed]
    assert [(info.step, info.world_size) for info in found] == [(1, 2), (2, 2)]
    for info in found:
        state = {"own-0": torch.zeros(1 << 20), "own-1": torch.zeros(1 << 20)}
        dcp.load(state, storage_reader=S3StorageReader(info.url), no_dist=True)
        assert all(bool((each == info.step).all()) for each in state.values())


@pytest.mark.servers("memory")
@pytest.mark.parametrize("overlap", ["wait", "queue"])
@pytest.mark.parametrize("fails", [_Uncopyable, _Stateless])
@pytest.mark.parametrize("together", [True, False])
def test_after_one_rank_failed_alone_that_step_can_be_saved_again(
    server: Any, root: str, overlap: str, fails: Any, together: bool
) -> None:
    first, second = run_ranks(2, _fail_then_save_again, root, overlap, fails, together)
    assert first == ["begun", "begun"][: 1 + together]
    assert second == ["StagingError" if fails is _Uncopyable else "SaveFailedError", "begun"]
    assert [info.committed for info in dcp_s3.list_checkpoints(root)] == [True]
