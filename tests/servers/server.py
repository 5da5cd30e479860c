"""What the tests know of an S3 server; the in-memory one, whose state is at hand; and any other endpoint.

That is DCP_S3_TEST_ENDPOINT, with credentials from the usual AWS places. DCP_S3_TEST_BUCKET names an existing bucket to
use, which must be empty; without it, each test creates its own. DCP_S3_TEST_LACKS=conditional_writes: it has none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import boto3

from tests.memory_s3 import MemoryS3

ENDPOINT = os.environ.get("DCP_S3_TEST_ENDPOINT", "")
BUCKET = os.environ.get("DCP_S3_TEST_BUCKET", "")
_LACKS = os.environ.get("DCP_S3_TEST_LACKS", "")


class ServerUnavailable(Exception):
    """This server cannot run here; the message is the reason that the skip shows."""


@dataclass(frozen=True)
class S3Server:
    """A running S3 server and what it can do beyond the common ground.

    conditional_writes: PutObject honours If-None-Match: *.
    handle: the server object itself where it runs in this process (memory).
    """

    name: str
    endpoint_url: str
    access_key: str
    secret_key: str
    conditional_writes: bool
    session_token: str | None = None
    region: str = "us-east-1"
    handle: Any = None

    @property
    def is_local(self) -> bool:
        return self.name != "external"


@contextlib.contextmanager
def memory() -> Iterator[S3Server]:
    with MemoryS3() as handle:
        yield S3Server(
            name="memory",
            endpoint_url=handle.endpoint_url,
            access_key="test-access-key",
            secret_key="test-secret-key",
            conditional_writes=True,
            handle=handle,
        )


@contextlib.contextmanager
def external() -> Iterator[S3Server]:
    if not ENDPOINT:
        raise ServerUnavailable("DCP_S3_TEST_ENDPOINT is not set")
    session = boto3.Session()
    credentials = session.get_credentials()
    if credentials is None:
        raise ServerUnavailable(f"no AWS credentials found for {ENDPOINT}")
    frozen = credentials.get_frozen_credentials()
    yield S3Server(
        name="external",
        endpoint_url=ENDPOINT,
        access_key=frozen.access_key,
        secret_key=frozen.secret_key,
        session_token=frozen.token,
        region=session.region_name or "us-east-1",
        conditional_writes="conditional_writes" not in _LACKS,
    )
