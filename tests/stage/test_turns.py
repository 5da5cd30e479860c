"""Overlapping asynchronous saves take turns in the order of their calls, in whatever order their threads come."""

from __future__ import annotations

import gc
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_s3 import S3Stager, S3StorageReader, S3StorageWriter
from dcp_s3.stage import turns
from dcp_s3.stage.turns import StagedDict, Turn, current_turn, take_turn
from tests.interpreter import Interpreter
from tests.ranks import run_ranks
from tests.s3.waiting import until
from tests.servers import S3Server
from tests.stage.making import PATIENCE, PROCESS, THREAD

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def _state(value: float) -> dict[str, Any]:
    return {"w": torch.full((1000,), value)}


def _save_delayed_then_at_once(urls: list[str], kind: AsyncCheckpointerType, delayed_rank: int) -> list[float]:
    """On one rank the first save can only begin after the second one's thread is there."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if kind is PROCESS:  # which must be there before saves overlap
        begun: Any = dcp.async_save(
            _state(0.0), storage_writer=S3StorageWriter(urls[0], overwrite=True), async_checkpointer_type=kind
        )
        begun.result(PATIENCE)
    first, second = (S3Stager(asynchronous=True, generations=1) for _ in range(2))
    held: Any = first.stage_now(_state(0.0)) if rank == delayed_rank else None
    uploads: list[Future[Any]] = []
    for value, url, stager in zip((1.0, 2.0), urls, (first, second), strict=True):
        answer: Any = dcp.async_save(
            _state(value),
            storage_writer=S3StorageWriter(url, overwrite=True),
            async_stager=stager,
            async_checkpointer_type=kind,
        )
        uploads.append(answer.upload_completion)
        if value == 2.0:
            answer.staging_completion.result(PATIENCE)
    with pytest.raises(TimeoutError):  # it has nothing to wait for but its turn
        uploads[1].result(0.2)
    del held
    for upload in uploads:
        upload.result(PATIENCE)
    found = []
    for url in urls:
        state = _state(0.0)
        dcp.load(state, storage_reader=S3StorageReader(url))
        found.append(state["w"][0].item())
    first.close(), second.close()
    return found


def test_of_two_saves_to_one_url_the_later_call_stands(root: str, memory_server: S3Server) -> None:
    assert _save_delayed_then_at_once([root, root], THREAD, 0) == [2.0, 2.0]


@pytest.mark.parametrize("kind", [THREAD, PROCESS], ids=lambda kind: str(kind.name))
def test_ranks_whose_threads_come_in_different_orders_save_in_one_order(
    root: str, memory_server: S3Server, kind: AsyncCheckpointerType
) -> None:
    found = run_ranks(2, _save_delayed_then_at_once, [f"{root}/1", f"{root}/2"], kind, 1)
    assert found == [[1.0, 2.0]] * 2


def _fail_to_start_then_save(url: str) -> None:
    turns._START_SECONDS = 1.0
    process: Any = _async_process_executor._AsyncCheckpointProcess
    original = process.__init__

    def fail(self: Any, **_: Any) -> None:
        process.__init__ = original
        process.__del__ = lambda _: None
        raise RuntimeError("no process can be started")

    process.__init__ = fail
    kind = PROCESS
    options: dict[str, Any] = {"storage_writer": S3StorageWriter(url), "async_checkpointer_type": kind}
    kept: Any = dcp.async_save(_state(1.0), **options)
    with pytest.raises(RuntimeError, match="no process can be started") as error:
        kept.result(PATIENCE)
    again: Any = dcp.async_save(_state(2.0), **options)
    again.result(PATIENCE)
    assert error.value is not None
    found = _state(0.0)
    dcp.load(found, storage_reader=S3StorageReader(url))
    assert found["w"][0].item() == 2.0


def test_a_checkpoint_process_that_could_not_be_started_does_not_hold_up_the_next_save(
    root: str, memory_server: S3Server
) -> None:
    """The error of the first save is kept, and with it its state, which never got its turn."""
    run_ranks(1, _fail_to_start_then_save, root)


def test_a_state_that_is_dropped_gives_up_its_turn() -> None:
    turn, state = Turn(), StagedDict()
    turn.go_with(state)
    waiting = threading.Thread(target=take_turn, args=("key",))
    waiting.start()
    assert not turn.ended.done()
    del state
    gc.collect()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    assert turn.ended.done()


def test_a_save_says_what_it_waits_for_which_is_no_turn_of_another_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dcp_s3.stage.turns._REPORT_SECONDS", 0.01)
    other, turn = Turn(), Turn()
    other.shared.set_result("another key")
    waiting = threading.Thread(target=take_turn, args=("key",))
    waiting.start()
    until(lambda: "an earlier one that shares key with it" in caplog.text)
    assert waiting.is_alive()
    turn.end()
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    other.end()


def test_a_save_that_was_never_begun_does_not_hold_the_others_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dcp.async_save` may raise after it staged; its traceback keeps the state for as long as somebody keeps that."""
    monkeypatch.setattr("dcp_s3.stage.turns._LOST_SECONDS", 0.05)
    turn, state = Turn(), StagedDict()
    turn.go_with(state)
    take_turn("key")
    assert not turn.ended.done()


