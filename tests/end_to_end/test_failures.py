"""Saves and loads that fail: bad input, deadlines, Ctrl-C, one rank. Each has its own error; nothing is left on S3.

And ranks that load without each other: which metadata each of them gets, by which requests.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.format.metadata import load_metadata
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.spill.drain import stop_draining
from tests.collectives import counted
from tests.end_to_end.loads import failure, load, save
from tests.end_to_end.states import assert_same, blank, distribute, random_values
from tests.faulty import BUCKET, FaultyServer, close_clients
from tests.memory_s3 import Fault
from tests.objects import separate_objects
from tests.ranks import run_ranks
from tests.retention.making import committing_alone


def failure_of_load(url: str, state: Any = None, planner: Any = None, **arguments: Any) -> BaseException:
    reader = S3StorageReader(url, **arguments)
    return pickled(failure(lambda: dcp.load(state or {"x": torch.ones(3)}, storage_reader=reader, planner=planner)))


def pickled(error: BaseException) -> BaseException:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error), "it must reach other ranks as what it is"
    assert str(copy) == str(error)
    return error


@pytest.mark.parametrize("make", [S3StorageWriter, S3StorageReader])
def test_wrong_url(make: Any) -> None:
    for give in (make, make().reset):
        with pytest.raises(errors.InvalidURLError, match="s3://bucket/prefix"):
            give("gs://bucket/x")


@pytest.mark.servers("rgw", "rclone")
def test_wrong_credentials(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret-key")
    close_clients()
    for error in (pickled(failure(lambda: save({"x": torch.ones(3)}, root))), failure_of_load(root)):
        assert isinstance(error, (errors.CredentialsError, errors.AccessDeniedError))
    close_clients()


def test_missing_checkpoint(root: str, caplog: pytest.LogCaptureFixture) -> None:
    error = failure_of_load(f"{root}/step-7")
    assert "Global metadata" not in caplog.text, "torch's own guess, with a traceback"
    assert isinstance(error, errors.CheckpointNotFoundError)
    assert "step-7" in str(error)
    assert "dcp-s3 ls" in str(error)
    with pytest.raises(errors.CheckpointNotFoundError):
        S3StorageReader(f"{root}/step-7").read_metadata()


pytestmark = pytest.mark.timeout(180)  # below what requests may hang without a deadline: eight times LONG
MIB = 2**20
URL = f"s3://{BUCKET}/run"
LONG = 30.0


@pytest.fixture
def hang(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., threading.Event]]:
    """Lets requests of an operation hang whose keys contain ``key``; the first calls ``then`` and sets the event."""
    monkeypatch.setenv("DCP_S3_PART_SIZE", "5MiB")
    released = threading.Event()

    def hang(operation: str, key: str = "", then: Callable[[], None] = lambda: None) -> threading.Event:
        reached = threading.Event()

        def rule(request: Any) -> Fault | None:
            if request.operation != operation or key not in request.key:
                return None
            if not reached.is_set():
                reached.set()
                then()
            released.wait(LONG)
            return Fault.reset()

        faulty.rule = rule
        return reached

    yield hang
    released.set()


STATE = {"large": torch.zeros(MIB * 3 // 2), "small": torch.zeros(100)}
"""Two objects: 6 MiB, which is two parts, and a small one."""


def save_two(**settings: Any) -> None:
    with separate_objects("large", "small"):
        save(STATE, URL, settings=settings)


def assert_no_threads() -> None:
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("dcp_s3-") and name != "dcp_s3-drain"]


def assert_nothing_is_left(server: FaultyServer) -> None:
    assert (server.s3.open_uploads(BUCKET), server.s3.objects(BUCKET)) == ([], {})
    assert_no_threads()


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "PutObject", "throttled"])
def test_a_save_ends_at_its_deadline(faulty: FaultyServer, hang: Any, operation: str) -> None:
    reached = hang(operation, "__0_")
    if operation == "throttled":
        faulty.rule = lambda request: Fault.error(503, "SlowDown") if request.operation == "UploadPart" else None
    error = failure(lambda: save_two(save_timeout=1.5, retry_attempts=100), errors.DeadlineExceededError)
    assert reached.is_set() == (operation != "throttled")
    assert (error.setting, error.seconds) == ("DCP_S3_SAVE_TIMEOUT", 1.5)
    said = f"the save to {URL} was not done within DCP_S3_SAVE_TIMEOUT = 1.5 s: of about 6.0 MiB of rank 0"
    assert said in str(error)
    assert_nothing_is_left(faulty)


def interrupt() -> None:
    """Ctrl-C. A signal that the main thread gets: another one would not wake it."""
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_ctrl_c_during_a_save(faulty: FaultyServer, hang: Any, tmp_path: Path) -> None:
    hang("UploadPart", then=interrupt)
    failure(lambda: save_two(read_timeout=0.3, spill_dir=str(tmp_path)), KeyboardInterrupt)
    stop_draining()
    assert not list(tmp_path.glob("saves/*"))
    assert_nothing_is_left(faulty)


def test_a_load_ends_when_nothing_moves_and_by_ctrl_c(hang: Any) -> None:
    save_two()
    reached = hang("GetObject", "__0_0")
    error = failure(lambda: load(blank(STATE), URL, settings={"stall_timeout": 1.5}), errors.DeadlineExceededError)
    assert reached.is_set()
    assert "next to nothing moved for DCP_S3_STALL_TIMEOUT = 1.5 s" in str(error)
    hang("GetObject", "__0_", interrupt)
    failure(lambda: load(blank(STATE), URL, settings={"read_timeout": 0.3}), KeyboardInterrupt)
    assert_no_threads()


def ranks_of(keys: Iterable[str]) -> list[int]:
    """Who wrote these objects."""
    found = (re.search(r"__(\d+)_\d+-[0-9a-f]+\.distcp$", key) for key in keys if key.endswith(".distcp"))
    return sorted(int(each[1]) for each in found)  # type: ignore[index]


def failures_by_rank(outcome: Sequence[CheckpointException]) -> dict[int, BaseException]:
    """What failed on which rank; every rank must have been told the same."""
    told = [{rank: (type(cause), str(cause)) for rank, (cause, _) in each.failures.items()} for each in outcome]
    assert all(each == told[0] for each in told), told
    return {rank: cause for rank, (cause, _) in outcome[0].failures.items()}


def _large_state(fill: float) -> dict[str, Any]:
    return {f"e{n}": distribute(torch.full((2, 1_500_000), fill + n), Shard(0)) for n in range(4)}


def _overwrite_failing(url: str) -> CheckpointException:
    writer = S3StorageWriter(url, overwrite=True, settings={"part_size": "5MiB", "retry_attempts": 2})
    dcp.save(_large_state(1.0), storage_writer=writer)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(_large_state(5.0), storage_writer=writer)
    state = load(_large_state(0.0), url)
    for name, value in _large_state(1.0).items():  # the one that was to be overwritten is whole
        assert_same(state[name].to_local(), value.to_local(), name)
    return caught.value


@pytest.mark.parametrize(
    ("rank", "fault", "expected"),
    [
        (1, Fault.error(403, "AccessDenied"), errors.AccessDeniedError),
        (0, Fault.error_in_200("InternalError"), errors.TransferError),
    ],
)
def test_s3_refuses_one_object_of_one_rank(
    faulty: FaultyServer, rank: int, fault: Fault, expected: type[BaseException]
) -> None:
    operation = "CompleteMultipartUpload"
    committed = []

    def rule(request: Any) -> Fault | None:
        if request.operation == "PutObject" and request.key == "run/.metadata":
            committed.append(request.key)
        # Only the last object: those before it may be complete by then.
        return fault if committed and request.operation == operation and f"__{rank}_3-" in request.key else None

    faulty.rule = rule
    failures = failures_by_rank(run_ranks(2, _overwrite_failing, f"s3://{BUCKET}/run"))
    assert set(failures) == {rank}
    assert isinstance(failures[rank], expected)
    assert f"__{rank}_3-" in str(failures[rank])
    assert len(committed) == 1
    assert faulty.s3.open_uploads(BUCKET) == []
    keys = set(faulty.s3.objects(BUCKET))
    metadata = load_metadata(faulty.s3.read(BUCKET, "run/.metadata"), url="here")
    left = keys - {f"run/{info.relative_path}" for info in metadata.storage_data.values()}
    assert {*ranks_of(left)} <= {1 - rank}
    assert len([key for key in keys if "manifest" in key]) == 1


# --- ranks that load without each other, and that committed without each other as earlier versions had them do -------


@pytest.fixture
def asked(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The keys of the metadata that was asked for."""
    monkeypatch.setenv("DCP_S3_RUN_ID", "a-run")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    keys: list[str] = []
    faulty.rule = lambda request: keys.append(request.key[4:]) if request.key.endswith(".metadata") else None
    return keys


