"""The body of an answer, received straight into the caller's memory.

http.client reads through an `io.BufferedReader` on a `socket.SocketIO`: three more Python calls for each receive. TLS
gives 16 KiB at a time, so a GiB takes 65,536 of them, each under the interpreter lock that the other threads wait for.
"""

from __future__ import annotations

import io
import ssl
from collections.abc import Callable
from typing import Any

# Smaller pieces are copied out of a buffer: a call for each would cost more than the copy.
_DIRECT = 16 * 2**10
_BUFFER = 256 * 2**10


class BodyReader(io.RawIOBase):
    """Reads the rest of an answer in place of the `io.BufferedReader` that has read its head.

    Args:
        head: that reader. It is drained, then only closed.
        sock: its socket.
    """

    def __init__(self, head: io.BufferedReader, sock: Any) -> None:
        self._head = head
        # `SSLSocket.recv_into` only checks and renames its arguments before it calls `read`.
        read = sock.read if isinstance(sock, ssl.SSLSocket) else None
        self._receive: Callable[[Any], Any] = sock.recv_into if read is None else lambda view: read(len(view), view)
        # If nothing is buffered, `peek` receives up to a buffer of 8 KiB.
        self._rest = memoryview(head.read1(len(head.peek(1))))
        self._buffer = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``; returns fewer bytes only where the stream ends."""
        view = memoryview(buffer).cast("B")
        size, done = len(view), 0
        while done < size:
            if self._rest:
                count = min(len(self._rest), size - done)
                view[done : done + count] = self._rest[:count]
                self._rest = self._rest[count:]
            elif size - done >= _DIRECT:
                count = self._receive(view[done:])
            else:
                self._refill()
                if not self._rest:
                    break
                continue
            if not count:
                break
            done += count
        return done

    def _refill(self) -> None:
        if not self._buffer:
            self._buffer = memoryview(bytearray(_BUFFER))
        self._rest = self._buffer[: self._receive(self._buffer)]

    def close(self) -> None:
        self._rest = self._buffer = memoryview(b"")
        self._head.close()
        super().close()
