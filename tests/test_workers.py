"""Threads that end with their owner, tensors as memory, and the garbage collector, paused."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading

import pytest
import torch

from dcp_s3.process import collector_paused
from dcp_s3.tensor_memory import iterate_bytes, view_bytes
from dcp_s3.workers import InTurn, Workers
from tests.end_to_end.states import DTYPES, bits, every_kind, random_tensor


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


# --- tensors as memory -----------------------------------------------------------------------------------


def tensors_in(state: object) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        return [t for value in state.values() for t in tensors_in(value)]
    return [t for value in state for t in tensors_in(value)] if isinstance(state, list) else []


@pytest.mark.parametrize("chunk_size", [1, 100, 10**9])
def test_the_bytes_are_those_of_the_contiguous_tensor_in_bounded_copies(chunk_size: int) -> None:
    for tensor in tensors_in(every_kind()):
        tensor = tensor.detach()
        assert b"".join(map(bytes, iterate_bytes(tensor, chunk_size))) == bits(tensor)
    strided = random_tensor((64, 32, 8), torch.float32).permute(1, 0, 2)
    assert max(view.nbytes for view in iterate_bytes(strided, 4096)) <= 4096


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_views_are_writable_and_keep_the_memory(dtype: torch.dtype) -> None:
    expected = random_tensor((9, 5), dtype, 3)
    tensor = torch.zeros(9, 5, dtype=dtype)
    view = view_bytes(tensor)
    view[:] = bits(expected)
    assert bits(tensor) == bits(expected)
    del tensor
    gc.collect()
    torch.full((9, 5), 1, dtype=torch.int64)
    assert bytes(view) == bits(expected)


# --- the collector ---------------------------------------------------------------------------------------


def test_pauses_overlap() -> None:
    assert gc.isenabled()
    with collector_paused():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_child_that_is_forked_meanwhile_collects() -> None:
    with collector_paused():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not gc.isenabled()
    assert gc.isenabled()
