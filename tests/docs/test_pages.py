"""Pages, and what is published: blocks, links, commands, messages, examples in docstrings; site and packages."""

from __future__ import annotations

import doctest
import email
import importlib
import importlib.util
import inspect
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from typer.main import get_command
from typer.testing import CliRunner

import dcp_s3
from dcp_s3 import events
from dcp_s3.cli.main import app
from dcp_s3.retention.policy import parse_policy
from examples.sizing import Training, report, size
from tests.docs.blocks import DATA, PAGES, ROOT, blocks
from tests.faulty import BUCKET, serve
from tests.interpreter import Interpreter

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
    with serve(monkeypatch) as server:
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


@pytest.mark.parametrize("page", _LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert "://" in target or target.startswith("mailto:") or linked.exists(), f"{page.name} links to {target}"
        if anchor and linked.suffix == ".md":
            text = re.sub(r"```.*?```", "", linked.read_text(), flags=re.DOTALL)
            headings = re.findall(r"^#+ +(.*)$", text.lower(), flags=re.MULTILINE)
            # As GitHub makes them.
            anchors = {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{page.name} links to {target}"


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
    with serve(monkeypatch):
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


# --- examples in docstrings -----------------------------------------------------------------------------

_MAIN = ("CheckpointCatalog", "CheckpointManager", "S3Stager", "S3StorageReader", "S3StorageWriter")
_DCP = (AsyncStager, StorageReader, StorageWriter)


def _documented() -> Iterator[tuple[str, Any]]:
    """What a user calls: the public names, and the public methods of the main classes that DCP does not call."""
    yield "dcp_s3", dcp_s3
    for name in dcp_s3.__all__:
        if name != "__version__":
            yield name, getattr(dcp_s3, name)
    for name in _MAIN:
        kind = getattr(dcp_s3, name)
        for member in dir(kind):
            found = inspect.getattr_static(kind, member)
            called = inspect.isfunction(found) and not inspect.iscoroutinefunction(found)
            of_dcp = any(base in kind.__mro__ for base in _DCP) and any(hasattr(base, member) for base in _DCP)
            if not member.startswith("_") and not of_dcp and (called or isinstance(found, property)):
                yield f"{name}.{member}", found


_NAMED = dict(_documented())


def train(state: dict[str, Any]) -> None:
    state["weight"] += 1
    state["step"] += 1


def validate(state: dict[str, Any]) -> float:
    return float(1 / (1 + state["weight"].sum()))


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the page of `help(dcp_s3)` says of the examples."""
    with serve(monkeypatch):
        assert BUCKET == "bucket"
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(events, "_totals", events.Stats())  # other tests of this process have counted, too
        state = {"weight": torch.arange(8.0).view(4, 2), "step": 0}
        with dcp_s3.CheckpointManager("s3://bucket/run") as manager:
            for step, loss in ((1000, 1.25), (2000, 1.5)):
                manager.save(step, {**state, "step": step}, {"val_loss": loss}, blocking=True)
        public = {name: getattr(dcp_s3, name) for name in dcp_s3.__all__}
        yield {**public, "state": state, "train": train, "validate": validate, "torch": torch, "dcp": dcp, "time": time}


def _run(test: doctest.DocTest, namespace: dict[str, Any]) -> None:
    test.globs = namespace
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    assert runner.run(test, out=said.append, clear_globs=False).failed == 0, "".join(said)


@pytest.mark.parametrize("name", _NAMED)
def test_it_has_an_example_which_runs(name: str, namespace: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("dcp_s3"), "level", logging.CRITICAL)
    tests = [test for test in doctest.DocTestFinder(recurse=False).find(_NAMED[name], name, globs={}) if test.examples]
    assert tests, f"{name} has no example (>>>) in its docstring"
    for test in tests:
        namespace["state"]["step"] = 0
        _run(test, namespace)


def _others() -> Iterator[doctest.DocTest]:
    """Examples elsewhere in dcp_s3, of what is not public."""
    known = {getattr(found, "__doc__", None) for found in _NAMED.values()}
    for path in sorted((ROOT / "dcp_s3").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        without_framework = not module.startswith("dcp_s3.integrations.") or module == "dcp_s3.integrations.dcp"
        if ">>> " in path.read_text() and without_framework:  # others are not installed here
            for test in doctest.DocTestFinder().find(importlib.import_module(module.removesuffix(".__init__")), module):
                if test.examples and test.docstring not in known:
                    yield test


def test_examples_elsewhere_run(namespace: dict[str, Any]) -> None:
    for test in _others():
        _run(test, dict(namespace))


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for each in (nav.values() if isinstance(nav, dict) else nav) for page in _pages(each)]


def test_every_page_is_in_the_nav_and_the_nav_has_only_pages() -> None:
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    nav = _pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(nav) == sorted(there | {"index.md", "contributing.md", "API"})


def test_the_api_reference_has_every_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs", reason="the site's tools are not installed: pip install 'dcp-s3[docs]'")
    monkeypatch.syspath_prepend(ROOT / "docs" / "tools")
    shown = re.findall(r"^::: (\S+)", "\n".join(importlib.import_module("hooks").api_pages().values()), re.MULTILINE)
    assert {name.rpartition(".")[2] for name in shown} == set(dcp_s3.__all__) - {"__version__"}


def test_the_sizing_page_shows_what_the_script_says() -> None:
    page = (ROOT / "docs" / "sizing.md").read_text()
    assert f"```text\n{report(Training())}\n```" in page
    found = size(Training())
    assert f"{found.host_staging / 2**30:.1f} GiB of host memory" in page
    assert f"here {found.rank * 8 / 2**30:.1f} GiB" in page
    assert f"{found.part / 2**20:.0f} MiB here" in page
    assert f"requests for ${found.save_dollars:.2f}" in page


# --- packages --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel, and the sdist that it was made from."""
    for module in ("build", "hatch_fancy_pypi_readme"):
        pytest.importorskip(module, reason="no package is built here: pip install 'dcp-s3[package]'")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--quiet", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    ((wheel,), (sdist,)) = (folder.glob(pattern) for pattern in ("*.whl", "*.tar.gz"))
    return wheel, sdist


def test_the_wheel_has_the_package_the_types_and_the_licence_and_no_tests(dist: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(dist[0]) as wheel:
        names = wheel.namelist()
        info = next(name.partition("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        found = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert {name.partition("/")[0] for name in names} == {"dcp_s3", info}
    assert {"dcp_s3/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    ours = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dcp_s3").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == ours
    assert (found["License-Expression"], found["Description-Content-Type"]) == ("Apache-2.0", "text/markdown")
    for version in ("3.10", "3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in (found.get_all("Classifier") or [])
    assert "torch>=2.9" in " ".join(found.get_all("Requires-Dist") or [])


def test_the_sdist_has_what_the_wheel_and_the_tests_need(dist: tuple[Path, Path]) -> None:
    with tarfile.open(dist[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = "pyproject.toml README.md LICENSE CHANGELOG.md CONTRIBUTING.md Makefile constraints.txt mkdocs.yml"
    assert set(needed.split()) <= names
    assert {"tests/docs/test_pages.py", "docs/start.md", "docs/tools/hooks.py", "examples/sizing.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", ".git/"))]


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_wheel_runs_the_demo_in_an_empty_environment(dist: tuple[Path, Path], tmp_path: Path) -> None:
    """With the torch of the constraints, from wherever this machine gets it."""
    pytest.importorskip("uv", reason="no environment is made here: pip install uv")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DCP_S3_", "AWS_"))
    }

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            list(map(str, command)), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    uv, programs = [sys.executable, "-m", "uv", "--quiet"], tmp_path / "empty" / "bin"
    run(*uv, "venv", "--python", sys.executable, "empty")
    constraints = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")
    ]
    torch = f"torch=={metadata.version('torch')}".partition("+")[0]
    (tmp_path / "constraints.txt").write_text("\n".join([*constraints, torch]))
    run(*uv, "pip", "install", "--python", programs / "python", "-c", "constraints.txt", f"{dist[0]}[demo]")
    assert "demo" in run(programs / "dcp-s3", "--help")
    assert run(programs / "dcp-s3", "demo").count("PASS") == 5
    assert str(tmp_path) in run(programs / "python", "-c", "import dcp_s3; print(dcp_s3.__file__)")
