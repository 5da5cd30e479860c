"""Counts the collectives of a process, as the backends of its groups do, and the groups that it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d


@contextlib.contextmanager
def counted() -> Iterator[dict[str, int]]:
    """The collectives of this process meanwhile, also those that do not go through Python, and new groups."""
    found: dict[str, int] = {}
    groups, collectives = _groups(), _collectives()
    yield found
    found["collectives"] = _collectives() - collectives
    found["groups"] = _groups() - groups


def _groups() -> int:
    return distributed_c10d.get_pg_count() if dist.is_initialized() else 0


def _collectives() -> int:
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    return sum(group._get_sequence_number_for_group() for group in groups)
