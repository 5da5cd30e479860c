"""What benchmarks compute from their samples, by value, and what their reports show."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks import report, reshard_report, small_tensors, stall_report
from benchmarks.coordinator import Step, slope
from benchmarks.llama import llama_bytes, llama_shapes
from benchmarks.lost_work import Case, Lost
from benchmarks.lost_work import show as show_lost
from benchmarks.measure import Sample, measure
from benchmarks.ranks import Cost, summed_up, training_spec
from benchmarks.ranks import Sample as RanksSample
from benchmarks.reshard_cases import CASES, Layout, TensorSpec, needed_bytes, unique_bytes
from benchmarks.reshard_report import Load, count, find_misses
from benchmarks.reshard_worker import check_state, make_state
from benchmarks.small_tensors_worker import ITSELF
from benchmarks.small_tensors_worker import Sample as SmallSample
from benchmarks.stall_report import Stall, StallResults, Training, extra_seconds
from benchmarks.units import GIB, MIB, parse_size
from tests.memory_s3 import Counters, Reader, Reads
from tests.ranks import run_ranks

LAYOUTS = list(dict.fromkeys(layout for case in CASES.values() for layout in (case.source, case.target)))
#: Uneven, fewer rows than ranks, empty.
SHAPES = [(8, 4), (7, 5), (2, 9), (11,), (2,), (0, 4)]


def _shown(show: Any, results: Any) -> str:
    console = Console(record=True, width=200)
    show(results, console)
    return console.export_text()


def _cells(text: str, first: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if f"| {first}" in line]


# --- sizes and costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [200 * MIB, GIB, 100 * GIB])
def test_states_have_about_the_size_asked_for(size: int) -> None:
    assert size <= llama_bytes(size) <= 1.3 * size
    parameters = sum(math.prod(shape) for shape in llama_shapes(size * 4 // 14, layers=32).values())
    assert sum(tensor.nbytes for tensor in training_spec(size).values()) == 14 * parameters


def test_sizes() -> None:
    assert parse_size("1.5GiB") == 3 * GIB // 2
    assert parse_size("10 mb") == 10_000_000
    with pytest.raises(ValueError, match="not a size"):
        parse_size("much")


def test_peak_memory_is_that_of_the_operation() -> None:
    assert 60 * MIB < measure(lambda: bytearray(b"\1") * (64 * MIB)).peak_bytes < 100 * MIB


def test_the_slope_is_that_of_the_items_added() -> None:
    few, many = Step(1000, Sample(0.0, 0.010, 3 << 20)), Step(3000, Sample(0.0, 0.050, 3 << 20))
    assert few.microseconds == pytest.approx(10)
    assert slope(few, many) == pytest.approx(20)


def test_the_slowest_rank_counts_and_the_cpu_of_all() -> None:
    first = [[Cost(1.0, 2.0, 0.1, 0.2), Cost(5.0, 6.0, 0.5, 0.6)]]
    second = [[Cost(3.0, 1.0, 0.3, 0.4), Cost(4.0, 7.0, 0.7, 0.8)]]
    assert summed_up([first, second], ["a", "b"], 100) == [
        RanksSample(2, "a", 1, 100, 3.0, 2.0, pytest.approx(0.4), pytest.approx(0.6)),
        RanksSample(2, "b", 1, 100, 5.0, 7.0, pytest.approx(1.2), pytest.approx(1.4)),
    ]


def test_saves_and_loads_are_compared_within_rounds(tmp_path: Path) -> None:
    results = report.Results(report.machine(), {})
    for number, factor in ((1, 1.0), (2, 3.0)):
        ours, theirs = Sample(factor, 0.5, 0), Sample(2 * factor, 1.0, 10 * MIB)
        results.add("dcp_s3", report.Round(number, GIB, ours, ours))
        results.add("fsspec", report.Round(number, GIB, theirs, theirs))
    text = _shown(report.show, results)
    assert "2.00 x" in text
    assert "0.50 x" in text
    report.save_chart(results, tmp_path / "chart.png")


def test_lost_work_has_medians_and_the_worst() -> None:
    lost = Lost(steps=[3, 9, 5], seconds=[0.25, 1.0, 0.5], pace=12.34)
    line = "| continuously | `wait` | 5 (9) | 0.50 (1.00) | 12.3 |"
    assert show_lost([(Case("continuously", "wait"), lost)]).splitlines()[-1] == line


def test_costs_beyond_dcp_itself_are_compared_within_a_round() -> None:
    """Three rounds in which DCP itself took 10, 20 and 30 us a tensor, dcp_s3 30, 25 and 70."""
    samples = []
    for number, (itself, ours) in enumerate(((10, 30), (20, 25), (30, 70)), start=1):
        for reader, cost in ((ITSELF, itself), ("dcp_s3", ours)):
            phases = {"read_metadata": 1e-3 * cost / 2, "read_data": 1e-3 * cost / 2, "planning": 0.0}
            samples.append(SmallSample(reader, number, 1000, 1e-3 * cost, 0.002, phases))
    assert small_tensors.microseconds(samples, "dcp_s3") == pytest.approx(30)
    assert small_tensors.beyond(samples, "dcp_s3") == pytest.approx(20)  # the median of 20, 5, 40
    assert small_tensors.beyond(samples, "dcp_s3", "read_metadata") == pytest.approx(10)


# --- stalls -----------------------------------------------------------------------------------------------


def test_a_save_costs_what_its_steps_take_longer() -> None:
    assert extra_seconds([1.0, 3.0, 2.0, 1.0, 4.0, 1.5], [1, 4], 1.0) == [3.0, 3.5]
    assert extra_seconds([1.0, 1.0], [0], 1.5) == [-1.0]


def test_stalls_are_medians_without_the_first_save(tmp_path: Path) -> None:
    results = StallResults(report.machine(), {})
    for first, seconds in ((True, 7.0), (False, 0.3), (False, 0.1), (False, 0.2)):
        results.add_stall("dcp_s3-blocking", Stall(1, first, GIB, 0.1, seconds, seconds, 2.0))
    steps = [1.0, 1.2, 5.0, 2.0, 1.0, 3.0, 1.5, 1.0, 4.0, 1.0]  # saves at 2, 5 and 8
    quiet = [True, True, False, False, True, False, False, True, False, True]
    results.training["dcp_s3-blocking"] = Training(GIB, steps, [2, 5, 8], quiet, [2.5, 2.0, 4.0])
    stalls, training = _cells(_shown(stall_report.show, results), "dcp_s3-blocking")
    assert stalls[1:] == ["100", "200.0", "2.00 (1.00-3.00)", "200.0", "2.00 (1.00-3.00)", "2.00", "7000.0", "70.00"]
    assert training[1:] == ["1000", "4000", "2.75", "3.0", "5000", "5.00"]
    stall_report.save_chart(results, tmp_path / "chart.png")


# --- resharding -------------------------------------------------------------------------------------------


def _boxes_of_torch(layouts: list[Layout]) -> list[list[Any]]:
    found = []
    for layout in layouts:
        mesh = init_device_mesh("cpu", layout.mesh)
        for shape in SHAPES:
            placements = [Replicate() if dim is None else Shard(dim) for dim in layout.placements(shape)]
            lengths, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
            found.append([tuple(offsets), tuple(lengths)])
    return found


def test_boxes_are_those_of_dtensor() -> None:
    layouts = [layout for layout in LAYOUTS if layout.ranks == 4]
    for rank, found in enumerate(run_ranks(4, _boxes_of_torch, layouts)):
        expected = [layout.box(shape, rank) for layout in layouts for shape in SHAPES]
        for (offsets, lengths), (own_offsets, own_lengths) in zip(found, expected, strict=True):
            assert lengths == own_lengths
            assert offsets == own_offsets or 0 in lengths


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_unique_bytes_are_those_of_the_state(layout: Layout) -> None:
    spec = {str(shape): TensorSpec(shape, torch.float32) for shape in SHAPES}
    assert unique_bytes(spec, layout) == sum(4 * math.prod(shape) for shape in SHAPES)
    if layout.name == "FSDP 3":
        assert needed_bytes({"m": TensorSpec((7, 5), torch.bfloat16)}, layout) == [30, 30, 10]


def test_a_wrong_value_is_noticed() -> None:
    spec, plain = {"a": TensorSpec((7, 5), torch.bfloat16)}, Layout("one", (1,), (None,), (None,), plain=True)
    state = make_state(spec, plain, 0, filled=True)
    check_state(state, spec, plain, 0)
    state["a"].view(torch.int16)[6, 4] += 1
    with pytest.raises(RuntimeError, match="a was not loaded"):
        check_state(state, spec, plain, 0)


def _load(**other: Any) -> Load:
    fields: dict[str, Any] = {
        "case": "hsdp", "backend": "dcp_s3", "round": 1, "needed_bytes": [50, 50, 30, 70], "unique_bytes": 100,
        "fetched_bytes": [40, 30, 0, 35], "total_bytes": 106, "metadata_bytes": 2, "gets": 5, "requests": 6,
        "seconds": 1.0, "cpu_seconds": 2.0,
    }  # fmt: skip
    return Load(**fields | other)


def test_a_target_is_missed_by_the_worst_round_of_the_default_settings() -> None:
    good = [_load(total_bytes=105), _load(backend="fsspec", total_bytes=999), _load(case="same", total_bytes=204)]
    assert find_misses(good) == []
    (miss,) = find_misses([*good, _load(round=2), _load(round=3, total_bytes=100)])
    assert str(miss) == "hsdp: dcp_s3 fetched 1.060 times the bytes unique, above 1.05"


def test_counters_of_the_server_by_rank() -> None:
    reads = {
        Reader("rank-0", "run/.metadata"): Reads(1, 10), Reader("rank-0", "run/a"): Reads(2, 100),
        Reader("rank-2", "run/a"): Reads(1, 7),
    }  # fmt: skip
    counters = Counters({"GetObject": 4, "HeadObject": 3}, bytes_out=120, reads=reads)
    assert count(counters, ["rank-0", "rank-1", "rank-2"]) == {
        "fetched_bytes": [110, 0, 7], "total_bytes": 120, "metadata_bytes": 10, "gets": 4, "requests": 7,
    }  # fmt: skip


def test_the_report_of_resharding_has_a_line_for_each_case_and_backend(tmp_path: Path) -> None:
    loads = [_load(), _load(backend="fsspec"), _load(case="same")]
    results = reshard_report.Results(report.machine(), {}, loads)
    text = _shown(reshard_report.show, results)
    row = next(cells for cells in _cells(text, "hsdp"))
    assert row[:2] == ["hsdp: HSDP 2x2 -> HSDP 2x2", "dcp_s3"]
    assert row[5:8] == ["0.530", "1.060", "0.571"]
    reshard_report.save_chart(results, tmp_path / "chart.png")
