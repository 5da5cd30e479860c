"""CheckpointManager on two gloo ranks: what they agree on."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_s3
from dcp_s3 import CheckpointManager, errors
from tests.ranks import run_ranks
from tests.retention.making import delete


def _state(step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(16, dtype=torch.float32) + 100 * step
    return {"weight": distribute_tensor(whole, mesh, [Shard(0)]), "step": step}


def _is_of(state: dict[str, Any], step: int) -> bool:
    weight: DTensor = state["weight"]
    first = 8 * dist.get_rank()
    expected = torch.arange(first, first + 8, dtype=torch.float32) + 100 * step
    return bool(torch.equal(weight.to_local(), expected)) and state["step"] == step


def _client() -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=dcp_s3.Settings().endpoint_url)


def _save_and_restore(root: str) -> tuple[list[str], int]:
    """What is left at the end, and the prunes of this rank."""
    with CheckpointManager(root, retention="latest:2") as manager:
        assert manager.restore(_state(0)) is None
        for step in (1, 2, 3):
            # In two steps, so that training's collectives run beside the save's.
            manager.save(step, _state(step), {"loss": 1.0 / step})
            dist.all_reduce(torch.ones(1))
        loaded = _state(0)
        assert manager.restore(loaded) == 3
        assert _is_of(loaded, 3)
        assert manager.restore(loaded, "best", metric="loss") == 3
        manager.save(4, _state(4), blocking=True)
        manager.annotate(4, {"loss": 0.0})
    dist.barrier()
    return [info.name for info in dcp_s3.list_checkpoints(root)], dcp_s3.stats().prunes.runs


def test_ranks_save_and_restore_and_one_of_them_prunes(memory_server: Any, root: str) -> None:
    (names, runs), (_, others) = run_ranks(2, _save_and_restore, root)
    assert names == ["step-00000003", "step-00000004"]
    assert runs >= 1
    assert others == 0


class _FailsOn:
    """Whose state cannot be saved on one rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __reduce__(self) -> Any:
        if dist.get_rank() == self._rank:
            raise ZeroDivisionError("cannot be pickled here")
        return str, ("fine",)

    def __deepcopy__(self, memo: Any) -> _FailsOn:
        return self


def _fail(root: str) -> list[str]:
    seen = []
    manager = CheckpointManager(root)
    manager.save(1, _state(1), blocking=True)
    manager.save(2, _state(2) | {"other": _FailsOn(1)})
    try:
        manager.save(3, _state(3))  # every rank is told here
    except errors.SaveFailedError as error:
        seen.append(f"{error.step} {sorted(error.failures)} {error}")
    try:  # one rank alone cannot go on
        manager.save(4, _state(4), {"loss": object()} if dist.get_rank() == 1 else None)
    except errors.DcpS3Error as error:
        seen.append(f"{type(error).__name__} {error}")
    try:
        manager.save(5 + dist.get_rank(), _state(5))
    except errors.SaveProtocolError as error:
        seen.append(str(error))
    try:
        manager.restore(_state(0), dist.get_rank())
    except errors.CheckpointError as error:
        seen.append(str(error))
    try:  # of a wrong type
        manager.save(4, _state(4), 5 if dist.get_rank() == 1 else None)  # type: ignore[arg-type]
    except errors.CheckpointError as error:
        seen.append(f"{type(error).__name__} {error}")
    try:
        manager.restore(_state(0), "best", metric=None if dist.get_rank() == 1 else "loss")
    except errors.DcpS3Error as error:
        seen.append(f"{type(error).__name__} {error}")
    loaded = _state(0)
    assert manager.restore(loaded) == 1
    assert _is_of(loaded, 1)
    manager.save(6, _state(6))
    manager.close()
    assert manager.latest_step() == 6
    return seen


def test_a_failure_on_one_rank_is_raised_on_all(memory_server: Any, root: str) -> None:
    first, second = run_ranks(2, _fail, root)
    assert first[0] == second[0]
    assert first[0].startswith("2 [1] the save of step 2")
    assert "cannot be pickled here" in first[0]
    assert first[1].startswith("SaveFailedError step 4 is not saved: rank 1 cannot go on")
    assert second[1].startswith("SaveProtocolError metric 'loss'")
    assert "{0: 5, 1: 6} (by rank)" in first[2] == second[2]
    assert "restore different checkpoints" in first[3]
    assert first[4].startswith("SaveFailedError step 4 is not saved: rank 1 cannot go on")
    assert second[4].startswith("CheckpointError metrics is a int")
    assert "nothing is restored: rank 1 cannot go on" in first[5]
    assert second[5].startswith("SettingsError")


def _vanish(root: str) -> int | None:
    with CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            manager.save(step, _state(step))
        manager.wait()
        find = manager._restoring.find

        def find_and_delete(*arguments: Any) -> Any:  # runs on the first rank only
            assert dist.get_rank() == 0
            found = find(*arguments)
            if found is not None and found[1] > 1:
                delete(_client(), found[0], ".metadata")
            return found

        manager._restoring.find = find_and_delete  # type: ignore[method-assign]
        loaded = _state(0)
        step = manager.restore(loaded)
        assert _is_of(loaded, 1)
        return step


def test_a_latest_that_vanishes_makes_all_ranks_load_the_one_before(memory_server: Any, root: str) -> None:
    assert run_ranks(2, _vanish, root) == [1, 1]


def _retention_fails(root: str) -> dict[str, Any]:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError

    with CheckpointManager(root, retention=broken) as manager:
        for step in (1, 2):
            manager.save(step, _state(step))
    counts: dict[str, Any] = dcp_s3.stats().to_dict()["prunes"]
    return counts


def test_retention_that_fails_fails_no_rank(memory_server: Any, root: str) -> None:
    first, second = run_ranks(2, _retention_fails, root)
    assert first["failed"] == first["runs"] >= 1
    assert second["runs"] == 0
    assert len(dcp_s3.list_checkpoints(root)) == 2


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _make_and_close(root: str) -> list[int]:
    counts = [_threads()]
    manager = CheckpointManager(root, overlap="queue", save_on_sigterm=True)
    counts.append(_threads())
    manager.save(1, {"a": torch.ones(2)})
    manager.close()
    manager.close()
    dist.barrier()  # the default group is as it was
    return [*counts, _threads()]


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_no_thread_of_its_groups_outlives_a_closed_manager(memory_server: Any, root: str) -> None:
    # Such a thread drops a tensor of the last collective a little later. If the interpreter has ended by then, that
    # aborts the process.
    for before, made, closed in run_ranks(2, _make_and_close, root):
        assert made > before
        assert closed <= before
