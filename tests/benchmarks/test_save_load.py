"""The benchmark's own parts: the state, the sizes, the measuring, the report."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from rich.console import Console

from benchmarks.cases import CASES, Target, reason_to_skip
from benchmarks.llama import llama_bytes, llama_shapes, llama_state
from benchmarks.loopback import measure_loopback
from benchmarks.measure import Sample, measure
from benchmarks.report import Results, Round, machine, save_chart, show
from benchmarks.units import GIB, MIB, parse_size
from benchmarks.worker import run_case
from tests.memory_s3 import MemoryS3


@pytest.mark.parametrize("size", [MIB, 100 * MIB, GIB, 100 * GIB])
def test_the_state_has_about_the_size_asked_for(size: int) -> None:
    assert size <= llama_bytes(size) <= max(1.3 * size, 5 * MIB)
    assert all(math.prod(shape) for shape in llama_shapes(size).values())


def test_the_state_depends_on_the_seed_only() -> None:
    first, again, other = (llama_state(MIB, seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_sizes() -> None:
    assert parse_size("1.5GiB") == 3 * GIB // 2
    assert parse_size("10 mb") == 10_000_000
    with pytest.raises(ValueError, match="not a size"):
        parse_size("much")


def test_peak_memory_is_that_of_the_operation() -> None:
    sample = measure(lambda: bytearray(b"\1") * (64 * MIB))
    assert 60 * MIB < sample.peak_bytes < 100 * MIB
    assert sample.wall_seconds > 0


def test_loopback_moves_all_bytes() -> None:
    save, load = measure_loopback(3 * MIB, 2)
    assert save.wall_seconds > 0
    assert load.wall_seconds > 0


@pytest.mark.quick("dcp_s3")
@pytest.mark.parametrize("name", CASES)
def test_a_case_loads_what_it_saved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = reason_to_skip(name)
    if reason:
        pytest.skip(reason)
    with MemoryS3() as server:
        server.create_bucket("bench")
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "benchmark")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "benchmark")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        case = CASES[name](Target("bench", "run", server.endpoint_url, "us-east-1", 2))
        try:
            outcome = run_case(case, 8 * MIB)
        finally:
            case.clean_up()
        assert outcome.state_bytes == llama_bytes(8 * MIB)
        assert server.open_uploads("bench") == []


def test_the_report_compares_within_rounds(tmp_path: Path) -> None:
    results = Results(machine(), {})
    for number, factor in ((1, 1.0), (2, 3.0)):
        ours = Sample(factor, 0.5, 0)
        theirs = Sample(2 * factor, 1.0, 10 * MIB)
        results.add("dcp_s3", Round(number, GIB, ours, ours))
        results.add("fsspec", Round(number, GIB, theirs, theirs))
    console = Console(record=True, width=110)
    show(results, console)
    text = console.export_text()
    assert "2.00 x" in text
    assert "0.50 x" in text
    save_chart(results, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 0
