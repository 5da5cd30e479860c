"""The benchmark of resharding: what it computes, by value, and a quick run of all of it against the targets."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks import reshard
from benchmarks.report import machine
from benchmarks.reshard_cases import CASES, Layout, TensorSpec, llama_spec, needed_bytes, unique_bytes
from benchmarks.reshard_report import Load, Results, count, find_misses, save_chart, show
from benchmarks.reshard_worker import OBJECTS, STEP, STEP_VALUE, Cost, check_state, make_state, values
from benchmarks.units import MIB
from tests.memory_s3 import Counters, Reader, Reads
from tests.ranks import RankFailed, run_ranks

PLAIN = Layout("one", (1,), (None,), (None,), plain=True)
LAYOUTS = list(dict.fromkeys(layout for case in CASES.values() for layout in (case.source, case.target)))
SPEC = {"a": TensorSpec((8, 4), torch.float32)}
#: Uneven, fewer rows than ranks, empty.
SHAPES = [(8, 4), (7, 5), (2, 9), (11,), (2,), (0, 4)]


def layout_of(name: str) -> Layout:
    return next(layout for layout in LAYOUTS if layout.name == name)


# --- what is needed -------------------------------------------------------------------------------


def test_ranks_hold_rows_columns_or_all() -> None:
    fsdp, columns = layout_of("FSDP 3"), layout_of("TP 4, columns")
    assert [fsdp.box((7, 5), rank) for rank in range(3)] == [((0, 0), (3, 5)), ((3, 0), (3, 5)), ((6, 0), (1, 5))]
    assert columns.box((7, 5), 1) == ((0, 2), (7, 2))
    assert columns.box((7, 5), 3) == ((0, 5), (7, 0))
    assert columns.box((11,), 3) == ((0,), (11,))
    assert layout_of("DDP 4").box((7, 5), 3) == ((0, 0), (7, 5))
    assert [layout_of("HSDP 2x2").box((7, 5), rank)[0] for rank in range(4)] == [(0, 0), (4, 0), (0, 0), (4, 0)]
    rows = layout_of("FSDP 2 x TP 2, rows")
    assert [rows.box((8, 4), rank)[0][0] for rank in range(4)] == [0, 2, 4, 6]
    assert [rows.box((8,), rank) for rank in range(4)] == [((0,), (4,)), ((0,), (4,)), ((4,), (4,)), ((4,), (4,))]


def test_needed_bytes_are_those_of_the_local_tensors() -> None:
    spec = {"matrix": TensorSpec((7, 5), torch.bfloat16), "vector": TensorSpec((11,), torch.float32)}
    assert needed_bytes(spec, layout_of("FSDP 3")) == [3 * 5 * 2 + 4 * 4, 3 * 5 * 2 + 4 * 4, 1 * 5 * 2 + 3 * 4]
    assert needed_bytes(spec, layout_of("TP 4, columns")) == [28 + 44, 28 + 44, 14 + 44, 44]
    assert needed_bytes(spec, layout_of("DDP 4")) == [70 + 44] * 4


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_unique_bytes_are_those_of_the_state(layout: Layout) -> None:
    spec = {str(shape): TensorSpec(shape, torch.float32) for shape in SHAPES}
    assert unique_bytes(spec, layout) == sum(4 * math.prod(shape) for shape in SHAPES)


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


# --- what is loaded -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_box_has_the_values_of_the_whole(dtype: torch.dtype) -> None:
    spec = TensorSpec((7, 5), dtype)
    whole = values("a", spec, ((0, 0), (7, 5)))
    assert whole.dtype == dtype
    assert torch.isfinite(whole).all()
    assert whole.unique().numel() == 35
    assert torch.equal(values("a", spec, ((2, 1), (4, 3))), whole[2:6, 1:4])
    assert not torch.equal(values("b", spec, ((0, 0), (7, 5))), whole)


def test_a_wrong_value_is_noticed() -> None:
    spec = {"a": TensorSpec((7, 5), torch.bfloat16)}
    state = make_state(spec, PLAIN, 0, filled=True)
    check_state(state, spec, PLAIN, 0)
    state["a"].view(torch.int16)[6, 4] += 1
    with pytest.raises(RuntimeError, match="a was not loaded"):
        check_state(state, spec, PLAIN, 0)
    state = make_state(spec, PLAIN, 0, filled=False)
    with pytest.raises(RuntimeError, match="a was not loaded"):
        check_state(state, spec, PLAIN, 0)
    state["a"] = values("a", spec["a"], ((0, 0), (7, 5)))
    state |= OBJECTS
    with pytest.raises(RuntimeError, match=STEP):
        check_state(state, spec, PLAIN, 0)
    state[STEP].fill_(STEP_VALUE)
    check_state(state, spec, PLAIN, 0)


def test_the_state_is_of_two_dtypes_and_about_the_size_asked_for() -> None:
    spec = llama_spec(32 * MIB, layers=3)
    assert 32 * MIB <= sum(tensor.nbytes for tensor in spec.values()) < 48 * MIB
    assert {tensor.dtype for tensor in spec.values()} == {torch.bfloat16, torch.float32}
    assert {len(tensor.shape) for tensor in spec.values()} == {1, 2}


# --- figures --------------------------------------------------------------------------------------


def _load(**other: Any) -> Load:
    fields: dict[str, Any] = {
        "case": "hsdp", "backend": "dcp_s3", "round": 1, "needed_bytes": [50, 50, 30, 70], "unique_bytes": 100,
        "fetched_bytes": [40, 30, 0, 35], "total_bytes": 106, "metadata_bytes": 2, "gets": 5, "requests": 6,
        "seconds": 1.0, "cpu_seconds": 2.0,
    }  # fmt: skip
    return Load(**fields | other)


def test_ratios() -> None:
    load = _load()
    assert load.ratio("needed") == pytest.approx(0.53)
    assert load.ratio("unique") == pytest.approx(1.06)
    assert load.largest_ratio == pytest.approx(40 / 70)


def test_a_target_is_missed_by_the_worst_round_of_the_default_settings() -> None:
    good = [_load(total_bytes=105), _load(backend="fsspec", total_bytes=999), _load(case="same", total_bytes=204)]
    assert find_misses(good) == []
    (miss,) = find_misses([*good, _load(round=2), _load(round=3, total_bytes=100)])
    assert (miss.case, miss.ratio) == ("hsdp", pytest.approx(1.06))
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


def test_the_report_has_a_line_for_each_case_and_backend(tmp_path: Path) -> None:
    results = Results(machine(), {}, [_load(), _load(backend="fsspec"), _load(case="same")])
    console = Console(record=True, width=200)
    show(results, console)
    rows = [line.split("|") for line in console.export_text().splitlines() if "dcp_s3 " in line or "fsspec" in line]
    assert [[cell.strip() for cell in row[1:3]] for row in rows] == [
        ["same: FSDP 4 -> FSDP 4", "dcp_s3"], ["hsdp: HSDP 2x2 -> HSDP 2x2", "dcp_s3"], ["", "fsspec"],
    ]  # fmt: skip
    assert [cell.strip() for cell in rows[1][6:9]] == ["0.530", "1.060", "0.571"]
    assert rows[1][-2].strip() == "1.05 unique"
    save_chart(results, tmp_path / "chart.png")
    assert (tmp_path / "chart.png").stat().st_size > 0


# --- a quick run ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a quick run of dcp_s3 wrote, and its exit status."""
    file = tmp_path_factory.mktemp("reshard") / "reshard.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["reshard", "--quick", "--backends", "dcp_s3", "--out", str(file)])
        try:
            reshard.main()
            status: Any = 0
        except SystemExit as error:
            status = error.code
    assert file.with_suffix(".png").stat().st_size > 0
    return json.loads(file.read_text()) | {"status": status}


