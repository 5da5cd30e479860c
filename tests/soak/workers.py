"""Processes that tests/soak/test_kill_saves.py kills: a rank of two saves, most of them without collectives, and a
training that is preempted, in lockstep with others. They say what is done."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from tests.faulty import BUCKET
from tests.killing import access_key, begin, say

Layout = Literal["sharded", "boxes", "plain", "fsdp", "hsdp"]
"""``sharded`` and ``boxes`` are made by `dcp_s3.shard`: each rank its own rows, or each two ranks the same. ``plain``:
all ranks have all. ``fsdp`` and ``hsdp`` are DTensors, with rows as in ``sharded`` and ``boxes``."""

ROOT = f"s3://{BUCKET}/run"
_GLOO = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to do; pickled."""

    directory: Path
    """For reports, output and rendezvous."""
    environment: Mapping[str, str]
    """All of it, but for what tells the ranks apart."""
    rank: int
    world_size: int
    attempt: int = 0
    layout: Layout = "sharded"
    by: Literal["dcp", "manager", "separately", "collectives", "async"] = "manager"
    """What drives the saves: `dcp.save` without a process group, `CheckpointManager`, or what both rest on; with
    collectives `dcp.save` or `dcp.async_save`."""
    overwrite: bool = False
    """Save to one URL again and again, otherwise to a new one each time."""
    numbers: tuple[int, ...] = (1, 2)
    """The saves: the first begins at once, others when the test says so."""
    large: bool = False
    """Whether a rank's rows are an object of two parts, rather than a small one."""

    @property
    def columns(self) -> int:
        """Numbers of 8 bytes in a row."""
        return 6 * 2**20 // 8 // _ROWS + 5 if self.large else 1000

    @property
    def report(self) -> Path:
        return self.directory / f"report-{self.attempt}-{self.rank}.txt"

    def gate(self, number: int) -> Path:
        """A file that lets a save begin."""
        return self.directory / f"go-{self.attempt}-{number}"

    def url(self, number: int) -> str:
        """Of a save."""
        return f"{ROOT}/step-{1 if self.overwrite else number:08d}"


def make_whole_state(job: Job, number: int) -> dict[str, Any]:
    """The state of all ranks in a save, in one process."""
    shares = _shares(job)
    rows = torch.arange(_ROWS * shares * job.columns).reshape(_ROWS * shares, job.columns)
    state: dict[str, Any] = {"number": number, "rows": rows * 7 + number + 100 * job.attempt}
    state["small"] = {f"{each}": torch.arange(1000) * (number + each) for each in range(4)}
    if job.layout == "sharded":
        state |= {f"own-{rank}": torch.full((1000,), number * 8 + rank) for rank in range(job.world_size)}
    return state


def _shares(job: Job) -> int:
    return {"sharded": job.world_size, "fsdp": job.world_size, "plain": 1}.get(job.layout, 2)


def _make_state(job: Job, number: int, mesh: Any = None) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    from dcp_s3 import shard

    state = make_whole_state(job, number)
    for rank in range(job.world_size):
        if rank != job.rank:
            state.pop(f"own-{rank}", None)
    if job.layout == "plain":
        return state
    share = job.rank % _shares(job)
    whole = state["rows"]
    mine = whole[share * _ROWS : (share + 1) * _ROWS].clone()
    if mesh is None:
        state["rows"] = shard(mine, global_shape=whole.shape, offsets=(share * _ROWS, 0))
    else:
        placements = [Shard(0)] if job.layout == "fsdp" else [Replicate(), Shard(0)]
        state["rows"] = DTensor.from_local(mine, mesh, placements, run_check=False)
    return state


def _begin(job: Job, *, group: bool) -> None:
    begin({**job.environment, **_GLOO}, job.directory / f"output-{job.attempt}-{job.rank}.log")
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
    os.environ["AWS_ACCESS_KEY_ID"] = access_key(job.rank + 10 * job.attempt)  # tells the ranks apart
    torch.set_num_threads(1)
    if group:
        import torch.distributed as dist

        init, timeout = f"file://{job.directory / f'rendezvous-{job.attempt}'}", timedelta(seconds=100)
        dist.init_process_group("gloo", init_method=init, rank=job.rank, world_size=job.world_size, timeout=timeout)


