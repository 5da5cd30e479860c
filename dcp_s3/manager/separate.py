"""Ranks that do not wait for each other: no collectives. What has to be the same on all goes through a board."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from dcp_s3 import ranks
from dcp_s3.coordination.board import open_board
from dcp_s3.coordination.identity import CountedSave, current_attempt
from dcp_s3.coordination.not_begun import enter_save, leave, take_back
from dcp_s3.errors import SaveProtocolError
from dcp_s3.manager.agreement import Run, differing
from dcp_s3.manager.notes import Notes, numbers
from dcp_s3.manager.ranks import Failures, Ranks
from dcp_s3.settings import Settings, SettingsLike, launch, resolve_settings
from dcp_s3.url import CheckpointURL, parse_url

T = TypeVar("T")


class SeparateRanks(Ranks):
    """The ranks of a job without a process group: each goes on alone, and fails alone.

    Args:
        rank: rank of this process in the job.
        size: number of ranks of the job.
    """

    collective = False

    def __init__(self, rank: int, size: int) -> None:
        self.group, self.rank, self.size = None, rank, size
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

    def agree(self, work: Callable[[], T], refuse: Callable[[Failures], Exception], *, alike: bool = False) -> list[T]:
        """Run ``work`` on this rank alone. Returns its result alone.

        Args:
            work: the work.
            refuse: makes the error, if ``alike``. Otherwise what ``work`` raised is raised.
            alike: see `Ranks.agree`.
        """
        try:
            return [work()]
        except Exception as error:
            if not alike:
                raise
            raise refuse({self.rank: error}) from error

    def from_first(self, function: Callable[[], T]) -> T:
        """The result of ``function`` on this rank. What must be the same on all ranks is for `Notes`."""
        return function()


def separate_ranks(settings: SettingsLike, read_only: bool) -> SeparateRanks:
    """The ranks of this job.

    Args:
        settings: those of the manager.
        read_only: whether nothing is saved. Then the attempt need not be known.

    Raises:
        SaveProtocolError: several ranks are to save, and nothing tells this attempt of the job from another one.
        SettingsError: a setting is not allowed.
    """
    resolved = resolve_settings(settings)
    if read_only and not ranks.is_initialized():
        found = launch()
        return SeparateRanks(found.rank, found.world_size)
    attempt = current_attempt(resolved)
    return SeparateRanks(attempt.rank, attempt.world_size)


def open_notes(run: Run, root: CheckpointURL, settings: Settings, of: Ranks) -> Notes | None:
    """The notes of the ranks of a manager; None if there is only one, or if they could not write any.

    Args:
        run: the manager.
        root: URL of the run.
        settings: settings of the manager.
        of: the ranks.

    Raises:
        CheckpointError: the ranks differ. On S3 those of another root do not meet, and so do not find out.
        StorageError: the board does not answer.
    """
    if of.size == 1 or (run.read_only and not ranks.is_initialized()):
        return None
    board = open_board(root, current_attempt(settings), settings)
    if board.nearby and not run.read_only:
        number = numbers.next("manager")
        theirs = board.offer(f"manager-{number}", repr(tuple(run)))
        if theirs != repr(tuple(run)):
            raise differing({"this rank": tuple(run), "another one": theirs})
        numbers.take("manager")
    return Notes(board, f"{root} {run.read_only}", tidies=of.is_first)
