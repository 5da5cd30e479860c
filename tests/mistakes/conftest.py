"""A server that a test can tell what to refuse."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faulty import FaultyServer, serve


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with serve(monkeypatch) as server:
        yield server
