"""Saves that wait for their upload, one behind the other, and which of them is dropped for a newer one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from dcp_s3.errors import SettingsError

Overlap = Literal["wait", "queue", "supersede"]
"""What `CheckpointManager.save` does while an earlier save uploads."""


def check_overlap(overlap: object, generations: int) -> int:
    """How many staged saves may wait for their upload.

    Args:
        overlap: an `Overlap`.
        generations: the setting ``staging_generations``.

    Raises:
        SettingsError: ``overlap`` is not an `Overlap`, or there is no staged copy for a save that waits.
    """
    if overlap not in get_args(Overlap):
        raise SettingsError(f"overlap = {overlap!r}, expected one of {', '.join(map(repr, get_args(Overlap)))}")
    if overlap == "wait":
        return 0
    if generations < 2:
        raise SettingsError(
            f"overlap = {overlap!r} stages a state while another one uploads, but DCP_S3_STAGING_GENERATIONS = "
            f"{generations}. Remedy: set it to 2 or more, or leave overlap out"
        )
    return 1 if overlap == "supersede" else generations - 1


# --- what the ranks decide alike ---------------------------------------------------------------------


@dataclass(frozen=True)
class LineView:
    """What one rank sees of its line when it comes to save, as numbers of saves. All ranks number them alike."""

    failed: int | None = None
    """The newest one that has failed, if nothing has raised it."""
    droppable: int | None = None
    """The one that could be dropped: it waits, and its upload cannot begin until the ranks have decided."""


@dataclass(frozen=True)
class LineDecision:
    """What all ranks do before a save goes into the line."""

    raise_up_to: int | None = None
    """Instead of saving, raise what failed of the saves up to this one. It may not have ended on every rank yet."""
    drop: int | None = None
    """The save that is superseded."""


def decide(views: Sequence[LineView]) -> LineDecision:
    """What the ranks do, from the views of all of them.

    The upload of a save has begun on some ranks before it does on the others, which those wait for: it is dropped only
    where no rank has begun it.
    """
    failed = [view.failed for view in views if view.failed is not None]
    if failed:
        return LineDecision(raise_up_to=max(failed))
    waiting = {view.droppable for view in views}
    return LineDecision(drop=waiting.pop()) if len(waiting) == 1 else LineDecision()


# --- the line of this process --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    number: int
    begin: Callable[[], Future[None]]
    droppable: bool


class Line:
    """Begins the uploads of saves one after the other, in order, whether or not the one before succeeded.

    Args:
        room: how many may wait.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._waiting: deque[_Place] = deque()
        self._uploads = False
        self._held = False
        self._changed = threading.Condition()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Begin no upload meanwhile. The one under way goes on."""
        with self._changed:
            self._held = True
        try:
            yield
        finally:
            with self._changed:
                self._held = False
            self._go_on()

    @property
    def droppable(self) -> int | None:
        """The number of the newest save that waits, if it may be dropped."""
        with self._changed:
            return self._waiting[-1].number if self._waiting and self._waiting[-1].droppable else None

    def drop(self, number: int) -> None:
        """Take a save that waits out of the line. The line must be held."""
        with self._changed:
            self._waiting = deque(place for place in self._waiting if place.number != number)
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Wait until fewer saves than `room` wait."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._waiting) < max(1, self.room))

    def add(self, number: int, begin: Callable[[], Future[None]], *, droppable: bool = True) -> None:
        """Begin a save as soon as the earlier ones have ended: perhaps at once, perhaps in another thread.

        Args:
            number: number of the save.
            begin: begins its upload and returns its future, which also has the error if it could not begin.
            droppable: whether it may be dropped while it waits.
        """
        with self._changed:
            self._waiting.append(_Place(number, begin, droppable))
        self._go_on()

    def _go_on(self) -> None:
        with self._changed:
            if self._held or self._uploads or not self._waiting:
                return
            begin = self._waiting.popleft().begin
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
