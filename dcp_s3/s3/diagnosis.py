"""Failures of requests: which to retry and say so once for each cause, and which error and remedy the others get."""

from __future__ import annotations

import http.client
import logging
import threading
import time
from urllib.parse import urlsplit

import botocore.exceptions as boto
import urllib3.exceptions

from dcp_s3 import errors
from dcp_s3.process import reset_in_child

logger = logging.getLogger(__name__)

AGAIN = 300.0
"""Seconds for which a cause is not named again."""

_told: dict[str, float] = {}
_lock = threading.Lock()

_RETRYABLE_STATUS = frozenset({408, 409, 425, 429})
# 5xx that last: what is not implemented never will be. Proxies have many 5xx of their own (Cloudflare's 520 to 530).
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
    "CopyObject": "GetObject and s3:PutObject",
    "UploadPartCopy": "GetObject and s3:PutObject",
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
    "DeleteObjects": "DeleteObject",
    "ListObjectsV2": "ListBucket",
    "ListObjectVersions": "ListBucketVersions",
    "ListMultipartUploads": "ListBucketMultipartUploads",
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
REQUEST_ERRORS: tuple[type[Exception], ...] = (
    boto.BotoCoreError,
    boto.ClientError,
    *_CONNECTION_ERRORS,
)


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


def answered_code(error: errors.StorageError) -> str:
    """`error_code` of the answer behind a `StorageError`."""
    return error_code(error.__cause__) if isinstance(error.__cause__, Exception) else ""


def answered_status(error: errors.StorageError) -> int:
    """`status_code` of the answer behind a `StorageError`, 0 if there was none."""
    return status_code(error.__cause__) if isinstance(error.__cause__, Exception) else 0


def region_of(error: Exception) -> str:
    """The bucket's region according to S3, empty if it does not say."""
    if not isinstance(error, boto.ClientError):
        return ""
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region") or "")


def is_retryable(error: Exception) -> bool:
    """Whether the same request may succeed later."""
    if isinstance(error, boto.ClientError):
        status = status_code(error)
        is_passing = status in _RETRYABLE_STATUS or (500 <= status < 600 and status not in _LASTING_STATUS)
        return is_passing or error_code(error) in _RETRYABLE_CODES
    if isinstance(error, (boto.ProxyConnectionError, boto.SSLError)) and "CERTIFICATE" in str(error).upper():
        return False
    return isinstance(error, _CONNECTION_ERRORS)


def is_throttling(error: BaseException) -> bool:
    """Whether S3 asks for fewer requests."""
    return isinstance(error, boto.ClientError) and (
        status_code(error) in _THROTTLING_STATUS or error_code(error) in _THROTTLING_CODES
    )


def to_storage_error(error: Exception, operation: str, bucket: str, key: str, attempts: int) -> errors.StorageError:
    """The error of `dcp_s3.errors` for a failed request, with a remedy."""
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
        # botocore follows a redirect once; it could not follow this one.
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
    elif status == 416:
        cls = errors.OutOfRangeError
        remedy = "the object has fewer bytes than were asked for: it was cut short, or replaced by another one"
    elif status == 412:
        cls = errors.PreconditionFailedError
        remedy = "the object was written or changed by someone else meanwhile"
    elif status in (401, 403) or code == "AccessDenied":  # DeleteObjects says it of a key inside a 200
        cls = errors.AccessDeniedError
        needed = permission_of(operation)
        if needed == "s3:GetObject":
            needed = "s3:GetObject and s3:ListBucket here (without s3:ListBucket a missing object reads as forbidden)"
        else:
            needed += " here"
        remedy = (
            f"the credentials need {needed}; with SSE-KMS also kms:GenerateDataKey and kms:Decrypt on the key; and the "
            "bucket must belong to DCP_S3_EXPECTED_BUCKET_OWNER, if that is set. See docs/security.md"
        )
    elif code in _THROTTLING_CODES:
        cls = errors.TransferError
        remedy = (
            "raise DCP_S3_PART_SIZE, or lower DCP_S3_CONCURRENCY: fewer, larger requests; "
            "DCP_S3_RETRY_ATTEMPTS gives it longer"
        )
    elif is_retryable(error):
        cls = errors.TransferError
        remedy = "check the endpoint and the network; DCP_S3_RETRY_ATTEMPTS and DCP_S3_READ_TIMEOUT give it longer"
    else:
        remedy = "S3 refused the request as it is; see the cause"
    tries = f" after {attempts} attempts" if attempts > 1 else ""
    return cls(
        f"{what}{tries}: {describe(error)}. Remedy: {remedy}",
        bucket=bucket,
        key=key,
        operation=operation,
        attempts=attempts,
    )


def permission_of(operation: str) -> str:
    """The IAM action that allows an S3 operation: most have its name, the others are in a table."""
    return "s3:" + _PERMISSIONS.get(operation, operation)


def describe(error: Exception) -> str:
    """The message of S3 or the connection, without botocore's remark about its own retries (there are none)."""
    if isinstance(error, boto.ClientError):
        answer = error.response.get("Error", {})
        return f"{answer.get('Code', 'Unknown')}: {answer.get('Message', '')}".rstrip(". :")
    return f"{type(error).__name__}: {error}".rstrip(".")


# --- retries are said at once, and once for each cause ---------------------------------------------


@reset_in_child
def _begin_anew() -> None:
    global _lock
    _lock = threading.Lock()
    _told.clear()


def tell_retry(error: Exception, bucket: str, *, made: int, attempts: int, wait: float) -> None:
    """Log at INFO why a request is tried again in ``wait`` seconds, unless the same was said in the last `AGAIN`
    seconds."""
    if isinstance(error, boto.ClientError):
        answer = " ".join(map(str, filter(None, (status_code(error), error_code(error)))))
        cause = f"S3 answers {answer or describe(error)} (bucket {bucket!r})"
    else:
        host = urlsplit(str(getattr(error, "kwargs", {}).get("endpoint_url", ""))).netloc.rpartition("@")[2]
        cause = f"{host or f'the endpoint of bucket {bucket!r}'} does not answer ({type(error).__name__})"
    now = time.monotonic()
    with _lock:
        if now - _told.get(cause, -AGAIN) < AGAIN:
            return
        _told[cause] = now
    logger.info("%s: attempt %d of %d, waiting %.1f s", cause, made + 1, attempts, wait)
