"""Staged states cross to another process by descriptors: the same bytes and aliases, nothing copied, nothing left.
And each save waits for the one before it."""

from __future__ import annotations

import copy
import functools
import gc
import io
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dcp_s3 import S3Stager
from dcp_s3.stage import handover
from dcp_s3.stage import stager as stager_module
from dcp_s3.stage.handover import AsyncSave, StagedState, current_save, wait_for_saves
from tests.end_to_end.states import assert_same, every_kind, random_tensor
from tests.s3.waiting import until
from tests.stage.making import PATIENCE, frozen


def _serve(connection: Connection) -> None:
    while (request := connection.recv()) is not None:
        function, state = request
        connection.send(function(state))
        del request, state


Ask = Callable[[Callable[[Any], Any], Any], Any]


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    """Has a function called with a state in another process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()

    def ask(function: Callable[[Any], Any], state: Any) -> Any:
        ours.send((function, state))
        assert ours.poll(PATIENCE), "no answer"
        return ours.recv()

    yield ask
    ours.send(None)
    process.join(PATIENCE)
    assert process.exitcode == 0


@pytest.fixture(params=["private", "shared", "file", "mixed"])
def stager(request: pytest.FixtureRequest, tmp_path: Path) -> S3Stager:
    options: dict[str, Any] = {}
    if request.param in ("file", "mixed"):
        options |= {"staging_limit": "1MiB", "spill_dir": str(tmp_path)}
    stager = S3Stager(options)
    if request.param == "file":
        stager._pool.limit = 0
    stager._pool.shared = request.param == "shared"
    return stager


def _state() -> dict[str, Any]:
    base, large = random_tensor((40, 30), torch.float32, 1), random_tensor((600, 1000), torch.float32, 2)
    return {**every_kind(), "base": base, "alias": base.detach(), "t": base.t(), "large": large}


def _echo(state: dict[str, Any]) -> Any:
    """Its bytes, and which of its tensors are those of ``base``. As bytes: nothing of torch's own handing over
    on the way back."""
    file = io.BytesIO()
    torch.save(frozen(state), file)
    state["base"].fill_(5.0)
    return file.getvalue(), [bool((state[name] == 5).all()) for name in ("alias", "t", "large")]


def test_the_bytes_are_the_same_and_tied_tensors_stay_tied(ask: Ask, stager: S3Stager) -> None:
    state = _state()
    staged = stager.stage(state)
    stager.close()
    data, tied = ask(_echo, staged)  # a state outlives its stager
    assert_same(torch.load(io.BytesIO(data), weights_only=False), frozen(state))
    assert tied == [True, False, False]


def _sum(state: dict[str, Any]) -> float:
    return float(state["w"].sum())


def test_private_memory_makes_the_pool_use_shared_memory(ask: Ask) -> None:
    stager = S3Stager()
    for value, kind in ((1.0, "private"), (2.0, "shared")):
        staged: Any = stager.stage({"w": torch.full((3,), value)})
        assert ([buffer.kind for buffer in staged.buffers], stager._pool.shared) == ([kind], kind == "shared")
        assert ask(_sum, staged) == 3 * value
        del staged


def test_a_plain_pickle_or_copy_is_a_plain_dict() -> None:
    staged: Any = S3Stager().stage_now({"w": torch.ones(3), "n": [1]})
    assert type(staged) is StagedState
    for found in (pickle.loads(pickle.dumps(staged)), copy.deepcopy(staged)):
        assert type(found) is dict
        assert found["n"] == [1]
        assert found["w"].tolist() == [1, 1, 1]
        assert found["w"].data_ptr() != staged["w"].data_ptr()
    large = S3Stager().stage_now({f"w{n}": torch.zeros(1_310_720) for n in range(10)})  # 50 MiB
    assert len(ForkingPickler.dumps(large)) < 20_000, "the bytes of tensors are not pickled"
    assert len(pickle.dumps(large)) > 50 * 2**20


def _descriptors_there(_: Any) -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("shared", [True, False])
def test_no_descriptors_are_left(ask: Ask, shared: bool) -> None:
    stager = S3Stager()
    before = theirs = 0
    for step in range(25):
        stager._pool.shared = shared
        staged: Any = stager.stage({"w": torch.full((1000,), float(step))})
        assert ask(_sum, staged) == 1000.0 * step
        del staged
        if step == 4:
            before, theirs = len(os.listdir("/proc/self/fd")), ask(_descriptors_there, {})
    gc.collect()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)  # multiprocessing closes what it sent in a thread
    assert ask(_descriptors_there, {}) <= theirs + 1


# --- one save at a time ------------------------------------------------------------------------------------


def _staged() -> StagedState:
    """A state that is staged for a save in another thread, of this process."""
    state = StagedState({"w": 1})
    AsyncSave().go_with(state)
    return state


def _save_in_a_thread(function: Callable[[], object]) -> threading.Thread:
    """In a thread as torch begins for an asynchronous save."""
    thread = threading.Thread(target=function, name="AsyncCheckpointExecutor_0", daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_save_waits_and_says_so_until_the_one_before_has_ended(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, has_begun: bool
) -> None:
    """However long it takes, once it has begun. Before that, until its state is dropped."""
    monkeypatch.setattr(handover, "_REPORT_SECONDS", 0.01)
    if has_begun:
        monkeypatch.setattr(handover, "_LOST_SECONDS", 0.0)
    staged, begun, done = _staged(), threading.Event(), threading.Event()
    save = staged.save
    assert save is not None

    def run() -> None:
        assert dict(staged.items()) == {"w": 1}
        begun.set()
        done.wait(PATIENCE)

    if has_begun:
        saving = _save_in_a_thread(run)
        assert begun.wait(PATIENCE)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_saves)
        until(lambda: caplog.text.count("for the asynchronous save before it") >= 2)
        assert not waiting.done()
        if has_begun:
            done.set()
            saving.join(PATIENCE)
        else:
            del staged
            gc.collect()
        until(waiting.done)
    assert save.has_ended


def test_a_save_that_was_never_begun_does_not_hold_the_others_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """`dcp.async_save` may raise after it staged; its traceback keeps the state for as long as somebody keeps that."""
    monkeypatch.setattr(handover, "_LOST_SECONDS", 0.05)
    staged = _staged()
    wait_for_saves()
    assert staged.save not in handover._saves


def test_two_saves_that_were_staged_at_once_do_not_wait_for_each_other() -> None:
    """Two threads that wait in `stage` for one save go on together when it ends."""
    staged = [_staged(), _staged()]

    def run(state: StagedState) -> None:
        assert dict(state.items()) == {"w": 1}
        wait_for_saves()

    threads = [_save_in_a_thread(functools.partial(run, state)) for state in reversed(staged)]
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("ours", [False, True], ids=["a thread of torch's", "its own thread"])
def test_a_save_ends_with_its_thread(ours: bool) -> None:
    """Even if its error, and with it its state, is kept. Who looks at the state in another thread does not save it
    asynchronously. A thread does not wait for its own save: it may begin the next one at its end."""
    staged = _staged()
    save, seen = staged.save, []
    assert save is not None

    def run() -> None:
        assert dict(staged.items()) == {"w": 1}
        wait_for_saves()
        seen.append(current_save() is save and not save.has_ended)

    if ours:
        run()
    else:
        _save_in_a_thread(run).join()
    assert seen == [not ours]
    assert save.has_ended
    assert current_save() is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupt_in_stage_leaves_no_save(monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    monkeypatch.setattr(stager_module, "Snapshot", mock.Mock(side_effect=KeyboardInterrupt))
    before = list(handover._saves)
    with pytest.raises(KeyboardInterrupt):
        S3Stager(asynchronous=asynchronous).stage({"w": torch.zeros(3)})
    assert handover._saves == before
