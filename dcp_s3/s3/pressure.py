"""What a process knows of a bucket, and so how much it sends and fetches at once: the gate that S3's throttling closes,
the connections of a transfer; and DCP_S3_MAX_BANDWIDTH. A forked child starts afresh.

`Gate` limits the data requests in flight to one bucket, uploads and downloads together. There is no limit until S3
throttles. Then half as many as were in flight may be, and one more after each successful round of requests; at as many
as before, there is no limit again.

S3 gives one connection about 90 MB/s whatever the host can take, other stores give one connection all there is. S3 is
known by the time that it takes to answer: a transfer then begins with many connections, otherwise with few. It takes
more (`Tuning`) if each of them is slow and more of them move more bytes. What one transfer found, the next begins with.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from dcp_s3.errors import DcpS3Error
from dcp_s3.events import Throttled, emit, shown_by_stats
from dcp_s3.process import local_world_size, reset_in_child
from dcp_s3.s3.hedge import Hedges
from dcp_s3.store import ReadWidth
from dcp_s3.units import format_size

logger = logging.getLogger(__name__)

Direction = Literal["upload", "download"]

_POLL_SECONDS = 0.1  # that a request waits for its turn before it looks whether to give up
_LOG_SECONDS = 10.0  # between log lines about one bucket
_LEAST_CEILING = 4  # of a gate that small requests close

# After a change, until new connections are made and answered (and their latency); then bytes are counted for so long.
_SETTLE_SECONDS, _WINDOW_SECONDS = 0.1, 0.2
_CALM_SECONDS = 1.0  # without throttling before bytes per second say something
_FEW, MANY = 4, 32  # connections to begin with: 32 carry 2.7 GiB/s from S3, which few processes exceed
# Connections to begin with for each core of a process: it is busy with two that are fast, and with 16 at 90 MB/s.
_NEAR_PER_CORE, _FAR_PER_CORE = 2, 16
# At most, to a store nearby, where each moves a GiB/s or more. The threads of more of them take Python's lock from the
# training: on 16 cores it went on at 0.9 of its speed during the uploads of 4, at 0.6 of 8, at 0.1 of 32.
_MOST_NEAR: dict[Direction, int] = {"upload": 4, "download": 8}
_FAR_SECONDS = 0.015
"""Latency from which on a store is taken for S3, or one as far away: S3 begins to answer after 20 to 200 ms."""
_LEAST_IDLE = 0.1
"""Share of this host's CPU time that must be idle: more connections cost more, and move nothing without it."""
_SLOW = 250e6
"""Bytes per second and connection below which more connections may move more: S3's carry 90 MB/s, those of a store
nearby 200 MB/s to more than 1 GB/s."""
_WORTH = 1.1
"""The least by which the bytes per second must rise when connections are added."""
_TRY_AGAIN_SECONDS = 60.0

# Of limited bandwidth: what may be made up for after a pause, and the sizes that are sent at once.
_BURST_SECONDS = 0.5
_SLICES_PER_SECOND = 8
_LEAST_SLICE, _MOST_SLICE = 16 * 2**10, 2**20


@dataclass(frozen=True)
class GateState:
    """A gate at one moment, with counts since the process began."""

    limit: int | None
    """Data requests that may be in flight; None for any number."""
    in_flight: int
    """Data requests that are in flight."""
    throttled: int
    """Requests that S3 throttled, small ones included."""
    decreases: int
    """Number of times that the limit fell."""


