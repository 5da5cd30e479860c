"""A reader's lease: a small object beside a checkpoint that keeps prune from deleting it while it is loaded.

S3 has no locks. Each side first writes, then looks, so that one of them sees the other. A reader writes its lease, then
looks for a deletion of the save that it reads. A prune writes the list of what it deletes (`deletion_object`), then
looks for leases.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import secrets
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import replace

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import list_directory
from dcp_s3.format.layout import DELETION_PREFIX, lease_object, metadata_object
from dcp_s3.limit import Limit
from dcp_s3.store import Store
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

DELETION_BEGINS = 900.0
"""Seconds after which a deletion that has not removed ``.metadata`` counts as given up. It tries for half as long."""

# Seconds. Neither a renewal that hangs nor the release may hold up the end of the load.
_RENEWAL_TIMEOUT = 10.0

# Seconds that a reader waits for a prune to see its lease and withdraw a deletion that has begun.
_WITHDRAWAL = 10.0


class ReaderLease:
    """One lease, of ``seconds`` unless it is renewed; with None, all methods do nothing. Holds a connection and a
    thread only in `renewed`."""

    def __init__(self, store: Store, url: CheckpointURL, seconds: float | None) -> None:
        self._store, self._url = store, url
        self._seconds = None if seconds is None else math.ceil(seconds)
        self._key: str | None = None
        holder = {"seconds": self._seconds, "host": platform.node(), "pid": os.getpid()}
        self._body = (json.dumps(holder) + "\n").encode()

    def take(self) -> None:
        """Write the lease. Without the permission there is only a warning."""
        if self._seconds is None:
            return
        key = self._url.key(lease_object(secrets.token_hex(8), self._seconds))
        try:
            self._store.put(key, self._body)
        except errors.AccessDeniedError as error:
            logger.warning("a prune may delete %s while it is loaded: no lease could be written: %s", self._url, error)
            return
        self._key = key

    def check_not_deleted(self, deletions: Collection[str] | None, *, rank: int | None = None) -> None:
        """Refuse to read a checkpoint that a prune is deleting, as it may not have seen the lease."""
        if self._key is not None:
            check_not_deleted(self._store, self._url, deletions, rank=rank)

    @contextlib.contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the lease from time to time while the body runs, then release it."""
        if self._key is None:
            yield
            return
        done = threading.Event()
        renewer = threading.Thread(target=self._renew, args=(done,), name="dcp_s3-lease", daemon=True)
        renewer.start()
        try:
            yield
        finally:
            done.set()
            renewer.join()
            self.release()

    def release(self) -> None:
        """Delete the lease. A failure is a warning: the lease ends by itself."""
        if self._key is None:
            return
        key, self._key = self._key, None
        try:
            limit = replace(self._store.limit.for_cleanup(), patience=_RENEWAL_TIMEOUT)
            self._store.within(limit).delete([key])
        except errors.StorageError as error:
            logger.warning("the lease of %s stays until it ends, in at most %s s: %s", self._url, self._seconds, error)

    def _renew(self, done: threading.Event) -> None:
        store = self._store.within(Limit(hang=_RENEWAL_TIMEOUT, attempts=1))
        while not done.wait((self._seconds or 0) / 3):
            try:
                store.put(self._key or "", self._body)
            except errors.StorageError as error:
                logger.warning("the lease of %s could not be renewed now: %s", self._url, error)


def check_not_deleted(
    store: Store, url: CheckpointURL, deletions: Collection[str] | None, *, rank: int | None = None
) -> None:
    """Make sure, after a lease or a pin was written, that no prune that missed it deletes the checkpoint. Waits for one
    that has begun to see it and withdraw.

    Args:
        deletions: ids that a deletion of the checkpoint may have (`deletion_id`). None: any deletion at the URL counts
            (without collectives a rank does not know the other ranks' save ids).
    """
    until, wait = time.monotonic() + _WITHDRAWAL, 0.05
    while True:
        directory = list_directory(store, url, DELETION_PREFIX)
        begun = any(
            directory.now - found.modified_at < DELETION_BEGINS
            for deletion, lists in directory.deletions.items()
            for found in lists
            if deletions is None or deletion in deletions
        )
        there = store.exists(url.key(metadata_object(rank)))
        if there and not begun:
            return  # A list stays until everything is deleted. There was none, so what is there now stays.
        if not there or time.monotonic() > until:
            raise errors.CheckpointDeletedError(
                f"{url} is being deleted by a prune. Remedy: load another one (`dcp_s3.latest`)", url=str(url)
            )
        time.sleep(wait)
        wait = min(2 * wait, 1.0)
