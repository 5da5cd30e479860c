"""SIGTERM before the end of a process: all ranks save once more, at the same step, and end.

Who sends it (a spot reclaim, ``kubectl delete``, ``scancel``) kills the process some seconds later, whatever it does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from dcp_s3.coordination.board import Board, open_board
from dcp_s3.coordination.identity import current_attempt
from dcp_s3.errors import PolicyError, SaveFailedError, StorageError
from dcp_s3.limit import Limit
from dcp_s3.manager.deciding import SaveDecisions, SigtermWatch
from dcp_s3.manager.ranks import Ranks
from dcp_s3.manager.save_policy import SaveOnPreemption
from dcp_s3.manager.saving import Saving
from dcp_s3.manager.separate import Notes
from dcp_s3.settings import Settings
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

TERMINATED = 143
"""Exit status of a process that SIGTERM ended: 128 + 15."""

_CLEANUP = 5.0
"""Seconds at most, of the grace period, for what a save that is given up removes."""

_LOOK_SECONDS = 1.0
_LOOKS_PER_SECOND = 256
"""Of all ranks together, at an object below the root: 20 million a day, for 9 dollars."""
_MARGIN = 3.0
"""Seconds that a note and a look at it may take, with attempts."""


class Telling(ABC):
    """Tells all ranks that SIGTERM has come to one of them."""

    @abstractmethod
    def is_due(self, step: int) -> bool:
        """Whether to save this step and to end, the same on all ranks. Every rank asks at the same steps."""

    @property
    @abstractmethod
    def came_at(self) -> float | None:
        """When SIGTERM came to this process, in seconds of time.monotonic; None if it has not."""

    @abstractmethod
    def close(self, *, committed: bool = False) -> None:
        """End the watch for SIGTERM. ``committed``: all ranks know, and have saved."""


class MeetingTelling(Telling):
    """Ranks that tell each other in what `SaveDecisions` does: a small collective, or a note in the store of the
    process group, about once a second."""

    def __init__(self, ranks: Ranks, notes: Notes | None) -> None:
        self._decisions = SaveDecisions(SaveOnPreemption(), ranks, notes)

    def is_due(self, step: int) -> bool:
        return self._decisions.should_save(step)

    @property
    def came_at(self) -> float | None:
        return self._decisions.sigterm_at

    def close(self, *, committed: bool = False) -> None:
        self._decisions.close()


class NoteTelling(Telling):
    """Ranks without a process group: one leaves a note on S3 that says at which step all end. A thread looks for it.

    The ranks train in lockstep: none is more than a step ahead of another one. So the step is so far ahead that each
    rank has looked before it gets there.

    Args:
        board: board of the attempt.
        look_seconds: seconds between two looks.
        now: the clock.
    """

    KEY = "stop"

    def __init__(self, board: Board, look_seconds: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._board, self._look_seconds, self._now = board, look_seconds, now
        self._pace = _Pace()
        self._stop: int | None = None
        self._offered = False
        self._closed = threading.Event()
        self._watch = SigtermWatch()
        self._thread = threading.Thread(target=self._look, name="dcp_s3-preemption", daemon=True)
        self._thread.start()

    def is_due(self, step: int) -> bool:
        self._pace.note(step, self._now())
        if self._stop is None and self._watch.seen and (seconds := self._pace.step_seconds) is not None:
            stop = step + max(1, math.ceil((self._look_seconds + _MARGIN) / max(seconds, 1e-6)))
            try:
                self._stop, self._offered = _number(self._board.offer(self.KEY, str(stop))), True
            except StorageError as error:
                logger.warning("SIGTERM has come, but the other ranks could not be told yet: %s", error)
        return self._stop is not None and step >= self._stop

    @property
    def came_at(self) -> float | None:
        return self._watch.at

    def close(self, *, committed: bool = False) -> None:
        self._closed.set()
        self._watch.close()
        self._thread.join(self._look_seconds + _MARGIN)
        if committed and self._offered:
            self._board.remove(self.KEY)

    def _look(self) -> None:
        while self._stop is None and not self._closed.wait(self._look_seconds):
            try:
                found = _number(self._board.look(self.KEY))
            except StorageError as error:
                logger.debug("the board of the ranks cannot be looked at now: %s", error)
                continue
            self._stop = found if self._stop is None else self._stop


class _Pace:
    """How long a step takes: of the last few, the fastest."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None
        self._seconds: deque[float] = deque(maxlen=8)

    def note(self, step: int, now: float) -> None:
        """Tell that a step ends."""
        if self._last is not None and step > self._last[0]:
            self._seconds.append((now - self._last[1]) / (step - self._last[0]))
        if self._last is None or step != self._last[0]:
            self._last = step, now

    @property
    def step_seconds(self) -> float | None:
        """Seconds; None if there was no whole step yet."""
        return min(self._seconds, default=None)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None


