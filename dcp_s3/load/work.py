"""The requests that the threads of one fetch share, and what has become of them."""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from dcp_s3.load.plan import ReadRequest, halve
from dcp_s3.load.transfer import Transfer


class Arrival(NamedTuple):
    """A request that has been carried out."""

    request: ReadRequest
    """The request as it was planned."""
    finished: list[Transfer]
    """Transfers that this request completed: in place, and verified."""


class Work:
    """Requests to be carried out, and their outcomes. Thread-safe.

    Args:
        requests: requests in order.
        ahead: number of requests that may be taken before `make_room` is called.
        divide: whether to halve requests where there are fewer than threads that were added.

    Attributes:
        outcomes: outcomes of requests; errors; and None from each thread that has ended.
    """

    def __init__(self, requests: Iterable[ReadRequest], ahead: int, *, divide: bool = False) -> None:
        self._planned: deque[ReadRequest] = deque(requests if divide else ())
        self._requests = iter(() if divide else requests)
        self._expected = 0
        """Threads that have not asked for their first request."""
        self._again: deque[ReadRequest] = deque()
        self._room = ahead
        self._wanted = 0
        self._surplus = 0
        self._is_over = False
        self._changed = threading.Condition()
        self.outcomes: queue.SimpleQueue[Arrival | BaseException | None] = queue.SimpleQueue()
        self.running = 0
        """Threads whose end has not been noted."""

    def resize(self, count: int) -> int:
        """Have ``count`` threads from now on; returns how many to start. Surplus ones get no more requests."""
        with self._changed:
            more, self._wanted = count - self._wanted, count
            if more < 0:
                self._surplus -= more
                return 0
            staying = min(more, self._surplus)
            self._surplus -= staying
            starting = 0 if self._is_over else more - staying
            self.running += starting
            self._expected += starting
            return starting

    def ended(self) -> None:
        """Note that a thread has ended."""
        with self._changed:
            self.running -= 1

    @property
    def is_busy(self) -> bool:
        """Whether there is more to do than the threads do now."""
        return not self._is_over and self._room > 0

    def next(self) -> ReadRequest | None:
        """The next request to fetch; None for a thread that is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._room > 0)
            if self._surplus:
                self._surplus -= 1
                return None
            request = self._take()
            self._is_over = request is None
            self._room -= request is not None
            return request

    def _take(self) -> ReadRequest | None:
        self._expected = max(0, self._expected - 1)
        if self._again:
            return self._again.popleft()
        if not self._planned:
            return next(self._requests, None)
        request = self._planned.popleft()  # the largest
        halves = halve(request) if len(self._planned) < self._expected else None
        if halves is None:
            return request
        self._planned.append(halves[1])
        return halves[0]

    def add(self, requests: Iterable[ReadRequest]) -> None:
        """Add requests to be fetched before all others."""
        with self._changed:
            self._again.extend(requests)

    def make_room(self) -> None:
        """Note that an outcome has been taken."""
        with self._changed:
            self._room += 1
            self._changed.notify()

    def stop(self) -> None:
        """Let `next` return nothing more."""
        with self._changed:
            self._requests, self._room, self._is_over = iter(()), sys.maxsize, True
            self._again.clear()
            self._planned.clear()
            self._changed.notify_all()
