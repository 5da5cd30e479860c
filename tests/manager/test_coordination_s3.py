"""CheckpointManager(coordination="s3"): no rank waits for another one, and together they make one checkpoint."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_s3
from dcp_s3 import CheckpointManager, S3StorageReader, S3StorageWriter, SaveEvery, SaveOnPreemption, errors
from dcp_s3.offline.copy import copy as download
from tests.manager.counting import collectives, counted
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


# --- no collectives --------------------------------------------------------------------------------


def _train_counting(root: str) -> tuple[list[str], list[str]]:
    states = {step: _sharded(step) for step in (1, 2, 3)}
    blank = _sharded(0, dim=1)
    with counted() as called:
        policy = SaveEvery(steps=2) | SaveEvery(seconds=0.01) | SaveOnPreemption()
        with CheckpointManager(root, coordination="s3", should_save=policy, retention="latest:2") as manager:
            assert manager.restore(blank) is None
            for step, state in states.items():
                manager.should_save(step)
                assert manager.save(step, state, {"loss": 1.0 / step}, extra={"tokens": step}, force=True)
            manager.wait()
            assert not manager.preempted
            assert manager.restore(blank) == 3
            assert manager.latest_step() == 3
            assert manager.extra(3) == {"tokens": 3}
            manager.annotate(3, {"late": 1.0})
            assert manager.best_step("loss") == 3
            assert manager.restore(blank, best="loss") == 3
    assert _is_of(blank, 3)
    dist.barrier()
    with counted() as control:
        dist.all_reduce(torch.ones(1))
        dist.group.WORLD.allreduce(torch.ones(1)).wait()
        dist.new_group()
    dist.barrier()  # gloo's ranks may still connect when the first has made its group
    return called, control


def test_no_collective_is_called_and_no_group_made(memory_server: Any, root: str) -> None:
    for called, control in run_ranks(2, _train_counting, root):
        assert called == []
        assert control.count("a collective of a group") >= 2
        assert {"all_reduce", "new_group", "a new group"} <= set(control)
    found = _committed(root)
    assert [info.step for info in found] == [2, 3]
    assert found[-1].metrics["loss"] == 1.0 / 3
    assert found[-1].metrics["late"] == 1.0


def test_all_collectives_are_counted() -> None:
    listed = collectives()
    for name in ("all_reduce", "barrier", "broadcast_object_list", "gather_object", "scatter_object_list", "isend"):
        assert name in listed
        assert hasattr(dist, name)


# --- without torch.distributed ----------------------------------------------------------------------


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
        manager.wait()
        loaded = _plain(0, rank)
        found = manager.restore(loaded)
    assert torch.equal(loaded["model"]["w"], _whole(begun + 3))
    assert loaded[f"rank-{rank}"].tolist() == [10.0 * (begun + 3) + rank] * 5
    return found


@pytest.mark.servers("memory", "moto")
def test_the_environment_says_who_the_ranks_are(server: Any, root: str, tmp_path: Path) -> None:
    assert run_ranks(3, _train_plainly, root, group=False, env={"DCP_S3_RUN_ID": "first"}) == [3, 3, 3]
    assert run_ranks(2, _train_plainly, root, group=False, env={"DCP_S3_RUN_ID": "second"}) == [6, 6]
    found = _committed(root)
    assert [(info.step, info.world_size) for info in found] == [(1, 3), (2, 3), (3, 3), (4, 2), (5, 2), (6, 2)]
    # torch's own reader takes it.
    download(found[2].url, tmp_path / "step-3")
    loaded = {"model": {"w": torch.zeros(_SHAPE)}, "step": 0, "rank-2": torch.zeros(5)}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "step-3"))
    assert torch.equal(loaded["model"]["w"], _whole(3))
    assert loaded["rank-2"].tolist() == [32.0] * 5


def _make_one(root: str) -> str:
    with pytest.raises(errors.SaveProtocolError) as caught:
        CheckpointManager(root, coordination="s3")
    with CheckpointManager(root, coordination="s3", read_only=True) as manager:
        assert manager.restore({"w": torch.zeros(3)}) is None
    return str(caught.value)


def test_without_a_name_of_the_run_nothing_is_saved(memory_server: Any, root: str) -> None:
    for text in run_ranks(2, _make_one, root, group=False):
        assert "DCP_S3_RUN_ID" in text


def test_one_process_saves_and_restores(memory_server: Any, root: str) -> None:
    with CheckpointManager(root, coordination="s3") as manager:
        assert manager.save(1, {"w": torch.ones(3)}, blocking=True)
        state = {"w": torch.zeros(3)}
        assert manager.restore(state) == 1
    assert state["w"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    "options",
    [
        {"coordination": "S3"},
        {"coordination": "s3", "process_group": object()},
    ],
)
def test_arguments_that_do_not_go_together_are_refused(memory_server: Any, root: str, options: dict[str, Any]) -> None:
    with pytest.raises(errors.DcpS3Error, match=r"coordination") as caught:
        CheckpointManager(root, **options)
    assert "expected" in str(caught.value) or "Remedy" in str(caught.value)


# --- nobody waits ----------------------------------------------------------------------------------


def _save_one_after_the_other(root: str) -> list[int | None]:
    seen = []
    state = _sharded(1)
    with CheckpointManager(root, coordination="s3") as manager:
        for turn in range(dist.get_world_size()):
            if turn == dist.get_rank():
                manager.save(1, state, blocking=True)
            dist.barrier()
            # What blocking does not copy would be torn here: this rank may have to write more of it.
        state["plain"].fill_(-1.0)
        manager.wait()
        seen.append(manager.latest_step())
        loaded = _sharded(0)
        assert manager.restore(loaded) == 1
        assert _is_of(loaded, 1)
    return seen


def test_a_blocking_save_returns_when_the_own_part_is_there(memory_server: Any, root: str) -> None:
    assert run_ranks(2, _save_one_after_the_other, root) == [[1], [1]]


class _Module:
    """A Stateful whose `state_dict` fails on one rank."""

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            raise RuntimeError("out of memory")
        return {"w": torch.ones(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


def _fail_alone(root: str) -> list[str]:
    """What each call raises."""
    wrong: dict[str, Any] = {"metrics": {"loss": torch.ones(3)}} if dist.get_rank() == 1 else {}
    seen = []

    def call(step: int, state: dict[str, Any], **options: Any) -> None:
        try:
            manager.save(step, state, **options)
            manager.wait()
        except errors.CheckpointError as error:
            seen.append(f"{type(error).__name__}: {error}")
        else:
            seen.append("saved")
        dist.barrier()

    with CheckpointManager(root, coordination="s3", settings={"rank_timeout": 1.0}) as manager:
        call(1, _sharded(1))
        call(2, _sharded(2), **wrong)
        call(3, {"module": _Module()})
        call(4, _sharded(4))
        loaded = _sharded(0)
        assert manager.restore(loaded) == 4
        assert _is_of(loaded, 4)
    return seen


def test_a_rank_that_fails_alone_fails_alone_and_the_next_save_is_whole(memory_server: Any, root: str) -> None:
    first, second = run_ranks(2, _fail_alone, root)
    assert first[0] == second[0] == first[3] == second[3] == "saved"
    assert "metric 'loss' is a Tensor" in second[1]
    assert "out of memory" in second[2]
    for text in first[1:3]:
        assert text.startswith("SaveFailedError")
        assert "rank 1 could not write" in " ".join(text.split())
    assert "SaveProtocolError: metric 'loss' is a Tensor" in " ".join(first[1].split())
    assert "out of memory" in first[2]
    assert [info.step for info in _committed(root)] == [1, 4]


def _lose_a_replica(root: str) -> int | None:
    rank = int(os.environ["RANK"])
    # Not closed: the process of a rank that is gone does nothing more.
    manager = CheckpointManager(root, coordination="s3", settings={"rank_timeout": 1.0})
    state = {"w": _whole(1), "b": _whole(1, 1), "step": 1}
    manager.save(1, state)
    manager.wait()
    if rank == 1:
        return None
    for step in (2, 3):
        manager.save(step, {**state, "step": step}, {"loss": 1.0 / step})
    manager.wait()
    return manager.latest_step()


def test_a_replica_that_is_gone_is_made_up_for_save_after_save(server: Any, root: str, tmp_path: Path) -> None:
    assert run_ranks(2, _lose_a_replica, root, group=False, env={"DCP_S3_RUN_ID": "run"}) == [3, None]
    found = _committed(root)
    assert [info.step for info in found] == [1, 2, 3]
    assert found[2].metrics == {"loss": 1.0 / 3}
    loaded = {"w": torch.zeros(_SHAPE), "b": torch.zeros(_SHAPE), "step": 0}
    dcp.load(loaded, storage_reader=S3StorageReader(found[2].url), no_dist=True)
    assert torch.equal(loaded["w"], _whole(1))
    assert torch.equal(loaded["b"], _whole(1, 1))
    assert loaded["step"] == 3


# --- what must be the same -------------------------------------------------------------------------


def _restore_beside_a_commit(root: str) -> list[int | None]:
    """Rank 1 restores when there is a newer step than rank 0 has seen."""
    found = []
    group = dist.is_initialized()
    rank = int(os.environ["RANK"])
    state = {"w": torch.zeros(3)}

    def meet(name: str) -> None:
        if group:
            dist.barrier()
            return
        Path(os.environ["MEETING"], f"{name}-{rank}").touch()
        while len(list(Path(os.environ["MEETING"]).glob(f"{name}-*"))) < 2:
            time.sleep(0.01)

    with CheckpointManager(root, coordination="s3") as manager:
        for number in (2, 3):
            if rank == 0:
                found.append(manager.restore(state))
                _save_alone(root, number)
            meet(f"saved-{number}")
            if rank == 1:
                found.append(manager.restore(state))
            meet(f"restored-{number}")
        # The first to ask asks for something else now.
        if rank == 0:
            manager.restore(state, 1)
        meet("asked")
        if rank == 1:
            with pytest.raises(errors.CheckpointError, match="restore different checkpoints"):
                manager.restore(state, 2)
    return found


def _save_alone(root: str, step: int) -> None:
    planned = {"w": torch.full((3,), float(step))}
    dcp.save(planned, storage_writer=S3StorageWriter(f"{root}/step-{step:08d}"), no_dist=True)


@pytest.mark.parametrize("group", [True, False])
def test_all_ranks_restore_what_the_first_one_chose(server: Any, root: str, tmp_path: Path, group: bool) -> None:
    _save_alone(root, 1)
    env = {"DCP_S3_RUN_ID": "run", "MEETING": str(tmp_path)}
    assert run_ranks(2, _restore_beside_a_commit, root, group=group, env=env) == [[1, 2], [1, 2]]


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
                # Again: the same one, while the others hold it.
                with pytest.raises(errors.RestoreFailedError):
                    manager.restore(state, step)
    return said, found


def test_a_rank_that_cannot_load_says_so_and_the_others_go_on(
    memory_server: Any, s3: Any, root: str, bucket: str
) -> None:
    for step in (1, 2):
        state = {"a": torch.ones(1000), "b": torch.ones(1000)}
        url = f"{root}/step-{step:08d}"
        dcp.save(state, storage_writer=S3StorageWriter(url, separate=["a", "b"]), no_dist=True)
    damaged = min(str(key) for key in memory_server.handle.objects(bucket) if "step-00000002/__" in str(key))
    size = s3.head_object(Bucket=bucket, Key=damaged)["ContentLength"]
    s3.put_object(Bucket=bucket, Key=damaged, Body=bytes(size))
    ended = run_ranks(2, _restore_apart, root)
    assert sorted(found for _, found in ended) == [[1], [2, 1]]
    ((rank, said),) = [(rank, said) for rank, (said, _) in enumerate(ended) if said]
    assert said.startswith(f"[{rank}] the load of step 2 from {root}/step-00000002 failed on rank {rank}")
    assert "other ranks may have loaded it" in said
    assert "Resume: manager.restore(state, step=...) on all ranks" in said


def _train_until_sigterm(root: str) -> tuple[int, bool]:
    rank = int(os.environ["RANK"])
    with CheckpointManager(root, coordination="s3", should_save=SaveOnPreemption()) as manager:
        step = 0
        while not manager.preempted:
            step += 1
            if step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            saved = manager.save(step, _plain(step, rank))
            time.sleep(0.01)
        manager.wait()
        assert manager.latest_step() == step
    return step, saved


@pytest.mark.parametrize("group", [True, False])
def test_sigterm_on_one_rank_makes_all_save_the_same_step(memory_server: Any, root: str, group: bool) -> None:
    (first, saved), second = run_ranks(2, _train_until_sigterm, root, group=group, env={"DCP_S3_RUN_ID": "run"})
    assert (first, saved) == second
    assert saved
    assert [info.step for info in _committed(root)] == [first]


def _differ(root: str) -> str:
    """What the rank is told that comes second. It then does as the other one."""
    said, roots = "", [f"{root}-{dist.get_rank()}", f"{root}-{1 - dist.get_rank()}"]
    try:
        manager = CheckpointManager(roots[0], coordination="s3")
    except errors.CheckpointError as error:
        said = str(error)
        manager = CheckpointManager(roots[1], coordination="s3")
    with manager:
        manager.save(1, {"w": torch.ones(3)})
        manager.wait()
        assert manager.latest_step() == 1
    return said


def test_another_root_on_a_rank_is_an_error_there(memory_server: Any, root: str) -> None:
    said = sorted(run_ranks(2, _differ, root))
    assert said[0] == ""
    assert f"{root}-0" in said[1]
    assert f"{root}-1" in said[1]
