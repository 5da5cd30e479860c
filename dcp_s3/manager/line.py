"""Saves that wait for their upload, one behind the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, get_args

from dcp_s3.errors import SettingsError
from dcp_s3.stage.pool import GENERATIONS

Overlap = Literal["wait", "queue"]
"""What `CheckpointManager.save` does while an earlier save uploads."""


def check_overlap(overlap: object) -> int:
    """How many staged saves may wait for their upload, beside the one that uploads.

    Raises:
        SettingsError: ``overlap`` is not an `Overlap`.
    """
    if overlap == "supersede":
        raise SettingsError(
            "overlap = 'supersede' is no longer supported. Remedy: leave overlap out, and pass "
            "should_save=SaveContinuously(), which saves the newest state as soon as the last save is committed"
        )
    if overlap not in get_args(Overlap):
        raise SettingsError(f"overlap = {overlap!r}, expected one of {', '.join(map(repr, get_args(Overlap)))}")
    return 0 if overlap == "wait" else GENERATIONS - 1


class Line:
    """Begins the uploads of saves one after the other, in order, whether or not the one before succeeded.

    Args:
        room: how many may wait.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._waiting: deque[Callable[[], Future[None]]] = deque()
        self._uploads = False
        self._changed = threading.Condition()

    def wait_for_room(self) -> None:
        """Wait until fewer saves than `room` wait."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < max(1, self.room))

    def add(self, begin: Callable[[], Future[None]]) -> None:
        """Begin a save as soon as the earlier ones have ended: perhaps at once, perhaps in another thread.

        Args:
            begin: begins its upload and returns its future, which also has the error if it could not begin.
        """
        with self._changed:
            self._waiting.append(begin)
        self._go_on()

    def _go_on(self) -> None:
        with self._changed:
            if self._uploads or not self._waiting:
                return
            begin = self._waiting.popleft()
            self._uploads = True
        try:
            future = begin()
        except BaseException:  # an interrupt
            with self._changed:
                self._uploads = False
            raise
        finally:
            del begin  # it holds the staged copy
            with self._changed:
                self._changed.notify_all()
        future.add_done_callback(self._ended)

    def _ended(self, _: Future[None]) -> None:
        with self._changed:
            self._uploads = False
        self._go_on()
