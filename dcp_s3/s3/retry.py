"""How often a request is tried, how long to wait in between, and which error ends it.

`Tries` decides for every request of the package: try again after a wait with full jitter and exponential backoff
(https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/), or raise one error of `dcp_s3.errors` that
names bucket, key, operation, attempts and the last cause. `call` only carries that out.

`Attempt` bounds one of them while it is on the wire: how long it may wait, and how fast it may send. botocore passes
none of that down. So it is a property of the thread that makes the request, and the ends of the way look it up there:
the sockets (`botocore_private`) and the bodies (`body`).
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from urllib3.util import Timeout

from dcp_s3 import errors
from dcp_s3.failures import without_tracebacks
from dcp_s3.limit import Cancelled, Deadline, Limit, Progress
from dcp_s3.s3.diagnosis import REQUEST_ERRORS, describe, is_retryable, is_throttling, tell_retry, to_storage_error
from dcp_s3.s3.pressure import Gate, Pace

logger = logging.getLogger(__name__)

T = TypeVar("T")

# First wait about 0.1 s (a lost connection), at most 10 s each (throttling lasts for seconds, not minutes).
BACKOFF_BASE = 0.1
BACKOFF_CAP = 10.0

CONNECT_SECONDS = 5.0
"""Most seconds to wait for a connection."""


def backoff(attempt: int, *, rng: Callable[[], float] = random.random) -> float:
    """Seconds to wait after failed attempt number ``attempt`` (from 1), with full jitter."""
    return float(min(BACKOFF_CAP, BACKOFF_BASE * 2 ** (attempt - 1)) * rng())


@dataclass
class Tries:
    """The attempts of one request: what to do before each of them, and after one that failed. Never waits itself."""

    operation: str
    """S3's name of the operation, for messages."""
    bucket: str
    key: str
    """Object key; empty for requests to the bucket itself."""
    attempts: int
    """Most attempts."""
    limit: Limit
    made: int = 0
    _started: float = field(default_factory=time.monotonic)
    _last: str = ""  # not the error itself: its traceback would keep the frames it came through

    def __post_init__(self) -> None:
        self._progress = self.limit.progress or Progress(math.inf)
        where = f"s3://{self.bucket}/{self.key}" if self.key else f"bucket {self.bucket!r}"
        self.what = f"{self.operation} on {where}"
        logger.debug("%s s3://%s/%s", self.operation, self.bucket, self.key)

    def check(self) -> None:
        """Raise if there may be no further attempt."""
        if self.limit.cancel is not None and self.limit.cancel.is_set():
            raise Cancelled
        if self.limit.deadline is not None and self.limit.deadline.passed:
            raise self._too_late(self.limit.deadline)
        if self._progress.is_over(self.what):
            raise self._stalled()

    def check_turn(self) -> None:
        """Raise if the request may wait no longer for its turn while S3 throttles."""
        self.check()
        if self.limit.patience is not None and self._elapsed() >= self.limit.patience:
            raise self._transfer_error(
                f"{self.what} failed after {self.made} attempts: S3 throttles, and its turn did not come in "
                f"{self._elapsed():.1f} s. Remedy: lower DCP_S3_CONCURRENCY, or raise DCP_S3_PART_SIZE: fewer, larger "
                "requests"
            )

    def wait_after(self, error: Exception) -> float:
        """Seconds to wait between a failed attempt (``made`` counts it) and the next one."""
        if self.limit.cancel is not None and self.limit.cancel.is_set():
            raise Cancelled from None
        self._last = describe(error)
        if is_retryable(error) and self._progress.is_over(self.what):
            raise self._stalled() from error
        if self.made >= self.attempts or not is_retryable(error):
            raise to_storage_error(error, self.operation, self.bucket, self.key, self.made) from error
        wait = backoff(self.made)
        if self.limit.deadline is not None and wait > self.limit.deadline.left:
            raise self._too_late(self.limit.deadline) from error
        if self.limit.patience is not None and self._elapsed() + wait > self.limit.patience:
            raise to_storage_error(error, self.operation, self.bucket, self.key, self.made) from error
        tell_retry(error, self.bucket, made=self.made, attempts=self.attempts, wait=wait)
        logger.debug("%s s3://%s/%s failed (%s); attempt %d of %d, next in %.2f s",
                     self.operation, self.bucket, self.key, error, self.made, self.attempts, wait)  # fmt: skip
        return min(wait, self._progress.left)

    def _elapsed(self) -> float:
        """Seconds so far, without those for which this thread's attempts waited for bandwidth: S3 is not to blame."""
        return time.monotonic() - self._started - current_attempt().waited

    def _too_late(self, deadline: Deadline) -> errors.DeadlineExceededError:
        return self._locate(deadline.error(self.what, self._tried()))

    def _stalled(self) -> errors.StorageError:
        error = self._progress.error(self.what, self._tried())
        # A caller with patience has another place to go, or comes back later: to it S3 is slow.
        return self._locate(error) if self.limit.patience is None else self._transfer_error(str(error))

    def _tried(self) -> str:
        if not self.made:
            return "it was not begun"
        return f"{self.made} attempts, the last: {self._last}" if self._last else f"{self.made} attempts"

    def _transfer_error(self, message: str) -> errors.TransferError:
        return errors.TransferError(
            message, bucket=self.bucket, key=self.key, operation=self.operation, attempts=self.made
        )

    def _locate(self, error: errors.DeadlineExceededError) -> errors.DeadlineExceededError:
        error.bucket, error.key, error.operation, error.attempts = self.bucket, self.key, self.operation, self.made
        return error


