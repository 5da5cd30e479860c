"""What ends an exchange of pieces, whatever fails."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from dcp_s3.load.peers.assignment import Assignment
from dcp_s3.load.peers.exchange import Exchange

pytestmark = [pytest.mark.timeout(60)]


class _Unsayable(BaseException):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def _refuse() -> None:
    raise RuntimeError("out of threads")


def _exchange(ended: Callable[[], None], on_failure: Callable[[], None] = lambda: None) -> Exchange:
    group: Any = None  # nothing is sent
    with mock.patch.object(dist, "get_rank", return_value=0):
        exchange = Exchange(group, Assignment((), ()), url="s3://bucket/run", on_failure=on_failure, on_end=ended)
    exchange.start()
    return exchange


@pytest.mark.parametrize("on_failure", [lambda: None, _refuse])
def test_an_interrupt_ends_it_though_nothing_can_be_said_or_cancelled(on_failure: Callable[[], None]) -> None:
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()
    exchange, error = _exchange(lambda: ended.put(None), on_failure), _Unsayable()
    exchange.fail(error)
    ended.get(timeout=30)
    assert exchange.error is error


def test_the_first_failure_counts() -> None:
    ended: queue.SimpleQueue[None] = queue.SimpleQueue()
    exchange, first = _exchange(lambda: ended.put(None)), ValueError("first")
    exchange.fail(first)
    exchange.fail(KeyboardInterrupt())
    ended.get(timeout=30)
    assert exchange.error is first
