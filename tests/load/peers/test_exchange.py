"""What ends an exchange of pieces, whatever fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dcp_s3.load.peers.exchange import Exchange

pytestmark = [pytest.mark.timeout(60)]


class _Unsayable(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _refuse() -> None:
    raise RuntimeError("out of threads")


def _exchange(on_failure: Callable[[], None] = lambda: None) -> Exchange:
    group: Any = None  # nothing is sent
    exchange = Exchange(group, 0, [], [], url="s3://bucket/run", threads=1, memory=1 << 20, on_failure=on_failure)
    exchange.prepare()
    return exchange


@pytest.mark.parametrize("on_failure", [lambda: None, _refuse])
def test_an_interrupt_ends_it_though_nothing_can_be_said_or_cancelled(on_failure: Callable[[], None]) -> None:
    exchange, error = _exchange(on_failure), _Unsayable()
    exchange.interrupt(error)
    exchange.start()
    exchange.join()
    assert exchange.error is error


def test_the_first_failure_counts() -> None:
    exchange, first = _exchange(), ValueError("first")
    exchange.fail(first)
    exchange.interrupt(KeyboardInterrupt())
    exchange.start()
    exchange.join()
    assert exchange.error is first
