"""How often a request is tried, how long to wait in between, which error ends it, and how long an attempt may wait.

botocore does not pass down how long an attempt on the wire may wait, and how fast it may send. So the `Attempts` of a
request are a property of its thread: the sockets (`botocore_private`) and the bodies (`body`) look them up there.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from dcp_s3 import errors
from dcp_s3.failures import without_tracebacks
from dcp_s3.limit import UNLIMITED, Cancelled, Deadline, Limit, Progress
from dcp_s3.s3.diagnosis import REQUEST_ERRORS, Failure, classify, tell_retry, to_storage_error
from dcp_s3.s3.pressure import KnownBucket, Pace

logger = logging.getLogger(__name__)

T = TypeVar("T")

# First wait about 0.1 s (a lost connection), at most 10 s each (throttling lasts for seconds, not minutes):
# https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
BACKOFF_BASE = 0.1
BACKOFF_CAP = 10.0

CONNECT_SECONDS = 5.0
"""Most seconds to wait for a connection."""


def backoff(attempt: int, *, rng: Callable[[], float] = random.random) -> float:
    """Seconds to wait after failed attempt number ``attempt`` (from 1), with full jitter."""
    return float(min(BACKOFF_CAP, BACKOFF_BASE * 2 ** (attempt - 1)) * rng())


# A thread that waits or moves bytes looks so often, in the time without progress, whether that is over.
_LOOKS = 10
# S3 answers at once with 200, and with white space until it has done them, which may take minutes:
# https://docs.aws.amazon.com/AmazonS3/latest/API/API_CompleteMultipartUpload.html
_ANSWERED_EARLY = frozenset({"CompleteMultipartUpload", "CopyObject", "UploadPartCopy"})


class Attempts:
    """The attempts of one request: what to do before each of them, after one that failed, and while it is on the wire.

    Args:
        key: object key; empty for requests to the bucket itself.
        stall: seconds without progress that end it, if it moves by itself; 0: none do.
        most: most attempts.
        hang: most seconds to wait for a connection (`CONNECT_SECONDS`, if that is less) or for the next byte.
        pace: what it shares with other uploads.
    """

    def __init__(
        self, operation: str = "a request", bucket: str = "", key: str = "", *, limit: Limit = UNLIMITED,
        stall: float = 0.0, most: int = 1, hang: float = 60.0, pace: Pace | None = None,
    ) -> None:  # fmt: skip
        self._where: dict[str, Any] = {"bucket": bucket, "key": key, "operation": operation}
        self._what = f"{operation} on s3://{bucket}/{key}" if key else f"{operation} on bucket {bucket!r}"
        self._limit, self._most, self._hang, self._pace = limit, most, hang, pace
        self.progress = limit.progress or Progress(stall)
        self._made = 0
        self._started = time.monotonic()
        self._last = ""  # not the error itself: its traceback would keep the frames it came through
        self.tick = min(hang, self.progress.seconds / _LOOKS)
        """Timeout of a socket that receives, in seconds."""
        self.looks_at = math.inf
        """When `check` is to be called next, in seconds of time.monotonic."""
        self.connect_timeout = min(CONNECT_SECONDS, hang)
        self.send_timeout = min(hang, self.progress.seconds)
        self.slice_size = None if pace is None else pace.slice_size
        """Most bytes to send at once; None for any number."""
        self.waited = 0.0
        """Seconds waited for bandwidth: S3 is not to blame for them."""
        self.has_head, self.latency = False, 0.0
        """Whether the head of the answer is there, and the seconds waited for it after the whole request was sent."""
        self._is_answered_early = operation in _ANSWERED_EARLY

    def run(self, request: Callable[[], T], known: KnownBucket, *, data: bool = False) -> T:
        """Run ``request`` until it succeeds, or for the last time. With ``data`` it waits for its turn while S3
        throttles."""
        logger.debug("%s", self._what)
        before, this_thread.attempts = this_thread.attempts, self
        limit, progress, gate, has_waited = self._limit, self.progress, known.gate, False
        try:
            with progress:
                while True:
                    if limit.cancel is not None and limit.cancel.is_set():
                        raise Cancelled
                    if limit.deadline is not None and limit.deadline.passed:
                        raise self._ended_by(limit.deadline)
                    # Before it has waited, those that are under way see it first.
                    if progress.is_stalled or (has_waited and progress.is_over(self._what)):
                        raise self._ended_by(progress)
                    if data and not gate.enter():
                        self._check_turn()
                        has_waited = True
                        continue
                    self._made += 1
                    began, succeeded = time.monotonic(), False
                    self.looks_at = began + self.tick
                    try:
                        result = request()
                        succeeded = True
                        return result
                    except REQUEST_ERRORS as error:
                        failure = classify(error)
                        if failure.throttles:
                            gate.throttled(began)
                        without_tracebacks(error)  # urllib3's are cycles, with the bytes that were being sent in them
                        wait = self._wait_after(error, failure)
                    finally:
                        if data:
                            gate.leave(began, succeeded=succeeded)
                        elif self.latency and not self._is_answered_early:
                            known.latency = min(known.latency or math.inf, self.latency)
                    limit.sleep(wait)
                    has_waited = True
        finally:
            this_thread.attempts = before

    # --- between attempts -------------------------------------------------------------------------------

    def _check_turn(self) -> None:
        """Raise if it waits for its turn for too long."""
        elapsed = time.monotonic() - self._started - self.waited
        if self._limit.patience is not None and elapsed >= self._limit.patience:
            raise errors.TransferError(
                f"{self._what} failed after {self._made} attempts: S3 throttles, and its turn did not come in "
                f"{elapsed:.1f} s. Remedy: lower DCP_S3_CONCURRENCY, or raise DCP_S3_PART_SIZE: fewer, larger requests",
                **self._where, attempts=self._made,
            )  # fmt: skip

    def _wait_after(self, error: Exception, failure: Failure) -> float:
        """Seconds to wait between a failed attempt and the next one."""
        limit = self._limit
        if limit.cancel is not None and limit.cancel.is_set():
            raise Cancelled from None
        if not failure.passes:
            raise to_storage_error(error, **self._where, attempts=self._made) from error
        self._last = failure.message
        if self.progress.is_over(self._what):
            raise self._ended_by(self.progress) from error
        wait, is_last = backoff(self._made), self._made >= self._most
        if not is_last and limit.deadline is not None and wait > limit.deadline.left:
            raise self._ended_by(limit.deadline) from error
        elapsed = time.monotonic() - self._started - self.waited
        if is_last or (limit.patience is not None and elapsed + wait > limit.patience):
            raise to_storage_error(error, **self._where, attempts=self._made) from error
        tell_retry(error, self._where["bucket"], made=self._made, attempts=self._most, wait=wait)
        logger.debug("%s failed (%s); attempt %d of %d, next in %.2f s",
                     self._what, error, self._made, self._most, wait)  # fmt: skip
        return min(wait, self.progress.left)

    def _ended_by(self, bound: Deadline | Progress) -> errors.StorageError:
        """The error to raise when a bound has passed."""
        last = f", the last: {self._last}" if self._last else ""
        error = bound.error(self._what, f"{self._made} attempts{last}" if self._made else "it was not begun")
        if bound is self.progress and self._limit.patience is not None:
            # A caller with patience has another place to go, or comes back later: to it S3 is slow.
            return errors.TransferError(str(error), **self._where, attempts=self._made)
        vars(error).update(self._where, attempts=self._made)
        return error

    # --- on the wire ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Break the attempt off if nothing has moved for too long: `run` then says so."""
        self.looks_at = time.monotonic() + self.tick
        if self.progress.is_over(self._what):
            raise ConnectionAbortedError("nothing moved for too long")

    def receive(self, receive: Callable[[Any], int], view: Any) -> int:
        """Receive into ``view``; waits as long as the attempt may, however short the socket's own timeout."""
        waited = 0.0
        # Bytes may come so slowly that they do not count. Not after these came: a process that was stopped counts them.
        if time.monotonic() >= self.looks_at:
            self.check()
        while True:
            try:
                count = receive(view)
            except TimeoutError:
                waited += self.tick
                if waited >= self._hang:
                    raise
                self.check()
                continue
            if count and self.has_head and self._is_answered_early:
                self.progress.moved()
            return count

    def before_sending(self, count: int) -> float:
        """Wait until ``count`` bytes may be sent; returns the seconds waited."""
        cancel, now = self._limit.cancel, time.monotonic()
        if cancel is not None and cancel.is_set():
            raise ConnectionAbortedError("the upload was cancelled")
        if now >= self.looks_at:
            self.check()
        if self._pace is None:
            return 0.0
        waited = self._pace.reserve(count, now)
        self._limit.sleep(waited)
        self.waited += waited
        return waited


UNBOUNDED = Attempts()
"""Of requests that are made without any, by a client itself."""


class _ThisThread(threading.local):
    attempts = UNBOUNDED
    """Of the request that this thread makes."""
    flight: Any = None
    """The `Flight` of that request, if it has one."""
    checksums: Mapping[str, str] = {}
    """Headers of the checksums of the body that it sends."""


this_thread = _ThisThread()
