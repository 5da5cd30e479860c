"""Bodies without copies."""

from __future__ import annotations

import io
import itertools
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.limit import Limit, Progress
from dcp_s3.s3 import body as body_module
from dcp_s3.s3.body import BodyReader, GatherBody
from dcp_s3.s3.pressure import Gate
from dcp_s3.s3.retry import Attempts

BUFFERS = st.lists(st.binary(max_size=40), max_size=8)


def body_of(buffers: list[bytes]) -> GatherBody:
    return GatherBody([memoryview(b) for b in buffers])


@given(BUFFERS, st.lists(st.integers(-1, 30), max_size=12))
def test_reads_as_the_buffers_laid_end_to_end(buffers: list[bytes], sizes: list[int]) -> None:
    body, model = body_of(buffers), io.BytesIO(b"".join(buffers))
    assert len(body) == len(model.getvalue())
    for size in sizes:
        assert body.read(size) == model.read(size)
        assert body.tell() == model.tell()
    body.seek(0)
    assert body.read() == model.getvalue()
    assert body.seek(-len(model.getvalue()), io.SEEK_END) == 0


def test_large_buffers_go_out_as_they_are_and_small_ones_joined() -> None:
    large = bytearray(200_000)
    body = GatherBody([memoryview(b"head"), memoryview(b"er"), memoryview(large), memoryview(b"tail")])
    chunks = list(body.chunks())
    assert (len(chunks[0]), len(chunks[-1]), sum(map(len, chunks[1:-1]))) == (6, 4, 200_000)
    assert all(isinstance(chunk, memoryview) and chunk.obj is large for chunk in chunks[1:-1])


@pytest.mark.parametrize(("seconds", "last"), [(0.01, 2**20), (0.2, 2**16), (2.0, 2**16)])
def test_slices_grow_where_the_link_is_quick(monkeypatch: pytest.MonkeyPatch, seconds: float, last: int) -> None:
    now = itertools.count()
    monkeypatch.setattr(body_module.time, "monotonic", lambda: next(now) * seconds)
    sizes = [len(chunk) for chunk in GatherBody([memoryview(bytearray(2**22))]).chunks()]
    assert (sizes[0], max(sizes), sum(sizes)) == (2**16, last, 2**22)


def test_what_is_sent_once_more_is_no_progress() -> None:
    progress, body = Progress(600), GatherBody([memoryview(bytes(3 * 2**20)), memoryview(b"end")])

    def send() -> None:
        next(iter(body.chunks()))
        for _ in range(3):
            assert sum(map(len, body.chunks())) == len(body)

    Attempts(limit=Limit(progress=progress)).run(send, Gate("test"))
    assert "3.0 MiB had moved before" in str(progress.error("UploadPart", "3 attempts"))


# --- bodies of answers -----------------------------------------------------------------------------


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


def test_a_thread_that_is_woken_for_many_bytes_is_woken_for_the_last_ones() -> None:
    """And for the head of the next answer on that connection."""
    data = bytes(range(256)) * 2**14
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname())
        far = listener.accept()[0]

    def serve() -> None:
        with far:
            for piece in (data, data[:-100_000], data[-100_000:-70_000], data[-70_000:]):
                far.sendall(piece)
                time.sleep(0.05)
            far.recv(1)
            far.sendall(b"next")

    server = threading.Thread(target=serve)
    server.start()
    with sock:
        sock.settimeout(10)
        body = BodyReader(io.BufferedReader(socket.SocketIO(sock, "r")), sock)
        for _ in range(2):
            view, done = memoryview(bytearray(len(data))), 0
            while done < len(data):
                done += body.readinto(view[done:])
            assert view == data
        body.close()
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        sock.sendall(b".")
        assert sock.recv(4) == b"next"
    server.join()
