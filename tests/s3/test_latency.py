"""What is known of how long a GET should take, and how many may be sent twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.s3.hedge import START, Budget, Expected, Latencies

MIB = 2**20
Seconds = st.floats(1e-4, 100)


@given(st.lists(st.tuples(Seconds, Seconds, st.integers(MIB, 64 * MIB)), min_size=8, max_size=300), st.floats(1, 99.9))
def test_the_percentile_is_that_of_the_last_256(samples: list[tuple[float, float, int]], percentile: float) -> None:
    latencies = Latencies()
    for sample in samples:
        latencies.add(*sample)
    expected = latencies.expect(percentile)
    last = samples[-256:]
    for found, values in (
        (expected.head, [head for head, _, _ in last]),
        (expected.per_byte, [body / size for _, body, size in last]),
    ):
        assert found in values
        assert sum(value <= found for value in values) >= len(values) * percentile / 100
        assert sum(value < found for value in values) < len(values) * percentile / 100


@given(st.lists(st.tuples(Seconds, Seconds, st.integers(MIB, 64 * MIB)), max_size=7), st.floats(1, 99))
def test_too_few_say_nothing(samples: list[tuple[float, float, int]], percentile: float) -> None:
    latencies = Latencies()
    for sample in samples:
        latencies.add(*sample)
    assert latencies.expect(percentile) == START


def test_short_bodies_say_nothing_of_the_bandwidth() -> None:
    latencies = Latencies()
    for _ in range(20):
        latencies.add(0.03, 0.001, 10)
    assert latencies.expect(95) == Expected(0.03, START.per_byte)


def test_a_new_sample_counts_at_once() -> None:
    latencies = Latencies()
    for head in range(1, 9):
        latencies.add(head, 1.0, MIB)
    assert latencies.expect(99).head == 8
    latencies.add(9, 1.0, MIB)
    assert latencies.expect(99).head == 9


@given(st.integers(1, 2**30), st.floats(1e-10, 1e-6))
def test_a_block_has_time_for_its_bytes(size: int, per_byte: float) -> None:
    expected = Expected(0.25, per_byte)
    assert expected.seconds(0) == 0.25
    assert size * per_byte <= expected.seconds(size) <= 3 * size * per_byte


@given(st.lists(st.booleans(), max_size=500), st.integers(0, 5), st.integers(5, 20))
def test_the_budget_is_never_overdrawn(requests: list[bool], start: int, most: int) -> None:
    budget, made, twice = Budget(0.1, start, most), 0, 0
    for is_request in requests:
        if is_request:
            budget.earn()
            made += 1
        else:
            was_left = budget.is_left
            assert budget.take() == was_left
            twice += was_left
        assert twice <= start + 0.1 * made + 1e-6
    assert sum(budget.take() for _ in range(100)) <= most


@pytest.mark.parametrize(("requests", "twice"), [(9, 0), (11, 1), (101, 10), (10_000, 16)])
def test_the_budget_is_a_share_of_the_requests(requests: int, twice: int) -> None:
    budget = Budget(0.1, 0, 16)
    for _ in range(requests):
        budget.earn()
    assert sum(budget.take() for _ in range(100)) == twice
