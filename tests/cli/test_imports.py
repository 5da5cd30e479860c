"""``dcp-s3`` starts at once: what takes seconds to import is imported by what needs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.main import get_command

from dcp_s3 import S3StorageWriter, pin
from dcp_s3.cli.main import app
from tests.faulty import BUCKET, FaultyServer, serve

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

_ROOT = f"s3://{BUCKET}/run"
_HEAVY = {
    *("torch", "numpy", "boto3", "botocore", "s3transfer", "asyncio"),
    *("pydantic", "pydantic_settings", "rich.table", "rich.progress", "dcp_s3.settings"),
}
# Carries out commands, and tells what each has imported that the ones before it had not.
_PROGRAM = """
import contextlib, io, json, sys
told, before, output = [], set(), io.StringIO()
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["dcp-s3", *arguments]
    with contextlib.redirect_stdout(output):
        from dcp_s3.cli.main import app
        try:
            app()
        except SystemExit as end:
            status = end.code
    told.append((arguments, status or 0, sorted(set(sys.modules) - before)))
    before = set(sys.modules)
print(json.dumps(told))
"""


def _imported(commands: list[list[str]]) -> dict[str, set[str]]:
    command = [sys.executable, "-c", _PROGRAM, json.dumps(commands)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [status for _, status, _ in told] == [0] * len(commands), told
    return {" ".join(arguments): set(modules) for arguments, _, modules in told}


def test_help_imports_nothing_heavy() -> None:
    commands = sorted(get_command(app).commands)  # type: ignore[attr-defined]
    assert {"ls", "show", "verify", "drain", "prune", "import"} <= set(commands)
    found = _imported([["--help"], ["--version"], *([name, "--help"] for name in commands)])
    assert "dcp_s3.cli.main" in found["--help"]
    loaded = set().union(*found.values())
    typers_own = {"pydantic"} if "typer._adapters" in loaded else set()  # since typer 0.29; 0.1 s
    assert {command: heavy for command, new in found.items() if (heavy := new & _HEAVY - typers_own)} == {}


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    with serve(monkeypatch) as server:
        for step in (1, 2, 3):
            dcp.save({"w": torch.ones(3), "n": step}, storage_writer=S3StorageWriter(f"{_ROOT}/step-{step}"))
        pin(f"{_ROOT}/step-3")
        yield server


def test_what_decodes_no_tensors_imports_no_torch(saved: FaultyServer) -> None:
    found = _imported(
        [
            ["ls", _ROOT],
            ["ls", "--json", _ROOT],
            ["latest", _ROOT],
            ["pin", f"{_ROOT}/step-3", "--reason", "good"],
            ["unpin", f"{_ROOT}/step-3"],
            ["prune", "--dry-run", _ROOT, "latest:1"],
            ["prune", "--yes", _ROOT, "latest:2"],
            ["cp", f"{_ROOT}/step-3", f"s3://{BUCKET}/kept/step-3"],
        ]
    )
    assert {command: heavy for command, new in found.items() if (heavy := new & {"torch", "numpy"})} == {}
