"""Fixtures of the tests of S3."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dcp_s3.s3 import retry
from tests.faulty import FaultyServer, serve


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """A server of its own, with faults, for one test."""
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.01)
    monkeypatch.setattr(retry, "BACKOFF_CAP", 0.1)
    with serve(monkeypatch) as server:
        yield server
