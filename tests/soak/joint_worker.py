"""The process that tests/soak/test_kill_saves.py kills: one rank of two saves, most of them without collectives."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from tests.killing import access_key, begin, say

Layout = Literal["sharded", "boxes", "plain", "fsdp", "hsdp"]
"""``sharded`` and ``boxes`` are made by `dcp_s3.shard`: each rank its own rows, or each two ranks the same. ``plain``:
all ranks have all. ``fsdp`` and ``hsdp`` are DTensors, with rows as in ``sharded`` and ``boxes``."""

_ROWS = 8


@dataclass(frozen=True)
class Job:
    """What to do; pickled."""

    root: str
    """URL above the checkpoints."""
    directory: Path
    """For reports, output and rendezvous."""
    environment: Mapping[str, str]
    """All of it, but for what tells the ranks apart."""
    layout: Layout
    by: Literal["dcp", "manager", "separately", "collectives", "async"]
    """What drives the saves: `dcp.save` without a process group, `CheckpointManager`, or what both rest on; with
    collectives `dcp.save` or `dcp.async_save`."""
    overwrite: bool
    """Save to one URL again and again, otherwise to a new one each time."""
    numbers: tuple[int, ...]
    """The saves: the first begins at once, others when the test says so."""
    rank: int
    world_size: int
    attempt: int = 0
    large: bool = False
    """Whether a rank's rows are an object of two parts, rather than a small one."""

    @property
    def columns(self) -> int:
        """Numbers of 8 bytes in a row."""
        return 6 * 2**20 // 8 // _ROWS + 5 if self.large else 1000

    @property
    def group(self) -> bool:
        """Whether there is a process group: DTensors and collectives need one."""
        return self.layout in ("fsdp", "hsdp") or self.by in ("collectives", "async")

    @property
    def report(self) -> Path:
        """Where the process says what is done."""
        return self.directory / f"report-{self.attempt}-{self.rank}.txt"

    def gate(self, number: int) -> Path:
        """A file that lets a save begin."""
        return self.directory / f"go-{self.attempt}-{number}"

    def url(self, number: int) -> str:
        """Of a save."""
        return f"{self.root}/step-{1 if self.overwrite else number:08d}"


def make_whole_state(job: Job, number: int) -> dict[str, Any]:
    """The state of all ranks in a save, in one process."""
    shares = _shares(job)
    state: dict[str, Any] = {"number": number, "rows": _rows(job, shares, number)}
    state["small"] = {f"{each}": torch.arange(1000) * (number + each) for each in range(4)}
    if job.layout == "sharded":
        state |= {f"own-{rank}": torch.full((1000,), number * 8 + rank) for rank in range(job.world_size)}
    return state


def _shares(job: Job) -> int:
    return {"sharded": job.world_size, "fsdp": job.world_size, "plain": 1}.get(job.layout, 2)


def _rows(job: Job, shares: int, number: int) -> torch.Tensor:
    values = torch.arange(_ROWS * shares * job.columns).reshape(_ROWS * shares, job.columns)
    return values * 7 + number + 100 * job.attempt


def _make_state(job: Job, number: int, mesh: Any) -> dict[str, Any]:
    """The state of one rank."""
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


def save_when_told(job: Job) -> None:
    """Save, and report each save that is done, or has failed, as far as this rank knows."""
    begin(job.environment, job.directory / f"output-{job.attempt}-{job.rank}.log")
    os.environ.update(RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
    os.environ["AWS_ACCESS_KEY_ID"] = access_key(job.rank + 10 * job.attempt)  # tells the ranks apart
    clock = time.time
    time.time = lambda: clock() + 3600 * (job.rank - 1)  # hosts whose clocks are hours apart
    from dcp_s3 import errors

    torch.set_num_threads(1)
    with job.report.open("a") as report:
        mesh = _meet(job)
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


def _meet(job: Job) -> Any:
    if not job.group:
        return None
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.directory / f'rendezvous-{job.attempt}'}",
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=60),
    )
    if job.layout not in ("fsdp", "hsdp"):
        return None
    return init_device_mesh("cpu", (job.world_size,) if job.layout == "fsdp" else (job.world_size // 2, 2))


def _driver(job: Job) -> Any:
    import torch.distributed.checkpoint as dcp

    from dcp_s3 import CheckpointManager, S3StorageWriter
    from dcp_s3.manager.inflight import save_separately

    if job.by == "manager":
        manager = CheckpointManager(job.root, coordination="s3")

        def save_with_manager(number: int, state: dict[str, Any]) -> None:
            manager.save(number, state)
            manager.wait()

        return save_with_manager

    def save(number: int, state: dict[str, Any]) -> None:
        writer = S3StorageWriter(job.url(number), overwrite=job.overwrite, max_objects=2)
        if job.by == "dcp":
            dcp.save(state, storage_writer=writer, use_collectives=False)
        elif job.by == "collectives":
            dcp.save(state, storage_writer=writer)
        elif job.by == "async":
            future: Any = dcp.async_save(state, storage_writer=writer)
            future.result()
        else:  # torch's own ends with a barrier where there is a group
            save_separately(state, writer, job.rank)

    return save
