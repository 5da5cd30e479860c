"""Failures of requests: which to retry and say so once for each cause, and which error and remedy the others get."""

from __future__ import annotations

import http.client
import logging
import time
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import urlsplit

import botocore.exceptions as boto
import urllib3.exceptions

from dcp_s3 import errors
from dcp_s3.process import reset_in_child

logger = logging.getLogger(__name__)

AGAIN = 300.0
"""Seconds for which a cause is not named again."""

_told: dict[str, float] = {}
reset_in_child(_told.clear)

_RETRYABLE_STATUS = frozenset({408, 409, 425, 429})
# 5xx that last: what is not implemented never will be. Proxies have many 5xx of their own (Cloudflare's 520 to 530).
_LASTING_STATUS = frozenset({501, 505})
_THROTTLING_CODES = frozenset({"SlowDown", "Throttling", "ThrottlingException", "TooManyRequests"})
_RETRYABLE_CODES = _THROTTLING_CODES | {
    "BadDigest", "IncompleteBody", "InternalError", "OperationAborted", "RequestTimeTooSkewed", "RequestTimeout",
    "RequestTimeoutException", "ServiceUnavailable", "XAmzContentChecksumMismatch",
}  # fmt: skip
# 503 whatever its code: S3 has two (SlowDown, ServiceUnavailable), other stores their own, answers to HEAD none.
_THROTTLING_STATUS = frozenset({429, 503})
_NO_CREDENTIALS = (
    boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError, boto.ProfileNotFound,
    boto.TokenRetrievalError,
)  # fmt: skip
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
_REDIRECTS = frozenset({301, 302, 307, 308})
_OTHER_REGION_CODES = frozenset({"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"})
# What S3 refuses, by codes or statuses, with its error and remedy; the first one that matches counts.
_REFUSALS: tuple[tuple[Collection[str | int], type[errors.StorageError], str], ...] = (
    (
        ("AuthorizationHeaderMalformed", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch",
         "TokenRefreshRequired"),
        errors.CredentialsError, "check the credentials, their expiry, the region and the clock of this host",
    ),
    (
        ("NoSuchBucket",),
        errors.BucketNotFoundError, "create the bucket, or check its name, the region and DCP_S3_ENDPOINT_URL",
    ),
    (
        ("NoSuchKey", "NotFound", 404),
        errors.ObjectNotFoundError, "check the URL; the object may have been deleted meanwhile",
    ),
    (
        (416,), errors.OutOfRangeError,
        "the object has fewer bytes than were asked for: it was cut short, or replaced by another one",
    ),
    ((412,), errors.PreconditionFailedError, "the object was written or changed by someone else meanwhile"),
    (
        ("AccessDenied", 401, 403), errors.AccessDeniedError,  # the code alone: of a key, inside a 200 of DeleteObjects
        "with SSE-KMS also kms:GenerateDataKey and kms:Decrypt on the key; and the bucket must belong to "
        "DCP_S3_EXPECTED_BUCKET_OWNER, if that is set. See docs/security.md",
    ),
    (
        _THROTTLING_CODES, errors.TransferError,
        "raise DCP_S3_PART_SIZE, or lower DCP_S3_CONCURRENCY: fewer, larger requests; DCP_S3_RETRY_ATTEMPTS gives it "
        "longer",
    ),
)  # fmt: skip
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
    boto.HTTPClientError, boto.ConnectionError, boto.IncompleteReadError, boto.ResponseStreamingError,
    urllib3.exceptions.HTTPError, http.client.HTTPException, OSError,
)  # fmt: skip
REQUEST_ERRORS: tuple[type[Exception], ...] = (boto.BotoCoreError, boto.ClientError, *_CONNECTION_ERRORS)


class TruncatedBodyError(OSError):
    """A response body ended before its announced length."""


class Failure(NamedTuple):
    """A request that failed, as S3 or the connection says."""

    code: str
    """S3's error code; empty if there was no answer. Answers to HEAD have only a status, which is then the code."""
    status: int
    """The HTTP status of the answer; 0 if there was none."""
    message: str
    """What happened, without botocore's remark about its own retries (there are none)."""
    passes: bool
    """Whether the same request may succeed later."""
    throttles: bool
    """Whether S3 asks for fewer requests."""


