"""A link like that to S3: each answer comes late, and each connection carries only so much."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What lies between clients and the server, for each connection by itself."""

    latency: float = 0.0
    """Seconds before an answer begins, after all of its request has come."""
    rate: float = math.inf
    """Bytes per second of bodies, in each direction."""


class Pace:
    """Lets so many bytes per second through. Not thread safe.

    Args:
        rate: bytes per second.
    """

    #: Bytes to move at a time: few sleeps, and short ones.
    STEP = 2**19

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    def moved(self, count: int) -> None:
        """Sleep until ``count`` bytes more would have come through. A pause is not made up for."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now) + count / self._rate
        time.sleep(self._free_at - now)
