"""Fixtures of the tests of reads that ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faulty import serve
from tests.load.peers.sharing import Recording


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    with serve(monkeypatch, Recording()) as server:
        assert isinstance(server, Recording)
        yield server
