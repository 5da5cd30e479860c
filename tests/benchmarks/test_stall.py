"""The benchmark of stalls: what it computes, by value, and a short run of all of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from benchmarks import stall
from benchmarks.cases import CASES, Target, reason_to_skip
from benchmarks.llama import llama_bytes
from benchmarks.report import machine
from benchmarks.stall_report import Stall, StallResults, Training, extra_seconds, save_chart, show
from benchmarks.stall_worker import WAYS, Compute, Plan, Save, Way, calibrate, change, make_state, measure_stalls, train
from benchmarks.units import GIB, MIB
from tests.memory_s3 import MemoryS3


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    with MemoryS3() as server:
        server.create_bucket("bench")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "benchmark")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "benchmark")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield Target("bench", "run", server.endpoint_url, "us-east-1", 2)


def _training() -> Training:
    #       quiet     first save      second save     third save
    steps = [1.0, 1.2, 5.0, 2.0, 1.0, 3.0, 1.5, 1.0, 4.0, 1.0]
    quiet = [True, True, False, False, True, False, False, True, False, True]
    return Training(GIB, steps, [2, 5, 8], quiet, [2.5, 2.0, 4.0])


def test_a_save_costs_what_its_steps_take_longer() -> None:
    assert extra_seconds([1.0, 3.0, 2.0, 1.0, 4.0, 1.5], [1, 4], 1.0) == [3.0, 3.5]
    assert extra_seconds([1.0, 1.0], [0], 1.5) == [-1.0]
    assert extra_seconds([1.0], [], 1.0) == []


def test_the_first_save_is_apart() -> None:
    training = _training()
    assert training.quiet_seconds == 1.0
    assert training.first_longest_seconds == 5.0
    assert training.longest_seconds == 4.0
    assert training.first_extra_seconds == pytest.approx(5.0)
    assert training.extra_seconds == pytest.approx((2.5 + 3.0) / 2)


def test_a_stall_is_relative_to_the_memcpy() -> None:
    sample = Stall(1, False, GIB, 0.2, 0.3, 0.5, 2.0)
    assert sample.return_ratio == pytest.approx(1.5)
    assert sample.staged_ratio == pytest.approx(2.5)


def test_the_report_takes_medians_without_the_first_save(tmp_path: Path) -> None:
    results = StallResults(machine(), {})
    for first, seconds in ((True, 7.0), (False, 0.3), (False, 0.1), (False, 0.2)):
        results.add_stall("dcp_s3-blocking", Stall(1, first, GIB, 0.1, seconds, seconds, 2.0))
    results.training["dcp_s3-blocking"] = _training()
    console = Console(record=True, width=180)
    show(results, console)
    rows = [
        [cell.strip() for cell in line.split("|")]
        for line in console.export_text().splitlines()
        if line.startswith("| dcp_s3-blocking")
    ]
    assert rows[0][2:-1] == [
        *("100", "200.0", "2.00 (1.00-3.00)", "200.0", "2.00 (1.00-3.00)", "2.00", "7000.0", "70.00"),
    ]
    assert rows[1][2:-1] == ["1000", "4000", "2.75", "3.0", "5000", "5.00"]
    save_chart(results, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 0


def test_a_step_takes_more_multiplications_if_it_is_longer() -> None:
    assert calibrate(1e-9) == 1
    assert calibrate(10.0) > 1


def test_a_computation_leaves_its_result() -> None:
    compute = Compute(2)
    compute.step()
    assert torch.all(compute._result == 1.0)


def test_a_save_that_is_not_what_the_state_was_is_noticed(target: Target) -> None:
    case = stall.WAYS["dcp_s3-blocking"]
    state = make_state(MIB)
    change(state, 3)
    save = Save(case, None, CASES["dcp_s3"](target), state, "checkpoint", 3)
    save.wait()
    save.check()
    wrong = Save(case, None, CASES["dcp_s3"](target), state, "other", 4)
    wrong.wait()
    with pytest.raises(RuntimeError, match=r"was saved with \[3.0\] instead of 4"):
        wrong.check()


def test_a_way_that_fails_does_not_stop_the_others(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(BlockingAsyncStager):
        def stage(self, state_dict):
            raise OSError("no room")

    monkeypatch.setitem(WAYS, "failing", Way("dcp_s3", Failing))
    targets = {name: replace(target, prefix=name) for name in ("failing", "dcp_s3-blocking")}
    measured = list(measure_stalls(targets, MIB, 1))
    assert [name for name, _ in measured] == ["failing", "dcp_s3-blocking", "dcp_s3-blocking"]
    assert "OSError: no room" in str(measured[0][1])
    assert isinstance(measured[1][1], Stall)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["dcp_s3-blocking", "dcp_s3-async"])
def test_the_training_loop_saves_at_its_steps(name: str, target: Target) -> None:
    training = train(WAYS[name], target, MIB, Plan(multiplications=1, lead_in=2, every=3, saves=2))
    assert len(training.step_seconds) == len(training.quiet) == 8
    assert training.saves == [2, 5]
    assert training.quiet[:2] == [True, True]
    assert not training.quiet[2]
    assert not training.quiet[5]
    assert len(training.saved_seconds) == 2
    assert all(seconds > 0 for seconds in (*training.step_seconds, *training.saved_seconds))


@pytest.mark.soak
def test_a_quick_run_has_figures_of_all_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, chart = tmp_path / "stall.json", tmp_path / "stall.png"
    arguments = ["--quick", "--size", "4MiB", "--json", str(file), "--png", str(chart)]
    monkeypatch.setattr(sys, "argv", ["stall", *arguments])
    stall.main()
    results = json.loads(file.read_text())
    names = [name for name, way in WAYS.items() if not reason_to_skip(way.backend)]
    assert results["failures"] == {}
    assert list(results["stalls"]) == names
    for name, samples in results["stalls"].items():
        assert [sample["round"] for sample in samples if not sample["first"]] == [1, 2]
        assert sum(sample["first"] for sample in samples) == (2 if WAYS[name].kept else 1)
        for sample in samples:
            assert sample["state_bytes"] == llama_bytes(4 * MIB)
            assert 0 < sample["return_seconds"] <= sample["staged_seconds"] < sample["saved_seconds"]
            assert sample["memcpy_seconds"] > 0
    plan = results["options"]["plan"]
    assert list(results["training"]) == [name for name in names if WAYS[name].trained]
    for training in results["training"].values():
        assert len(training["step_seconds"]) == plan["lead_in"] + plan["saves"] * plan["every"]
        assert len(training["saves"]) == len(training["saved_seconds"]) == plan["saves"]
        assert min(training["step_seconds"]) > 0
    assert chart.stat().st_size > 0
    shown = capsys.readouterr().out
    assert all(f"| {name} " in shown for name in names)
