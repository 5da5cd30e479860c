"""Waits until a save is committed."""

from __future__ import annotations

import time

from dcp_s3.errors import TransferError
from dcp_s3.format.layout import metadata_object
from dcp_s3.s3.store import S3Store
from dcp_s3.save.save import Save
from dcp_s3.settings import Settings
from dcp_s3.spill.background import drain_in_background, wait_until_drained
from dcp_s3.spill.store import SpillStore
from dcp_s3.url import CheckpointURL

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0  # seconds between looks at S3


def wait_committed(
    url: CheckpointURL, save: Save | None, spill_store: SpillStore | None, settings: Settings, timeout: float | None
) -> None:
    """Wait until ``save`` is committed on S3; if it is None, until any checkpoint is there.

    Args:
        url: URL of the checkpoint.
        save: the save to wait for, if this process made it.
        spill_store: the spill directory.
        settings: settings of the writer.
        timeout: seconds; None: no limit.

    Raises:
        TimeoutError: the save is not committed yet; the drain goes on.
        CheckpointError: the save cannot be committed, or another save has replaced it.
        StorageError: S3 refuses the request.
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    if spill_store is not None:
        drain_in_background(spill_store, patience=settings.spill_after)
        for spilled in spill_store.scan():
            if spilled.journal.url == str(url):
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                wait_until_drained(spill_store, spilled, timeout=left)
    store, pause = S3Store(url.bucket, settings), _SHORTEST_PAUSE
    while True:
        try:
            if save.is_committed() if save is not None else store.exists(url.key(metadata_object())):
                return
            reason = "other hosts may still drain"
        except TransferError as error:
            reason = str(error)
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError(f"{url} is not committed after {timeout:g} s: {reason}")
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
