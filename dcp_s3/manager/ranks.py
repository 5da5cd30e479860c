"""Agreement between the ranks of a run, by small collectives on objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from dcp_s3.coordination.identity import CountedSave
from dcp_s3.errors import CheckpointError
from dcp_s3.settings import Settings
from dcp_s3.tracebacks import portable

T = TypeVar("T")
Failures = dict[int, BaseException]
"""Causes by rank."""


class Ranks:
    """The ranks of a process group; a single rank if there is no group.

    Args:
        group: a group whose collectives run on the CPU. None: a new gloo group of all ranks, which every rank must then
            make at the same time; no group if torch.distributed is not initialised.

    Raises:
        CheckpointError: this process is not in the group.
    """

    collective = True
    """Whether the ranks meet in collectives."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        distributed = dist.is_available() and dist.is_initialized()
        if group is None and distributed:
            # Saves run beside the training, and their collectives must not mix.
            group = dist.new_group(backend="gloo")
        self.group = group
        self.rank = dist.get_rank(group) if distributed else 0
        self.size = dist.get_world_size(group) if distributed else 1
        if self.rank < 0:
            raise CheckpointError(
                "this process is not in process_group. Remedy: make the CheckpointManager on the ranks of the group "
                "only, or leave process_group out"
            )

    def enter(self, url: str, settings: Settings) -> CountedSave | None:
        """Count a save that begins on these ranks, if they are not `collective`: see `enter_save`."""
        return None

    def leave(self, save: CountedSave | None, url: str, settings: Settings, error: BaseException) -> None:
        """Note that this rank has failed in a save that was entered."""

    def committed(self, save: CountedSave | None) -> None:
        """Note that a save that was entered is committed."""

    def go_back(self, settings: Settings) -> None:
        """Before an earlier state is restored: what was entered and not committed is never merged with later saves.

        Raises:
            StorageError: that is not certain.
        """

    def apart(self) -> Ranks:
        """The same ranks with a gloo group of their own, for collectives beside those of a save under way. All ranks
        call it at the same time."""
        if self.size == 1:
            return self
        members = dist.get_process_group_ranks(self.group)
        return Ranks(dist.new_group(members, backend="gloo", use_local_synchronization=True))

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that decides."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all ranks in rank order, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def agree(self, work: Callable[[], T], refuse: Callable[[Failures], Exception], *, alike: bool = False) -> list[T]:
        """Run ``work`` on each rank. Returns the results in rank order; if it raises on one rank, all raise.

        Anything that can fail on one rank alone belongs in ``work``: if one rank left, the others would wait for it in
        their next collective.

        Args:
            work: the work; without collectives.
            refuse: makes the error for the ranks on which ``work`` did not fail. The others raise what ``work`` raised.
            alike: all ranks raise what ``refuse`` makes, with the original error as the cause. For ``work`` that calls
                user code.
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
        """Run ``function`` on the first rank only. Its result is returned, or its error raised, on all ranks."""
        if self.size == 1:
            return function()
        answer: list[Any] = [None]
        failure: BaseException | None = None
        if self.is_first:
            try:
                answer = [(True, function())]
            except BaseException as error:  # noqa: BLE001 - passed on to all ranks
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
    """The error as it is sent to the other ranks. An interrupt of one rank does not interrupt them: it becomes a
    `CheckpointError`."""
    copied = portable(error) if isinstance(error, Exception) else None
    return copied or CheckpointError(f"{type(error).__name__}: {error}")
