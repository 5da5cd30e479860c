"""CheckpointManager on gloo ranks: what they agree on, and what goes wrong on one is told to all."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_s3
from dcp_s3 import CheckpointManager, SaveEvery, SaveOnPreemption, errors
from dcp_s3.events import Event, LoadStarted
from dcp_s3.url import parse_url
from tests.faulty import BUCKET, serve
from tests.manager.conftest import state
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.retention.making import delete, keys, put


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


def _caught(call: Callable[[], Any]) -> tuple[str, str, list[int]]:
    """What it raises: type, text, ranks."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - what it is, is what is looked at
        return type(error).__name__, str(error), sorted(getattr(error, "failures", {}))
    return "nothing", "", []


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


class _Module:
    """A Stateful whose methods fail on rank 1 when they are told to."""

    def __init__(self) -> None:
        self.weight = torch.ones(100)
        self.fails: dict[str, BaseException] = {}

    def failing(self, where: str, error: BaseException) -> dict[str, Any]:
        self.fails = {where: error} if dist.get_rank() == 1 else {}
        return {"module": self}

    def state_dict(self) -> dict[str, Any]:
        return self._unless("state_dict", {"weight": self.weight})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight = self._unless("load_state_dict", state["weight"])

    def _unless(self, where: str, value: Any) -> Any:
        if where in self.fails:
            raise self.fails[where]
        return value


def _fail(root: str) -> list[tuple[str, str, list[int]]]:
    """What each call raises, in which rank 1 does something wrong alone, or both differ."""
    rank, state, module = dist.get_rank(), _state(0), _Module()
    alone, full = rank == 1, RuntimeError("out of memory")
    manager = CheckpointManager(root)
    manager.save(1, {**_state(1), "module": module}, blocking=True)
    manager.save(2, _state(2) | {"other": _FailsOn(1)})
    calls: list[Callable[[], Any]] = [
        lambda: manager.save(3, _state(3)),  # every rank is told of step 2 here
        lambda: manager.save(4, _state(4), {"loss": object()} if alone else None),
        lambda: manager.save(5 + rank, _state(5)),
        lambda: manager.restore(state, rank),
        lambda: manager.restore(state, "best", metric=None if alone else "loss"),
        lambda: manager.save(6, module.failing("state_dict", full)),
        lambda: manager.save(6, module.failing("state_dict", full), blocking=True),
        lambda: manager.restore(module.failing("state_dict", full)),
        lambda: manager.restore(module.failing("load_state_dict", full)),
        lambda: manager.save(6, module.failing("state_dict", KeyboardInterrupt())),
        lambda: CheckpointManager(root, retention="latest:many" if alone else None),
        lambda: CheckpointManager(root, should_save=SaveEvery(seconds=5) if alone else None),
    ]
    seen = [_caught(call) for call in calls]
    module.fails = {}
    loaded = {**state, "module": module}
    assert manager.restore(loaded) == 1
    assert _is_of(loaded, 1)
    manager.save(6, _state(6))
    manager.close()
    assert manager.latest_step() == 6
    return seen


def test_a_failure_on_one_rank_is_raised_on_all_and_the_next_call_works(memory_server: Any, root: str) -> None:
    first, second = run_ranks(2, _fail, root)
    assert first[0] == second[0]
    assert (first[0][0], first[0][2]) == ("SaveFailedError", [1])
    assert "step 2" in first[0][1]
    assert "cannot be pickled here" in first[0][1]
    for number, kind, other in (
        (1, "SaveProtocolError", "SaveFailedError"), (4, "SettingsError", "CheckpointError"),
        (9, "KeyboardInterrupt", "SaveFailedError"), (10, "SettingsError", "CheckpointError"),
    ):  # fmt: skip
        assert (first[number][0], second[number][0]) == (other, kind)
        assert "rank 1 cannot go on" in first[number][1]
    for number, what in ((2, "save is called with"), (3, "restore asks for")):
        assert f"{what} different steps" in first[number][1] == second[number][1]
    for number, kind in enumerate(["SaveFailedError"] * 2 + ["RestoreFailedError"] * 2, 5):
        assert first[number] == second[number] == (kind, first[number][1], [1])
        assert "RuntimeError: out of memory" in first[number][1]
    assert "whether it needs more than the step)': True" in first[11][1] == second[11][1]


def _vanish(root: str) -> int | None:
    """Step 3 goes away when it is about to be loaded, of step 2 the data are damaged, which several ranks share."""
    rank, same = dist.get_rank(), torch.full((1000,), 7.0)

    def vanish(event: Event) -> None:
        if isinstance(event, LoadStarted) and event.url.endswith("3") and rank == 0:
            delete(_client(), event.url, ".metadata")

    with CheckpointManager(root, on_event=vanish) as manager:
        for step in (1, 2, 3):
            manager.save(step, {**_state(step), "same": same}, blocking=True)
        if rank == 0:
            for path, size in keys(_client(), manager.url(2)).items():
                if path.endswith(".distcp"):
                    put(_client(), manager.url(2), path, b"\0" * size)
        dist.barrier()
        loaded = {**_state(0), "same": torch.zeros(1000)}
        found = manager.restore(loaded)
        assert _is_of(loaded, 1)
        assert torch.equal(loaded["same"], same)
        return found


def test_what_vanishes_or_is_damaged_makes_all_ranks_load_the_one_before(memory_server: Any, root: str) -> None:
    assert run_ranks(2, _vanish, root) == [1, 1]


def _make_and_close(root: str) -> list[int]:
    counts = [len(os.listdir("/proc/self/task"))]
    manager = CheckpointManager(root, should_save=SaveEvery(steps=1) | SaveOnPreemption())
    counts.append(len(os.listdir("/proc/self/task")))
    manager.save(1, {"a": torch.ones(2)})
    manager.close()
    manager.close()
    dist.barrier()  # the default group is as it was
    return [*counts, len(os.listdir("/proc/self/task"))]


@pytest.mark.skipif(sys.platform != "linux", reason="counts in /proc")
def test_no_thread_of_its_groups_outlives_a_closed_manager(memory_server: Any, root: str) -> None:
    # Such a thread drops a tensor of the last collective a little later. If the interpreter has ended by then, that
    # aborts the process.
    for before, made, closed in run_ranks(2, _make_and_close, root):
        assert made > before
        assert closed <= before


def _train(manager: CheckpointManager, at: int, boundary: Callable[[], object] = lambda: None) -> int:
    """Train until SIGTERM, which comes at a step. Returns the last step."""
    with manager:
        for step in range(1, 1001):
            if step == at:
                os.kill(os.getpid(), signal.SIGTERM)
            boundary()
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
            _train(CheckpointManager(root, should_save=SaveEvery(steps=10) | SaveOnPreemption()), at=15)
        assert [info.step for info in dcp_s3.list_checkpoints(root) if info.committed] == [left]
        assert not [key for key in server.s3.objects(BUCKET) if f"{failing}/__" in key], "half a checkpoint is left"


def _ranks_train(root: str, coordination: Any) -> int:
    policy = SaveEvery(steps=1000) | SaveOnPreemption()
    manager = CheckpointManager(root, coordination=coordination, should_save=policy)
    return _train(manager, at=5 if dist.get_rank() else 0, boundary=lambda: dist.all_reduce(torch.zeros(1)))


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