@pytest.mark.soak
def test_a_quick_run_loads_every_case(quick: dict[str, Any]) -> None:
    assert quick["failures"] == {}
    assert sorted(load["case"] for load in quick["loads"]) == sorted(CASES)
    for fields in quick["loads"]:
        load = Load(**fields)
        layout = CASES[load.case].target
        assert len(load.needed_bytes) == len(load.fetched_bytes) == layout.ranks
        assert load.total_bytes >= load.unique_bytes
        assert sum(load.fetched_bytes) == load.total_bytes  # nothing but GET
        assert 0 < load.metadata_bytes < load.total_bytes
        assert load.gets <= load.requests
        assert min(load.seconds, load.cpu_seconds) > 0


@pytest.mark.soak
@pytest.mark.parametrize("name", CASES)
def test_a_quick_run_fetches_what_the_target_allows(name: str, quick: dict[str, Any]) -> None:
    case = CASES[name]
    (load,) = [Load(**fields) for fields in quick["loads"] if fields["case"] == name]
    assert load.ratio(case.of) <= case.limit


@pytest.mark.soak
def test_the_exit_status_is_that_of_the_targets(quick: dict[str, Any]) -> None:
    missed = find_misses([Load(**fields) for fields in quick["loads"]])
    assert quick["status"] == (1 if missed else 0)


