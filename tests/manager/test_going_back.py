"""Ranks that do not wait for each other, and fail alone, are interrupted, or restore and go on in the same process."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import dcp_s3
from dcp_s3 import CheckpointManager, S3StorageReader, SaveEvery, errors
from tests.ranks import run_ranks


class _Stateless:
    """A Stateful without a state."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def state_dict(self) -> Any:
        raise self._error

    def load_state_dict(self, state: Any) -> None:
        """Nothing."""


class _Planless(DefaultSavePlanner):
    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("no plan")


def _state(value: float) -> dict[str, Any]:
    return {f"own-{dist.get_rank()}": torch.full((4,), value)}


def _save(manager: CheckpointManager, step: int, value: float, **options: Any) -> str:
    """What comes of it."""
    bad = options.pop("bad", {})
    try:
        manager.save(step, {**_state(value), **bad}, **options)
        manager.wait()
    except errors.DcpS3Error as error:
        return " ".join(str(error).split())
    except KeyboardInterrupt:
        return "interrupted"
    return "saved"


def _values(root: str) -> dict[int, list[float]]:
    """What each committed step holds of each rank."""
    found = {}
    for info in dcp_s3.list_checkpoints(root):
        if info.committed:
            state = {f"own-{rank}": torch.zeros(4) for rank in range(info.world_size or 0)}
            dcp.load(state, storage_reader=S3StorageReader(info.url), no_dist=True)
            found[info.step or 0] = [float(each[0]) for each in state.values()]
    return found


# --- a restore -------------------------------------------------------------------------------------


def _restore_and_repeat(root: str, overwrite: bool, called: bool) -> list[str]:
    """Rank 1 fails before step 1 is saved; then both go back, and rank 1 is first to come to step 1 again."""
    rank = dist.get_rank()
    settings = {"rank_timeout": 10.0, "save_timeout": 2.0}
    with CheckpointManager(root, coordination="s3", overwrite=overwrite, settings=settings) as manager:
        told = [_save(manager, 0, 100.0)]
        if rank == 0:
            told.append(_save(manager, 1, 101.0))
        elif called:
            told.append(_save(manager, 1, 101.0, bad={"bad": _Stateless(RuntimeError("out of memory"))}))
        dist.barrier()
        assert manager.restore(_state(-1.0)) == 0
        dist.barrier()  # as the collectives of a training do
        time.sleep(1.0 - rank)
        told.append(_save(manager, 1, 201.0))
        dist.barrier()
        told.append(_save(manager, 2, 202.0))
    return told


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_a_rank_saved_before_a_restore_is_not_merged_with_what_it_saves_after(
    memory_server: Any, root: str, overwrite: bool
) -> None:
    first, second = run_ranks(2, _restore_and_repeat, root, overwrite, True)
    assert [each == "saved" for each in first] == [each == "saved" for each in second] == [True, False, True, True]
    assert "out of memory" in second[1]
    assert _values(root) == {0: [100.0, 100.0], 1: [201.0, 201.0], 2: [202.0, 202.0]}


@pytest.mark.parametrize("overwrite", [False, True])
def test_nor_if_another_one_had_not_come_to_that_save(memory_server: Any, root: str, overwrite: bool) -> None:
    first, second = run_ranks(2, _restore_and_repeat, root, overwrite, False)
    assert "has restored a checkpoint since it began its save number 1" in second[1]
    assert second[2] == "saved"
    found = _values(root)
    assert found.pop(1, [201.0, 201.0]) == [201.0, 201.0]
    assert found == {0: [100.0, 100.0], 2: [202.0, 202.0]}
    assert first[0] == first[3] == "saved"


# --- the process group -----------------------------------------------------------------------------


def _save_without_the_group(root: str) -> str:
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    manager = CheckpointManager(root, coordination="s3")
    assert _save(manager, 1, 101.0) == "saved"
    state = _state(102.0)
    dist.destroy_process_group()
    try:
        manager.save(2, state)
    except errors.SaveProtocolError as error:
        return str(error)
    finally:
        manager.close()
    return "saved"


def test_a_manager_whose_group_has_gone_does_not_save_a_rank_as_the_whole(memory_server: Any, root: str) -> None:
    for rank, told in enumerate(run_ranks(2, _save_without_the_group, root)):
        assert f"was made on rank {rank} of 2, which is rank 0 of 1 now" in told
    assert _values(root) == {1: [101.0, 101.0]}


# --- failures --------------------------------------------------------------------------------------


def _fail_in_the_background(root: str) -> tuple[str, float, str]:
    planner = _Planless() if dist.get_rank() == 1 else None
    with CheckpointManager(root, coordination="s3", settings={"rank_timeout": 2.0}) as manager:
        began = time.monotonic()
        told = _save(manager, 1, 101.0, planner=planner)
        seconds = time.monotonic() - began
        dist.barrier()
        return told, seconds, _save(manager, 1, 111.0)


def test_a_failure_after_the_call_is_told_and_the_step_can_be_saved_again(memory_server: Any, root: str) -> None:
    outcome = run_ranks(2, _fail_in_the_background, root)
    for told, seconds, again in outcome:
        assert "no plan" in told
        assert seconds < 15, "ten times the rank timeout"
        assert again == "saved"
    assert _values(root) == {1: [111.0, 111.0]}


def _interrupt(root: str) -> list[str]:
    """Ctrl-C on one rank, whose handler saves once more."""
    bad = {"bad": _Stateless(KeyboardInterrupt())} if dist.get_rank() == 1 else {}
    with CheckpointManager(root, coordination="s3") as manager:
        told = [_save(manager, 1, 101.0, bad=bad)]
        if bad:
            told.append(_save(manager, 1, 101.0))
    return told


def test_an_interrupted_save_may_be_called_again(memory_server: Any, root: str) -> None:
    assert run_ranks(2, _interrupt, root) == [["saved"], ["interrupted", "saved"]]
    assert _values(root) == {1: [101.0, 101.0]}


def test_an_earlier_failure_does_not_make_a_save_fail(memory_server: Any, root: str) -> None:
    state = {"own-0": torch.full((4,), 1.0)}
    with CheckpointManager(root, coordination="s3", should_save=SaveEvery(steps=10)) as manager:
        dcp.save(state, storage_writer=dcp_s3.S3StorageWriter(manager.url(40)), no_dist=True)
        assert manager.save(40, state)
        manager._saving.settle()
        with pytest.raises(errors.SaveFailedError, match="step 40") as caught:
            manager.save(50, state, blocking=True)
        assert caught.value.step == 40
        assert dcp_s3.latest(root).step == 50  # type: ignore[union-attr]
        assert not manager.should_save(50)
        manager.wait()


def _save_over(root: str) -> str:
    with CheckpointManager(root, coordination="s3") as manager:
        return _save(manager, 1, 101.0)


def test_where_a_checkpoint_is_nothing_is_left(memory_server: Any, root: str, bucket: str, s3: Any) -> None:
    def keys() -> list[str]:
        return [each["Key"] for each in s3.list_objects_v2(Bucket=bucket)["Contents"]]

    assert run_ranks(2, _save_over, root) == ["saved", "saved"]
    before = keys()
    assert all("already exists" in told for told in run_ranks(2, _save_over, root))
    assert keys() == before
