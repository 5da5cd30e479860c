"""The benchmark of the coordinator runs, at a tiny size, and its sums are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.coordinator import State, Step, local_plan, main, show, slope
from benchmarks.measure import Sample


def _step(items: int, cpu_seconds: float) -> Step:
    return Step(items, Sample(0.0, cpu_seconds, 3 << 20))


def test_a_state_has_as_many_items_as_asked_for() -> None:
    state = State.of(50)
    plans = [local_plan(state, 3, rank) for rank in range(3)]
    assert [len(plan.items) for plan in plans] == [50, 50, 50]
    assert len({item.index for plan in plans for item in plan.items}) == state.stored(3)


def test_the_slope_is_that_of_the_items_added() -> None:
    few, many = _step(1000, 0.010), _step(3000, 0.050)
    assert few.microseconds == pytest.approx(10)
    assert slope(few, many) == pytest.approx(20)


def test_the_report_has_a_line_for_each_step() -> None:
    console = Console(record=True, width=200)
    show({4: {"finish": _step(1000, 0.01)}, 8: {"finish": _step(2000, 0.04)}}, console)
    (line,) = [line for line in console.export_text().splitlines() if "finish" in line]
    assert [cell.strip() for cell in line.split("│")[1:-1]] == ["finish", "10.00", "20.00", "30.00", "0.04", "3"]


def test_a_small_run_has_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "unset")  # restored at the end: the benchmark sets them
    file = tmp_path / "coordinator.json"
    main(["--ranks", "8,16", "--items", "20", "--json", str(file)])
    ranks = json.loads(file.read_text())["ranks"]
    assert list(ranks) == ["8", "16"]
    for count, steps in ranks.items():
        assert {name for name in steps if not name.startswith("DCP: ")} == {
            "prepare_global_plan", "finish", "cached plan: prepare_global_plan", "cached plan: finish",
            "read_metadata", "load plan of a rank",
            "share a load: same cut", "share a load: HSDP", "share a load: replicated",
        }  # fmt: skip
        assert steps["finish"]["items"] == State.of(20).stored(int(count))
        assert steps["share a load: replicated"]["items"] == 20 * int(count)
