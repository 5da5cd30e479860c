"""Ranks that Accelerate trains on: killed in the middle of a save, and sharded although they have no device."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import DistributedType, PartialState

from tests.faulty import FaultyServer
from tests.killing import begin, kill_all, new_process, running, wait_until_quiet
from tests.memory_s3 import Fault

_SECONDS = 200.0


def kill_in_save(
    server: FaultyServer, key: str, ranks: int, directory: Path, train: Callable[..., Any], run: Any
) -> None:
    """Run ``train(run)`` on each rank, in an empty working directory, and kill all at the first PUT of a key with
    ``key`` in it. Whatever the request was to do is not done.

    Args:
        server: the S3 server; the environment leads to it.
        key: part of a key, for example ``step-00000006``.
        ranks: number of ranks.
        directory: for output and rendezvous; ``cwd`` in it is the ranks' working directory.
        train: a module-level function; it must not return.
        run: its argument.
    """
    reached, over = threading.Event(), threading.Event()
    (directory / "cwd").mkdir(exist_ok=True)

    def rule(request: Any) -> Fault | None:
        if over.is_set() or key not in request.key or request.operation not in ("PutObject", "UploadPart"):
            return None
        reached.set()
        over.wait(60)
        return Fault.reset()

    server.rule = rule
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    processes = [new_process(_run, train, run, rank, ranks, directory, environment) for rank in range(ranks)]
    with running(processes):
        deadline = time.monotonic() + _SECONDS
        while not reached.wait(0.05):
            assert time.monotonic() < deadline, f"nothing was saved; output in {directory}"
            assert all(process.exitcode is None for process in processes), _output(directory)
        kill_all(processes)
        assert {process.exitcode for process in processes} == {-9}, _output(directory)
    over.set()
    wait_until_quiet(server)
    server.rule = lambda _: None


def _run(
    train: Callable[..., Any], run: Any, rank: int, ranks: int, directory: Path, environment: Mapping[str, str]
) -> None:
    begin(environment, directory / f"output-{rank}.log")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.chdir(directory / "cwd")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_SECONDS),
    )
    train(run)


def _output(directory: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(directory.glob("output-*.log")))


def files_in(directory: Path) -> list[str]:
    """Everything in a directory, also empty directories."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def pretend_devices() -> None:
    """Let Accelerate shard on CPUs, as it does on devices: it takes no notice of FSDP on ranks that have none."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
