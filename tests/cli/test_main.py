from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import dcp_s3
from dcp_s3 import annotate
from dcp_s3.cli.main import app
from dcp_s3.cli.tables import format_age
from dcp_s3.format.layout import deletion_object, lease_object
from dcp_s3.offline.copy_source import CopySource
from dcp_s3.s3.store import S3Store
from dcp_s3.setting_values import MIN_PART_SIZE
from dcp_s3.stores.directory import HIDDEN
from tests.retention.making import (
    delete,
    get,
    keys,
    put,
    save,
    save_foreign,
    save_locally,
    save_on_ranks,
    state,
    zeros,
)
from tests.spread import spread_out


def run(*arguments: object, status: int = 0) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == status, result.output
    return result


def _same(loaded: dict[str, Any]) -> bool:
    expected = state()
    return all(
        torch.equal(value, expected[name]) if isinstance(value, torch.Tensor) else value == expected[name]
        for name, value in loaded.items()
    )


def _stock_load(directory: Path) -> dict[str, Any]:
    loaded = zeros()
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return loaded


def _load(url: str) -> dict[str, Any]:
    loaded = zeros()
    dcp.load(loaded, storage_reader=dcp_s3.S3StorageReader(url), no_dist=True)
    return loaded


# --- ls ------------------------------------------------------------------------------------------


def test_ls_shows_a_line_for_each_committed_checkpoint(root: str, s3: Any) -> None:
    save(f"{root}/step-9", metrics={"loss": 0.25})
    save(f"{root}/step-10")
    delete(s3, save(f"{root}/step-11"), ".metadata")
    result = run("ls", root)
    lines = [line.split() for line in result.stdout.splitlines() if "step-" in line]
    assert [line[:5] for line in lines] == [
        ["step-9", "committed", "9", "1", "1"],
        ["step-10", "committed", "10", "1", "1"],
    ]
    assert lines[0][-1] == "loss=0.25"
    assert "1 incomplete checkpoint not shown" in result.stderr
    everything = run("ls", root, "--all").stdout.splitlines()
    assert [line.split()[:2] for line in everything if "step-" in line][-1] == ["step-11", "in_progress"]


def test_ls_prints_json(root: str, s3: Any) -> None:
    save(f"{root}/step-9", metrics={"loss": 0.25})
    delete(s3, save(f"{root}/step-11"), ".metadata")
    [only] = json.loads(run("ls", root, "--json").stdout)
    assert only["url"] == f"{root}/step-9"
    assert only["metrics"] == {"loss": 0.25}
    assert [info["state"] for info in json.loads(run("ls", root, "--json", "--all").stdout)] == [
        "committed",
        "in_progress",
    ]


def test_ls_says_by_its_status_that_nothing_is_there(root: str, s3: Any) -> None:
    assert "no checkpoints" in run("ls", root, status=3).stderr
    assert json.loads(run("ls", root, "--json", status=3).stdout) == []
    delete(s3, save(f"{root}/step-11"), ".metadata")
    run("ls", root, status=3)
    run("ls", root, "--all", status=0)


@pytest.mark.servers("memory")
def test_output_into_a_pipe_is_not_cut_off(root: str) -> None:
    name = "long-" * 60 + "[bold]:smile:1"
    save(f"{root}/{name}", metrics={f"metric-number-{i}": i for i in range(20)})
    line = next(line for line in run("ls", root).stdout.splitlines() if "committed" in line)
    assert line.startswith(f"{name}\t")
    assert {f"metric-number-{i}={i}" for i in range(20)} <= set(line.split())
    assert f"{root}/{name}" in run("show", f"{root}/{name}").stdout


# --- show ----------------------------------------------------------------------------------------


