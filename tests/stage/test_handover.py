"""Staged states cross to another process by descriptors: the same bytes and aliases, nothing copied, nothing left.
And each save waits for the one before it."""

from __future__ import annotations

import copy
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

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import _async_process_executor

from dcp_s3 import S3Stager, S3StorageReader, S3StorageWriter
from dcp_s3.stage import handover
from dcp_s3.stage.handover import AsyncSave, StagedDict, StagedState, current_save, wait_for_saves
from tests.end_to_end.states import DTYPES, assert_same, random_tensor
from tests.ranks import run_ranks
from tests.s3.waiting import until
from tests.servers import S3Server
from tests.stage.making import PATIENCE, PROCESS


def _serve(connection: Connection) -> None:
    """Answers each (function, state) with what the function returns."""
    while (request := connection.recv()) is not None:
        function, state = request
        connection.send(function(state))
        del request, state


class _Process:
    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, function: Callable[[Any], Any], state: Any) -> Any:
        self._connection.send((function, state))
        assert self._connection.poll(PATIENCE), "no answer"
        return self._connection.recv()

    def close(self) -> None:
        self._connection.send(None)
        self._process.join(PATIENCE)
        code = self._process.exitcode
        self._process.kill()
        self._connection.close()
        assert code == 0


@pytest.fixture(scope="module")
def process() -> Iterator[_Process]:
    process = _Process()
    yield process
    process.close()


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
    base = random_tensor((40, 30), torch.float32, 1)
    large = random_tensor((600, 1000), torch.float32, 2)
    return {
        "dtypes": {str(dtype): random_tensor((5, 7), dtype, number) for number, dtype in enumerate(DTYPES)},
        "scalars": [random_tensor((), dtype, number) for number, dtype in enumerate(DTYPES)],
        "base": base,
        "tied": base.detach(),
        "t": base.t(),
        "large": large,
        "sparse view": large[::7, ::5],
        "conj": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "empty": torch.empty(3, 0, dtype=torch.bfloat16),
        "expanded": torch.arange(3.0).expand(4, 3),
        "parameter": nn.Parameter(torch.ones(3)),
        "object": {"n": 5, "text": "läuft", "list": [1, None]},
    }


def _echo(state: dict[str, Any]) -> Any:
    """Its bytes, and which of its tensors are those of ``base``. As bytes: nothing of torch's own handing over
    on the way back."""
    assert isinstance(state, dict)
    file = io.BytesIO()
    torch.save(_plain(state), file)
    if "base" not in state:
        return file.getvalue(), []
    state["base"].fill_(5.0)
    return file.getvalue(), [bool((state[name] == 5).all()) for name in ("tied", "t", "large")]


def _read(answer: tuple[bytes, list[bool]]) -> Any:
    return torch.load(io.BytesIO(answer[0]), weights_only=False)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list) else value


def test_the_bytes_are_the_same_and_tied_tensors_stay_tied(process: _Process, stager: S3Stager) -> None:
    state, staged = _state(), stager.stage(_state())
    stager.close()
    answer = process.ask(_echo, staged)  # a state outlives its stager
    assert_same(_read(answer), _plain(state))
    assert answer[1] == [True, False, False]


def test_private_memory_makes_the_pool_use_shared_memory(process: _Process) -> None:
    stager = S3Stager()
    staged: Any = stager.stage({"w": torch.ones(3)})
    assert [buffer.kind for buffer in staged.buffers] == ["private"]
    assert not stager._pool.shared
    process.ask(_echo, staged)
    assert stager._pool.shared
    del staged
    staged = stager.stage({"w": torch.full((3,), 2.0)})
    assert [buffer.kind for buffer in staged.buffers] == ["shared"]
    assert _read(process.ask(_echo, staged))["w"].tolist() == [2, 2, 2]


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


def _sum(state: dict[str, Any]) -> float:
    return float(state["w"].sum())


