"""What is tried again, what is not, what it is called in the end; and what makes no progress ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import botocore.exceptions as boto
import pytest
import torch
import torch.distributed.checkpoint as dcp
import urllib3.exceptions
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageWriter, errors
from dcp_s3.limit import STALL_SETTING, Cancelled, Deadline, Limit, Progress
from dcp_s3.memory import Piece
from dcp_s3.retention.prune import prune
from dcp_s3.s3 import diagnosis, retry
from dcp_s3.s3.body import Chunks, GatherBody
from dcp_s3.s3.pressure import KnownBucket
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault


def client_error(code: str, status: int) -> boto.ClientError:
    return boto.ClientError(
        {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject"
    )


def failing(times: int, error: Exception) -> tuple[Callable[[], str], list[int]]:
    calls: list[int] = []

    def request() -> str:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return "done"

    return request, calls


def call(request: Any, *, operation: str = "GetObject", key: str = "", attempts: int = 5, **limit: Any) -> str:
    return retry.Attempts(operation, "b", key, most=attempts, limit=Limit(**limit)).run(request, KnownBucket("test"))


PASSING = [
    client_error("SlowDown", 503),
    client_error("InternalError", 500),
    client_error("BadDigest", 400),
    client_error("RequestTimeout", 400),
    *(client_error(str(status), status) for status in (502, 507, 509, 520, 530, 598, 599)),
    ConnectionResetError("reset"),
    urllib3.exceptions.ProtocolError("broken"),
    boto.ReadTimeoutError(endpoint_url="http://x"),
    boto.EndpointConnectionError(endpoint_url="http://x"),
    boto.ConnectionClosedError(endpoint_url="http://x"),
    diagnosis.TruncatedBodyError("short"),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_what_passes_is_tried_again_and_the_last_error_says_what_failed(error: Exception) -> None:
    request, calls = failing(2, error)
    assert call(request, operation="PutObject", key="k", attempts=3) == "done"
    assert len(calls) == 3
    request, calls = failing(99, error)
    with pytest.raises(errors.TransferError, match="UploadPart on s3://b/some/key failed after 4 attempts") as failure:
        call(request, operation="UploadPart", key="some/key", attempts=4)
    assert len(calls) == 4
    raised = failure.value
    assert (raised.bucket, raised.key, raised.operation, raised.attempts) == ("b", "some/key", "UploadPart", 4)
    assert raised.__cause__ is error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (client_error("NoSuchBucket", 404), errors.BucketNotFoundError),
        (client_error("NoSuchKey", 404), errors.ObjectNotFoundError),
        (client_error("404", 404), errors.ObjectNotFoundError),
        (client_error("InvalidAccessKeyId", 403), errors.CredentialsError),
        (client_error("SignatureDoesNotMatch", 403), errors.CredentialsError),
        (client_error("ExpiredToken", 400), errors.CredentialsError),
        (client_error("PreconditionFailed", 412), errors.PreconditionFailedError),
        (client_error("InvalidArgument", 400), errors.StorageError),
        (client_error("NotImplemented", 501), errors.StorageError),
        (client_error("505", 505), errors.StorageError),
        (boto.NoCredentialsError(), errors.CredentialsError),
    ],
    ids=repr,
)
def test_what_does_not_pass_fails_at_once_by_its_own_name(error: Exception, expected: type[Exception]) -> None:
    request, calls = failing(99, error)
    with pytest.raises(expected, match="Remedy") as failure:
        call(request, key="k")
    assert type(failure.value) is expected
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("code", "operation", "expected", "remedy"),
    [
        ("AccessDenied", "GetObject", errors.AccessDeniedError, "need s3:GetObject and s3:ListBucket here"),
        ("AccessDenied", "UploadPart", errors.AccessDeniedError, "the credentials need s3:PutObject here"),
        ("AccessDenied", "HeadObject", errors.AccessDeniedError, "DCP_S3_EXPECTED_BUCKET_OWNER"),
        ("SlowDown", "PutObject", errors.TransferError, "DCP_S3_PART_SIZE"),
        ("ServiceUnavailable", "PutObject", errors.TransferError, "the endpoint"),
    ],
)
def test_an_error_names_its_remedy(code: str, operation: str, expected: type[Exception], remedy: str) -> None:
    request, _ = failing(99, client_error(code, 403 if code == "AccessDenied" else 503))
    with pytest.raises(expected, match=f"Remedy: .*{remedy}"):
        call(request, operation=operation, key="k", attempts=1)


def test_cancelling_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "backoff", lambda _: 3600.0)
    cancel = threading.Event()
    threading.Timer(0.05, cancel.set).start()
    request, calls = failing(99, client_error("SlowDown", 503))
    with pytest.raises(Cancelled):
        call(request, cancel=cancel)
    assert len(calls) == 1


@pytest.mark.parametrize("error", [boto.ConnectionClosedError(endpoint_url="http://x"), KeyError("x")])
def test_what_fails_when_it_is_cancelled_is_not_the_cause(error: Exception) -> None:
    """Cancelling breaks off a body that is being sent; on the last attempt that looked like a failure of its own."""
    cancel = threading.Event()

    def request() -> str:
        cancel.set()
        raise error

    expected = type(error) if isinstance(error, KeyError) else Cancelled
    with pytest.raises(expected):
        call(request, operation="UploadPart", attempts=1, cancel=cancel)


def test_a_wait_that_would_outlast_the_deadline_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "backoff", lambda _: 3600.0)
    error, deadline = client_error("SlowDown", 503), Deadline("DCP_S3_SAVE_TIMEOUT", 60.0, time.monotonic() + 60.0)
    request, calls = failing(99, error)
    with pytest.raises(errors.DeadlineExceededError, match="1 attempts, the last: SlowDown: no") as failure:
        call(request, deadline=deadline)
    assert failure.value.__cause__ is error
    assert len(calls) == 1


@pytest.mark.parametrize(("attempt", "longest"), [(1, 0.1), (2, 0.2), (5, 1.6), (20, 10.0)])
def test_the_wait_doubles_up_to_a_cap(monkeypatch: pytest.MonkeyPatch, attempt: int, longest: float) -> None:
    monkeypatch.undo()
    assert retry.backoff(attempt, rng=lambda: 1.0) == pytest.approx(longest)
    assert retry.backoff(attempt, rng=lambda: 0.0) == 0.0


def test_a_retry_is_said_once_for_each_cause(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_told", {})
    monkeypatch.setattr(diagnosis, "time", clock := Clock())
    caplog.set_level("INFO")
    left = [(0, "SlowDown"), (1, "SlowDown"), (2, "InternalError"), (299, "SlowDown"), (301, "SlowDown"),
            (302, "SlowDown")]  # fmt: skip

    def request() -> str:
        if left:
            clock.now, code = left.pop(0)
            raise client_error(code, 503)
        return "done"

    assert call(request, attempts=9) == "done"
    assert [each.partition("attempt ")[2][:1] for each in caplog.messages if "attempt " in each] == ["2", "4", "6"]


# --- DCP_S3_STALL_TIMEOUT: whatever S3 does instead of moving bytes ----------------------------------

ROOT = f"s3://{BUCKET}/run"
STALL = 2.0
LONG = 30.0
FAULTS = {"never answers": Fault.straggle(LONG), "refuses": Fault.error(503, "SlowDown"), "trickles": Fault.drip(1)}
MIB = 2**20
# Not one of them may end the work before the time without progress is over.
SETTINGS = {"stall_timeout": STALL, "retry_attempts": 100, "part_size": "5MiB"}


def save_async(_: S3Store) -> None:
    state, writer = {"x": torch.randn(MIB * 3 // 2)}, S3StorageWriter(f"{ROOT}/step-3", settings=SETTINGS)
    future: Any = dcp.async_save(state, storage_writer=writer)
    future.result(LONG)


WORK: dict[str, tuple[Callable[[S3Store], object], tuple[str, ...]]] = {
    "async save": (save_async, ("PutObject", "UploadPart", "CreateMultipartUpload")),
    "read": (lambda store: store.read("k", 0, memoryview(bytearray(MIB))), ("GetObject",)),
    "prune": (
        lambda _: prune(ROOT, "latest:1", grace=0, force=True, settings=SETTINGS), ("DeleteObject", "DeleteObjects"),
    ),
    "copy": (lambda store: store.copy(store, "k", "to"), ("CopyObject",)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("what", WORK)
def test_what_makes_no_progress_ends(
    faulty: FaultyServer, what: str, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, (work, operations) = S3Store(BUCKET, Settings(**SETTINGS)), WORK[what]
    store.put("k", bytes(MIB))
    for step in (1, 2):
        dcp.save({"x": torch.ones(9)}, storage_writer=S3StorageWriter(f"{ROOT}/step-{step}"))
    faulty.rule = lambda request: FAULTS[fault] if request.operation in operations else None
    began = time.monotonic()
    with pytest.raises((CheckpointException, errors.StorageError)) as caught:
        work(store)
    assert STALL <= time.monotonic() - began < LONG, "neither before nor long after"
    error: Any = caught.value
    if isinstance(error, CheckpointException):
        ((error, _),) = error.failures.values()
    assert isinstance(error, errors.DeadlineExceededError), repr(error)
    assert (error.setting, error.seconds, error.bucket) == (STALL_SETTING, STALL, BUCKET)
    assert error.operation in operations
    assert error.key in str(error)
    assert "had moved before" in str(error)
    assert "Remedy" in str(error)
    assert [each for each in caplog.messages if "next to nothing moved for" in each]
    faulty.rule = lambda _: None
    work(store)


@pytest.mark.parametrize(
    ("operation", "size", "speed", "stall"),
    [
        ("CompleteMultipartUpload", 11 * MIB, 100, 0.5), ("UploadPartCopy", 11 * MIB, 100, 0.5),
        ("CopyObject", MIB, 100, 0.5), ("GetObject", 12 * MIB, 4 * MIB, 2.0),
    ],
)  # fmt: skip
def test_what_moves_slowly_or_says_that_it_is_at_work_may_take_longer_than_that(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch, operation: str, size: int, speed: float, stall: float
) -> None:
    monkeypatch.setattr("dcp_s3.s3.multipart.COPIED_PART_SIZE", 6 * MIB)
    store, data = S3Store(BUCKET, Settings(stall_timeout=stall, retry_attempts=1)), bytes(size)
    S3Store(BUCKET, Settings()).put("from", data)  # in its own time
    faulty.once(operation, Fault.crawl(speed))
    began = time.monotonic()
    if operation == "GetObject":
        assert store.get("from").data == data
    else:
        store.copy(store, "from", "to")
        assert faulty.s3.read(BUCKET, "to") == data
    assert time.monotonic() - began > 2 * min(stall, 1), "the answer came slowly"


def test_an_answer_that_trickles_without_a_pause_ends(faulty: FaultyServer) -> None:
    """No timeout of a socket is ever over."""
    store = S3Store(BUCKET, Settings(stall_timeout=1.0))
    store.put("k", b"abc")
    faulty.rule = lambda _: Fault.drip(100)
    with pytest.raises(errors.DeadlineExceededError, match=STALL_SETTING):
        store.get("k")


def test_what_is_sent_again_and_slowly_ends() -> None:
    body, sent = GatherBody([memoryview(bytes(3 * MIB))], 3 * MIB), list[int]()

    def send() -> None:
        for piece in Chunks(body):
            sent.append(len(piece))
            if sum(sent) > 3 * MIB:  # each byte is at most progress once
                time.sleep(0.1)
        raise ConnectionResetError

    attempts = retry.Attempts("UploadPart", "b", "k", most=9, limit=Limit(progress=Progress(0.5)))
    with pytest.raises(errors.DeadlineExceededError, match=r"3\.0 MiB had moved before; 2 attempts"):
        attempts.run(send, KnownBucket("test"))
    assert sum(sent) < 6 * MIB, "it was broken off"


def test_what_has_stalled_once_begins_nothing() -> None:
    progress = Progress(1e-9)
    assert progress.is_over("another one")
    attempts = retry.Attempts("PutObject", "b", "k", limit=Limit(progress=progress))
    with pytest.raises(errors.DeadlineExceededError, match="it was not begun"):
        attempts.run(lambda: pytest.fail("it was begun"), KnownBucket("test"))


def test_0_seconds_bound_nothing(faulty: FaultyServer) -> None:
    faulty.rule = lambda _: FAULTS["refuses"]
    with pytest.raises(errors.TransferError, match="after 3 attempts"):
        S3Store(BUCKET, Settings(stall_timeout=0, retry_attempts=3)).put_stream("k", 1, [Piece.of(b"x")])


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


def test_what_came_while_the_process_was_stopped_counts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "time", clock)
    progress = Progress(10)
    attempts = retry.Attempts("GetObject", "b", "k", limit=Limit(progress=progress))

    def stopped(_: object) -> int:
        clock.now += 100
        return MIB

    def request() -> None:
        progress.moved(attempts.receive(stopped, None))
        assert attempts.receive(lambda _: 1, None) == 1

    attempts.run(request, KnownBucket("test"))


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
