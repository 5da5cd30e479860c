"""``dcp-s3 ls``, ``show``, ``verify``, ``prune``, ``pin`` and ``rm``, as people and cron use them."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console

import dcp_s3
from dcp_s3 import annotate
from dcp_s3.cli import app as shared
from tests.cli.looking import run, words
from tests.memory_s3 import Fault
from tests.retention.making import delete, get, keys, put, save, save_on_ranks, state

pytestmark = pytest.mark.servers("memory")


def loads(*arguments: object, status: int = 0) -> Any:
    """The JSON that a command prints, read by a strict parser."""
    return json.loads(run(*arguments, "--json", status=status).stdout, parse_constant=pytest.fail)


def test_ls_shows_a_line_for_each_committed_checkpoint(root: str, s3: Any) -> None:
    for nothing in (root, f"{root}/other"):
        result = run("ls", nothing, status=3)
        assert result.stdout == ""
        assert f"no checkpoints right under {nothing}" in result.stderr
        assert "dcp-s3 show" in result.stderr
    assert loads("ls", root, status=3) == []
    delete(s3, save(f"{root}/step-11"), ".metadata")
    assert "1 incomplete checkpoint not shown: see --all" in run("ls", root, status=3).stderr
    save(f"{root}/step-9", metrics={"loss": 0.25})
    save(f"{root}/step-10")
    put(s3, f"{root}/data", "part/1.bin")
    rows = words(run("ls", f"{root}/").stdout)
    assert [row[:5] for row in rows[1:]] == [
        ["step-9", "committed", "9", "1", "1"],
        ["step-10", "committed", "10", "1", "1"],
    ]
    assert rows[1][-1] == "loss=0.25"
    assert [row[:2] for row in words(run("ls", root, "--all").stdout)][-1] == ["step-11", "in_progress"]
    first, _ = loads("ls", root)
    assert (first["url"], first["metrics"]) == (f"{root}/step-9", {"loss": 0.25})
    assert [info["state"] for info in loads("ls", root, "--all")] == ["committed", "committed", "in_progress"]


def test_latest_prints_a_url_and_nothing_else(root: str, s3: Any) -> None:
    assert (run("ls", "--latest", root, status=3).stdout, loads("ls", "--latest", root, status=3)) == ("", None)
    save(f"{root}/step-1")
    save(f"{root}/step-10", metrics={"loss": math.nan})
    delete(s3, save(f"{root}/step-11"), ".metadata")
    result = run("ls", "--latest", root)
    assert (result.stdout, result.stderr) == (f"{root}/step-10\n", "")
    assert loads("ls", "--latest", root)["step"] == 10


def test_show_tells_what_was_saved(root: str, s3: Any) -> None:
    url = save(f"{root}/step-7", metrics={"loss": math.nan, "low": -math.inf})
    annotate(url, {"accuracy": 0.75})
    put(s3, url, "__0_9-abcdef.distcp", b"left over")
    details = loads("show", url)
    assert (details["info"]["step"], details["items"]) == (7, 3)
    assert details["info"]["metrics"] == {"loss": "NaN", "low": "-Infinity", "accuracy": 0.75}
    entries = {entry["fqn"]: (entry["dtype"], entry["shape"], entry["chunks"]) for entry in details["entries"]}
    assert entries == {"weight": ("float32", [3, 4], 1), "half": ("bfloat16", [5], 1), "step": (None, None, 1)}
    used = {stored["path"]: stored["size"] for stored in details["objects"] if stored["used"]}
    assert used == {p: size for p, size in keys(s3, url).items() if p.endswith(".distcp") and "_9-" not in p}
    assert "not used" in run("show", url).stdout
    delete(s3, url, next(iter(used)))
    assert "missing" in run("show", url).stdout
    delete(s3, url, ".metadata")
    assert "incomplete" in run("show", url).stdout
    details = loads("show", save_on_ranks(f"{root}/step-9", 2))
    assert {entry["fqn"]: entry["chunks"] for entry in details["entries"]} == dict.fromkeys(state(), 2)


def test_show_has_a_line_for_names_that_are_alike_and_chooses_entries(root: str) -> None:
    url = f"{root}/step-7"
    saved: dict[str, Any] = {f"model.layers.{number}.w": torch.ones(8, 8) for number in range(32)}
    saved |= {"model.norm": torch.ones(3, dtype=torch.bfloat16), "step": 7}
    dcp.save(saved, storage_writer=dcp_s3.S3StorageWriter(url), no_dist=True)
    rows = words(run("show", url).stdout)
    assert ["holds", "33 tensors with 2.05K parameters; 1 other entry"] in rows
    rows = rows[rows.index(["name", "entries", "parameters", "size", "dtype", "shape", "chunks"]) + 1 :]
    assert [row[0] for row in rows] == ["model.layers.*.w", "model.norm", "step"]
    assert (rows[0][1:3], rows[0][-3:]) == (["32", "2.05K"], ["float32", "8x8", "32"])
    everything = run("show", url, "--all").stdout
    assert all(each in everything for each in ("31.w", ".distcp"))
    filtered = run("show", url, "--filter", "*.norm", "--filter", "step").stdout
    assert [row[0] for row in words(filtered)[1:]] == ["model.norm", "step"]
    assert "no entry that matches 'modle.*'" in run("show", url, "--filter", "modle.*", status=1).stderr


def damage(s3: Any, url: str) -> str:
    """Flip a bit of a tensor; the path of the object."""
    path = next(path for path in keys(s3, url) if path.endswith(".distcp"))
    data = bytearray(get(s3, url, path))
    data[data.index(b"\x00\x00\xe0\x40")] ^= 1  # weight[1, 3] = 7.0
    put(s3, url, path, bytes(data))
    return path


def test_verify_says_good_in_one_line_and_names_damage(root: str, s3: Any) -> None:
    url = save(f"{root}/step-1")
    for mode, option in (("fast", ()), ("full", ("--full",))):
        (line,) = run("verify", url, *option).stdout.splitlines()
        assert line.startswith(f"{url}: good ({mode}: 1 object, 3 items, ")
        assert "without checksum" not in line
    other = save(f"{root}/step-2", settings={"checksum": "none"})
    assert "without checksum: 1 object, 3 items" in run("verify", other, "--full").stdout
    path = damage(s3, url)
    assert loads("verify", url)["ok"] is True
    first, problem = run("verify", url, "--full", status=4).stdout.splitlines()
    assert first.startswith(f"{url}: damaged (full: ")
    assert problem.startswith(f"  {path}: 'weight' has CRC-64/NVME ")
    report = loads("verify", url, "--full", status=4)
    assert (report["ok"], report["url"], report["mode"]) == (False, url, "full")
    assert [(found["path"], found["fqn"]) for found in report["problems"]] == [(path, "weight")]


def test_verify_of_a_root_looks_at_every_checkpoint(
    root: str, s3: Any, memory_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "no committed checkpoints" in run("verify", root, "--root", status=3).stderr
    assert loads("verify", root, "--root", status=3) == []
    for step in (9, 10, 12):
        save(f"{root}/step-{step}")
    delete(s3, save(f"{root}/step-11"), ".metadata")
    lines = run("verify", root, "--root", "--full").stdout.splitlines()
    assert [line.partition(": good (full: ")[0] for line in lines] == [f"{root}/step-{step}" for step in (9, 10, 12)]
    refused = {"GetObject": Fault.error(403, "AccessDenied")}
    monkeypatch.setattr(
        memory_server.handle, "fault", lambda r: refused.get(r.operation) if "-10/__" in r.key else None
    )
    assert run("verify", root, "--root", "--full", status=1)
    path = damage(s3, f"{root}/step-9")
    first, problem, second, last = run("verify", root, "--root", "--full", status=4).stdout.splitlines()
    assert first.startswith(f"{root}/step-9: damaged ")
    assert f"{path}: 'weight' has " in problem
    assert second.startswith(f"{root}/step-10: could not be verified: ")
    assert ": good " in last
    found = loads("verify", root, "--root", "--full", status=4)
    assert [report["ok"] for report in found] == [False, None, True]
    assert "AccessDenied" in found[1]["error"]


def test_the_progress_bar_takes_nothing_that_goes_into_a_pipe(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors on a terminal, output into a file: rich would send all to the terminal."""
    save(f"{root}/step-1")
    monkeypatch.setattr(Console, "is_terminal", property(lambda self: bool(self.stderr)))
    result = run("verify", root, "--root", "--full")
    assert f"{root}/step-1: good" in result.stdout
    assert "good" not in result.stderr


