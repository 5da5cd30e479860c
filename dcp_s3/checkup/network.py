"""Checks of the way to S3: names, connections, certificates, latency, region, clocks, the bucket."""

from __future__ import annotations

import socket
import ssl
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import botocore.exceptions as boto
import botocore.session
from botocore.httpsession import get_cert_path
from botocore.utils import get_environ_proxies

from dcp_s3 import errors
from dcp_s3.checkup.examination import Examination, Hello
from dcp_s3.checkup.result import CheckResult, failed, from_error, passed, skipped, warned
from dcp_s3.s3.operations import Request

T = TypeVar("T")

_SECONDS = 4.0
"""For a name, for a connection, for a TLS handshake."""
_REQUESTS = 5
_FAR_SECONDS = 0.15
"""A round trip between regions; in one region it takes a few milliseconds, and S3 answers within tens."""
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html: RequestTimeTooSkewed
_SKEW_WARNS, _SKEW_FAILS = 60.0, 900.0
_CERTIFICATE_DAYS = 14
_LOCAL = ("localhost", "127.0.0.1", "::1")
_REACH = "check DCP_S3_ENDPOINT_URL (or AWS_ENDPOINT_URL_S3, or the profile), DNS, firewall and proxy of this host"


def find_host(exam: Examination) -> SplitResult:
    """The URL of the host that requests for the bucket go to: with virtual-hosted style, the bucket is in its name."""
    client = exam.client
    try:
        return urlsplit(str(client.generate_presigned_url("head_bucket", Params={"Bucket": exam.url.bucket})))
    except (boto.BotoCoreError, ValueError):
        return urlsplit(str(client.meta.endpoint_url))


