"""States of steps, and prunes that do what a test says."""

from __future__ import annotations

import threading
from typing import Any

import torch


def state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((64,), float(step)), "step": step}


def blank() -> dict[str, Any]:
    return state(-1)


def is_of(loaded: dict[str, Any], step: int) -> bool:
    return bool(torch.equal(loaded["weight"], torch.full((64,), float(step)))) and loaded["step"] == step


class StandInPrune:
    """Counts its calls, which end when the test lets them, or fail."""

    def __init__(self) -> None:
        self.calls = 0
        self.began = threading.Semaphore(0)
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def __call__(self, check: Any) -> None:
        self.calls += 1
        self.began.release()
        assert self.go.wait(60)
        check()
        if self.error is not None:
            raise self.error
