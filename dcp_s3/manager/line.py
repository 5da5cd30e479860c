"""Saves that wait for their upload, one behind the other, and how the ranks agree on a new one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, get_args

from dcp_s3.errors import SaveProtocolError, SettingsError
from dcp_s3.manager.arguments import has_stateful, to_state_dict
from dcp_s3.manager.ranks import Ranks, Refuse
from dcp_s3.stage.pool import GENERATIONS

if TYPE_CHECKING:
    from dcp_s3.manager.saving import Saving

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
    """Begins the uploads of saves one after the other, in order, whether or not the one before succeeded. ``room`` says
    how many may wait."""

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
        """Begin a save as soon as the earlier ones have ended: perhaps at once, perhaps in another thread. The future
        that ``begin`` returns also has the error if it could not begin."""
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


def agree_on_save(
    ranks: Ranks,
    saving: Saving,
    step: int,
    state: Mapping[str, Any],
    root: str,
    begin: Callable[[], None],
    refuse: Refuse,
) -> dict[str, Any]:
    """Begin the save of a step on all ranks, and make room for it among those under way. Returns the state, in which
    each Stateful is replaced by its state dict.

    Raises:
        SaveFailedError: an earlier save has failed.
        SaveProtocolError: the ranks save different steps.
    """

    def first() -> tuple[int, bool, int | None]:
        failed = saving.look()
        begin()
        return step, has_stateful(state), failed

    told = ranks.agree(first, refuse)
    steps = {rank: each for rank, (each, _, _) in enumerate(told)}
    if len(set(steps.values())) > 1:
        raise SaveProtocolError(
            f"the ranks save different steps to {root}: {steps} (by rank). Remedy: call save with the same step on all",
            url=root,
        )
    # The newest one that failed on any rank may not have ended on the others yet.
    failed = max((number for _, _, number in told if number is not None), default=None)
    if failed is not None:

        def raise_failure() -> None:
            saving.settle(failed)
            saving.raise_failure(failed)

        ranks.agree(raise_failure, refuse)
    saving.make_room()
    if not any(stateful for _, stateful, _ in told):
        return dict(state)
    collected: dict[str, Any] = {}
    # Separately: a `state_dict` may use collectives, so all ranks must have come this far.
    ranks.agree(lambda: collected.update(to_state_dict(state)), refuse, alike=True)
    return collected
