"""Fixtures that every test may use: real S3 servers, a bucket of its own, a clean environment.

A test that takes `server`, `s3`, `bucket` or `root` runs on every server that this machine can run;
`@pytest.mark.servers("memory", "rgw")` restricts it, and taking `memory_server` restricts it to the
in-memory one. `root` is where most tests start: an s3:// URL in an empty bucket, with the
environment set such that dcp_s3 and boto3 find the server without arguments.
"""

from __future__ import annotations

import gc
import os
import uuid
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from hypothesis import settings

from tests.servers import NAMES, S3Server, Servers, ServerUnavailable
from tests.servers.external import BUCKET as EXTERNAL_BUCKET

# The same examples in every run, so that a failure is the change's own; --hypothesis-profile=search looks for new ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("search", max_examples=5_000, deadline=None)
settings.load_profile("repeatable")

_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
# ListMultipartUploads: NoSuchUpload is rclone's answer for a bucket that has had no upload yet.
_NO_UPLOADS = {"NoSuchUpload", "NotImplemented", "MethodNotAllowed"}


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """Keep the garbage collector, which many tests call, from what a thousand earlier tests left."""
    gc.collect()
    gc.freeze()


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
        pytest.skip(f"{request.param}: {e}")


@pytest.fixture
def memory_server(server: S3Server) -> S3Server:
    """The in-memory server; `.handle` is its MemoryS3: `objects(bucket)`, `counters`, ..."""
    return server


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


@pytest.fixture
def s3(s3_env: S3Server) -> Iterator[Any]:
    """A plain boto3 client of `server`, to look at what the code under test did."""
    style = "path" if s3_env.is_local else "auto"
    config = Config(
        s3={"addressing_style": style},
        retries={"mode": "standard"},
        # rclone answers a range with 200 and the whole object's checksum: botocore would compare.
        response_checksum_validation="when_required",
    )
    client = boto3.Session().client("s3", endpoint_url=s3_env.endpoint_url, config=config)
    yield client
    client.close()


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
