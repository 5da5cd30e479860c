"""What benchmarks compute from their samples, by value, and what their reports show."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks.llama import llama_bytes, llama_shapes
from benchmarks.measure import measure
from benchmarks.ranks import Cost, summed_up, training_spec
from benchmarks.ranks import Sample as RanksSample
from benchmarks.reshard_cases import CASES, Layout, TensorSpec, needed_bytes, unique_bytes
from benchmarks.reshard_report import Load, find_misses
from benchmarks.reshard_worker import check_state, make_state
from benchmarks.units import GIB, MIB
from tests.ranks import run_ranks

LAYOUTS = list(dict.fromkeys(layout for case in CASES.values() for layout in (case.source, case.target)))
#: Uneven, fewer rows than ranks, empty.
SHAPES = [(8, 4), (7, 5), (2, 9), (11,), (2,), (0, 4)]


# --- sizes and costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [200 * MIB, GIB, 100 * GIB])
def test_states_have_about_the_size_asked_for(size: int) -> None:
    assert size <= llama_bytes(size) <= 1.3 * size
    parameters = sum(math.prod(shape) for shape in llama_shapes(size * 4 // 14, layers=32).values())
    assert sum(tensor.nbytes for tensor in training_spec(size).values()) == 14 * parameters


def test_peak_memory_is_that_of_the_operation() -> None:
    assert 60 * MIB < measure(lambda: bytearray(b"\1") * (64 * MIB)).peak_bytes < 100 * MIB


def test_the_slowest_rank_counts_and_the_cpu_of_all() -> None:
    first = [[Cost(1.0, 2.0, 0.1, 0.2), Cost(5.0, 6.0, 0.5, 0.6)]]
    second = [[Cost(3.0, 1.0, 0.3, 0.4), Cost(4.0, 7.0, 0.7, 0.8)]]
    assert summed_up([first, second], ["a", "b"], 100) == [
        RanksSample(2, "a", 1, 100, 3.0, 2.0, pytest.approx(0.4), pytest.approx(0.6)),
        RanksSample(2, "b", 1, 100, 5.0, 7.0, pytest.approx(1.2), pytest.approx(1.4)),
    ]


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
