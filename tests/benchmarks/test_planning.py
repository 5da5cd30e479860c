"""The benchmark of planning runs, and finds the plans to be the same."""

from __future__ import annotations

from benchmarks.planning import CASES, Figures, run
from tests.ranks import run_ranks


def _run_all() -> list[Figures]:
    return [run(case, 2, 1) for case in CASES]


def test_every_case() -> None:
    (figures,) = run_ranks(1, _run_all)
    assert all(each.same for each in figures)
    assert [each.read_items for each in figures] == [160, 316, 160, 160, 512, 6400, 160]
