"""Tests of the adapters with the real frameworks: `make test-integrations`, in an environment that has them.

`make test` has none of them and collects nothing here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

collect_ignore_glob = [] if os.environ.get("DCP_S3_TEST_INTEGRATIONS") else ["test_*.py", "*/test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(900))  # several processes import a framework


@pytest.fixture(autouse=True)
def _for_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setenv(name, value)
    # Otherwise Accelerate makes it several on each rank, and OpenMP does not survive a fork.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def _new_accelerator() -> Iterator[None]:
    yield
    if state := sys.modules.get("accelerate.state"):
        for each in (state.AcceleratorState, state.GradientState, state.PartialState):
            each._shared_state.clear()
