"""An in-memory S3 server whose faults a test sets while it runs."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import pytest

from dcp_s3.s3 import client as clients
from tests.memory_s3 import Fault, MemoryS3

BUCKET = "bucket"


class FaultyServer:
    """`rule` decides for each request whether something goes wrong with it; at first nothing does. Other options are
    those of `MemoryS3`."""

    def __init__(self, **options: Any) -> None:
        self.rule: Callable[[Any], Fault | None] = lambda _: None
        self.s3 = MemoryS3(fault=lambda request: self.rule(request), **options)

    def once(self, operation: str, fault: Fault, *, key: str = "") -> list[str]:
        """Let the next ``operation`` (on a key that contains ``key``) fail; returns the list of those that did."""
        seen: list[str] = []

        def rule(request: Any) -> Fault | None:
            if request.operation == operation and key in request.key and not seen:
                seen.append(request.key)
                return fault
            return None

        self.rule = rule
        return seen


def close_clients() -> None:
    """Close this process's clients and their idle connections. The next request makes new ones."""
    for client in [*clients._clients.values()]:
        clients.forget_client(client)
        client.close()


@contextlib.contextmanager
def serve(monkeypatch: pytest.MonkeyPatch, server: FaultyServer | None = None) -> Iterator[FaultyServer]:
    """A running `FaultyServer` (a new one, or ``server``) with a bucket; the environment leads to it."""
    server = server or FaultyServer()
    with server.s3:
        monkeypatch.setenv("DCP_S3_ENDPOINT_URL", server.s3.endpoint_url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        server.s3.create_bucket(BUCKET)
        try:
            yield server
        finally:
            close_clients()  # one made from AWS's variables would be found by tests that set others


# --- a proxy --------------------------------------------------------------------------------------------

_BLOCK = 64 * 1024
_MOST_BYTES = 6 * 2**20  # of one direction, after which a connection is cut at the latest


class FaultyProxy:
    """Forwards connections to a server; of those that it chooses by ``seed``, it resets both ends after some bytes.

    A connection may be cut while it carries a request (``request``: the server has at most a part of it) or an answer
    (``response``: the server has done what was asked). ``cuts`` counts both.

    Args:
        endpoint_url: of the server, ``http://host:port``.
        seed: of the choices.
        share: of the connections that are cut.
        directions: in which connections are cut.
    """

    def __init__(
        self, endpoint_url: str, *, seed: int, share: float = 0.5, directions: Sequence[str] = ("request", "response")
    ) -> None:
        parts = urlsplit(endpoint_url)
        self._server = (parts.hostname or "", parts.port or 80)
        self._rng = random.Random(seed)
        self._share, self._directions = share, directions
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.cuts: Counter[str] = Counter()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> FaultyProxy:
        self._start(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for each in [self._listener, *self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in list(self._threads):
            thread.join()
        for each in [self._listener, *self._sockets]:
            each.close()

    def _start(self, function: object, *arguments: object) -> None:
        thread = threading.Thread(target=function, args=arguments, name="faulty-proxy", daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
            except OSError:
                return  # closed
            self._sockets += [client, server]
            doomed = self._rng.choice(self._directions) if self._rng.random() < self._share else ""
            # Many small limits too: most answers, and many requests, are small.
            limit = int(_MOST_BYTES ** self._rng.random()) + 200
            for name, source, target in (("request", client, server), ("response", server, client)):
                self._start(self._forward, name, source, target, limit if name == doomed else None)

    def _forward(self, name: str, source: socket.socket, target: socket.socket, limit: int | None) -> None:
        try:
            while data := source.recv(_BLOCK):
                if limit is not None:
                    target.sendall(data[:limit])
                    limit -= len(data)
                    if limit < 0:
                        with self._lock:
                            self.cuts[name] += 1
                        _reset(source, target)
                        return
                else:
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:  # one of both ends is gone, and so must be the other
            _reset(source, target)


def _reset(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            # Not close(): the other direction's thread still uses the number of the descriptor.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.shutdown(socket.SHUT_RDWR)
