"""What is measured: one save or load, of one rank and of all of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Direction = Literal["save", "load"]

NOT_SPILLING: Mapping[str, Any] = {"spill_dir": None, "durability": "s3"}
"""Settings in place of the user's: what waits on a disk would be uploaded after a benchmark has removed its prefix."""


@dataclass(frozen=True)
class RankFigures:
    """One save or load as one rank saw it."""

    seconds: float
    """Wall time."""
    cpu_seconds: float
    """CPU time of the process, all of its threads."""
    connections: int
    """Connections of the process in the end: what its next transfer begins with."""
    throttled: int
    """Requests that S3 refused with SlowDown or a like error."""
    hedged: int
    """Second GETs of ranges that straggled."""


@dataclass(frozen=True)
class Transfer:
    """One save or load by all ranks."""

    direction: Direction
    round: int
    """Number of the round, from 1. The first one is what a new process gets."""
    bytes: int
    """Bytes of all ranks."""
    seconds: float
    """Wall time of the slowest rank."""
    cpu_seconds: float
    """CPU time of all ranks."""
    connections: int
    """Connections of a rank in the end; of the rank with the most of them."""
    throttled: int
    """Requests that S3 refused with SlowDown or a like error, of all ranks."""
    hedged: int
    """Second GETs of ranges that straggled, of all ranks."""

    @property
    def bytes_per_second(self) -> float:
        """Bytes of all ranks by the slowest rank's time."""
        return self.bytes / self.seconds

    @property
    def cpu_seconds_per_gib(self) -> float:
        """CPU time of all ranks for a GiB."""
        return self.cpu_seconds * 2**30 / self.bytes

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rates = {"bytes_per_second": self.bytes_per_second, "cpu_seconds_per_gib": self.cpu_seconds_per_gib}
        return {**asdict(self), **rates}


def join(direction: Direction, number: int, size: int, ranks: Iterable[RankFigures]) -> Transfer:
    """The figures of all ranks as one.

    Args:
        direction: save or load.
        number: number of the round.
        size: bytes of all ranks.
        ranks: figures of each rank; at least one.
    """
    each = list(ranks)
    return Transfer(
        direction=direction,
        round=number,
        bytes=size,
        seconds=max(one.seconds for one in each),
        cpu_seconds=sum(one.cpu_seconds for one in each),
        connections=max(one.connections for one in each),
        throttled=sum(one.throttled for one in each),
        hedged=sum(one.hedged for one in each),
    )
