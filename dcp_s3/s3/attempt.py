"""One attempt of a request while it is on the wire: how long it may wait, and how fast it may send.

botocore passes none of it down. So it is a property of the thread that makes the request, and the ends of the way look
it up there: the sockets (`botocore_private`) and the bodies (`body`).
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

from urllib3.util import Timeout

from dcp_s3.limit import Progress
from dcp_s3.s3.throttle import Pace

# A thread that waits for bytes looks so often, in the time without progress, whether that is over.
_LOOKS = 10

this_thread = threading.local()
"""``attempt`` and ``flight`` of the requests that this thread makes, if set."""


class Attempt:
    """The bounds of one attempt.

    Args:
        what: the request, for messages.
        connect: most seconds to wait for a connection.
        read: most seconds without a byte.
    """

    def __init__(
        self,
        what: str = "a request",
        *,
        connect: float,
        read: float,
        progress: Progress,
        cancel: threading.Event | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._what, self._read, self._progress, self._cancel, self._pace = what, read, progress, cancel, pace
        self._tick = min(read, progress.seconds / _LOOKS)
        self.timeout = Timeout(connect=connect, read=self._tick)
        self.send_timeout = min(read, progress.seconds)

    @contextlib.contextmanager
    def on_this_thread(self) -> Iterator[None]:
        before = getattr(this_thread, "attempt", None)
        this_thread.attempt = self
        try:
            yield
        finally:
            this_thread.attempt = before

    def check(self) -> None:
        """Break the attempt off if nothing has moved for too long: `retry` then says so."""
        if self._progress.is_over(self._what):
            raise ConnectionAbortedError("nothing moved for too long")

    def moved(self, count: int) -> None:
        """Note bytes that moved for the first time."""
        self._progress.moved(count)

    def receive(self, receive: Callable[[Any], int], view: Any) -> int:
        """Receive into ``view``; waits as long as the attempt may, however short the socket's own timeout."""
        waited = 0.0
        while True:
            try:
                return receive(view)
            except TimeoutError:
                waited += self._tick
                if waited >= self._read:
                    raise
            self.check()

    @property
    def slice_size(self) -> int | None:
        """Most bytes to send at once; None for any number."""
        return None if self._pace is None else self._pace.slice_size

    def before_sending(self, count: int) -> float:
        """Wait until ``count`` bytes may be sent; returns the seconds waited."""
        if self._cancel is not None and self._cancel.is_set():
            raise ConnectionAbortedError("the upload was cancelled")
        self.check()
        return 0.0 if self._pace is None else self._pace.wait(count, self._cancel)


_UNBOUNDED = Attempt(connect=60.0, read=60.0, progress=Progress(math.inf))


def current_attempt() -> Attempt:
    """The attempt that this thread makes."""
    found: Attempt | None = getattr(this_thread, "attempt", None)
    return _UNBOUNDED if found is None else found
