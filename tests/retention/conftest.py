from __future__ import annotations

import pytest

from tests.retention.runs import Run


@pytest.fixture
def run() -> Run:
    return Run()
