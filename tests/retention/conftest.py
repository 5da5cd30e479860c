from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import boto3
import pytest

from dcp_s3.s3 import retry
from tests.faulty import FaultyServer, serve
from tests.memory_s3 import MemoryS3
from tests.retention.runs import Clock, Run


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def clock() -> Clock:
    """The server's."""
    return Clock()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[FaultyServer]:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.001)
    server = FaultyServer()
    server.s3 = MemoryS3(fault=lambda request: server.rule(request), clock=clock)
    with serve(monkeypatch, server):
        yield server


@pytest.fixture
def client(faulty: FaultyServer) -> Iterator[Any]:
    made = boto3.Session().client("s3", endpoint_url=faulty.s3.endpoint_url)
    yield made
    made.close()
