"""All uses of private parts of botocore, urllib3 and http.client, each with the versions it was seen in.

Where one has changed, requests still work, but are slower or cannot be broken off, and each may hang for as long as
the first user of its client said. `tests/s3/test_flight.py` notices.

A thread that waits for S3 wakes at once when its socket is shut down. botocore keeps the socket to itself until the
head of the answer is there, so the clients' connections note it for the `Flight` of their thread.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import logging
import os
import socket
import threading
import time
from typing import Any

from dcp_s3.s3.body import BodyReader, Chunks, GatherBody
from dcp_s3.s3.retry import UNBOUNDED, this_thread

logger = logging.getLogger(__name__)

_SENT_AT_ONCE = 64 * 2**10  # bytes that fit into a socket's buffer


# --- a request in flight ------------------------------------------------------------------------------


class Flight:
    """One request, with its progress for the thread that watches it.

    Attributes:
        moves: grows with everything that arrives (the head of the answer, a block of its body), and with each attempt.
        awaits: bytes of the block that comes next, 0 while the head is awaited, None while nothing is on the wire.
    """

    def __init__(self) -> None:
        self.moves = 0
        self.awaits: int | None = None
        self._lock = threading.Lock()
        # A duplicate of the socket's: shutting down the original could hit whatever has its number after it was closed.
        self._descriptor = -1
        self._is_broken = False

    def note(self, sock: Any) -> None:
        """Note the request's socket; called by the thread that uses it."""
        with self._lock:
            if self._descriptor >= 0:  # of the request that was redirected
                os.close(self._descriptor)
                self._descriptor = -1
            if self._is_broken:
                raise ConnectionAbortedError("the request was broken off")
            with contextlib.suppress(OSError):  # no descriptor is left, or the socket is closed: cannot be broken off
                self._descriptor = os.dup(sock.fileno())

    def let_go(self) -> bool:
        """Release the request's connection; False if it has been shut down."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
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


# --- bodies -------------------------------------------------------------------------------------------


def send_without_copy(request: Any, **_: Any) -> None:
    """botocore ``before-send`` handler: replace a `GatherBody` by its views, and note the checksums of the body.

    An AWSPreparedRequest's ``body`` may be any iterable of buffers: http.client sends each (botocore 1.36 to 1.43).
    For a small one it is not worth a round trip to ask first whether it may be sent; the header is not signed.
    """
    if int(request.headers.get("Content-Length") or _SENT_AT_ONCE) < _SENT_AT_ONCE:
        request.headers.pop("Expect", None)
    if isinstance(request.body, GatherBody):
        request.body = Chunks(request.body)
    this_thread.checksums = {
        name.lower(): value.decode() if isinstance(value, bytes) else value
        for name, value in request.headers.items()
        if name.lower().startswith("x-amz-checksum-crc")
    }


def readinto_response(body: Any, view: memoryview) -> int:
    """Read from a botocore StreamingBody into ``view``; at least one byte unless the body is at its end.

    urllib3's wrapper around http.client's response copies. http.client's own ``readinto`` below it receives straight
    into ``view``: urllib3 1.26 to 2.8 keep its response as ``_fp``. Elsewhere 1 MiB at a time goes through ``read``.
    A response reads from ``fp``, which ``socket.makefile`` made (Python 3.10 to 3.14): a `BodyReader` takes its place.

    Returns:
        Number of bytes read, 0 at the end.
    """
    below: Any = getattr(getattr(body, "_raw_stream", None), "_fp", None)
    if hasattr(below, "readinto"):
        stream: Any = getattr(below, "fp", None)
        sock = getattr(getattr(stream, "raw", None), "_sock", None)
        if isinstance(stream, io.BufferedReader) and sock is not None and not below.chunked:
            below.fp = BodyReader(stream, sock)
        return int(below.readinto(view))
    data = body.read(min(view.nbytes, 2**20))
    view[: len(data)] = data
    return len(data)


def finish_response(body: Any, *, complete: bool) -> None:
    """Give the connection back for the next request if the body was read to its end, close it otherwise."""
    raw = getattr(body, "_raw_stream", None)
    if complete and raw is not None and hasattr(raw, "release_conn"):
        raw.release_conn()
    else:
        body.close()


# --- connections ----------------------------------------------------------------------------------------


def make_abortable(client: Any) -> None:
    """Let requests of a boto3 client be broken off, and have the timeouts of their thread.

    A client's URLLib3Session makes its pools from a dict of classes (botocore 1.36 to 1.43). A pool makes connections
    from ``ConnectionCls``, and gets them back through `_put_conn` (urllib3 1.26 to 2.8).
    """
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    classes = getattr(session, "_pool_classes_by_scheme", None)  # the one dict of all its pool managers
    if not isinstance(classes, dict):
        logger.debug("botocore's pools are not where they were: requests cannot be broken off")
        return
    for scheme, pool in classes.items():
        connection = type(f"Abortable{pool.ConnectionCls.__name__}", (_Abortable, pool.ConnectionCls), {})
        classes[scheme] = type(f"Abortable{pool.__name__}", (_Releasing, pool), {"ConnectionCls": connection})


class _Response(http.client.HTTPResponse):
    """A response whose head, and small body, are waited for as the `Attempts` of the thread say.

    A response reads from a `socket.SocketIO` (Python 3.10 to 3.14), which has a method of our own here.
    """

    def begin(self) -> None:
        attempts, began, raw = this_thread.attempts, time.monotonic(), vars(self.fp.raw)
        if "_sock" in raw:
            receive, wait = raw["_sock"].recv_into, attempts.receive
            raw["readinto"] = lambda buffer: wait(receive, buffer)
            if attempts is not UNBOUNDED:
                raw["_sock"].settimeout(attempts.tick)
        super().begin()
        attempts.has_head, attempts.latency = True, time.monotonic() - began


_CONTINUE = b"HTTP/1.1 100 ", b"Continue\r\n\r\n"


class _BegunAnswer:
    """A socket, and its file, of which the first bytes have been received already."""

    def __init__(self, sock: Any, start: bytes) -> None:
        self._file, self._start, self.sendall = sock.makefile("rb", 0), io.BytesIO(start), sock.sendall

    def makefile(self, *_: Any) -> _BegunAnswer:
        return self

    def readline(self) -> bytes:
        line = b""
        while not line.endswith(b"\n") and (byte := self._start.read(1) or self._file.read(1)):
            line += byte
        return line

    def close(self) -> None:
        self._file.close()


class _Abortable:
    """Mixin for a connection: tells the thread's `Flight` its socket, which waits as the `Attempts` say."""

    sock: Any
    timeout: Any
    response_class = _Response

    def connect(self) -> None:
        if this_thread.attempts is not UNBOUNDED:
            self.timeout = this_thread.attempts.connect_timeout
        super().connect()  # type: ignore[misc]

    def putrequest(self, *arguments: Any, **options: Any) -> Any:
        attempts, flight = this_thread.attempts, this_thread.flight
        attempts.has_head = False
        if self.sock is None:
            self.connect()
        self.sock.settimeout(attempts.send_timeout)  # it has the one for connecting
        if flight is not None:
            flight.note(self.sock)
        return super().putrequest(*arguments, **options)  # type: ignore[misc]

    def _handle_expect_response(self, message_body: Any) -> Any:
        """S3's usual answer to ``Expect`` is read at once. botocore (1.36 to 1.43) reads any answer byte by byte, and
        the thread waits for the interpreter lock before each."""
        sock = self.sock
        start = sock.recv(len(_CONTINUE[0]))  # no more than the shortest status line has
        if start == _CONTINUE[0]:
            start += sock.recv(len(_CONTINUE[1]))
        if start == b"".join(_CONTINUE):
            return self._send_message_body(message_body)  # type: ignore[attr-defined]
        self.sock = _BegunAnswer(sock, start)
        try:
            return super()._handle_expect_response(message_body)  # type: ignore[misc]
        finally:
            if self.sock is not None:
                self.sock = sock


class _Releasing:
    """Mixin for a pool: a returned connection leaves its request, and is closed if it was shut down."""

    def _put_conn(self, conn: Any) -> None:
        flight = this_thread.flight
        if flight is not None and not flight.let_go() and conn is not None:
            conn.close()
        super()._put_conn(conn)  # type: ignore[misc]
