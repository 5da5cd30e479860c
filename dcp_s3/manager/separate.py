"""Ranks that do not wait for each other: no collectives. What has to be the same on all goes through a board."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from dcp_s3 import ranks
from dcp_s3.coordination.board import open_board
from dcp_s3.coordination.identity import current_attempt
from dcp_s3.errors import DcpS3Error, SettingsError
from dcp_s3.manager.agreement import Run, differing
from dcp_s3.manager.notes import Notes, numbers
from dcp_s3.manager.ranks import Failures, Ranks
from dcp_s3.save.without_collectives import tell_superseded as tell_others
from dcp_s3.settings import Settings, SettingsLike, launch, resolve_settings
from dcp_s3.url import CheckpointURL, parse_url
from dcp_s3.workers import InTurn

logger = logging.getLogger(__name__)

T = TypeVar("T")

_telling = InTurn("dcp_s3-superseded")


class SeparateRanks(Ranks):
    """The ranks of a job without a process group: each goes on alone, and fails alone.

    Args:
        rank: rank of this process in the job.
        size: number of ranks of the job.
    """

    collective = False

    def __init__(self, rank: int, size: int) -> None:
        self.group, self.rank, self.size = None, rank, size

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
        SettingsError: a setting is not allowed, or ``merge_ranks`` is off.
    """
    resolved = resolve_settings(settings)
    if not resolved.merge_ranks:
        raise SettingsError(
            "a CheckpointManager with coordination='s3' makes one checkpoint of all ranks, which DCP_S3_MERGE_RANKS=0 "
            "turns off. Remedy: unset it"
        )
    if read_only and not ranks.is_initialized():
        found = launch()
        return SeparateRanks(found.rank, found.world_size)
    attempt = current_attempt(resolved)
    return SeparateRanks(attempt.rank, attempt.world_size)


def tell_superseded(settings: Settings, url: str, number: int, step: int, by: int) -> None:
    """Tell the other ranks, in the background, that this one drops a save.

    Args:
        settings: settings of the manager.
        url: URL of the checkpoint.
        number: see `S3StorageWriter.number`.
        step: step of the save.
        by: the newer step.
    """

    def tell() -> None:
        try:
            tell_others(parse_url(url), settings, number=number, step=step, by=by)
        except DcpS3Error as error:
            logger.warning("the other ranks are not told that step %d is superseded: %s", step, error)

    _telling.submit(tell)


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