# --- one attempt, on the wire ---------------------------------------------------------------------------

# A thread that waits for bytes looks so often, in the time without progress, whether that is over.
_LOOKS = 10
# S3 answers at once with 200, and with white space until it has done them, which may take minutes:
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html
_ANSWERED_EARLY = frozenset({"CompleteMultipartUpload", "CopyObject", "UploadPartCopy"})

this_thread = threading.local()
"""``attempt`` and ``flight`` of the requests that this thread makes, if set."""


class Attempt:
    """The bounds of one attempt.

    Args:
        what: the request, for messages.
        hang: most seconds to wait for a connection (`CONNECT_SECONDS`, if that is less) or for the next byte.
        operation: S3's name of the operation.
    """

    def __init__(
        self,
        what: str = "a request",
        *,
        hang: float,
        progress: Progress,
        cancel: threading.Event | None = None,
        pace: Pace | None = None,
        operation: str = "",
    ) -> None:
        self._what, self._hang, self._progress, self._cancel, self._pace = what, hang, progress, cancel, pace
        self._tick = min(hang, progress.seconds / _LOOKS)
        self.timeout = Timeout(connect=min(CONNECT_SECONDS, hang), read=self._tick)
        self.send_timeout = min(hang, progress.seconds)
        self.slice_size = None if pace is None else pace.slice_size
        """Most bytes to send at once; None for any number."""
        self.waited = 0.0
        """Seconds waited for bandwidth."""
        self.has_head = False
        """Whether the head of the answer is there."""
        self._is_answered_early = operation in _ANSWERED_EARLY

    def __enter__(self) -> None:
        """Bound the requests of this thread."""
        self._before = getattr(this_thread, "attempt", None)
        this_thread.attempt = self

    def __exit__(self, *_: object) -> None:
        this_thread.attempt = self._before

    def check(self) -> None:
        """Break the attempt off if nothing has moved for too long: `retry` then says so."""
        if self._progress.is_over(self._what):
            raise ConnectionAbortedError("nothing moved for too long")

    def moved(self, count: int) -> None:
        """Note bytes that moved for the first time."""
        self._progress.moved(count)

    def receive(self, receive: Callable[[Any], int], view: Any) -> int:
        """Receive into ``view``; waits as long as the attempt may, however short the socket's own timeout."""
        waited = 0.0
        while True:
            try:
                count = receive(view)
            except TimeoutError:
                waited += self._tick
                if waited >= self._hang:
                    raise
            else:
                if count and self.has_head and self._is_answered_early:
                    self._progress.lives()
                return count
            self.check()

    def before_sending(self, count: int) -> float:
        """Wait until ``count`` bytes may be sent; returns the seconds waited."""
        if self._cancel is not None and self._cancel.is_set():
            raise ConnectionAbortedError("the upload was cancelled")
        self.check()
        waited = 0.0 if self._pace is None else self._pace.wait(count, self._cancel)
        self.waited += waited
        return waited


_UNBOUNDED = Attempt(hang=60.0, progress=Progress(math.inf))


def current_attempt() -> Attempt:
    """The attempt that this thread makes."""
    found: Attempt | None = getattr(this_thread, "attempt", None)
    return _UNBOUNDED if found is None else found


# --- all attempts ---------------------------------------------------------------------------------------


def call(request: Callable[[], T], tries: Tries, gate: Gate, *, data: bool = False) -> T:
    """Run ``request`` until it succeeds, or `Tries` says that it fails. With ``data`` it waits for its turn while S3
    throttles."""
    cancel = tries.limit.cancel
    while True:
        tries.check()
        if data:
            gate.enter(tries.check_turn)
        tries.made += 1
        began, succeeded = time.monotonic(), False
        try:
            result = request()
            succeeded = True
            return result
        except REQUEST_ERRORS as error:
            if is_throttling(error):
                gate.throttled(began)
            without_tracebacks(error)  # urllib3's are cycles, with the bytes that were being sent in them
            wait = tries.wait_after(error)
        finally:
            if data:
                gate.leave(began, succeeded=succeeded)
        if cancel is None:
            time.sleep(wait)
        elif cancel.wait(wait):
            raise Cancelled
