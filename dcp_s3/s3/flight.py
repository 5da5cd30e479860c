"""A request in flight: how far it is, how to break it off from another thread, and how long it may hang.

A thread that waits for S3 wakes at once when its socket is shut down. botocore keeps the socket to itself until the
head of the answer is there, so the clients' connections note it for the `Flight` of their thread
(`botocore_private.make_abortable`). Where those are not as expected, a request that is broken off goes on until its
socket says something, and each request may hang for as long as the first user of its client said.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from typing import Any

from urllib3.util import Timeout

this_thread = threading.local()
"""``timeout`` and ``flight`` of the requests that this thread makes, if set."""


@contextlib.contextmanager
def hang_at_most(connect: float, read: float) -> Iterator[None]:
    """Let requests of this thread wait at most so many seconds for a connection, and for the next byte."""
    before = getattr(this_thread, "timeout", None)
    this_thread.timeout = Timeout(connect=connect, read=read)
    try:
        yield
    finally:
        this_thread.timeout = before


class Flight:
    """One request, with its progress for the thread that watches it.

    Attributes:
        moves: grows with everything that arrives (the head of the answer, a block of its body), and with each attempt.
        awaits: bytes of the block that comes next, 0 while the head is awaited, None while nothing is on the wire.
    """

    __slots__ = ("_descriptor", "_is_broken", "_lock", "awaits", "moves")

    def __init__(self) -> None:
        self.moves = 0
        self.awaits: int | None = None
        self._lock = threading.Lock()
        # A duplicate of the socket's: shutting down the original could hit whatever has its number after it was closed.
        self._descriptor = -1
        self._is_broken = False

    def await_bytes(self, count: int) -> None:
        """Note that something arrived; ``count`` bytes are next, 0 for the head."""
        self.moves += 1
        self.awaits = count

    @contextlib.contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Bind this thread's requests to this flight until the context ends."""
        before = getattr(this_thread, "flight", None)
        this_thread.flight = self
        try:
            yield
        finally:
            self.awaits = None
            self.let_go()
            this_thread.flight = before

    def note(self, sock: Any) -> None:
        """Note the request's socket; called by the thread that uses it.

        Raises:
            ConnectionAbortedError: the request was broken off before.
        """
        with self._lock:
            self._close()
            self._refuse_broken()
            with contextlib.suppress(OSError):  # no descriptor is left, or the socket is closed: cannot be broken off
                self._descriptor = os.dup(sock.fileno())

    def let_go(self) -> bool:
        """Release the request's connection; False if it has been shut down."""
        with self._lock:
            self._close()
            return not self._is_broken

    def break_off(self) -> None:
        """Wake the thread that waits for the socket, now or as soon as it has one. The connection is of no more use."""
        with self._lock:
            self._is_broken = True
            if self._descriptor < 0:
                return
            descriptor, self._descriptor = self._descriptor, -1
            # Not through the socket object: a TLS one would read what is left in the kernel as if it were plain.
            with socket.socket(fileno=descriptor) as duplicate, contextlib.suppress(OSError):
                duplicate.shutdown(socket.SHUT_RDWR)

    def _refuse_broken(self) -> None:
        if self._is_broken:
            raise ConnectionAbortedError("the request was broken off")

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
