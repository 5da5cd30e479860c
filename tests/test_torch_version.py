"""torch is checked before it is imported, and what is wrong with it is said with the remedy."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import dcp_s3
from dcp_s3 import versions
from dcp_s3.versions import TESTED, TORCH, release, require_torch

_ROOT = Path(__file__).resolve().parents[1]


def _python(code: str, *before: Path) -> subprocess.CompletedProcess[str]:
    paths = [*map(str, before), str(_ROOT)]
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def _pretend(folder: Path, version: str) -> None:
    info = folder / f"torch-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")


def test_an_old_torch_is_refused_with_what_to_install(tmp_path: Path) -> None:
    _pretend(tmp_path, "2.5.1")
    done = _python("from dcp_s3 import S3StorageWriter", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        f"ImportError: dcp_s3 needs torch>={TORCH}, and torch 2.5.1 is installed. Remedy: pip install --upgrade"
    )


@pytest.mark.parametrize("version", ["2.13.0", "2.13.0+cpu", "2.13.0a0+git1234", "2.14.1", "3.0"])
def test_a_torch_that_is_recent_enough_is_taken(tmp_path: Path, version: str) -> None:
    assert release(version) >= release(TORCH)


def test_a_missing_torch_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    require_torch.cache_clear()
    with pytest.raises(ImportError, match=r"torch is not installed\. Remedy: pip install 'torch>=") as caught:
        dcp_s3.__getattr__("S3StorageWriter")
    assert caught.value.name == "torch"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    require_torch()  # a torch that is there without metadata
    require_torch.cache_clear()


def test_importing_dcp_s3_imports_neither_torch_nor_what_the_check_needs() -> None:
    done = _python(
        "import sys, dcp_s3; assert not {'torch', 'importlib.metadata'} & set(sys.modules), sys.modules.keys()"
    )
    assert done.returncode == 0, done.stderr


def test_pyproject_and_readme_say_the_same() -> None:
    (declared,) = re.findall(r'^    "torch>=([\d.]+)"', (_ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared == versions.TORCH
    readme = (_ROOT / "README.md").read_text()
    assert f"torch >= {TORCH}" in readme
    rows = re.findall(r"^\| ((?:2\.\d+(?:, )?)+) \|", readme, re.MULTILINE)
    assert {version for row in rows for version in row.split(", ")} == set(TESTED)


def test_ci_runs_the_lowest_and_the_newest_beside_the_pinned_one() -> None:
    (run,) = re.findall(r"^make test-torch .*TORCH='([\d. ]+)'", (_ROOT / ".ci/run").read_text(), re.MULTILINE)
    assert [".".join(version.split(".")[:2]) for version in run.split()] == [TESTED[-1], TESTED[0]]
    (pinned,) = re.findall(r"^torch==(\d+\.\d+)", (_ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned in TESTED
