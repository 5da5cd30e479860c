"""``dcp-s3 report``, on real saves."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import errors, pin
from dcp_s3.reporting import report as reporting
from tests.cli import looking
from tests.retention.making import delete, keys, put, save, save_foreign

pytestmark = pytest.mark.servers("memory")


run = partial(looking.run, "report")


@pytest.fixture
def filled(root: str, s3: Any, tmp_path: Path) -> str:
    """Of ours with metrics, of another writer, damaged, left over."""
    for step in range(1, 6):
        save(f"{root}/step-{step}", metrics={"loss": 1 / step if step != 3 else math.nan})
    save_foreign(s3, f"{root}/step-6", tmp_path / "foreign")
    pin(f"{root}/step-1", "the first")
    delete(s3, f"{root}/step-2", next(path for path in keys(s3, f"{root}/step-2") if path.startswith("__")))
    put(s3, f"{root}/step-9", "__0_0-abcdef012345.distcp", b"left")
    return root


def test_the_page_is_written_and_said(filled: str, tmp_path: Path) -> None:
    pytest.importorskip("bokeh", reason="the charts are drawn with bokeh: pip install 'dcp-s3[report]'")
    out = tmp_path / "page.html"
    result = run(filled, "-o", out, "--policy", "latest:2 best:1:loss:min")
    assert result.stdout == ""
    assert "7 checkpoints" in result.stderr
    text = out.read_text()
    assert f"<h1>{filled}</h1>" in text
    assert "pinned (the first)" in text
    assert "dcp-s3 verify" in text
    assert "latest:2, number 1" in text
    before = set(tmp_path.iterdir())
    run(filled, "-o", out)  # what is there is replaced
    assert set(tmp_path.iterdir()) == before
    assert "No policy" in out.read_text()


def test_json_is_strict_and_needs_no_bokeh(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting.util, "find_spec", lambda _: None)

    def refuse(text: str) -> None:
        raise ValueError(text)

    found = json.loads(run(filled, "--json", "--policy", "latest:2").stdout, parse_constant=refuse)
    assert found["policy"] == "latest:2"
    assert [each["action"] for each in found["plan"]["decisions"]].count("keep") >= 3
    assert {each["kind"] for each in found["problems"]} - {"no new checkpoint"} == {"damaged"}  # on a slow host
    committed = [each["checkpoint"] for each in found["plan"]["decisions"] if each["checkpoint"]["save_id"]]
    assert all(each["started_at"] <= each["created_at"] for each in committed)


def test_without_bokeh_it_says_what_to_install(filled: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(reporting.util, "find_spec", lambda _: None)
    message = run(filled, "-o", tmp_path / "page.html", status=1).stderr
    assert "pip install 'bokeh>=3.9,<4'" in message
    assert not (tmp_path / "page.html").exists()


def test_an_empty_root_has_a_status_of_its_own(root: str, tmp_path: Path) -> None:
    assert "no checkpoints under" in run(root, "--json", status=3).stderr
    with pytest.raises(errors.CheckpointNotFoundError, match="URL above the checkpoints"):
        reporting.report(root, None)


@pytest.mark.parametrize(
    ("option", "value"),
    [("--policy", "latest"), ("--grace", "soon"), ("-o", "s3://bucket/page.html")],
)
def test_wrong_usage_names_the_option(option: str, value: str, root: str) -> None:
    message = run(root, option, value, status=2).stderr
    assert option in message or "S3 URL" in message


def test_the_policy_of_the_environment_is_in_force(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_S3_RETENTION", "latest:3")
    assert json.loads(run(filled, "--json").stdout)["policy"] == "latest:3"
    assert json.loads(run(filled, "--json", "--policy", "").stdout)["policy"] is None


def test_the_function_takes_a_policy_object(filled: str) -> None:
    found = reporting.report(filled, None, lambda infos, now: {infos[-1].name: ["mine"]}, grace="24h")
    assert found.policy == "<lambda>"
    assert found.newest is not None
    assert found.newest.name == "step-6"
    assert found.stored >= sum(each.checkpoint.size or 0 for each in found.plan.decisions)
