"""Fixtures of the tests of the local-disk tier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faulty import BUCKET, FaultyServer, serve
from tests.spill.making import Spill, configure


@pytest.fixture
def spill(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spill:
    """On every server; nothing drains by itself."""
    return configure(root, tmp_path, monkeypatch)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with serve(monkeypatch) as server:
        yield server


@pytest.fixture
def faulty_spill(faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spill:
    """On a server of its own whose faults the test sets."""
    return configure(f"s3://{BUCKET}/run", tmp_path, monkeypatch)
