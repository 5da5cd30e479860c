"""What is no tensor reaches the planner in the order of the plan, whichever arrives first, in bounded memory."""

from __future__ import annotations

import io
import random
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.load.peers.exchange import Exchange
from tests.faulty import BUCKET, FaultyServer
from tests.ranks import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"), pytest.mark.timeout(180)]

SMALL = {"part_size": "5MiB"}


class _Recording(DefaultLoadPlanner):
    """Makes a plan in a random order of its own, and sees what it gets."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.expected: list[str] = []
        self.found: list[str] = []
        self.threads: set[int] = set()
        self._seed = seed

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        random.Random(self._seed).shuffle(plan.items)
        self.expected = [item.storage_index.fqn for item in plan.items if item.type == LoadItemType.BYTE_IO]
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found.append(read_item.storage_index.fqn)
        self.threads.add(threading.get_ident())
        super().load_bytes(read_item, value)


def _state(blank: bool = False) -> dict[str, Any]:
    """Objects from a few bytes to more than a request, tensors between them."""
    state: dict[str, Any] = {f"text{n:02}": "" if blank else "x" * 11 ** (n % 7) for n in range(40)}
    return state | {f"w{n:02}": torch.zeros(300, n + 1) if blank else torch.ones(300, n + 1) for n in range(20)}


def _assert_loaded(state: dict[str, Any]) -> None:
    for name, value in _state().items():
        assert torch.equal(state[name], value) if isinstance(value, torch.Tensor) else state[name] == value, name


# --- several ranks, which read together what they share --------------------------------------------------


def _own(rank: int, blank: bool = False) -> dict[str, Any]:
    """Each rank's own objects, which nobody else reads."""
    return {f"text{n:02}-{rank}": "" if blank else f"{rank}" * 5 ** (n % 9) for n in range(20)}


def _load_on_ranks() -> None:
    """What is shared and what is a rank's own, in one order; at once, and in parts because there is little memory."""
    url, rank = f"s3://{BUCKET}/run", dist.get_rank()
    dcp.save({**_state(), **_own(rank)}, storage_writer=S3StorageWriter(url, settings=SMALL))
    for buffers in (512 * 2**20, 2**20):
        for seed in range(2):
            planner, state = _Recording(10 * rank + seed), {**_state(blank=True), **_own(rank, blank=True)}
            reader = S3StorageReader(url, settings=SMALL)
            with (
                mock.patch("dcp_s3.load.fetch.LOAD_BUFFERS", buffers),
                mock.patch.object(Exchange, "provide", autospec=True, side_effect=Exchange.provide) as shared,
            ):
                dcp.load(state, storage_reader=reader, planner=planner)
            assert shared.call_count == 1
            assert planner.found == planner.expected
            assert len(planner.found) == 60
            _assert_loaded(state)
            assert all(state[name] == text for name, text in _own(rank).items())


def test_shared_objects_come_in_the_order_of_the_plan(faulty: FaultyServer) -> None:
    run_ranks(2, _load_on_ranks)
