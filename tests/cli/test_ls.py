"""``dcp-s3 ls`` of anything, ``latest`` for scripts, ``cp``."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

import dcp_s3
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.cli import tables
from dcp_s3.cli.main import app
from dcp_s3.retention import browse as browsing
from tests.faulty import BUCKET, serve
from tests.retention.making import delete, keys, put, save

pytestmark = pytest.mark.servers("memory")


def run(*arguments: object, status: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


# --- ls --------------------------------------------------------------------------------------------------


def test_ls_of_one_checkpoint_is_its_line_and_where_to_look_on(root: str, s3: Any) -> None:
    url = save(f"{root}/step-7", metrics={"loss": 0.25})
    result = run("ls", url)
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert [line[:6] for line in lines] == [line.split("\t")[:6] for line in run("ls", root).stdout.splitlines()]
    assert lines[1][0] == "step-7"
    assert f"dcp-s3 show {url}" in result.stderr
    assert [info["url"] for info in json.loads(run("ls", url, "--json").stdout)] == [url]
    delete(s3, url, ".metadata")
    assert "in_progress" in run("ls", root, "--all").stdout
    assert "incomplete" in run("ls", url).stdout


def test_ls_of_a_bucket_finds_the_roots(root: str, s3: Any) -> None:
    bucket = root.rpartition("/")[0]
    for url in (f"{root}/step-1", f"{root}/step-2", f"{bucket}/team/b/step-1", f"{bucket}/team/a/c/step-1"):
        save(url)
    put(s3, f"{bucket}/data", "part/1.bin")
    expected = {root: 2, f"{bucket}/team/a/c": 1, f"{bucket}/team/b": 1}
    result = run("ls", bucket)
    lines = [line.split("\t") for line in result.stdout.splitlines()]
    assert lines == [["root", "directories"], *([url, str(count)] for url, count in sorted(expected.items()))]
    assert "further down" in result.stderr
    found = json.loads(run("ls", f"{bucket}/", "--json").stdout)
    assert {each["root"]: each["directories"] for each in found} == expected
    assert {line.split("\t")[0] for line in run("ls", f"{bucket}/team").stdout.splitlines()[1:]} == {
        f"{bucket}/team/a/c",
        f"{bucket}/team/b",
    }
    assert "no checkpoints" in run("ls", f"{bucket}/data", status=3).stderr


def test_the_search_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(monkeypatch) as server:
        for number in range(30):
            put_key(server, f"deep/{number}/a/b/c/d/e/f")
        monkeypatch.setattr(browsing, "MOST_LISTINGS", 20)
        server.s3.reset_counters()
        result = run("ls", f"s3://{BUCKET}", status=3)
        assert "as far as was looked" in result.stderr
        assert server.s3.counters.requests["ListObjectsV2"] <= 20 + 10


def test_a_bucket_with_very_many_directories_is_not_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serve(monkeypatch) as server:
        for number in range(1100):
            put_key(server, f"{number:04}/part.bin")
        server.s3.reset_counters()
        run("ls", f"s3://{BUCKET}", status=3)
        assert server.s3.counters.requests["ListObjectsV2"] <= browsing.MOST_LISTINGS + 1
        assert set(server.s3.counters.requests) == {"ListObjectsV2"}


@pytest.mark.parametrize("beside", [0, 4])
def test_checkpoints_directly_in_a_bucket_are_listed(root: str, s3: Any, beside: int) -> None:
    bucket = root.rpartition("/")[0]
    save(f"{bucket}/m/step-1")
    save(f"{bucket}/step-1")
    for number in range(beside):
        put(s3, f"{bucket}/{'amxz'[number]}", "part.bin")
    assert [line.split("\t")[0] for line in run("ls", bucket).stdout.splitlines()] == ["name", "step-1"]


def put_key(server: Any, key: str) -> None:
    from dcp_s3.s3.store import S3Store

    S3Store(BUCKET, dcp_s3.Settings()).put(key, b"x")


# --- latest ----------------------------------------------------------------------------------------------


def test_latest_prints_a_url_and_nothing_else(root: str, s3: Any) -> None:
    assert run("latest", root, status=3).stdout == ""
    save(f"{root}/step-1")
    save(f"{root}/step-10", metrics={"loss": float("nan")})
    delete(s3, save(f"{root}/step-11"), ".metadata")
    result = run("latest", root)
    assert (result.stdout, result.stderr) == (f"{root}/step-10\n", "")
    assert json.loads(run("latest", root, "--json").stdout, parse_constant=pytest.fail)["step"] == 10


def test_latest_counts_what_waits_on_this_host_when_told_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with serve(monkeypatch) as server:
        from tests.spill.test_outage import refuse_all

        save(f"s3://{BUCKET}/run/step-1")
        server.rule = refuse_all
        monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "1")
        monkeypatch.setenv("DCP_S3_SPILL_AFTER", "1s")
        settings = {"spill_dir": str(tmp_path), "durability": "local"}
        save(f"s3://{BUCKET}/run/step-2", settings=settings)
        from dcp_s3.spill.background import stop_draining

        stop_draining()
        server.rule = lambda _: None
        monkeypatch.setenv("DCP_S3_SPILL_DIR", str(tmp_path))
        assert run("latest", f"s3://{BUCKET}/run").stdout.endswith("/step-1\n")
        assert run("latest", f"s3://{BUCKET}/run", "--include-uncommitted").stdout.endswith("/step-2\n")


# --- cp --------------------------------------------------------------------------------------------------


def test_cp_copies_and_goes_on(root: str, s3: Any, tmp_path: Path) -> None:
    url = save(f"{root}/step-1", metrics={"loss": float("nan")})
    first = json.loads(run("cp", url, f"{root}-copy/step-1", "--json").stdout)
    assert (first["files"], first["moved"]) == (len(keys(s3, url)), first["size"] - keys(s3, url)[".metadata"])
    assert keys(s3, f"{root}-copy/step-1") == keys(s3, url)
    assert "(0 B copied)" in run("cp", url, f"{root}-copy/step-1").stderr
    other = save(f"{root}/step-2")
    assert "--overwrite" in run("cp", other, f"{root}-copy/step-1", status=1).stderr
    run("cp", other, f"{root}-copy/step-1", "--overwrite")
    assert keys(s3, f"{root}-copy/step-1") == keys(s3, other)
    run("cp", url, tmp_path / "d")
    run("cp", tmp_path / "d", f"{root}/step-3")
    assert keys(s3, f"{root}/step-3") == keys(s3, url)
    assert "no committed checkpoint" in run("cp", f"{root}/none", f"{root}/copy", status=3).stderr
    assert "the same" in run("cp", url, url, status=2).stderr
    for wrong in ("gs://bucket/run", "s3://", "s3://bucket/a/../b"):
        assert wrong in run("cp", wrong, f"{root}/copy", status=2).stderr
        assert wrong in run("cp", url, wrong, status=2).stderr


def test_80_columns_break_no_metric() -> None:
    metrics = {"train/loss": 1.234567, "val_loss": 2.34567, "tokens_per_second": 123456.7}
    url = f"s3://{BUCKET}/run/step-00001000"
    info = CheckpointInfo(
        url=url, name="step-00001000", step=1000, state="committed", world_size=64, objects=128, size=10**11,
        created_at=0.0, metrics=metrics,
    )  # fmt: skip
    console = Console(width=80, file=io.StringIO())
    console.print(tables.checkpoints([info], now=90000.0, width=80))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("step-00001000", "committed", "93.1 GiB", "train/loss=1.23457", "tokens_per_second=123457"):
        assert word in shown
