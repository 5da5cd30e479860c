"""What tests of managers share."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.faulty import FaultyServer


@pytest.fixture
def faulty(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> FaultyServer:
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "1")
    return faulty


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((64,), float(step)), "step": step}


def blank() -> dict[str, Any]:
    return state(-1)


def is_of(loaded: dict[str, Any], step: int) -> bool:
    return bool(torch.equal(loaded["weight"], torch.full((64,), float(step)))) and loaded["step"] == step
