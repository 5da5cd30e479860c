"""Pools, planners and states of the tests of staging."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from dcp_s3.errors import StagingError
from dcp_s3.stage.memory import BufferPool, HostBuffer

MIB = 2**20
PATIENCE = 60.0  # seconds; less than the process group's: whoever fails because a collective timed out is too late


def make_pool(**options: Any) -> BufferPool:
    return BufferPool(**{"limit": None, "generations": 2, "spill_dir": None, **options})


def buffers_of(pool: BufferPool) -> list[HostBuffer]:
    generations_in_use(pool)
    return [*pool._free, *pool._used()]


def generations_in_use(pool: BufferPool) -> int:
    with suppress(StagingError):  # it may be closed
        pool._try([])  # takes back what is free
    return sum(map(bool, pool._in_use))


def frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: frozen(entry) for key, entry in value.items()}
    return [frozen(entry) for entry in value] if isinstance(value, list) else value


class WaitingPlanner(DefaultSavePlanner):
    """Gives out no data before `go` does not block any more: what the save reads, it reads after that."""

    def __init__(self, go: Callable[[], Any]) -> None:
        super().__init__()
        self._go = go

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        self._go()
        return super().resolve_data(write_item)


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