def _descriptors_there(_: Any) -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("shared", [True, False])
def test_no_descriptors_are_left(process: _Process, shared: bool) -> None:
    stager = S3Stager()
    before = theirs = 0
    for step in range(25):
        stager._pool.shared = shared
        staged: Any = stager.stage({"w": torch.full((1000,), float(step))})
        assert process.ask(_sum, staged) == 1000.0 * step
        del staged
        if step == 4:
            before, theirs = len(os.listdir("/proc/self/fd")), process.ask(_descriptors_there, {})
    gc.collect()
    until(lambda: len(os.listdir("/proc/self/fd")) <= before + 1)  # multiprocessing closes what it sent in a thread
    assert process.ask(_descriptors_there, {}) <= theirs + 1


# --- one save at a time ------------------------------------------------------------------------------------


def _staged() -> StagedDict:
    """A state that is staged for a save in another thread, of this process."""
    state = StagedDict(w=1)
    AsyncSave().go_with(state)
    return state


def test_a_save_waits_and_says_so_until_the_state_of_the_one_before_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handover, "_REPORT_SECONDS", 0.01)
    staged = _staged()
    save = staged.save
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_saves)
        until(lambda: "for the asynchronous save before it" in caplog.text)
        assert not waiting.done()
        assert save is not None
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

    def run(state: StagedDict) -> None:
        assert dict(state.items()) == {"w": 1}
        wait_for_saves()

    threads = [
        threading.Thread(target=run, args=(state,), name="AsyncCheckpointExecutor_0", daemon=True) for state in staged
    ]
    for thread in reversed(threads):
        thread.start()
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
        thread = threading.Thread(target=run, name="AsyncCheckpointExecutor_0")
        thread.start()
        thread.join()
    assert seen == [not ours]
    assert save.has_ended
    assert current_save() is None


def _save_in_a_pool_of_the_users(url: str) -> None:
    def state(value: float) -> dict[str, Any]:
        return {"w": torch.full((1000,), value)}

    staged: Any = S3Stager().stage(state(1.0))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dcp.save, staged, storage_writer=S3StorageWriter(f"{url}/1")).result(PATIENCE)
        dcp.save(state(2.0), storage_writer=S3StorageWriter(f"{url}/2"))  # with that thread idle, and the state kept
        dcp.async_save(state(3.0), storage_writer=S3StorageWriter(f"{url}/3")).result(PATIENCE)  # type: ignore[union-attr]
        assert len(staged) == 1


def test_a_save_of_a_staged_state_in_a_thread_of_the_users_holds_no_other_up(
    root: str, memory_server: S3Server
) -> None:
    run_ranks(2, _save_in_a_pool_of_the_users, root, timeout=2 * PATIENCE)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_interrupt_in_stage_leaves_no_save(monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(S3Stager, "_begin" if asynchronous else "_stage", interrupt)
    before = list(handover._saves)
    with pytest.raises(KeyboardInterrupt):
        S3Stager(asynchronous=asynchronous).stage({"w": torch.zeros(3)})
    assert handover._saves == before


def _fail_to_start_then_save(url: str) -> None:
    handover._LOST_SECONDS = 1.0
    process: Any = _async_process_executor._AsyncCheckpointProcess
    original = process.__init__

    def fail(self: Any, **_: Any) -> None:
        process.__init__ = original
        process.__del__ = lambda _: None
        raise RuntimeError("no process can be started")

    process.__init__ = fail
    options: dict[str, Any] = {"storage_writer": S3StorageWriter(url), "async_checkpointer_type": PROCESS}
    kept: Any = dcp.async_save({"w": torch.zeros(3)}, **options)
    with pytest.raises(RuntimeError, match="no process can be started") as error:
        kept.result(PATIENCE)
    again: Any = dcp.async_save({"w": torch.ones(3)}, **options)
    again.result(PATIENCE)
    assert error.value is not None
    found = {"w": torch.zeros(3)}
    dcp.load(found, storage_reader=S3StorageReader(url))
    assert found["w"].tolist() == [1, 1, 1]


def test_a_checkpoint_process_that_could_not_be_started_does_not_hold_up_the_next_save(
    root: str, memory_server: S3Server
) -> None:
    """The error of the first save is kept, and with it its state, which was never taken up."""
    run_ranks(1, _fail_to_start_then_save, root)
