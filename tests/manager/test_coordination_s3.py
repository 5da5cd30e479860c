"""CheckpointManager(coordination="s3"): without collectives, the ranks make one checkpoint together."""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_s3
from dcp_s3 import CheckpointManager, S3StorageReader, S3StorageWriter, SaveEvery, SaveOnPreemption, errors
from tests.collectives import counted
from tests.objects import separate_objects
from tests.ranks import run_ranks

_SHAPE = (7, 3)  # does not divide evenly


def _whole(step: int, add: float = 0.0) -> torch.Tensor:
    return torch.arange(21, dtype=torch.float32).reshape(_SHAPE) + 100 * step + add


def _sharded(step: int, dim: int = 0) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model": {
            "sharded": distribute_tensor(_whole(step), mesh, [Shard(dim)]),
            "replicated": distribute_tensor(_whole(step, 1), mesh, [Replicate()]),
        },
        "plain": _whole(step, 2),
        "step": step,
        f"rng-{dist.get_rank()}": torch.full((4,), float(dist.get_rank() + step)),
    }


def _is_of(state: dict[str, Any], step: int) -> bool:
    sharded: DTensor = state["model"]["sharded"]
    replicated: DTensor = state["model"]["replicated"]
    return (
        torch.equal(sharded.full_tensor(), _whole(step))
        and torch.equal(replicated.to_local(), _whole(step, 1))
        and torch.equal(state["plain"], _whole(step, 2))
        and torch.equal(state[f"rng-{dist.get_rank()}"], torch.full((4,), float(dist.get_rank() + step)))
        and bool(state["step"] == step)
    )


def _committed(root: str) -> list[dcp_s3.CheckpointInfo]:
    return [info for info in dcp_s3.list_checkpoints(root) if info.committed]


def _own(value: float) -> dict[str, Any]:
    return {f"own-{dist.get_rank()}": torch.full((4,), value)}


def _save(manager: CheckpointManager, step: int, value: float, bad: Any = (), **options: Any) -> str:
    try:
        manager.save(step, {**_own(value), **dict(bad)}, **options)
        manager.wait()
    except errors.DcpS3Error as error:
        return " ".join(str(error).split())
    except KeyboardInterrupt:
        return "interrupted"
    return "saved"


def _values(root: str) -> dict[int, list[float]]:
    found = {}
    for info in _committed(root):
        state = {f"own-{rank}": torch.zeros(4) for rank in range(info.world_size or 0)}
        dcp.load(state, storage_reader=S3StorageReader(info.url), no_dist=True)
        found[info.step or 0] = [float(each[0]) for each in state.values()]
    return found


def _train_counting(root: str, coordination: Any) -> tuple[list[str], int, int, int]:
    """The collectives called, those counted by the group, new groups, and prunes."""
    states = {step: _sharded(step) for step in (1, 2, 3)}
    blank = _sharded(0, dim=1)
    groups = distributed_c10d.get_pg_count()
    with counted() as called:
        policy = SaveEvery(steps=2) | SaveEvery(seconds=0.01) | SaveOnPreemption()
        with CheckpointManager(root, coordination=coordination, should_save=policy, retention="latest:2") as manager:
            assert manager.restore(blank) is None
            for step, state in states.items():
                manager.should_save(step)
                extra = {"tokens": step}
                assert manager.save(step, state, {"loss": 1.0 / step}, extra=extra, force=True, blocking=step == 2)
                if coordination != "s3":
                    dist.all_reduce(torch.ones(1))  # as training's collectives, beside the save's
            manager.wait()
            assert not manager.preempted
            assert manager.restore(blank) == 3
            assert manager.latest_step() == 3
            assert manager.extra(3) == {"tokens": 3}
            manager.annotate(3, {"late": 1.0})
            assert manager.best_step("loss") == 3
            assert manager.restore(blank, "best", metric="loss") == 3
    found = called.names, called.number, distributed_c10d.get_pg_count() - groups, dcp_s3.stats().prunes.runs
    assert _is_of(blank, 3)
    return found


