"""For all tests of staging."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> Iterator[None]:
    """Keep the garbage collector, which these tests call all the time, from what a thousand earlier tests left."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
