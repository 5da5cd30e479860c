"""Which steps are saved, agreed on by gloo ranks."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dcp_s3
from dcp_s3 import CheckpointManager, SaveEvery, SaveFirst, SaveMoment, SaveOnPreemption, errors
from dcp_s3.manager import deciding
from tests.ranks import run_ranks


def _state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((8,), float(step)), "step": step}


class _Looks:
    """Counts the all-reduces of decisions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        tell = deciding.SaveDecisions._tell

        def counted(decisions: Any, *args: Any) -> Any:
            self.count += 1
            return tell(decisions, *args)

        monkeypatch.setattr(deciding.SaveDecisions, "_tell", counted)


def _by_steps(root: str) -> tuple[list[int], int, dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        looks = _Looks(patch)
        with CheckpointManager(root, should_save=SaveFirst() | SaveEvery(steps=4)) as manager:
            extra = {"rank": dist.get_rank()}
            saved = [step for step in range(1, 10) if manager.save(step, _state(step), extra=extra)]
            return saved, looks.count, manager.extra(8)


def test_steps_alone_need_no_collective_and_the_first_ranks_extra_counts(memory_server: Any, root: str) -> None:
    for saved, looks, extra in run_ranks(2, _by_steps, root):
        assert saved == [1, 4, 8]
        assert looks == 0
        assert extra == {"rank": 0}


class _Clock:
    """Says that each step takes a second; on other ranks than the first that time stands still, or runs away."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds if dist.get_rank() == 0 else -1e6 * self.seconds


def _by_the_clock(root: str) -> tuple[list[int], int]:
    clock = _Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deciding.SaveDecisions.__init__, "__kwdefaults__", {"now": clock})
        looks = _Looks(patch)
        with CheckpointManager(root, should_save=SaveEvery(seconds=300) | SaveEvery(steps=500)) as manager:
            saved = []
            for step in range(1, 1001):
                clock.seconds += 1.0
                if manager.should_save(step):
                    assert manager.save(step, _state(step), blocking=True)
                    saved.append(step)
            return saved, looks.count


def test_the_first_ranks_clock_decides_in_few_collectives(memory_server: Any, root: str) -> None:
    (saved, looks), others = run_ranks(2, _by_the_clock, root)
    assert others == (saved, looks)
    assert saved == [300, 500, 800, 1000]
    assert looks < 60  # in 1000 steps


def _preempted(root: str) -> tuple[list[int], bool]:
    before = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(root, should_save=SaveEvery(steps=1000) | SaveOnPreemption()) as manager:
        saved = []
        for step in range(1, 1000):
            if dist.get_rank() == 1 and step == 5:
                os.kill(os.getpid(), signal.SIGTERM)
            if manager.save(step, _state(step)):
                saved.append(step)
            if manager.preempted:
                break
        assert not manager.should_save(saved[-1] + 1)  # once
    assert signal.getsignal(signal.SIGTERM) == before
    return saved, manager.preempted


def test_a_signal_on_one_rank_makes_all_save_the_same_step(memory_server: Any, root: str) -> None:
    first, second = run_ranks(2, _preempted, root)
    assert first == second
    [step], seen = first
    assert seen
    assert 5 <= step <= 205
    found = dcp_s3.latest(root)
    assert found is not None
    assert found.step == step


def _broken(moment: SaveMoment) -> bool:
    if moment.step == 2:
        raise ZeroDivisionError("on the first rank only")
    return False


def _fails(root: str) -> str:
    with CheckpointManager(root, should_save=_broken) as manager:
        assert not manager.should_save(1)
        try:
            manager.should_save(2)
        except (ZeroDivisionError, errors.CheckpointError) as error:
            failed = str(error)
        assert manager.save(3, _state(3), force=True)
    return failed


def test_a_policy_that_fails_fails_on_all_ranks(memory_server: Any, root: str) -> None:
    first, second = run_ranks(2, _fails, root)
    assert first == "on the first rank only"
    assert "step 2 is not known: the policy has failed on rank 0" in second


def _differ(root: str) -> str:
    with CheckpointManager(root, should_save=SaveEvery(seconds=1000)) as manager:
        try:
            manager.should_save(7 + dist.get_rank())
        except errors.SaveProtocolError as error:
            return str(error)
    return ""


def test_ranks_that_ask_about_different_steps_are_told(memory_server: Any, root: str) -> None:
    for told in run_ranks(2, _differ, root):
        assert "different steps: 7 to 8" in told


def _reads(root: str) -> tuple[int | None, dict[str, Any]]:
    with CheckpointManager(root, read_only=True) as manager:
        loaded = _state(0)
        found = manager.restore(loaded, best="loss")
        with pytest.raises(errors.CheckpointError, match="read_only=True"):
            manager.save(9, loaded)
        return found, loaded


def _disagrees(root: str) -> str:
    with pytest.raises(errors.CheckpointError) as caught:
        CheckpointManager(root, read_only=dist.get_rank() == 0)
    return str(caught.value)


def test_all_ranks_read_only_or_none(memory_server: Any, root: str) -> None:
    with CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, _state(step), {"loss": step})
    for found, loaded in run_ranks(2, _reads, root):
        assert found == 1
        assert loaded["step"] == 1
    for told in run_ranks(2, _disagrees, root):
        assert "different roots, step formats (here of step 12), read_only, save_on_sigterm or should_save" in told


def _asked_meanwhile(root: str) -> list[int]:
    due = (1, 30, 60)
    with CheckpointManager(root, should_save=lambda moment: moment.step in due) as manager:
        return [step for step in range(1, 91) if manager.save(step, _state(step))]


def test_the_ranks_decide_while_a_save_is_under_way(memory_server: Any, root: str) -> None:
    """The collectives of the two, in two threads, are never taken for each other."""
    for _ in range(3):
        assert run_ranks(3, _asked_meanwhile, root) == [[1, 30, 60]] * 3
        root += "-again"
