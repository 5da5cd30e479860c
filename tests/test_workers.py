"""Threads that end with their owner."""

import subprocess
import sys
import threading

import pytest

from dcp_s3.workers import InTurn, Workers


def test_results_errors_and_names() -> None:
    workers = Workers(3, "dcp_s3-test")
    futures = [workers.submit(divmod, 7, n) for n in (2, 0, 3)]
    assert futures[0].result(60) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        futures[1].result(60)
    assert futures[2].result(60) == (2, 1)
    assert {t.name for t in threading.enumerate() if t.name.startswith("dcp_s3-test")} == {
        f"dcp_s3-test-{n}" for n in range(3)
    }
    workers.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("dcp_s3-test")]


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


def test_an_interrupt_while_the_threads_start_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        start(thread)  # it runs, but its starter does not hear of it
        started.append(thread)
        if len(started) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Workers(3, "dcp_s3-test")
    for thread in started:
        thread.join(60)
        assert not thread.is_alive()


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
    assert not [t for t in threading.enumerate() if t.name == "dcp_s3-test"]
    assert turns.submit(divmod, 7, 2).result(60) == (3, 1)


def test_in_turn_can_be_used_after_a_thread_could_not_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = InTurn("dcp_s3-test")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(RuntimeError, match="can't start"):
            turns.submit(divmod, 7, 2)
    turns.join()
    assert turns.submit(divmod, 7, 2).result(60) == (3, 1)


def test_workers_that_can_not_all_be_started_leave_none_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    real, started = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if len(started) == 2:
            _no_thread(thread)
        started.append(thread)
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"):
        Workers(3, "dcp_s3-test")
    assert not [t for t in threading.enumerate() if t.name.startswith("dcp_s3-test")]


def _no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
