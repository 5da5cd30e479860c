"""Any other endpoint: DCP_S3_TEST_ENDPOINT, with credentials from the usual AWS places.

DCP_S3_TEST_BUCKET names an existing bucket to use, which must be empty; without it, each test
creates its own. DCP_S3_TEST_LACKS=conditional_writes: the endpoint cannot do that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import boto3

from .server import S3Server, ServerUnavailable

ENDPOINT = os.environ.get("DCP_S3_TEST_ENDPOINT", "")
BUCKET = os.environ.get("DCP_S3_TEST_BUCKET", "")
_LACKS = os.environ.get("DCP_S3_TEST_LACKS", "")


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
