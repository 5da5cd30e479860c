"""Checks that the objects of a slow save are still there when it commits.

A prune takes a directory that was not written to for its grace period (at least an hour) for a leftover.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from dcp_s3 import errors
from dcp_s3.checkpoint.listing import list_directory
from dcp_s3.format.control_files import DeletionList, ObjectEntry
from dcp_s3.store import Store
from dcp_s3.url import CheckpointURL

LATE = 1800.0
"""Seconds after which a save looks for its objects before and after its commit: half of the shortest grace period."""


@dataclass(frozen=True)
class Beginning:
    """When a save began."""

    at: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    monotonic: float | None = field(default_factory=time.monotonic)
    """Seconds of time.monotonic; None if another process began the save."""

    def at_the_earliest(self, others: Iterable[float]) -> Beginning:
        """When the first of several processes began a save that one of them commits: a prune counts from their objects.

        Args:
            others: when the others began, seconds since the epoch.
        """
        return replace(self, at=min([self.at, *others]))

    def is_late(self) -> bool:
        """Whether `LATE` seconds have passed on either clock: one may be set back, the other stops in host sleep."""
        ages = [time.time() - self.at]
        if self.monotonic is not None:
            ages.append(time.monotonic() - self.monotonic)
        return max(ages) > LATE


def find_loss(store: Store, url: CheckpointURL, objects: Sequence[ObjectEntry]) -> str | None:
    """Why a save is incomplete: an object is gone, or a deletion's list names it. None if all will stay.

    Args:
        store: store with the checkpoint.
        url: URL of the checkpoint.
        objects: data objects of the save.

    Raises:
        StorageError: cannot tell.
    """
    directory = list_directory(store, url)
    paths = {entry.path for entry in objects}
    missing = directory.lacking({entry.path: entry.size for entry in objects}, exact=True)
    if missing:
        return f"{len(missing)} of its {len(paths)} objects are gone, the first {missing[0]}"
    for path in directory.deletions:
        try:
            named = paths & set(DeletionList.from_json(store.get(url.key(path)).data).objects)
        except errors.ObjectNotFoundError:
            return "a prune has just deleted something there"
        except ValueError as error:
            return f"a prune deletes something there, and its list {path} cannot be read: {error}"
        if named:
            return f"a prune is about to delete {len(named)} of its {len(paths)} objects, the first {min(named)}"
    return None
