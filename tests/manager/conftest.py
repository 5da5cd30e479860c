"""What tests of managers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faulty import FaultyServer, serve


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "1")
    with serve(monkeypatch) as server:
        yield server