class Gate:
    """Holds data requests while as many are in flight as the limit allows. Thread safe.

    Only requests that began after the last decrease count: a burst that was in flight together lowers the limit once.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        """Requests that S3 throttled, small ones included."""
        self._changed = threading.Condition()
        self._limit = self._ceiling = math.inf
        self._in_flight = self._decreases = 0
        self._decreased_at = self._throttled_at = self._logged_at = -math.inf

    def enter(self) -> bool:
        """Wait a moment for a data request's turn; returns whether it has come. One call of `leave` must follow it."""
        with self._changed:
            if self._in_flight + 1 > self._limit:
                self._changed.wait(_POLL_SECONDS)
            has_turn = self._in_flight + 1 <= self._limit
            self._in_flight += has_turn
        return has_turn

    def leave(self, began: float, *, succeeded: bool) -> None:
        """Note the end of a data request that began at ``began`` (of time.monotonic)."""
        with self._changed:
            self._in_flight -= 1
            if succeeded and began > self._decreased_at and self._limit < math.inf:
                self._limit += 1 / self._limit
                if self._limit >= self._ceiling:
                    self._limit = math.inf
            self._changed.notify_all()

    def throttled(self, began: float) -> None:
        """Note that a request that began at ``began`` was throttled; a data request is still in flight."""
        now = time.monotonic()
        with self._changed:
            self.count += 1
            self._throttled_at = now
            if began <= self._decreased_at:
                return
            self._decreased_at = now
            if self._limit == math.inf:
                self._limit = self._ceiling = float(max(self._in_flight, _LEAST_CEILING))
            before, self._limit = int(self._limit), max(1.0, self._limit / 2)
            limit, fell = int(self._limit), int(self._limit) < before
            self._decreases += fell
            decreases, says = self._decreases, fell and now - self._logged_at >= _LOG_SECONDS
            if says:
                self._logged_at = now
        if says:
            text = "S3 throttles (%s): at most %d data requests in flight now, %d decreases so far"
            logger.info(text, self.name, limit, decreases)
        if fell:  # not under the lock: a subscriber may ask for the state
            emit(Throttled(bucket=self.name, limit=limit, decreases=decreases))

    def is_calm(self, seconds: float) -> bool:
        """Whether there is no limit, and S3 has not throttled for ``seconds``."""
        with self._changed:
            return self._limit == math.inf and time.monotonic() - self._throttled_at >= seconds

    @property
    def state(self) -> GateState:
        with self._changed:
            limit = None if self._limit == math.inf else int(self._limit)
            return GateState(limit, self._in_flight, self.count, self._decreases)


