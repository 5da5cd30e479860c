"""Fixtures of the tests of verify."""

from __future__ import annotations

from typing import Any

import pytest

from tests.offline.damaging import Saved, small_state


@pytest.fixture
def saved(memory_server: Any, s3: Any, root: str) -> Saved:
    """A small checkpoint in two objects."""
    return Saved(s3, root).save(small_state(), writer={"separate": ["weight"]})
