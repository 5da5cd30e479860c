"""Runs a function on N gloo ranks, each a real process of its own.

    results = run_ranks(2, _save, root)      # _save(root) runs on both; results in rank order

`fn` is a module-level function (it is pickled by name); inside it torch.distributed is initialised.
The processes are forked from a server process that has imported torch once, so a rank starts in
milliseconds rather than seconds, yet shares no state with the test process: no threads, clients or
connections are inherited. They are not daemons, so that a rank may start processes itself, and each
leads a process group, so that those end too. The checkpoint process of a rank (torch's
AsyncCheckpointerType.PROCESS) comes from the same fork server, rather than import torch for seconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from dcp_s3.s3 import retry
from tests.preload import MODULES

# After one rank failed, the others usually hang in a collective: how long to wait for theirs.
_OTHERS_GRACE_SECONDS = 3.0
# From a rank's result to the end of its process: longer means that it left a thread behind.
_EXIT_GRACE_SECONDS = 20.0


class RankFailed(AssertionError):
    """`fn` raised on a rank. `exception` is None where it cannot be pickled."""

    def __init__(self, rank: int, traceback_text: str, exception: BaseException | None) -> None:
        super().__init__(f"rank {rank} failed:\n{traceback_text}")
        self.rank = rank
        self.traceback_text = traceback_text
        self.exception = exception


class RanksTimedOut(AssertionError):
    """Some ranks did not end in time; all were killed."""


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    forget: str = "",
    group: bool = True,
    grace: float = _OTHERS_GRACE_SECONDS,
) -> list[Any]:
    """Calls `fn(*args)` on each of `world_size` ranks and returns what each returned.

    The ranks see this process's environment as it is now (monkeypatch included), plus `env`. The package
    `forget`, which the fork server has imported, is as good as never imported on them. Without `group`
    torch.distributed is not initialised, and only the environment says who they are.

    Raises RankFailed for the first rank that failed (its message has every failed rank's traceback)
    and RanksTimedOut after `timeout` seconds. Either way no process is left. When a rank has failed, the others
    have `grace` seconds to end.
    """
    context = fork_server()
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="dcp-s3-ranks-") as directory:
        environment = {
            **os.environ,
            # gloo would otherwise pick its interface by looking up this machine's name.
            "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
            "MASTER_ADDR": "127.0.0.1",
            **(env or {}),
        }
        # Unpickled by the ranks themselves: this imports the module of `fn`.
        work = bytes(ForkingPickler.dumps((fn, args)))
        common = (_backoff(), str(Path(directory) / "rendezvous") if group else "", timeout, forget)
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                its = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{world_size}"}
                ranks.append(_Rank(context, rank, work, {**environment, **its}, *common))
            return _collect(ranks, deadline, timeout, grace)
        finally:
            for each in ranks:
                each.end()


@functools.cache
def fork_server() -> Any:
    """The context of the fork server, which has imported what it imports: on a busy machine that takes minutes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    first = context.Process(target=int)
    first.start()
    first.join()
    return context


def _backoff() -> tuple[float, float]:
    return retry.BACKOFF_BASE, retry.BACKOFF_CAP


class _Rank:
    """One rank as the parent sees it; ``arguments`` are those of `_main`."""

    def __init__(self, context: Any, number: int, *arguments: Any) -> None:
        self.number = number
        self.connection: Connection
        self.connection, theirs = context.Pipe(duplex=False)
        self.process = context.Process(target=_main, args=(theirs, *arguments), name=f"rank-{number}")
        self.process.start()
        theirs.close()  # ours: so that the pipe ends when the rank does

    def receive(self) -> tuple[bool, Any]:
        """(True, result) or (False, RankFailed)."""
        try:
            ok, value = self.connection.recv()
        except EOFError:
            self.process.join(_EXIT_GRACE_SECONDS)
            text = f"the process ended without a result, exit code {self.process.exitcode}"
            return False, RankFailed(self.number, text, None)
        except Exception as e:  # noqa: BLE001 - whatever unpickling the result may raise
            return False, RankFailed(self.number, f"its result cannot be unpickled: {e!r}", None)
        if ok:
            return True, value
        text, pickled = value
        return False, RankFailed(self.number, text, pickle.loads(pickled) if pickled else None)

    def end(self) -> None:
        """Kills the rank, where it still runs, and every process that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        if self.process.is_alive():
            self.process.kill()  # before it became the leader of its group
        self.process.join()
        self.process.close()
        self.connection.close()


def _collect(ranks: list[_Rank], deadline: float, timeout: float, grace: float) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[RankFailed] = []
    waiting = {each.connection: each for each in ranks}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            each = waiting.pop(connection)  # type: ignore[call-overload]
            ok, value = each.receive()
            if ok:
                results[each.number] = value
            else:
                failures.append(value)
                deadline = min(deadline, time.monotonic() + grace)
    if failures:
        first = failures[0]
        text = "\n".join([first.traceback_text, *map(str, failures[1:])])
        raise RankFailed(first.rank, text, first.exception) from first.exception
    if waiting:
        late = sorted(each.number for each in waiting.values())
        raise RanksTimedOut(f"ranks {late} of {len(ranks)} did not end within {timeout:g} s")
    exit_deadline = time.monotonic() + _EXIT_GRACE_SECONDS
    for each in ranks:
        each.process.join(max(0.0, exit_deadline - time.monotonic()))
        if each.process.is_alive():
            raise RanksTimedOut(
                f"rank {each.number} returned, but its process did not end within "
                f"{_EXIT_GRACE_SECONDS:g} s: it left a thread running that is no daemon"
            )
        if each.process.exitcode:
            text = f"returned, but its process then ended with exit code {each.process.exitcode}"
            raise RankFailed(each.number, text, None)
    return [results[each.number] for each in ranks]


def _main(
    connection: Connection, work: bytes, environment: Mapping[str, str], backoff: tuple[float, float],
    rendezvous: str, timeout: float, forget: str,
) -> None:  # fmt: skip
    """What a rank's process runs."""
    lead()
    _take_on(environment, backoff)
    for name in [name for name in sys.modules if forget and name.partition(".")[0] == forget]:
        del sys.modules[name]
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    _fork_checkpoint_processes()
    try:
        fn, args = pickle.loads(work)
        if rendezvous:
            init, limit = f"file://{rendezvous}", timedelta(seconds=timeout)
            rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
            dist.init_process_group("gloo", init_method=init, rank=rank, world_size=world_size, timeout=limit)
            dist.barrier()  # a rank that ended at once would break the connections that others still make
        result = fn(*args)
        answer = pickle.dumps((True, result))
    except BaseException as e:  # noqa: BLE001 - torch's CheckpointException is no Exception
        answer = pickle.dumps((False, (traceback.format_exc(), _pickled(e))))
    connection.send_bytes(answer)
    connection.close()
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def lead() -> None:
    """Lead a process group, and end with the fork server."""
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def _take_on(environment: Mapping[str, str], backoff: tuple[float, float]) -> None:
    """Make this process, which knows the fork server's only, like the one that asked for it."""
    os.environ.clear()
    os.environ.update(environment)
    retry.BACKOFF_BASE, retry.BACKOFF_CAP = backoff


def _fork_checkpoint_processes() -> None:
    """Let torch take a process of the fork server where it would spawn one: what that one gets, it gets pickled too."""
    from torch.distributed.checkpoint import _async_process_executor as executor

    context = multiprocessing.get_context("forkserver")
    # The rank knows the address of the server that it is from, but not its process: it would start another one.
    assert forkserver._forkserver._forkserver_address is not None
    forkserver._forkserver.ensure_running = lambda: None

    def process(*, target: Any, args: Any, **options: Any) -> Any:
        return context.Process(target=_checkpoint_process, args=(dict(os.environ), _backoff(), target, args), **options)

    started = types.SimpleNamespace(Pipe=context.Pipe, Process=process)
    executor.mp = types.SimpleNamespace(get_context=lambda _: started)


def _checkpoint_process(
    environment: dict[str, str], backoff: tuple[float, float], target: Any, args: Sequence[Any]
) -> None:
    _take_on(environment, backoff)
    # Of another session than its rank, whose end would else leave it behind in the middle of a save.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    target(*args)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _pickled(exception: BaseException) -> bytes | None:
    """None where it does not survive the way there and back."""
    try:
        pickled = pickle.dumps(exception)
        pickle.loads(pickled)
    except Exception:  # noqa: BLE001 - __reduce__ may raise anything
        return None
    return pickled
