"""``dcp-s3 export`` and ``import``: options, what they print, and by which status a script knows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dcp_s3
from tests.cli.looking import run
from tests.end_to_end.states import assert_same
from tests.offline.weights import read, save

pytestmark = pytest.mark.servers("memory")

STATE = {"model": {"a": torch.arange(4.0), "b": torch.arange(5.0)}, "optim": {"a": torch.zeros(2)}, "step": 7}


def test_export_and_import(root: str, tmp_path: Path) -> None:
    save(STATE, f"{root}/x")
    rename = ("--include", "model.*", "--rename", "^model[.]=", "--rename", "^b$=c")
    result = run("export", f"{root}/x", tmp_path, *rename, "--dtype", "bf16")
    assert f"{tmp_path}: 2 tensors, 1 file, " in result.stderr
    assert "left out" not in result.stderr
    expected = {"a": torch.arange(4).bfloat16(), "c": torch.arange(5).bfloat16()}
    assert_same(read(tmp_path / "model.safetensors"), expected)
    result = run("import", tmp_path, f"{root}/y", "--prefix", "model.", "--rename", "^c$=d")
    assert f"{root}/y: 2 tensors, 18 B" in result.stderr
    found = {"model.a": expected["a"], "model.d": expected["c"]}
    assert_same(dcp_s3.read_tensors(f"{root}/y"), found)
    assert "already" in run("import", tmp_path, f"{root}/y", status=1).stderr
    run("import", tmp_path / "model.safetensors", f"{root}/y", "--overwrite")


def test_what_is_left_out_is_counted(root: str, tmp_path: Path) -> None:
    save(STATE, f"{root}/x")
    result = run("export", f"{root}/x", tmp_path / "a", "--max-shard-size", "28B")
    assert "left out: 1 entry without a tensor" in result.stderr
    assert len(list((tmp_path / "a").glob("model-0000?-of-00002.safetensors"))) == 2
    (tmp_path / "b").mkdir()
    torch.save(dcp_s3.read_tensors(f"{root}/x"), tmp_path / "b" / "pytorch_model.bin")
    assert "3 tensors, 1 other entries" in run("import", tmp_path / "b", f"{root}/y").stderr
    assert dcp_s3.read_tensors(f"{root}/y", "step") == {"step": 7}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--rename", "x"), "--rename"),
        (("--dtype", "int8"), "--dtype"),
        (("--max-shard-size", "big"), "--max-shard-size"),
    ],
)
def test_wrong_usage_is_status_2(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    assert message in run("export", "s3://bucket/x", tmp_path, *options, status=2).stderr


def test_refusals_name_the_option(root: str, tmp_path: Path) -> None:
    save(STATE, f"{root}/x")
    (tmp_path / "config.json").write_text("{}")
    assert "--overwrite" in run("export", f"{root}/x", tmp_path, status=1).stderr
    run("export", f"{root}/x", tmp_path, "--overwrite")
    run("export", f"{root}/none", tmp_path / "none", status=3)
    assert "has no weights" in run("import", f"{root}/none", f"{root}/y", status=1).stderr
