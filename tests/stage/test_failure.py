"""Staging that fails on one rank fails the save on all of them; failed saves give their staged copies back, whoever
keeps what tells of them, and with the collector turned off."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, _stateful_to_state_dict

from dcp_s3 import CheckpointManager, S3Stager, S3StorageReader, S3StorageWriter, errors
from dcp_s3.errors import StagingError
from dcp_s3.stage import pool as pool_module
from dcp_s3.stage.handover import MARK, FailedStaging, raise_if_failed
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.s3.waiting import until
from tests.stage.making import MIB, PATIENCE, PROCESS, STAGERS, THREAD, Saver, no_collector

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"), pytest.mark.timeout(180)]

ROOT = f"s3://{BUCKET}"


class _CannotBeCopied:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("a lock, say")


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


def _assert_saved(url: str, expected: dict[str, Any]) -> None:
    ((name, own),) = expected.items()
    found = {name: {"parts": [torch.zeros_like(part) for part in own["parts"]], "epoch": 0}}
    dcp.load(found, storage_reader=S3StorageReader(url))
    assert found[name]["epoch"] == own["epoch"]
    for part, wanted in zip(found[name]["parts"], own["parts"], strict=True):
        assert torch.equal(part, wanted)


# --- staging that fails ----------------------------------------------------------------------------------


@contextmanager
def _full_disk(_: Path) -> Iterator[None]:
    """Each file that is to get room on disk finds none."""

    def no_space(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", no_space)
        yield


@contextmanager
def _unwritable(directory: Path) -> Iterator[None]:
    """A file stands where the directory should (no permissions: root may do anything)."""
    directory.rmdir()
    directory.write_text("")
    try:
        yield
    finally:
        directory.unlink()
        directory.mkdir()


class _Case:
    """Settings of the rank that fails, what makes it fail, and the states that fail and pass there."""

    def __init__(self, name: str, directory: Path) -> None:
        directory.mkdir()
        self._directory, self._broken = directory, {"full disk": _full_disk, "unwritable": _unwritable}.get(name)
        self.rank = 0 if name == "uncopyable" else 1
        self.settings: dict[str, Any] = {}
        self.bad, self.good = _make_state(), _make_state(value=5.0)
        if self._broken is not None:
            self.settings = {"staging_limit": "1MiB", "spill_dir": str(directory)}
        elif name == "over budget":
            self.settings, self.good = {"staging_limit": "3MiB"}, _make_state(2, value=5.0)
        else:
            self.bad = {**self.bad, "extra": {"lock": _CannotBeCopied()}}
        self.words = CASES[name]

    def broken(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._broken is None else self._broken(self._directory)


CASES = {
    "full disk": "No space left on device", "unwritable": "in the spill directory",
    "over budget": "DCP_S3_STAGING_LIMIT", "uncopyable": "'extra.lock'",
}  # fmt: skip


def _fail_on_one_rank(directory: str, staging: str, kind: AsyncCheckpointerType) -> None:
    rank = dist.get_rank()
    for name in CASES:
        case = _Case(name, Path(directory, f"{name}-{rank}"))
        fails_here = rank == case.rank
        saver = Saver(staging, kind, case.settings if fails_here else {})
        with case.broken() if fails_here else nullcontext():
            error = saver.save(f"{ROOT}/{name}-bad", case.bad if fails_here else _make_state()).exception(PATIENCE)
        assert isinstance(error, CheckpointException), f"{name}: {error!r}"
        failures = {failed: cause for failed, (cause, _) in error.failures.items()}
        assert set(failures) == {case.rank}, f"{name}: {failures}"
        assert type(failures[case.rank]) is StagingError, f"{name}: {failures}"
        assert case.words in str(failures[case.rank]), f"{name}: {failures}"
        good = case.good if fails_here else _make_state(value=5.0)
        saver.save(f"{ROOT}/{name}-good", good).result(PATIENCE)
        _assert_saved(f"{ROOT}/{name}-good", good)


@pytest.mark.quick("asynchronous-THREAD", "blocking-PROCESS", "writer-PROCESS")
@pytest.mark.parametrize("kind", [THREAD, PROCESS], ids=lambda kind: str(kind.name))
@pytest.mark.parametrize("staging", STAGERS)
def test_staging_that_fails_on_one_rank_fails_the_save_on_all_and_the_next_is_right(
    faulty: FaultyServer, tmp_path: Path, staging: str, kind: AsyncCheckpointerType
) -> None:
    run_ranks(2, _fail_on_one_rank, str(tmp_path), staging, kind)
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
    _assert_saved(f"{ROOT}/good", _make_state(value=5.0))


@pytest.mark.parametrize("staging", ["blocking", "asynchronous"])
def test_what_can_not_reach_the_checkpoint_process_of_one_rank_fails_the_save_on_all(
    faulty: FaultyServer, staging: str
) -> None:
    run_ranks(2, _fail_to_pickle_on_one_rank, staging)


def _fail_on_the_only_rank(directory: str, staging: str, kind: AsyncCheckpointerType) -> None:
    """It raises from `async_save`; from the future of the upload what failed in the background."""
    for name in CASES:
        case = _Case(name, Path(directory, name))
        saver = Saver(staging, kind, case.settings)
        later = staging == "asynchronous" and name != "uncopyable"  # which is found out before
        with case.broken():
            error: BaseException | None = None
            try:
                future = saver.save(f"{ROOT}/{name}-bad", case.bad)
                assert later
                error = future.exception(PATIENCE)
            except StagingError as raised:
                assert not later
                error = raised
        assert type(error) is StagingError, repr(error)
        assert case.words in str(error)
        saver.save(f"{ROOT}/{name}-good", case.good).result(PATIENCE)
        _assert_saved(f"{ROOT}/{name}-good", case.good)


@pytest.mark.quick("blocking-THREAD", "asynchronous-THREAD", "writer-THREAD", "asynchronous-PROCESS")
@pytest.mark.parametrize("kind", [THREAD, PROCESS], ids=lambda kind: str(kind.name))
@pytest.mark.parametrize("staging", STAGERS)
def test_a_single_rank_hears_of_it_at_once_or_from_the_upload(
    faulty: FaultyServer, tmp_path: Path, staging: str, kind: AsyncCheckpointerType
) -> None:
    if kind is PROCESS:
        run_ranks(1, _fail_on_the_only_rank, str(tmp_path), staging, kind)
    else:
        _fail_on_the_only_rank(str(tmp_path), staging, kind)
    assert not any("-bad/" in key for key in faulty.s3.objects(BUCKET))


def _fail_and_forget(kind: AsyncCheckpointerType) -> bool:
    saver = Saver("blocking", kind, {"staging_limit": "3MiB"} if dist.get_rank() == 1 else {})
    state = _make_state()
    (own,) = state.values()
    tensor = weakref.ref(own["parts"][0])
    error = saver.save(f"{ROOT}/bad", state).exception(PATIENCE)
    assert isinstance(error, CheckpointException), repr(error)
    del state, own, error
    gc.collect()
    return tensor() is None


@pytest.mark.parametrize("kind", [THREAD, PROCESS], ids=lambda kind: str(kind.name))
def test_a_failed_staging_does_not_keep_the_state(faulty: FaultyServer, kind: AsyncCheckpointerType) -> None:
    assert run_ranks(2, _fail_and_forget, kind) == [True, True]


# --- saves that fail later -------------------------------------------------------------------------------

_ONCE = {"retry_attempts": 1, "part_size": "5MiB"}
_FAULTS = {
    "denied": Fault.error(403, "AccessDenied"),
    "slow down": Fault.error(503, "SlowDown"),
    "reset": Fault.reset_request(1000),
    "exists": Fault.delay(0),  # planning fails
}


def _refuse(server: FaultyServer, fault: str, *, rank: int | None = None) -> None:
    """Data of saves below bad/ is not taken: of all ranks, or of one."""
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
    _assert_saved(f"{ROOT}/good", good)
    return str(kept[0][1]) if keep else ""


@pytest.mark.quick("denied-blocking-False", "slow down-asynchronous-True", "reset-writer-True", "exists-blocking-True")
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("staging", STAGERS)
@pytest.mark.parametrize("fault", list(_FAULTS))
def test_saves_of_one_rank_that_fail_do_not_hold_up_the_next(
    faulty: FaultyServer, fault: str, staging: str, keep: bool
) -> None:
    _refuse(faulty, fault)
    text = _fail_again_and_again(staging, THREAD, keep)
    assert not keep or "dcp_s3.errors." in text


@pytest.mark.quick("both-blocking", "first-asynchronous")
@pytest.mark.parametrize("staging", ["blocking", "asynchronous"])
@pytest.mark.parametrize("rank", [None, 0, 1], ids=["both", "first", "second"])
def test_nor_do_those_of_two_ranks_of_which_one_or_both_fail(
    faulty: FaultyServer, rank: int | None, staging: str
) -> None:
    _refuse(faulty, "denied", rank=rank)
    run_ranks(2, _fail_again_and_again, staging, THREAD, True)


@pytest.mark.quick("denied-blocking", "exists-asynchronous")
@pytest.mark.parametrize("staging", ["blocking", "asynchronous"])
@pytest.mark.parametrize("fault", ["denied", "exists"])
def test_nor_do_those_of_another_process(faulty: FaultyServer, fault: str, staging: str) -> None:
    _refuse(faulty, fault)
    run_ranks(1, _fail_again_and_again, staging, PROCESS, True)


def _manager_fails_again_and_again() -> list[str]:
    kept = []
    with no_collector(), CheckpointManager(f"{ROOT}/bad", settings=_ONCE) as manager:
        for step in range(4):
            manager.save(step, _make_state(12))
            with pytest.raises(errors.SaveFailedError) as caught:
                manager.wait()
            kept.append(caught)
    return [str(each.value) for each in kept]


@pytest.mark.parametrize("ranks", [1, 2])
def test_nor_do_those_of_a_manager(faulty: FaultyServer, ranks: int) -> None:
    _refuse(faulty, "denied")
    assert all(len(texts) == 4 for texts in run_ranks(ranks, _manager_fails_again_and_again))


def test_nor_does_a_save_that_fails_while_the_next_one_waits_for_its_copy(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_REPORT_SECONDS", 1e9)  # what was only found then is never found
    with no_collector():
        _refuse(faulty, "denied")
        saver = Saver("blocking", THREAD, _ONCE, generations=1)
        kept = [saver.save(f"{ROOT}/bad/step-{number}", _make_state()) for number in range(3)]
        for future in kept:
            assert isinstance(future.exception(PATIENCE), CheckpointException)


def test_the_error_of_a_save_in_the_foreground_keeps_its_traceback(faulty: FaultyServer) -> None:
    _refuse(faulty, "denied")
    staged: Any = S3Stager(_ONCE, generations=1).stage(_make_state())
    with pytest.raises(CheckpointException) as caught:
        dcp.save(staged, storage_writer=S3StorageWriter(f"{ROOT}/bad/x", settings=_ONCE))
    names, trace = [], caught.value.__traceback__
    while trace is not None:
        names.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert "_save_state_dict" in names


@pytest.mark.parametrize("writer", ["torch", "dcp_s3"])
def test_a_kept_future_of_a_failed_save_does_not_pin_memory(faulty: FaultyServer, tmp_path: Path, writer: str) -> None:
    stager, blocked = S3Stager(generations=1), tmp_path / "file"
    blocked.write_text("x")
    made: Any = (
        dcp.FileSystemWriter(blocked / "below")
        if writer == "torch"
        else S3StorageWriter("s3://no-such-bucket-here/run")
    )
    future: Any = dcp.async_save({"w": torch.ones(1000)}, storage_writer=made, async_stager=stager)
    with pytest.raises(CheckpointException):
        future.result(PATIENCE)
    until(lambda: gc.collect() >= 0 and not stager._pool.in_use)  # who waits for the future is told a moment before
    assert isinstance(future.exception(), CheckpointException)


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


# --- what passes for a state ----------------------------------------------------------------------------


def test_it_looks_like_a_state_of_one_entry_with_a_name_of_its_own() -> None:
    state, other = (FailedStaging(StagingError("no room")) for _ in range(2))
    assert isinstance(state, dict)
    assert list(_stateful_to_state_dict(state)) == list(state) != list(other)
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    assert [item.index.fqn for item in planner.create_local_plan().items] == [state.name]
    assert state.name.startswith(MARK)
    assert state.name != other.name


def test_the_cause_is_raised_for_its_name_and_to_whoever_pickles_or_copies_it() -> None:
    error = StagingError("no room")
    state = FailedStaging(error)
    raise_if_failed([])
    raise_if_failed(["model.weight", MARK, f"{MARK}0"])
    uses: list[Callable[[], object]] = [
        lambda: raise_if_failed(["model.weight", state.name]),
        lambda: pickle.dumps(state[state.name]),
        lambda: copy.deepcopy(state[state.name]),
    ]
    for use in uses:
        with pytest.raises(StagingError) as failure:
            use()
        assert failure.value is error


def test_it_crosses_to_another_process() -> None:
    found = pickle.loads(bytes(ForkingPickler.dumps(FailedStaging(StagingError("no room")))))
    assert isinstance(found, FailedStaging)
    assert isinstance(found.error, StagingError)
    with pytest.raises(StagingError, match="no room"):
        raise_if_failed(found)


@pytest.mark.parametrize("torchs", [True, False])
def test_writers_raise_the_cause_and_leave_no_half_of_a_checkpoint(
    faulty: FaultyServer, tmp_path: Path, torchs: bool
) -> None:
    def writer() -> Any:
        return dcp.FileSystemWriter(tmp_path / "c") if torchs else S3StorageWriter(f"{ROOT}/c")

    with pytest.raises(CheckpointException, match="no room") as failure:
        dcp.save(FailedStaging(StagingError("no room")), storage_writer=writer())
    assert [type(cause) for cause, _ in failure.value.failures.values()] == [StagingError]
    assert not (tmp_path / "c" / ".metadata").exists()
    dcp.save({"w": torch.ones(3)}, storage_writer=writer())


def _fail_to_stage_on_one_rank(path: str) -> None:
    limit = "1MiB" if dist.get_rank() == 1 else None
    for asynchronous in (False, True):
        with S3Stager({"staging_limit": limit}, asynchronous=asynchronous) as stager:
            answer: Any = dcp.async_save(
                {"w": torch.ones(1_000_000)},
                storage_writer=dcp.FileSystemWriter(path),
                async_stager=stager,
                process_group=dist.group.WORLD,
            )
            with pytest.raises(CheckpointException) as failure:
                getattr(answer, "upload_completion", answer).result(PATIENCE)
            assert list(failure.value.failures) == [1]
            assert isinstance(failure.value.failures[1][0], StagingError)


def test_every_rank_of_torchs_writer_learns_of_a_failure_on_one(tmp_path: Path) -> None:
    run_ranks(2, _fail_to_stage_on_one_rank, str(tmp_path))


def test_an_error_that_can_not_cross_to_another_process_is_told_by_its_text() -> None:
    class Local(Exception):
        pass

    class TwoArguments(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    for error in (Local("text"), TwoArguments(1, 2)):
        carried = FailedStaging(error).error
        assert type(carried) is StagingError
        assert str(error) in str(carried)
        assert type(error).__name__ in str(carried)
