"""Saves that overlap, of ranks that do not wait for each other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_s3
from dcp_s3 import CheckpointManager
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
