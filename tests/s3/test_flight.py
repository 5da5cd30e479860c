"""A request is broken off from another thread, whatever it waits for; bodies go out and come in without copies.

What that needs of botocore is where it was.
"""

from __future__ import annotations

import gc
import http.client
import io
import itertools
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore
import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3 import errors
from dcp_s3.limit import Limit, Progress
from dcp_s3.memory import ReadTarget
from dcp_s3.s3 import body as body_module
from dcp_s3.s3 import hedge
from dcp_s3.s3.body import BodyReader, Chunks, GatherBody
from dcp_s3.s3.botocore_private import Flight
from dcp_s3.s3.pressure import KnownBucket
from dcp_s3.s3.retry import Attempts, this_thread
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.faulty import FaultyProxy, FaultyServer
from tests.memory_s3 import Fault
from tests.s3.waiting import LONG


def test_a_request_tells_its_socket_the_pool_takes_it_back_and_what_was_broken_off_never_begins(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = S3Store("bucket", Settings())
    bucket.put("k", b"abc")
    for _ in range(2):  # on a new connection, and on one of the pool
        monkeypatch.setattr(this_thread, "flight", flight := Flight())
        body = bucket.client.get_object(Bucket="bucket", Key="k")["Body"]
        assert flight._descriptor >= 0, "the socket is noted"
        body.read()
        assert flight._descriptor < 0, "the pool has the connection"
    flight.break_off()
    faulty.s3.reset_counters()
    with pytest.raises(botocore.exceptions.BotoCoreError):
        bucket.client.get_object(Bucket="bucket", Key="k")
    assert not faulty.s3.request_log


def test_every_request_of_a_connection_has_the_timeout_for_sending(
    faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, send = list[tuple[Any, float]](), http.client.HTTPConnection.send

    def note(self: Any, data: Any) -> None:
        if self.sock is not None:  # it connects
            found.append((self.sock.getsockname(), self.sock.gettimeout()))
        send(self, data)

    monkeypatch.setattr(http.client.HTTPConnection, "send", note)
    bucket = S3Store("bucket", Settings(read_timeout=70))
    for _ in range(2):
        bucket.put("k", bytes(2 * 2**20))
    assert len({name for name, _ in found}) == 1, "one connection"
    assert {timeout for _, timeout in found} == {70}


def test_a_socket_that_was_let_go_is_not_touched() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        flight = Flight()
        flight.note(ours)
        assert flight.let_go()
        flight.break_off()
        theirs.sendall(b"x")
        assert ours.recv(1) == b"x"
        assert not flight.let_go()
        descriptors = len(os.listdir("/proc/self/fd"))
        for end in (Flight.let_go, Flight.break_off):
            flight = Flight()
            flight.note(theirs)
            flight.note(theirs)
            end(flight)
        assert len(os.listdir("/proc/self/fd")) == descriptors, "all are given back"


@pytest.fixture
def tls(faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a proxy whose certificate is trusted; it forwards TLS connections to the server without."""
    authority, certificate = trustme.CA(), tmp_path / "certificate.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    authority.cert_pem.write_to_path(str(certificate), append=True)
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    proxy = FaultyProxy(faulty.s3.endpoint_url, seed=0, share=0.0)
    proxy._listener = context.wrap_socket(proxy._listener, server_side=True, suppress_ragged_eofs=True)
    with proxy:
        yield proxy.url.replace("http:", "https:")


@pytest.mark.parametrize("fault", [Fault.straggle(1000), Fault.stall(9 * 2**20, 1000)], ids=lambda fault: fault.kind)
def test_over_tls_the_bytes_are_right_too(
    faulty: FaultyServer, tls: str, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hedge, "_START_HEAD", 0.1)
    monkeypatch.setattr(hedge, "_START_PER_BYTE", 1e-8)
    monkeypatch.setattr(hedge, "_MIN_DELAY", 0.1)
    data = os.urandom(12 * 2**20)
    bucket = S3Store("bucket", Settings(endpoint_url=tls))
    bucket.put("k", data)
    faulty.once("GetObject", fault)
    memory = bytearray(len(data))
    bucket.read("k", 0, [ReadTarget(memoryview(memory))])
    assert memory == data
    assert bucket.known.hedges.state.won == 1


def test_over_tls_a_closed_connection_is_gone_at_once(tls: str) -> None:
    def sockets() -> int:
        # By type: `isinstance` asks a weak proxy for the class of what may be gone.
        return sum(issubclass(type(each), ssl.SSLSocket) and not each.server_side for each in gc.get_objects())

    bucket = S3Store("bucket", Settings(endpoint_url=tls))
    gc.collect()
    gc.disable()
    try:
        before = sockets()
        bucket.put("k", b"abc")
        assert bucket.get("k").data == b"abc"
        assert sockets() > before
        bucket.client.close()
        assert sockets() == before
    finally:
        gc.enable()


def test_over_tls_what_trickles_is_no_progress_either(faulty: FaultyServer, tls: str) -> None:
    bucket = S3Store("bucket", Settings(endpoint_url=tls, stall_timeout=0.5))
    S3Store("bucket", Settings()).put("k", b"abc")
    faulty.rule = lambda _: Fault.drip(10)
    with pytest.raises(errors.DeadlineExceededError, match="DCP_S3_STALL_TIMEOUT"):
        bucket.get("k")


# --- bodies ------------------------------------------------------------------------------------------


def body_of(*buffers: bytes | bytearray) -> GatherBody:
    return GatherBody([memoryview(b) for b in buffers], sum(map(len, buffers)))


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(-1, 30), max_size=12))
def test_reads_as_the_buffers_laid_end_to_end(buffers: list[bytes], sizes: list[int]) -> None:
    body, model = body_of(*buffers), io.BytesIO(b"".join(buffers))
    assert len(body) == len(model.getvalue())
    for size in sizes:
        assert body.read(size) == model.read(size)
    body.seek(0)
    assert body.read() == model.getvalue()
    assert body.seek(-len(model.getvalue()), io.SEEK_END) == 0


def test_large_buffers_go_out_as_they_are_and_small_ones_joined() -> None:
    large = bytearray(200_000)
    body = body_of(b"head", b"er", large, b"tail")
    chunks = list(Chunks(body))
    assert (len(chunks[0]), len(chunks[-1]), sum(map(len, chunks[1:-1]))) == (6, 4, 200_000)
    assert all(isinstance(chunk, memoryview) and chunk.obj is large for chunk in chunks[1:-1])


@pytest.mark.parametrize(("seconds", "last"), [(0.01, 2**20), (0.2, 2**16), (2.0, 2**16)])
def test_slices_grow_where_the_link_is_quick(monkeypatch: pytest.MonkeyPatch, seconds: float, last: int) -> None:
    now = itertools.count()
    monkeypatch.setattr(body_module.time, "monotonic", lambda: next(now) * seconds)
    sizes = [len(chunk) for chunk in Chunks(body_of(bytearray(2**22)))]
    assert (sizes[0], max(sizes), sum(sizes)) == (2**16, last, 2**22)


class _Socket(io.RawIOBase):
    """Gives at most so many bytes at a time, in turn."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._data, self._sizes, self.calls = data, sizes, 0

    def readable(self) -> bool:
        return True

    def recv_into(self, view: memoryview) -> int:
        count = min(self._sizes[self.calls % len(self._sizes)], len(view))
        self.calls += 1
        piece, self._data = self._data[:count], self._data[count:]
        view[: len(piece)] = piece
        return len(piece)

    readinto = recv_into  # type: ignore[assignment]


def _body(sock: _Socket, head: int) -> BodyReader:
    """A body after the ``head`` bytes that http.client has read."""
    buffered = io.BufferedReader(sock)
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


@pytest.fixture
def near_and_far() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The ends of a connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as near,
        listener.accept()[0] as far,
    ):
        yield near, far


def test_a_thread_that_is_woken_for_many_bytes_is_woken_for_the_last_ones(
    near_and_far: tuple[socket.socket, socket.socket],
) -> None:
    """And for the head of the next answer on that connection."""
    data, (near, far) = bytes(range(256)) * 2**14, near_and_far

    def serve() -> None:
        for piece in (data, data[:-100_000], data[-100_000:-70_000], data[-70_000:]):
            far.sendall(piece)
            time.sleep(0.05)
        far.recv(1)
        far.sendall(b"next")

    server = threading.Thread(target=serve)
    server.start()
    near.settimeout(10)
    body = BodyReader(near.makefile("rb"), near)
    for _ in range(2):
        view, done = memoryview(bytearray(len(data))), 0
        while done < len(data):
            done += body.readinto(view[done:])
        assert view == data
    body.close()
    assert near.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
    near.sendall(b".")
    assert near.recv(4) == b"next"
    server.join()


def test_bytes_that_trickle_after_a_burst_arrive(near_and_far: tuple[socket.socket, socket.socket]) -> None:
    """Fewer than are waited for, but a connection on which some come is not broken."""
    near, far = near_and_far
    threading.Thread(target=far.sendall, args=(bytes(2**24 + 2000),), daemon=True).start()
    body, view = BodyReader(near.makefile("rb"), near), memoryview(bytearray(2**25))

    def receive() -> None:
        near.settimeout(0.5)
        done = 0
        while done < 2**24:
            done += body.readinto(view[done : min(done + 2**23, 2**24)])
        assert body._step > 2000, "it was fast"
        assert body.readinto(view[done : done + 2**23]) == 2000
        assert near.gettimeout() == 0.5
        with pytest.raises(TimeoutError):
            body.readinto(view)

    Attempts(hang=0.5).run(receive, KnownBucket("test"))


def test_a_body_that_trickles_without_a_pause_ends(near_and_far: tuple[socket.socket, socket.socket]) -> None:
    (near, far), over = near_and_far, threading.Event()

    def trickle() -> None:
        while not over.wait(0.01):
            far.sendall(b"x")

    def receive() -> None:
        body = BodyReader(near.makefile("rb"), near)
        for _ in range(100):
            assert body.readinto(bytearray(2**20))

    near.settimeout(LONG)
    sender = threading.Thread(target=trickle)
    sender.start()
    try:
        with pytest.raises(errors.DeadlineExceededError):
            Attempts(limit=Limit(progress=Progress(1.0))).run(receive, KnownBucket("test"))
    finally:
        over.set()
        sender.join()
