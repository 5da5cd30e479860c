"""The public names: that they are there and what importing them costs; torch, checked before; reprs of one line."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import pickle
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import dcp_s3
from dcp_s3 import CheckpointInfo
from dcp_s3.process import TESTED, TORCH, release, require_torch
from dcp_s3.units import one_line

_ROOT = Path(__file__).resolve().parents[1]
_NAMES = [name for name in dcp_s3.__all__ if name != "__version__"]


def test_every_public_name_is_there_and_says_what_it_is_and_others_are_attribute_errors() -> None:
    for name in _NAMES:
        found = getattr(dcp_s3, name)
        assert (found.__name__ if inspect.ismodule(found) else found.__module__).startswith("dcp_s3."), name
        assert found.__doc__, name
        if importlib.util.find_spec(f"dcp_s3.{name}") is not None:  # importing it would set the attribute
            assert inspect.ismodule(found), f"a module takes the place of {name}"
    namespace: dict[str, Any] = {}
    exec("from dcp_s3 import *", namespace)
    assert set(dcp_s3.__all__) <= set(namespace)
    assert dir(dcp_s3) == sorted(dcp_s3.__all__)
    with pytest.raises(AttributeError, match="'dcp_s3' has no attribute 'S3Storagewriter'") as caught:
        dcp_s3.S3Storagewriter  # type: ignore[attr-defined] # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("S3Storagewriter", dcp_s3)  # for: did you mean ...?


def test_names_are_the_same_to_type_checkers_and_at_run_time() -> None:
    tree = ast.parse((_ROOT / "dcp_s3" / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    # ``as`` makes a name public to type checkers.
    checked = {name.asname: node.module for node in imports for name in node.names if name.asname == name.name}
    checked = {name: f"dcp_s3.{name}" if module == "dcp_s3" else module for name, module in checked.items()}
    assert checked == dcp_s3._MODULES


def test_values_are_pickled() -> None:
    for value in (
        dcp_s3.KeepLatest(3) | dcp_s3.KeepDaily(7),
        dcp_s3.SaveEvery(steps=5) | dcp_s3.SaveOnPreemption(),
        dcp_s3.Settings(part_size="8MiB"),
        dcp_s3.CheckpointInfo("s3://bucket/x", "x", "committed", 1, 1.0, 1, 1, 1, extra={"a": 1}),
        dcp_s3.Fused(0, (1, 2)),
        dcp_s3.CheckpointManager,
        dcp_s3.prune,
    ):
        assert pickle.loads(pickle.dumps(value)) == value


def _python(code: str, *before: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*map(str, before), str(_ROOT)])
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=200, check=False
    )


def test_an_old_torch_is_refused_with_what_to_install(tmp_path: Path) -> None:
    assert release("2.13.0a0+git1234") == (2, 13) > release(TORCH)
    info = tmp_path / "torch-2.5.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.5.1\n")
    done = _python("from dcp_s3 import S3StorageWriter", tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        f"ImportError: dcp_s3 needs torch>={TORCH}, and torch 2.5.1 is installed. Remedy: pip install --upgrade"
    )


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


def test_torch_and_what_its_check_needs_are_imported_only_with_what_needs_torch() -> None:
    done = _python(
        "import sys, dcp_s3; assert not {'torch', 'importlib.metadata'} & set(sys.modules), sys.modules.keys(); "
        "dcp_s3.Policy; assert 'torch' not in sys.modules; dcp_s3.S3StorageWriter"
    )
    assert done.returncode == 0, done.stderr


def test_pyproject_and_readme_say_the_same() -> None:
    (declared,) = re.findall(r'^    "torch>=([\d.]+)"', (_ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared == TORCH
    readme = (_ROOT / "README.md").read_text()
    assert f"torch >= {TORCH}" in readme
    rows = re.findall(r"^\| ((?:2\.\d+(?:, )?)+) \|", readme, re.MULTILINE)
    assert {version for row in rows for version in row.split(", ")} == set(TESTED)


def test_torch_is_imported_by_one_thread_at_a_time() -> None:
    program = """
import threading
from dcp_s3.checkpoint.deletion import end_joint_save
from dcp_s3.checkpoint.commit_state import check_metadata
from dcp_s3.errors import CorruptCheckpointError
from dcp_s3.url import parse_url
from tests.memory_store import MemoryStore

store, url = MemoryStore(), parse_url("s3://bucket/step-1")
store.put(url.key(".metadata"), b"no metadata")

def check():
    try:
        check_metadata(store.get(url.key(".metadata")), url)
    except CorruptCheckpointError:
        done.append("checked")

done = []
end = lambda: done.append(str(end_joint_save(store, url)))
threads = [threading.Thread(target=each) for each in (check, end, check)]
for each in threads:
    each.start()
for each in threads:
    each.join()
print(*done)
"""
    done = _python(program)
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["None", "checked", "checked"]), done.stderr


def test_a_repr_stays_short_whatever_it_holds() -> None:
    assert repr(dcp_s3.Settings(part_size="64MiB")) == "Settings(part_size=67108864)"
    assert repr(dcp_s3.CopyResult(5, 2048, 1024)) == "CopyResult(files=5, size=2048, moved=1024)"
    assert repr(dcp_s3.S3StorageReader("s3://bucket/x")) == "S3StorageReader('s3://bucket/x')"
    url = f"s3://bucket/{'directory/' * 50}step-00000100"
    metrics, extra = {f"metric_{n}": n / 7 for n in range(50)}, {"note": "line\n" * 50}
    info = CheckpointInfo(url, "x", "committed", 100, 1.0, 8, 32, 5, metrics, extra=extra, damage="damaged " * 50)
    shown = repr(info)
    assert len(shown) <= 120, shown
    assert "\n" not in shown
    assert one_line("Thing", *(["x" * 30] * 9)) == f"Thing({', '.join(['x' * 30] * 3)}, ... 6 more)"
    assert one_line("Thing", "x" * 200, a=None, b=1) == f"Thing({'x' * 30}...{'x' * 30}, b=1)"