def check_endpoint(name: str, exam: Examination) -> CheckResult:
    """Whether the endpoint's name is known, its port takes connections, and its certificate can be trusted."""
    url = find_host(exam)
    host, port = url.hostname or "", url.port or (443 if url.scheme == "https" else 80)
    where = f"{url.scheme}://{host}:{port}"
    if get_environ_proxies(url.geturl()):
        return passed(name, f"{where}, through a proxy")
    try:
        address = _within(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        virtual = host.startswith(f"{exam.url.bucket}.") and exam.settings.endpoint_url is not None
        remedy = "DCP_S3_ADDRESSING_STYLE=path keeps the bucket out of the name" if virtual else _REACH
        return _dead(exam, name, f"{where}: no address for the name {host!r}: {error}", remedy)
    began = time.monotonic()
    try:
        connection = socket.create_connection((host, port), timeout=min(_SECONDS, exam.settings.connect_timeout))
    except OSError as error:
        return _dead(exam, name, f"{where} ({address}) takes no connections: {error}", _REACH)
    found = f"{where} ({address}), connected in {_milliseconds(time.monotonic() - began)}"
    with connection:
        if url.scheme == "https":
            return _check_tls(name, exam, connection, host, found)
    if host in _LOCAL:
        return passed(name, f"{found}, without TLS")
    return warned(name, f"{found}, without TLS: nothing in flight is protected", "an https:// endpoint, if it has one")


def _check_tls(name: str, exam: Examination, connection: socket.socket, host: str, found: str) -> CheckResult:
    bundle = str(botocore.session.get_session().get_config_variable("ca_bundle") or get_cert_path(True))
    try:
        context = ssl.create_default_context(cafile=bundle)
    except OSError as error:
        return failed(name, f"the CA bundle {bundle} cannot be read: {error}", "correct AWS_CA_BUNDLE, or unset it")
    connection.settimeout(_SECONDS)
    try:
        with context.wrap_socket(connection, server_hostname=host) as wrapped:
            protocol, certificate = wrapped.version(), wrapped.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        why = error.verify_message or str(error)
        return _dead(exam, name, f"{found}: its certificate is not trusted: {why}", remedy_of_certificate(why, bundle))
    except OSError as error:
        remedy = "http:// in DCP_S3_ENDPOINT_URL, if it speaks no TLS"
        return _dead(exam, name, f"{found}: no TLS there: {error}", remedy)
    until = ssl.cert_time_to_seconds(str(certificate["notAfter"])) if "notAfter" in certificate else None
    days = None if until is None else (until - time.time()) / 86400
    if days is not None and days < _CERTIFICATE_DAYS:
        return warned(name, f"{found}, {protocol}; its certificate expires in {days:.0f} days", "have it renewed")
    return passed(name, f"{found}, {protocol}" + ("" if days is None else f", certificate for {days:.0f} days"))


def remedy_of_certificate(why: str, bundle: str) -> str:
    """What to do about a certificate that is not trusted, by OpenSSL's message."""
    if "expired" in why:
        return "have the endpoint's certificate renewed; check the clock of this host"
    if "not yet valid" in why:
        return "check the clock of this host"
    if "ostname" in why or "IP address" in why:
        return "DCP_S3_ENDPOINT_URL must have the name that is in the certificate; or DCP_S3_ADDRESSING_STYLE=path"
    return f"AWS_CA_BUNDLE=/path/of/your/authority.pem (searched was {bundle})"


def _dead(exam: Examination, name: str, found: str, remedy: str) -> CheckResult:
    exam.dead = "the endpoint is not reachable"
    return failed(name, found, remedy)


def _within(function: Callable[[], T]) -> T:
    """The function's result; TimeoutError if it takes too long. Resolvers cannot be told how long to wait."""
    done: list[Any] = []

    def work() -> None:
        try:
            done.append(function())
        except OSError as error:
            done.append(error)

    thread = threading.Thread(target=work, name="dcp-s3-resolve", daemon=True)
    thread.start()
    thread.join(_SECONDS)
    if not done:
        raise TimeoutError(f"no answer in {_SECONDS:g} s")
    if isinstance(done[0], OSError):
        raise done[0]
    result: T = done[0]
    return result


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def check_latency(name: str, exam: Examination) -> CheckResult:
    """How long small requests take. The first one, which connects, does not count."""
    exam.hello = exam.greet()
    found = statistics.median(exam.greet().seconds for _ in range(_REQUESTS))
    shown = f"{_milliseconds(found)} for a small request (median of {_REQUESTS})"
    if found > _FAR_SECONDS:
        remedy = "train in the region of the bucket; does DCP_S3_REGION or a proxy lead elsewhere?"
        return warned(name, f"{shown}: S3 is far away", remedy)
    return passed(name, shown)


def check_region(name: str, exam: Examination) -> CheckResult:
    """Whether the bucket is in the region that is configured."""
    return judge_region(name, exam.url.bucket, exam.hello or exam.greet(), str(exam.client.meta.region_name or ""))


def judge_region(name: str, bucket: str, hello: Hello, configured: str) -> CheckResult:
    """The result for the answer to a HeadBucket."""
    actual = hello.headers.get("x-amz-bucket-region", "")
    differs = bool(actual and configured) and actual != configured and configured != "aws-global"
    if hello.status in (301, 307, 308) or (differs and hello.status == 400):
        return failed(
            name,
            f"bucket {bucket!r} is in {actual or 'another region'}, requests go to {configured or 'none'}",
            f"set DCP_S3_REGION={actual}" if actual else "set DCP_S3_REGION or DCP_S3_ENDPOINT_URL",
        )
    if differs:
        return warned(
            name,
            f"bucket {bucket!r} is in {actual}, configured is {configured}: requests are redirected",
            f"set DCP_S3_REGION={actual}",
        )
    if not actual:
        return passed(name, f"{configured or 'none'} is configured; the store does not tell the bucket's")
    return passed(name, actual)


def check_clock(name: str, exam: Examination) -> CheckResult:
    """Whether this host's clock agrees with the server's."""
    skew = (exam.hello or exam.greet()).skew
    return skipped(name, "the endpoint's answers have no Date") if skew is None else judge_clock(name, skew)


def judge_clock(name: str, skew: float) -> CheckResult:
    """The result for seconds by which this host's clock is ahead."""
    found = f"this host's clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the endpoint's"
    remedy = "synchronise it (NTP, chrony); S3 refuses requests from 15 minutes on"
    if abs(skew) > _SKEW_FAILS:
        return failed(name, found, remedy)
    if abs(skew) > _SKEW_WARNS:
        return warned(name, found, remedy)
    return passed(name, "this host's clock agrees with the endpoint's" if abs(skew) < 2 else found)


def check_bucket(name: str, exam: Examination) -> CheckResult:
    """Whether the bucket is there. A refusal of the listing is another check's."""
    try:
        answer = exam.ask("ListObjectsV2", Prefix=exam.url.key(""), MaxKeys=1)
    except errors.AccessDeniedError:
        found = f"{exam.url.bucket!r} is there, or hidden: it may not be listed"
        return warned(name, found, "see the check ListObjectsV2")
    except errors.StorageError as error:
        return from_error(name, error)
    there = "there are objects" if answer.get("Contents") else "there is nothing yet"
    return passed(name, f"{exam.url.bucket!r} is there; {there} below {exam.url}")


def check_owner(name: str, exam: Examination) -> CheckResult:
    """Whether the store enforces DCP_S3_EXPECTED_BUCKET_OWNER, by a request with another one."""
    owner = exam.settings.expected_bucket_owner
    if owner is None:
        return skipped(name, "DCP_S3_EXPECTED_BUCKET_OWNER is unset")
    other = "000000000000" if owner != "000000000000" else "111111111111"
    store = replace(exam.store, settings=exam.settings.model_copy(update={"expected_bucket_owner": other}))
    try:
        store.call("HeadBucket", "", lambda: store.send(Request("HeadBucket", "", {})))
    except errors.AccessDeniedError:
        return passed(name, f"account {owner}, and the store enforces it")
    found = f"account {owner} is expected, but the store does not look at it"
    return warned(name, found, "nothing, if the store knows no accounts; unset DCP_S3_EXPECTED_BUCKET_OWNER")