def test_show_tells_what_was_saved(root: str, s3: Any) -> None:
    url = save(f"{root}/step-7", metrics={"loss": 0.25})
    annotate(url, {"accuracy": 0.75})
    put(s3, url, "__0_9-abcdef.distcp", b"left over")
    details = json.loads(run("show", url, "--json").stdout)
    assert details["info"]["step"] == 7
    assert details["info"]["metrics"] == {"loss": 0.25, "accuracy": 0.75}
    assert details["items"] == 3
    entries = {entry["fqn"]: entry for entry in details["entries"]}
    assert (entries["weight"]["dtype"], entries["weight"]["shape"]) == ("float32", [3, 4])
    assert (entries["half"]["dtype"], entries["half"]["shape"]) == ("bfloat16", [5])
    assert (entries["step"]["kind"], entries["step"]["dtype"]) == ("bytes", None)
    assert all(entry["chunks"] == 1 and entry["size"] > 0 for entry in entries.values())
    used = {stored["path"]: stored for stored in details["objects"] if stored["used"]}
    assert {path: stored["size"] for path, stored in used.items()} == {
        path: size for path, size in keys(s3, url).items() if path.endswith(".distcp") and "_9-" not in path
    }
    assert all(len(stored["crc64nvme"]) == 16 for stored in used.values())
    text = run("show", url).stdout
    assert "3x4" in text
    assert "bfloat16" in text
    assert "not used" in text


def test_show_works_on_foreign_incomplete_and_damaged_ones(root: str, s3: Any, tmp_path: Path) -> None:
    url = save_foreign(s3, f"{root}/step-7", tmp_path)
    details = json.loads(run("show", url, "--json").stdout)
    assert details["info"]["foreign"]
    assert {entry["fqn"] for entry in details["entries"]} == set(state())
    assert "something other than dcp_s3" in run("show", url).stdout
    delete(s3, url, next(path for path in keys(s3, url) if path.endswith(".distcp")))
    assert "missing" in run("show", url).stdout
    torn = save(f"{root}/step-8")
    delete(s3, torn, ".metadata")
    assert "incomplete" in run("show", torn).stdout


def test_show_adds_up_the_ranks_of_a_save_without_collectives(root: str) -> None:
    url = save_on_ranks(f"{root}/step-7", 2)
    details = json.loads(run("show", url, "--json").stdout)
    assert details["info"]["world_size"] == 2
    assert all(stored["used"] for stored in details["objects"])
    assert {entry["fqn"]: entry["chunks"] for entry in details["entries"]} == dict.fromkeys(state(), 2)


# --- download and upload -------------------------------------------------------------------------


def test_torch_reads_what_was_downloaded_and_we_what_was_uploaded_again(root: str, s3: Any, tmp_path: Path) -> None:
    url = spread_out(s3, save(f"{root}/step 7+%é", metrics={"loss": 0.25}), 1)
    put(s3, url, "tokenizer/vocab.json", b"{}")
    put(s3, url, "__0_9-abcdef.distcp", b"left over")
    others = [".dcp_s3/pin", lease_object("ab", 3600), deletion_object("ab"), "500/.metadata", "500/__0_0.distcp"]
    for path in others:
        put(s3, url, path)
    run("download", url, tmp_path / "a" / "b")
    assert _same(_stock_load(tmp_path / "a" / "b"))
    run("upload", tmp_path / "a" / "b", f"{root}/copy")
    assert _same(_load(f"{root}/copy"))
    expected = {path: size for path, size in keys(s3, url).items() if "_9-" not in path and path not in others}
    assert keys(s3, f"{root}/copy") == expected
    copied = {info["name"]: info for info in json.loads(run("ls", root, "--json").stdout)}["copy"]
    assert (copied["foreign"], copied["metrics"], copied["world_size"]) == (False, {"loss": 0.25}, 1)


def test_foreign_checkpoints_go_both_ways(root: str, tmp_path: Path) -> None:
    directory = save_locally(tmp_path / "torch")
    run("upload", directory, f"{root}/step-7")
    assert _same(_load(f"{root}/step-7"))
    run("download", f"{root}/step-7", tmp_path / "back")
    assert _same(_stock_load(tmp_path / "back"))
    assert sorted(p.name for p in (tmp_path / "back").iterdir()) == sorted(p.name for p in directory.iterdir())


