"""Checks of the way to the endpoint: names, ports, certificates, regions, clocks."""

from __future__ import annotations

import contextlib
import datetime
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme

from dcp_s3.checkup import network
from dcp_s3.checkup.examination import Examination, Hello
from dcp_s3.checkup.network import check_endpoint, judge_clock, judge_region, remedy_of_certificate
from dcp_s3.s3.client import close_clients
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url
from tests.servers.process import free_port


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


@contextlib.contextmanager
def serve_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *names: str, days: float = 90, trusted: bool = True
) -> Iterator[int]:
    authority, other = trustme.CA(), trustme.CA()
    end = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(days=days)
    begin = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*names, not_before=begin, not_after=end).configure_cert(context)
    bundle = tmp_path / "authority.pem"
    (authority if trusted else other).cert_pem.write_to_path(str(bundle))
    monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
    with tls(context) as port:
        yield port


def test_a_port_that_nobody_listens_on() -> None:
    port = free_port()
    exam = examine(f"http://127.0.0.1:{port}")
    found = check_endpoint("endpoint", exam)
    assert found.status == "failed"
    assert f"127.0.0.1:{port}" in found.found
    assert "DCP_S3_ENDPOINT_URL" in found.remedy
    assert exam.dead


def test_a_name_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    found = check_endpoint("endpoint", examine("http://s3.example.org"))
    assert found.status == "failed"
    assert "Name or service not known" in found.found
    virtual = check_endpoint("endpoint", examine("http://s3.example.org", addressing_style="virtual"))
    assert "'bucket.s3.example.org'" in virtual.found
    assert "DCP_S3_ADDRESSING_STYLE=path" in virtual.remedy


def test_a_resolver_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(network, "_SECONDS", 0.05)

    def hang(*_: object, **__: object) -> None:
        go_on.wait(60)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    found = check_endpoint("endpoint", examine("http://s3.example.org"))
    go_on.set()
    assert found.status == "failed"
    assert "no answer" in found.found


def test_a_certificate_that_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_certificate(tmp_path, monkeypatch, "127.0.0.1") as port:
        found = check_endpoint("endpoint", examine(f"https://127.0.0.1:{port}"))
    assert found.status == "ok"
    assert "TLSv1" in found.found


def test_one_that_soon_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_certificate(tmp_path, monkeypatch, "127.0.0.1", days=3.5) as port:
        found = check_endpoint("endpoint", examine(f"https://127.0.0.1:{port}"))
    assert found.status == "warning"
    assert "expires in 3 days" in found.found or "expires in 4 days" in found.found


@pytest.mark.parametrize(
    ("names", "days", "trusted", "error", "remedy"),
    [
        (("127.0.0.1",), -1, True, "expired", "renewed"),
        (("s3.example.org",), 90, True, "IP address mismatch", "name that is in the certificate"),
        (("127.0.0.1",), 90, False, "unable to get local issuer", "AWS_CA_BUNDLE"),
    ],
)
def test_certificates_that_are_not_trusted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: tuple[str, ...],
    days: float,
    trusted: bool,
    error: str,
    remedy: str,
) -> None:
    with serve_certificate(tmp_path, monkeypatch, *names, days=days, trusted=trusted) as port:
        exam = examine(f"https://127.0.0.1:{port}")
        found = check_endpoint("endpoint", exam)
    assert found.status == "failed"
    assert error in found.found
    assert remedy in found.remedy
    assert exam.dead


def test_a_bundle_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_certificate(tmp_path, monkeypatch, "127.0.0.1") as port:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "nothing.pem"))
        found = check_endpoint("endpoint", examine(f"https://127.0.0.1:{port}"))
    assert found.status == "failed"
    assert "nothing.pem" in found.found


def test_tls_to_a_port_that_speaks_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            connection.recv(1)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        found = check_endpoint("endpoint", examine(f"https://127.0.0.1:{listener.getsockname()[1]}"))
        thread.join(30)
    assert found.status == "failed"
    assert "http://" in found.remedy


def test_through_a_proxy_no_connection_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128")
    monkeypatch.setenv("no_proxy", "")
    found = check_endpoint("endpoint", examine("https://s3.example.org"))
    assert found.status == "ok"
    assert "through a proxy" in found.found


def test_remedies_of_certificates() -> None:
    assert "clock" in remedy_of_certificate("certificate is not yet valid", "x")
    assert "/bundle.pem" in remedy_of_certificate("self-signed certificate", "/bundle.pem")


@pytest.mark.parametrize(
    ("skew", "status"), [(0.4, "ok"), (-30, "ok"), (70, "warning"), (-899, "warning"), (901, "failed")]
)
def test_clocks(skew: float, status: str) -> None:
    found = judge_clock("clock", skew)
    assert found.status == status
    assert ("NTP" in found.remedy) == (status != "ok")


@pytest.mark.parametrize(
    ("status", "region", "configured", "expected"),
    [
        (200, "eu-west-1", "eu-west-1", "ok"),
        (403, "eu-west-1", "eu-west-1", "ok"),  # of a bucket that may not be listed
        (200, "", "eu-west-1", "ok"),
        (200, "us-east-1", "aws-global", "ok"),
        (200, "eu-west-1", "us-east-1", "warning"),
        (301, "eu-west-1", "us-east-1", "failed"),
        (301, "", "us-east-1", "failed"),
        (400, "eu-west-1", "us-east-1", "failed"),
    ],
)
def test_regions(status: int, region: str, configured: str, expected: str) -> None:
    headers = {"x-amz-bucket-region": region} if region else {}
    found = judge_region("region", "bucket", Hello(status, headers, 0.01, 0.0), configured)
    assert found.status == expected
    if expected != "ok":
        assert "DCP_S3_REGION" in found.remedy
