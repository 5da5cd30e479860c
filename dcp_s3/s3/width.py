"""How many connections fill the link to S3: found by how fast bytes move. Pure: no I/O, no clock.

S3 gives one connection about 90 MB/s whatever the host can take, other stores give one connection all there is. So the
number of connections grows as long as more of them move more bytes, and goes back where they do not. What was found is
kept for the next save or load; from time to time it is tried again.
"""

from __future__ import annotations

_SETTLE_SECONDS = 0.1
"""After a change, until new connections are made and answered."""
_WINDOW_SECONDS = 0.2
"""For which bytes are counted before one number of connections is compared with another."""
_FEW, _MANY = 4, 32
_WORTH = 1.1
"""The least by which the bytes per second must rise when connections are added."""
_TRY_AGAIN_SECONDS = 20.0
"""Of moving bytes, after which more connections are tried again."""


def first_width(cores: float, ranks: int) -> int:
    """The number of connections to begin with, where nothing is known: two for each core of a process.

    32 carry 2.7 GiB/s from S3, which few processes exceed. Where there are few cores, more connections than needed
    cost the most.

    Args:
        cores: CPU cores of the host.
        ranks: processes on the host.
    """
    return max(_FEW, min(_MANY, round(2 * cores / ranks)))


class Width:
    """The number of connections to use in one direction. Not thread safe.

    Args:
        first: number to begin with.
    """

    def __init__(self, first: int) -> None:
        self.connections = first
        """Connections to use now."""
        self.rate = 0.0
        """Bytes per second when it was last measured; 0 before."""
        self._smaller: tuple[int, float] | None = None
        self._held = _TRY_AGAIN_SECONDS
        self._begin()

    @property
    def likely(self) -> int:
        """The number of connections that a transfer which begins now will likely come to. Where cores are few, they are
        busy before 32 are reached."""
        if self._held < _TRY_AGAIN_SECONDS:
            return self.connections
        return max(self.connections, min(_MANY, 2 * self.connections))

    def _begin(self) -> None:
        self._settling = _SETTLE_SECONDS
        self._seconds = 0.0
        self._moved = 0

    def interrupted(self) -> None:
        """Note that what was counted so far says nothing: a transfer has begun or is ending, or S3 throttles."""
        self._begin()

    def moved(self, seconds: float, count: int, most: int) -> None:
        """Note that all connections were in use for ``seconds``, and moved ``count`` bytes.

        Args:
            seconds: time since the call before.
            count: bytes.
            most: highest number of connections to go on with.
        """
        if self._settling > 0:
            self._settling -= seconds
            return
        self._seconds += seconds
        self._moved += count
        if self._seconds < _WINDOW_SECONDS:
            return
        self.rate = self._moved / self._seconds
        self._held += self._seconds
        self._begin()
        self._settling = 0.0
        smaller, self._smaller = self._smaller, None
        if smaller is not None and self.rate <= smaller[1] * _WORTH:
            self._held = 0.0
            self._change(smaller[0])
        elif self.connections >= most:
            self._held = 0.0
        elif self._held >= _TRY_AGAIN_SECONDS:
            self._smaller = self.connections, self.rate
            self._change(min(most, max(2 * self.connections, _MANY)))

    def _change(self, connections: int) -> None:
        self.connections = connections
        self._begin()
