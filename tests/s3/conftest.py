"""Fixtures of the tests of S3."""

from __future__ import annotations

import pytest

from dcp_s3.s3 import retry
from dcp_s3.s3.pressure import known_buckets


@pytest.fixture(autouse=True)
def _shorter_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BACKOFF_CAP", 0.1)


@pytest.fixture(autouse=True)
def _knowing_nothing() -> None:
    """Of any bucket: servers of earlier tests may have had the same port."""
    known_buckets.clear()
