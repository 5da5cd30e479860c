"""DCP_S3_STALL_TIMEOUT: what makes no progress ends, whatever S3 does instead of moving bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.limit import STALL_SETTING, Progress
from dcp_s3.offline.copy import copy
from dcp_s3.retention.prune import prune
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.objects import separate_objects

ROOT = f"s3://{BUCKET}/run"
STALL = 2.0
LONG = 30.0
MIB = 2**20
# Not one of them may end the work before the time without progress is over.
SETTINGS = {"stall_timeout": STALL, "retry_attempts": 100, "part_size": "5MiB"}


class Unwell:
    """What some requests get from now on, until it recovers."""

    def __init__(self, faulty: FaultyServer) -> None:
        self._faulty = faulty
        self._released = threading.Event()

    def never_answers(self) -> Fault:
        self._released.wait(LONG)
        return Fault.reset()

    def refuses(self) -> Fault:
        return Fault.error(503, "SlowDown")

    def trickles(self) -> Fault:
        return Fault.drip(1)

    def begin(self, fault: str, *operations: str, key: str = "") -> None:
        def rule(request: Any) -> Fault | None:
            return getattr(self, fault)() if request.operation in operations and key in request.key else None

        self._faulty.rule = rule

    def recover(self) -> None:
        self._released.set()
        self._faulty.rule = lambda _: None


@pytest.fixture
def unwell(faulty: FaultyServer) -> Iterator[Unwell]:
    found = Unwell(faulty)
    yield found
    found.recover()


def state() -> dict[str, torch.Tensor]:
    return {"large": torch.randn(MIB * 3 // 2), "small": torch.randn(100)}


def save(step: int = 1, **settings: Any) -> None:
    with separate_objects("large", "small"):
        dcp.save(state(), storage_writer=S3StorageWriter(f"{ROOT}/step-{step}", settings=settings))


def save_async() -> None:
    future: Any = dcp.async_save(state(), storage_writer=S3StorageWriter(f"{ROOT}/step-9", settings=SETTINGS))
    future.result(LONG)


def load() -> None:
    dcp.load(state(), storage_reader=S3StorageReader(f"{ROOT}/step-1", settings=SETTINGS))


_WRITES = ("PutObject", "UploadPart", "CreateMultipartUpload")
WORK: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "async save": (save_async, _WRITES),
    "load": (load, ("GetObject",)),
    "prune": (
        lambda: prune(ROOT, "latest:1", grace=0, force=True, settings=SETTINGS),
        ("DeleteObject", "DeleteObjects"),
    ),
    "copy": (lambda: copy(f"{ROOT}/step-1", f"s3://{BUCKET}/copy", settings=SETTINGS), ("CopyObject", "PutObject")),
}


def cause(error: BaseException) -> BaseException:
    if isinstance(error, CheckpointException):
        ((error, _),) = error.failures.values()
    return error


@pytest.mark.parametrize("fault", ["never_answers", "refuses", "trickles"])
@pytest.mark.parametrize("what", WORK)
def test_what_makes_no_progress_ends(unwell: Unwell, what: str, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    work, operations = WORK[what]
    for step in (1, 2):
        save(step)
    unwell.begin(fault, *operations)
    began = time.monotonic()
    with pytest.raises((CheckpointException, errors.StorageError)) as caught:
        work()
    assert STALL <= time.monotonic() - began < LONG, "neither before nor long after"
    error = cause(caught.value)
    assert isinstance(error, errors.DeadlineExceededError), repr(error)
    assert (error.setting, error.seconds, error.bucket) == (STALL_SETTING, STALL, BUCKET)
    assert error.operation in operations
    assert error.key in str(error)
    assert "had moved before" in str(error)
    assert "Remedy" in str(error)
    assert [each for each in caplog.messages if "next to nothing moved for" in each]
    unwell.recover()
    save(3)
    dcp.load(state(), storage_reader=S3StorageReader(f"{ROOT}/step-3"))


@pytest.mark.parametrize(
    ("operation", "size"), [("CompleteMultipartUpload", 11 * MIB), ("UploadPartCopy", 11 * MIB), ("CopyObject", MIB)]
)
def test_s3_may_be_long_at_work_if_it_says_so(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, operation: str, size: int
) -> None:
    monkeypatch.setattr("dcp_s3.s3.multipart.COPIED_PART_SIZE", 6 * MIB)
    store, data = S3Store(BUCKET, Settings(stall_timeout=0.5, retry_attempts=1)), bytes(size)
    store.put("from", data)
    faulty.once(operation, Fault.crawl(100))
    began = time.monotonic()
    store.copy(store, "from", "to")
    assert time.monotonic() - began > 1, "the answer came slowly"
    assert faulty.s3.read(BUCKET, "to") == data


def test_0_seconds_bound_nothing(unwell: Unwell) -> None:
    unwell.begin("refuses", *_WRITES)
    with pytest.raises(CheckpointException) as caught:
        save(stall_timeout=0, retry_attempts=3)
    assert isinstance(cause(caught.value), errors.TransferError)


# --- arithmetic, on a clock of its own ---------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("dcp_s3.limit.time", clock)
    return clock


@pytest.mark.parametrize(("seconds", "per_second", "ends"), [
    (600, 1, True), (600, 1000, True), (600, 64 * 1024, False), (600, 1100, False), (2, 1, True), (2, 64 * 1024, False),
    (86400, 1, True),
])  # fmt: skip
def test_a_slow_link_is_no_stall_and_a_trickle_is(clock: Clock, seconds: float, per_second: int, ends: bool) -> None:
    progress = Progress(seconds)
    with progress:
        for _ in range(3000):
            clock.now += seconds / 1000
            progress.moved(int(per_second * clock.now) - int(per_second * (clock.now - seconds / 1000)))
            if progress.is_over("GetObject"):
                break
    assert progress.is_over("GetObject") == ends
    if ends:
        assert clock.now <= 1.1 * seconds


def test_what_succeeds_is_progress_and_time_without_requests_is_none(clock: Clock) -> None:
    progress = Progress(10)
    with progress:
        for _ in range(5):
            clock.now += 9
            with progress:
                pass
            assert not progress.is_over("GetObject")
    clock.now += 100
    with progress:
        assert not progress.is_over("GetObject")
        clock.now += 9
        with pytest.raises(OSError), progress:
            raise OSError
        clock.now += 1
        assert progress.is_over("GetObject")