def _state_of_ranks(seed: int) -> dict[str, Any]:
    own = {dist.get_rank(): random_values(seed + dist.get_rank(), 5)}
    sharded = distribute(random_values(seed, 7, 3), Shard(0))
    return {"sharded": sharded, "plain": random_values(seed, 5), "own": own, "step": seed}


def _save_on_ranks(alone: bool, overwrite: bool = False) -> None:
    with committing_alone() if alone else contextlib.nullcontext():
        writer = S3StorageWriter(URL, overwrite=overwrite)
        dcp.save(_state_of_ranks(10), storage_writer=writer, use_collectives=False)


def _load_on_ranks(no_dist: bool = False) -> int:
    """How many collectives it took."""
    state, expected = _state_of_ranks(-1), _state_of_ranks(10)
    with counted() as found:
        dcp.load(state, storage_reader=S3StorageReader(URL), no_dist=no_dist)
        number = found.number
    for each in (state, expected):
        each["sharded"] = each["sharded"].full_tensor()
    assert_same(state, expected)
    return number


def test_a_load_without_a_group_has_no_collective(asked: list[str]) -> None:
    run_ranks(2, _save_on_ranks, False)
    asked.clear()
    assert run_ranks(2, _load_on_ranks, True) == [0, 0]
    assert min(run_ranks(2, _load_on_ranks)) > 0
    # Each rank of both loads. Nobody looks for __0.metadata, and nobody lists.
    assert asked == [".metadata"] * 4


