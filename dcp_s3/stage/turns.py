"""Asynchronous saves that must not overlap take turns in the order of their calls.

If two saves of one process group overlap, their collectives mix: one rank's plan of the first save meets another rank's
plan of the second. DCP leaves it to its caller to avoid that. Here the later save waits until the earlier one has ended
in this process. The order is that of the calls of `dcp.async_save`, which all ranks make alike, not that in which the
threads of the saves get to run. So a turn is drawn when `stage` is called, and goes with the staged state: DCP takes
that up in the thread of the save, which nothing else does, and torch ends that thread with the save.

torch sends all saves by `AsyncCheckpointerType.PROCESS` through one pipe without a lock, and starts the process with a
collective step. So such saves take turns, too, whatever their groups.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any

from dcp_s3 import ranks
from dcp_s3.failures import without_tracebacks
from dcp_s3.process import reset_in_child
from dcp_s3.torch_private import has_checkpoint_process

logger = logging.getLogger(__name__)

PIPE = "the checkpoint process"
"""What saves by `AsyncCheckpointerType.PROCESS` share: the state of each is sent when all earlier ones are answered."""
_REPORT_SECONDS = 30.0
_LOOK_SECONDS = 0.05
_LOST_SECONDS = 5.0
"""In which a save whose state is staged begins. Otherwise `async_save` raised after it had staged, or the state was
staged for something else."""
_START_SECONDS = 120.0
"""The same, where the save may have to start the checkpoint process first."""
_EXECUTOR = "AsyncCheckpointExecutor"
"""How the names of torch's threads for asynchronous saves begin (torch 2.9 to 2.15; tests/test_torch_calls.py)."""

_turns: list[Turn] = []
"""The asynchronous saves under way, in order. Changed only by single operations, without a lock that a fork could leave
locked."""

reset_in_child(_turns.clear)


class Turn:
    """The place of one asynchronous save among those of this process, as long as the save is under way.

    Args:
        caller: the thread that calls `stage`. None: the state was staged in another process.
    """

    def __init__(self, caller: threading.Thread | None = None) -> None:
        self.shared: Future[str | None] = Future()
        """What it shares with other saves. Not known before its thread says so."""
        self.ended: Future[None] = Future()
        self.begun = threading.Event()
        self.stall_seconds: float | None = None
        """Seconds for which the training waited in `stage`; None: not known."""
        self.told = False
        """Whether its failure is logged."""
        self.if_unfinished: Callable[[], object] | None = None
        """Called if its thread ends as it is, because something other than dcp_s3 failed, or another rank."""
        self._errors: list[BaseException] = []
        self._staged_at: float | None = None
        self._state: Any = lambda: None
        self._caller = caller if caller is None else weakref.ref(caller)
        _turns.append(self)

    def go_with(self, state: StagedDict) -> None:
        """``state`` is what is saved, by DCP alone. If it is dropped, the turn is over."""
        state.turn = self
        self._state, self._staged_at = weakref.ref(state), time.monotonic()
        weakref.finalize(state, self.end).atexit = False

    @property
    def is_staged_only(self) -> bool:
        """Whether its state is staged, and its save has not begun."""
        return self._staged_at is not None and not self.begun.is_set()

    def begin(self, *, sent: bool = False) -> None:
        """The state is taken up: in the thread of its save (always if it is ``sent`` to the checkpoint process), which
        ends with the save, or in a thread of the user's, where nobody can say when its save ends."""
        if self._caller is not None and not sent and not threading.current_thread().name.startswith(_EXECUTOR):
            self.end()
        elif getattr(_thread, "running", None) is None or _thread.running.turn is not self:
            _thread.running = _Running(self)
            self.begun.set()

    def tell(self, error: BaseException) -> bool:
        """Note a failure of the save. Returns whether it is the first one."""
        first, self.told, self.if_unfinished = not self.told, True, None
        self._errors.append(error)
        return first

    def end(self) -> None:
        """Let the next save go on. May be called again."""
        for each in (self.shared, self.ended):
            with contextlib.suppress(InvalidStateError):
                each.set_result(None)
        self.begun.set()
        with contextlib.suppress(ValueError):
            _turns.remove(self)

    def finish(self) -> None:
        """The save has ended: whoever keeps its future or its error does not keep its memory."""
        try:
            tell, self.if_unfinished = self.if_unfinished, None
            if tell is not None:
                tell()
            for error in self._errors:
                without_tracebacks(error)
            self._errors.clear()
            if (state := self._state()) is not None:
                state.release()
        finally:
            self.end()

    def is_lost(self, seconds: float) -> bool:
        """Whether it was staged so long ago and has not begun."""
        return self.is_staged_only and time.monotonic() - (self._staged_at or 0.0) > seconds


class _Running:
    """The save of a thread. It goes when the thread ends, or begins another save."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # when modules may have lost their names already
            self.turn.finish()


_thread: Any = threading.local()


class StagedDict(dict[str, Any]):
    """What `stage` returns for a save: a state that knows the turn of the save."""

    turn: Turn | None = None

    def begin(self, *, sent: bool = False) -> None:
        """The state is taken up, see `Turn.begin`."""
        if self.turn is not None:
            self.turn.begin(sent=sent)

    def items(self) -> Any:
        """The items, as of any dict. DCP calls this first in the thread of the save."""
        self.begin()
        return super().items()

    def release(self) -> None:
        """The save has ended: let go of memory."""


def draw_turn() -> Turn:
    """A turn for the save for which `stage` is called.

    Waits while an earlier save starts the checkpoint process: that takes a collective step, and a second save would
    take part in it on those ranks only that do not see the process yet.
    """
    started, warned = time.monotonic(), False
    while ranks.is_initialized() and not has_checkpoint_process():
        starting = [each for each in list(_turns) if each.is_staged_only]
        if not starting:
            break
        for each in starting:
            if each.is_lost(_START_SECONDS):
                each.end()
        starting[0].begun.wait(_LOOK_SECONDS)
        if not warned and time.monotonic() - started > _LOST_SECONDS:
            warned = True
            logger.warning(
                "staging waits for the save of a state that is staged and not saved, for %.0f s at most: it may start "
                "the checkpoint process. Remedy: pass what S3Stager.stage returns to one save; a copy for anything "
                "else comes from stage_now",
                _START_SECONDS,
            )
    return Turn(threading.current_thread())


def current_turn() -> Turn | None:
    """The turn of the asynchronous save of this thread; None if there is none."""
    running = getattr(_thread, "running", None)
    return running.turn if running is not None and running.turn._state() is not None else None


def take_turn(key: str) -> None:
    """Wait for the asynchronous saves of this process that came earlier and share ``key``. May be called again."""
    ours, turns = current_turn(), list(_turns)
    if ours is not None and ours in turns:
        with contextlib.suppress(InvalidStateError):  # it has said so before
            ours.shared.set_result(key)
        turns = turns[: turns.index(ours)]
    started = reported = time.monotonic()
    for turn in turns:
        while not turn.ended.done():
            if turn.is_lost(_LOST_SECONDS) or (turn.shared.done() and turn.shared.result() != key):
                break
            awaited: Future[Any] = turn.ended if turn.shared.done() else turn.shared
            wait([awaited], _LOOK_SECONDS)
            if time.monotonic() - reported > _REPORT_SECONDS:
                reported = time.monotonic()
                logger.warning(
                    "a save has waited %.0f s for an earlier one that shares %s with it. Remedy: wait for the future "
                    "of a save before the next one, or give each a process group of its own, and its writer, too: "
                    "S3StorageWriter(process_group=...)",
                    reported - started,
                    key,
                )
