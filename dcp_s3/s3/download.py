"""Ranged GET into given buffers: resumed at the byte reached when it breaks, hedged when it straggles."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dcp_s3 import errors
from dcp_s3.limit import Cancelled
from dcp_s3.s3.race import Race
from dcp_s3.s3.ranged import Cursor, ReadTarget

if TYPE_CHECKING:
    from dcp_s3.s3.store import S3Store

__all__ = ["ReadTarget", "fetch_into"]


def fetch_into(
    store: S3Store,
    key: str,
    start: int,
    targets: Sequence[ReadTarget],
    *,
    cancel: threading.Event | None = None,
    etag: str | None = None,
    moved: Callable[[int], None] | None = None,
) -> None:
    """Fetch the bytes of an object from byte ``start`` on that fill ``targets`` in order.

    ``etag``: ETag of the version to read; None for any. ``moved`` is called with the number of bytes that have arrived.

    There is one request unless it breaks or straggles. After a break the next request asks only for the rest, of the
    same version of the object (If-Match). An attempt that made progress does not count towards the limit. One that
    straggles may be overtaken by a second one. Only this thread writes to the targets, and the threads of second
    requests have ended when the function returns or raises.

    Raises:
        ObjectNotFoundError: no such object.
        PreconditionFailedError: the object was replaced while it was read.
        OutOfRangeError: the object has fewer bytes.
        StorageError: other failures.
        Cancelled: ``cancel`` was set.
    """
    cursor = Cursor(targets, moved=moved)
    if not cursor.total:
        return
    with Race(store, key, start, cursor, cancel or store.limit.cancel, etag) as race:
        while True:
            before = cursor.done
            try:
                store.call("GetObject", key, race.attempt, cancel=race.stop, data=True)
            except Cancelled:
                if not race.take():
                    raise
            except errors.TransferError:
                # All attempts are used up, but the last round moved on: a slow, flaky link, not a dead one.
                if cursor.done > before and not cursor.full and store.settings.retry_attempts > 1:
                    continue
                if not race.take(wait=True):
                    raise
            return
