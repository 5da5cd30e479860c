"""Ranks that a framework trains on, and that are killed in the middle of a save."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.faulty import FaultyServer
from tests.killing import AtRequest, begin, kill_all, new_process, running, wait_until_quiet
from tests.memory_s3 import Fault
from tests.ranks import run_ranks as run_ranks_within

_SECONDS = 400.0  # the first one on a busy machine waits minutes for imports

run_ranks = functools.partial(run_ranks_within, timeout=_SECONDS)


class AtWrite:
    """A moment: an object whose key matches is to be written. From then on none of them is."""

    def __init__(self, key: str) -> None:
        self._key, self.reached, self._over = key, threading.Event(), threading.Event()

    @contextlib.contextmanager
    def on(self, server: FaultyServer) -> Iterator[None]:
        def hold(request: Any) -> Fault | None:
            if request.operation not in ("PutObject", "UploadPart") or not re.search(self._key, request.key):
                return None
            self.reached.set()
            self._over.wait(60)
            return Fault.reset()

        server.rule = hold
        try:
            yield
        finally:
            server.rule = lambda _: None
            self._over.set()


def kill_in_save(
    server: FaultyServer,
    moment: AtRequest | AtWrite,
    ranks: int,
    directory: Path,
    train: Callable[..., Any],
    *args: Any,
) -> None:
    """Run ``train(*args)``, which must not end, on each rank in the empty ``directory / "cwd"``, and kill all of them
    and their own processes at a moment. They leave nothing there."""
    (directory / "cwd").mkdir(exist_ok=True)
    environment = dict(os.environ)
    processes = [new_process(_run, train, args, rank, ranks, directory, environment) for rank in range(ranks)]
    with running(processes), moment.on(server):
        came = moment.reached.wait(_SECONDS)
        kill_all(processes)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        output = "\n".join(path.read_text()[-3000:] for path in sorted(directory.glob("output-*.log")))
        assert came, output
        assert {process.exitcode for process in processes} == {-9}, output
    wait_until_quiet(server)


def _run(
    train: Callable[..., Any], args: Any, rank: int, ranks: int, directory: Path, environment: Mapping[str, str]
) -> None:
    begin(environment, directory / f"output-{rank}.log")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    os.chdir(directory / "cwd")
    torch.set_num_threads(1)
    rendezvous, timeout = f"file://{directory / 'rendezvous'}", timedelta(seconds=_SECONDS)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timeout)
    train(*args)


def run_example(main: Callable[[list[str]], None], arguments: list[str], directory: Path) -> str:
    """Run the main function of an example in a directory. Returns what it prints."""
    os.chdir(directory)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        main(arguments)
    return output.getvalue()


def files_in(directory: Path) -> list[str]:
    """Everything in a directory, also empty directories."""
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
