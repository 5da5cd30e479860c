"""Bodies of requests and answers that are not copied.

botocore insists on ``bytes`` or a file object as Body, and http.client would read the file in small copies.
`GatherBody` satisfies botocore; just before the request is sent, `botocore_private.send_without_copy` replaces it by
its `Chunks`, and http.client hands each to ``sendall`` as it is, with the GIL released.
"""

from __future__ import annotations

import contextlib
import io
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dcp_s3.s3.retry import this_thread

# Smaller pieces are copied out of a buffer: a call for each would cost more than the copy.
_DIRECT = 16 * 2**10
_BUFFER = 256 * 2**10

_JOIN_BELOW = 64 * 2**10
# Python's socket timeout covers a whole `sendall`: with 1 MiB only dead connections time out. Where links are slow, or
# many connections share one, the slices stay small.
_SEND_FIRST, _SEND_AT_ONCE = 64 * 2**10, 2**20
_SEND_FAST, _SEND_SLOW = 0.05, 0.5  # seconds for a slice

# Seconds after which what has been received is handed on, so that a slow store is seen to move.
_RECEIVE_SECONDS = 0.25
# Where links are fast, a thread is woken for what comes in so many seconds.
_WAKE_SECONDS, _MOST_AT_ONCE = 0.02, 2**21


@dataclass(eq=False, repr=False)
class GatherBody:
    """Several buffers sent as one body."""

    views: Sequence[memoryview]
    """The buffers in order; they must not change or go away before the request is done. To be dropped after the last
    attempt: botocore's errors keep the request, and so this body."""
    size: int
    """Bytes of all of them."""
    patience: float | None = None
    """Seconds after which the body is broken off, too."""
    moved: Callable[[int], None] | None = None
    """Called with the number of bytes of each slice that was sent."""
    furthest: int = 0
    """Bytes that one of the attempts has sent."""
    waited: float = 0.0
    """Seconds that all attempts waited for bandwidth."""
    _position: int = 0

    def __len__(self) -> int:
        return self.size

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """The next bytes, copied: only for callers that do not send views (none on the usual path)."""
        end = self.size if size is None or size < 0 else min(self.size, self._position + size)
        out = bytearray()
        start = 0
        for view in self.views:
            low, high = max(self._position, start), min(end, start + view.nbytes)
            if low < high:
                out += view[low - start : high - start]
            start += view.nbytes
        self._position = max(self._position, end)
        return bytes(out)


