from __future__ import annotations

from dataclasses import replace

import pytest

from dcp_s3.bench.figures import RankFigures, Transfer, join
from dcp_s3.bench.limits import Surroundings, find_limit, suggestions

MIB, GIB = 2**20, 2**30
HOST = Surroundings(ranks=1, cores=16, most_connections=64, part_size=None)
# 32 connections of 32 MiB/s each, a core of sixteen.
SAVE = Transfer("save", 2, 4 * GIB, 4.0, cpu_seconds=2.0, connections=32, throttled=0, hedged=0)


def test_the_slowest_rank_counts_and_all_bytes() -> None:
    ranks = [RankFigures(2.0, 1.0, 8, 0, 1), RankFigures(4.0, 0.5, 16, 3, 0)]
    both = join("load", 1, 8 * GIB, ranks)
    assert both == Transfer("load", 1, 8 * GIB, 4.0, cpu_seconds=1.5, connections=16, throttled=3, hedged=1)
    assert both.bytes_per_second == 2 * GIB
    assert both.cpu_seconds_per_gib == 1.5 / 8
    assert both.to_dict()["bytes_per_second"] == 2 * GIB


def test_otherwise_it_is_the_network_or_the_server() -> None:
    found = find_limit(SAVE, HOST)
    assert (found.direction, found.cause, found.suggestion) == ("save", "network", None)
    assert "32.0 MiB/s" in found.text


def test_throttling_counts_more_than_all_else() -> None:
    throttled = replace(SAVE, throttled=17, cpu_seconds=64.0, connections=64, seconds=0.1)
    found = find_limit(throttled, HOST)
    assert found.cause == "throttling"
    assert "17 requests" in found.text
    assert found.suggestion is not None
    assert "DCP_S3_PART_SIZE=64MiB" in found.suggestion
    assert find_limit(throttled, replace(HOST, part_size=64 * MIB)).suggestion is None
    assert find_limit(throttled, replace(HOST, part_size=8 * MIB)).suggestion == found.suggestion


def test_a_short_transfer_tells_nothing() -> None:
    found = find_limit(replace(SAVE, bytes=MIB, seconds=0.2), HOST)
    assert found.cause == "too_short"
    assert "--size" in str(found.suggestion)


@pytest.mark.parametrize(("cpu_seconds", "cause"), [(50.0, "network"), (52.0, "cpu"), (64.0, "cpu")])
def test_the_cpu_limits_from_four_fifths_on(cpu_seconds: float, cause: str) -> None:
    assert find_limit(replace(SAVE, cpu_seconds=cpu_seconds), HOST).cause == cause


def test_fewer_ranks_are_suggested_only_if_there_are_more_than_cores() -> None:
    busy = replace(SAVE, cpu_seconds=64.0)
    assert find_limit(busy, HOST).suggestion is None
    assert "at most 16 ranks" in str(find_limit(busy, replace(HOST, ranks=32)).suggestion)


@pytest.mark.parametrize(("most", "suggested"), [(32, 64), (300, 512), (512, None)])
def test_connections_at_their_ceiling_ask_for_a_higher_one(most: int, suggested: int | None) -> None:
    found = find_limit(replace(SAVE, connections=most), replace(HOST, most_connections=most))
    assert found.cause == "ceiling"
    assert f"all {most} connections" in found.text
    if suggested is None:
        assert found.suggestion is None
    else:
        assert f"DCP_S3_CONCURRENCY={suggested}:" in str(found.suggestion)


def test_connections_as_fast_as_those_of_s3_are_named() -> None:
    each_90 = replace(SAVE, bytes=4 * 32 * 90 * MIB)
    found = find_limit(each_90, HOST)
    assert found.cause == "connection"
    assert "90.0 MiB/s" in found.text
    assert "--ranks 2:" in str(found.suggestion)
    assert find_limit(each_90, replace(HOST, cores=1)).suggestion is None
    # The bytes of four ranks by the connections of four ranks.
    assert "90.0 MiB/s" in find_limit(replace(each_90, bytes=4 * each_90.bytes), replace(HOST, ranks=4)).text


def test_a_transfer_without_connections_is_no_error() -> None:
    assert find_limit(replace(SAVE, connections=0), HOST).cause == "network"


def test_each_suggestion_is_made_once() -> None:
    short = find_limit(replace(SAVE, seconds=0.1), HOST)
    again = find_limit(replace(SAVE, direction="load", seconds=0.1), HOST)
    assert suggestions([short, again]) == [short.suggestion]
    assert suggestions([find_limit(SAVE, HOST)]) == []
