"""Totals of the prunes in this process, for `dcp_s3.metrics`."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dcp_s3.retention.prune import PruneReport


@dataclass
class PruneTotals:
    runs: int = 0
    """Prunes that were begun."""
    failed: int = 0
    """Prunes that raised, were stopped, or could not delete everything that they should."""
    deleted: int = 0
    """Checkpoints that were deleted."""
    freed_bytes: int = 0
    """Bytes that were deleted."""
    last_success: float = 0.0
    """Seconds since the epoch when a prune last succeeded; 0 before the first."""


_totals = PruneTotals()
_lock = threading.Lock()


@contextlib.contextmanager
def counting() -> Iterator[Callable[[PruneReport], None]]:
    """Count the prune in the body, which passes its report to the yielded function. Without a report it failed."""
    reports: list[PruneReport] = []
    with _lock:
        _totals.runs += 1
    try:
        yield reports.append
    finally:
        with _lock:
            ok = bool(reports) and reports[0].ok
            _totals.failed += not ok
            _totals.deleted += sum(len(report.deleted) for report in reports)
            _totals.freed_bytes += sum(report.size for report in reports)
            if ok:
                _totals.last_success = time.time()


def snapshot() -> dict[str, Any]:
    """The totals now."""
    with _lock:
        return asdict(_totals)
