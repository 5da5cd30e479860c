"""How long requests may take, and what ends them: one value that travels from a save or load down to each request."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from dcp_s3.errors import DeadlineExceededError

# Time for all cleanup after a deadline: aborting uploads and deleting objects.
_CLEANUP_SECONDS = 10.0


@dataclass(frozen=True)
class Deadline:
    """The time by which a save or a load of this process must be done."""

    setting: str
    """Name of the variable that sets it."""
    seconds: float
    """Value of that variable."""
    at: float
    """In seconds of time.monotonic."""

    @classmethod
    def start(cls, setting: str, seconds: float | None) -> Deadline | None:
        """A deadline ``seconds`` from now; None for None."""
        return None if seconds is None else cls(setting, seconds, time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until the deadline, 0 if it has passed."""
        return max(0.0, self.at - time.monotonic())

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self.at

    def error(self, what: str, progress: str = "") -> DeadlineExceededError:
        """The error to raise when the deadline has passed. ``what`` was not done in time, and came as far as
        ``progress``."""
        came = f": {progress}" if progress else ""
        return DeadlineExceededError(
            f"{what} was not done within {self.setting} = {self.seconds:g} s{came}. Remedy: raise or unset "
            f"{self.setting}, or check the endpoint and the network",
            setting=self.setting,
            seconds=self.seconds,
        )


class Cancelled(Exception):  # noqa: N818 - not an error of its own: another one is on its way to the user
    """The save or load has failed elsewhere; this request gives up."""


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

    def check(self, what: str) -> None:
        """Raise `Cancelled` or `DeadlineExceededError` if ``what`` may not begin."""
        if self.cancel is not None and self.cancel.is_set():
            raise Cancelled
        if self.deadline is not None and self.deadline.passed:
            raise self.deadline.error(what, "it was not begun")

    def within(self, *others: float | None) -> Limit:
        """The same limit, with ``hang`` at most the least of ``others``, in seconds."""
        return replace(self, hang=min((each for each in (self.hang, *others) if each is not None), default=None))

    def without_patience(self) -> Limit:
        """Limit for work that has no other place to go: only the deadline bounds it."""
        return replace(self, patience=None, hang=None if self.deadline is None else self.deadline.seconds)

    def for_cleanup(self) -> Limit:
        """Limit for cleanup after a failure: it is not cancelled, and in all may run a little past the deadline."""
        if self.deadline is None:
            return replace(self, cancel=None)
        deadline = replace(self.deadline, at=max(self.deadline.at, time.monotonic() + _CLEANUP_SECONDS))
        return replace(self.within(_CLEANUP_SECONDS), deadline=deadline, cancel=None)


UNLIMITED = Limit()
"""A limit that adds nothing to the settings, which bound each single request."""
