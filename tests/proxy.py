"""A TCP proxy."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from urllib.parse import urlsplit

_BLOCK = 64 * 1024


class Proxy:
    """Forwards connections to a server, ``http://host:port``."""

    def __init__(self, endpoint_url: str) -> None:
        parts = urlsplit(endpoint_url)
        self._server = (parts.hostname or "", parts.port or 80)
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Proxy:
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
        thread = threading.Thread(target=function, args=arguments, name="proxy", daemon=True)  # type: ignore[arg-type]
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
            for source, target in ((client, server), (server, client)):
                self._start(self._forward, source, target)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(_BLOCK):
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
