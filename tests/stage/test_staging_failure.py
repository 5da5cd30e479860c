"""Staging that fails on one rank fails the save on all of them, and failed saves leave nothing behind."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    _stateful_to_state_dict,
)

from dcp_s3 import S3Stager, S3StorageReader, S3StorageWriter, errors
from dcp_s3.errors import StagingError
from dcp_s3.stage.handover import MARK, FailedStaging, raise_if_failed
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.servers import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

THREAD, PROCESS = AsyncCheckpointerType.THREAD, AsyncCheckpointerType.PROCESS
# Less than the process group's (120 s): whoever only fails because a collective timed out is too late.
_PATIENCE_SECONDS = 60
_MIB = 2**20


class _CannotBeCopied:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("a lock, say")


class _CannotBePickled:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a socket, say")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _make_state(mebibytes: int = 4, value: float = 1.0) -> dict[str, Any]:
    """Of a name per rank: DCP would store what is on all ranks only once."""
    parts = [torch.full((_MIB // 4,), value + number) for number in range(mebibytes)]
    return {f"of rank {_rank()}": {"parts": parts, "epoch": 3}}


class _Saver:
    """`dcp.async_save` by one way of staging, with settings that a rank has for itself."""

    def __init__(self, staging: str, kind: AsyncCheckpointerType, settings: dict[str, Any]) -> None:
        self._settings, self._kind = settings, kind
        self._stager = None if staging == "writer" else S3Stager(settings, asynchronous=staging == "asynchronous")

    def save(self, url: str, state: dict[str, Any], **writer: Any) -> Future[Any]:
        """The future of the upload."""
        # The writer's own stager belongs to the process and its settings: the same one each time.
        answer: Any = dcp.async_save(
            state,
            storage_writer=S3StorageWriter(url, settings=self._settings, **writer),
            async_stager=self._stager,
            async_checkpointer_type=self._kind,
        )
        upload: Future[Any] = answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer
        return upload


def _assert_saved(url: str, expected: dict[str, Any]) -> None:
    ((name, own),) = expected.items()
    found = {name: {"parts": [torch.zeros_like(part) for part in own["parts"]], "epoch": 0}}
    dcp.load(found, storage_reader=S3StorageReader(url))
    assert found[name]["epoch"] == own["epoch"]
    for part, wanted in zip(found[name]["parts"], own["parts"], strict=True):
        assert torch.equal(part, wanted)


# --- one rank of two -------------------------------------------------------------------------------------


@contextmanager
def _full_disk() -> Iterator[None]:
    """Each file that is to get room on disk finds none."""
    original = os.posix_fallocate

    def no_space(*_: int) -> None:
        raise OSError(28, os.strerror(28))

    os.posix_fallocate = no_space
    try:
        yield
    finally:
        os.posix_fallocate = original


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


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Case:
    """Settings of the rank that fails, what makes it fail, and the states that fail and pass there."""

    def __init__(self, name: str, directory: Path) -> None:
        directory.mkdir()
        self.rank = 0 if name == "uncopyable" else 1
        self.settings: dict[str, Any] = {}
        self.broken: Callable[[], Any] = _nothing
        self.error: type[StagingError] = StagingError
        self.bad, self.good = _make_state(), _make_state(value=5.0)
        self.words = ""
        if name in ("full disk", "unwritable"):
            self.settings = {"staging_limit": "1MiB", "spill_dir": str(directory)}
            self.broken = _full_disk if name == "full disk" else (lambda: _unwritable(directory))
            self.words = "No space left on device" if name == "full disk" else "in the spill directory"
        elif name == "over budget":
            self.settings = {"staging_limit": "3MiB"}
            self.error = StagingError
            self.good = _make_state(2, value=5.0)
            self.words = "DCP_S3_STAGING_LIMIT"
        elif name == "uncopyable":
            self.bad = {**self.bad, "extra": {"lock": _CannotBeCopied()}}
            self.words = "'extra.lock'"


CASES = ["full disk", "unwritable", "over budget", "uncopyable"]


def _fail_on_one_rank(url: str, directory: str, staging: str, kind: AsyncCheckpointerType) -> None:
    rank = dist.get_rank()
    for name in CASES:
        case = _Case(name, Path(directory, f"{name}-{rank}"))
        fails_here = rank == case.rank
        saver = _Saver(staging, kind, case.settings if fails_here else {})
        with case.broken() if fails_here else _nothing():
            error = saver.save(f"{url}/{name}-bad", case.bad if fails_here else _make_state()).exception(
                _PATIENCE_SECONDS
            )
        assert isinstance(error, CheckpointException), f"{name}: {error!r}"
        failures = {failed: cause for failed, (cause, _) in error.failures.items()}
        assert set(failures) == {case.rank}, f"{name}: {failures}"
        assert type(failures[case.rank]) is case.error, f"{name}: {failures}"
        assert case.words in str(failures[case.rank]), f"{name}: {failures}"
        good = case.good if fails_here else _make_state(value=5.0)
        saver.save(f"{url}/{name}-good", good).result(_PATIENCE_SECONDS)
        _assert_saved(f"{url}/{name}-good", good)


@pytest.mark.quick("asynchronous-THREAD", "blocking-PROCESS", "writer-PROCESS")
@pytest.mark.parametrize("kind", [THREAD, PROCESS], ids=lambda kind: str(kind.name))
@pytest.mark.parametrize("staging", ["blocking", "asynchronous", "writer"])
def test_staging_that_fails_on_one_rank_fails_the_save_on_all_and_the_next_is_right(
    root: str, bucket: str, memory_server: S3Server, tmp_path: Path, staging: str, kind: AsyncCheckpointerType
) -> None:
    run_ranks(2, _fail_on_one_rank, root, str(tmp_path), staging, kind)
    keys = list(memory_server.handle.objects(bucket))
    assert [key for key in keys if "-bad/" in key] == []
    assert sum(key.endswith("-good/.metadata") for key in keys) == len(CASES)


def _fail_to_pickle_on_one_rank(url: str, staging: str) -> None:
    rank = dist.get_rank()
    saver = _Saver(staging, PROCESS, {})
    saver.save(f"{url}/first", _make_state()).result(_PATIENCE_SECONDS)
    state = {**_make_state(), "extra": _CannotBePickled()} if rank == 0 else _make_state()
    error = saver.save(f"{url}/bad", state).exception(_PATIENCE_SECONDS)
    assert isinstance(error, CheckpointException), repr(error)
    assert set(error.failures) == {0}, error
    saver.save(f"{url}/good", _make_state(value=5.0)).result(_PATIENCE_SECONDS)
    _assert_saved(f"{url}/good", _make_state(value=5.0))


@pytest.mark.parametrize("staging", ["blocking", "asynchronous"])
def test_what_can_not_reach_the_checkpoint_process_of_one_rank_fails_the_save_on_all(
    root: str, memory_server: S3Server, staging: str
) -> None:
    run_ranks(2, _fail_to_pickle_on_one_rank, root, staging)


# --- one rank, which can tell its caller -----------------------------------------------------------------


def _raise_at_once(url: str, directory: str, staging: str, kind: AsyncCheckpointerType) -> None:
    for name in CASES:
        case = _Case(name, Path(directory, name))
        saver = _Saver(staging, kind, case.settings)
        with case.broken(), pytest.raises(case.error) as caught:
            saver.save(f"{url}/{name}-bad", case.bad)
        assert case.words in str(caught.value)
        saver.save(f"{url}/{name}-good", case.good).result(_PATIENCE_SECONDS)
        _assert_saved(f"{url}/{name}-good", case.good)


@pytest.mark.parametrize("staging", ["blocking", "writer"])
def test_a_single_rank_raises_from_async_save(
    root: str, bucket: str, memory_server: S3Server, tmp_path: Path, staging: str
) -> None:
    _raise_at_once(root, str(tmp_path), staging, THREAD)
    assert not any("-bad/" in key for key in memory_server.handle.objects(bucket))


def test_a_single_rank_of_a_process_group_raises_from_async_save(
    root: str, memory_server: S3Server, tmp_path: Path
) -> None:
    run_ranks(1, _raise_at_once, root, str(tmp_path), "blocking", PROCESS)


def _raise_from_the_future(url: str, directory: str, kind: AsyncCheckpointerType) -> None:
    for name in ("full disk", "unwritable", "over budget"):
        case = _Case(name, Path(directory, name))
        saver = _Saver("asynchronous", kind, case.settings)
        with case.broken():
            error = saver.save(f"{url}/{name}-bad", case.bad).exception(_PATIENCE_SECONDS)
        assert type(error) is case.error, repr(error)
        assert case.words in str(error)
        saver.save(f"{url}/{name}-good", case.good).result(_PATIENCE_SECONDS)
        _assert_saved(f"{url}/{name}-good", case.good)
    # This is found out before anything goes to the background.
    case = _Case("uncopyable", Path(directory, "uncopyable"))
    saver = _Saver("asynchronous", kind, {})
    with pytest.raises(StagingError, match=r"'extra\.lock'"):
        saver.save(f"{url}/uncopyable-bad", case.bad)
    saver.save(f"{url}/uncopyable-good", case.good).result(_PATIENCE_SECONDS)
    _assert_saved(f"{url}/uncopyable-good", case.good)


def test_the_upload_of_a_single_rank_raises_what_failed_in_the_background(
    root: str, bucket: str, memory_server: S3Server, tmp_path: Path
) -> None:
    _raise_from_the_future(root, str(tmp_path), THREAD)
    assert not any("-bad/" in key for key in memory_server.handle.objects(bucket))


def test_the_upload_of_a_single_rank_raises_what_failed_before_the_checkpoint_process(
    root: str, memory_server: S3Server, tmp_path: Path
) -> None:
    run_ranks(1, _raise_from_the_future, root, str(tmp_path), PROCESS)


def _fail_and_forget(url: str, kind: AsyncCheckpointerType) -> bool:
    saver = _Saver("blocking", kind, {"staging_limit": "3MiB"} if dist.get_rank() == 1 else {})
    state = _make_state()
    (own,) = state.values()
    tensor = weakref.ref(own["parts"][0])
    error = saver.save(f"{url}/bad", state).exception(_PATIENCE_SECONDS)
    assert isinstance(error, CheckpointException), repr(error)
    del state, own, error
    gc.collect()
    return tensor() is None


@pytest.mark.parametrize("kind", [THREAD, PROCESS], ids=lambda kind: str(kind.name))
def test_a_failed_staging_does_not_keep_the_state(
    root: str, memory_server: S3Server, kind: AsyncCheckpointerType
) -> None:
    assert run_ranks(2, _fail_and_forget, root, kind) == [True, True]


# --- failed saves do not use up the generations ----------------------------------------------------------

_ONCE = {"retry_attempts": 1, "part_size": "5MiB"}


def _fail_five_times(
    staging: str, kind: AsyncCheckpointerType, expected: type[BaseException], urls: tuple[str, str], mebibytes: int
) -> None:
    """Saves to the first URL fail; whatever tells of that is kept."""
    saver, kept = _Saver(staging, kind, _ONCE), []
    for number in range(5):
        future = saver.save(urls[0], _make_state(mebibytes, value=float(number)))
        with pytest.raises(CheckpointException) as caught:
            future.result(_PATIENCE_SECONDS)
        (cause, _) = caught.value.failures[0]
        assert isinstance(cause, expected), repr(cause)
        kept.append((future, caught, cause))
    good = _make_state(mebibytes, value=77.0)
    saver.save(urls[1], good).result(_PATIENCE_SECONDS)
    _assert_saved(urls[1], good)
    assert len(kept) == 5


REFUSALS = {
    "denied": (Fault.error(403, "AccessDenied"), errors.AccessDeniedError),
    "slow down": (Fault.error(503, "SlowDown"), errors.TransferError),
    "reset": (Fault.reset(), errors.TransferError),
    "reset in the body": (Fault.reset_request(1000), errors.TransferError),
}


@pytest.mark.timeout(180)  # else it would wait for a generation for good
@pytest.mark.parametrize(
    ("staging", "refusal", "mebibytes"),
    [
        ("blocking", "denied", 1),
        ("blocking", "slow down", 12),
        ("blocking", "reset", 1),
        ("blocking", "reset in the body", 12),
        ("asynchronous", "reset", 12),
        ("writer", "reset in the body", 1),
    ],
)
def test_uploads_that_fail_do_not_use_up_the_generations(
    faulty: FaultyServer, staging: str, refusal: str, mebibytes: int
) -> None:
    fault, expected = REFUSALS[refusal]
    operation = "PutObject" if mebibytes == 1 else "UploadPart"
    faulty.rule = lambda r: fault if r.operation == operation and r.key.startswith("bad/") else None
    urls = (f"s3://{BUCKET}/bad", f"s3://{BUCKET}/good")
    _fail_five_times(staging, THREAD, expected, urls, mebibytes)


@pytest.mark.parametrize("staging", ["blocking", "asynchronous"])
def test_uploads_that_fail_in_another_process_do_not_use_up_the_generations(faulty: FaultyServer, staging: str) -> None:
    faulty.rule = lambda r: (
        Fault.error(503, "SlowDown") if r.operation == "UploadPart" and r.key.startswith("bad/") else None
    )
    urls = (f"s3://{BUCKET}/bad", f"s3://{BUCKET}/good")
    run_ranks(1, _fail_five_times, staging, PROCESS, errors.TransferError, urls, 12)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("staging", ["blocking", "asynchronous"])
def test_saves_that_fail_in_planning_do_not_use_up_the_generations(
    root: str, memory_server: S3Server, staging: str
) -> None:
    dcp.save({"w": torch.zeros(3)}, storage_writer=S3StorageWriter(f"{root}/there"))
    _fail_five_times(staging, THREAD, errors.CheckpointExistsError, (f"{root}/there", f"{root}/good"), 1)


def test_saves_that_fail_in_planning_in_another_process_do_not_use_up_the_generations(
    root: str, memory_server: S3Server
) -> None:
    dcp.save({"w": torch.zeros(3)}, storage_writer=S3StorageWriter(f"{root}/there"))
    urls = (f"{root}/there", f"{root}/good")
    run_ranks(1, _fail_five_times, "blocking", PROCESS, errors.CheckpointExistsError, urls, 1)


# --- what passes for a state ----------------------------------------------------------------------------


def test_it_looks_like_a_state() -> None:
    state = FailedStaging(StagingError("no room"))
    assert isinstance(state, dict)
    assert list(_stateful_to_state_dict(state)) == list(state)
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    plan = planner.create_local_plan()
    assert [item.index.fqn for item in plan.items] == [state.name]
    assert state.name.startswith(MARK)


def test_each_failure_has_a_name_of_its_own() -> None:
    first, second = (FailedStaging(StagingError("no room")) for _ in range(2))
    assert first.name != second.name
    assert list(first) != list(second)


def test_the_cause_is_raised_for_its_name_only() -> None:
    error = StagingError("no room")
    state = FailedStaging(error)
    raise_if_failed([])
    raise_if_failed(["model.weight", MARK, f"{MARK}0"])
    with pytest.raises(StagingError) as failure:
        raise_if_failed(["model.weight", state.name])
    assert failure.value is error


def test_whoever_pickles_or_copies_it_gets_the_cause() -> None:
    error = StagingError("no room")
    state = FailedStaging(error)
    for use in (pickle.dumps, copy.deepcopy):
        with pytest.raises(StagingError) as failure:
            use(state[state.name])
        assert failure.value is error


def test_it_crosses_to_another_process() -> None:
    found = pickle.loads(bytes(ForkingPickler.dumps(FailedStaging(StagingError("no room")))))
    assert isinstance(found, FailedStaging)
    assert isinstance(found.error, StagingError)
    with pytest.raises(StagingError, match="no room"):
        raise_if_failed(found)


def _assert_caused_by(caught: CheckpointException, error: BaseException) -> None:
    assert [type(cause) for cause, _ in caught.failures.values()] == [type(error)]
    assert "no room" in str(caught)


def test_torchs_writer_raises_the_cause(tmp_path: Path) -> None:
    error = StagingError("no room")
    with pytest.raises(CheckpointException) as failure:
        dcp.save(FailedStaging(error), storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    _assert_caused_by(failure.value, error)
    assert not (tmp_path / "c" / ".metadata").exists()


def test_our_writer_raises_the_cause(root: str, memory_server: S3Server, s3: Any, bucket: str) -> None:
    error = StagingError("no room")
    with pytest.raises(CheckpointException) as failure:
        dcp.save(FailedStaging(error), storage_writer=S3StorageWriter(root))
    _assert_caused_by(failure.value, error)
    dcp.save({"w": torch.ones(3)}, storage_writer=S3StorageWriter(root))  # no half of a checkpoint is in the way


def _fail_to_stage_on_one_rank(path: str) -> None:
    limit = "1MiB" if dist.get_rank() == 1 else None
    for stager in (S3Stager({"staging_limit": limit}), S3Stager({"staging_limit": limit}, asynchronous=True)):
        answer: Any = dcp.async_save(
            {"w": torch.ones(1_000_000)},
            storage_writer=dcp.FileSystemWriter(path),
            async_stager=stager,
            process_group=dist.group.WORLD,
        )
        future = getattr(answer, "upload_completion", answer)
        with pytest.raises(CheckpointException) as failure:
            future.result(60)
        assert list(failure.value.failures) == [1]
        assert isinstance(failure.value.failures[1][0], StagingError)
        stager.close()


def test_every_rank_learns_of_a_failure_on_one(tmp_path: Path) -> None:
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
