"""Commands that decode no tensors import no torch, which takes seconds."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter, pin
from tests.faulty import BUCKET, FaultyServer, serve

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

_ROOT = f"s3://{BUCKET}/run"
_RUN = """
import atexit, sys
atexit.register(lambda: print("imported:", sorted({"torch", "numpy"} & set(sys.modules)), file=sys.stderr))
from dcp_s3.cli.main import app
app()
"""


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with serve(monkeypatch) as server:
        for step in (1, 2, 3):
            dcp.save({"w": torch.ones(3), "n": step}, storage_writer=S3StorageWriter(f"{_ROOT}/step-{step}"))
        pin(f"{_ROOT}/step-3")
        yield server


@pytest.mark.parametrize(
    "command",
    [
        ["ls", _ROOT],
        ["ls", "--json", _ROOT],
        ["latest", _ROOT],
        ["pin", f"{_ROOT}/step-3", "--reason", "good"],
        ["unpin", f"{_ROOT}/step-3"],
        ["prune", "--dry-run", _ROOT, "latest:1"],
        ["prune", "--yes", _ROOT, "latest:2"],
        ["cp", f"{_ROOT}/step-3", f"s3://{BUCKET}/kept/step-3"],
    ],
    ids=" ".join,
)
def test_no_torch_is_imported(saved: FaultyServer, command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", _RUN, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "imported: []" in done.stderr
