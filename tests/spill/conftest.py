"""Fixtures of the tests of the local-disk tier. Nothing drains by itself, except in the background of `draining`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dcp_s3.spill import drain, saving
from tests.faulty import BUCKET, FaultyServer
from tests.spill.making import Spill, configure


@pytest.fixture
def spill(faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spill:
    """On a server of its own whose faults the test sets."""
    configure(monkeypatch, tmp_path / "spill")
    return Spill(f"s3://{BUCKET}/run", tmp_path / "spill", faulty)


@pytest.fixture
def anywhere(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spill:
    """On every server."""
    configure(monkeypatch, tmp_path / "spill")
    return Spill(root, tmp_path / "spill")


@pytest.fixture
def draining(spill: Spill, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spill]:
    """With the drain in the drain."""
    monkeypatch.setattr(saving, "drain_in_background", drain.drain_in_background)
    yield spill
    drain.stop_draining()