class Pace:
    """Lets so many bytes per second through: a token bucket. Thread safe, first come first served."""

    def __init__(self, rate: int) -> None:
        self.slice_size = max(_LEAST_SLICE, min(_MOST_SLICE, rate // _SLICES_PER_SECOND))
        """Most bytes to send at once: every connection gets its turn before S3 takes it for dead."""
        self._rate = rate
        self._lock = threading.Lock()
        self._free_at = -math.inf

    def reserve(self, count: int, now: float) -> float:
        """Take ``count`` bytes at the time ``now``; returns the seconds after which they may be sent."""
        with self._lock:
            start = max(self._free_at, now - _BURST_SECONDS)
            self._free_at = start + count / self._rate
        return max(0.0, start - now)


@dataclass
class Width:
    """The connections of one direction to one bucket."""

    connections: int
    """Those that a transfer begins with."""
    rate: float = 0.0
    """Bytes per second when it was last measured; 0 before."""
    known_until: float = -math.inf
    """When more connections are tried again, in seconds of time.monotonic."""
    smaller: tuple[int, float] | None = None
    """Connections and their bytes per second before the last growth, until it has been seen whether that was worth it:
    by the transfer that grew, or by a later one if that one was too short."""


class KnownBucket:
    """What this process knows of a bucket, shared by all its requests.

    Args:
        name: ``{endpoint}/{bucket}``; ``s3://{bucket}`` where AWS's own chain decides.
    """

    def __init__(self, name: str) -> None:
        self.name, self.gate, self.hedges = name, Gate(name), Hedges()
        self.widths: dict[Direction, Width] = {}
        self.quirks: set[Enum] = set()
        """What its store has turned out to lack."""
        self.latency = 0.0
        """Fewest seconds that a small request has waited for the head of its answer; 0 before any has."""

    def width(self, direction: Direction) -> Width:
        """The connections of one direction. Where nothing was measured they follow from the latency, and from the cores
        that this process may use: where there are few, more connections than needed cost the most."""
        width = self.widths.setdefault(direction, Width(0))
        if not width.rate:
            try:
                cores = len(os.sched_getaffinity(0))
            except (AttributeError, OSError):  # not on every system
                cores = os.cpu_count() or 1
            is_far = self.latency >= _FAR_SECONDS
            per_core, most = (_FAR_PER_CORE, MANY) if is_far else (_NEAR_PER_CORE, _MOST_NEAR[direction])
            width.connections = max(_FEW, min(most, round(per_core * cores / local_world_size())))
        return width


class Tuning(ReadWidth):
    """Adapts the connections of one transfer while it runs.

    Args:
        resize: called with a new number of connections, by a thread that notes bytes.
        is_busy: whether all connections are in use.
        most: the highest number.
    """

    def __init__(
        self, known: KnownBucket, direction: Direction, *, resize: Callable[[int], None], is_busy: Callable[[], bool],
        most: int,
    ) -> None:  # fmt: skip
        self._known, self._direction, self._width = known, direction, known.width(direction)
        self.connections = min(self._width.connections, most)
        self._resize, self._is_busy, self._most = resize, is_busy, most
        self._lock = threading.Lock()
        # What was found stays: of a transfer with a lower ceiling nothing can be learned.
        self._is_over = self._width.connections > most or most <= 1
        self._count, self._ticks = 0, (0, 0)
        self._since = time.monotonic() + _SETTLE_SECONDS + known.latency

    def begin(self) -> None:
        """Begin with more connections if it has turned out meanwhile that the store is far away."""
        with self._lock:
            first = min(self._known.width(self._direction).connections, self._most)
            if not self._width.rate and not self._is_over and first > self.connections:
                self._change(first)

    def moved(self, count: int) -> None:
        if self._is_over:
            return
        with self._lock:
            now, width = time.monotonic(), self._width
            if now < self._since:
                return
            if not self._is_busy() or now < width.known_until:
                self._count, self._since = 0, now
                return
            if not self._count:
                self._count, self._since, self._ticks = count, now, _cpu_ticks()
                return
            self._count += count
            seconds = now - self._since
            if seconds < _WINDOW_SECONDS or self._is_over:
                return
            rate, self._count = self._count / seconds, 0
            if not self._known.gate.is_calm(_CALM_SECONDS):
                return
            # What to make of the rate.
            width.rate = rate
            smaller, width.smaller = width.smaller, None
            idle, total = (after - before for after, before in zip(_cpu_ticks(), self._ticks, strict=True))
            if smaller is not None and rate <= smaller[1] * _WORTH:
                width.known_until = now + _TRY_AGAIN_SECONDS
                self._change(smaller[0])
            elif rate >= _SLOW * self.connections or self.connections >= self._most or idle < _LEAST_IDLE * total:
                width.known_until = now + _TRY_AGAIN_SECONDS
            else:
                width.smaller = self.connections, rate
                self._change(min(self._most, max(2 * self.connections, MANY)))

    def _change(self, connections: int) -> None:
        before, rate = self.connections, format_size(int(self._width.rate))
        name = f"{self._direction}s: {self._known.name}"
        logger.debug("%s: %d connections carried %s/s; %d from now on", name, before, rate, connections)
        try:
            self._resize(connections)
        except (RuntimeError, DcpS3Error) as error:
            self._is_over = True
            logger.warning("%s: %d connections stay: no thread can be started: %s", name, before, error)
            return
        self.connections = self._width.connections = connections
        self._count, self._since = 0, time.monotonic() + _SETTLE_SECONDS + self._known.latency


def _cpu_ticks() -> tuple[int, int]:
    """CPU time of this host so far: idle, and in all; zeros on systems that do not tell."""
    try:
        with open("/proc/stat") as file:
            ticks = [int(each) for each in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return 0, 0
    return sum(ticks[3:5]), sum(ticks)


# --- by endpoint and bucket, and by rate: dict.setdefault is one operation, so that no lock is needed ----------

known_buckets: dict[tuple[str | None, str], KnownBucket] = {}
paces: dict[int, Pace] = {}
"""What all uploads of this process at so many bytes per second share."""
reset_in_child(known_buckets.clear)
reset_in_child(paces.clear)

shown_by_stats(
    throttle=lambda: {known.name: known.gate.state for known in list(known_buckets.values())},
    hedges=lambda: {known.name: known.hedges.state for known in list(known_buckets.values())},
    connections=lambda: {
        f"{known.name} {direction}": {"connections": width.connections, "bytes_per_second": width.rate}
        for known in list(known_buckets.values())
        for direction, width in list(known.widths.items())
    },
)
