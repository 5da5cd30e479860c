"""``dcp-s3`` starts at once: what takes seconds to import is imported by what needs it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.main import get_command

from dcp_s3.cli.main import app

_HEAVY = {
    *("torch", "numpy", "boto3", "botocore", "s3transfer", "asyncio"),
    *("pydantic", "pydantic_settings", "rich.table", "rich.progress", "dcp_s3.settings"),
}
_COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]

_PROGRAM = """
import sys
sys.argv = ["dcp-s3", *sys.argv[1:]]
from dcp_s3.cli.main import app
try:
    app()
finally:
    sys.stderr.write(" ".join(sorted(sys.modules)))
"""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], *([name, "--help"] for name in _COMMANDS)], ids=" ".join
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout
    loaded = set(done.stderr.split())
    assert "dcp_s3.cli.main" in loaded
    typers_own = {"pydantic"} if "typer._adapters" in loaded else set()  # since typer 0.29; 0.1 s
    assert not loaded & _HEAVY - typers_own


def test_there_are_commands() -> None:
    """Lest the test above looks at nothing."""
    assert {"ls", "show", "verify", "drain", "prune", "bench", "import"} <= set(_COMMANDS)
