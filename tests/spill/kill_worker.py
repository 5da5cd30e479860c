"""The processes that tests/spill/test_kill.py kills: one that trains and saves without end, and one that drains."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.killing import begin, say

logger = logging.getLogger(__name__)

MIB = 2**20

# Audit events of calls that change a directory: https://docs.python.org/3/library/audit_events.html
_CHANGES = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate")
_DRAIN_PAUSE = 0.05


@dataclass(frozen=True)
class Job:
    """What a process that will be killed is to do; pickled.

    Attributes:
        seed: of the states, and of how they are saved.
        root: URL above the checkpoints.
        directory: for reports, output and rendezvous.
        environment: all of it.
        rank: of the process.
        world_size: ranks in all.
        life: counts the processes of this rank from 0: each begins with steps of its own.
        die_at_change: the process kills itself when it is about to change its spill directory for this time; None:
            never.
    """

    seed: int
    root: str
    directory: Path
    environment: Mapping[str, str]
    rank: int = 0
    world_size: int = 1
    life: int = 0
    die_at_change: int | None = None

    @property
    def report(self) -> Path:
        """Where the process says what has happened, a line for each event."""
        return self.directory / f"report-{self.life}-{self.rank}.txt"


STEPS_PER_LIFE = 1000


def make_state(seed: int, step: int, world_size: int, rank: int | None = None) -> dict[str, Any]:
    """The state of one rank (None: of all) at a step: 12 to 20 MiB in all, with tensors of more than one part."""
    large = 3 // world_size
    state: dict[str, Any] = {"step": step}
    for each in range(world_size) if rank is None else [rank]:
        generator = torch.Generator().manual_seed((seed * STEPS_PER_LIFE * 10 + step) * 8 + each)
        for number in range(large):
            words = int(torch.randint(MIB * 11 // 16, MIB * 13 // 16, (), generator=generator))
            state[f"rank-{each}.large-{number}"] = torch.empty(words, dtype=torch.int64).random_(generator=generator)
        for number in range(3):
            state[f"rank-{each}.small-{number}"] = torch.rand(1000 + number, generator=generator)
    return state


def train(job: Job) -> None:
    """Save step after step, for ever; report each that is durable as far as this rank knows."""
    begin(job.environment, job.directory / f"output-{job.life}-{job.rank}.log")
    import torch.distributed as dist

    torch.set_num_threads(1)
    if job.world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.directory / f'rendezvous-{job.life}'}",
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=60),
        )
    _die_in_spill_directory(job)
    with job.report.open("a") as report:
        say(report, "started")
        rng = random.Random(job.seed)  # the same on every rank
        for step in range(1 + job.life * STEPS_PER_LIFE, (job.life + 1) * STEPS_PER_LIFE):
            durability = ("local", "s3")[(step + job.seed) % 2]
            try:
                _save(job, step, durability, asynchronous=rng.random() < 0.5)
            except BaseException as error:  # torch's CheckpointException is no Exception
                logger.exception("step %d", step)
                say(report, f"step {step} failed {error!r}"[:1000].replace("\n", " "))
                os._exit(1)
            say(report, f"step {step} durable {durability}")


def _save(job: Job, step: int, durability: str, *, asynchronous: bool) -> None:
    import torch.distributed.checkpoint as dcp

    from dcp_s3 import S3StorageWriter

    state = make_state(job.seed, step, job.world_size, job.rank)
    writer = S3StorageWriter(f"{job.root}/step-{step}", settings={"durability": durability})
    if asynchronous:
        future: Any = dcp.async_save(state, storage_writer=writer)
        future.result()
    else:
        dcp.save(state, storage_writer=writer)


def drain(job: Job, spill_directories: list[Path], *, forever: bool = False) -> None:
    """Drain, until nothing waits unless ``forever``; then write what happened to the report, as JSON."""
    begin(job.environment, job.directory / f"output-{job.life}-{job.rank}.log")
    from dcp_s3.spill.drain import Drainer
    from dcp_s3.spill.store import SpillStore

    _die_in_spill_directory(job)
    done: dict[str, list[str]] = {"committed": [], "discarded": [], "refused": []}
    while True:
        waiting: dict[str, str] = {}
        for directory in spill_directories:
            report = Drainer(SpillStore(directory)).run()
            done["committed"] += report.committed
            done["discarded"] += report.discarded
            done["refused"] += [f"{name}: {reason}" for name, reason in report.refused.items()]
            waiting |= report.waiting
            if report.busy:
                waiting[str(directory)] = "busy"
        logger.info("waiting: %s", waiting)
        if not waiting and not forever:
            break
        time.sleep(_DRAIN_PAUSE)
    job.report.write_text(json.dumps(done))


def _die_in_spill_directory(job: Job) -> None:
    if job.die_at_change is None:
        return
    directory = job.environment.get("DCP_S3_SPILL_DIR", "\0")
    left = job.die_at_change

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event not in _CHANGES:
            return
        inside = False
        with contextlib.suppress(TypeError):
            inside = os.fsdecode(arguments[0]).startswith(directory)
        # shutil.rmtree names files relative to their directory.
        if inside or (event in ("os.remove", "os.rmdir") and arguments[1] not in (-1, None)):
            left -= 1
            if left <= 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
