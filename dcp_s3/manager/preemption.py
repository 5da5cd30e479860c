"""SIGTERM before the end of a process: all ranks save once more, at the same step, and end.

Who sends it (a spot reclaim, ``kubectl delete``, ``scancel``) kills the process some seconds later, whatever it does.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import signal
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import NoReturn

from dcp_s3.coordination.board import Board, open_board
from dcp_s3.coordination.identity import current_attempt
from dcp_s3.errors import SaveFailedError, SettingsError, StorageError
from dcp_s3.limit import Limit
from dcp_s3.manager.deciding import SaveDecisions, SigtermWatch
from dcp_s3.manager.ranks import Ranks
from dcp_s3.manager.save_policy import SaveOnPreemption
from dcp_s3.manager.saving import Saving
from dcp_s3.process import reset_in_child
from dcp_s3.settings import Settings
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

TERMINATED = 143
"""Exit status of a process that SIGTERM ended: 128 + 15."""

_CLEANUP = 5.0
"""Seconds at most, of the grace period, for what a save that is given up removes."""

_GUARD_SECONDS = 0.25
_LAST_WORDS = 2.0
"""Seconds at most for what the end of the process writes."""

_LOOK_SECONDS = 1.0
_LOOKS_PER_SECOND = 256
"""Of all ranks together, at an object below the root: 20 million a day, for 9 dollars."""
_MARGIN = 3.0
"""Seconds that a note and a look at it may take, with attempts."""

_AHEAD_SECONDS = 1.0
_AHEAD_STEPS = 10
"""How far one rank may be ahead of another, at most: CUDA's hosts wait for each other only where they read a result."""
_MOST_STEPS = 10
"""Most steps from one collective to the next that says whether SIGTERM has come. More: a training whose steps become
slower (S3 does not answer) would notice it late."""


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
    """Ranks that tell each other in a small collective, about once a second: see `SaveDecisions`."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._decisions = SaveDecisions(SaveOnPreemption(), ranks, most_steps=_MOST_STEPS)

    def is_due(self, step: int) -> bool:
        return self._decisions.should_save(step)

    @property
    def came_at(self) -> float | None:
        return self._decisions.sigterm_at

    def close(self, *, committed: bool = False) -> None:
        self._decisions.close()
        self._ranks.close()


class NoteTelling(Telling):
    """Ranks that leave a note for each other, without a collective: it says at which step all end.

    The ranks train in lockstep: at most `_AHEAD_SECONDS` and `_AHEAD_STEPS` is one ahead of another. In the store of
    the process group each looks for the note after each step. On S3 a thread looks, and who has left the note waits
    until all have looked: meanwhile none gets any further.
    """

    KEY = "stop"

    def __init__(self, board: Board, look_seconds: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._board, self._look_seconds, self._now = board, look_seconds, now
        self._pace = _Pace()
        self._stop: int | None = None
        self._offered = False
        self._closed = threading.Event()
        self._watch = SigtermWatch()
        self._thread: threading.Thread | None = None
        if not board.nearby:
            self._thread = threading.Thread(target=self._keep_looking, name="dcp_s3-preemption", daemon=True)
            self._thread.start()

    def is_due(self, step: int) -> bool:
        self._pace.note(step, self._now())
        if self._board.nearby:
            self._look()
        if self._stop is None and self._watch.seen and (seconds := self._pace.step_seconds) is not None:
            self._leave(step + steps_ahead(seconds))
        return self._stop is not None and step >= self._stop

    @property
    def came_at(self) -> float | None:
        return self._watch.at

    def close(self, *, committed: bool = False) -> None:
        self._closed.set()
        self._watch.close()
        if self._thread is not None:
            self._thread.join(self._look_seconds + _MARGIN)
        if committed and self._offered:
            self._board.remove(self.KEY)

    def _leave(self, stop: int) -> None:
        stands = self._offer(stop)
        self._stop = stands
        if stands == stop and not self._board.nearby:
            self._closed.wait(self._look_seconds + _MARGIN)

    def _offer(self, stop: int) -> int | None:
        """The step in the note that stands. While that is unknown, this rank must not go on: the note may have been
        written, though the answer was lost, and the others stop where it says."""
        told = False
        while not self._closed.is_set():
            try:
                stands = _number(self._board.offer(self.KEY, str(stop)))
            except StorageError as error:
                logger.log(
                    logging.DEBUG if told else logging.WARNING,
                    "SIGTERM has come, but the other ranks could not be told yet: %s", error,
                )  # fmt: skip
                told = True
                self._closed.wait(self._look_seconds)
            else:
                self._offered = True
                return stands
        return None

    def _look(self) -> None:
        if self._stop is not None:
            return
        try:
            found = _number(self._board.look(self.KEY))
        except StorageError as error:
            logger.debug("the board of the ranks cannot be looked at now: %s", error)
            return
        self._stop = found if self._stop is None else self._stop

    def _keep_looking(self) -> None:
        while self._stop is None and not self._closed.wait(self._look_seconds):
            self._look()


def steps_ahead(step_seconds: float) -> int:
    """How many steps after the one that a rank has done no rank can have done yet."""
    if step_seconds >= 2 * _AHEAD_SECONDS:
        return 1
    return 1 + min(_AHEAD_STEPS, math.ceil(_AHEAD_SECONDS / max(step_seconds, 1e-6)))


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


def open_telling(root: CheckpointURL, settings: Settings, ranks: Ranks, grace: float) -> Telling:
    """How the ranks of a manager tell each other."""
    if ranks.collective or ranks.size == 1:
        return MeetingTelling(ranks.apart())
    board = open_board(root, current_attempt(settings), settings, limit=Limit(hang=_MARGIN, patience=_MARGIN))
    return NoteTelling(board, min(max(_LOOK_SECONDS, ranks.size / _LOOKS_PER_SECOND), grace / 6))


_NONE = -1
_open: weakref.WeakSet[SignalPipe] = weakref.WeakSet()


class SignalPipe:
    """Sees SIGTERM from another thread than the main one, which may be in C code for minutes: Python's handlers run
    between two of its instructions. But what Python does at once is to write the signal's number to a pipe, if there is
    one. Where somebody else has such a pipe (an event loop with signal handlers), this one sees nothing.

    For the main thread to make and close.
    """

    def __init__(self) -> None:
        self.came_at: float | None = None
        """When SIGTERM was seen first, in seconds of time.monotonic."""
        self._reads, self._writes = os.pipe()
        for end in (self._reads, self._writes):
            os.set_blocking(end, False)
        self._poll = select.poll()
        self._poll.register(self._reads, select.POLLIN)
        before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if before != _NONE:
            signal.set_wakeup_fd(before)
        _open.add(self)

    def wait(self, seconds: float) -> None:
        """Wait for a signal, at most so long."""
        if self._poll.poll(1000 * seconds):
            numbers = os.read(self._reads, 4096)
            if signal.SIGTERM in numbers and self.came_at is None:
                self.came_at = time.monotonic()

    def close(self) -> None:
        """Nobody waits any more. Called in another thread, the pipe stays."""
        if threading.current_thread() is not threading.main_thread():
            return
        _open.discard(self)
        _take_back(self)
        os.close(self._writes)
        os.close(self._reads)


def _take_back(pipe: SignalPipe) -> None:
    before = signal.set_wakeup_fd(_NONE)
    if before != pipe._writes:
        signal.set_wakeup_fd(before)


@reset_in_child
def _forget() -> None:
    # A forked process shares the pipe, and must not tell its parent of its own signals.
    for pipe in list(_open):
        _take_back(pipe)
    _open.clear()


class Preemption:
    """Ends the process after a last save, ``grace`` seconds after SIGTERM at the latest; ``is_first``: whether this
    rank says what all know."""

    def __init__(self, telling: Telling, grace: float, *, is_first: bool) -> None:
        self._telling, self._grace, self._is_first = telling, grace, is_first
        self._ends_at: float | None = None
        self._closed = self._committed = False
        self._step: int | None = None
        self._over = threading.Event()
        self._pipe = SignalPipe()
        self._guarding = threading.Thread(target=self._guard, name="dcp_s3-grace", daemon=True)
        self._guarding.start()

    def is_due(self, step: int) -> bool:
        """Whether this step is the last one, and its save has not begun."""
        if self._ends_at is not None or self._closed:
            return False
        self._step = step
        return self._telling.is_due(step)

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
        """Save the last step and end the process: SystemExit, with status 0 if the step is committed, else with 143. If
        the grace period is over before, the process ends where it is."""
        self._ends_at = (self._telling.came_at or self._pipe.came_at or time.monotonic()) + self._grace
        if self._is_first:
            logger.warning("step %d is saved within %.0f s; then the ranks end, as SIGTERM asks", step, self.left)
        try:
            saving.settle()
            with contextlib.suppress(SaveFailedError):
                saving.raise_failure()  # of an earlier save, and logged: the last one is tried all the same
            save()
            saving.settle()
            saving.raise_failure()
            self._committed = True
        except Exception as error:  # noqa: BLE001 - whatever it is, the process is killed soon
            self._tell_failed(str(error))
        self._close_telling()
        try:
            close()
        except Exception as error:  # noqa: BLE001 - the process ends
            logger.error("the CheckpointManager was not closed: %s", error)  # noqa: TRY400 - without a traceback
        self._end_guard()
        raise SystemExit(self._status)

    def close(self) -> None:
        """End the watch for SIGTERM."""
        self._close_telling()
        if not self.ending:
            self._end_guard()

    def _end_guard(self) -> None:
        if not self._over.is_set():
            self._over.set()
            self._guarding.join()
            self._pipe.close()

    def _close_telling(self) -> None:
        if not self._closed:
            self._closed = True
            self._telling.close(committed=self._committed)

    @property
    def _status(self) -> int:
        return 0 if self._committed else TERMINATED

    def _tell_failed(self, why: str) -> None:
        logger.error(
            "SIGTERM came, and %s was not committed within grace = %g s; what was committed before is untouched: %s. "
            "Remedy: if there was too little time, raise grace, and the grace period of what sends SIGTERM",
            "its step" if self._step is None else f"step {self._step}", self._grace, why,
        )  # fmt: skip

    def _guard(self) -> None:
        """End the process when the grace period is over: nothing interrupts a main thread that is in a collective and
        waits for a rank that was killed, or for an earlier save to which S3 does not answer."""
        while not self._over.is_set():
            self._pipe.wait(_GUARD_SECONDS)
            came_at = self._telling.came_at or self._pipe.came_at
            ends_at = self._ends_at or (None if came_at is None else came_at + self._grace)
            if ends_at is not None and time.monotonic() > ends_at:
                break
        else:
            return
        # In another thread: the main one may hold the lock of a log or of stdout, and be stuck in it.
        telling = threading.Thread(target=self._tell_end, name="dcp_s3-last-words", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be started
            telling.start()
            telling.join(_LAST_WORDS)
        os._exit(self._status)

    def _tell_end(self) -> None:
        if not self._committed:
            self._tell_failed("the time is over")
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # there is none, it is closed, or nobody reads it
                stream.flush()


def watch_for_sigterm(root: CheckpointURL, settings: Settings, ranks: Ranks, grace: float) -> Preemption:
    """Watch for SIGTERM on all ranks of a manager: see `open_telling`."""
    return Preemption(open_telling(root, settings, ranks, grace), grace, is_first=ranks.is_first)


def check_sigterm(save_on_sigterm: bool) -> None:
    """Refuse (SettingsError) to watch for SIGTERM in another thread than the main one, which cannot see it."""
    if save_on_sigterm and threading.current_thread() is not threading.main_thread():
        raise SettingsError(
            "save_on_sigterm needs SIGTERM, which only the main thread can handle. Remedy: make the CheckpointManager "
            "there"
        )
