"""Tests of the adapters with the real frameworks: `make test-integrations`, in an environment that has them.

`make test` has none of them and collects nothing here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.faulty import FaultyServer, serve

collect_ignore_glob = [] if os.environ.get("DCP_S3_TEST_INTEGRATIONS") else ["test_*.py", "*/test_*.py"]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    """An S3 server whose faults the test sets; the environment leads to it."""
    with serve(monkeypatch) as server:
        yield server
