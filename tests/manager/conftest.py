"""What tests of managers share."""

from __future__ import annotations

import pytest

from tests.faulty import FaultyServer


@pytest.fixture
def faulty(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> FaultyServer:
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "1")
    return faulty
