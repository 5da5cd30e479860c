"""What a save tells of itself: its events and its line in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3.checkpoint.commit import Commit
from dcp_s3.events import Committed, Listener, SaveStarted, Written, emit
from dcp_s3.save.objects import ItemWriteResult
from dcp_s3.stage.turns import Turn
from dcp_s3.store import Store
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

StallSince = Callable[[float], "float | None"]
"""Seconds for which a save that began at a time (of time.monotonic) has held the training up; None: not known."""


def stall_of(turn: Turn | None) -> StallSince:
    """The stall of the save with this turn, or of a blocking one, which holds the training up until it ends."""
    if turn is None:
        return lambda began: time.monotonic() - began
    stalled = turn.stall_seconds  # known, as `stage` has returned; the turn may hold the whole save
    return lambda _: stalled


def unknown_stall(_: float) -> float | None:
    """The stall of a save that was staged elsewhere."""
    return None


class Progress:
    """Events of one rank's part in one save.

    Args:
        url: URL of the checkpoint.
        step: step in its name.
        rank: rank of this process.
        store: the store.
        on_event: gets the events.
        stall_since: stall of the save.
    """

    def __init__(
        self,
        url: CheckpointURL,
        step: int | None,
        rank: int,
        store: Store,
        on_event: Listener | None,
        stall_since: StallSince,
    ) -> None:
        self.step, self.on_event = step, on_event
        self._url, self._rank = str(url), rank
        self._store, self._stall_since = store, stall_since
        self._began = time.monotonic()
        self._throttled_before = self._count_throttled()
        emit(SaveStarted(url=self._url, step=self.step, rank=rank), on_event)

    def __getstate__(self) -> dict[str, Any]:
        # For a process of its own, see `SaveOptions`. It counts anew.
        return {**self.__dict__, "on_event": None, "_stall_since": unknown_stall, "_throttled_before": 0}

    @property
    def throttled(self) -> int:
        """Requests of this process to the bucket that S3 has throttled since the save began."""
        return max(0, self._count_throttled() - self._throttled_before)

    def _count_throttled(self) -> int:
        return self._store.counters().throttled

    def written(self, results: Sequence[WriteResult], seconds: float) -> None:
        """This rank's objects are complete."""
        ours = [result for result in results if isinstance(result, ItemWriteResult)]
        objects = [result.object_entry for result in ours if result.object_entry is not None]
        event = Written(
            url=self._url,
            step=self.step,
            rank=self._rank,
            bytes=sum(entry.size for entry in objects),
            objects=len(objects),
            spilled_bytes=spilled_bytes(ours),
            seconds=seconds,
        )
        emit(event, self.on_event)

    def committed(self, commit: Commit, *, ranks: int, spilled: int, throttled: int) -> None:
        """The checkpoint is committed.

        Args:
            commit: the commit.
            ranks: ranks that wrote it.
            spilled: bytes of all ranks that were spilled.
            throttled: requests of all ranks that S3 throttled.
        """
        event = Committed(
            url=self._url,
            step=self.step,
            bytes=sum(entry.size for entry in commit.objects),
            objects=len(commit.objects),
            ranks=ranks,
            seconds=time.monotonic() - self._began,
            stall_seconds=self._stall_since(self._began),
            throttled=throttled,
            spilled_bytes=spilled,
        )
        logger.info("%s", event)
        emit(event, self.on_event)


def spilled_bytes(results: Sequence[ItemWriteResult]) -> int:
    """Bytes of the objects that went to a spill directory."""
    return sum(result.object_entry.size for result in results if result.spilled and result.object_entry is not None)
