"""The number of connections finds the link, in simulation."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3.s3.connections import Width, first_width

MIB = 2**20
TICK = 0.05


@dataclass
class Link:
    """Carries ``each`` bytes per second on a connection, ``total`` on all of them."""

    each: float
    total: float
    latency: float = 0.06
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._open = 0
        self._opening = 0.0

    def carry(self, connections: int, seconds: float) -> int:
        """Bytes moved in ``seconds``; connections that were just made carry nothing before their first answer."""
        if connections > self._open and self._opening <= 0:
            self._opening = self.latency
        self._open = min(self._open, connections)
        if self._opening > 0:
            self._opening -= seconds
            if self._opening <= 0:
                self._open = connections
        rate = min(self._open * self.each, self.total) * (1 + self._random.uniform(-self.noise, self.noise))
        return int(rate * seconds)

    def best(self, most: int) -> float:
        return min(most * self.each, self.total)


def run(width: Width, link: Link, seconds: float, most: int = 64) -> float:
    """Bytes per second over ``seconds``."""
    moved = 0
    for _ in range(round(seconds / TICK)):
        count = link.carry(width.connections, TICK)
        width.moved(TICK, count, most)
        moved += count
    return moved / seconds


@given(
    each=st.floats(10 * MIB, 500 * MIB),
    total=st.floats(100 * MIB, 8000 * MIB),
    first=st.integers(8, 32),
    latency=st.floats(0.001, 0.1),
    noise=st.floats(0, 0.04),
    seed=st.integers(0, 99),
)
def test_what_is_found_fills_the_link(
    each: float, total: float, first: int, latency: float, noise: float, seed: int
) -> None:
    width, link = Width(first), Link(each, total, latency, noise, seed)
    run(width, link, 3.0)
    assert run(width, link, 2.0) >= 0.8 * link.best(64)


@given(each=st.floats(50 * MIB, 500 * MIB), total=st.floats(100 * MIB, 8000 * MIB), first=st.integers(8, 32))
def test_connections_stop_where_throughput_does(each: float, total: float, first: int) -> None:
    width, link = Width(first), Link(each, total, latency=0.001)
    run(width, link, 5.0, most=512)
    assert width.connections <= max(first, 32, 2.2 * total / each)


def test_a_link_that_one_size_fills_is_left_alone() -> None:
    width, link = Width(16), Link(2000 * MIB, 1800 * MIB)
    run(width, link, 3.0)
    assert width.connections == 16


def test_what_was_found_is_tried_again() -> None:
    width, link = Width(16), Link(85 * MIB, 1000 * MIB)
    run(width, link, 3.0)
    assert width.connections == 16
    link.total = 4000 * MIB  # the other tenant of the host is gone
    run(width, link, 30.0)
    assert width.connections == 64


def test_what_a_transfer_will_likely_come_to() -> None:
    assert [Width(first).likely for first in (4, 16, 24, 40)] == [8, 32, 32, 40]
    width = Width(8)
    assert width.likely == 16
    run(width, Link(2000 * MIB, 1800 * MIB), 1.0, most=8)
    assert width.likely == 8
    run(width, Link(85 * MIB, 8000 * MIB), 30.0)
    assert width.likely == 64


def test_what_is_interrupted_does_not_count() -> None:
    width = Width(16)
    for _ in range(100):
        width.moved(0.19, 10**9, 64)
        width.interrupted()
    assert width.connections == 16


def test_the_ceiling_holds() -> None:
    width = Width(16)
    run(width, Link(85 * MIB, 9000 * MIB), 3.0, most=24)
    assert width.connections == 24


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"), [(2, 1, 4), (2, 2, 4), (4, 1, 8), (96, 8, 24), (192, 8, 32), (0.5, 1, 4)]
)
def test_the_first_guess(cores: float, ranks: int, expected: int) -> None:
    assert first_width(cores, ranks) == expected
