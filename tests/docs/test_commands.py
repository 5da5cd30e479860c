"""Every command in the documentation can be typed as it stands there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from dcp_s3.cli.main import app
from dcp_s3.retention.parse import parse_policy

_ROOT = Path(__file__).resolve().parents[2]
_PAGES = [_ROOT / "README.md", *sorted((_ROOT / "docs").glob("*.md"))]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# `dcp-s3 ...` up to the end of the line or what the shell does with it.
_TYPED = re.compile(r"(?:^|[ =/])dcp-s3 +(?!:)([^|;&\n]*?)(?= *(?:2>|\||;|&&|$))", re.MULTILINE)
_LISTED = re.compile(r'\["dcp-s3", .*\]')
_POLICIES = re.compile(r"DCP_S3_RETENTION(?:=|\n *value: )\"?([^\"\n]+)")


def commands(text: str) -> list[list[str]]:
    found = []
    for language, block in _FENCED.findall(text):
        if language in ("sh", "crontab", "ini"):
            found += [shlex.split(line, comments=True) for line in _TYPED.findall(block)]
        found += [json.loads(listed)[1:] for listed in _LISTED.findall(block)]
    return found


def parse(arguments: list[str]) -> dict[str, object]:
    """The parameters of a command, as it would be called with them."""
    group = get_command(app)
    context = group.make_context("dcp-s3", list(arguments))
    name, command, rest = group.resolve_command(context, list(arguments))  # type: ignore[attr-defined]
    parameters: dict[str, object] = command.make_context(name, rest, parent=context).params
    return parameters


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: page.name)
def test_commands_in_the_docs_parse(page: Path) -> None:
    text = page.read_text()
    for arguments in commands(text):
        parameters = parse(arguments)
        if arguments[0] == "prune":
            parse_policy(" ".join(parameters["policies"] or ()))  # type: ignore[call-overload]
    for line in _POLICIES.findall(text):
        assert parse_policy(line) is not None


def test_the_policy_for_jobs_is_the_one_that_is_tested() -> None:
    (policy,) = (block for kind, block in _FENCED.findall((_ROOT / "docs" / "jobs.md").read_text()) if kind == "json")
    tested = [block for kind, block in _FENCED.findall((_ROOT / "docs" / "security.md").read_text()) if kind == "json"]
    assert json.loads(policy) in [json.loads(block) for block in tested]


def test_the_examples_are_found() -> None:
    """Lest the test above looks at nothing."""
    pages = [(_ROOT / "docs" / page).read_text() for page in ("retention.md", "jobs.md")]
    found = [arguments for page in pages for arguments in commands(page)]
    prunes = [arguments for arguments in found if arguments[0] == "prune"]
    assert len(prunes) >= 7, found  # four as typed, cron, Kubernetes, systemd
    assert sum("--json" in arguments for arguments in prunes) == 1
    assert {"pin", "unpin", "annotate", "rm", "ls"} <= {arguments[0] for arguments in found}
    assert sum(len(_POLICIES.findall(page)) for page in pages) == 3
    with pytest.raises(Exception, match="No such option"):
        parse(["prune", "s3://bucket/run", "--no-such-option"])
