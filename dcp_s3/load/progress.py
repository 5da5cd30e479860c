"""What a load tells of itself: its events and its line in the log."""

from __future__ import annotations

import logging
import time

from dcp_s3 import ranks
from dcp_s3.checkpoint.info import find_step
from dcp_s3.events import Listener, Loaded, LoadStarted, emit
from dcp_s3.s3.hedge import hedges_of
from dcp_s3.s3.store import S3Store
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)


class LoadProgress:
    """Events of one rank's part in one load, which begins now.

    Args:
        store: the bucket.
        url: URL of the checkpoint.
        on_event: gets the events.
    """

    def __init__(self, store: S3Store, url: CheckpointURL, on_event: Listener | None) -> None:
        self._url, self._step, self._on_event = str(url), find_step(url.name, store.settings), on_event
        self._gate, self._hedges = store.gate, hedges_of(store)
        self._began = time.monotonic()
        self._throttled, self._hedged = self._gate.state.throttled, self._hedges.state.started
        emit(LoadStarted(url=self._url, step=self._step, rank=ranks.rank()), on_event)

    def loaded(self, size: int, disk_size: int) -> None:
        """Everything is in place.

        Args:
            size: bytes that this rank fetched.
            disk_size: bytes of them that came from the local disk.
        """
        event = Loaded(
            url=self._url,
            step=self._step,
            rank=ranks.rank(),
            ranks=ranks.world_size(),
            bytes=size,
            disk_bytes=disk_size,
            seconds=time.monotonic() - self._began,
            hedged=self._hedges.state.started - self._hedged,
            throttled=self._gate.state.throttled - self._throttled,
        )
        logger.log(logging.INFO if event.rank == 0 else logging.DEBUG, "%s", event)
        emit(event, self._on_event)
