"""The benchmark of many small tensors: what it computes, by value, and a run with few."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console

from benchmarks import small_tensors
from benchmarks.cases import reason_to_skip
from benchmarks.small_tensors import beyond, microseconds, show
from benchmarks.small_tensors_worker import ITSELF, NoReader, Sample, load, make_state, timed


def _samples() -> list[Sample]:
    """Three rounds in which DCP itself took 10, 20 and 30 us a tensor, dcp_s3 30, 25 and 70."""
    samples = []
    for number, (itself, ours) in enumerate(((10, 30), (20, 25), (30, 70)), start=1):
        for reader, cost in ((ITSELF, itself), ("dcp_s3", ours)):
            phases = {"read_metadata": 1e-6 * cost * 1000 / 2, "read_data": 1e-6 * cost * 1000 / 2, "planning": 0.0}
            samples.append(
                Sample(reader, number, 1000, 1e-6 * cost * 1000, 0.001 if reader == ITSELF else 0.002, phases)
            )
    return samples


def test_costs_beyond_dcp_itself_are_compared_within_a_round() -> None:
    samples = _samples()
    assert microseconds(samples, "dcp_s3") == pytest.approx(30)
    assert microseconds(samples, ITSELF, "read_data") == pytest.approx(10)
    assert beyond(samples, "dcp_s3") == pytest.approx(20)  # the median of 20, 5, 40; of the medians it would be 10
    assert beyond(samples, "dcp_s3", "read_metadata") == pytest.approx(10)
    assert beyond(samples, "dcp_s3", "planning") == 0


def test_the_report_has_a_line_for_each_reader() -> None:
    console = Console(record=True, width=200)
    show([_samples()], console)
    rows = [line.split("|") for line in console.export_text().splitlines() if line.startswith(("| DCP", "| dcp_s3"))]
    cells = [[cell.strip() for cell in row[1:-1]] for row in rows]
    assert cells == [
        [ITSELF, "20.0", "10.0", "0.0", "10.0", "1.0", "", "", "", "", ""],
        ["dcp_s3", "30.0", "15.0", "0.0", "15.0", "2.0", "20.0", "10.0", "0.0", "10.0", "1.0"],
    ]


def test_the_reader_without_io_plans_all_and_loads_nothing(tmp_path: Path) -> None:
    state: dict[str, Any] = {**make_state(20, 64), "object": 7}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    seen: list[str] = []

    class Planner(dcp.DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            seen.append(read_item.dest_index.fqn)

    loaded = {name: torch.zeros(16) for name in make_state(20, 64)} | {"object": None}
    reader = NoReader((tmp_path / ".metadata").read_bytes())
    seconds = timed(reader)
    dcp.load(loaded, storage_reader=reader, planner=Planner(), no_dist=True)
    assert sorted(seen) == sorted(make_state(20, 64))
    assert all(not loaded[name].any() for name in seen)
    assert set(seconds) == {"read_metadata", "read_data"}
    assert min(seconds.values()) > 0


def test_a_reader_that_loads_nothing_is_noticed(tmp_path: Path) -> None:
    state = make_state(3, 64)
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    reader = NoReader((tmp_path / ".metadata").read_bytes())
    with pytest.raises(RuntimeError, match="was not loaded"):
        load("broken", 1, reader, make_state(3, 64), state)


@pytest.mark.soak
def test_a_short_run_has_figures_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "small.json"
    arguments = ["--tensors", "40", "--few", "40", "--tensor-size", "256", "--rounds", "2", "--out", str(file)]
    monkeypatch.setattr("sys.argv", ["small_tensors", *arguments])
    monkeypatch.setattr(small_tensors, "TARGET_MICROSECONDS", float("inf"))
    small_tensors.main()
    samples = [Sample(**fields) for fields in json.loads(file.read_text())["samples"]]
    others = [name for name in ("s3torchconnector", "fsspec") if not reason_to_skip(name)]
    expected = [(name, 40) for name in (ITSELF, "dcp_s3")] * 2 + [(name, 40) for name in (ITSELF, *others)] * 2
    assert [(sample.reader, sample.tensors) for sample in samples] == expected
    for sample in samples:
        assert sum(sample.phases.values()) == pytest.approx(sample.seconds)
        assert min(sample.phases.values()) > 0
    assert "| dcp_s3 " in capsys.readouterr().out


@pytest.mark.parametrize(("limit", "status"), [(20.5, 0), (19.5, 1)])
def test_the_status_says_whether_the_target_is_met(
    limit: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [asdict(sample) for sample in _samples()]
    monkeypatch.setattr(small_tensors, "run_worker", lambda *_: answers)
    monkeypatch.setattr(small_tensors, "serve_embedded", lambda *_: contextlib.nullcontext(("http://server", {})))
    monkeypatch.setattr(small_tensors, "TARGET_MICROSECONDS", limit)  # dcp_s3 takes 20
    arguments = ["small_tensors", "--backends", "dcp_s3", "--rounds", "3", "--out", str(tmp_path / "small.json")]
    monkeypatch.setattr("sys.argv", arguments)
    with pytest.raises(SystemExit) if status else contextlib.nullcontext() as error:
        small_tensors.main()
    assert status == 0 or error.value.code == status
