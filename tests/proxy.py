"""A TCP proxy that cuts connections: for servers that do not fail on demand themselves."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Sequence
from urllib.parse import urlsplit

_BLOCK = 64 * 1024
_MOST_BYTES = 6 * 2**20  # of one direction, after which a connection is cut at the latest


class FaultyProxy:
    """Forwards connections to a server; of those that it chooses by ``seed``, it resets both ends after some bytes.

    A connection may be cut while it carries a request (``request``: the server has at most a part of it) or an answer
    (``response``: the server has done what was asked). ``cuts`` counts both; ``share`` of the connections are cut.
    """

    def __init__(
        self,
        endpoint_url: str,
        *,
        seed: int,
        share: float = 0.5,
        directions: Sequence[str] = ("request", "response"),
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

    def __exit__(self, *_: object) -> None:
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
