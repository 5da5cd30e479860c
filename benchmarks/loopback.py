"""What sockets alone can do on this machine: the limit for any client of a server on loopback.

Sends and receives the same number of bytes over the same number of connections as a benchmark
case, with ``sendall`` and ``recv_into`` on memory that has been touched, and nothing else; over TLS if asked to, with
Python's ``ssl`` and nginx in front of the other process.
"""

from __future__ import annotations

import argparse
import contextlib
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import Sample, measure
from benchmarks.tls import tls_in_front_of

_ROOT = Path(__file__).resolve().parents[1]
_CHUNK = 1 << 20
#: Memory that each connection cycles through: more than the CPU's caches hold, as a state is.
_BUFFER = 64 << 20
#: Fewer system calls, and fewer changes of the interpreter lock.
_WAITALL = getattr(socket, "MSG_WAITALL", 0)


def measure_loopback(total_bytes: int, connections: int, *, tls: bool = False) -> tuple[Sample, Sample]:
    """The cost of sending, and of receiving, ``total_bytes`` to and from another process."""
    share = total_bytes // connections
    command = [sys.executable, "-m", "benchmarks.loopback", str(share), str(connections)]
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT))
        if peer.stdout is None:
            raise RuntimeError("the peer has no standard output")
        port, context = int(peer.stdout.readline()), None
        if tls:
            port, authority = stack.enter_context(tls_in_front_of(f"127.0.0.1:{port}"))
            context = ssl.create_default_context(cafile=str(authority))
        sockets = [_connect(port, context) for _ in range(connections)]
        buffers = [_touched() for _ in sockets]

        def on_all(action: Callable[[socket.socket, memoryview, int], None]) -> None:
            threads = [
                threading.Thread(target=action, args=(sock, buffer, share))
                for sock, buffer in zip(sockets, buffers, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        samples = measure(lambda: on_all(_send)), measure(lambda: on_all(_receive))
        for sock in sockets:
            sock.close()
    return samples


def _connect(port: int, context: ssl.SSLContext | None) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", port))
    return plain if context is None else context.wrap_socket(plain, server_hostname="127.0.0.1")


def _touched() -> memoryview:
    return memoryview(bytearray(b"\1") * _BUFFER)


def _send(sock: socket.socket, buffer: memoryview, size: int) -> None:
    """Send ``size`` bytes and wait until the other side has them all."""
    for start in range(0, size, _CHUNK):
        offset = start % _BUFFER
        sock.sendall(buffer[offset : offset + min(_CHUNK, size - start)])
    sock.recv(1)


def _receive(sock: socket.socket, buffer: memoryview, size: int) -> None:
    """Ask for ``size`` bytes and receive them."""
    sock.sendall(b"?")
    _receive_exactly(sock, buffer, size)


def _receive_exactly(sock: socket.socket, buffer: memoryview, size: int) -> None:
    received = 0
    flags = 0 if isinstance(sock, ssl.SSLSocket) else _WAITALL
    while received < size:
        offset = received % _BUFFER
        view = buffer[offset : offset + min(_CHUNK, size - received, _BUFFER - offset)]
        count = sock.recv_into(view, 0, flags)
        if not count:
            raise ConnectionError("the other side has closed the connection")
        received += count


def _serve(sock: socket.socket, buffer: memoryview, size: int) -> None:
    with sock:
        _receive_exactly(sock, buffer, size)
        sock.sendall(b"!")
        sock.recv(1)
        for start in range(0, size, _CHUNK):
            offset = start % _BUFFER
            sock.sendall(buffer[offset : offset + min(_CHUNK, size - start)])


def main() -> None:
    """Be the other process: receive, then send, on every connection."""
    parser = argparse.ArgumentParser()
    parser.add_argument("size", type=int)
    parser.add_argument("connections", type=int)
    options = parser.parse_args()
    buffers = [_touched() for _ in range(options.connections)]  # before the clock runs
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threads = []
        for buffer in buffers:
            sock, _ = listener.accept()
            threads.append(threading.Thread(target=_serve, args=(sock, buffer, options.size)))
            threads[-1].start()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
