"""The pages that are made from the code are what the code says, and the site has all pages."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import dcp_s3
from dcp_s3 import Settings
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


def test_the_settings_page_has_every_setting_with_its_default() -> None:
    page = (_ROOT / "docs" / "settings.md").read_text()
    table = dict(re.findall(r"^\| `DCP_S3_(\w+)` \| (`[^`]*`|unset) \|", page, re.MULTILINE))
    assert {name.lower() for name in table} == set(Settings.model_fields)
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    for variable, shown in table.items():
        name, text = variable.lower(), shown.strip("`")
        if text == "unset":
            assert defaults[name] is None
        else:  # what the page says can be written into the variable
            assert getattr(Settings(**{name: text}), name) == defaults[name]
    assert len(_tool("pages").FIRST) == 5


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for each in (nav.values() if isinstance(nav, dict) else nav) for page in _pages(each)]


def _nav() -> list[str]:
    text = (_ROOT / "mkdocs.yml").read_text()
    return _pages(yaml.safe_load(text)["nav"])


def test_every_page_is_in_the_nav_and_the_nav_has_only_pages() -> None:
    there = {path.relative_to(_ROOT / "docs").as_posix() for path in (_ROOT / "docs").rglob("*.md")}
    nav = _nav()
    assert len(nav) == len(set(nav))
    assert there <= set(nav)
    assert set(nav) - there == {"index.md", "contributing.md", "API"}


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


def test_sizes_follow_from_the_assumptions() -> None:
    found = size(
        Training(parameters=1e9, bytes_each=14.0, hosts=1, ranks_per_host=1, rank_rate=1e9, kept=1, saves_a_day=0)
    )
    assert found.checkpoint == found.rank == 14e9
    assert found.part == 64 * 2**20
    assert found.objects == 4
    parts = 4 * -(-3_500_000_000 // (64 * 2**20))
    assert (found.puts, found.gets) == (parts + 2 * 4 + 2, parts + 1)
    assert found.seconds == 14.0
    assert found.month_dollars == pytest.approx(14 * 0.023)
