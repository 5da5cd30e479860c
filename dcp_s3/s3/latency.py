"""How long a GET should take, judged by those that this process has completed. No I/O, no clock; not thread safe."""

from __future__ import annotations

import collections
import math
from dataclasses import dataclass

_WINDOW = 256
_ENOUGH = 8  # samples; with fewer, `START` counts
# Shorter bodies say more about the client's scheduling than about the bandwidth.
_MIN_BODY = 256 * 2**10
# The rate is of whole bodies; single blocks vary more.
_BLOCK_FACTOR = 2.0


@dataclass(frozen=True)
class Expected:
    """Times that nearly all requests keep to."""

    head: float
    """Seconds from the request to the head of the answer."""
    per_byte: float
    """Seconds for each byte of the body."""

    def seconds(self, awaits: int) -> float:
        """Seconds within which the next ``awaits`` bytes of a body should come; 0 for the head."""
        return _BLOCK_FACTOR * self.per_byte * awaits if awaits else self.head


# S3's first byte comes after 30 to 200 ms, the rest at 90 MB/s (docs/performance.md); stores on disks are slower.
START = Expected(head=0.5, per_byte=1 / 10e6)


class Latencies:
    """The last `_WINDOW` requests that completed."""

    def __init__(self) -> None:
        self._heads: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._rates: collections.deque[float] = collections.deque(maxlen=_WINDOW)
        self._known: dict[float, Expected] = {}

    def add(self, head: float, body: float, size: int) -> None:
        """Add a completed request.

        Args:
            head: seconds until the head of the answer.
            body: seconds from the head to the end.
            size: bytes of the body.
        """
        self._heads.append(head)
        if size >= _MIN_BODY:
            self._rates.append(body / size)
        self._known.clear()

    def expect(self, percentile: float) -> Expected:
        """Head and rate that ``percentile`` percent of requests kept to, each alone; `START` if too few are known."""
        found = self._known.get(percentile)
        if found is None:
            found = self._known[percentile] = Expected(
                _percentile(self._heads, percentile, START.head), _percentile(self._rates, percentile, START.per_byte)
            )
        return found


def _percentile(samples: collections.deque[float], percentile: float, unknown: float) -> float:
    if len(samples) < _ENOUGH:
        return unknown
    ranked = sorted(samples)
    return ranked[min(len(ranked), max(1, math.ceil(len(ranked) * percentile / 100))) - 1]


class Budget:
    """How many requests may be sent twice: a share of all, so that a slow store is not asked for twice as much.

    Args:
        share: budget that each request earns.
        start: budget before any request was made.
        most: highest budget, however many requests there were.
    """

    def __init__(self, share: float, start: int, most: int) -> None:
        self._share = share
        self._most = most
        self._left = float(start)

    def earn(self) -> None:
        """Add a request's share."""
        self._left = min(float(self._most), self._left + self._share)

    @property
    def is_left(self) -> bool:
        """Whether a request may be sent twice now."""
        return self._left >= 1

    def take(self) -> bool:
        """Whether a request may be sent twice now; if so, it is charged."""
        if not self.is_left:
            return False
        self._left -= 1
        return True
