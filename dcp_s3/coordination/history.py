"""The saves without collectives that this process took part in before."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from dcp_s3.url import CheckpointURL


@dataclass(frozen=True)
class Last:
    """A save that was committed."""

    order: int
    """See `CountedSave`."""
    url: CheckpointURL
    save_id: str
    """Id of its commit."""
    digest: str
    """Digest of what this rank held."""
    asked: frozenset[int] = frozenset()
    """Hashes of the items that no rank had written, and this one was asked for: it writes them from now on."""


class History:
    """Of the saves of the same ranks, the last one that was committed. Thread safe.

    The ranks of a job make the same saves in the same order, so each knows that the others know of that one, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Last | None = None

    def committed(self, save: Last) -> None:
        """Note that a save is committed."""
        with self._lock:
            if self._last is None or self._last.order < save.order:
                self._last = save

    def before(self, order: int) -> Last | None:
        """The save right before this one; None if it is not known to be committed."""
        with self._lock:
            return self._last if self._last is not None and self._last.order == order - 1 else None
