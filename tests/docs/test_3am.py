"""The page for 3 a.m.: its commands run in order against a run, and its messages are those that are printed."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from dcp_s3 import S3StorageWriter
from dcp_s3.cli.main import app
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import MemoryS3

_ROOT = Path(__file__).resolve().parents[2]
_BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (_ROOT / "docs" / "3am.md").read_text(), re.MULTILINE | re.DOTALL)
_SOURCE = "\n".join(path.read_text() for path in (_ROOT / "dcp_s3").rglob("*.py"))
# What the messages on the page are known by, as it stands in the code.
_PHRASES = [
    "no new checkpoint, and the earlier ones untouched; `dcp-s3 prune` removes what was uploaded",
    "was not saved to {each.url}, and nothing raised it",
    "Remedy: close the CheckpointManager, or use it in a `with`",
    "Missing key in checkpoint state_dict: ",
    "spilled saves are left in %s: `dcp-s3 drain` or the next training process uploads them",
    "raise DCP_S3_PART_SIZE, or lower DCP_S3_CONCURRENCY: fewer, larger requests; ",
    "an object goes straight to S3: ",
    "Checkpoint already exists: a committed checkpoint is at ",
    "holds a checkpoint that is newer than this one, which was not put in its place",
    "was not deleted: {why}. Remedy: `unpin` it, wait, or pass ",
    "Remedy: raise or unset ",
]


def test_every_block_is_a_message_or_is_run() -> None:
    assert {kind for kind, _ in _BLOCKS} == {"sh", "text"}
    assert sum(kind == "sh" for kind, _ in _BLOCKS) >= 8


@pytest.mark.parametrize("phrase", _PHRASES)
def test_the_messages_are_those_of_the_code(phrase: str) -> None:
    assert phrase in _SOURCE
    fixed = re.split(r"\{.*?\}|%s", phrase)
    page = " ".join(" ".join(block for kind, block in _BLOCKS if kind == "text").split())
    assert all(" ".join(part.split()) in page for part in fixed)


@pytest.mark.timeout(600)
def test_the_commands_run_in_order_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = FaultyServer()
    server.s3 = MemoryS3()
    with serve(monkeypatch, server):
        monkeypatch.setenv("PYTHONPATH", str(_ROOT))  # bench starts processes
        (tmp_path / "spill").mkdir()
        monkeypatch.setenv("DCP_S3_SPILL_DIR", str(tmp_path / "spill"))
        for step in (800, 900):
            url = f"s3://{BUCKET}/run/step-{step:08}"
            dcp.save({"model": {"w": torch.ones(100)}}, storage_writer=S3StorageWriter(url))
        before = set(server.s3.objects(BUCKET))
        for line in "".join(block for kind, block in _BLOCKS if kind == "sh").splitlines():
            words = shlex.split(line, comments=True)
            assert words[0] == "dcp-s3", line
            result = CliRunner().invoke(app, words[1:], env=dict(os.environ))
            assert result.exit_code == 0, f"{line}: {result.output} {result.exception!r}"
        assert set(server.s3.objects(BUCKET)) == before, "nothing on the page deletes or adds"
