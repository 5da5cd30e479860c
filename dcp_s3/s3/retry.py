"""Which failures of a request pass by themselves, how long to wait, and what the others are called.

One loop for every request of the package: `call` tries, waits with full jitter and exponential backoff
(https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/), and raises one error of
`dcp_s3.errors` that names bucket, key, operation, attempts and the last cause.
"""

from __future__ import annotations

import http.client
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import botocore.exceptions as boto
import urllib3.exceptions

from dcp_s3 import errors
from dcp_s3.s3.deadline import Deadline
from dcp_s3.s3.throttle import Gate
from dcp_s3.tracebacks import without_tracebacks

logger = logging.getLogger(__name__)

T = TypeVar("T")

# First wait about 0.1 s (a lost connection), at most 10 s each (throttling lasts for seconds, not minutes).
BACKOFF_BASE = 0.1
BACKOFF_CAP = 10.0

_RETRYABLE_STATUS = frozenset({408, 409, 425, 429})
# Of the 5xx, which proxies have many of their own of (Cloudflare's 520 to 530): what is not implemented never will be.
_LASTING_STATUS = frozenset({501, 505})
_RETRYABLE_CODES = frozenset(
    {
        "BadDigest",
        "IncompleteBody", "InternalError", "OperationAborted", "RequestTimeTooSkewed",
        "RequestTimeout", "RequestTimeoutException",
        "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "TooManyRequests",
        "XAmzContentChecksumMismatch",
    }
)  # fmt: skip
_THROTTLING_CODES = frozenset({"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"})
# 503 whatever its code: S3 has two (SlowDown, ServiceUnavailable), other stores their own, answers to HEAD none.
_THROTTLING_STATUS = frozenset({429, 503})
_CREDENTIAL_CODES = frozenset(
    {
        "AuthorizationHeaderMalformed", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken",
        "SignatureDoesNotMatch", "TokenRefreshRequired",
    }
)  # fmt: skip
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_REDIRECTS = frozenset({301, 302, 307, 308})
_OTHER_REGION_CODES = frozenset({"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-with-s3-policy-actions.html
_PERMISSIONS = {
    "HeadObject": "GetObject",
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
    "DeleteObjects": "DeleteObject",
    "ListObjectsV2": "ListBucket",
    "ListObjectVersions": "ListBucketVersions",
    "ListMultipartUploads": "ListBucketMultipartUploads",
    "ListParts": "ListMultipartUploadParts",
}
_CONNECTION_ERRORS: tuple[type[Exception], ...] = (
    boto.HTTPClientError,
    boto.ConnectionError,
    boto.IncompleteReadError,
    boto.ResponseStreamingError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
)
_REQUEST_ERRORS: tuple[type[Exception], ...] = (
    boto.BotoCoreError,
    boto.ClientError,
    *_CONNECTION_ERRORS,
)


class Cancelled(Exception):  # noqa: N818 - not an error of its own: another one is on its way to the user
    """The save or load has failed elsewhere; this request gives up."""


class TruncatedBodyError(OSError):
    """A response body ended before its announced length."""


def error_code(error: Exception) -> str:
    """S3's error code, or an empty string. HEAD answers have only a status, which is then the code."""
    if isinstance(error, boto.ClientError):
        return str(error.response.get("Error", {}).get("Code", ""))
    return ""


def status_code(error: Exception) -> int:
    """The HTTP status of an answer, 0 if there was none."""
    if isinstance(error, boto.ClientError):
        return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return 0


def region_of(error: Exception) -> str:
    """Where S3 says that the bucket is, empty if it does not say."""
    if not isinstance(error, boto.ClientError):
        return ""
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region") or "")


def is_retryable(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, boto.ClientError):
        return error_code(error) in _RETRYABLE_CODES or is_passing(status_code(error))
    if isinstance(error, (boto.ProxyConnectionError, boto.SSLError)) and "CERTIFICATE" in str(error).upper():
        return False
    return isinstance(error, _CONNECTION_ERRORS)


def is_passing(status: int) -> bool:
    """Whether the same request may get another HTTP status later."""
    return status in _RETRYABLE_STATUS or (500 <= status < 600 and status not in _LASTING_STATUS)


def is_throttling(error: BaseException) -> bool:
    """Whether S3 asks for fewer requests."""
    return isinstance(error, boto.ClientError) and (
        status_code(error) in _THROTTLING_STATUS or error_code(error) in _THROTTLING_CODES
    )


def backoff(attempt: int, *, rng: Callable[[], float] = random.random) -> float:
    """Seconds to wait after failed attempt number ``attempt`` (from 1), with full jitter."""
    return float(min(BACKOFF_CAP, BACKOFF_BASE * 2 ** (attempt - 1)) * rng())


def call(
    request: Callable[[], T],
    *,
    operation: str,
    bucket: str,
    key: str = "",
    attempts: int,
    patience: float | None = None,
    deadline: Deadline | None = None,
    cancel: threading.Event | None = None,
    recover: Callable[[Exception], T | None] | None = None,
    gate: Gate | None = None,
    data: bool = False,
) -> T:
    """Run ``request`` until it succeeds, fails for good, or ``attempts`` are used up.

    Args:
        request: one attempt; raises what botocore, urllib3 or the socket raise.
        operation: S3's name of the operation, for messages.
        bucket: for messages.
        key: for messages.
        attempts: tries in all.
        patience: seconds after which no further attempt is made; None for no such limit. Waiting at the gate counts: it
            is closed only because S3 throttles.
        deadline: after which no further attempt is made.
        cancel: when set, no further attempt is made.
        recover: called with the error of each failed attempt; may return a result (not None) when the error shows that
            the work is done: the answer to an earlier attempt was lost, or something on the way (a proxy) sent the
            request twice.
        gate: is told when S3 throttles.
        data: whether each attempt waits for its turn at the gate.

    Raises:
        Cancelled: ``cancel`` was set.
        DeadlineExceededError: ``deadline`` has passed.
        StorageError: a subclass for the failure.
    """
    attempt = 0
    started = time.monotonic()
    last = ""  # not the error itself, whose traceback would keep this frame

    def check() -> None:
        if cancel is not None and cancel.is_set():
            raise Cancelled
        if deadline is not None and deadline.passed:
            raise _too_late(deadline, operation, bucket, key, attempt, last)

    while True:
        check()
        if gate is not None and data:
            left = [max(0.0, patience - (time.monotonic() - started))] if patience is not None else []
            left += [deadline.left] if deadline is not None else []
            if not gate.enter(cancel=cancel, timeout=min(left, default=None)):
                check()
                raise _never_admitted(operation, bucket, key, attempt, time.monotonic() - started)
        attempt += 1
        try:
            return request() if gate is None else _through(gate, request, data=data)
        except _REQUEST_ERRORS as error:
            without_tracebacks(error)  # urllib3's are cycles, with the bytes that were being sent in them
            if recover is not None:
                done = recover(error)
                if done is not None:
                    return done
            if attempt >= attempts or not is_retryable(error):
                raise to_storage_error(error, operation, bucket, key, attempt) from error
            wait = backoff(attempt)
            last = _describe(error)
            if deadline is not None and wait > deadline.left:
                raise _too_late(deadline, operation, bucket, key, attempt, last) from error
            if patience is not None and time.monotonic() - started + wait > patience:
                raise to_storage_error(error, operation, bucket, key, attempt) from error
            logger.debug("%s s3://%s/%s failed (%s); attempt %d of %d, next in %.2f s",
                         operation, bucket, key, error, attempt, attempts, wait)  # fmt: skip
        if cancel is None:
            time.sleep(wait)
        elif cancel.wait(wait):
            raise Cancelled


def _through(gate: Gate, request: Callable[[], T], *, data: bool) -> T:
    """One attempt, of whose outcome the gate is told; for data, it has been admitted."""
    began = time.monotonic()
    try:
        result = request()
    except BaseException as error:
        throttled = is_throttling(error)
        if data:
            gate.leave(began, succeeded=False, throttled=throttled)
        elif throttled:
            gate.signal(began)
        raise
    if data:
        gate.leave(began, succeeded=True, throttled=False)
    return result


def _too_late(
    deadline: Deadline, operation: str, bucket: str, key: str, attempts: int, last: str
) -> errors.DeadlineExceededError:
    where = f"s3://{bucket}/{key}" if key else f"bucket {bucket!r}"
    progress = f"{attempts} attempts, the last: {last}" if attempts else "it was not begun"
    error = deadline.error(f"{operation} on {where}", progress)
    error.bucket, error.key, error.operation, error.attempts = bucket, key, operation, attempts
    return error


def _never_admitted(operation: str, bucket: str, key: str, attempts: int, seconds: float) -> errors.TransferError:
    tried = f" after {attempts} attempts" if attempts else ""
    return errors.TransferError(
        f"{operation} on s3://{bucket}/{key} failed{tried}: S3 throttles, and its turn did not come in "
        f"{seconds:.1f} s. Remedy: lower DCP_S3_CONCURRENCY, or spread the load with DCP_S3_PREFIX_SPREAD",
        bucket=bucket,
        key=key,
        operation=operation,
        attempts=attempts,
    )


def to_storage_error(error: Exception, operation: str, bucket: str, key: str, attempts: int) -> errors.StorageError:
    """The error of `dcp_s3.errors` for a failed request, with what to do about it."""
    code, status = error_code(error), status_code(error)
    where = f"s3://{bucket}/{key}" if key else f"bucket {bucket!r}"
    what = f"{operation} on {where} failed"
    cls: type[errors.StorageError] = errors.StorageError
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError,
                          boto.ProfileNotFound, boto.TokenRetrievalError)):  # fmt: skip
        cls = errors.CredentialsError
        remedy = (
            "give AWS credentials by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE), or an "
            "instance or pod role"
        )
    elif status in _REDIRECTS or (code in _OTHER_REGION_CODES and region_of(error)):
        # botocore follows a redirect once; this one it could not.
        region = region_of(error)
        remedy = (
            f"the bucket is in {region}: set DCP_S3_REGION={region}"
            if region
            else "the bucket is in another region, or at another endpoint: set DCP_S3_REGION or DCP_S3_ENDPOINT_URL"
        )
    elif code in _CREDENTIAL_CODES:
        cls = errors.CredentialsError
        remedy = "check the credentials, their expiry, the region and the clock of this host"
    elif code == "NoSuchBucket":
        cls = errors.BucketNotFoundError
        remedy = "create the bucket, or check its name, the region and DCP_S3_ENDPOINT_URL"
    elif code in ("NoSuchKey", "NotFound") or status == 404:
        cls = errors.ObjectNotFoundError
        remedy = "check the URL; the object may have been deleted meanwhile"
    elif status == 412:
        cls = errors.PreconditionFailedError
        remedy = "the object was written or changed by someone else meanwhile"
    elif status in (401, 403) or code == "AccessDenied":  # DeleteObjects says it of a key inside a 200
        cls = errors.AccessDeniedError
        remedy = _remedy_of_refusal(operation)
    elif is_retryable(error):
        cls = errors.TransferError
        remedy = "check the endpoint and the network; DCP_S3_RETRY_ATTEMPTS and DCP_S3_READ_TIMEOUT give it longer"
    else:
        remedy = "S3 refused the request as it is; see the cause"
    tries = f" after {attempts} attempts" if attempts > 1 else ""
    return cls(
        f"{what}{tries}: {_describe(error)}. Remedy: {remedy}",
        bucket=bucket,
        key=key,
        operation=operation,
        attempts=attempts,
    )


