"""An in-memory S3 server whose faults a test sets while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from dcp_s3.s3.client import close_clients
from tests.memory_s3 import Fault, MemoryS3

BUCKET = "bucket"


class FaultyServer:
    """`rule` decides for each request whether something goes wrong with it; at first nothing does."""

    def __init__(self) -> None:
        self.rule: Callable[[Any], Fault | None] = lambda _: None
        self.s3 = MemoryS3(fault=lambda request: self.rule(request))

    def once(self, operation: str, fault: Fault, *, key: str = "") -> list[str]:
        """Let the next ``operation`` (on a key that contains ``key``) fail; returns the list of those that did."""
        seen: list[str] = []

        def rule(request: Any) -> Fault | None:
            if request.operation == operation and key in request.key and not seen:
                seen.append(request.key)
                return fault
            return None

        self.rule = rule
        return seen


@contextlib.contextmanager
def serve(monkeypatch: pytest.MonkeyPatch, server: FaultyServer | None = None) -> Iterator[FaultyServer]:
    """A running `FaultyServer` (a new one, or ``server``) with a bucket; the environment leads to it."""
    server = server or FaultyServer()
    with server.s3:
        monkeypatch.setenv("DCP_S3_ENDPOINT_URL", server.s3.endpoint_url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        server.s3.create_bucket(BUCKET)
        try:
            yield server
        finally:
            close_clients()  # one made from AWS's variables would be found by tests that set others
