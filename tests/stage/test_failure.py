"""Staging that fails on one rank fails the save on all of them; failed saves give their staged copies back, whoever
keeps what tells of them, and with the collector turned off."""

from __future__ import annotations

import errno
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_s3 import S3Stager, S3StorageWriter, errors
from dcp_s3.errors import StagingError
from dcp_s3.stage.handover import failed_staging
from tests.end_to_end.loads import assert_loads
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.s3.waiting import until
from tests.stage.making import MIB, PATIENCE, PROCESS, STAGERS, THREAD, Saver, no_collector

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"), pytest.mark.timeout(180)]

ROOT = f"s3://{BUCKET}"


class _CannotBePickled:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a socket, say")


def _make_state(mebibytes: int = 4, value: float = 1.0) -> dict[str, Any]:
    """Of a name per rank: DCP would store what is on all ranks only once."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    parts = [torch.full((MIB // 4,), value + number) for number in range(mebibytes)]
    return {f"of rank {rank}": {"parts": parts, "epoch": 3}}


# --- staging that fails ----------------------------------------------------------------------------------


@contextmanager
def _full_disk() -> Iterator[None]:
    def no_space(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        yield


class _Case:
    def __init__(self, name: str, directory: str) -> None:
        self.rank = 0 if name == "uncopyable" else 1
        self.settings: dict[str, Any] = {}
        self.bad, self.good = _make_state(), _make_state(value=5.0)
        self.breaks: Callable[[], AbstractContextManager[Any]] = nullcontext
        if name == "full disk":
            self.settings, self.breaks = {"staging_limit": "1MiB", "spill_dir": directory}, _full_disk
        elif name == "over budget":
            self.settings, self.good = {"staging_limit": "3MiB"}, _make_state(2, value=5.0)
        else:
            self.bad = {**self.bad, "extra": {"lock": threading.Lock()}}
        self.words = CASES[name]


CASES = {
    "full disk": "No space left on device", "over budget": "DCP_S3_STAGING_LIMIT", "uncopyable": "'extra.lock'",
}  # fmt: skip


def _fail_on_one_rank(directory: str, staging: str, kind: AsyncCheckpointerType) -> bool:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kept = []
    for name in CASES:
        case = _Case(name, directory)
        failing = case.rank % ranks
        fails_here = rank == failing
        saver = Saver(staging, kind, case.settings if fails_here else {})
        state = case.bad if fails_here else _make_state()
        kept.append(weakref.ref(next(own for key, own in state.items() if key.startswith("of rank"))["parts"][0]))
        # One rank hears of it from async_save, or from the upload's future what failed in the background.
        later = ranks > 1 or (staging == "asynchronous" and name != "uncopyable")
        with case.breaks() if fails_here else nullcontext():
            try:
                error = saver.save(f"{ROOT}/{name}-bad", state).exception(PATIENCE)
                assert later, name
            except StagingError as raised:
                assert not later, name
                error = raised
        if ranks > 1:
            assert isinstance(error, CheckpointException), f"{name}: {error!r}"
            failures = {failed: cause for failed, (cause, _) in error.failures.items()}
            assert set(failures) == {failing}, f"{name}: {failures}"
            error = failures[failing]
        assert type(error) is StagingError, f"{name}: {error!r}"
        assert case.words in str(error), f"{name}: {error}"
        case.bad = {}
        good = case.good if fails_here else _make_state(value=5.0)
        saver.save(f"{ROOT}/{name}-good", good).result(PATIENCE)
        assert_loads(f"{ROOT}/{name}-good", good)
    del state, error
    failures = {}
    gc.collect()
    return all(each() is None for each in kept)


@pytest.mark.quick("asynchronous-THREAD-2", "blocking-PROCESS-2", "writer-PROCESS-1", "asynchronous-THREAD-1")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [THREAD, PROCESS], ids=lambda kind: str(kind.name))
@pytest.mark.parametrize("staging", STAGERS)
def test_staging_that_fails_on_one_rank_fails_the_save_on_all_and_the_next_is_right(
    faulty: FaultyServer, tmp_path: Path, staging: str, kind: AsyncCheckpointerType, ranks: int
) -> None:
    assert run_ranks(ranks, _fail_on_one_rank, str(tmp_path), staging, kind) == [True] * ranks
    keys = list(faulty.s3.objects(BUCKET))
    assert [key for key in keys if "-bad/" in key] == []
    assert sum(key.endswith("-good/.metadata") for key in keys) == len(CASES)


def _fail_to_pickle_on_one_rank(staging: str) -> None:
    saver = Saver(staging, PROCESS)
    saver.save(f"{ROOT}/first", _make_state()).result(PATIENCE)
    state = {**_make_state(), "extra": _CannotBePickled()} if dist.get_rank() == 0 else _make_state()
    error = saver.save(f"{ROOT}/bad", state).exception(PATIENCE)
    assert isinstance(error, CheckpointException), repr(error)
    assert set(error.failures) == {0}, error
    saver.save(f"{ROOT}/good", _make_state(value=5.0)).result(PATIENCE)
    assert_loads(f"{ROOT}/good", _make_state(value=5.0))


@pytest.mark.parametrize("staging", ["blocking", "asynchronous"])
def test_what_can_not_reach_the_checkpoint_process_of_one_rank_fails_the_save_on_all(
    faulty: FaultyServer, staging: str
) -> None:
    run_ranks(2, _fail_to_pickle_on_one_rank, staging)


# --- saves that fail later -------------------------------------------------------------------------------

_ONCE = {"retry_attempts": 1, "part_size": "5MiB"}
_FAULTS = {
    "denied": Fault.error(403, "AccessDenied"),
    "reset": Fault.reset_request(1000),
    "exists": Fault.delay(0),  # planning fails
}


def _refuse(server: FaultyServer, fault: str, *, rank: int | None = None) -> None:
    name = "/__" if rank is None else f"/__{rank}_"
    server.rule = lambda request: (
        _FAULTS[fault]
        if request.operation in ("PutObject", "UploadPart") and request.key.startswith("bad/") and name in request.key
        else None
    )
    if fault == "exists":
        dcp.save({"w": torch.zeros(3)}, storage_writer=S3StorageWriter(f"{ROOT}/bad/step"))


def _fail_again_and_again(staging: str, kind: AsyncCheckpointerType, keep: bool) -> str:
    """Each save needs the one generation there is."""
    saver, kept = Saver(staging, kind, _ONCE, generations=1), []
    with no_collector():
        for number in range(4):
            future = saver.save(f"{ROOT}/bad/step", _make_state(12, value=float(number)))
            error = future.exception(PATIENCE)
            assert isinstance(error, CheckpointException), repr(error)
            if keep:
                kept.append((future, error))
            del future, error
        good = _make_state(12, value=77.0)
        saver.save(f"{ROOT}/good", good).result(PATIENCE)
    assert_loads(f"{ROOT}/good", good)
    return str(kept[0][1]) if keep else ""


@pytest.mark.quick("one rank", "both", "first of two")
@pytest.mark.parametrize(
    ("fault", "staging", "kind", "ranks", "failing", "keep"),
    [
        ("denied", "blocking", THREAD, 1, None, False), ("reset", "writer", THREAD, 1, None, True),
        ("exists", "asynchronous", THREAD, 1, None, True), ("denied", "blocking", THREAD, 2, None, True),
        ("denied", "asynchronous", THREAD, 2, 0, True), ("denied", "blocking", THREAD, 2, 1, True),
        ("denied", "asynchronous", PROCESS, 1, None, True), ("exists", "blocking", PROCESS, 1, None, True),
    ],
    ids=["one rank", "reset", "planning", "both", "first of two", "second of two", "process", "process that plans"],
)  # fmt: skip
def test_saves_that_fail_do_not_hold_up_the_next(
    faulty: FaultyServer, fault: str, staging: str, kind: AsyncCheckpointerType, ranks: int, failing: int | None,
    keep: bool,
) -> None:  # fmt: skip
    _refuse(faulty, fault, rank=failing)
    texts = run_ranks(ranks, _fail_again_and_again, staging, kind, keep)
    assert all("dcp_s3.errors." in text for text in texts if keep)


def test_a_state_whose_save_has_ended_is_refused() -> None:
    """Its tensors are empty: nobody may save those for the state."""
    staged: Any = S3Stager().stage({"w": torch.ones(3)})
    view = staged["w"][1:]
    staged.release()
    with pytest.raises(errors.StagingError, match="stage_now"):
        dcp.save(staged, storage_writer=S3StorageWriter(f"{ROOT}/x"))
    assert view.tolist() == [1, 1], "what somebody still looks at is not overwritten"


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_of_a_save_that_has_ended(faulty: FaultyServer, fails: bool) -> None:
    """Its metadata may have hundreds of MiB, and a training makes thousands of saves."""
    _refuse(faulty, "denied" if fails else "exists")
    writer = S3StorageWriter(f"{ROOT}/bad/step-1")
    saving: Any = dcp.async_save({"w": torch.ones(10)}, storage_writer=writer)
    assert (saving.exception(PATIENCE) is not None) == fails
    left = [weakref.ref(each) for each in (writer, saving)]
    del writer, saving
    until(lambda: gc.collect() >= 0 and not any(each() for each in left))  # its thread ends shortly after its future


def test_torchs_writer_raises_the_cause_and_leaves_no_half_of_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="no room") as failure:
        dcp.save(failed_staging(StagingError("no room")), storage_writer=dcp.FileSystemWriter(tmp_path))
    assert [type(cause) for cause, _ in failure.value.failures.values()] == [StagingError]
    assert not (tmp_path / ".metadata").exists()