def test_large_files_move_in_parts(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_PART_SIZE", str(MIN_PART_SIZE))
    tensor = torch.randint(0, 255, (2 * MIN_PART_SIZE + 1000,), dtype=torch.uint8)
    dcp.save({"t": tensor}, storage_writer=dcp_s3.S3StorageWriter(f"{root}/1"), no_dist=True)
    run("download", f"{root}/1", tmp_path / "d")
    run("upload", tmp_path / "d", f"{root}/2")
    loaded = {"t": torch.zeros_like(tensor)}
    dcp.load(loaded, storage_reader=dcp_s3.S3StorageReader(f"{root}/2"), no_dist=True)
    assert torch.equal(loaded["t"], tensor)


def test_ranks_without_collectives_are_copied_together(root: str, s3: Any, tmp_path: Path) -> None:
    url = save_on_ranks(f"{root}/step-7", 2)
    run("download", url, tmp_path / "d")
    run("upload", tmp_path / "d", f"{root}/copy-8")
    newest = dcp_s3.latest(root)
    assert newest is not None
    assert (newest.world_size, newest.size) == (2, dcp_s3.list_checkpoints(root)[0].size)
    assert keys(s3, f"{root}/copy-8") == keys(s3, url)
    delete(s3, url, "__1.metadata")
    assert "1 of 2 ranks" in run("download", url, tmp_path / "e", status=3).stderr


def test_download_wants_an_empty_directory(root: str, tmp_path: Path) -> None:
    url = save(f"{root}/1")
    (tmp_path / "notes").write_text("mine")
    stale = save_locally(tmp_path / "old")
    (stale / "__0_0.distcp").unlink()
    assert "not empty" in run("download", url, tmp_path, status=1).stderr
    assert not (tmp_path / ".metadata").exists()
    run("download", url, stale, "--overwrite")
    assert _same(_stock_load(stale))
    assert "not empty" in run("download", url, stale, status=1).stderr


@pytest.mark.servers("memory", "rgw")
def test_a_download_that_was_cut_off_is_no_checkpoint_and_goes_on(root: str, s3: Any, tmp_path: Path) -> None:
    url = save(f"{root}/1", separate=["weight", "half"])
    first, second, *_ = sorted(path for path in keys(s3, url) if path.endswith(".distcp"))
    data = get(s3, url, second)
    put(s3, url, second, bytes(len(data)))  # the CRC in the manifest finds it
    assert "is damaged" in run("download", url, tmp_path, status=4).stderr
    assert not (tmp_path / ".metadata").exists()
    assert not (tmp_path / second).exists()
    before = (tmp_path / first).stat().st_mtime_ns
    (tmp_path / f"{HIDDEN}1a2b").write_text("of a download that was killed")
    put(s3, url, second, data)
    result = run("download", url, tmp_path)
    assert (tmp_path / first).stat().st_mtime_ns == before
    assert f"({len(data) / 1024:.1f} KiB moved)" in result.stderr
    assert _same(_stock_load(tmp_path))
    assert {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()} == keys(s3, url).keys()


def test_upload_replaces_a_checkpoint_only_when_told_to(root: str, s3: Any, tmp_path: Path) -> None:
    url = save(f"{root}/1")
    before = keys(s3, url)
    directory = save_locally(tmp_path)
    assert "already" in run("upload", directory, url, status=1).stderr
    assert keys(s3, url) == before
    run("upload", directory, url, "--overwrite")
    assert keys(s3, url).keys() == {p.name for p in directory.iterdir()}
    run("upload", directory, url, "--overwrite")  # objects of the same names
    assert _same(_load(url))


def test_what_is_incomplete_is_not_copied(root: str, s3: Any, tmp_path: Path) -> None:
    url = save(f"{root}/1")
    data = next(path for path in keys(s3, url) if path.endswith(".distcp"))
    delete(s3, url, data)
    assert data in run("download", url, tmp_path / "a", status=4).stderr
    delete(s3, url, ".metadata")
    assert "no committed checkpoint" in run("download", url, tmp_path / "a", status=3).stderr
    assert not (tmp_path / "a").exists()
    directory = save_locally(tmp_path / "b")
    file = directory / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-1])
    assert "__0_0.distcp" in run("upload", directory, f"{root}/2", status=4).stderr
    assert "no committed checkpoint" in run("upload", tmp_path / "nowhere", f"{root}/2", status=3).stderr
    assert keys(s3, f"{root}/2") == {}


