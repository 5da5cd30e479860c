"""Fixtures that every test may use: real S3 servers, a bucket of its own, a clean environment.

A test that takes `server`, `s3`, `bucket` or `root` runs on every server that this machine can run;
`@pytest.mark.servers("memory", "rgw")` restricts it, and taking `memory_server` restricts it to the
in-memory one. `root` is where most tests start: an s3:// URL in an empty bucket, with the
environment set such that dcp_s3 and boto3 find the server without arguments.

`make test` leaves out what is marked `soak`, and of a test marked `@pytest.mark.quick("id", ...)` all
cases but those. What is not about S3 itself it runs on the in-memory server only, but whole saves and
loads on Ceph's too. `make soak` runs the rest. After DCP_S3_TEST_MINUTES no further test is begun: it
is skipped, and named as not run.
What is about pages, examples, demo, benchmarks and the package is marked `docs`: `make test-docs` runs it.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from hypothesis import settings

import tests.preload
from dcp_s3.s3 import retry
from tests.faulty import FaultyServer, serve
from tests.interpreter import Interpreter
from tests.servers import NAMES, S3Server, Servers, ServerUnavailable
from tests.servers.server import BUCKET as EXTERNAL_BUCKET

# The same examples in every run, so that a failure is the change's own; --hypothesis-profile=search looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=5_000, deadline=None)
settings.load_profile("repeatable")

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
# ListMultipartUploads: NoSuchUpload is rclone's answer for a bucket that has had no upload yet.
_NO_UPLOADS = {"NoSuchUpload", "NotImplemented", "MethodNotAllowed"}

_END = "DCP_S3_TEST_END"  # in the environment of all processes that share the tests: seconds since the epoch
_NOT_RUN = "not run: DCP_S3_TEST_MINUTES are over"
_end = float("inf")

_TESTS = Path(__file__).parent
# `make test-docs` runs these, and what is marked so elsewhere.
_DOCS = ("docs/", "examples/", "test_benchmarks.py")
# What differs between servers: requests and their answers, conditional writes.
_ON_EVERY_SERVER = ("s3/", "servers/", "checkpoint/", "test_store_contract.py")
_ON_RGW = (*_ON_EVERY_SERVER, "end_to_end/test_roundtrip.py", "coordination/", "checkup/")


def pytest_configure(config: pytest.Config) -> None:
    global _end
    if "DCP_S3_TEST_MINUTES" in os.environ:
        os.environ.setdefault(_END, str(time.time() + 60 * float(os.environ["DCP_S3_TEST_MINUTES"])))
        _end = float(os.environ[_END])
    # Once it runs, by whoever is the first to need it, it is too late.
    multiprocessing.set_forkserver_preload(tests.preload.MODULES)
    # Background shells start programs with Ctrl-C ignored, and so would be what they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    in_memory = {_function(item) for item in items if _server(item) == "memory"}
    for item in items:
        server = _server(item)
        mark = item.get_closest_marker("quick")
        if mark is not None and item.callspec.id.removeprefix(f"{server}-") not in mark.args:  # type: ignore[attr-defined]
            item.add_marker("soak")
        path = str(item.path.relative_to(_TESTS))
        if server == "rgw":
            again = _function(item) in in_memory and not path.startswith(_ON_RGW)
        else:
            again = server in ("moto", "rclone") and not path.startswith(_ON_EVERY_SERVER)
        if again:
            item.add_marker("soak")
        if path.startswith(_DOCS):
            item.add_marker("docs")
    if _end < float("inf"):
        # What has large counts comes last, the first case of each test before any second one.
        cases: Counter[str] = Counter()
        turns: dict[pytest.Item, int] = {}
        for item in items:
            if item.get_closest_marker("counted") is not None:
                cases[_function(item)] += 1
                turns[item] = cases[_function(item)]
        items.sort(key=lambda item: turns.get(item, 0))


def _server(item: pytest.Item) -> str:
    """The server that a case runs on; empty where it takes none."""
    case = getattr(item, "callspec", None)
    return "" if case is None else str(case.params.get("server", ""))


def _function(item: pytest.Item) -> str:
    """The test without its case."""
    return item.nodeid.partition("[")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > _end:
        pytest.skip(_NOT_RUN)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = terminalreporter.stats.get("skipped", ())
    reasons = Counter(_reason(report) for report in skipped)
    if reasons:
        terminalreporter.section("skipped")
        for reason, count in reasons.most_common():
            terminalreporter.line(f"{count} test{'s' * (count > 1)}: {reason}")
    left = [report.nodeid for report in skipped if _NOT_RUN in _reason(report)]
    if left:
        terminalreporter.section(f"{len(left)} tests were NOT RUN: DCP_S3_TEST_MINUTES were over")
        for nodeid in left:
            terminalreporter.line(nodeid)


def _reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


@pytest.fixture(autouse=True, scope="session")
def _small_heap() -> None:
    """Keep the garbage collector, which many tests call, from what was imported. Nothing of that is ever garbage."""
    tests.preload.share_service_models()
    gc.collect()
    gc.freeze()


_level = 0.0  # MiB of this process after the latest collection


@pytest.fixture(autouse=True)
def _trim() -> Iterator[None]:
    """Give memory back. What tests leave is in cycles of few objects that hold much: the collector does not hurry."""
    global _level
    yield
    if sys.platform == "linux" and _resident() > _level + 100:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        _level = _resident()


def _resident() -> float:
    """MiB of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between attempts, also of ranks (`tests.ranks` tells them)."""
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.01)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "server" not in metafunc.fixturenames:
        return
    marks = list(metafunc.definition.iter_markers("parametrize"))
    if any("server" in str(mark.args[0]).replace(",", " ").split() for mark in marks):
        return  # the test says itself which ones
    names = NAMES
    if "memory_server" in metafunc.fixturenames:
        names = ("memory",)
    mark = metafunc.definition.get_closest_marker("servers")
    if mark is not None:
        unknown = set(mark.args) - {*NAMES, "external"}
        if unknown:
            raise pytest.UsageError(f"servers{mark.args}: no server is called {unknown}")
        names = tuple(name for name in names if name in mark.args)
    metafunc.parametrize("server", names, indirect=True)


@pytest.fixture(scope="session")
def _servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.close()


@pytest.fixture
def server(request: pytest.FixtureRequest, _servers: Servers) -> S3Server:
    """A running S3 server, started at its first use and shared by all tests of the session."""
    try:
        return _servers.get(request.param)
    except ServerUnavailable as e:
        pytest.skip(str(e))


@pytest.fixture
def memory_server(server: S3Server) -> S3Server:
    """The in-memory server; `.handle` is its MemoryS3: `objects(bucket)`, `counters`, ..."""
    return server


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, _own_environment: None) -> Iterator[FaultyServer]:
    """An in-memory server that a test tells what to refuse; the environment leads to it."""
    with serve(monkeypatch) as server:
        yield server


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """For programs, which would each import torch for seconds otherwise."""
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test sees the AWS or dcp_s3 settings of whoever runs it."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "DCP_S3_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    # Without credentials botocore would ask the metadata service, and wait for it.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def s3_env(server: S3Server, monkeypatch: pytest.MonkeyPatch, _own_environment: None) -> S3Server:
    """The environment leads to `server`: endpoint, credentials, region, no proxies."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", server.region)
    monkeypatch.setenv("DCP_S3_ENDPOINT_URL", server.endpoint_url)
    if server.session_token is not None:
        monkeypatch.setenv("AWS_SESSION_TOKEN", server.session_token)
    if server.is_local:
        for name in _PROXIES:
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
    return server


