"""Prunes as events, and in `dcp_s3.stats`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from dcp_s3 import totals
from dcp_s3.events import Listener, Pruned, PruneFailed, emit
from dcp_s3.retention.prune import PruneReport


@contextlib.contextmanager
def counting(root: str, on_event: Listener | None = None) -> Iterator[Callable[[PruneReport], None]]:
    """Count the prune in the body, which passes its report to the yielded function. Without a report it failed.

    Args:
        root: URL above the checkpoints.
        on_event: gets `Pruned` or `PruneFailed`.
    """
    reports: list[PruneReport] = []
    totals.add("prunes", runs=1)
    began = time.monotonic()
    try:
        yield reports.append
    except BaseException as error:
        emit(PruneFailed(root=root, error=error), on_event)
        raise
    for report in reports:
        emit(
            Pruned(
                root=root,
                deleted=len(report.deleted),
                freed_bytes=report.size,
                seconds=time.monotonic() - began,
                ok=report.ok,
            ),
            on_event,
        )
