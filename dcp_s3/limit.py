"""How long requests may take, and what ends them: one value that travels from a save or load down to each request."""

from __future__ import annotations

import logging
import math
import threading
import time
from dataclasses import dataclass, replace

from dcp_s3.errors import DeadlineExceededError, SettingsError
from dcp_s3.process import launch
from dcp_s3.units import format_size

logger = logging.getLogger(__name__)

# Time for all cleanup after a deadline: aborting uploads and deleting objects.
_CLEANUP_SECONDS = 10.0
# Most seconds without progress of any other cleanup.
_CLEANUP_STALL_SECONDS = 60.0

_POLL_SECONDS = 0.02  # between looks at the other event of a `LinkedEvent`

STALL_SETTING = "DCP_S3_STALL_TIMEOUT"
# The slowest link that counts as one. A store that sends a byte a second is as good as silent.
_LEAST_BYTES_PER_SECOND = 1024


@dataclass(frozen=True)
class Deadline:
    """The time by which work of this process must be done."""

    setting: str
    """Name of the variable that sets it; empty: none does."""
    seconds: float
    at: float
    """In seconds of time.monotonic."""

    @property
    def left(self) -> float:
        """Seconds until the deadline, 0 if it has passed."""
        return max(0.0, self.at - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.left <= 0

    def error(self, what: str, progress: str = "") -> DeadlineExceededError:
        """The error to raise when it has passed. ``what`` was not done in time, and came as far as ``progress``."""
        limit, remedy = f"{self.seconds:g} s", "check the endpoint and the network, and try again"
        if self.setting:
            limit = f"{self.setting} = {limit}"
            remedy = f"raise or unset {self.setting}, or check the endpoint and the network"
        came = f": {progress}" if progress else ""
        text = f"{what} was not done within {limit}{came}. Remedy: {remedy}"
        return DeadlineExceededError(text, setting=self.setting, seconds=self.seconds)


class Progress:
    """What the requests of one piece of work move together. It ends them when that is next to nothing for ``seconds``.

    Bytes count as progress when there are a KiB of them for each of the seconds, and so do each request that succeeds
    and each sign of life of S3 while it completes an upload or copies. Time in which no request is under way does not
    count. 0 seconds bound nothing. Thread safe.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds or math.inf
        self._lock = threading.Lock()
        self._requests = 0
        self._moved = self._counted = 0
        self._at = time.monotonic()
        self._warned = False
        self.is_stalled = False
        """Whether it was over once: then it stays so."""

    def __enter__(self) -> None:
        """Note that a request begins."""
        with self._lock:
            self._requests += 1
            if self._requests == 1:
                self._at, self._counted, self._warned = time.monotonic(), self._moved, False

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            self._requests -= 1
            if kind is None:
                self._at, self._counted, self._warned = time.monotonic(), self._moved, False

    def moved(self, count: int | None = None) -> None:
        """Note that ``count`` bytes moved for the first time; None: S3 is at work, though nothing moves."""
        with self._lock:
            self._moved += count or 0
            if count is None or self._moved - self._counted >= _LEAST_BYTES_PER_SECOND * self.seconds:
                self._at, self._counted, self._warned = time.monotonic(), self._moved, False

    def is_over(self, what: str) -> bool:
        """Whether there was no progress for so long; a third of it is worth a warning. ``what`` waits."""
        with self._lock:
            seconds = time.monotonic() - self._at
            warns = seconds >= self.seconds / 3 and not self._warned
            self._warned = self._warned or warns
            self.is_stalled = self.is_stalled or seconds >= self.seconds
        if warns and not self.is_stalled:
            logger.warning(
                "%s%s: next to nothing moved for %.0f s (%s before). It ends with an error at %s = %g s",
                _rank(), what, seconds, format_size(self._moved), STALL_SETTING, self.seconds,
            )  # fmt: skip
        return self.is_stalled

    @property
    def left(self) -> float:
        """Seconds until it is over, if nothing moves."""
        return max(0.0, self._at + self.seconds - time.monotonic())

    def error(self, what: str, tried: str) -> DeadlineExceededError:
        """The error to raise when it is over. ``what`` was not done; ``tried`` says how often it was tried."""
        return DeadlineExceededError(
            f"{_rank()}{what} was given up: next to nothing moved for {STALL_SETTING} = {self.seconds:g} s. "
            f"{format_size(self._moved)} had moved before; {tried}. Remedy: check the endpoint and the network of this "
            f"host; if they need longer, raise {STALL_SETTING} (0: no limit)",
            setting=STALL_SETTING,
            seconds=self.seconds,
        )


def _rank() -> str:
    try:
        found = launch()
    except SettingsError:
        return ""
    return f"rank {found.rank}: " if found.world_size > 1 else ""


class Cancelled(Exception):  # noqa: N818 - not an error of its own: another one is on its way to the user
    """The save or load has failed elsewhere; this request gives up."""


class LinkedEvent(threading.Event):
    """An event that is set by itself, or with ``other``, if it has one."""

    other: threading.Event | None = None

    def is_set(self) -> bool:
        return super().is_set() or (self.other is not None and self.other.is_set())

    def wait(self, timeout: float | None = None) -> bool:
        until = math.inf if timeout is None else time.monotonic() + timeout
        while not self.is_set() and (left := until - time.monotonic()) > 0:
            super().wait(min(_POLL_SECONDS, left))
        return self.is_set()


@dataclass(frozen=True)
class Limit:
    """Bounds for the requests of one piece of work. A field that is None bounds nothing."""

    deadline: Deadline | None = None
    patience: float | None = None
    """Seconds after which a failed request is not retried, however many attempts are left."""
    hang: float | None = None
    """Most seconds that one attempt waits for a connection or the next byte, if the settings allow more."""
    attempts: int | None = None
    """Most attempts of one request, if the settings allow more."""
    cancel: threading.Event | None = None
    progress: Progress | None = None
    """What these requests move together; None: each of them by itself, as the settings say."""

    def check(self, what: str) -> None:
        """Raise `Cancelled` or `DeadlineExceededError` if ``what`` may not begin."""
        if self.cancel is not None and self.cancel.is_set():
            raise Cancelled
        if self.deadline is not None and self.deadline.passed:
            raise self.deadline.error(what, "it was not begun")

    def sleep(self, seconds: float) -> None:
        """Wait so long, or until it is cancelled."""
        if self.cancel is not None:
            self.cancel.wait(seconds)
        elif seconds:
            time.sleep(seconds)

    def shared(self, stall_timeout: float) -> Limit:
        """The same limit, for requests that move together: none of them is stalled while others move."""
        return replace(self, progress=self.progress or Progress(stall_timeout))

    def within(self, *others: float | None) -> Limit:
        """The same limit, with ``hang`` at most the least of ``others``, in seconds."""
        return replace(self, hang=min((each for each in (self.hang, *others) if each is not None), default=None))

    def for_cleanup(self) -> Limit:
        """Limit for cleanup after a failure: it is not cancelled, and in all may run a little past the deadline."""
        seconds, progress = _CLEANUP_STALL_SECONDS, self.progress
        if progress is not None:
            seconds = min(_CLEANUP_SECONDS if progress.is_stalled else seconds, progress.seconds)
        cleanup = replace(self, cancel=None, progress=Progress(seconds))
        if self.deadline is None:
            return cleanup
        deadline = replace(self.deadline, at=max(self.deadline.at, time.monotonic() + _CLEANUP_SECONDS))
        return replace(cleanup.within(_CLEANUP_SECONDS), deadline=deadline)


UNLIMITED = Limit()
"""A limit that adds nothing to the settings, which bound each single request."""
