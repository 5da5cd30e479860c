"""README's blocks run as they are pasted: Python's in order in one fresh process, then the commands in order."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dcp_s3.cli.main import app
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import MemoryS3

_ROOT = Path(__file__).resolve().parents[1]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_BLOCKS = _FENCED.findall((_ROOT / "README.md").read_text())
_PYTHON = [block for language, block in _BLOCKS if language == "python"]
_SHELL = [block for language, block in _BLOCKS if language == "sh"]
_COMMANDS = [block for block in _SHELL if "dcp-s3 " in block]


def test_every_block_is_run_or_known() -> None:
    assert {language for language, _ in _BLOCKS} == {"python", "sh"}
    assert len(_PYTHON) >= 5
    assert len(_COMMANDS) >= 2
    first_words = {line.split()[0] for block in _SHELL if block not in _COMMANDS for line in block.splitlines()}
    assert first_words == {"pip", "make"}  # these install, and are not run here


def _type(line: str) -> None:
    """What a shell does with a line: a comment, an assignment, or a command that has to succeed."""
    words = shlex.split(line, comments=True)
    if words[:1] == ["export"]:
        name, _, value = words[1].partition("=")
        os.environ[name] = value
        return
    assert words[:1] == ["dcp-s3"], line
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, f"{line}: {result.output} {result.exception!r}"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_the_blocks_run_as_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader has a bucket called `bucket`, and AWS's own variables that lead to it; on the host is /nvme/spill."""
    server = FaultyServer()
    server.s3 = MemoryS3()
    with serve(monkeypatch, server):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", os.environ["DCP_S3_ENDPOINT_URL"])
        monkeypatch.delenv("DCP_S3_ENDPOINT_URL")
        monkeypatch.setenv("PYTHONPATH", str(_ROOT))
        monkeypatch.setenv("DCP_S3_SPILL_DIR", "")  # so that it is restored after the commands that set it
        monkeypatch.chdir(tmp_path)
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(_PYTHON)], capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert BUCKET == "bucket"
        saved = set(server.s3.objects(BUCKET))
        for checkpoint in (
            *(f"run/step-{step}" for step in (1000, 2000, 3000, 4000)),
            *(f"async/step-{step}" for step in (100, 200, 300)),
        ):
            assert f"{checkpoint}/.metadata" in saved
        assert sum(key.startswith("managed/") and key.endswith("/.metadata") for key in saved) in range(3, 6)
        (tmp_path / "nvme" / "spill").mkdir(parents=True)
        for line in "".join(_COMMANDS).splitlines():
            _type(line.replace("/nvme/", f"{tmp_path}/nvme/"))
        assert (tmp_path / "DIR" / ".metadata").is_file()
        assert {"copy/step-1000/.metadata", "run/step-1000/.dcp_s3/metrics.json"} <= set(server.s3.objects(BUCKET))
