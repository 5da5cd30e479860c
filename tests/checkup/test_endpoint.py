"""Checks of the way to the endpoint: names, ports, certificates, clocks."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import trustme

from dcp_s3.checkup.host import check_clock, check_endpoint
from dcp_s3.checkup.probes import Examination
from dcp_s3.s3.client import close_clients
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url


@pytest.fixture(autouse=True)
def _credentials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    yield
    close_clients()


def examine(endpoint: str, **settings: Any) -> Examination:
    return Examination(
        parse_url("s3://bucket/run"), False, None, Settings(endpoint_url=endpoint, region="us-east-1", **settings)
    )


@contextlib.contextmanager
def tls(context: ssl.SSLContext) -> Iterator[int]:
    """A port on 127.0.0.1 that does TLS handshakes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as wrapped:
                    wrapped.recv(1)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(30)


def test_a_name_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = check_endpoint(examine("http://s3.example.org"))
    assert found.status == "failed"
    assert "s3.example.org" in found.found
    assert "DNS" in found.remedy
    virtual = check_endpoint(examine("http://s3.example.org", addressing_style="virtual"))
    assert "bucket.s3.example.org" in virtual.found
    assert "DCP_S3_ADDRESSING_STYLE=path" in virtual.remedy


def test_a_certificate_that_is_not_trusted() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    with tls(context) as port:
        found = check_endpoint(examine(f"https://127.0.0.1:{port}"))
    assert found.status == "failed"
    assert "AWS_CA_BUNDLE" in found.remedy


@pytest.mark.parametrize(
    ("skew", "status"), [(0.4, "ok"), (-30, "ok"), (70, "warning"), (-899, "warning"), (901, "failed")]
)
def test_clocks(skew: float, status: str) -> None:
    exam = examine("http://127.0.0.1:1")
    exam.skew = skew
    found = check_clock(exam)
    assert found.status == status
    assert ("NTP" in found.remedy) == (status != "ok")
