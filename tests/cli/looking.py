"""Runs commands that look at checkpoints."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner

from dcp_s3.cli.main import app


def run(*arguments: object, status: int = 0, input: str | None = None) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=input)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def words(output: str) -> list[list[str]]:
    """The cells of a table in a pipe, or the words of other lines. The first row of a table is its head."""
    lines = [line for line in output.splitlines() if line.strip()]
    return [[cell.strip() for cell in line.split("\t")] if "\t" in line else line.split() for line in lines]