@pytest.mark.servers("memory", "rgw")
def test_an_upload_does_not_replace_what_another_committed_meanwhile(
    root: str, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{root}/1"
    monkeypatch.setattr(CopySource, "check_unchanged", lambda _: put(s3, url, ".metadata", b"theirs"))
    assert "already" in run("upload", save_locally(tmp_path), url, status=1).stderr
    assert get(s3, url, ".metadata") == b"theirs"


@pytest.mark.servers("memory")
def test_a_replacement_that_is_cut_off_leaves_the_old_checkpoint_or_none(
    root: str, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, other_names = save_locally(tmp_path / "1"), save(f"{root}/1")
    run("upload", save_locally(tmp_path / "2"), f"{root}/2")
    put(s3, f"{root}/2", "__0_0.distcp", b"of another save")

    def cut_off(*_: Any, **__: Any) -> None:
        raise dcp_s3.errors.TransferError("cut off")

    monkeypatch.setattr(S3Store, "put_stream", cut_off)
    before = keys(s3, other_names)
    run("upload", directory, other_names, "--overwrite", status=1)
    assert keys(s3, other_names) == before
    run("upload", directory, f"{root}/2", "--overwrite", status=1)  # its objects were about to be replaced
    assert ".metadata" not in keys(s3, f"{root}/2")


@pytest.mark.servers("memory")
def test_keys_that_are_no_file_names_stay_where_they_are(root: str, s3: Any, tmp_path: Path) -> None:
    url = save(f"{root}/1")
    expected = keys(s3, url).keys()
    for path in ("folder/", "../outside", "./.metadata", "a//b", "/absolute"):
        put(s3, url, path, b"bad")
    run("download", url, tmp_path / "in" / "d")
    assert {p.relative_to(tmp_path / "in" / "d").as_posix() for p in tmp_path.rglob("*") if p.is_file()} == expected
    assert _same(_stock_load(tmp_path / "in" / "d"))


# --- the rest ------------------------------------------------------------------------------------


def test_config_says_where_settings_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_PART_SIZE", "16MiB")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    rows = {row["name"]: row for row in json.loads(run("config", "--json").stdout)}
    assert rows["part_size"] == {"name": "part_size", "value": 16 * 2**20, "source": "DCP_S3_PART_SIZE"}
    assert rows["concurrency"]["source"] == "default"
    assert rows.keys() == dcp_s3.Settings.model_fields.keys()
    text = run("config").stdout
    line = next(line for line in text.splitlines() if "part_size" in line)
    assert line.split() == ["part_size", "16777216", "DCP_S3_PART_SIZE"]
    assert "hunter2" not in text


@pytest.mark.servers("memory")
def test_errors_are_one_message_and_status_1(bucket: str) -> None:
    result = run("ls", f"s3://{bucket}-not/run", status=1)
    assert result.stdout == ""
    assert result.stderr.startswith("dcp-s3: ")
    assert "Remedy" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1
    run("show", f"s3://{bucket}/nothing", status=3)


def test_a_bad_setting_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_PART_SIZE", "much")
    assert "DCP_S3_PART_SIZE" in run("ls", "s3://bucket/run", status=2).stderr


@pytest.mark.parametrize("arguments", [["ls"], ["lss"], ["ls", "s3://b/r", "--jason"], ["upload", "only-one"]])
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    run(*arguments, status=2)


def test_version() -> None:
    assert run("--version").stdout == f"dcp-s3 {dcp_s3.__version__}\n"


@pytest.mark.servers("memory")
def test_runs_as_a_program(root: str) -> None:
    save(f"{root}/step-1")
    done = subprocess.run(
        [sys.executable, "-m", "dcp_s3.cli.main", "ls", root], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "step-1" in done.stdout


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (59.9, "59s"), (60, "1m"), (3599, "59m"), (3660, "1h 1m"), (90000, "1d 1h"), (86400 * 400, "400d 0h")],
)
def test_age(seconds: float, text: str) -> None:
    assert format_age(seconds) == text
