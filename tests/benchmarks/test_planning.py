"""The benchmark of planning runs, and finds the plans to be the same."""

from __future__ import annotations

import pytest

from benchmarks.planning import CASES, Figures, run
from tests.ranks import run_ranks


def _run_small() -> list[Figures]:
    return [run(case, 2, 1) for case in CASES if case.share == 1]


@pytest.mark.soak
def test_the_small_cases() -> None:
    (figures,) = run_ranks(1, _run_small)
    assert all(each.same for each in figures)
    assert [each.read_items for each in figures] == [160, 298, 160, 160, 512, 160]
