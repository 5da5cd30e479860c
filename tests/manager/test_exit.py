"""A script that ends without closing its manager."""

from __future__ import annotations

import sys

import pytest

from dcp_s3 import latest, list_checkpoints
from tests.faulty import BUCKET, serve
from tests.interpreter import Interpreter

ROOT = f"s3://{BUCKET}/run"

_SCRIPT = """
import sys, torch
from dcp_s3 import CheckpointManager
manager = CheckpointManager(sys.argv[1], retention="latest:1")
for step in (1, 2):
    manager.save(step, {"weight": torch.full((1000,), float(step))})
print("end", flush=True)
"""


def test_the_last_save_is_complete_and_the_process_ends(
    monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter
) -> None:
    with serve(monkeypatch):
        done = interpreter.run([sys.executable, "-W", "ignore", "-c", _SCRIPT, ROOT], capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert done.stdout == "end\n"
        assert "Fatal" not in done.stderr
        newest = latest(ROOT)
        assert newest is not None
        assert newest.step == 2
        assert {info.step for info in list_checkpoints(ROOT)} <= {1, 2}  # retention may or may not have run
