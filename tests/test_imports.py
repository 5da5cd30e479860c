"""What `import dcp_s3` gives, and what it costs; torch is checked before it is imported."""

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
from dcp_s3 import versions
from dcp_s3.versions import TESTED, TORCH, release, require_torch


@pytest.mark.parametrize("name", [name for name in dcp_s3.__all__ if name != "__version__"])
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(dcp_s3, name)
    assert (found.__name__ if inspect.ismodule(found) else found.__module__).startswith("dcp_s3.")
    assert found.__doc__


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'dcp_s3' has no attribute 'S3Storagewriter'"):
        dcp_s3.S3Storagewriter  # type: ignore[attr-defined] # noqa: B018
    program = "import dcp_s3; dcp_s3.S3StorageWritr"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.rstrip().endswith("Did you mean: 'S3StorageWriter'?")


def test_names_are_the_same_to_type_checkers_and_at_run_time() -> None:
    tree = ast.parse(Path(dcp_s3.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    # ``as`` makes a name public to type checkers.
    checked = {name.asname: node.module for node in imports for name in node.names if name.asname == name.name}
    checked = {name: f"dcp_s3.{name}" if module == "dcp_s3" else module for name, module in checked.items()}
    assert checked == dcp_s3._MODULES
    assert list(dcp_s3.__all__) == sorted(dcp_s3.__all__)
    assert (Path(dcp_s3.__file__).parent / "py.typed").exists()


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """Importing ``dcp_s3.x`` sets the attribute ``x`` of the package."""
    for name in set(dcp_s3.__all__) - {"__version__"}:
        if importlib.util.find_spec(f"dcp_s3.{name}") is not None:
            assert inspect.ismodule(getattr(dcp_s3, name)), name


def test_a_star_brings_every_name_and_values_are_pickled_by_theirs() -> None:
    namespace: dict[str, Any] = {}
    exec("from dcp_s3 import *", namespace)
    assert set(dcp_s3.__all__) <= set(namespace)
    assert dir(dcp_s3) == sorted(dcp_s3.__all__)
    for value in (
        dcp_s3.KeepLatest(3) | dcp_s3.KeepDaily(7),
        dcp_s3.SaveEvery(steps=5) | dcp_s3.SaveOnPreemption(),
        dcp_s3.Settings(part_size="8MiB"),
        dcp_s3.CheckpointInfo("s3://bucket/x", "x", "committed", 1, 1.0, 1, 1, 1, extra={"a": 1}),
        dcp_s3.Fused(0, (1, 2)),
    ):
        assert pickle.loads(pickle.dumps(value)) == value
    for kind in (dcp_s3.CheckpointManager, dcp_s3.S3StorageWriter, dcp_s3.prune):
        assert pickle.loads(pickle.dumps(kind)) is kind


# --- torch -----------------------------------------------------------------------------------------------


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
    assert release("2.13.0a0+git1234") == (2, 13) > release(TORCH)
    _pretend(tmp_path, "2.5.1")
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


def test_torch_is_imported_by_one_thread_at_a_time() -> None:
    program = """
import threading
from dcp_s3.checkpoint.deletion import end_joint_save
from dcp_s3.checkpoint.stored_metadata import check_metadata
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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["None", "checked", "checked"]), done.stderr