# --- around it ------------------------------------------------------------------------------------


def test_every_checkpoint_is_saved_before_it_is_loaded() -> None:
    assert reshard.schedule(list(CASES), 2) == [
        (1, 8, True), (1, 2, True), *((number, ranks, False) for number in (1, 2) for ranks in (4, 2, 3)),
    ]  # fmt: skip
    assert reshard.schedule(["8to3"], 1) == [(1, 8, True), (1, 3, False)]
    assert reshard.schedule(["4to2", "2to4"], 1) == [(1, 2, True), (1, 4, False), (1, 2, False)]


COUNTED = Counters({"GetObject": 3}, bytes_out=40, reads={Reader("rank-0", "a"): Reads(3, 40)})


def _measured(monkeypatch: pytest.MonkeyPatch, answers: list[Any]) -> tuple[Results, str]:
    """What is made of the ranks' answers, or their failures."""

    def run(*_: Any, **__: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    monkeypatch.setattr(reshard, "run_ranks", run)
    monkeypatch.setattr(reshard, "serve_embedded", lambda *_: contextlib.nullcontext(("http://server", {})))
    results, said = Results(machine(), {}), []
    reshard.measure(SPEC, ["4to2"], ["dcp_s3", "fsspec"], 1, results, said.append)
    return results, "\n".join(said)


def test_costs_of_the_ranks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Cost(2.0, 0.5, COUNTED), Cost(3.0, 0.25, None)
    results, _ = _measured(monkeypatch, [[[]] * 4, [[first, first], [second, second]]])
    assert [load.backend for load in results.loads] == ["dcp_s3", "fsspec"]
    load = results.loads[0]
    assert (load.seconds, load.cpu_seconds, load.gets) == (3.0, 0.75, 3)
    assert (load.needed_bytes, load.unique_bytes, load.fetched_bytes) == ([64, 64], 128, [40, 0])


def test_a_backend_that_fails_is_noted_and_the_others_count(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Cost(0.0, 0.0, None, "OSError: no room")
    cost = Cost(1.0, 1.0, COUNTED)
    results, said = _measured(monkeypatch, [[[]] * 4, [[failed, cost], [failed, cost]]])
    assert [load.backend for load in results.loads] == ["fsspec"]
    assert results.failures == {"4to2 dcp_s3": ["OSError: no room"]}
    assert "no room" in said


def test_ranks_that_fail_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    results, said = _measured(monkeypatch, [[[]] * 4, RankFailed(1, "OSError: no room", None)])
    assert results.loads == []
    assert "OSError: no room" in results.failures["2 ranks"][0]
    assert "no room" in said
