"""What limits a benchmark, from figures alone; and whether its ranks notice what was not saved or loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dcp_s3 import bench
from dcp_s3.bench import BenchReport, Transfer, join
from dcp_s3.errors import CorruptCheckpointError

GIB = 2**30
# 32 connections of 32 MiB/s each, a core of sixteen.
SAVE = Transfer("save", 2, 4 * GIB, 4.0, cpu_seconds=2.0, connections=32, throttled=0)


def test_the_slowest_rank_counts_and_all_bytes() -> None:
    one = Transfer("load", 1, 4 * GIB, 2.0, cpu_seconds=1.0, connections=8, throttled=0)
    other = Transfer("load", 1, 4 * GIB, 4.0, cpu_seconds=0.5, connections=16, throttled=3)
    assert join([one, other]) == Transfer("load", 1, 8 * GIB, 4.0, cpu_seconds=1.5, connections=16, throttled=3)


@pytest.mark.parametrize(
    ("changes", "host", "text"),
    [
        ({}, {}, "the network or the server: 32 connections of a rank carry 32.0 MiB/s"),
        ({"bytes": 16 * GIB}, {"ranks": 4}, "carry 32.0 MiB/s"),  # the bytes and connections of four ranks
        ({"connections": 0}, {}, "the network or the server"),
        ({"throttled": 17, "cpu_seconds": 64.0, "seconds": 0.1}, {}, "it refused 17 requests"),
        ({"seconds": 0.2}, {}, "too short to tell"),
        ({"cpu_seconds": 50.0}, {}, "the network"),
        ({"cpu_seconds": 52.0}, {}, "the CPU: 1 rank use 81% of 16 cores"),
        ({}, {"most_connections": 32}, "DCP_S3_CONCURRENCY"),
    ],
)
def test_what_limits_it(changes: dict[str, Any], host: dict[str, Any], text: str) -> None:
    known = {"ranks": 1, "cores": 16, "most_connections": 64} | host
    report = BenchReport(
        "s3://bucket/run", transfers=(replace(SAVE, direction="load"), replace(SAVE, **changes)), **known
    )
    assert text in report.limits["save"]


@pytest.fixture
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_TENSOR_BYTES", 1024)


@pytest.mark.usefixtures("_small_tensors")
def test_a_state_has_the_size_that_was_asked_for() -> None:
    sizes = (8, 1024, 1032, 5000)
    assert [sum(each.nbytes for each in bench.make_state(0, size, 1).values()) for size in sizes] == [*sizes]
    assert len(bench.make_state(0, 1032, 1)) == 2


@pytest.mark.usefixtures("_small_tensors")
def test_one_bit_that_differs_is_found_and_so_is_another_round_or_rank() -> None:
    state, again = bench.make_state(0, 5000, 1), bench.make_state(0, 5000, 1)
    bench.check(state, again)
    again["rank-0/tensor-4"][-1] ^= 1
    others = (again, bench.make_state(0, 5000, 2), {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    for other in others:
        with pytest.raises(CorruptCheckpointError, match="rank-0/tensor-"):
            bench.check(state, other)
    theirs = bench.make_state(1, 5000, 1).values()
    assert not any(one.equal(each) for one in state.values() for each in theirs)
