"""The time by which a save or a load must be done."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dcp_s3.errors import DeadlineExceededError


@dataclass(frozen=True)
class Deadline:
    """A deadline of this process.

    Attributes:
        setting: name of the variable that sets it.
        seconds: what it is set to.
        at: when it passes, in seconds of time.monotonic.
    """

    setting: str
    seconds: float
    at: float

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
