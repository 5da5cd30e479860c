"""Waiting for what other threads do."""

from __future__ import annotations

import time
from collections.abc import Callable

LONG = 30.0  # seconds to wait for what must come


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
