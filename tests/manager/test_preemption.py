"""SIGTERM on any rank: all save the same step. With ``exit`` they end: with status 0, or with 143 and nothing half."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_s3
from dcp_s3 import CheckpointManager, SaveEvery, SaveOnPreemption, errors
from dcp_s3.url import parse_url
from tests.faulty import BUCKET, serve
from tests.manager.making import blank, is_of, state
from tests.memory_s3 import Fault
from tests.ranks import run_ranks


def _policy(every: int = 10, *, exit: bool = True) -> Any:
    return SaveEvery(steps=every) | SaveOnPreemption(exit=exit)


def _train(
    manager: CheckpointManager,
    *,
    at: int,
    first: int = 1,
    last: int = 1000,
    boundary: Callable[[int], object] = lambda _: None,
) -> tuple[Any, int]:
    """Train until the process would end. Returns its exit status, and how many steps were trained."""
    step = 0
    try:
        for step in range(first, last + 1):
            if step == at:
                os.kill(os.getpid(), signal.SIGTERM)
            boundary(step)
            manager.save(step, state(step))
            if manager.preempted:
                break
    except SystemExit as ended:
        return ended.code, step
    return None, step


# --- one process ---------------------------------------------------------------------------------


@pytest.mark.parametrize("coordination", ["collectives", "s3"])
@pytest.mark.servers("memory")
def test_a_process_saves_the_step_at_which_it_is_and_ends(memory_server: Any, root: str, coordination: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    manager = CheckpointManager(root, coordination=coordination, should_save=_policy())
    assert signal.getsignal(signal.SIGTERM) != before
    assert _train(manager, at=15) == (0, 15)
    assert signal.getsignal(signal.SIGTERM) == before
    assert [info.step for info in dcp_s3.list_checkpoints(root)] == [10, 15]
    with pytest.raises(errors.CheckpointError, match="closed"):
        manager.save(16, state(16))
    with CheckpointManager(root) as again:
        loaded = blank()
        assert again.restore(loaded) == 15
        assert is_of(loaded, 15)


@pytest.mark.servers("memory")
def test_without_exit_the_loop_ends_and_without_a_signal_nothing_is_different(memory_server: Any, root: str) -> None:
    with CheckpointManager(root, should_save=_policy(2, exit=False)) as manager:
        assert _train(manager, at=0, last=5) == (None, 5)
        assert _train(manager, at=7, first=6) == (None, 7)
        assert manager.preempted is True
        assert not manager.should_save(9), "once"
    assert [info.step for info in dcp_s3.list_checkpoints(root)] == [2, 4, 6, 7]


@pytest.mark.servers("memory")
def test_what_is_known_of_a_signal_ends_also_a_save_that_is_forced(memory_server: Any, root: str) -> None:
    with CheckpointManager(root, should_save=_policy()) as manager:
        assert not manager.should_save(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert manager.should_save(2)
        with pytest.raises(SystemExit) as ended:
            manager.save(3, state(3), force=True)
    assert ended.value.code == 0


@pytest.mark.parametrize("failing", ["10/.metadata", "15/.metadata"])
def test_a_last_step_that_fails_is_not_there_and_an_earlier_failure_is_no_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    root = f"s3://{BUCKET}/run"
    with serve(monkeypatch) as server:
        server.rule = lambda request: Fault.error(403, "AccessDenied") if request.key.endswith(failing) else None
        ended = _train(CheckpointManager(root, should_save=_policy()), at=15)
        assert ended == (143 if failing.startswith("15") else 0, 15)
        assert ("step 15 was not committed" in caplog.text) == (ended[0] == 143)
        found = [info.step for info in dcp_s3.list_checkpoints(root) if info.committed]
        assert found == ([10] if ended[0] else [15])
        failed = failing.partition("/")[0]
        assert not [key for key in server.s3.objects(BUCKET) if f"{failed}/__" in key], "half a checkpoint is left"


# --- ranks ---------------------------------------------------------------------------------------


def _ranks_train(root: str, coordination: Any) -> tuple[Any, int]:
    manager = CheckpointManager(root, coordination=coordination, should_save=_policy(1000))
    return _train(manager, at=5 if dist.get_rank() else 0, boundary=lambda _: dist.all_reduce(torch.zeros(1)))


def _train_without_group(root: str, meeting: str) -> tuple[Any, int]:
    rank = int(os.environ["RANK"])
    store = dist.FileStore(meeting, 2)
    store.set_timeout(timedelta(seconds=60))

    def meet(step: int) -> None:
        """What a step of ranks in lockstep has."""
        time.sleep(0.2)
        store.set(f"{step}-{rank}", "1")
        store.wait([f"{step}-{1 - rank}"])

    manager = CheckpointManager(root, coordination="s3", should_save=_policy(1000))
    return _train(manager, at=0 if rank else 3, boundary=meet)


@pytest.mark.parametrize("how", ["collectives", "s3", "no group"])
@pytest.mark.servers("memory")
def test_a_signal_on_one_rank_ends_all_at_the_same_step(memory_server: Any, root: str, how: str, tmp_path: Any) -> None:
    if how == "no group":
        env = {"DCP_S3_RUN_ID": "mine"}
        first, second = run_ranks(2, _train_without_group, root, str(tmp_path / "meeting"), env=env, group=False)
    else:
        first, second = run_ranks(2, _ranks_train, root, how)
    assert first == second
    assert first[0] == 0
    found = dcp_s3.latest(root)
    assert found is not None
    assert found.step == first[1] >= 3
    assert found.world_size == 2
    left = [key for key in memory_server.handle.objects(parse_url(root).bucket) if "board" in key]
    assert len(left) < 10, "what the ranks settle is removed save by save"