def open_telling(root: CheckpointURL, settings: Settings, ranks: Ranks, notes: Notes | None, grace: float) -> Telling:
    """How the ranks of a manager tell each other.

    Args:
        root: URL of the run.
        settings: settings of the manager.
        ranks: the ranks.
        notes: their notes, if they are not `collective`.
        grace: see `Preemption`.
    """
    if ranks.collective:
        return MeetingTelling(ranks.apart(), None)
    board = open_board(root, current_attempt(settings), settings, limit=Limit(hang=_MARGIN, patience=_MARGIN))
    if ranks.size == 1 or board.nearby:
        return MeetingTelling(ranks, notes)
    return NoteTelling(board, min(max(_LOOK_SECONDS, ranks.size / _LOOKS_PER_SECOND), grace / 6))


class Preemption:
    """Ends the process after a last save.

    Args:
        telling: tells all ranks.
        grace: seconds from SIGTERM to the end of the process.
        is_first: whether this rank says what all know.
    """

    def __init__(self, telling: Telling, grace: float, *, is_first: bool) -> None:
        self._telling, self._grace, self._is_first = telling, grace, is_first
        self._ends_at: float | None = None
        self._closed = self._committed = False

    def is_due(self, step: int) -> bool:
        """Whether this step is the last one, and its save has not begun."""
        return self._ends_at is None and not self._closed and self._telling.is_due(step)

    @property
    def ending(self) -> bool:
        """Whether the last save has begun."""
        return self._ends_at is not None

    @property
    def left(self) -> float:
        """Seconds left until the process must have ended."""
        return self._grace if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    def bound(self, settings: Settings) -> Settings:
        """Settings for a save: the last one must be done in what is left, and its leftovers removed."""
        if not self.ending:
            return settings
        left = max(1.0, self.left - min(_CLEANUP, self._grace / 5))
        timeout = left if settings.save_timeout is None else min(left, settings.save_timeout)
        return settings.model_copy(update={"save_timeout": timeout})

    def end(self, step: int, saving: Saving, save: Callable[[], object], close: Callable[[], None]) -> NoReturn:
        """Save and end the process: with status 0 if the step is committed, else with 143.

        Args:
            step: the last step.
            saving: the saves of the manager.
            save: begins the save of this step.
            close: closes the manager.

        Raises:
            SystemExit: always. If the grace period is over before, the process ends where it is.
        """
        self._ends_at = (self._telling.came_at or time.monotonic()) + self._grace
        if self._is_first:
            logger.warning("step %d is saved within %.0f s; then the ranks end, as SIGTERM asks", step, self.left)
        guard = threading.Timer(max(1.0, self.left), self._end_here, [step])
        guard.daemon = True
        guard.start()
        try:
            saving.settle()
            with contextlib.suppress(SaveFailedError):
                saving.raise_failure()  # of an earlier save, and logged: the last one is tried all the same
            save()
            saving.settle()
            saving.raise_failure()
            self._committed = True
        except Exception as error:  # noqa: BLE001 - whatever it is, the process is killed soon
            self._tell_failed(step, str(error))
        self.close()
        try:
            close()
        except Exception as error:  # noqa: BLE001 - the process ends
            logger.error("the CheckpointManager was not closed: %s", error)  # noqa: TRY400 - without a traceback
        guard.cancel()
        raise SystemExit(self._status)

    def close(self) -> None:
        """End the watch for SIGTERM."""
        if not self._closed:
            self._closed = True
            self._telling.close(committed=self._committed)

    @property
    def _status(self) -> int:
        return 0 if self._committed else TERMINATED

    def _tell_failed(self, step: int, why: str) -> None:
        logger.error(
            "SIGTERM came, and step %d was not committed within grace = %g s; what was committed before is untouched: "
            "%s. Remedy: if there was too little time, raise grace, and the grace period of what sends SIGTERM",
            step, self._grace, why,
        )  # fmt: skip

    def _end_here(self, step: int) -> None:
        # The main thread may be in a collective that waits for a rank that was killed: nothing interrupts that.
        if not self._committed:
            self._tell_failed(step, "the time is over")
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(self._status)


def watch_for_sigterm(
    root: CheckpointURL, settings: Settings, ranks: Ranks, notes: Notes | None, grace: float
) -> Preemption:
    """Watch for SIGTERM on all ranks of a manager: see `open_telling`."""
    return Preemption(open_telling(root, settings, ranks, notes, grace), grace, is_first=ranks.is_first)


def check_sigterm(save_on_sigterm: bool) -> None:
    """Check that SIGTERM can be seen, if that is asked for.

    Raises:
        PolicyError: this is another thread than the main one.
    """
    if save_on_sigterm and threading.current_thread() is not threading.main_thread():
        raise PolicyError(
            "save_on_sigterm needs SIGTERM, which only the main thread can handle. Remedy: make the CheckpointManager "
            "there"
        )
