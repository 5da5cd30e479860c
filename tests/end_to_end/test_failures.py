"""Saves and loads that fail: bad input, deadlines, Ctrl-C, one rank. Each has its own error; nothing is left on S3."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Callable, Iterator
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
from dcp_s3.spill.drain import stop_draining
from tests.end_to_end import loads
from tests.end_to_end.loads import failure, save
from tests.end_to_end.states import (
    SMALL_PARTS,
    assert_same,
    distribute,
    failures_by_rank,
    manifests,
    random_values,
    rank_of,
)  # fmt: skip
from tests.faulty import BUCKET, FaultyServer, close_clients, serve
from tests.memory_s3 import Fault
from tests.objects import separate_objects
from tests.ranks import run_ranks
from tests.servers import S3Server


def failure_of_save(url: str, state: Any = None) -> BaseException:
    return pickled(failure(lambda: save(state or {"x": torch.ones(3)}, url)))


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
    for error in (failure_of_save(root), failure_of_load(root)):
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


pytestmark = [
    pytest.mark.timeout(180),  # below what requests may hang without a deadline: eight times LONG
]

MIB = 2**20
URL = f"s3://{BUCKET}/run"
LONG = 30.0


class Hanging(FaultyServer):
    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.released = threading.Event()

    def hang(self, *operations: str, key: str = "", then: Callable[[], None] = lambda: None) -> None:
        """From now on, on requests of these operations whose keys contain ``key``; ``then`` is called at the first."""

        def rule(request: Any) -> Fault | None:
            if request.operation not in operations or key not in request.key:
                return None
            if not self.reached.is_set():
                self.reached.set()
                then()
            self.released.wait(LONG)
            return Fault.reset()

        self.rule = rule


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hanging]:
    monkeypatch.setenv("DCP_S3_PART_SIZE", "5MiB")
    hanging = Hanging()
    with serve(monkeypatch, hanging):
        yield hanging
        hanging.released.set()


def make_state() -> dict[str, Any]:
    """Two objects: 6 MiB, which is two parts, and a small one."""
    return {"large": torch.randn(MIB * 3 // 2), "small": torch.randn(100)}


def save_two(state: dict[str, Any] | None = None, **settings: Any) -> None:
    with separate_objects("large", "small"):
        dcp.save(state or make_state(), storage_writer=S3StorageWriter(URL, settings=settings))


def load_two(expected: dict[str, Any], **settings: Any) -> None:
    loads.assert_loads(URL, expected, settings=settings)


def assert_nothing_is_left(hanging: Hanging) -> None:
    assert hanging.s3.open_uploads(BUCKET) == []
    assert hanging.s3.objects(BUCKET) == {}
    assert_no_threads()


def assert_no_threads() -> None:
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("dcp_s3-") and name != "dcp_s3-drain"]


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "PutObject", "throttled"])
def test_a_save_ends_at_its_deadline(hanging: Hanging, operation: str) -> None:
    if operation == "throttled":
        hanging.rule = lambda request: Fault.error(503, "SlowDown") if request.operation == "UploadPart" else None
    else:
        hanging.hang(operation, key="__0_")
    error = failure(lambda: save_two(save_timeout=1.5, retry_attempts=100), errors.DeadlineExceededError)
    assert hanging.reached.is_set() == (operation != "throttled")
    assert (error.setting, error.seconds) == ("DCP_S3_SAVE_TIMEOUT", 1.5)
    said = f"the save to {URL} was not done within DCP_S3_SAVE_TIMEOUT = 1.5 s: of about 6.0 MiB of rank 0"
    assert said in str(error)
    assert_nothing_is_left(hanging)


# --- Ctrl-C ------------------------------------------------------------------------------------------


def interrupt() -> None:
    """Ctrl-C. A signal that the main thread gets: another one would not wake it."""
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGINT)


def test_ctrl_c_during_a_save(hanging: Hanging, tmp_path: Path) -> None:
    hanging.hang("UploadPart", then=interrupt)
    failure(lambda: save_two(read_timeout=0.3, spill_dir=str(tmp_path)), KeyboardInterrupt)
    stop_draining()
    assert not list(tmp_path.glob("saves/*"))
    assert_nothing_is_left(hanging)


def test_a_load_ends_when_nothing_moves_and_by_ctrl_c(hanging: Hanging) -> None:
    save_two()
    hanging.hang("GetObject", key="__0_0")
    error = failure(lambda: load_two(make_state(), stall_timeout=1.5), errors.DeadlineExceededError)
    assert hanging.reached.is_set()
    assert "next to nothing moved for DCP_S3_STALL_TIMEOUT = 1.5 s" in str(error)
    hanging.reached.clear()
    hanging.hang("GetObject", key="__0_", then=interrupt)
    failure(lambda: load_two(make_state(), read_timeout=0.3), KeyboardInterrupt)
    assert_no_threads()


def _subgroup_job(url: str) -> None:
    members = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    state = {"w": random_values(0, 9, 4), f"of_{dist.get_rank()}": dist.get_rank()}
    dcp.save(state, storage_writer=S3StorageWriter(url), process_group=members)
    found = {"w": torch.zeros(9, 4), "of_1": 0, "of_2": 0}
    dcp.load(found, storage_reader=S3StorageReader(url), process_group=members)
    assert_same(found, {"w": random_values(0, 9, 4), "of_1": 1, "of_2": 2})


def test_a_process_group_that_is_a_part_of_the_world(root: str, bucket: str, memory_server: S3Server) -> None:
    run_ranks(3, _subgroup_job, root)
    (manifest,) = manifests(memory_server, bucket)
    assert manifest["world_size"] == 2
    # Ranks are numbered within the group.
    assert _ranks_with_objects(memory_server.handle.objects(bucket)) == {0, 1}


def _large_state(fill: float) -> dict[str, Any]:
    return {f"e{n}": distribute(torch.full((2, 1_500_000), fill + n), Shard(0)) for n in range(4)}


def _ranks_with_objects(keys: Any) -> set[int]:
    return {rank_of(key) for key in keys if key.endswith(".distcp")}


def _overwrite_failing(url: str) -> CheckpointException:
    writer = S3StorageWriter(url, overwrite=True, settings={**SMALL_PARTS, "retry_attempts": 2})
    dcp.save(_large_state(1.0), storage_writer=writer)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(_large_state(5.0), storage_writer=writer)
    state = _large_state(0.0)
    dcp.load(state, storage_reader=S3StorageReader(url))
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
    assert _ranks_with_objects(left) <= {1 - rank}
    assert len([key for key in keys if "manifest" in key]) == 1
