"""Threads that end with their owner, tensors as memory, the garbage collector, paused; and ranks of tests that fail."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3.errors import DcpS3Error
from dcp_s3.limit import Cancelled
from dcp_s3.memory import iterate_bytes
from dcp_s3.process import collector_paused
from dcp_s3.workers import InTurn, Workers
from tests.end_to_end.states import bits, random_tensor
from tests.ranks import RankFailed, run_ranks


def test_close_cancels_what_has_not_begun_and_waits_for_the_rest() -> None:
    workers = Workers(1, "dcp_s3-test")
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> str:
        begun.set()
        go_on.wait(10)
        return "done"

    running, waiting = workers.submit(slow), workers.submit(slow)
    assert begun.wait(10)
    threading.Timer(0.1, go_on.set).start()
    workers.close()
    assert running.result(0) == "done"
    assert waiting.cancelled()


def test_work_can_be_submitted_while_the_interpreter_ends() -> None:
    """As in a script whose last asynchronous save nobody waits for."""
    script = """
import time
from concurrent.futures import ThreadPoolExecutor, thread
from dcp_s3.workers import InTurn, Workers

def late():
    while not thread._shutdown:
        time.sleep(0.01)
    workers = Workers(2, "w")
    print(workers.submit(lambda: "still works").result())
    workers.close()

ThreadPoolExecutor(1).submit(late)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "still works"


def test_in_turn_runs_one_after_the_other_on_a_thread_that_ends() -> None:
    turns = InTurn("dcp_s3-test")
    order: list[int] = []
    futures = [turns.submit(order.append, number) for number in range(100)]
    failing = turns.submit(divmod, 1, 0)
    turns.join()
    assert all(future.done() for future in futures)
    assert order == list(range(100))
    with pytest.raises(ZeroDivisionError):
        failing.result(60)
    assert not [t for t in threading.enumerate() if t.name.startswith("dcp_s3-test")]
    assert turns.submit(divmod, 7, 2).result(60) == (3, 1)


def test_where_no_thread_can_be_started_the_error_says_what_to_raise_and_a_pool_that_stands_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workers, go_on = Workers(4, "dcp_s3-test"), threading.Event()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    running = workers.submit(go_on.wait, 60)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for none in (Workers(2, "dcp_s3-none"), InTurn("dcp_s3-none")):
            with pytest.raises(DcpS3Error, match=r"dcp_s3-none.*can't start new thread.*Remedy: raise it \(ulimit -u"):
                none.submit(print)
            none.join() if isinstance(none, InTurn) else none.close()
        later = workers.submit(divmod, 7, 2)
    go_on.set()
    assert (running.result(60), later.result(60)) == (True, (3, 1))
    assert "no more than 1 threads can be started" in caplog.text
    workers.close()


def test_as_many_run_at_once_as_it_has_threads_and_as_many_wait_as_may() -> None:
    workers, go_on, cancel = Workers(1, "dcp_s3-test", waiting=1), threading.Event(), threading.Event()
    together = threading.Barrier(3)
    first = workers.submit(go_on.wait, 60)
    second = workers.submit(together.wait, 60)
    assert workers.is_full
    with ThreadPoolExecutor(1) as pool:
        blocked = pool.submit(workers.submit, together.wait, 60, cancel=cancel)
        with pytest.raises(TimeoutError):
            blocked.result(0.1)
        cancel.set()
        assert isinstance(blocked.exception(60), Cancelled)
    with pytest.raises(Cancelled):
        workers.submit(together.wait, 60, cancel=cancel)
    workers.resize(4)
    others = [workers.submit(together.wait, 60) for _ in range(2)]  # with the second, there are three
    assert sorted(each.result(60) for each in [second, *others]) == [0, 1, 2]
    workers.resize(1)
    go_on.set()
    assert first.result(60)
    assert workers.submit(divmod, 7, 2).result(60) == (3, 1)
    workers.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("dcp_s3-test")]


def test_strided_tensors_are_copied_in_bounded_pieces_and_plain_ones_not_at_all() -> None:
    strided = random_tensor((64, 32, 8), torch.float32).permute(1, 0, 2)
    views = list(iterate_bytes(strided, 4096))
    assert b"".join(map(bytes, views)) == bits(strided)
    assert max(view.nbytes for view in views) <= 4096
    plain = torch.zeros(1000)
    (view,) = iterate_bytes(plain, 16)
    plain[3] = 1.0
    assert bytes(view) == bits(plain)


def test_pauses_of_the_collector_overlap_and_a_child_that_is_forked_meanwhile_collects() -> None:
    assert gc.isenabled()
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not gc.isenabled()
    assert gc.isenabled()


def _fail(rank: int, kind: str) -> None:
    if dist.get_rank() == rank:
        if kind == "checkpoint":
            raise CheckpointException("save failed", {rank: (OSError("disk"), None)})  # type: ignore[dict-item]
        os._exit(7)
    time.sleep(600)  # no collective, which might see the end of the other one first


@pytest.mark.parametrize(
    ("kind", "match", "exception"),
    [("checkpoint", "CheckpointException", CheckpointException), ("die", "exit code 7", type(None))],
)
def test_a_rank_that_fails_is_reported_while_the_other_hangs(kind: str, match: str, exception: Any) -> None:
    with pytest.raises(RankFailed, match=match) as caught:
        run_ranks(2, _fail, 1, kind, grace=0.5)
    assert caught.value.rank == 1
    assert isinstance(caught.value.exception, exception)  # torch's is no Exception
