"""`stats`: what this process has done, for monitoring."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from dcp_s3.events import Totals, totals
from dcp_s3.s3 import hedge, pressure
from dcp_s3.s3.hedge import HedgeState
from dcp_s3.s3.pressure import GateState


@dataclass(frozen=True)
class Stats(Totals):
    """What this process has done since it began.

    Keys of the mappings are ``{endpoint}/{bucket}``.

    >>> sorted(stats().to_dict())
    ['connections', 'hedges', 'loads', 'prunes', 'saves', 'spill', 'throttle']
    """

    throttle: dict[str, GateState] = field(default_factory=dict)
    """``throttled`` requests, the ``limit`` of those in flight that follows, and so on."""
    hedges: dict[str, HedgeState] = field(default_factory=dict)
    """Second GETs of ranges whose first GET straggled: ``started``, ``won`` and ``wasted`` bytes."""
    connections: dict[str, dict[str, float]] = field(default_factory=dict)
    """By ``{endpoint}/{bucket} {direction}`` (``upload``, ``download``): ``connections`` that a transfer begins with,
    as found by earlier ones, and ``bytes_per_second`` when that was last measured."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts of numbers, for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        saves, loads = self.saves, self.loads
        return (
            f"Stats(saves={saves.done}, failed_saves={saves.failed}, last_step={saves.last_step}, loads={loads.done}, "
            f"failed_loads={loads.failed})"
        )


def stats() -> Stats:
    """What this process has done since it began.

    >>> with CheckpointManager("s3://bucket/run") as manager:
    ...     saved = manager.save(3000, state)
    >>> stats().saves.last_step
    3000
    """
    return Stats(
        **vars(totals()),
        throttle=pressure.gates(),
        hedges=hedge.snapshot(),
        connections=pressure.widths(),
    )
