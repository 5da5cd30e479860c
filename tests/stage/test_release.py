"""A save that failed gives its staged copy back, whoever keeps what tells of it, and with the collector turned off."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from dcp_s3 import CheckpointManager, S3Stager, S3StorageWriter, errors
from dcp_s3.stage import pool as pool_module
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.servers import S3Server

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.servers("memory"),
]

THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
_PATIENCE_SECONDS = 60
ROOT = f"s3://{BUCKET}"
_ONCE = {"retry_attempts": 1, "part_size": "5MiB"}
_FAULTS = {
    "denied": Fault.error(403, "AccessDenied"),
    "slow down": Fault.error(503, "SlowDown"),
    "reset": Fault.reset_request(1000),
}


@contextmanager
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _state() -> dict[str, Any]:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return {f"of-{rank}": {"parts": [torch.ones(2**18) for _ in range(12)]}, "same": torch.ones(10), "step": 3}


def _refuse(server: FaultyServer, fault: Fault, *, rank: int | None = None) -> None:
    """Data of saves below bad/ is not taken: of all ranks, or of one."""
    name = "/__" if rank is None else f"/__{rank}_"
    server.rule = lambda request: (
        fault
        if request.operation in ("PutObject", "UploadPart") and request.key.startswith("bad/") and name in request.key
        else None
    )


def _fail_again_and_again(asynchronous: bool, kind: AsyncCheckpointerType, keep: bool) -> str:
    """Each save needs the one generation there is."""
    stager, kept = S3Stager(_ONCE, asynchronous=asynchronous, generations=1), []
    with _no_collector():
        for number in range(4):
            url = f"{ROOT}/bad/step-{number}"
            answer: Any = dcp.async_save(
                _state(),
                storage_writer=S3StorageWriter(url, settings=_ONCE),
                async_stager=stager,
                async_checkpointer_type=kind,
            )
            future = answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer
            error = future.exception(_PATIENCE_SECONDS)
            assert isinstance(error, CheckpointException), repr(error)
            if keep:
                kept.append((future, error))
            del answer, future, error
        good: Any = dcp.async_save(
            _state(),
            storage_writer=S3StorageWriter(f"{ROOT}/good", settings=_ONCE),
            async_stager=stager,
            async_checkpointer_type=kind,
        )
        (good.upload_completion if isinstance(good, AsyncSaveResponse) else good).result(_PATIENCE_SECONDS)
    return str(kept[0][1]) if keep else ""


@pytest.mark.quick("denied-blocking-forgotten", "slow down-asynchronous-kept", "reset-blocking-kept")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("keep", [False, True], ids=["forgotten", "kept"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("fault", list(_FAULTS))
def test_saves_of_one_rank_that_fail_do_not_hold_up_the_next(
    monkeypatch: pytest.MonkeyPatch, fault: str, asynchronous: bool, keep: bool
) -> None:
    with serve(monkeypatch) as server:
        _refuse(server, _FAULTS[fault])
        text = _fail_again_and_again(asynchronous, THREAD, keep)
    assert not keep or "dcp_s3.errors." in text


@pytest.mark.quick("both-blocking", "first-asynchronous")
@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "asynchronous"])
@pytest.mark.parametrize("rank", [None, 0, 1], ids=["both", "first", "second"])
def test_nor_do_those_of_two_ranks_of_which_one_or_both_fail(
    monkeypatch: pytest.MonkeyPatch, rank: int | None, asynchronous: bool
) -> None:
    with serve(monkeypatch) as server:
        _refuse(server, _FAULTS["denied"], rank=rank)
        run_ranks(2, _fail_again_and_again, asynchronous, THREAD, True)


def test_nor_do_those_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(monkeypatch) as server:
        _refuse(server, _FAULTS["denied"])
        run_ranks(1, _fail_again_and_again, False, PROCESS, True)


def _manager_fails_again_and_again() -> list[str]:
    kept = []
    with _no_collector(), CheckpointManager(f"{ROOT}/bad", settings=_ONCE) as manager:
        for step in range(4):
            manager.save(step, _state())
            with pytest.raises(errors.SaveFailedError) as caught:
                manager.wait()
            kept.append(caught)
    return [str(each.value) for each in kept]


@pytest.mark.parametrize("ranks", [1, 2])
def test_nor_do_those_of_a_manager(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    with serve(monkeypatch) as server:
        _refuse(server, _FAULTS["denied"])
        assert all(len(texts) == 4 for texts in run_ranks(ranks, _manager_fails_again_and_again))


@pytest.mark.timeout(180)
def test_nor_does_a_save_that_fails_while_the_next_one_waits_for_its_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_REPORT_SECONDS", 1e9)  # what was only found then is never found
    with serve(monkeypatch) as server, _no_collector():
        _refuse(server, _FAULTS["denied"])
        stager, kept = S3Stager(_ONCE, generations=1), []
        for number in range(3):
            writer = S3StorageWriter(f"{ROOT}/bad/step-{number}", settings=_ONCE)
            kept.append(dcp.async_save(_state(), storage_writer=writer, async_stager=stager))
        for future in kept:
            assert isinstance(future.exception(_PATIENCE_SECONDS), CheckpointException)  # type: ignore[union-attr]


def test_the_error_of_a_save_in_the_foreground_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(monkeypatch) as server:
        _refuse(server, _FAULTS["denied"])
        staged: Any = S3Stager(_ONCE, generations=1).stage(_state())
        with pytest.raises(CheckpointException) as caught:
            dcp.save(staged, storage_writer=S3StorageWriter(f"{ROOT}/bad/x", settings=_ONCE))
        names = []
        trace = caught.value.__traceback__
        while trace is not None:
            names.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
        assert "_save_state_dict" in names


def _fail_to_directory(tmp_path: Path, stager: S3Stager, state: dict[str, Any]) -> Any:
    blocked = tmp_path / "file"
    blocked.write_text("x")
    writer = dcp.FileSystemWriter(blocked / "below")
    return dcp.async_save(state, storage_writer=writer, async_stager=stager)


def _assert_not_pinned(stager: S3Stager, future: Any) -> None:
    with pytest.raises(CheckpointException):
        future.result(_PATIENCE_SECONDS)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while stager._pool.in_use:  # whoever waits for the future is told a moment before
        assert time.monotonic() < deadline, "the kept future holds the copy"
        gc.collect()
        time.sleep(0.01)
    assert isinstance(future.exception(), CheckpointException)


def test_a_kept_future_of_a_failed_save_does_not_pin_memory(tmp_path: Path) -> None:
    stager = S3Stager(generations=1)
    _assert_not_pinned(stager, _fail_to_directory(tmp_path, stager, {"w": torch.ones(1000)}))


def test_a_kept_future_of_a_failed_save_to_s3_does_not_pin_memory(s3_env: S3Server, memory_server: S3Server) -> None:
    stager = S3Stager(generations=1)
    writer = S3StorageWriter("s3://no-such-bucket-here/run")
    _assert_not_pinned(stager, dcp.async_save({"w": torch.ones(1000)}, storage_writer=writer, async_stager=stager))


def test_a_state_whose_save_has_ended_is_refused() -> None:
    """Its tensors are empty: nobody may save those for the state."""
    staged: Any = S3Stager().stage({"w": torch.ones(3)})
    view = staged["w"][1:]
    staged.release()
    with pytest.raises(errors.StagingError, match="stage_now"):
        dcp.save(staged, storage_writer=S3StorageWriter(f"{ROOT}/x"))
    assert view.tolist() == [1, 1], "what somebody still looks at is not overwritten"


# --- what is left of a save that has ended --------------------------------------------------------------


PATIENCE = 60.0


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_of_a_save_that_has_ended(memory_server: S3Server, root: str, fails: bool) -> None:
    """Its metadata may have hundreds of MiB, and a training makes thousands of saves."""

    def refuse(request: Any) -> Fault | None:
        return Fault.error(403, "AccessDenied") if request.key.endswith(".distcp") else None

    memory_server.handle.fault = refuse if fails else None
    try:
        writer = S3StorageWriter(f"{root}/step-1")
        saving: Any = dcp.async_save({"w": torch.ones(10)}, storage_writer=writer)
        assert (saving.exception(PATIENCE) is not None) == fails
    finally:
        memory_server.handle.fault = None
    left = [weakref.ref(each) for each in (writer, saving)]
    del writer, saving
    for _ in range(100):  # the thread of the save ends shortly after its future
        gc.collect()
        if not any(each() for each in left):
            break
        time.sleep(0.05)
    assert [each() for each in left] == [None, None]
