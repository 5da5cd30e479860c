"""Fixtures of the tests of S3."""

from __future__ import annotations

import pytest

from dcp_s3.s3 import retry


@pytest.fixture(autouse=True)
def _shorter_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BACKOFF_CAP", 0.1)
