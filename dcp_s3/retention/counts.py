"""What prunes of this process have done, for `dcp_s3.metrics`."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class RetentionCounts:
    """Attributes:
    runs: prunes that were begun.
    failed: those of them that raised, or could not delete all that they should.
    deleted: checkpoints that are gone.
    freed_bytes: data that went with them.
    last_success: seconds since the epoch when a prune last ended well; 0 before the first.
    """

    runs: int = 0
    failed: int = 0
    deleted: int = 0
    freed_bytes: int = 0
    last_success: float = 0.0


_counts = RetentionCounts()
_lock = threading.Lock()


def begin() -> None:
    """A prune begins."""
    with _lock:
        _counts.runs += 1


def end(*, succeeded: bool, deleted: int = 0, freed: int = 0) -> None:
    """It has ended.

    Args:
        succeeded: whether all was done.
        deleted: checkpoints.
        freed: bytes.
    """
    with _lock:
        _counts.failed += not succeeded
        _counts.deleted += deleted
        _counts.freed_bytes += freed
        if succeeded:
            _counts.last_success = time.time()


def snapshot() -> dict[str, Any]:
    """The counts now."""
    with _lock:
        return asdict(_counts)
