"""How long requests may take, and what ends them: one value that travels from a save or load down to each request."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace

from dcp_s3.errors import DeadlineExceededError

# After a deadline: to abort uploads and delete objects, in all.
_CLEANUP_SECONDS = 10.0


@dataclass(frozen=True)
class Deadline:
    """The time by which a save or a load of this process must be done."""

    setting: str
    """Name of the variable that sets it."""
    seconds: float
    """What it is set to."""
    at: float
    """When it passes, in seconds of time.monotonic."""

    @classmethod
    def start(cls, setting: str, seconds: float | None) -> Deadline | None:
        """One that passes in ``seconds``; None for none."""
        return None if seconds is None else cls(setting, seconds, time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until it passes, 0 if it has."""
        return max(0.0, self.at - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether it has passed."""
        return time.monotonic() >= self.at

    def error(self, what: str, progress: str = "") -> DeadlineExceededError:
        """The error to raise when it has passed.

        Args:
            what: was not done in time.
            progress: how far it came.
        """
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
    """What bounds the requests of one piece of work. Each field that is None bounds nothing."""

    deadline: Deadline | None = None
    """After it a request fails with DeadlineExceededError."""
    patience: float | None = None
    """Seconds after which a request that fails is not tried again, however many attempts are left."""
    hang: float | None = None
    """Seconds that one attempt waits for a connection, or for the next byte, if the settings allow more."""
    attempts: int | None = None
    """How often one request is tried in all, if the settings allow more."""
    cancel: threading.Event | None = None
    """When set, requests give up."""

    def check(self, what: str) -> None:
        """Whether something may begin.

        Raises:
            Cancelled: ``cancel`` was set.
            DeadlineExceededError: the deadline has passed; ``what`` was not done.
        """
        if self.cancel is not None and self.cancel.is_set():
            raise Cancelled
        if self.deadline is not None and self.deadline.passed:
            raise self.deadline.error(what, "it was not begun")

    def within(self, *others: float | None) -> Limit:
        """The same, where no attempt hangs longer than any of ``others`` seconds."""
        return replace(self, hang=min((each for each in (self.hang, *others) if each is not None), default=None))

    def for_cleanup(self) -> Limit:
        """The limit for removing what a failure left: nothing cancels it, and a deadline is put off a little, for all
        of that together."""
        if self.deadline is None:
            return replace(self, cancel=None)
        deadline = replace(self.deadline, at=max(self.deadline.at, time.monotonic() + _CLEANUP_SECONDS))
        return replace(self.within(_CLEANUP_SECONDS), deadline=deadline, cancel=None)


UNLIMITED = Limit()
"""What the settings say bounds each request; nothing bounds all of them."""
