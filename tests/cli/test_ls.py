"""``dcp-s3 ls`` of anything, ``latest`` for scripts, ``cp``."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.cli import tables
from tests.cli.looking import run
from tests.faulty import BUCKET, serve
from tests.retention.making import delete, keys, put, save

pytestmark = pytest.mark.servers("memory")


# --- ls --------------------------------------------------------------------------------------------------


def test_ls_lists_what_lies_right_under_the_root(root: str, s3: Any) -> None:
    bucket = root.rpartition("/")[0]
    put(s3, f"{bucket}/data", "part/1.bin")
    url = save(f"{bucket}/step-7", metrics={"loss": 0.25})
    save(f"{root}/step-1")
    assert [line.split("\t")[0] for line in run("ls", bucket).stdout.splitlines()] == ["name", "step-7"]
    assert [info["url"] for info in json.loads(run("ls", f"{bucket}/", "--json").stdout)] == [url]
    delete(s3, url, ".metadata")
    assert "in_progress" in run("ls", bucket, "--all").stdout
    assert "see --all" in run("ls", bucket, status=3).stderr


def test_ls_of_one_checkpoint_or_of_nothing_says_where_to_look_on(root: str) -> None:
    for nothing in (save(f"{root}/step-7"), f"{root}/other"):
        result = run("ls", nothing, status=3)
        assert result.stdout == ""
        assert f"no checkpoints right under {nothing}" in result.stderr
        assert "dcp-s3 show" in result.stderr


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
        from tests.spill.making import refuse_all

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
