"""Running totals of this process, which events add to and `dcp_s3.stats` shows."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

from dcp_s3.process import reset_in_child


@dataclass(frozen=True)
class SaveTotals:
    """Saves of this process, since it began."""

    done: int = 0
    """Saves of which this rank's part is written."""
    failed: int = 0
    """Saves that failed on this rank, or on another one as far as this rank was told."""
    committed: int = 0
    """Commits that this process made: as the coordinator, or of its spilled saves."""
    bytes: int = 0
    """Bytes that this rank wrote, to S3 or to its spill directory."""
    seconds: float = 0.0
    """Seconds in which it wrote them."""
    stall_seconds: float = 0.0
    """Seconds for which stagers held the training up."""
    staged_bytes: int = 0
    """Bytes that were copied for asynchronous saves."""
    staging_seconds: float = 0.0
    """Seconds that these copies took."""
    last_step: int | None = None
    """Step of the last commit that this process knows of; None before the first, or if it has no number."""
    last_commit: float = 0.0
    """Seconds since the epoch of that commit; 0 before the first."""


@dataclass(frozen=True)
class LoadTotals:
    """Loads of this process, since it began."""

    done: int = 0
    """Loads that ended well."""
    failed: int = 0
    """Loads that failed on this rank."""
    bytes: int = 0
    """Bytes that this rank fetched for them, from S3 or its spill directory."""
    seconds: float = 0.0


@dataclass(frozen=True)
class SpillTotals:
    """The spill tier of this process, since it began."""

    objects: int = 0
    """Objects that went to the spill directory."""
    bytes: int = 0
    refused_bytes: int = 0
    """Those of them that went there because S3 did not take them, not because of ``DCP_S3_DURABILITY=local``."""
    drained_bytes: int = 0
    """Bytes that this process uploaded from there."""


@dataclass(frozen=True)
class PruneTotals:
    """Prunes of this process, since it began."""

    runs: int = 0
    """Prunes that were begun."""
    failed: int = 0
    """Prunes that raised, were stopped, or could not delete everything that they should."""
    deleted: int = 0
    """Checkpoints that were deleted."""
    freed_bytes: int = 0
    last_success: float = 0.0
    """Seconds since the epoch when a prune last succeeded; 0 before the first."""


@dataclass(frozen=True)
class Totals:
    """Everything that is counted in this process."""

    saves: SaveTotals = SaveTotals()
    loads: LoadTotals = LoadTotals()
    spill: SpillTotals = SpillTotals()
    prunes: PruneTotals = PruneTotals()


def add(to: str, latest: Mapping[str, float | None] | None = None, **amounts: float) -> None:
    """Add to the counts of one group of `Totals`, and set its ``latest`` values. Thread safe."""
    global _totals
    with _lock:
        group = getattr(_totals, to)
        sums = {name: getattr(group, name) + amount for name, amount in amounts.items()}
        _totals = replace(_totals, **{to: replace(group, **sums, **(latest or {}))})


def totals() -> Totals:
    return _totals


_totals = Totals()
_lock = threading.Lock()


@reset_in_child
def _begin_anew() -> None:
    global _totals, _lock
    _totals, _lock = Totals(), threading.Lock()