def classify(error: BaseException | None) -> Failure:
    """What is to be known of an error of botocore or below."""
    if isinstance(error, boto.ClientError):
        answer = error.response.get("Error", {})
        code = str(answer.get("Code", ""))
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        is_passing = status in _RETRYABLE_STATUS or (500 <= status < 600 and status not in _LASTING_STATUS)
        return Failure(
            code, status, f"{code or 'Unknown'}: {answer.get('Message', '')}".rstrip(". :"),
            passes=is_passing or code in _RETRYABLE_CODES,
            throttles=status in _THROTTLING_STATUS or code in _THROTTLING_CODES,
        )  # fmt: skip
    is_untrusted = isinstance(error, (boto.ProxyConnectionError, boto.SSLError)) and "CERTIFICATE" in str(error).upper()
    passes = isinstance(error, _CONNECTION_ERRORS) and not is_untrusted
    return Failure("", 0, f"{type(error).__name__}: {error}".rstrip("."), passes, throttles=False)


def answered_code(error: errors.StorageError) -> str:
    """S3's error code in the answer behind a `StorageError`, empty if there was none."""
    return classify(error.__cause__).code


def answered_status(error: errors.StorageError) -> int:
    """The HTTP status of the answer behind a `StorageError`, 0 if there was none."""
    return classify(error.__cause__).status


def to_storage_error(error: Exception, operation: str, bucket: str, key: str, attempts: int) -> errors.StorageError:
    """The error of `dcp_s3.errors` for a failed request, with a remedy."""
    code, status, message, passes, _ = classify(error)
    answer = error.response if isinstance(error, boto.ClientError) else {}
    region = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("x-amz-bucket-region")
    region = region or answer.get("Error", {}).get("Region")
    kind: type[errors.StorageError] = errors.StorageError
    remedy = "S3 refused the request as it is; see the cause"
    if isinstance(error, _NO_CREDENTIALS):
        kind = errors.CredentialsError
        remedy = (
            "give AWS credentials by AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile (AWS_PROFILE), or an "
            "instance or pod role"
        )
    elif status in _REDIRECTS or (code in _OTHER_REGION_CODES and region):
        # botocore follows a redirect once; it could not follow this one.
        remedy = "the bucket is in another region, or at another endpoint: set DCP_S3_REGION or DCP_S3_ENDPOINT_URL"
        if region:
            remedy = f"the bucket is in {region}: set DCP_S3_REGION={region}"
    else:
        if passes:
            kind = errors.TransferError
            remedy = "check the endpoint and the network; DCP_S3_RETRY_ATTEMPTS and DCP_S3_READ_TIMEOUT give it longer"
        for answers, refusal, instead in _REFUSALS:
            if code in answers or status in answers:
                kind, remedy = refusal, instead
                break
        if kind is errors.AccessDeniedError:
            needed = f"{permission_of(operation)} here"
            if needed == "s3:GetObject here":
                needed = "s3:GetObject and s3:ListBucket here (without the latter a missing object reads as forbidden)"
            remedy = f"the credentials need {needed}; {remedy}"
    where = f"s3://{bucket}/{key}" if key else f"bucket {bucket!r}"
    tries = f" after {attempts} attempts" if attempts > 1 else ""
    text = f"{operation} on {where} failed{tries}: {message}. Remedy: {remedy}"
    return kind(text, bucket=bucket, key=key, operation=operation, attempts=attempts)


def permission_of(operation: str) -> str:
    """The IAM action that allows an S3 operation: most have its name, the others are in a table."""
    return "s3:" + _PERMISSIONS.get(operation, operation)


# --- retries are said at once, and once for each cause ---------------------------------------------


def tell_retry(error: Exception, bucket: str, *, made: int, attempts: int, wait: float) -> None:
    """Log at INFO why a request is tried again in ``wait`` seconds, unless the same was said in the last `AGAIN`
    seconds."""
    if isinstance(error, boto.ClientError):
        code, status, message, _, _ = classify(error)
        answer = " ".join(map(str, filter(None, (status, code))))
        cause = f"S3 answers {answer or message} (bucket {bucket!r})"
    else:
        host = urlsplit(str(getattr(error, "kwargs", {}).get("endpoint_url", ""))).netloc.rpartition("@")[2]
        cause = f"{host or f'the endpoint of bucket {bucket!r}'} does not answer ({type(error).__name__})"
    now = time.monotonic()
    last = _told.setdefault(cause, now)  # one operation: of many threads only one is the first
    if last == now or now - last >= AGAIN:
        _told[cause] = now
        logger.info("%s: attempt %d of %d, waiting %.1f s", cause, made + 1, attempts, wait)
