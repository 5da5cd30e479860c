"""Fixtures of the tests of staging."""

from __future__ import annotations

import pytest

from tests.stage.making import HeldUp


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> HeldUp:
    return HeldUp(monkeypatch)