@pytest.fixture
def four(root: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run of four checkpoints."""
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "1")
    for step in (1, 2, 3, 4):
        save(f"{root}/step-{step}", metrics={"loss": 1.0 / step})
    return root


@pytest.fixture
def someone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "someone_is_there", lambda: True)


def steps(root: str) -> list[int | None]:
    return [info.step for info in dcp_s3.list_checkpoints(root) if info.committed]


def rows(output: str) -> dict[str, list[str]]:
    """The lines of a table by their first word."""
    return {line.split()[0]: line.split()[1:] for line in output.splitlines() if line.strip().startswith("step-")}


def test_a_dry_run_shows_everything_with_reasons_and_deletes_nothing(four: str) -> None:
    dcp_s3.pin(f"{four}/step-2", "the paper's [bold] baseline")
    result = run("prune", four, "latest:1", "best:1:loss:max", "--dry-run")
    found = {name: " ".join(row) for name, row in rows(result.stdout).items()}
    assert "best:1:loss:max, loss = 1" in found["step-1"]
    assert found["step-2"].endswith("pinned (the paper's [bold] baseline)")
    assert found["step-3"].startswith("delete ")
    assert found["step-3"].endswith("no policy keeps it")
    assert all(why in found["step-4"] for why in ("the newest committed checkpoint; ", "latest:1, number 1"))
    assert "to keep: 3 checkpoints; to delete: 1 checkpoint" in result.stderr
    assert steps(four) == [1, 2, 3, 4]


def test_without_a_terminal_yes_is_required(four: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (["prune", four, "latest:2"], ["rm", f"{four}/step-1"]):
        assert "no terminal" in run(*command, status=2).stderr
    assert steps(four) == [1, 2, 3, 4]
    result = run("prune", four, "latest:2", "--yes")
    assert [line.split()[1] for line in result.stdout.splitlines()] == [f"{four}/step-1", f"{four}/step-2"]
    assert "2 checkpoints deleted, 2 kept" in result.stderr
    assert "no policy" in run("prune", four, "--yes").stderr
    monkeypatch.setenv("DCP_S3_RETENTION", "latest:1")
    assert "no policy" not in run("prune", four, "--yes").stderr
    assert steps(four) == [4]


def test_on_a_terminal_there_is_a_question(four: str, someone: None) -> None:
    result = run("prune", four, "latest:2", input="n\n", status=1)
    assert rows(result.stdout)["step-1"][0] == "delete"
    assert "nothing was deleted" in result.stderr
    assert steps(four) == [1, 2, 3, 4]
    run("prune", four, "latest:2", input="y\n")
    assert steps(four) == [3, 4]
    run("prune", four, "latest:2", input="")  # nothing to do, so nothing to ask


def test_what_could_not_be_deleted_is_status_1(four: str, memory_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = Fault.error(403, "AccessDenied")
    with monkeypatch.context() as patch:
        patch.setattr(memory_server.handle, "fault", lambda request: denied if "Delete" in request.operation else None)
        result = run("prune", four, "latest:3", "--yes", status=1)
    assert f"failed: {four}/step-1: AccessDeniedError" in result.stderr
    assert "1 failure" in result.stderr
    assert steps(four) == [1, 2, 3, 4]


def test_pin_protects_until_unpin(four: str) -> None:
    assert "is pinned" in run("pin", f"{four}/step-1", "--reason", "mine").stderr
    assert rows(run("ls", four).stdout)["step-1"][:2] == ["committed", "(pinned)"]
    assert "it is pinned (mine)" in run("rm", f"{four}/step-1", "--yes", status=1).stderr
    run("pin", "--remove", f"{four}/step-1")
    assert "is not pinned" in run("pin", "--remove", f"{four}/step-1", status=3).stderr
    run("rm", f"{four}/step-1", "--yes")
    assert steps(four) == [2, 3, 4]


def test_rm_shows_what_it_would_delete_asks_and_deletes_it(four: str, s3: Any, someone: None) -> None:
    url = f"{four}/step-3"
    torn = f"{four}/step-2"
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
    dcp_s3.pin(f"{four}/step-1")
    run("rm", f"{four}/step-1", "--yes", "--force")
    assert steps(four) == [4]
