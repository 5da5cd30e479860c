"""What is tried again, what is not, and what it is called in the end."""

import threading
from collections.abc import Callable
from typing import Any

import botocore.exceptions as boto
import pytest
import urllib3.exceptions

from dcp_s3 import errors
from dcp_s3.limit import Cancelled, Deadline, Limit
from dcp_s3.s3 import diagnosis, retry
from dcp_s3.s3.pressure import Gate


def client_error(code: str, status: int) -> boto.ClientError:
    return boto.ClientError(
        {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject"
    )


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "backoff", lambda _: 0.0)


def failing(times: int, error: Exception) -> tuple[Callable[[], str], list[int]]:
    calls: list[int] = []

    def request() -> str:
        calls.append(1)
        if len(calls) <= times:
            raise error
        return "done"

    return request, calls


def call(request: Callable[[], str], *, operation: str, bucket: str, key: str = "", attempts: int, **limit: Any) -> str:
    return retry.Attempts(operation, bucket, key, most=attempts, limit=Limit(**limit)).run(request, Gate("test"))


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
    assert call(request, operation="PutObject", bucket="b", key="k", attempts=3) == "done"
    assert len(calls) == 3
    request, calls = failing(99, error)
    with pytest.raises(errors.TransferError, match="UploadPart on s3://b/some/key failed after 4 attempts") as failure:
        call(request, operation="UploadPart", bucket="b", key="some/key", attempts=4)
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
        (client_error("AccessDenied", 403), errors.AccessDeniedError),
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
        call(request, operation="GetObject", bucket="b", key="k", attempts=5)
    assert type(failure.value) is expected
    assert len(calls) == 1


def test_cancelling_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "backoff", lambda _: 3600.0)
    cancel = threading.Event()
    threading.Timer(0.05, cancel.set).start()
    request, calls = failing(99, client_error("SlowDown", 503))
    with pytest.raises(Cancelled):
        call(request, operation="GetObject", bucket="b", attempts=5, cancel=cancel)
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
        call(request, operation="UploadPart", bucket="b", attempts=1, cancel=cancel)


def deadline_in(seconds: float) -> Deadline:
    deadline = Deadline.start("DCP_S3_SAVE_TIMEOUT", seconds)
    assert deadline is not None
    return deadline


def test_a_wait_that_would_outlast_the_deadline_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "backoff", lambda _: 3600.0)
    error = client_error("SlowDown", 503)
    request, calls = failing(99, error)
    with pytest.raises(errors.DeadlineExceededError, match="1 attempts, the last: SlowDown: no") as failure:
        call(request, operation="GetObject", bucket="b", attempts=5, deadline=deadline_in(60))
    assert failure.value.__cause__ is error
    assert len(calls) == 1


@pytest.mark.parametrize(("attempt", "longest"), [(1, 0.1), (2, 0.2), (5, 1.6), (20, 10.0)])
def test_the_wait_doubles_up_to_a_cap(monkeypatch: pytest.MonkeyPatch, attempt: int, longest: float) -> None:
    monkeypatch.undo()
    assert retry.backoff(attempt, rng=lambda: 1.0) == pytest.approx(longest)
    assert retry.backoff(attempt, rng=lambda: 0.0) == 0.0


@pytest.mark.parametrize(
    ("code", "operation", "remedy"),
    [
        ("AccessDenied", "GetObject", "the credentials need s3:GetObject and s3:ListBucket here"),
        ("AccessDenied", "UploadPart", "the credentials need s3:PutObject here"),
        ("AccessDenied", "HeadObject", "DCP_S3_EXPECTED_BUCKET_OWNER"),
        ("SlowDown", "PutObject", "DCP_S3_PART_SIZE"),
        ("ServiceUnavailable", "PutObject", "the endpoint"),
    ],
)
def test_an_error_names_its_remedy(code: str, operation: str, remedy: str) -> None:
    failure = client_error(code, 403 if code == "AccessDenied" else 503)
    error = diagnosis.to_storage_error(failure, operation, "b", "k", 8)
    assert remedy in str(error).partition("Remedy: ")[2]