@pytest.mark.parametrize("ours", [False, True], ids=["a thread of torch's", "its own thread"])
def test_a_turn_ends_with_the_thread_of_its_save(ours: bool) -> None:
    """Even if the error of the save, and with it its state, is kept. Who looks at it in the thread that staged it does
    not save it asynchronously."""
    turn, state = Turn(threading.current_thread()), StagedDict(w=1)
    turn.go_with(state)
    seen: list[bool] = []

    def save() -> None:
        assert dict(state.items()) == {"w": 1}
        seen.append(current_turn() is turn and not turn.ended.done())

    if ours:
        save()
    else:
        thread = threading.Thread(target=save, name="AsyncCheckpointExecutor_0")
        thread.start()
        thread.join()
    assert seen == [not ours]
    assert turn.ended.done()
    assert current_turn() is None


def _save_in_a_pool_of_the_users(url: str) -> None:
    staged: Any = S3Stager().stage(_state(1.0))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dcp.save, staged, storage_writer=S3StorageWriter(f"{url}/1")).result(PATIENCE)
        dcp.save(_state(2.0), storage_writer=S3StorageWriter(f"{url}/2"))  # with that thread idle, and the state kept
        dcp.async_save(_state(3.0), storage_writer=S3StorageWriter(f"{url}/3")).result(PATIENCE)
        assert len(staged) == len(_state(1.0))


_AT_EXIT = """
import os, sys
from dcp_s3.stage.turns import Turn, _Running

def finish(turn, finish=Turn.finish, write=os.write):
    try:
        finish(turn)
    except BaseException as error:
        write(1, repr(error).encode())

Turn.finish = finish
sys.kept = _Running(Turn())  # it goes after the modules
"""


def test_a_turn_that_outlasts_the_interpreter_ends_in_silence(interpreter: Interpreter) -> None:
    ended = interpreter.run([sys.executable, "-c", _AT_EXIT], capture_output=True, timeout=120, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


def test_a_save_of_a_staged_state_in_a_thread_of_the_users_holds_no_other_up(
    root: str, memory_server: S3Server
) -> None:
    run_ranks(2, _save_in_a_pool_of_the_users, root, timeout=PATIENCE)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupt_in_stage_leaves_no_turn(monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(S3Stager, "_begin" if asynchronous else "_stage", interrupt)
    before = list(turns._turns)
    with pytest.raises(KeyboardInterrupt):
        S3Stager(asynchronous=asynchronous).stage(_state(0.0))
    assert turns._turns == before
