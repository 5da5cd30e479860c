"""Blocks, links and commands of the pages, the messages of the one for 3 a.m., and what docs/inspect.md prints."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from dcp_s3.cli.main import app
from dcp_s3.retention.policy import parse_policy
from tests.docs.blocks import DATA, PAGES, ROOT, blocks
from tests.faulty import BUCKET, FaultyServer, serve
from tests.interpreter import Interpreter
from tests.memory_s3 import MemoryS3

# --- blocks, as they are pasted --------------------------------------------------------------------------


_RUN = [page for page in PAGES if any(block.runs for block in blocks(page))]
_names = [str(page.relative_to(ROOT)) for page in PAGES]


@pytest.mark.parametrize("page", PAGES, ids=_names)
def test_every_block_is_run_or_says_why_it_is_not(page: Path) -> None:
    text = page.read_text()
    found = blocks(page)
    assert text.count("\n```") + text.startswith("```") == 2 * len(found), "a block that is not found"
    for block in found:
        known = block.language in DATA | {"python", "sh"} or block.not_run
        assert known, f"{page.name}:{block.line}: {block.language or 'no language'}; output is `text`"
        if block.language == "json":
            json.loads(block.text)
        if block.not_run is not None:
            assert len(block.not_run) > 10, f"{page.name}:{block.line}: why not?"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", _RUN, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_runs_as_pasted(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter
) -> None:
    """The reader has a bucket called `bucket`, and AWS's own variables that lead to it; on the host is /nvme/spill."""
    assert BUCKET == "bucket"
    server = FaultyServer()
    server.s3 = MemoryS3()
    with serve(monkeypatch, server):
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", os.environ["DCP_S3_ENDPOINT_URL"])
        monkeypatch.delenv("DCP_S3_ENDPOINT_URL")
        monkeypatch.setenv("PYTHONPATH", str(ROOT))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        done = interpreter.run(
            [sys.executable, "-m", "tests.docs.blocks", str(page), str(tmp_path)],
            cwd=ROOT, capture_output=True, timeout=500,
        )  # fmt: skip
        output = done.stdout + done.stderr
        assert done.returncode == 0, output
        saved = server.s3.objects(BUCKET)
    committed = {key.removesuffix("/.metadata") for key in saved if key.endswith("/.metadata")}
    if page.name == "README.md":
        assert {f"run/step-{step}" for step in (1000, 2000, 4000, 5000)} <= committed
        assert len([name for name in committed if name.startswith("managed/")]) in range(3, 6)
    if page.name == "3am.md":  # nothing on it deletes or adds
        assert committed == {f"run/step-{step}" for step in ("00000800", "00000900")}
    if page.name == "async.md":
        assert {f"async/step-{step}" for step in (100, 200, 300)} <= committed
    if page.name == "tutorial.md":
        assert "starting after step 0 on 2 ranks" in output
        assert "starting after step 30 on 3 ranks" in output
        assert committed == {"tutorial/step-00000040", "tutorial/step-00000050"}


# --- links -----------------------------------------------------------------------------------------------


_LINKED = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", _LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor and linked.suffix == ".md":
            assert anchor in _anchors(linked), f"{page.name} links to {target}"


# --- commands --------------------------------------------------------------------------------------------


# `dcp-s3 ...` up to the end of the line or what the shell does with it.
_TYPED = re.compile(r"(?:^|[ =/])dcp-s3 +(?!:)([^|;&\n]*?)(?= *(?:2>|\||;|&&|$))", re.MULTILINE)
_LISTED = re.compile(r'\["dcp-s3", .*\]')
_POLICIES = re.compile(r"DCP_S3_RETENTION(?:=|\n *value: )\"?([^\"\n]+)")


def commands(page: Path) -> list[list[str]]:
    found = []
    for block in blocks(page):
        if block.language in ("sh", "crontab", "ini"):
            found += [shlex.split(line, comments=True) for line in _TYPED.findall(block.text)]
        found += [json.loads(listed)[1:] for listed in _LISTED.findall(block.text)]
    return found


def parse(arguments: list[str]) -> dict[str, object]:
    """The parameters of a command, as it would be called with them."""
    group = get_command(app)
    context = group.make_context("dcp-s3", list(arguments))
    name, command, rest = group.resolve_command(context, list(arguments))  # type: ignore[attr-defined]
    parameters: dict[str, object] = command.make_context(name, rest, parent=context).params
    return parameters


@pytest.mark.parametrize("page", PAGES, ids=_names)
def test_commands_in_the_docs_parse(page: Path) -> None:
    for arguments in commands(page):
        parameters = parse(arguments)
        if arguments[0] == "prune":
            parse_policy(" ".join(parameters["policies"] or ()))  # type: ignore[call-overload]
    for line in _POLICIES.findall(page.read_text()):
        assert parse_policy(line) is not None


# --- 3 a.m. ----------------------------------------------------------------------------------------------


_SOURCE = "\n".join(path.read_text() for path in (ROOT / "dcp_s3").rglob("*.py"))
# What the messages on the page are known by, as it stands in the code.
_PHRASES = [
    "no new checkpoint, and the earlier ones untouched; `dcp-s3 prune` removes what was uploaded",
    "was not saved to {save.url}, and nothing raised it",
    "Remedy: close the CheckpointManager, or use it in a `with`",
    "Missing key in checkpoint state_dict: ",
    "spilled saves are left in %s: `dcp-s3 drain` or the next training process uploads them",
    "raise DCP_S3_PART_SIZE, or lower DCP_S3_CONCURRENCY: fewer, larger requests; ",
    "an object goes to S3, however long that takes: ",
    "Checkpoint already exists: a committed checkpoint is at ",
    "holds a checkpoint that is newer than this one, which was not put in its place",
    "was not deleted: {error}. Remedy: `unpin` it, wait, or pass ",
    "raise or unset {self.setting}, or check the endpoint and the network",
]


@pytest.mark.parametrize("phrase", _PHRASES)
def test_the_messages_are_those_of_the_code(phrase: str) -> None:
    assert phrase in _SOURCE
    fixed = re.split(r"\{.*?\}|%s", phrase)
    shown = [block.text for block in blocks(ROOT / "docs" / "3am.md") if block.language == "text"]
    page = " ".join(" ".join(shown).split())
    assert all(" ".join(part.split()) in page for part in fixed)


# --- inspect.md ------------------------------------------------------------------------------------------


# What depends on the clock, and on the versions that frame an item.
_VARIES = re.compile(r"^(created|written by)\s.*|[0-9.]+ [KMG]?i?B\b")


def _words(output: str) -> list[list[str]]:
    """The output without lines, spaces and (in a pipe) signs of empty cells that are only layout."""
    lines = [[w for w in _VARIES.sub("#", line).lower().split() if w != "-"] for line in output.splitlines()]
    return [line for line in lines if "".join(line).strip("─")]


def test_the_commands_of_inspect_print_what_it_says(monkeypatch: pytest.MonkeyPatch, interpreter: Interpreter) -> None:
    found = [(block.language, block.text) for block in blocks(ROOT / "docs" / "inspect.md")]
    with serve(monkeypatch, FaultyServer()):
        program = "\n".join(text for language, text in found if language == "python")
        done = interpreter.run([sys.executable, "-c", program], capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr
        printed = ""
        for language, text in found:
            if language == "sh":
                for line in text.splitlines():
                    printed += CliRunner().invoke(app, shlex.split(line)[1:]).stdout
            elif language == "text":
                assert _words(printed) == _words(text)
                printed = ""
        assert not printed
