"""Asynchronous saves that must not overlap, because their collectives would mix, take turns in the order of the calls.

If two saves of one process group overlap, one rank's plan of the first save meets another rank's plan of the second.
DCP leaves it to its caller to avoid that. Here the later save waits until the earlier one has ended in this process.

The order is that of the calls of `dcp.async_save`, which all ranks make alike. It is not that in which the threads of
the saves get to run, which differs among ranks. So a turn is drawn when `stage` is called, and goes with the staged
state.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, wait
from typing import Any

from dcp_s3.forking import reset_in_child
from dcp_s3.torch_private import find_upload_future

logger = logging.getLogger(__name__)

_REPORT_SECONDS = 30.0
_LOST_SECONDS = 600.0

_turns: list[Turn] = []
"""The asynchronous saves under way, in order. Changed only by single operations, without a lock that a fork could leave
locked."""

reset_in_child(_turns.clear)


class Turn:
    """The place of one asynchronous save among those of this process, as long as the save is under way."""

    def __init__(self) -> None:
        self.shared: Future[str | None] = Future()
        """What it shares with other saves. Not known before its thread says so."""
        self.ended: Future[None] = Future()
        self.upload: Future[Any] | None = None
        """The future of the save, from when its thread begins."""
        self.stall_seconds: float | None = None
        """Seconds for which the training waited in `stage`; None if something other than dcp_s3 staged."""
        _turns.append(self)

    def go_with(self, state: StagedDict) -> None:
        """``state`` is what is saved. If it is dropped before, the turn is over."""
        state.turn = self
        weakref.finalize(state, self.abandon).atexit = False

    def begin(self) -> None:
        """In the thread of the save: it has begun, and its turn ends with it. Elsewhere: do nothing."""
        if self.upload is None and (future := find_upload_future()) is not None:
            self.upload = future
            future.add_done_callback(lambda _: self.end())

    def share(self, key: str) -> None:
        """Say what the save shares with others."""
        with contextlib.suppress(InvalidStateError):
            self.shared.set_result(key)

    def abandon(self) -> None:
        """End it if its save has never begun."""
        if self.upload is None:
            self.end()

    def end(self) -> None:
        """Let the next save go on. May be called again."""
        for each in (self.shared, self.ended):
            with contextlib.suppress(InvalidStateError):
                each.set_result(None)
        with contextlib.suppress(ValueError):
            _turns.remove(self)


class StagedDict(dict[str, Any]):
    """What `stage` returns for a save: a state that knows the turn of the save."""

    turn: Turn | None = None

    def begin(self) -> None:
        """In the thread of a save: the save begins. Elsewhere: do nothing."""
        if self.turn is not None:
            self.turn.begin()

    def items(self) -> Any:
        """The items, as of any dict. DCP calls this first in the thread of the save."""
        self.begin()
        return super().items()


def take_turn(key: str) -> None:
    """Wait for the asynchronous saves of this process that came earlier and share ``key``. May be called again.

    Args:
        key: what the saves share: the name of a process group, or a URL.
    """
    future = find_upload_future()
    turns = list(_turns)
    ours = None
    if future is not None:
        ours = next((each for each in turns if each.upload is future), None)
        if ours is None:  # not staged by dcp_s3: it comes as its thread does
            ours = Turn()
            ours.begin()
            turns = list(_turns)
        ours.share(key)
        turns = turns[: turns.index(ours)]
    wait_for(turns, key)


def current_turn() -> Turn | None:
    """The turn of the asynchronous save that calls this; None in a blocking one."""
    future = find_upload_future()
    return None if future is None else next((each for each in list(_turns) if each.upload is future), None)


def find_turns(key: str) -> list[Turn]:
    """The saves under way that share ``key`` for certain."""
    return [each for each in list(_turns) if each.shared.done() and each.shared.result() == key]


def wait_for(turns: Sequence[Turn], key: str) -> None:
    """Wait until those of ``turns`` that share ``key`` have ended, and say so every 30 s."""
    _wait([each.shared for each in turns], turns, key)
    sharing = [each for each in turns if each.shared.result() == key]
    _wait([each.ended for each in sharing], sharing, key)


def _wait(futures: Sequence[Future[Any]], turns: Sequence[Turn], key: str) -> None:
    started = time.monotonic()
    while wait(futures, _REPORT_SECONDS).not_done:
        waited = time.monotonic() - started
        logger.warning(
            "a save has waited %.0f s for an earlier one that shares %s with it. Remedy: wait for the future of a save "
            "before the next one, or give each overlapping save its own process group",
            waited,
            key,
        )
        if waited > _LOST_SECONDS:  # async_save raised after it had staged, and its traceback keeps the state
            for each in turns:
                each.abandon()
