"""The process that tests/soak/test_sigterm.py preempts: it trains in lockstep with others, and says what is done."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.killing import begin, say


@dataclass(frozen=True)
class Training:
    """What to do; pickled."""

    root: str
    """URL of the run."""
    directory: Path
    """Directory for reports, output and rendezvous."""
    environment: Mapping[str, str]
    """All of it."""
    coordination: str
    """See `CheckpointManager`."""
    group: bool
    """Whether there is a process group."""
    every: int
    """Number of steps from one save to the next."""
    step_seconds: float
    rank: int
    world_size: int

    @property
    def report(self) -> Path:
        """Where the process says what it has done."""
        return self.directory / f"report-{self.rank}.txt"


def make_state(step: int, rank: int | None, world_size: int) -> dict[str, Any]:
    """The state of one rank (None: of all) at a step."""
    ranks = range(world_size) if rank is None else [rank]
    own = {f"rank-{each}": torch.full((1000,), step * 8 + each) for each in ranks}
    return {"model": {"weight": torch.arange(10_000) * step}, "step": step, **own}


def train_for_ever(training: Training) -> None:
    """Train until SIGTERM, from the checkpoint that is there."""
    begin(training.environment, training.directory / f"output-{training.rank}.log")
    os.environ.update(RANK=str(training.rank), WORLD_SIZE=str(training.world_size))
    from dcp_s3 import CheckpointManager, SaveEvery, SaveOnPreemption
    from dcp_s3.errors import SaveFailedError

    torch.set_num_threads(1)
    meet = _lockstep(training)
    with training.report.open("a") as report:
        manager = CheckpointManager(
            training.root,
            coordination=training.coordination,  # type: ignore[arg-type]
            should_save=SaveEvery(steps=training.every) | SaveOnPreemption(),
        )
        state = make_state(0, training.rank, training.world_size)
        first = manager.restore(state) or 0
        say(report, f"started {first}")
        for step in itertools.count(first + 1):
            time.sleep(training.step_seconds)
            try:
                meet(step)
            except RuntimeError:
                say(report, f"alone {step}")  # another one's time is over
                os._exit(1)
            say(report, f"step {step}")
            try:
                if manager.save(step, make_state(step, training.rank, training.world_size)):
                    say(report, f"began {step}")
            except SaveFailedError as error:  # an earlier one; the training goes on
                say(report, f"failed {step} {error!r}"[:2000].replace("\n", " "))
                continue
            if manager.preempted:
                code = _close(manager)
                say(report, f"ended {step} {code}")
                os._exit(code)


def _close(manager: Any) -> int:
    """The exit status."""
    from dcp_s3.errors import SaveFailedError

    try:
        manager.close(retention_timeout=5.0)
    except SaveFailedError:
        return 143
    return 0


def _lockstep(training: Training) -> Callable[[int], None]:
    """What makes the ranks go on together, as the collectives of a training do."""
    import torch.distributed as dist

    if training.group:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{training.directory / 'rendezvous'}",
            rank=training.rank,
            world_size=training.world_size,
            timeout=timedelta(seconds=120),
        )
        return lambda step: dist.all_reduce(torch.zeros(1))
    store = dist.FileStore(str(training.directory / "meeting"), training.world_size)
    store.set_timeout(timedelta(seconds=120))

    def meet(step: int) -> None:
        store.set(f"{step}-{training.rank}", "1")
        store.wait([f"{step}-{rank}" for rank in range(training.world_size)])

    return meet
