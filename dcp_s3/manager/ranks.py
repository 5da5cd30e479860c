"""What the ranks of a run agree on, by small collectives on objects."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dcp_s3.errors import CheckpointError

T = TypeVar("T")


class Ranks:
    """The ranks of a process group; one rank where there is none.

    Args:
        group: its collectives run on the CPU. None: a new group (gloo) of all ranks, which every rank must then make
            at the same time, or no group if torch.distributed is not initialised.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        if group is None and distributed:
            # Saves run beside the training, whose collectives must not mix with theirs.
            group = dist.new_group(backend="gloo")
        self.group = group
        self.rank = dist.get_rank(group) if distributed else 0
        self.size = dist.get_world_size(group) if distributed else 1

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one that decides."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """What each rank gave, in rank order, on all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_first(self, function: Callable[[], T]) -> T:
        """What ``function`` returns on the first rank, where alone it runs; what it raises is raised on all."""
        if self.size == 1:
            return function()
        answer: list[Any] = [None]
        if self.is_first:
            try:
                answer = [(True, function())]
            except Exception as error:  # noqa: BLE001 - it goes to all ranks
                answer = [(False, portable(error))]
        dist.broadcast_object_list(answer, group=self.group, group_src=0)
        done, value = answer[0]
        if not done:
            raise value
        found: T = value
        return found


def portable(error: BaseException) -> BaseException:
    """The error without what it holds on to, or one of ours with its text if it could not cross to other processes."""
    try:
        copied: BaseException = pickle.loads(pickle.dumps(error))  # noqa: S301 - what was just pickled
    except Exception:  # noqa: BLE001 - whatever its class does
        return CheckpointError(f"{type(error).__name__}: {error}")
    return copied
