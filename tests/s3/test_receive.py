"""Bodies received straight into the caller's memory."""

from __future__ import annotations

import io
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.s3.body import BodyReader


class _Socket:
    """Gives at most so many bytes at a time, in turn."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._data = data
        self._sizes = sizes
        self.calls = 0

    def recv_into(self, view: memoryview) -> int:
        size = self._sizes[self.calls % len(self._sizes)]
        self.calls += 1
        piece, self._data = self._data[: min(size, len(view))], self._data[min(size, len(view)) :]
        view[: len(piece)] = piece
        return len(piece)


class _Raw(io.RawIOBase):
    def __init__(self, sock: _Socket) -> None:
        self._sock = sock

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        return self._sock.recv_into(memoryview(buffer))


def _body(sock: _Socket, head: int) -> BodyReader:
    """A body after the ``head`` bytes that http.client has read."""
    buffered = io.BufferedReader(_Raw(sock))
    assert len(buffered.read(head)) == head
    return BodyReader(buffered, sock)


@given(
    st.integers(0, 9_000),
    st.integers(0, 700_000),
    st.lists(st.integers(1, 300_000), min_size=1, max_size=4),
    st.lists(st.sampled_from([0, 1, 7, 4096, 16_383, 16_384, 100_000, 400_000]), min_size=1, max_size=12),
)
def test_every_byte_arrives_once_and_in_order(head: int, size: int, arriving: list[int], reads: list[int]) -> None:
    data = bytes((i * 31 + (i >> 8)) % 256 for i in range(head + size))
    body, at = _body(_Socket(data, arriving), head), head
    for wanted in reads:
        view = memoryview(bytearray(wanted))
        count = body.readinto(view)
        assert count == min(wanted, len(data) - at)  # as much as is wanted, unless the stream ends
        assert view[:count] == data[at : at + count]
        at += count


def test_large_views_are_filled_without_a_copy_and_small_ones_with_few_calls() -> None:
    sock = _Socket(bytes(2**20), [2**20])
    body = _body(sock, 0)
    body.readinto(memoryview(bytearray(8192)))  # what was buffered with the head
    calls = sock.calls
    body.readinto(memoryview(bytearray(500_000)))
    assert sock.calls == calls + 1
    for _ in range(60):
        body.readinto(memoryview(bytearray(4096)))
    assert sock.calls == calls + 2


def test_closing_it_closes_what_it_replaced() -> None:
    buffered = io.BufferedReader(_Raw(_Socket(b"x", [1])))
    with BodyReader(buffered, _Socket(b"", [1])):
        pass
    assert buffered.closed


@contextmanager
def _over_tls(data: bytes, directory: Path) -> Iterator[ssl.SSLSocket]:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(directory / "authority.pem"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server)
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with server.wrap_socket(theirs, server_side=True) as sock:
            sock.sendall(data)

    thread = threading.Thread(target=serve)
    thread.start()
    client = ssl.create_default_context(cafile=str(directory / "authority.pem"))
    try:
        with client.wrap_socket(ours, server_hostname="localhost") as sock:
            sock.settimeout(30)
            yield sock
    finally:
        thread.join()


@pytest.mark.parametrize("step", [4096, 100_000, 1_000_000])
def test_records_of_tls_are_joined(step: int, tmp_path: Path) -> None:
    data = bytes(range(256)) * 4096
    with _over_tls(data, tmp_path) as sock, BodyReader(sock.makefile("rb"), sock) as body:
        found = bytearray()
        while count := body.readinto(view := memoryview(bytearray(step))):
            assert count == min(step, len(data) - len(found))
            found += view[:count]
    assert found == data
