"""The connections that saves and loads use: as many as fill the link. What one transfer found, the next begins with.

S3 gives one connection about 90 MB/s whatever the host can take, other stores give one connection all there is. So the
number of connections grows as long as more of them move more bytes, and goes back where they do not; from time to time
it is tried again. `Width` decides, by the bytes that moved while all connections were in use. A transfer counts them
with `Tuning`, which asks again every 50 ms and tells the transfer when the number changes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from dcp_s3.process import reset_in_child
from dcp_s3.s3.operations import Bucket, Place
from dcp_s3.settings import local_world_size
from dcp_s3.store import ReadWidth
from dcp_s3.units import format_size

logger = logging.getLogger(__name__)

Direction = Literal["upload", "download"]

_SETTLE_SECONDS = 0.1
"""After a change, until new connections are made and answered."""
_WINDOW_SECONDS = 0.2
"""For which bytes are counted before one number of connections is compared with another."""
_FEW, _MANY = 4, 32
_WORTH = 1.1
"""The least by which the bytes per second must rise when connections are added."""
_TRY_AGAIN_SECONDS = 20.0
"""Of moving bytes, after which more connections are tried again."""

_TICK_SECONDS = 0.05
_CALM_SECONDS = 1.0  # without throttling before more connections are tried
# More connections move no more where the CPUs are busy, and cost more of them.
_IDLE, _CPU_SECONDS = 0.1, 0.15


@dataclass
class _Link:
    """One direction to one bucket."""

    width: Width
    users: int = 0
    """Transfers now. Of several at once, nobody knows whose bytes fill the link."""


_links: dict[tuple[str | None, str, Direction], _Link] = {}
_lock = threading.Lock()


@reset_in_child
def _begin_anew() -> None:
    global _lock
    _lock = threading.Lock()
    _links.clear()


def connections_of(store: Place, direction: Direction) -> int:
    """The number of connections that a transfer begins with."""
    with _lock:
        return min(_link_of(store, direction).width.connections, store.settings.max_connections)


def likely_connections(store: Bucket, direction: Direction) -> int:
    """The number of connections that a transfer will likely come to: what its parts are to be shared among."""
    with _lock:
        return min(_link_of(store, direction).width.likely, store.settings.max_connections)


def most_connections(store: Place) -> int:
    """The most data requests that one transfer has in flight now, whatever its direction."""
    return max(connections_of(store, direction) for direction in get_args(Direction))


def _link_of(store: Place, direction: Direction) -> _Link:
    key = (store.settings.endpoint_url, store.name, direction)
    link = _links.get(key)
    if link is None:
        link = _links[key] = _Link(Width(first_width(cores(), local_world_size())))
    return link


class _IdleShare:
    """The share of the host's CPU time that nobody used since the last look."""

    def __init__(self) -> None:
        self._before = _cpu_times()

    def look(self) -> float:
        """From 0 to 1; 1 where the system does not tell."""
        before, self._before = self._before, _cpu_times()
        if before is None or self._before is None:
            return 1.0
        idle, total = (now - then for now, then in zip(self._before, before, strict=True))
        return idle / total if total > 0 else 1.0


def _cpu_times() -> tuple[int, int] | None:
    """Idle time and all time of the host's CPUs since it started, in ticks (Linux; see proc(5), stat)."""
    try:
        with open("/proc/stat") as file:
            fields = [int(field) for field in file.readline().split()[1:9]]
        return fields[3] + fields[4], sum(fields)
    except (OSError, ValueError, IndexError):
        return None


def cores() -> int:
    """The CPU cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # not on every system
        return os.cpu_count() or 1


def snapshot() -> dict[str, dict[str, float]]:
    """What was found, by ``{endpoint}/{bucket} {direction}``."""
    with _lock:
        return {
            f"{endpoint or 's3:/'}/{bucket} {direction}": {
                "connections": link.width.connections,
                "bytes_per_second": link.width.rate,
            }
            for (endpoint, bucket, direction), link in _links.items()
        }


class Tuning(ReadWidth):
    """Adapts the connections of one transfer while it runs. A context manager.

    Args:
        resize: called from a thread of its own with a new number of connections.
        most: ceiling besides that of the settings; None: none.
    """

    def __init__(
        self,
        store: Bucket,
        direction: Direction,
        *,
        resize: Callable[[int], None],
        is_busy: Callable[[], bool],
        most: int | None = None,
    ) -> None:
        with _lock:
            self._link = _link_of(store, direction)
            self._ceiling = min(most or store.settings.max_connections, store.settings.max_connections)
            self.connections = min(self._link.width.connections, self._ceiling)
            """Connections to use now."""
        self._gate = store.gate
        self._gate.raise_ceiling(self.connections)
        self._name = f"{direction}s {'to' if direction == 'upload' else 'from'} s3://{store.name}"
        self._resize = resize
        self._is_busy = is_busy
        self._count = 0
        self._count_lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def moved(self, count: int) -> None:
        """Note that ``count`` bytes moved. Called by any thread."""
        with self._count_lock:
            self._count += count

    def __enter__(self) -> Tuning:
        with _lock:
            self._link.users += 1
        if self._link.width.connections <= self._ceiling > 1:  # otherwise nothing can be learned
            thread = threading.Thread(target=self._run, name="dcp_s3-connections")
            with contextlib.suppress(RuntimeError):  # no thread can be started: the number stays
                thread.start()
                self._thread = thread
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with _lock:
            self._link.users -= 1

    def _run(self) -> None:
        width, at, before = self._link.width, time.monotonic(), 0
        cpu, idle, looked_at = _IdleShare(), 1.0, at
        while not self._ended.wait(_TICK_SECONDS):
            now = time.monotonic()
            seconds, at = now - at, now
            count, before = self._count - before, self._count
            if now - looked_at >= _CPU_SECONDS:
                idle, looked_at = cpu.look(), now
            counts = self._is_busy() and self._gate.is_calm(_CALM_SECONDS)
            with _lock:
                if counts and self._link.users == 1 and width.connections <= self._ceiling:
                    width.moved(seconds, count, self._ceiling if idle >= _IDLE else width.connections)
                else:
                    width.interrupted()
                connections, rate = min(width.connections, self._ceiling), width.rate
            if connections != self.connections:
                logger.debug(
                    "%s: %d connections carried %s/s; %d from now on",
                    self._name, self.connections, format_size(int(rate)), connections,
                )  # fmt: skip
                try:
                    self._resize(connections)
                except RuntimeError as error:
                    kept = self.connections
                    logger.warning("%s: %d connections stay: no thread can be started: %s", self._name, kept, error)
                    return
                self.connections = connections
                self._gate.raise_ceiling(connections)


# --- how many: no I/O, no clock --------------------------------------------------------------------


def first_width(cores: float, ranks: int) -> int:
    """The number of connections to begin with, where nothing is known: two for each core of a process.

    32 carry 2.7 GiB/s from S3, which few processes exceed. Where there are few cores, more connections than needed
    cost the most.
    """
    return max(_FEW, min(_MANY, round(2 * cores / ranks)))


class Width:
    """The number of connections to use in one direction. Not thread safe."""

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
