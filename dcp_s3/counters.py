"""Counters of this process, for monitoring."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from dcp_s3.retention import prune_totals
from dcp_s3.s3 import connections, hedge, throttle
from dcp_s3.spill.session import spilled_bytes


def metrics() -> dict[str, Any]:
    """Counters of this process, as plain dicts of numbers.

    ``throttle``
        by ``{endpoint}/{bucket}``: ``limit``, ``in_flight`` and ``waiting`` (data requests, now), ``throttled``
        (requests that S3 refused with SlowDown or a like error), ``decreases`` (of the limit) and ``waited`` (seconds
        for which data requests were held back, in total).
    ``hedges``
        by ``{endpoint}/{bucket}``: second GETs of ranges whose first GET straggled: ``started``, ``won`` (were faster),
        ``bytes`` (received by them) and ``wasted`` (bytes received twice).
    ``connections``
        by ``{endpoint}/{bucket} {direction}`` (``upload``, ``download``): ``connections`` that a transfer begins with,
        as found by earlier ones, and ``bytes_per_second`` when that was last measured.
    ``spilled_bytes``
        by reason: ``local durability``, or ``s3`` (S3 did not take them).
    ``retention``
        prunes by a `CheckpointManager` or ``dcp-s3 prune``: ``runs``, ``failed`` (runs), ``deleted`` (checkpoints),
        ``freed_bytes`` and ``last_success`` (seconds since the epoch; 0 before the first).

    >>> metrics()["retention"]["failed"]
    0
    """
    return {
        "throttle": {name: asdict(state) for name, state in throttle.snapshot().items()},
        "hedges": {name: asdict(state) for name, state in hedge.snapshot().items()},
        "connections": connections.snapshot(),
        "spilled_bytes": dict(spilled_bytes),
        "retention": prune_totals.snapshot(),
    }
