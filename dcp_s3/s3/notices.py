"""Says that requests fail and are tried again: at once, and once for each cause rather than for each request."""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import botocore.exceptions as boto

from dcp_s3.forking import reset_in_child
from dcp_s3.s3.diagnosis import describe, error_code, is_retryable, status_code

logger = logging.getLogger(__name__)

AGAIN = 300.0
"""Seconds for which a cause is not named again."""
_MOST_CAUSES = 100

_told: dict[str, float] = {}
_lock = threading.Lock()


@reset_in_child
def _begin_anew() -> None:
    global _lock
    _lock = threading.Lock()
    _told.clear()


def tell_retry(error: Exception, bucket: str, *, made: int, attempts: int, wait: float | None = None) -> None:
    """Log at INFO why a request is tried again, unless the same was said in the last `AGAIN` seconds.

    Args:
        error: failure of the last attempt.
        bucket: name of the bucket.
        made: number of attempts so far.
        attempts: most attempts.
        wait: seconds until the next one, if known.
    """
    cause = outline(error, bucket)
    now = time.monotonic()
    with _lock:
        if now - _told.get(cause, -AGAIN) < AGAIN:
            return
        if len(_told) >= _MOST_CAUSES:
            _told.clear()
        _told[cause] = now
    waiting = "" if wait is None else f", waiting {wait:.1f} s"
    logger.info("%s: attempt %d of %d%s", cause, made + 1, attempts, waiting)


def outline(error: Exception, bucket: str) -> str:
    """``127.0.0.1:9 does not answer (connection refused)``: who failed and how, the same for all such requests."""
    if isinstance(error, boto.ClientError):
        answer = " ".join(map(str, filter(None, (status_code(error), error_code(error)))))
        return f"S3 answers {answer or describe(error)} (bucket {bucket!r})"
    host = urlsplit(str(getattr(error, "kwargs", {}).get("endpoint_url", ""))).netloc.rpartition("@")[2]
    return f"{host or f'the endpoint of bucket {bucket!r}'} does not answer ({_cause(error)})"


def _cause(error: Exception) -> str:
    if isinstance(error, boto.ConnectTimeoutError):
        return "no connection in time"
    if isinstance(error, boto.ReadTimeoutError):
        return "no byte in time"
    found: Any = error
    seen: list[Any] = []
    while isinstance(found, BaseException) and found not in seen:
        if isinstance(found, OSError) and found.strerror and found.errno:
            return _plain(found.strerror)
        seen.append(found)
        found = getattr(found, "kwargs", {}).get("error") or found.__cause__ or found.__context__
    # urllib3 keeps only the text.
    written = re.search(r"\[Errno -?\d+\] ([\w ,'-]+)", " ".join(map(str, seen)))
    return _plain(written[1]) if written else describe(error)


def _plain(reason: str) -> str:
    # asyncio: "Connect call failed ('127.0.0.1', 9)"
    return "connection refused" if reason.startswith("Connect call failed") else reason.strip().lower()


def watch(client: Any, attempts: int) -> None:
    """Tell of the retries that botocore makes itself, for a client to which they are left."""

    def on_answer(response: Any, attempts: int = 0, caught_exception: Any = None, **others: Any) -> None:
        error = caught_exception
        if error is None and response is not None and response[1].get("Error"):
            error = boto.ClientError(response[1], "")
        if error is not None and attempts < most and is_retryable(error):
            bucket = others.get("request_dict", {}).get("context", {}).get("s3_redirect", {}).get("bucket", "")
            tell_retry(error, str(bucket), made=attempts, attempts=most)

    most = attempts
    client.meta.events.register_first("needs-retry.s3", on_answer)
