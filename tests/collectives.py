"""Counts what the ranks of a test say to each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed.checkpoint import utils

_STARTS = (
    "all_", "barrier", "batch_isend", "broadcast", "gather", "irecv", "isend", "monitored", "recv", "reduce", "scatter",
    "send",
)  # fmt: skip
_NAMES = [name for name in c10d.__all__ if name.startswith(_STARTS)]


class Counted:
    """The collectives since the beginning."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Functions of torch.distributed that were called, on any group."""
        self._first = 0
        self._first = self.number

    @property
    def number(self) -> int:
        """Operations that the default group counted, whoever called them."""
        if not dist.is_initialized():
            return 0
        return dist.group.WORLD._get_sequence_number_for_group() - self._first  # type: ignore[union-attr]


@contextlib.contextmanager
def counted() -> Iterator[Counted]:
    """Count the collectives of this process while the body runs. They go through as ever."""
    found = Counted()

    def counting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found.names.append(name)
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in _NAMES:
            function = counting(name, getattr(c10d, name))
            for module in (c10d, dist, utils):
                if hasattr(module, name):
                    patch.setattr(module, name, function)
        yield found
