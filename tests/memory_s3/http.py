"""HTTP/1.1 on a socket, as much as S3 needs, with bodies that go straight into their memory."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus

from awscrt.checksums import crc64nvme

from .memory import Body, Pool

_HEAD_LIMIT = 64 * 1024
_RECV_SIZE = 64 * 1024
#: Lets the kernel fill a whole block per call, so the interpreter lock changes hands less often.
_WAITALL = getattr(socket, "MSG_WAITALL", 0)
_MORE = getattr(socket, "MSG_MORE", 0)
_PHRASES = {status.value: status.phrase for status in HTTPStatus}


@dataclass(frozen=True)
class Link:
    """What lies between clients and the server, for each connection by itself."""

    latency: float = 0.0
    """Seconds before an answer begins, after all of its request has come."""
    rate: float = math.inf
    """Bytes per second of bodies, in each direction."""


class Pace:
    """Lets so many bytes per second of each body through. Not thread safe.

    Args:
        rate: bytes per second.
    """

    #: Bytes to move at a time: few sleeps, and short ones.
    STEP = 2**19
    #: Seconds that are made up for where this process comes late: a link moves bytes while nobody looks.
    LATE = 0.02

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    def begin(self) -> None:
        """A body begins."""
        self._free_at = time.monotonic()

    def moved(self, count: int) -> None:
        """Sleep until ``count`` bytes more would have come through. A longer pause is not made up for."""
        now = time.monotonic()
        self._free_at = max(self._free_at, now - self.LATE) + count / self._rate
        if self._free_at > now:
            time.sleep(self._free_at - now)


class MalformedRequestError(Exception):
    """The bytes are not an HTTP request that this server understands."""


@dataclass(frozen=True)
class Head:
    """A request's first line and headers (names in lower case)."""

    method: str
    target: str
    headers: Mapping[str, str]

    @property
    def content_length(self) -> int:
        if "transfer-encoding" in self.headers or "x-amz-trailer" in self.headers:
            raise MalformedRequestError("chunked bodies are not understood")
        return int(self.headers.get("content-length", "0"))


@dataclass(frozen=True)
class Response:
    """An answer. ``headers`` need no Content-Length unless it differs from the body's (HEAD)."""

    status: int = 200
    body: Body = field(default_factory=Body)
    headers: Mapping[str, str] = field(default_factory=dict)


class Connection:
    """One client's socket: reads requests, writes responses."""

    def __init__(self, sock: socket.socket, link: Link | None = None) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._buffer = b""
        self._latency = 0.0 if link is None else link.latency
        self._pace = None if link is None or link.rate == math.inf else Pace(link.rate)
        if self._pace is not None:  # a link holds little: what a client has sent is not far ahead of what arrived
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, Pace.STEP)
        self.sent = 0

    def read_head(self) -> Head | None:
        """The next request's head, or None when the client has closed the connection."""
        while b"\r\n\r\n" not in self._buffer:
            if len(self._buffer) > _HEAD_LIMIT:
                raise MalformedRequestError("the request head is too long")
            data = self._socket.recv(_RECV_SIZE)
            if not data:
                return None
            self._buffer += data
        head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
        lines = head.decode("utf-8", "surrogateescape").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3:
            raise MalformedRequestError(f"not a request line: {lines[0]!r}")
        pairs = (line.partition(":") for line in lines[1:])
        return Head(words[0], words[1], {name.strip().lower(): value.strip() for name, _, value in pairs})

    def begin_body(self) -> None:
        """A body begins, in either direction."""
        if self._pace is not None:
            self._pace.begin()

    def read_into(self, view: memoryview) -> None:
        ready = min(len(self._buffer), len(view))
        view[:ready], self._buffer = self._buffer[:ready], self._buffer[ready:]
        view = view[ready:]
        while view:
            step = view if self._pace is None else view[: Pace.STEP]
            received = self._socket.recv_into(step, 0, _WAITALL)
            if not received:
                raise ConnectionError("the client closed the connection inside a body")
            if self._pace is not None:
                self._pace.moved(received)
            view = view[received:]

    def send(self, response: Response, *, keep: bool, body: bool = True, limit: int | None = None) -> None:
        """Write a response; `sent` is then the bytes of its body that were sent, also if the client breaks it off.

        ``body=False`` answers HEAD; ``limit`` cuts the body short of what the head announces.
        """
        self.sent = 0
        head = _head(response, keep=keep)
        content = response.body if limit is None else response.body.slice(0, limit)
        pieces = content.pieces if body else ()
        if self._latency:
            time.sleep(self._latency)
        self._socket.sendall(head, _MORE if pieces else 0)
        self.begin_body()
        for piece in pieces:
            while piece:
                count = self._socket.send(piece if self._pace is None else piece[: Pace.STEP])
                self.sent += count
                piece = piece[count:]
                if self._pace is not None:
                    self._pace.moved(count)

    def send_bytes(self, data: bytes | memoryview) -> None:
        self._socket.sendall(data)

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until the client closes the connection; False if it did not in that time."""
        until = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._socket, getattr(select, "POLLRDHUP", 0))
        while (left := until - time.monotonic()) > 0:
            if poll.poll(left * 1000):
                return True
        return False

    def send_head(self, response: Response, *, limit: int) -> None:
        """Write a response's status line, and no more than ``limit`` bytes of its head."""
        head = _head(response, keep=True)
        shortest, longest = head.index(b"\r\n") + 2, len(head) - 4
        self._socket.sendall(head[: min(max(limit, shortest), longest)])

    def reset(self) -> None:
        """Close so that the client sees a reset connection (RST) rather than an orderly end."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def shut_down(self) -> None:
        """Wake whatever thread is reading or writing; to be called from another thread."""
        with contextlib.suppress(OSError):  # the client or this connection's thread was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def _head(response: Response, *, keep: bool) -> bytes:
    headers = {"Content-Length": str(len(response.body)), **response.headers}
    if not keep:
        headers["Connection"] = "close"
    lines = [f"HTTP/1.1 {response.status} {_PHRASES.get(response.status, 'Unknown')}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape")


def render(response: Response, *, body: bool) -> bytes:
    return _head(response, keep=True) + (bytes(response.body) if body else b"")


def receive(connection: Connection, size: int, pool: Pool, *, verify: bool) -> Body:
    """Read a body of that size into memory of ``pool``; whether to compute its CRC-64/NVME on the way."""
    body, crc = pool.allocate(size), 0
    connection.begin_body()
    for view in body.pieces:
        connection.read_into(view)
        if verify:
            crc = crc64nvme(view, crc)
    return replace(body, runs=((crc, size),)) if verify and size else body


def discard(connection: Connection, size: int) -> None:
    scratch = memoryview(bytearray(min(size, 1 << 20)))
    while size:
        view = scratch[: min(size, len(scratch))]
        connection.read_into(view)
        size -= len(view)
