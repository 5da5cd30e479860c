"""``dcp-s3 prune`` and what goes with it, as people and cron use it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import boto3
import pytest

import dcp_s3
from dcp_s3.cli import app as shared
from tests.cli.looking import run
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault, MemoryS3
from tests.retention.making import delete, keys, put, save

ROOT = f"s3://{BUCKET}/run"


class Clock:
    """The server's: ahead of ours by so many seconds."""

    ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[FaultyServer]:
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "1")
    server = FaultyServer()
    server.s3 = MemoryS3(fault=lambda request: server.rule(request), clock=clock)
    with serve(monkeypatch, server):
        yield server


@pytest.fixture
def run_of_four(faulty: FaultyServer) -> str:
    for step in (1, 2, 3, 4):
        save(f"{ROOT}/step-{step}", metrics={"loss": 1.0 / step})
    return ROOT


@pytest.fixture
def s3(faulty: FaultyServer) -> Iterator[Any]:
    client = boto3.Session().client("s3", endpoint_url=faulty.s3.endpoint_url)
    yield client
    client.close()


@pytest.fixture
def someone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "someone_is_there", lambda: True)


def steps() -> list[int | None]:
    return [info.step for info in dcp_s3.list_checkpoints(ROOT) if info.committed]


def rows(output: str) -> dict[str, list[str]]:
    """The lines of a table by their first word."""
    return {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.strip().startswith("step-")}


# --- prune ---------------------------------------------------------------------------------------


def test_a_dry_run_shows_everything_with_reasons_and_deletes_nothing(run_of_four: str) -> None:
    dcp_s3.pin(f"{ROOT}/step-2")
    result = run("prune", ROOT, "latest:2", "best:1:loss:max", "--dry-run")
    found = rows(result.stdout)
    assert [row[0] for row in found.values()] == ["keep", "keep", "keep", "keep"]
    assert "best:1:loss:max, loss = 1" in " ".join(found["step-1"])
    assert found["step-2"][-1] == "pinned"
    assert "the newest committed checkpoint; " in " ".join(found["step-4"])
    assert "latest:2, number 1" in " ".join(found["step-4"])
    assert "to keep: 4 checkpoints; to delete: nothing" in result.stderr
    result = run("prune", ROOT, "latest:2", "--dry-run")
    assert rows(result.stdout)["step-1"][0] == "delete"
    assert " ".join(rows(result.stdout)["step-1"]).endswith("no policy keeps it")
    assert steps() == [1, 2, 3, 4]


