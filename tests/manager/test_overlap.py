"""Saves that begin while another one uploads, by real managers: they wait or queue."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcp_s3 import CheckpointManager, SaveContinuously, errors, list_checkpoints
from tests.faulty import BUCKET, FaultyServer, serve
from tests.interpreter import Interpreter
from tests.manager.making import blank, is_of, state
from tests.memory_s3 import Fault
from tests.ranks import run_ranks

ROOT = f"s3://{BUCKET}/run"
_PATIENCE_SECONDS = 60
REFUSED = Fault.error(403, "AccessDenied")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


# --- one process ------------------------------------------------------------------------------------------


class Gate(FaultyServer):
    """Uploads wait here: the server answers no write of data before the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.open = threading.Event(), threading.Event()
        self.refused: tuple[str, ...] = ()
        """Parts of the keys that cannot be written."""
        self.is_open: Callable[[], bool] = self.open.is_set
        self.rule = self._look

    def _look(self, request: Any) -> Fault | None:
        if request.operation not in ("PutObject", "CreateMultipartUpload"):
            return None
        self.reached.set()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not self.is_open() and time.monotonic() < deadline:
            self.open.wait(0.02)
        return REFUSED if any(each in request.key for each in self.refused) else None


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "1")
    gate = Gate()
    with serve(monkeypatch, gate):
        yield gate
        gate.open.set()


def committed() -> list[int | None]:
    return [info.step for info in list_checkpoints(ROOT)]


def train(manager: CheckpointManager, *steps: int) -> None:
    """Save steps of a state that goes on changing in place."""
    shared = blank()
    for step in steps:
        shared["weight"].fill_(float(step))
        assert manager.save(step, {**shared, "step": step})
        shared["weight"].fill_(-1.0)


def load(step: int) -> dict[str, Any]:
    loaded = blank()
    with CheckpointManager(ROOT, read_only=True) as manager:
        assert manager.restore(loaded, step) == step
    return loaded


def test_a_queued_save_returns_while_another_one_uploads(gate: Gate) -> None:
    with CheckpointManager(ROOT, overlap="queue") as manager:
        train(manager, 1, 2)  # no data can be written yet
        assert gate.reached.wait(_PATIENCE_SECONDS)
        assert committed() == []
        gate.open.set()
        manager.wait()
        assert committed() == [1, 2]
    assert is_of(load(1), 1)
    assert is_of(load(2), 2)


_SCRIPT = """
import sys, torch
from dcp_s3 import CheckpointManager
manager = CheckpointManager(sys.argv[1], overlap="queue", retention="latest:1")
for step in (1, 2):
    manager.save(step, {"weight": torch.full((1000,), float(step))})
open(sys.argv[2], "w").close()
"""


def test_a_process_that_does_not_close_its_manager_is_told_what_is_lost(
    gate: Gate, tmp_path: Path, interpreter: Interpreter
) -> None:
    """The save under way is completed. At the end of a process no thread can start: what waits is lost, and named."""
    ended = tmp_path / "ended"
    gate.is_open = ended.exists
    command = [sys.executable, "-W", "ignore", "-c", _SCRIPT, ROOT, str(ended)]
    done = interpreter.run(command, capture_output=True, timeout=_PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert "Fatal" not in done.stderr
    assert committed() == [1]
    assert f"the process ends: step 2 was not saved to {ROOT}/step-00000002" in done.stderr


# --- as soon as the last one is committed -------------------------------------------------------------------


def test_continuous_saves_begin_when_the_last_one_is_committed(gate: Gate) -> None:
    with CheckpointManager(ROOT, should_save=SaveContinuously()) as manager:
        assert [step for step in range(1, 50) if manager.save(step, state(step))] == [1]
        gate.open.set()
        manager.wait()
        assert manager.save(50, state(50))
    assert committed() == [1, 50]


# --- ranks ----------------------------------------------------------------------------------------------------


def _of_rank(step: int) -> dict[str, Any]:
    rank = dist.get_rank()
    return {f"of-{rank}": torch.full((1000,), 10.0 * step + rank), "step": step}


def _fail_first(root: str, opens: str) -> tuple[list[int], list[int]]:
    saved, raised = [], []
    with CheckpointManager(root, overlap="queue") as manager:
        for step in range(1, 5):
            try:
                manager.save(step, _of_rank(step))
                saved.append(step)
            except errors.SaveFailedError as error:
                raised.append(error.step or 0)
            if step == 2:
                dist.barrier()
                Path(opens).touch()
    return saved, raised


def test_all_ranks_raise_a_failure_at_the_same_save(gate: Gate, tmp_path: Path) -> None:
    opens = tmp_path / "open"
    gate.is_open, gate.refused = opens.exists, ("step-00000001/",)
    first, second = run_ranks(2, _fail_first, ROOT, str(opens))
    saved, raised = first
    assert first == second
    assert raised == [1]
    assert saved == [1, 2, 4]
    assert committed() == saved[1:]
