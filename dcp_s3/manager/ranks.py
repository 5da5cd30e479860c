"""What the ranks of a run agree on, by small collectives on objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dcp_s3.errors import CheckpointError
from dcp_s3.tracebacks import portable

T = TypeVar("T")
Failures = dict[int, BaseException]
"""Causes by rank."""


class Ranks:
    """The ranks of a process group; one rank where there is none.

    Args:
        group: its collectives run on the CPU. None: a new group (gloo) of all ranks, which every rank must then make
            at the same time, or no group if torch.distributed is not initialised.

    Raises:
        CheckpointError: this process is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        if group is None and distributed:
            # Saves run beside the training, whose collectives must not mix with theirs.
            group = dist.new_group(backend="gloo")
        self.group = group
        self.rank = dist.get_rank(group) if distributed else 0
        self.size = dist.get_world_size(group) if distributed else 1
        if self.rank < 0:
            raise CheckpointError(
                "this process is not in process_group. Remedy: make the CheckpointManager on the ranks of the group "
                "only, or leave process_group out"
            )

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

    def agree(self, work: Callable[[], T], refuse: Callable[[Failures], Exception], *, alike: bool = False) -> list[T]:
        """What ``work`` returns on each rank, in rank order. If it raises on one, all raise.

        What can fail on one rank alone belongs in here: the others wait in their next collective for whoever left.

        Args:
            work: without collectives.
            refuse: makes the error of the ranks on which it did not fail. The others raise what ``work`` raised.
            alike: they raise what ``refuse`` makes, too, with that as the cause: ``work`` calls what is not ours.
        """
        failure: BaseException | None = None
        value: T | None = None
        try:
            value = work()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other ranks wait for this one
            failure = error
        answers = self.gather((value, None if failure is None else for_others(failure)))
        if failure is not None and not (alike and isinstance(failure, Exception)):
            raise failure
        failures = {rank: error for rank, (_, error) in enumerate(answers) if error is not None}
        if failures:
            raise refuse(failures) from failure
        values: list[Any] = [value for value, _ in answers]
        return values

    def from_first(self, function: Callable[[], T]) -> T:
        """What ``function`` returns on the first rank, where alone it runs; what it raises is raised on all."""
        if self.size == 1:
            return function()
        answer: list[Any] = [None]
        failure: BaseException | None = None
        if self.is_first:
            try:
                answer = [(True, function())]
            except BaseException as error:  # noqa: BLE001 - it goes to all ranks
                failure = error
                answer = [(False, for_others(error))]
        dist.broadcast_object_list(answer, group=self.group, group_src=0)
        if failure is not None:
            raise failure
        done, value = answer[0]
        if not done:
            raise value
        found: T = value
        return found


def for_others(error: BaseException) -> BaseException:
    """The error as the other ranks get it. An interrupt of one rank is none of the others."""
    copied = portable(error) if isinstance(error, Exception) else None
    return copied or CheckpointError(f"{type(error).__name__}: {error}")
