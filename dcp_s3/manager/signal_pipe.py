"""SIGTERM seen by another thread than the main one, which may be in C code for minutes.

Python's handlers run in the main thread, between two of its instructions: while it waits in a collective or for a lock,
none may run. But what Python does at once, in whatever thread, is to write the signal's number to a pipe, if there is
one.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
import weakref

from dcp_s3.forking import reset_in_child

_NONE = -1

_open: weakref.WeakSet[SignalPipe] = weakref.WeakSet()


class SignalPipe:
    """Sees SIGTERM from any thread. For the main thread to make and close.

    Where somebody else has such a pipe (an event loop with signal handlers), it sees nothing.
    """

    def __init__(self) -> None:
        self.came_at: float | None = None
        """When SIGTERM was seen first, in seconds of time.monotonic."""
        self._reads, self._writes = os.pipe()
        for end in (self._reads, self._writes):
            os.set_blocking(end, False)
        self._poll = select.poll()
        self._poll.register(self._reads, select.POLLIN)
        before = signal.set_wakeup_fd(self._writes, warn_on_full_buffer=False)
        if before != _NONE:
            signal.set_wakeup_fd(before)
        _open.add(self)

    def wait(self, seconds: float) -> None:
        """Wait for a signal, at most so long."""
        if self._poll.poll(1000 * seconds):
            numbers = os.read(self._reads, 4096)
            if signal.SIGTERM in numbers and self.came_at is None:
                self.came_at = time.monotonic()

    def close(self) -> None:
        """Nobody waits any more. Called in another thread, the pipe stays."""
        if threading.current_thread() is not threading.main_thread():
            return
        _open.discard(self)
        _take_back(self)
        os.close(self._writes)
        os.close(self._reads)


def _take_back(pipe: SignalPipe) -> None:
    before = signal.set_wakeup_fd(_NONE)
    if before != pipe._writes:
        signal.set_wakeup_fd(before)


@reset_in_child
def _forget() -> None:
    # A forked process shares the pipe, and must not tell its parent of its own signals.
    for pipe in list(_open):
        _take_back(pipe)
    _open.clear()