def test_without_a_terminal_yes_is_required(run_of_four: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (["prune", ROOT, "latest:2"], ["rm", f"{ROOT}/step-1"]):
        message = run(*command, status=2).stderr
        assert "no terminal" in message
        assert "--dry-run" in message
    assert steps() == [1, 2, 3, 4]
    result = run("prune", ROOT, "latest:2", "--yes")
    assert [line.split()[1] for line in result.stdout.splitlines()] == [f"{ROOT}/step-1", f"{ROOT}/step-2"]
    assert "2 checkpoints deleted, 2 kept" in result.stderr
    assert "no policy keeps it" in result.stdout
    assert steps() == [3, 4]
    assert run("prune", ROOT, "latest:2", "--yes").stdout == ""
    assert "no policy" in run("prune", ROOT, "--yes").stderr
    monkeypatch.setenv("DCP_S3_RETENTION", "latest:1")
    assert "no policy" not in run("prune", ROOT, "--yes").stderr
    assert steps() == [4]


def test_on_a_terminal_there_is_a_question(run_of_four: str, someone: None) -> None:
    result = run("prune", ROOT, "latest:2", input="n\n", status=1)
    assert rows(result.stdout)["step-1"][0] == "delete"
    assert "nothing was deleted" in result.stderr
    assert steps() == [1, 2, 3, 4]
    run("prune", ROOT, "latest:2", input="y\n")
    assert steps() == [3, 4]
    run("prune", ROOT, "latest:2", input="")  # nothing to do, so nothing to ask


def test_leftovers_are_shown_and_collected(run_of_four: str, s3: Any, clock: Clock) -> None:
    delete(s3, f"{ROOT}/step-2", ".metadata")
    put(s3, f"{ROOT}/step-3", "__0_0-abcdef012345.distcp", b"left over")
    found = rows(run("prune", ROOT, "--dry-run").stdout)
    assert found["step-2"][0] == "keep"
    assert "step-3:" not in found  # its leftover is not old enough
    assert "under 1 h" in run("prune", ROOT, "--dry-run", "--grace", "1m", status=2).stderr
    clock.ahead = 120
    result = run("prune", ROOT, "--grace", "1m", "--force", "--yes")
    assert "step-2 " in result.stdout
    assert f"deleted 1 leftover object of {ROOT}/step-3" in result.stdout
    assert keys(s3, f"{ROOT}/step-2") == {}
    assert steps() == [1, 3, 4]


def test_the_status_says_what_happened(run_of_four: str, faulty: FaultyServer) -> None:
    assert "no checkpoints under" in run("prune", f"{ROOT}-other", "latest:1", "--yes", status=3).stderr
    for bad in (["latest"], ["latest:1", "--grace", "soon"], ["--nothing"]):
        run("prune", ROOT, *bad, "--yes", status=2)
    run("prune", "http://example.com", "latest:1", "--yes", status=2)
    faulty.rule = lambda request: Fault.error(403, "AccessDenied") if "Delete" in request.operation else None
    result = run("prune", ROOT, "latest:3", "--yes", status=1)
    assert f"failed: {ROOT}/step-1: AccessDeniedError" in result.stderr
    assert "1 failure" in result.stderr
    faulty.rule = lambda _: Fault.error(403, "AccessDenied")
    assert "AccessDenied" in run("prune", ROOT, "latest:3", "--yes", status=1).stderr
    faulty.rule = lambda _: None
    assert steps() == [1, 2, 3, 4]


# --- one checkpoint ------------------------------------------------------------------------------


def test_pin_protects_until_unpin(run_of_four: str) -> None:
    assert "is pinned" in run("pin", f"{ROOT}/step-1", "--reason", "the paper's [bold] baseline").stderr
    [listed] = [each for each in json.loads(run("ls", ROOT, "--json").stdout) if each["pinned"]]
    assert listed["pin_reason"] == "the paper's [bold] baseline"
    assert "pinned (the paper's [bold] baseline)" in run("prune", ROOT, "latest:1", "--dry-run").stdout
    assert rows(run("ls", ROOT).stdout)["step-1"][:2] == ["committed", "(pinned)"]
    run("prune", ROOT, "latest:1", "--yes")
    assert steps() == [1, 4]
    assert "pinned" in run("rm", f"{ROOT}/step-1", "--yes", status=1).stderr
    run("pin", "--remove", f"{ROOT}/step-1")
    assert "is not pinned" in run("pin", "--remove", f"{ROOT}/step-1", status=3).stderr
    run("prune", ROOT, "latest:1", "--yes")
    assert steps() == [4]


def test_rm_shows_what_it_would_delete_asks_and_deletes_it(run_of_four: str, s3: Any, someone: None) -> None:
    url = f"{ROOT}/step-3"
    torn = f"{ROOT}/step-2"
    delete(s3, torn, ".metadata")
    for each, options in ((url, ()), (torn, ("--force",))):
        before = keys(s3, each)
        dry = run("rm", each, "--dry-run", *options)
        assert each in dry.stdout
        assert keys(s3, each) == before
        assert "nothing was deleted" in run("rm", each, *options, input="n\n", status=1).stderr
        deleted = run("rm", each, *options, input="y\n").stderr
        what = re.search(r"would be deleted: (\d+ objects, .*)", dry.stderr)
        assert what is not None
        assert f"is deleted: {what[1]}" in deleted
    dcp_s3.pin(f"{ROOT}/step-1", "mine")
    assert "it is pinned (mine)" in run("rm", f"{ROOT}/step-1", "--dry-run", status=1).stderr
    run("rm", f"{ROOT}/step-1", "--yes", "--force")
    assert steps() == [4]