@pytest.fixture(scope="session")
def _clients() -> Iterator[dict[str, Any]]:
    clients: dict[str, Any] = {}
    yield clients
    for client in clients.values():
        client.close()


@pytest.fixture
def s3(s3_env: S3Server, _clients: dict[str, Any]) -> Any:
    """A plain boto3 client of `server`, to look at what the code under test did. One for all tests."""
    if s3_env.name not in _clients:
        style = "path" if s3_env.is_local else "auto"
        config = Config(
            s3={"addressing_style": style},
            retries={"mode": "standard"},
            # rclone answers a range with 200 and the whole object's checksum: botocore would compare.
            response_checksum_validation="when_required",
        )
        _clients[s3_env.name] = boto3.Session().client("s3", endpoint_url=s3_env.endpoint_url, config=config)
    return _clients[s3_env.name]


@pytest.fixture
def bucket(s3: Any, server: S3Server) -> Iterator[str]:
    """The name of an empty bucket. A test that leaves a multipart upload open in it fails."""
    shared = "" if server.is_local else EXTERNAL_BUCKET
    name = shared or f"dcp-s3-test-{uuid.uuid4().hex[:16]}"
    if shared:
        # It is emptied afterwards: never anything that was there before.
        if s3.list_objects_v2(Bucket=name, MaxKeys=1)["KeyCount"] or _open_uploads(s3, name):
            pytest.fail(f"DCP_S3_TEST_BUCKET {name} is not empty; tests use an empty one only")
    else:
        s3.create_bucket(Bucket=name, **_location(server))
    yield name
    left = _open_uploads(s3, name)
    for key, upload_id in left:
        s3.abort_multipart_upload(Bucket=name, Key=key, UploadId=upload_id)
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=name):
        for found in page.get("Contents", []):
            s3.delete_object(Bucket=name, Key=found["Key"])
    if not shared:
        try:
            s3.delete_bucket(Bucket=name)
        except ClientError as e:
            # An aborted upload leaves an empty directory in rclone's bucket.
            if server.name != "rclone" or e.response["Error"]["Code"] != "BucketNotEmpty":
                raise
    if left:
        pytest.fail(f"multipart uploads left open: {sorted(key for key, _ in left)}")


@pytest.fixture
def root(bucket: str) -> str:
    """The URL under which a run of checkpoints may be written."""
    return f"s3://{bucket}/run"


def _location(server: S3Server) -> dict[str, Any]:
    if server.is_local or server.region == "us-east-1":
        return {}
    return {"CreateBucketConfiguration": {"LocationConstraint": server.region}}


def _open_uploads(s3: Any, bucket: str) -> list[tuple[str, str]]:
    """(key, upload id) of each open upload; empty where the server cannot list them."""
    try:
        pages = list(s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket))
    except ClientError as e:
        if e.response["Error"]["Code"] in _NO_UPLOADS:
            return []
        raise
    return [(u["Key"], u["UploadId"]) for page in pages for u in page.get("Uploads", [])]
