"""What is published: the pages made from the code, the site, the wheel and the sdist."""

from __future__ import annotations

import email
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import dcp_s3
from examples.sizing import Training, report, size

_ROOT = Path(__file__).resolve().parents[2]


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", _ROOT / "docs" / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["settings.md", "cli.md"])
def test_a_page_made_from_the_code_is_what_the_code_says(name: str) -> None:
    made = _tool("pages").PAGES[name]()
    assert (_ROOT / "docs" / name).read_text() == made, "`make pages` writes it"


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for each in (nav.values() if isinstance(nav, dict) else nav) for page in _pages(each)]


def test_every_page_is_in_the_nav_and_the_nav_has_only_pages() -> None:
    there = {path.relative_to(_ROOT / "docs").as_posix() for path in (_ROOT / "docs").rglob("*.md")}
    nav = _pages(yaml.safe_load((_ROOT / "mkdocs.yml").read_text())["nav"])
    assert sorted(nav) == sorted(there | {"index.md", "contributing.md", "API"})


def test_the_api_reference_has_every_public_name() -> None:
    pytest.importorskip("mkdocs", reason="the site's tools are not installed: pip install 'dcp-s3[docs]'")
    shown = re.findall(r"^::: (\S+)", "\n".join(_tool("hooks").api_pages().values()), re.MULTILINE)
    assert {name.rpartition(".")[2] for name in shown} == set(dcp_s3.__all__) - {"__version__"}


def test_the_sizing_page_shows_what_the_script_says() -> None:
    page = (_ROOT / "docs" / "sizing.md").read_text()
    assert f"```text\n{report(Training())}\n```" in page
    found = size(Training())
    assert f"{found.host_staging / 2**30:.1f} GiB of host memory" in page
    assert f"here {found.rank * 8 / 2**30:.1f} GiB" in page
    assert f"{found.part / 2**20:.0f} MiB here" in page
    assert f"requests for ${found.save_dollars:.2f}" in page


# --- packages --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist that it was made from."""
    pytest.importorskip("build", reason="no package is built here: pip install 'dcp-s3[package]'")
    pytest.importorskip("hatch_fancy_pypi_readme", reason="no package is built here: pip install 'dcp-s3[package]'")
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--quiet", "--no-isolation", "--outdir", str(folder), str(_ROOT)],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def _wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def test_the_wheel_has_the_package_the_types_and_the_licence_and_no_tests(dist: Path) -> None:
    with zipfile.ZipFile(_wheel(dist)) as wheel:
        names = wheel.namelist()
        info = next(name.partition("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        found = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert {name.partition("/")[0] for name in names} == {"dcp_s3", info}
    assert {"dcp_s3/py.typed", f"{info}/licenses/LICENSE"} <= set(names)
    ours = {path.relative_to(_ROOT).as_posix() for path in (_ROOT / "dcp_s3").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == ours
    assert (found["License-Expression"], found["Description-Content-Type"]) == ("Apache-2.0", "text/markdown")
    for version in ("3.10", "3.11", "3.12", "3.13"):
        assert f"Programming Language :: Python :: {version}" in (found.get_all("Classifier") or [])
    assert "torch>=2.9" in " ".join(found.get_all("Requires-Dist") or [])


def test_the_sdist_has_what_the_wheel_and_the_tests_need(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = "pyproject.toml README.md LICENSE CHANGELOG.md CONTRIBUTING.md Makefile constraints.txt mkdocs.yml"
    assert set(needed.split()) <= names
    assert {"tests/docs/test_site.py", "docs/start.md", "docs/tools/hooks.py", "examples/sizing.py"} <= names
    assert not [name for name in names if "__pycache__" in name or name.startswith((".venv", ".git/"))]


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_wheel_runs_the_demo_in_an_empty_environment(dist: Path, tmp_path: Path) -> None:
    """With the torch of the constraints, from wherever this machine gets it."""
    pytest.importorskip("uv", reason="no environment is made here: pip install uv")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DCP_S3_", "AWS_"))
    }

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            [str(word) for word in command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    uv = [sys.executable, "-m", "uv", "--quiet"]
    run(*uv, "venv", "--python", sys.executable, "empty")
    python = tmp_path / "empty" / "bin" / "python"
    torch = f"torch=={metadata.version('torch')}"
    constraints = [
        line for line in (_ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("torch==")
    ]
    (tmp_path / "constraints.txt").write_text("\n".join([*constraints, torch.partition("+")[0]]))
    run(*uv, "pip", "install", "--python", python, "-c", "constraints.txt", f"{_wheel(dist)}[demo]")
    assert "demo" in run(tmp_path / "empty" / "bin" / "dcp-s3", "--help")
    output = run(tmp_path / "empty" / "bin" / "dcp-s3", "demo")
    assert output.count("PASS") == 5
    assert str(tmp_path) in run(python, "-c", "import dcp_s3; print(dcp_s3.__file__)")
