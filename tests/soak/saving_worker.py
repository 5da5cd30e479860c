"""The process that tests/soak/test_kill_saves.py kills: it saves without end, and says which saves are done."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from tests.killing import begin, say

MIB = 2**20


@dataclass(frozen=True)
class Job:
    """What to do; pickled.

    Attributes:
        root: URL above the checkpoints.
        directory: for reports, output and rendezvous.
        environment: all of it.
        overwrite: save to one URL again and again, otherwise to a new one each time.
        asynchronous: by `dcp.async_save`.
        rank: of the process.
        world_size: ranks in all.
    """

    root: str
    directory: Path
    environment: Mapping[str, str]
    overwrite: bool
    asynchronous: bool
    rank: int = 0
    world_size: int = 1

    @property
    def report(self) -> Path:
        """Where the process says what is done."""
        return self.directory / f"report-{self.rank}.txt"

    def url(self, number: int) -> str:
        """Of save ``number``, from 1."""
        return f"{self.root}/step-{1 if self.overwrite else number}"


def make_state(number: int, world_size: int, rank: int | None = None) -> dict[str, Any]:
    """The state of one rank (None: of all) in a save: one object of two parts, and one small one."""
    state: dict[str, Any] = {"number": number}
    for each in range(world_size) if rank is None else [rank]:
        generator = torch.Generator().manual_seed(number * 8 + each)
        state[f"rank-{each}.large"] = torch.empty(6 * MIB // 8, dtype=torch.int64).random_(generator=generator)
        state[f"rank-{each}.small"] = torch.rand(1000, generator=generator)
    return state


def save_for_ever(job: Job) -> None:
    """Save number 1, 2, 3, ..., and report each that is done as far as this rank knows."""
    begin(job.environment, job.directory / f"output-{job.rank}.log")
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    from dcp_s3 import S3StorageWriter

    torch.set_num_threads(1)
    if job.world_size > 1:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.directory / 'rendezvous'}",
            rank=job.rank,
            world_size=job.world_size,
            timeout=timedelta(seconds=60),
        )
    with job.report.open("a") as report:
        say(report, "started")
        for number in itertools.count(1):
            state = make_state(number, job.world_size, job.rank)
            writer = S3StorageWriter(job.url(number), overwrite=job.overwrite, separate=["number"], max_objects=2)
            try:
                if job.asynchronous:
                    future: Any = dcp.async_save(state, storage_writer=writer)
                    future.result()
                else:
                    dcp.save(state, storage_writer=writer)
            except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
                say(report, f"failed {number} {error!r}"[:1000].replace("\n", " "))
                os._exit(1)
            say(report, f"saved {number}")
