"""A request is broken off from another thread, whatever it waits for; what that needs of botocore is where it was."""

from __future__ import annotations

import gc
import http.client
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import botocore
import pytest
import trustme

from dcp_s3 import errors
from dcp_s3.memory import ReadTarget
from dcp_s3.s3 import hedge
from dcp_s3.s3.botocore_private import Flight
from dcp_s3.s3.hedge import hedges_of
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.faulty import FaultyProxy, FaultyServer
from tests.memory_s3 import Fault
from tests.s3.waiting import LONG

NEVER = 1000.0


def test_a_request_tells_its_socket_and_the_pool_takes_it_back(faulty: FaultyServer) -> None:
    bucket = S3Store("bucket", Settings())
    bucket.put("k", b"abc")
    for _ in range(2):  # on a new connection, and on one of the pool
        flight = Flight()
        with flight.on_this_thread():
            body = bucket.client.get_object(Bucket="bucket", Key="k")["Body"]
            assert flight._descriptor >= 0, "the socket is noted"
            body.read()
            assert flight._descriptor < 0, "the pool has the connection"


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


# --- what it may wait for ----------------------------------------------------------------------------


def get(bucket: S3Store, flight: Flight) -> bytes:
    with flight.on_this_thread():
        return bytes(bucket.client.get_object(Bucket="bucket", Key="k")["Body"].read())


@pytest.mark.parametrize("fault", [Fault.straggle(NEVER), Fault.stall(1000, NEVER)], ids=lambda fault: fault.kind)
def test_a_request_that_waits_for_its_answer_ends(faulty: FaultyServer, fault: Fault) -> None:
    bucket, flight = S3Store("bucket", Settings()), Flight()
    bucket.put("k", bytes(2000))
    arrived = threading.Event()

    def rule(_: Any) -> Fault:
        arrived.set()
        return fault

    faulty.rule = rule
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(get, bucket, flight)
        assert arrived.wait(LONG)
        flight.break_off()
        assert read.exception(LONG) is not None


def test_a_request_that_was_broken_off_before_never_begins(faulty: FaultyServer) -> None:
    bucket, flight = S3Store("bucket", Settings()), Flight()
    flight.break_off()
    faulty.s3.reset_counters()
    with pytest.raises(botocore.exceptions.BotoCoreError):
        get(bucket, flight)
    assert not faulty.s3.request_log


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
        with pytest.raises(ConnectionAbortedError):
            flight.note(ours)
        descriptors = len(os.listdir("/proc/self/fd"))
        for end in (Flight.let_go, Flight.break_off):
            flight = Flight()
            flight.note(theirs)
            flight.note(theirs)
            end(flight)
        assert len(os.listdir("/proc/self/fd")) == descriptors, "all are given back"


# --- TLS ---------------------------------------------------------------------------------------------


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """One for 127.0.0.1, with its key."""
    authority, path = trustme.CA(), tmp_path / "certificate.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(path))
    authority.cert_pem.write_to_path(str(path), append=True)
    return path


class TlsProxy(FaultyProxy):
    """Forwards TLS connections to a server without."""

    def __init__(self, endpoint_url: str, certificate: Path) -> None:
        super().__init__(endpoint_url, seed=0, share=0.0)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self._listener = context.wrap_socket(self._listener, server_side=True, suppress_ragged_eofs=True)
        self.url = self.url.replace("http:", "https:")


@pytest.fixture
def tls(faulty: FaultyServer, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    with TlsProxy(faulty.s3.endpoint_url, certificate) as proxy:
        yield proxy.url


@pytest.mark.parametrize("fault", [Fault.straggle(NEVER), Fault.stall(9 * 2**20, NEVER)], ids=lambda fault: fault.kind)
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
    assert hedges_of(bucket).state.won == 1


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
