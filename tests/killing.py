"""Processes that are killed with SIGKILL in the middle of something, and the moments at which they are."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faulty import FaultyServer
from tests.memory_s3 import Fault
from tests.ranks import fork_server, lead

LONGEST = 120.0  # seconds: many times what anything takes, for a busy machine

# --- in the test ----------------------------------------------------------------------------------------


def new_process(function: Any, *arguments: Any, **options: Any) -> Any:
    """A process of the fork server, not started yet."""
    return fork_server().Process(target=function, args=arguments, kwargs=options)


@contextlib.contextmanager
def running(processes: list[Any]) -> Iterator[list[Any]]:
    """Started; at the end none is left."""
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def kill_all(processes: Sequence[Any]) -> None:
    """SIGKILL, without one seeing the end of another."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            if process.exitcode is None:
                os.kill(process.pid, number)
    for process in processes:
        process.join()


def wait_until(done: Callable[[], bool], alive: Sequence[Any] = ()) -> None:
    """Wait for something that these processes have to do before they end."""
    deadline = time.monotonic() + LONGEST
    while not done():
        assert time.monotonic() < deadline, "it does not come so far"
        assert all(process.exitcode is None for process in alive), "a process ended before"
        time.sleep(0.005)


def join_all(processes: Sequence[Any]) -> None:
    """Wait for the end of all."""
    wait_until(lambda: all(process.exitcode is not None for process in processes))


def read_lines(report: Path) -> list[str]:
    """What a process has said so far."""
    try:
        return report.read_text().splitlines()
    except FileNotFoundError:
        return []


class AtRequest:
    """A moment: the ``count``-th request of a kind (from 1; for keys that contain ``key``) has come, and its answer has
    not gone. Whoever asked is dead before the server does what was asked, if it is to be ``applied``."""

    def __init__(self, operation: str, count: int = 1, *, applied: bool, key: str = "") -> None:
        self.reached = threading.Event()
        self._operation, self._count, self._applied, self._key = operation, count, applied, key
        self._over = threading.Event()
        self._lock = threading.Lock()

    def __str__(self) -> str:
        return f"{self._operation} number {self._count}, {'applied' if self._applied else 'not applied'}"

    @contextlib.contextmanager
    def on(self, server: FaultyServer) -> Iterator[None]:
        """Look for it; at the end the request goes on."""
        rule = server.rule

        def look(request: Any) -> Fault | None:
            with self._lock:
                self._count -= request.operation == self._operation and self._key in request.key
                mine = self._count <= 0 and not self.reached.is_set()
                if mine:
                    self.reached.set()
            if not mine:
                return rule(request)
            self._over.wait(30)
            return None if self._applied else Fault.reset()

        server.rule = look
        try:
            yield
        finally:
            server.rule = rule
            self._over.set()


@dataclass
class Shot:
    """What becomes of one of several processes, at one of its requests.

    The processes tell themselves apart by their access keys, see `access_key`.
    """

    rank: int | None
    """Which process; None: the one whose request it is."""
    count: int
    """Which of the requests that fit, from 1."""
    applied: bool
    """Whether the server does what was asked."""
    operation: str = ""
    """S3's name; empty: any."""
    key: str = ""
    """Only requests for keys that contain this."""
    signal_number: int = signal.SIGKILL
    held: bool = False
    """Whether the request of a stopped process waits until it may go on."""
    hit: int | None = None
    """The process that it hit."""

    def fits(self, rank: int, request: Any) -> bool:
        """Whether a request of a rank counts."""
        return self.rank in (None, rank) and self.operation in ("", request.operation) and self.key in request.key


def access_key(rank: int) -> str:
    """What a rank signs its requests with."""
    return f"RANK{rank}KEY"


def rank_of(request: Any) -> int | None:
    """The rank that sent a request, by its access key."""
    found = re.search(r"Credential=RANK(\d+)KEY/", request.headers.get("authorization", ""))
    return int(found[1]) if found else None


class Shooting:
    """Stops or kills processes at their requests, one after the other: a shot counts from the one before it.

    Args:
        processes: by rank.
        shots: the first one counts from the beginning.
        spares: whether a rank must not be hit, given those that were.
    """

    def __init__(
        self,
        processes: Sequence[Any],
        shots: Sequence[Shot],
        spares: Callable[[int, Sequence[int]], bool] = lambda rank, hit: rank in hit,
    ) -> None:
        self._processes, self._left, self._spares = processes, list(shots), spares
        self._lock, self._released = threading.Lock(), threading.Event()
        self.release = self._released.set
        """Let the requests of stopped processes go on."""
        self.hit: list[int] = []
        self.done: dict[int, list[tuple[str, str]]] = {rank: [] for rank in range(len(processes))}
        """Operations and keys of the requests that were let through, by rank."""
        self.over = threading.Event()
        """Set when all have hit."""

    @contextlib.contextmanager
    def on(self, server: FaultyServer) -> Iterator[None]:
        """Look for the moments; at the end requests that were held up go on."""
        rule, server.rule = server.rule, self._look
        try:
            yield
        finally:
            server.rule = rule
            self.release()

    def _look(self, request: Any) -> Fault | None:
        rank = rank_of(request)
        if rank is None or rank >= len(self._processes):
            return None
        with self._lock:
            shot = self._take(rank, request)
            if shot is None or shot.applied:
                self.done[rank].append((request.operation, request.key))
            if shot is None:
                return None
            self.hit.append(rank)
            shot.hit = rank
            process = self._processes[rank]
            os.kill(process.pid, shot.signal_number)
            if shot.signal_number == signal.SIGKILL:
                assert multiprocessing.connection.wait([process.sentinel], 30)
            if not self._left:
                self.over.set()
        if shot.signal_number == signal.SIGSTOP and shot.held:
            self._released.wait(60)
        return None if shot.applied else Fault.reset()

    def _take(self, rank: int, request: Any) -> Shot | None:
        if not self._left or not self._left[0].fits(rank, request) or self._spares(rank, self.hit):
            return None
        self._left[0].count -= 1
        return self._left.pop(0) if self._left[0].count <= 0 else None


def wait_until_quiet(server: FaultyServer) -> None:
    """Wait until the server has dealt with everything that the dead had sent."""
    wait_until(lambda: not server.s3._connections)


# --- in the process that is killed ------------------------------------------------------------------------


def begin(environment: Mapping[str, str], output: Path) -> None:
    """Take on an environment, write all output to a file, and end with the fork server."""
    lead()
    number = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(number, 1)
    os.dup2(number, 2)
    os.close(number)
    os.environ.clear()
    os.environ.update(environment)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(threadName)s %(message)s", force=True)


def say(report: Any, line: str) -> None:
    """Write a line that a kill does not take back."""
    report.write(line + "\n")
    report.flush()
    os.fsync(report.fileno())
