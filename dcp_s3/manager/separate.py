"""Ranks that do not wait for each other: no collectives. What has to be the same on all goes through a board."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from dcp_s3 import ranks
from dcp_s3.coordination.board import Board, open_board
from dcp_s3.coordination.identity import current_attempt
from dcp_s3.errors import CheckpointError, SaveProtocolError
from dcp_s3.manager.choosing import ChosenCheckpoint
from dcp_s3.manager.ranks import Failures, Ranks
from dcp_s3.settings import Settings, SettingsLike, launch, resolve_settings
from dcp_s3.url import CheckpointURL

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
        SettingsError
    """
    resolved = resolve_settings(settings)
    if read_only and not ranks.is_initialized():
        found = launch()
        return SeparateRanks(found.rank, found.world_size)
    attempt = current_attempt(resolved)
    return SeparateRanks(attempt.rank, attempt.world_size)


def open_notes(root: CheckpointURL, settings: Settings, of: Ranks, read_only: bool) -> Notes | None:
    """The notes of the ranks of a manager; None if there is only one, or if they could not write any.

    Args:
        root: URL of the run.
        settings: settings of the manager.
        of: the ranks.
        read_only: whether nothing may be written to S3.
    """
    if of.size == 1 or (read_only and not ranks.is_initialized()):
        return None
    board = open_board(root, current_attempt(settings), settings)
    return Notes(board, f"{root} {read_only}", tidies=of.is_first)


class _Numbers:
    """How many there were of each name in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: Counter[str] = Counter()

    def take(self, name: str) -> int:
        with self._lock:
            number = self._next[name]
            self._next[name] += 1
            return number


_numbers = _Numbers()


class Notes:
    """What the ranks of one manager tell each other on a board.

    The notes of a kind are numbered. The ranks come to each number in the same order, but at any time, and what one
    of them has said there first stands for all.

    Args:
        board: the board of this attempt.
        about: what the manager is for. Those of a process for the same are told apart by the order of their first
            notes.
        tidies: whether this rank removes notes that no rank needs any more.
    """

    def __init__(self, board: Board, about: str, *, tidies: bool = False) -> None:
        self._board, self._tidies = board, tidies
        self._about = hashlib.blake2b(about.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        self._number: int | None = None
        self._next = {"restore": 0, "look": 0}
        self._kept = {"restore": 0, "look": 0}

    def choose(self, request: object, find: Callable[[], ChosenCheckpoint | None]) -> ChosenCheckpoint | None:
        """The checkpoint to restore; None: there is none. The same until `restored`, for a rank that tries again.

        Args:
            request: what was asked for. The ranks have to ask for the same.
            find: chooses, if no rank has.

        Raises:
            CheckpointError: another rank asks for something else.
            StorageError: the board does not answer.
        """
        asked = repr(request)
        theirs, found = self._settle("restore", lambda: [asked, find()])
        if theirs != asked:
            raise CheckpointError(
                f"the ranks restore different checkpoints: this one asks for {asked} (step, metric, mode), another one "
                f"for {theirs}. Remedy: call restore with the same arguments on all"
            )
        return None if found is None else ChosenCheckpoint(*found)

    def restored(self) -> None:
        """This rank has loaded what was chosen, or there is nothing."""
        self._next["restore"] += 1

    def decide(self, step: int, decide: Callable[[bool], tuple[int, int]], *, seen: bool) -> tuple[int, int, bool]:
        """Whether to save a step: answer, steps until the next look, and whether SIGTERM has come to a rank.

        Args:
            step: the step. The ranks have to ask about the same.
            decide: decides, if no rank has, from whether SIGTERM has come.
            seen: whether SIGTERM has come to this rank.

        Raises:
            SaveProtocolError: another rank asks about another step.
            StorageError: the board does not answer.
        """
        told = f"sigterm-{self._name}"
        if seen:
            self._board.offer(told, "1")

        def first() -> list[object]:
            known = seen or self._board.look(told) is not None
            return [step, *decide(known), known]

        asked, answer, gap, known = self._settle("look", first)
        if asked != step:
            raise SaveProtocolError(
                f"the ranks ask whether to save different steps: {min(asked, step)} to {max(asked, step)}. Remedy: "
                "call should_save and save with the same step on all"
            )
        self._next["look"] += 1
        return answer, gap, known

    def passed(self) -> Callable[[], None]:
        """Removes the notes so far. To be called when all ranks have come past them: when a save that this rank begins
        now is committed."""
        until = dict(self._next)

        def remove() -> None:
            for kind, end in until.items() if self._tidies else ():
                begin, self._kept[kind] = self._kept[kind], max(end, self._kept[kind])
                for number in range(begin, end):
                    self._board.remove(self._key(kind, number))

        return remove

    def _settle(self, kind: str, say: Callable[[], list[object]]) -> Any:
        key = self._key(kind, self._next[kind])
        stands = self._board.look(key)
        if stands is None:
            stands = self._board.offer(key, json.dumps(say()))
        return json.loads(stands)

    @property
    def _name(self) -> str:
        if self._number is None:
            self._number = _numbers.take(self._about)
        return f"{self._about}-{self._number}"

    def _key(self, kind: str, number: int) -> str:
        return f"{kind}-{self._name}-{number}"