@pytest.mark.parametrize("coordination", ["collectives", "s3"])
def test_ranks_save_and_restore_and_without_collectives_none_is_called(
    memory_server: Any, root: str, coordination: str
) -> None:
    told = run_ranks(2, _train_counting, root, coordination)
    assert [prunes > 0 for *_, prunes in told] == [True, False], "one of them prunes"
    for names, number, groups, _ in told:
        assert (names, number, groups) == ([], 0, 0) if coordination == "s3" else min(len(names), number) > 0
    found = _committed(root)
    assert [info.step for info in found] == [2, 3]
    assert (found[-1].metrics["loss"], found[-1].metrics["late"]) == (1.0 / 3, 1.0)


def _plain(step: int, rank: int) -> dict[str, Any]:
    return {"model": {"w": _whole(step)}, "step": step, f"rank-{rank}": torch.full((5,), float(10 * step + rank))}


def _train_plainly(root: str) -> int | None:
    assert not dist.is_initialized()
    rank = int(os.environ["RANK"])
    with CheckpointManager(root, coordination="s3") as manager:
        begun = manager.restore(_plain(0, rank)) or 0
        for step in (begun + 1, begun + 2):
            manager.save(step, _plain(step, rank))
        manager.save(begun + 3, _plain(begun + 3, rank), blocking=True)
        assert manager.latest_step() == begun + 3
        loaded = _plain(0, rank)
        found = manager.restore(loaded)
    assert torch.equal(loaded["model"]["w"], _whole(begun + 3))
    assert loaded[f"rank-{rank}"].tolist() == [10.0 * (begun + 3) + rank] * 5
    return found


def test_the_environment_says_who_the_ranks_are(memory_server: Any, root: str) -> None:
    assert run_ranks(3, _train_plainly, root, group=False, env={"DCP_S3_RUN_ID": "first"}) == [3, 3, 3]
    assert run_ranks(2, _train_plainly, root, group=False, env={"DCP_S3_RUN_ID": "second"}) == [6, 6]
    found = _committed(root)
    assert [(info.step, info.world_size) for info in found] == [(1, 3), (2, 3), (3, 3), (4, 2), (5, 2), (6, 2)]


def _make_one(root: str) -> str:
    with pytest.raises(errors.SaveProtocolError) as caught:
        CheckpointManager(root, coordination="s3")
    with CheckpointManager(root, coordination="s3", read_only=True) as manager:
        assert manager.restore({"w": torch.zeros(3)}) is None
    return str(caught.value)


def test_without_a_name_of_the_run_nothing_is_saved(memory_server: Any, root: str) -> None:
    for text in run_ranks(2, _make_one, root, group=False):
        assert "DCP_S3_RUN_ID" in text


def _failing(error: BaseException) -> dict[str, Any]:
    """A Stateful without a state, as an entry to be saved."""

    def state_dict() -> Any:
        raise error

    return {"bad": {"bad": SimpleNamespace(state_dict=state_dict, load_state_dict=print)}}


def _fail_alone(root: str) -> list[str]:
    """What each save is on this rank: the second one does something wrong in every other."""
    wrong: list[dict[str, Any]] = [
        {"metrics": {"loss": torch.ones(3)}},
        _failing(RuntimeError("out of memory")),
        {"bad": {"bad": threading.Lock()}},
        {"planner": mock.Mock(DefaultSavePlanner, **{"set_up_planner.side_effect": RuntimeError("no plan")})},
        _failing(KeyboardInterrupt()),
    ]
    seen = []
    with CheckpointManager(root, coordination="s3", settings={"rank_timeout": 5.0}) as manager:
        for number, options in enumerate(wrong):
            seen.append(_save(manager, 2 * number, 0.0, **(options if dist.get_rank() == 1 else {})))
            dist.barrier()
            seen.append(_save(manager, 2 * number + 1, 1.0))
    return seen


