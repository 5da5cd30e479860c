"""The benchmark of lost work: what it prints, and a short run of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import lost_work
from benchmarks.lost_work import Case, Lost, cases, parse, run, show
from dcp_s3 import SaveContinuously, SaveEvery


def test_all_overlaps_of_what_comes_too_often_and_continuous_saves() -> None:
    found = cases(10, 0.5)
    assert [case.overlap for case in found] == ["wait", "queue"] * 2 + ["wait"]
    assert [case.policy(10, 0.5) for case in found[::2]] == [
        SaveEvery(steps=10), SaveEvery(seconds=0.5), SaveContinuously()
    ]  # fmt: skip


def test_the_table_has_medians_and_the_worst() -> None:
    lost = Lost(steps=[3, 9, 5], seconds=[0.25, 1.0, 0.5], pace=12.34)
    assert show([(Case("continuously", "wait"), lost)]).splitlines()[-1] == (
        "| continuously | `wait` | 5 (9) | 0.50 (1.00) | 12.3 |"
    )


def test_a_line_that_a_kill_cut_off_does_not_count(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("restored 4 1.5\nstep 5 2.5\nstep 6 3.5\nstep 7 4.")
    assert lost_work._steps(log) == {5: 2.5, 6: 3.5}


def test_a_training_that_is_killed_goes_on_where_it_was_saved(
    memory_server: Any, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = parse(["--kills", "2", "--life", "0.1", "--size", "64KiB", "--step-seconds", "0.01", "--every", "1"])
    options.endpoint_url = None
    lost = run(root, options, Case("every 1 steps", "queue"))
    assert len(lost.steps) == len(lost.seconds) == 2
    assert all(steps >= 0 for steps in lost.steps)
    assert lost.pace > 0
