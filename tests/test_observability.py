"""The callbacks of docs/observability.md, with what they are for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter, events

pytestmark = pytest.mark.servers("memory")

PAGE = Path(__file__).parents[1] / "docs" / "observability.md"


class Recorder:
    """A run of Weights & Biases, or a writer of TensorBoard, that keeps what it is told."""

    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.alerts: list[str] = []
        self.scalars: dict[str, tuple[float, int]] = {}

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def alert(self, title: str, text: str) -> None:
        self.alerts.append(f"{title}: {text}")

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name] = value, step


def callback(name: str) -> Any:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if f"def {name}(" in block]
    names: dict[str, Any] = {"events": events}
    exec(found, names)
    return names[name]


def test_weights_and_biases(root: str) -> None:
    run = Recorder()
    with callback("to_wandb")(run):
        dcp.save({"w": torch.ones(10)}, storage_writer=S3StorageWriter(f"{root}/step-9"))
        events.emit(events.SaveFailed(url=None, step=10, error=ValueError("no room")))
    (logged,) = run.logged
    assert logged["checkpoint/step"] == 9
    assert logged["checkpoint/seconds"] > 0
    assert run.alerts == ["a save failed: no room"]


def test_tensorboard(root: str) -> None:
    writer = Recorder()
    with callback("to_tensorboard")(writer):
        dcp.save({"w": torch.ones(10)}, storage_writer=S3StorageWriter(f"{root}/step-9"))
    assert {name: step for name, (_, step) in writer.scalars.items()} == dict.fromkeys(
        ("checkpoint/seconds", "checkpoint/GiB per s", "checkpoint/stall"), 9
    )
