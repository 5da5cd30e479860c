"""What limits a benchmark, from figures alone; and whether its ranks notice what was not saved or loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dcp_s3 import bench
from dcp_s3.bench import BenchReport, Finding, Transfer, join
from dcp_s3.errors import CorruptCheckpointError

MIB, GIB = 2**20, 2**30
# 32 connections of 32 MiB/s each, a core of sixteen.
SAVE = Transfer("save", 2, 4 * GIB, 4.0, cpu_seconds=2.0, connections=32, throttled=0, hedged=0)


def report(*transfers: Transfer, ranks: int = 1, cores: int = 16, most_connections: int = 64) -> BenchReport:
    return BenchReport("s3://bucket/run", ranks, cores, most_connections, transfers, removed=True)


def limit(last: Transfer, **host: int) -> Finding:
    [found] = report(last, **host).limits
    return found


def test_the_slowest_rank_counts_and_all_bytes() -> None:
    one = Transfer("load", 1, 4 * GIB, 2.0, cpu_seconds=1.0, connections=8, throttled=0, hedged=1)
    other = Transfer("load", 1, 4 * GIB, 4.0, cpu_seconds=0.5, connections=16, throttled=3, hedged=0)
    both = join([one, other])
    assert both == Transfer("load", 1, 8 * GIB, 4.0, cpu_seconds=1.5, connections=16, throttled=3, hedged=1)
    found = report(both, ranks=2).to_dict()
    assert found["transfers"][0]["bytes_per_second"] == 2 * GIB
    assert found["transfers"][0]["cpu_seconds_per_gib"] == 1.5 / 8
    assert found["bytes_per_rank"] == 4 * GIB


def test_otherwise_it_is_the_network_or_the_server() -> None:
    found = limit(SAVE)
    assert (found.direction, found.cause) == ("save", "network")
    assert "32.0 MiB/s" in found.text
    assert "--ranks 2:" in str(found.suggestion)
    assert limit(SAVE, cores=1).suggestion is None
    # The bytes of four ranks by the connections of four ranks.
    assert "32.0 MiB/s" in limit(replace(SAVE, bytes=4 * SAVE.bytes), ranks=4).text


def test_throttling_counts_more_than_all_else() -> None:
    found = limit(replace(SAVE, throttled=17, cpu_seconds=64.0, connections=64, seconds=0.1))
    assert found.cause == "throttling"
    assert "17 requests" in found.text
    assert "DCP_S3_PART_SIZE=64MiB" in str(found.suggestion)


def test_a_short_transfer_tells_nothing() -> None:
    found = limit(replace(SAVE, bytes=MIB, seconds=0.2))
    assert found.cause == "too_short"
    assert "--size" in str(found.suggestion)


@pytest.mark.parametrize(("cpu_seconds", "cause"), [(50.0, "network"), (52.0, "cpu"), (64.0, "cpu")])
def test_the_cpu_limits_from_four_fifths_on(cpu_seconds: float, cause: str) -> None:
    assert limit(replace(SAVE, cpu_seconds=cpu_seconds)).cause == cause


def test_fewer_ranks_are_suggested_only_if_there_are_more_than_cores() -> None:
    busy = replace(SAVE, cpu_seconds=64.0)
    assert limit(busy).suggestion is None
    assert "at most 16 ranks" in str(limit(busy, ranks=32).suggestion)


def test_connections_at_their_ceiling_ask_for_a_higher_one() -> None:
    found = limit(SAVE, most_connections=32)
    assert found.cause == "ceiling"
    assert "all 32 connections" in found.text
    assert "DCP_S3_CONCURRENCY" in str(found.suggestion)


def test_a_transfer_without_connections_is_no_error() -> None:
    assert limit(replace(SAVE, connections=0)).cause == "network"


def test_each_suggestion_is_made_once() -> None:
    short, again = replace(SAVE, seconds=0.1), replace(SAVE, direction="load", seconds=0.1)
    found = report(SAVE, short, again)
    assert [each.direction for each in found.limits] == ["save", "load"]  # of the last round
    assert found.to_dict()["suggestions"] == [found.limits[0].suggestion]
    assert report(SAVE, cores=1).to_dict()["suggestions"] == []


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
