"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.end_to_end.damaging import Saved


@pytest.fixture
def saved(s3: Any, bucket: str, root: str) -> Saved:
    """A checkpoint in one object."""
    return Saved(s3, bucket, root)
