"""Fixtures of the tests of S3."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp_s3.s3 import connections, retry, throttle
from tests.faulty import FaultyServer, serve


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """A server of its own, with faults, for one test."""
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.01)
    monkeypatch.setattr(retry, "BACKOFF_CAP", 0.1)
    with serve(monkeypatch) as server:
        yield server


@pytest.fixture
def new_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bucket has been throttled yet, and no link is known: servers of earlier tests may have had the same port."""
    monkeypatch.setattr(throttle, "_gates", {})
    monkeypatch.setattr(connections, "_links", {})
