"""docs/inspect.md: its Python runs, and its commands print what stands there."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dcp_s3.cli.main import app
from tests.faulty import FaultyServer, serve
from tests.interpreter import Interpreter
from tests.memory_s3 import MemoryS3

_ROOT = Path(__file__).resolve().parents[2]
_BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", (_ROOT / "docs" / "inspect.md").read_text(), re.MULTILINE | re.DOTALL)
# What depends on the clock, and on the versions that frame an item.
_VARIES = re.compile(r"^(created|written by)\s.*|[0-9.]+ [KMG]?i?B\b")


def _words(output: str) -> list[list[str]]:
    """The output without lines, spaces and (in a pipe) signs of empty cells that are only layout."""
    lines = [[w for w in _VARIES.sub("#", line).lower().split() if w != "-"] for line in output.splitlines()]
    return [line for line in lines if "".join(line).strip("─")]


def test_the_blocks_run_and_print_what_they_say(monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter) -> None:
    assert {language for language, _ in _BLOCKS} == {"python", "sh", "text"}
    server = FaultyServer()
    server.s3 = MemoryS3()
    statuses = []
    with serve(monkeypatch, server):
        program = [block for language, block in _BLOCKS if language == "python"]
        assert len(program) == 2
        done = interpreter.run([sys.executable, "-c", "\n".join(program)], capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr
        printed = ""
        for language, block in _BLOCKS:
            if language == "sh":
                assert not printed, "a command without its output"
                for line in block.splitlines():
                    command, *arguments = shlex.split(line)
                    assert command == "dcp-s3"
                    result = CliRunner().invoke(app, arguments)
                    statuses.append(result.exit_code)
                    printed += result.stdout
            elif language == "text":
                assert _words(printed) == _words(block)
                printed = ""
        assert not printed
    assert statuses == [0, 0, 0, 5, 0]