def _save_alone_once() -> None:
    _save_on_ranks(alone=True)
    _load_on_ranks()
    # Each commits for itself: a replacement that is cut off would be a mixture.
    for overwrite in (False, True):
        with pytest.raises(errors.CheckpointExistsError, match=URL):
            _save_on_ranks(True, overwrite)
    dist.barrier()
    _load_on_ranks()


def _load_with_one_missing() -> CheckpointException:
    plain = torch.zeros(5)
    with pytest.raises(CheckpointException) as caught:
        load({"plain": plain}, URL)
    assert not plain.any()
    return caught.value


def test_each_rank_commits_and_loads_for_itself(
    asked: list[str], faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(2, _save_alone_once)
    objects = faulty.s3.objects(BUCKET)
    assert {"run/__0.metadata", "run/__1.metadata"} <= set(objects)
    assert "run/.metadata" not in objects
    # Nothing is left of the saves that were refused.
    assert ranks_of(objects) == [0, 1]

    asked.clear()
    assert run_ranks(2, _load_on_ranks, True) == [0, 0]
    assert sorted(asked) == [".metadata", ".metadata", "__0.metadata", "__1.metadata"]

    # A process of a launcher, without torch.distributed.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_same(load({"own": {1: torch.zeros(5)}}, URL)["own"][1], random_values(11, 5))

    S3Store(BUCKET, Settings()).delete(["run/__1.metadata"])
    failures = failures_by_rank(run_ranks(2, _load_with_one_missing))
    assert set(failures) == {1}
    assert isinstance(failures[1], errors.CheckpointNotFoundError)
    assert URL in str(failures[1])