def test_a_rank_that_fails_alone_fails_that_save_for_all_and_the_next_one_is_whole(
    memory_server: Any, root: str
) -> None:
    first, second = run_ranks(2, _fail_alone, root)
    causes = ["metric 'loss' is a Tensor", "out of memory", "cannot pickle", "no plan", "interrupted"]
    for number, cause in enumerate(causes):
        assert cause in second[2 * number]
        assert (cause if cause != "interrupted" else "rank 1") in first[2 * number], "the others hear why"
        assert (first[2 * number + 1], second[2 * number + 1]) == ("saved", "saved")
    assert _values(root) == {step: [1.0, 1.0] for step in (1, 3, 5, 7, 9)}


def _restore_and_repeat(root: str, called: bool) -> list[str]:
    """Rank 1 fails before step 1 is saved, or does not come to it; then both go back, and rank 1 is first to come to
    step 1 again."""
    rank = dist.get_rank()
    with CheckpointManager(root, coordination="s3", overwrite=True, settings={"rank_timeout": 10.0}) as manager:
        told = [_save(manager, 0, 100.0)]
        if rank == 0:
            manager.save(1, _own(101.0))
        elif called:
            told.append(_save(manager, 1, 101.0, **_failing(RuntimeError("out of memory"))))
        assert manager.restore(_own(-1.0)) == 0
        dist.barrier()  # as the collectives of a training do
        if rank == 0:
            with pytest.raises(errors.SaveFailedError, match="step 1"):
                manager.wait()
        time.sleep(0.5 * (1 - rank))
        told += [_save(manager, 1, 201.0), _save(manager, 2, 202.0)]
    return told


@pytest.mark.parametrize("called", [False, True])
def test_what_a_rank_saved_before_it_went_back_is_not_merged_with_what_it_saves_after(
    memory_server: Any, root: str, called: bool
) -> None:
    first, second = run_ranks(2, _restore_and_repeat, root, called)
    assert first == ["saved"] * 3
    assert [each == "saved" for each in second] == [True, *([False] if called else []), True, True]
    assert _values(root) == {0: [100.0, 100.0], 1: [201.0, 201.0], 2: [202.0, 202.0]}


def _restore_apart(root: str) -> tuple[str, list[int | None]]:
    name = "a" if dist.get_rank() == 0 else "b"
    said, found = "", []
    with CheckpointManager(root, coordination="s3") as manager:
        for step in (None, 1):
            state = {name: torch.zeros(1000)}
            try:
                found.append(manager.restore(state, step))
                assert state[name].tolist() == [1.0] * 1000
            except errors.RestoreFailedError as error:
                said = f"{list(error.failures)} {' '.join(str(error).split())}"
    return said, found


def test_a_rank_that_cannot_load_says_so_and_the_others_go_on(
    memory_server: Any, s3: Any, root: str, bucket: str
) -> None:
    for step in (1, 2):
        state = {"a": torch.ones(1000), "b": torch.ones(1000)}
        url = f"{root}/step-{step:08d}"
        with separate_objects("a", "b"):
            dcp.save(state, storage_writer=S3StorageWriter(url), no_dist=True)
    damaged = min(str(key) for key in memory_server.handle.objects(bucket) if "step-00000002/__" in str(key))
    size = s3.head_object(Bucket=bucket, Key=damaged)["ContentLength"]
    s3.put_object(Bucket=bucket, Key=damaged, Body=bytes(size))
    ended = run_ranks(2, _restore_apart, root)
    assert sorted(found for _, found in ended) == [[1], [2, 1]]
    ((rank, said),) = [(rank, said) for rank, (said, _) in enumerate(ended) if said]
    assert said.startswith(f"[{rank}] the load of step 2 from {root}/step-00000002 failed on rank {rank}")
    assert "other ranks may have loaded it" in said
    assert "Resume: manager.restore(state, step=...) on all ranks" in said
