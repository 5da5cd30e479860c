"""SIGTERM on any rank: all save the same step, and know of it."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_s3
from dcp_s3 import CheckpointManager, SaveEvery, SaveOnPreemption, errors
from dcp_s3.url import parse_url
from tests.faulty import BUCKET, serve
from tests.manager.making import state
from tests.memory_s3 import Fault
from tests.ranks import run_ranks


def _policy(every: int = 10) -> Any:
    return SaveEvery(steps=every) | SaveOnPreemption()


def _train(
    manager: CheckpointManager,
    *,
    at: int,
    first: int = 1,
    last: int = 1000,
    boundary: Callable[[int], object] = lambda _: None,
) -> int:
    """Train until SIGTERM, which comes at a step. Returns the last step."""
    with manager:
        for step in range(first, last + 1):
            if step == at:
                os.kill(os.getpid(), signal.SIGTERM)
            boundary(step)
            manager.save(step, state(step))
            if manager.preempted:
                assert not manager.should_save(step + 1), "once"
                break
    return step


@pytest.mark.parametrize(("failing", "left"), [(10, 15), (15, 10)])
def test_a_last_step_that_fails_is_raised_and_an_earlier_failure_is_no_reason(
    monkeypatch: pytest.MonkeyPatch, failing: int, left: int
) -> None:
    root = f"s3://{BUCKET}/run"
    with serve(monkeypatch) as server:
        server.rule = lambda request: Fault.error(403, "AccessDenied") if f"{failing}/.meta" in request.key else None
        with pytest.raises(errors.SaveFailedError, match="step 15") if failing == 15 else contextlib.nullcontext():
            _train(CheckpointManager(root, should_save=_policy()), at=15)
        assert [info.step for info in dcp_s3.list_checkpoints(root) if info.committed] == [left]
        assert not [key for key in server.s3.objects(BUCKET) if f"{failing}/__" in key], "half a checkpoint is left"


def _ranks_train(root: str, coordination: Any) -> int:
    manager = CheckpointManager(root, coordination=coordination, should_save=_policy(1000))
    return _train(manager, at=5 if dist.get_rank() else 0, boundary=lambda _: dist.all_reduce(torch.zeros(1)))


@pytest.mark.parametrize("coordination", ["collectives", "s3"])
@pytest.mark.servers("memory")
def test_a_signal_on_one_rank_ends_all_at_the_same_step(memory_server: Any, root: str, coordination: str) -> None:
    first, second = run_ranks(2, _ranks_train, root, coordination)
    assert first == second >= 3
    found = dcp_s3.latest(root)
    assert found is not None
    assert (found.step, found.world_size) == (first, 2)
    left = [key for key in memory_server.handle.objects(parse_url(root).bucket) if "board" in key]
    assert len(left) < 10, "what the ranks settle is removed save by save"
