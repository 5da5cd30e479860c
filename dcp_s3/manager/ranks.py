"""The ranks of a run, and what they agree on: by small collectives on objects, or each alone."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from dcp_s3.coordination.identity import CountedSave, current_attempt
from dcp_s3.coordination.not_begun import enter_save, leave, take_back
from dcp_s3.errors import CheckpointError, SaveProtocolError
from dcp_s3.failures import portable
from dcp_s3.ranks import is_initialized
from dcp_s3.settings import Settings, SettingsLike, launch, resolve_settings
from dcp_s3.url import CheckpointURL, parse_url

T = TypeVar("T")
Failures = dict[int, BaseException]
"""Causes by rank."""
Refuse = Callable[[Failures], Exception]
"""Makes the error of the ranks on which nothing failed."""


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
        self._own_group = group is None and distributed
        if self._own_group:
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
        ranks = Ranks(dist.new_group(members, backend="gloo", use_local_synchronization=True))
        ranks._own_group = True
        return ranks

    def close(self) -> None:
        """Let go of the group, and end it if it was made here: no more collectives. Not a collective itself.

        A gloo group that outlives its process's interpreter may abort it: its threads drop tensors of the last
        collective a little later, which needs Python.
        """
        group, self.group = self.group, None
        if self._own_group and group is not None and is_initialized():
            with contextlib.suppress(ValueError):  # destroyed with all others
                dist.destroy_process_group(group)

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

    def agree(self, work: Callable[[], T], refuse: Refuse, *, alike: bool = False) -> list[T]:
        """Run ``work``, without collectives, on each rank. Returns the results in rank order; if it raises on one rank,
        all raise: that rank what it raised, the others what ``refuse`` makes. With ``alike`` all raise that, with the
        original error as the cause: for ``work`` that calls user code.

        Anything that can fail on one rank alone belongs in ``work``: if one rank left, the others would wait for it in
        their next collective.
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


# --- ranks that do not wait for each other -------------------------------------------------------------


class SeparateRanks(Ranks):
    """The ranks of a job without a process group: each goes on alone, and fails alone. What has to be the same on all
    goes through `Notes`."""

    collective = False

    def __init__(self, rank: int, size: int) -> None:
        self.group, self.rank, self.size = None, rank, size
        self._own_group = False
        self._lock = threading.Lock()
        self._uncommitted: list[tuple[CheckpointURL, CountedSave]] = []

    def enter(self, url: str, settings: Settings) -> CountedSave:
        """See `Ranks.enter`.

        Raises:
            SaveProtocolError: this process is another rank now, or one of another number.
        """
        attempt = current_attempt(settings)
        if (attempt.rank, attempt.world_size) != (self.rank, self.size):
            raise SaveProtocolError(
                f"{url} is not saved: the CheckpointManager was made on rank {self.rank} of {self.size}, which is rank "
                f"{attempt.rank} of {attempt.world_size} now: a process group was made or destroyed since. What this "
                "process holds must not be taken for the whole. Remedy: make the CheckpointManager after "
                "init_process_group(), and close it before destroy_process_group()"
            )
        where = parse_url(url)
        save = enter_save(where, settings)
        with self._lock:
            if all(known is not save for _, known in self._uncommitted):
                self._uncommitted.append((where, save))
        return save

    def leave(self, save: CountedSave | None, url: str, settings: Settings, error: BaseException) -> None:
        """See `Ranks.leave`."""
        if save is not None:
            leave(parse_url(url), settings, save, error)

    def committed(self, save: CountedSave | None) -> None:
        """See `Ranks.committed`."""
        with self._lock:
            self._uncommitted = [each for each in self._uncommitted if each[1] is not save]

    def go_back(self, settings: Settings) -> None:
        """See `Ranks.go_back`."""
        with self._lock:
            uncommitted = list(self._uncommitted)
        for url, save in uncommitted:
            take_back(url, settings, save)
            self.committed(save)

    def apart(self) -> Ranks:
        """These ranks: they have no group that a save could be using."""
        return self

    def gather(self, value: T) -> list[T]:
        """The value of this rank alone."""
        return [value]

    def agree(self, work: Callable[[], T], refuse: Refuse, *, alike: bool = False) -> list[T]:
        """Run ``work`` on this rank alone. Returns its result alone."""
        try:
            return [work()]
        except Exception as error:
            if not alike:
                raise
            raise refuse({self.rank: error}) from error

    def from_first(self, function: Callable[[], T]) -> T:
        """The result of ``function`` on this rank."""
        return function()


def separate_ranks(settings: SettingsLike, read_only: bool) -> SeparateRanks:
    """The ranks of this job, whose attempt need not be known if nothing is saved.

    Raises:
        SaveProtocolError: several ranks are to save, and nothing tells this attempt of the job from another one.
        SettingsError: a setting is not allowed.
    """
    resolved = resolve_settings(settings)
    if read_only and not is_initialized():
        found = launch()
        return SeparateRanks(found.rank, found.world_size)
    attempt = current_attempt(resolved)
    return SeparateRanks(attempt.rank, attempt.world_size)


# --- what must be the same in the managers of all -------------------------------------------------------


class Run(NamedTuple):
    """What must be the same in the managers of all ranks."""

    root: str
    """``s3://bucket/run``."""
    example: str
    """The name of step 12."""
    read_only: bool
    """Whether nothing is saved."""
    asks: bool
    """Whether the ranks have to tell each other which steps to save."""
    save_on_sigterm: bool
    """Whether they have to tell each other of SIGTERM, and end."""
    overlap: str
    """What a save does while an earlier one uploads."""


def agree_on_run(
    ranks: Ranks, configure: Callable[[], tuple[Run, Mapping[str, int | None]]], refuse: Refuse
) -> dict[str, int | None]:
    """Configure the manager on all ranks. Returns what waits on the disks of any of them: steps by URL.

    Raises:
        CheckpointError: the ranks differ.
    """
    told = ranks.agree(configure, refuse)
    runs = {rank: tuple(run) for rank, (run, _) in enumerate(told)}
    if len(set(runs.values())) > 1:
        raise differing(runs, " (by rank)")
    return {url: step for _, waiting in told for url, step in waiting.items()}


def differing(runs: Mapping[Any, object], how: str = "") -> CheckpointError:
    """The error for managers that differ from rank to rank."""
    return CheckpointError(
        "the ranks have different roots, step formats (here of step 12), read_only, save_on_sigterm, overlap or "
        f"should_save (whether it needs more than the step): {dict(runs)}{how}. Remedy: pass the same on all"
    )