def _remedy_of_refusal(operation: str) -> str:
    needed = permission_of(operation)
    why = ""
    if needed == "s3:GetObject":
        needed += " and s3:ListBucket"
        why = " (without s3:ListBucket a missing object reads as forbidden)"
    return (
        f"the credentials need {needed} here{why}; with SSE-KMS also kms:GenerateDataKey and kms:Decrypt on the key; "
        "and the bucket must belong to DCP_S3_EXPECTED_BUCKET_OWNER, if that is set. See docs/security.md"
    )


def permission_of(operation: str) -> str:
    """The IAM action that allows an S3 operation: most are called like it, those that are not are listed."""
    return "s3:" + _PERMISSIONS.get(operation, operation)


def _describe(error: Exception) -> str:
    """What S3 or the connection said, without botocore's remark about its own retries (there are none)."""
    if isinstance(error, boto.ClientError):
        answer = error.response.get("Error", {})
        return f"{answer.get('Code', 'Unknown')}: {answer.get('Message', '')}".rstrip(". :")
    return f"{type(error).__name__}: {error}".rstrip(".")


def expect(result: Any, name: str, operation: str, bucket: str, key: str) -> str:
    """A text field that S3's answer must have.

    Raises:
        StorageError: it is missing.
    """
    value = result.get(name)
    if not isinstance(value, str) or not value:
        raise errors.StorageError(
            f"{operation} on s3://{bucket}/{key} answered without {name}: is the endpoint an S3 server?",
            bucket=bucket, key=key, operation=operation,
        )  # fmt: skip
    return value
