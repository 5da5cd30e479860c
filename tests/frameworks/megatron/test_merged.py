"""Saves of Megatron's decentralized plan gather neither plans nor results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import latest, verify
from tests.frameworks.megatron import jobs
from tests.ranks import run_ranks

pytestmark = pytest.mark.servers("memory")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_ranks_say_no_more_than_that_they_have_written(root: str) -> None:
    merged = run_ranks(2, jobs.count_what_ranks_say, root, True)[1]
    gathered = run_ranks(2, jobs.count_what_ranks_say, f"{root}-old", False)[1]
    assert len(merged) == 1
    assert merged[0] < 100  # bytes: the id of the save
    assert len(gathered) == 2  # the plan, the results
    assert min(gathered) > 1000
    assert verify(latest(root).url).ok


def test_plans_of_merged_saves_are_not_reused_for_others(root: str, tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    run_ranks(2, jobs.save_cached_here_and_there, root, str(tmp_path / "local"))


def test_ranks_that_save_to_different_urls_are_told_so(root: str) -> None:
    for failures in run_ranks(2, jobs.save_apart, root):
        assert failures.keys() == {0}
        assert "rank 1 did not save to" in failures[0]
    assert latest(root) is None


def test_saves_that_may_spill_gather_their_results(root: str, tmp_path: Path) -> None:
    spilling: dict[str, Any] = {"spill_dir": str(tmp_path / "spill")}
    assert len(run_ranks(2, jobs.count_what_ranks_say, root, spilling)[1]) == 2
