"""Endpoints that refuse requests with checksums: found out by trying, remembered for the process.

Stores other than AWS may not know ``x-amz-checksum-*``. Most ignore it; to those that refuse it nobody could save. With
``DCP_S3_CHECKSUM=auto`` such a request is sent once more without, and if S3 takes that, so are all that follow. The
CRCs of items and objects are recorded as ever, so that loads are checked.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from dcp_s3 import errors
from dcp_s3.s3 import retry

logger = logging.getLogger(__name__)

T = TypeVar("T")

_OPERATIONS = frozenset({"CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "PutObject"})
_PREFIX = "Checksum"  # of the arguments: ChecksumCRC64NVME, ChecksumAlgorithm, ...
# What stores answer to a header that they do not know. Not BadDigest: that is damage, and is tried again as it is.
_CODES = frozenset({"NotImplemented", "InvalidRequest", "InvalidArgument", "InvalidHeader", "UnsupportedHeader"})

_without: set[str | None] = set()
_trying: Counter[str | None] = Counter()  # requests under way that are sent once more
_lock = threading.Lock()


def drop_checksums(client: Any, endpoint_url: str | None) -> None:
    """Let requests of a boto3 client go without checksums if its endpoint turns out to refuse them."""

    def drop(params: dict[str, Any], **_: Any) -> None:
        if _goes_without(endpoint_url):
            for name in [name for name in params if name.startswith(_PREFIX)]:
                del params[name]

    for operation in _OPERATIONS:
        client.meta.events.register(f"before-parameter-build.s3.{operation}", drop)


def with_or_without(request: Callable[[], T], *, operation: str, endpoint_url: str | None) -> T:
    """Carry out ``request``, and if it is refused as one that S3 does not know, once more without its checksum.

    Raises:
        StorageError: of ``request``. If both are refused, the first one: the checksum was not why.
    """
    had_checksum = not _goes_without(endpoint_url)
    try:
        return request()
    except errors.StorageError as error:
        if operation not in _OPERATIONS or not had_checksum or not _may_be_the_checksum(error):
            raise
        with _lock:
            _trying[endpoint_url] += 1
        try:
            result = request()
        except errors.StorageError:
            raise error from error.__cause__
        else:
            with _lock:
                known = endpoint_url in _without
                _without.add(endpoint_url)
        finally:
            with _lock:
                _trying[endpoint_url] -= 1
    if not known:
        _warn(endpoint_url)
    return result


def _goes_without(endpoint_url: str | None) -> bool:
    return endpoint_url in _without or _trying[endpoint_url] > 0


def _warn(endpoint_url: str | None) -> None:
    logger.warning(
        "%s refuses checksums (x-amz-checksum-*): parts are sent without, so that it can not notice damage on the way. "
        "Loads check what they get, as always", endpoint_url or "the S3 endpoint",
    )  # fmt: skip


def _may_be_the_checksum(error: errors.StorageError) -> bool:
    cause = error.__cause__
    return isinstance(cause, Exception) and (
        retry.status_code(cause) == 501 or (retry.status_code(cause) == 400 and retry.error_code(cause) in _CODES)
    )
