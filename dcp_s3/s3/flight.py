"""A request in flight: how far it is, how to break it off from another thread, and how long it may hang.

A thread that waits for S3 wakes at once when its socket is shut down. botocore keeps the socket to itself until the
head of the answer is there, so the clients' connections note it for the `Flight` of their thread: the one place that
knows the classes of botocore and urllib3 (`make_abortable`). Where those are not as expected, a request that is broken
off goes on until its socket says something, and each may hang for as long as the first user of its client said.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from urllib3.exceptions import ConnectTimeoutError, NewConnectionError
from urllib3.util import Timeout
from urllib3.util.connection import allowed_gai_family

logger = logging.getLogger(__name__)

_thread = threading.local()


@contextlib.contextmanager
def hang_at_most(connect: float, read: float) -> Iterator[None]:
    """Requests of this thread give up after so many seconds of waiting for a connection, or for the next byte."""
    before = getattr(_thread, "timeout", None)
    _thread.timeout = Timeout(connect=connect, read=read)
    try:
        yield
    finally:
        _thread.timeout = before


class Flight:
    """One request. What it says about progress is for the thread that watches it.

    Attributes:
        moves: grows with everything that arrives (the head of the answer, a block of its body), and with each attempt.
        awaits: bytes of the block that comes next, 0 while the head is awaited, None while nothing is on the wire.
    """

    __slots__ = ("_descriptor", "_is_broken", "_lock", "awaits", "moves")

    def __init__(self) -> None:
        self.moves = 0
        self.awaits: int | None = None
        self._lock = threading.Lock()
        # Of the socket's duplicate: shutting down the original could hit whatever has its number after it was closed.
        self._descriptor = -1
        self._is_broken = False

    def await_bytes(self, count: int) -> None:
        """Something arrived; ``count`` bytes are next, 0 for the head."""
        self.moves += 1
        self.awaits = count

    @contextlib.contextmanager
    def on_this_thread(self) -> Iterator[None]:
        """Requests of this thread are this one, from here until the context ends."""
        before = getattr(_thread, "flight", None)
        _thread.flight = self
        try:
            yield
        finally:
            self.awaits = None
            self.let_go()
            _thread.flight = before

    def note(self, sock: Any) -> None:
        """The request goes through this socket; for the thread that uses it.

        Raises:
            ConnectionAbortedError: it was broken off before.
        """
        with self._lock:
            self._close()
            self._refuse_broken()
            with contextlib.suppress(OSError):  # no descriptor is left, or the socket is closed: can not be broken off
                self._descriptor = os.dup(sock.fileno())

    def let_go(self) -> bool:
        """The connection is not this request's any more; False if it has been shut down."""
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
            # Not through the socket object: that of TLS would read what is left in the kernel as if it were plain.
            with socket.socket(fileno=descriptor) as duplicate, contextlib.suppress(OSError):
                duplicate.shutdown(socket.SHUT_RDWR)

    def _refuse_broken(self) -> None:
        if self._is_broken:
            raise ConnectionAbortedError("the request was broken off")

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def make_abortable(client: Any) -> None:
    """Let requests of a boto3 client be broken off, and hang for as long as their thread says."""
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    classes = getattr(session, "_pool_classes_by_scheme", None)  # the one dict of all its pool managers
    if not isinstance(classes, dict):
        logger.debug("botocore's pools are not where they were: requests can not be broken off")
        return
    for scheme, pool in classes.items():
        connection = type(f"Abortable{pool.ConnectionCls.__name__}", (_Abortable, pool.ConnectionCls), {})
        classes[scheme] = type(f"Abortable{pool.__name__}", (_Releasing, pool), {"ConnectionCls": connection})


class _Abortable:
    """Of a connection: tells the thread's `Flight` its socket."""

    sock: Any
    host: str
    port: int
    timeout: Any
    source_address: Any
    socket_options: Any

    def request(self, *arguments: Any, **options: Any) -> Any:
        flight = getattr(_thread, "flight", None)
        if flight is not None and self.sock is not None:
            flight.note(self.sock)
        return super().request(*arguments, **options)  # type: ignore[misc]

    def _new_conn(self) -> Any:
        """As urllib3's, but the socket is known before it is connected."""
        flight = getattr(_thread, "flight", None)
        if flight is None:
            return super()._new_conn()  # type: ignore[misc]
        try:
            return self._connect(flight.note)
        except TimeoutError as error:
            raise ConnectTimeoutError(
                self, f"Connection to {self.host} timed out. (connect timeout={self.timeout})"
            ) from error
        except OSError as error:
            raise NewConnectionError(self, f"Failed to establish a new connection: {error}") from error  # type: ignore[arg-type]

    def _connect(self, note: Callable[[socket.socket], None]) -> socket.socket:
        host = getattr(self, "_dns_host", self.host).strip("[]")
        failure: OSError = OSError("the name has no address")
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, self.port, allowed_gai_family(), socket.SOCK_STREAM
        ):
            try:
                sock = socket.socket(family, kind, protocol)
                try:
                    for option in self.socket_options or ():
                        sock.setsockopt(*option)
                    sock.settimeout(self.timeout)
                    if self.source_address:
                        sock.bind(self.source_address)
                    note(sock)
                    sock.connect(address)
                except BaseException:
                    sock.close()
                    raise
            except OSError as error:
                failure = error
            else:
                return sock
        try:
            raise failure
        finally:
            del failure  # its traceback has this frame


class _Releasing:
    """Of a pool: a connection that comes back is no request's any more, and one that was shut down is closed. A request
    has the timeout of its thread."""

    def _get_timeout(self, timeout: Any) -> Any:
        limit = getattr(_thread, "timeout", None)
        return super()._get_timeout(timeout if limit is None else limit)  # type: ignore[misc]

    def _put_conn(self, conn: Any) -> None:
        flight = getattr(_thread, "flight", None)
        if flight is not None and not flight.let_go() and conn is not None:
            conn.close()
        super()._put_conn(conn)  # type: ignore[misc]