@dataclass(frozen=True)
class Chunks:
    """The bytes of a body for ``sendall``, as a repeatable iterable: large buffers in slices, neighbours that are small
    joined. It must not look like a file, or it would be read like one."""

    body: GatherBody

    def __iter__(self) -> Iterator[memoryview | bytes]:
        body, attempts, started = self.body, this_thread.attempts, time.monotonic()
        most = min(_SEND_AT_ONCE, attempts.slice_size or _SEND_AT_ONCE)
        size, sent, waited = min(_SEND_FIRST, most), 0, body.waited
        for view in _join_small(body.views):
            position = 0
            while position < len(view):
                piece = view[position : position + size]
                position += len(piece)
                body.waited += attempts.before_sending(len(piece))
                began = time.monotonic()
                if body.patience is not None and began - started - (body.waited - waited) > body.patience:
                    raise ConnectionAbortedError(f"the body was not through after {body.patience:g} s")
                yield piece
                seconds = time.monotonic() - began
                if seconds < _SEND_FAST:
                    size = min(2 * size, most)
                elif seconds > _SEND_SLOW:
                    size = max(size // 2, min(_SEND_FIRST, most))
                sent += len(piece)
                if body.moved is not None:
                    body.moved(len(piece))
                if sent > body.furthest:  # what is sent once more is no progress
                    attempts.progress.moved(sent - body.furthest)
                    body.furthest = sent

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Called by botocore before it sends the body again to another region; every iteration begins at 0 anyway."""
        return 0


def _join_small(views: Sequence[memoryview]) -> Iterator[memoryview | bytes]:
    small: list[memoryview] = []
    small_size = 0
    for view in views:
        if small and small_size + view.nbytes > _JOIN_BELOW:
            yield b"".join(small)
            small, small_size = [], 0
        if view.nbytes >= _JOIN_BELOW:
            yield view
        elif view.nbytes:
            small.append(view)
            small_size += view.nbytes
    if small:
        yield b"".join(small)


class BodyReader(io.RawIOBase):
    """Reads the rest of an answer in place of the `io.BufferedReader` that has read its head, straight into the
    caller's memory: http.client makes three more Python calls for each receive, under the interpreter lock. Of TLS's
    16 KiB a GiB takes 65,536.

    Where bytes come fast, the kernel wakes the thread for many of them at a time (SO_RCVLOWAT). Not with TLS: it gains
    nothing there, and OpenSSL may hold a part of those that are waited for.
    """

    def __init__(self, head: io.BufferedReader, sock: Any) -> None:
        self._head = head
        is_plain = isinstance(sock, socket.socket) and not isinstance(sock, ssl.SSLSocket)
        self._plain: socket.socket | None = sock if is_plain else None
        # `SSLSocket.recv_into` only checks and renames its arguments before it calls `read`.
        read = sock.read if isinstance(sock, ssl.SSLSocket) else None
        self._receive: Callable[[Any], Any] = sock.recv_into if read is None else lambda view: read(len(view), view)
        self._error: OSError | None = None
        # If nothing is buffered, `peek` receives up to a buffer of 8 KiB.
        self._rest = memoryview(head.read1(len(head.peek(1))))
        self._buffer = memoryview(b"")
        self._least, self._step = 1, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer``; returns fewer bytes where the stream ends or breaks, and where it is slow."""
        if self._error is not None:
            raise self._error
        view = memoryview(buffer).cast("B")
        size, done = len(view), 0
        attempts, began = this_thread.attempts, time.monotonic()
        until = began + _RECEIVE_SECONDS
        self._wake_for(size)
        try:
            while done < size:
                if self._rest:
                    count = min(len(self._rest), size - done)
                    view[done : done + count] = self._rest[:count]
                    self._rest = self._rest[count:]
                elif done and time.monotonic() > until:
                    break
                elif size - done >= _DIRECT:
                    if size - done < self._least:
                        self._wake_for(size - done)
                    count = attempts.receive(self._receive_many, view[done:])
                else:
                    if not self._buffer:
                        self._buffer = memoryview(bytearray(_BUFFER))
                    self._wake_for(0)
                    self._rest = self._buffer[: attempts.receive(self._receive, self._buffer)]
                    if not self._rest:
                        break
                    continue
                if not count:
                    break
                done += count
        except OSError as error:
            self._step = 0
            if not done:
                raise
            self._error = error
        self._step = min(_MOST_AT_ONCE, int(done * _WAKE_SECONDS / (time.monotonic() - began + 1e-6)))
        return done

    def _receive_many(self, view: memoryview) -> int:
        """Receive; what has come is taken if that is less than was waited for: the link is slow by now."""
        try:
            return int(self._receive(view))
        except TimeoutError:
            if self._least == 1 or (sock := self._plain) is None:
                raise
            self._wake_for(0)
            timeout = sock.gettimeout()
            sock.settimeout(0)
            try:
                return sock.recv_into(view)
            except BlockingIOError:
                raise TimeoutError("timed out") from None
            finally:
                sock.settimeout(timeout)

    def _wake_for(self, size: int) -> None:
        """Let the thread sleep until many of the next ``size`` bytes are there, or the stream ends."""
        least = min(self._step, size)
        least = least if least > _DIRECT else 1
        if least != self._least and self._plain is not None:
            with contextlib.suppress(OSError):  # the system does not have it, or the connection is closed
                self._plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            self._least = least

    def close(self) -> None:
        self._wake_for(0)
        self._rest = self._buffer = memoryview(b"")
        self._head.close()
        super().close()