def save_when_told(job: Job) -> None:
    clock = time.time
    time.time = lambda: clock() + 3600 * (job.rank - 1)  # hosts whose clocks are hours apart
    in_mesh = job.layout in ("fsdp", "hsdp")
    _begin(job, group=in_mesh or job.by in ("collectives", "async"))
    from torch.distributed.device_mesh import init_device_mesh

    from dcp_s3 import errors

    with job.report.open("a") as report:
        shape = (job.world_size,) if job.layout == "fsdp" else (job.world_size // 2, 2)
        mesh = init_device_mesh("cpu", shape) if in_mesh else None
        save = _driver(job)
        for number in job.numbers:
            state = _make_state(job, number, mesh)
            if number > job.numbers[0]:
                say(report, f"ready {number}")
                while not job.gate(number).exists():
                    time.sleep(0.002)
            try:
                save(number, state)
            except errors.DcpS3Error as error:
                say(report, f"failed {number} {error!r}"[:2000].replace("\n", " "))
                os._exit(1)
            except BaseException as error:
                say(report, f"crashed {number} {error!r}"[:2000].replace("\n", " "))
                raise
            say(report, f"saved {number}")
        os._exit(0)  # without the group, whose end others may not see


def _driver(job: Job) -> Callable[[int, dict[str, Any]], object]:
    import torch.distributed.checkpoint as dcp

    from dcp_s3 import CheckpointManager, S3StorageWriter
    from dcp_s3.manager.inflight import save_separately

    manager = CheckpointManager(ROOT, coordination="s3") if job.by == "manager" else None

    def save(number: int, state: dict[str, Any]) -> None:
        if manager is not None:
            manager.save(number, state)
            manager.wait()
            return
        writer = S3StorageWriter(job.url(number), overwrite=job.overwrite, max_objects=2)
        if job.by == "async":
            future: Any = dcp.async_save(state, storage_writer=writer)
            future.result()
        elif job.by == "separately":  # torch's own ends with a barrier where there is a group
            save_separately(state, writer, job.rank)
        else:
            dcp.save(state, storage_writer=writer, use_collectives=job.by == "collectives")

    return save


# --- a training that is preempted ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Training(Job):
    """What to do; pickled."""

    coordination: Literal["collectives", "s3"]
    group: bool
    """Whether there is a process group."""
    every: int
    """Number of steps from one save to the next."""
    step_seconds: float


def train_for_ever(training: Training) -> None:
    """Train until SIGTERM, from the checkpoint that is there."""
    _begin(training, group=training.group)
    from dcp_s3 import CheckpointManager, SaveEvery, SaveOnPreemption
    from dcp_s3.errors import SaveFailedError

    meet = _lockstep(training)
    with training.report.open("a") as report:
        should_save = SaveEvery(steps=training.every) | SaveOnPreemption()
        manager = CheckpointManager(ROOT, coordination=training.coordination, should_save=should_save)
        first = manager.restore(_make_state(training, 0)) or 0
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
                if manager.save(step, _make_state(training, step)):
                    say(report, f"began {step}")
            except SaveFailedError as error:  # an earlier one; the training goes on
                say(report, f"failed {step} {error!r}"[:2000].replace("\n", " "))
                continue
            if manager.preempted:
                code = 0
                try:
                    manager.close(retention_timeout=5.0)
                except SaveFailedError:
                    code = 143
                say(report, f"ended {step} {code}")
                os._exit(code)


def _lockstep(training: Training) -> Callable[[int], object]:
    """What makes the ranks go on together, as the collectives of a training do."""
    import torch.distributed as dist

    if training.group:
        return lambda _: dist.all_reduce(torch.zeros(1))
    store = dist.FileStore(str(training.directory / "meeting"), training.world_size)
    store.set_timeout(timedelta(seconds=120))

    def meet(step: int) -> None:
        store.set(f"{step}-{training.rank}", "1")
        store.wait([f"{step}-{rank}" for rank in range(training.world_size)])

    return meet
