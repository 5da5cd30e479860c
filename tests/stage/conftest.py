"""Fixtures of the tests of staging."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture
def reported_waits(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What `pools.Waiter` looks for is logged."""
    with caplog.at_level(logging.WARNING, "dcp_s3.stage.pool"):
        yield
