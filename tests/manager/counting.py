"""Counts the collectives of a process."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_HARMLESS = ("get_", "is_", "destroy_", "record_comm", "init_process_group")


def collectives() -> list[str]:
    """The names of all functions of torch.distributed in which ranks meet, or make a group in which they do."""
    found = {name: value for name, value in vars(distributed_c10d).items() if name != "reduce_op"}  # which warns
    return sorted(
        name
        for name, function in found.items()
        if inspect.isfunction(function)
        and function.__module__ == distributed_c10d.__name__
        and not name.startswith(_HARMLESS)
        and (not name.startswith("_") or name.endswith("_base"))
        and ("group" in inspect.signature(function).parameters or "group" in name or "isend" in name)
    )


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The collectives of this process meanwhile, by name; those that do not go through Python, and new groups, too."""
    called: list[str] = []
    before = {name: getattr(distributed_c10d, name) for name in collectives()}

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return function(*args, **kwargs)

        return call

    groups, sequence = _groups(), _sequence()
    for name, function in before.items():
        for module in (distributed_c10d, dist):
            if getattr(module, name, None) is function:
                setattr(module, name, wrap(name, function))
    try:
        yield called
    finally:
        for name, function in before.items():
            for module in (distributed_c10d, dist):
                if hasattr(module, name):
                    setattr(module, name, function)
        called += ["a collective of a group"] * (_sequence() - sequence) + ["a new group"] * (_groups() - groups)


def _groups() -> int:
    return distributed_c10d.get_pg_count() if dist.is_initialized() else 0


def _sequence() -> int:
    """Collectives so far of the groups that there are, as their backends count them."""
    return sum(group._get_sequence_number_for_group() for group in list(distributed_c10d._world.pg_map))
