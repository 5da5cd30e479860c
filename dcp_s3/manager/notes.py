"""What the ranks of a manager tell each other without collectives: notes on a board."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from dcp_s3.coordination.control_keys import ControlKeys, open_control_keys
from dcp_s3.coordination.processes import current_attempt
from dcp_s3.errors import CheckpointError, SaveProtocolError
from dcp_s3.manager.choosing import ChosenCheckpoint
from dcp_s3.manager.ranks import Ranks, Run, differing
from dcp_s3.ranks import is_initialized
from dcp_s3.settings import Settings
from dcp_s3.url import CheckpointURL


class Numbers:
    """How many there were of each name in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: Counter[str] = Counter()

    def next(self, name: str) -> int:
        """The number that `take` would return."""
        return self._next[name]

    def take(self, name: str) -> int:
        """A number that no other call gets, from 0."""
        with self._lock:
            number = self._next[name]
            self._next[name] += 1
            return number


numbers = Numbers()
"""Those of the managers of this process, by what they are for."""


class Notes:
    """What the ranks of one manager tell each other on a board.

    The ranks come to the same questions in the same order, but at any time. What one of them has answered first stands
    for all. ``about`` is what the manager is for: those of a process for the same are told apart by the order of their
    first notes. One rank ``tidies`` up notes that none needs any more.
    """

    def __init__(self, board: ControlKeys, about: str, *, tidies: bool = False) -> None:
        self._board, self._tidies = board, tidies
        self._about = hashlib.blake2b(about.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
        self._number: int | None = None
        self._restores = self._looks = 0
        self._last_save = "none"
        self._tried: str | None = None
        self._read: list[str] = []  # since the last save began
        self._read_before: list[str] = []  # between that and the one before it

    def choose(self, request: object, find: Callable[[], ChosenCheckpoint | None]) -> ChosenCheckpoint | None:
        """The checkpoint to restore, which ``find`` chooses if no rank has; None: there is none. The same until
        `restored`, for a rank that tries again.

        Raises:
            CheckpointError: another rank asks for something else.
            StorageError: the board does not answer.
        """
        asked = repr(request)
        if self._tried not in (None, asked):
            self._restores += 1  # given up
        self._tried = asked
        # The last save, too: a rank that has lost count must not take an old choice.
        theirs, found = self._settle(f"restore-{self._restores}-{self._last_save}", lambda: [asked, find()])
        if theirs != asked:
            raise CheckpointError(
                f"the ranks restore different checkpoints: this one asks for {asked} (step, metric, mode), another one "
                f"for {theirs}. Remedy: call restore with the same arguments on all"
            )
        return None if found is None else ChosenCheckpoint(*found)

    def restored(self) -> None:
        """This rank has loaded what was chosen, or there is nothing."""
        self._restores += 1
        self._tried = None

    def decide(self, step: int, decide: Callable[[bool], tuple[int, int]], *, seen: bool) -> tuple[int, int, bool]:
        """Whether to save a step: answer, steps until the next look, and whether SIGTERM has come to a rank. If no rank
        has decided yet, ``decide`` does, from whether SIGTERM has come.

        Raises:
            SaveProtocolError: another rank asks about another step.
            StorageError: the board does not answer.
        """
        sigterm = self._key("sigterm")
        if seen:
            self._board.offer(sigterm, "1")

        def first() -> list[object]:
            known = seen or self._board.look(sigterm) is not None
            return [step, *decide(known), known]

        asked, answer, gap, known = self._settle(f"look-{self._looks}", first)
        if asked != step:
            raise SaveProtocolError(
                f"the ranks ask whether to save different steps: {min(asked, step)} to {max(asked, step)}. Remedy: "
                "call should_save and save with the same step on all"
            )
        self._looks += 1
        return answer, gap, known

    def saving(self, step: object) -> Callable[[], None]:
        """The save of a step begins. Returns what removes the notes from before the last one, to be called when this
        one is committed: all ranks have come past them, a rank that a save was committed without, too."""
        self._last_save = str(step) if isinstance(step, int) else self._last_save  # arguments are checked later
        read, self._read_before, self._read = self._read_before, self._read, []

        def remove() -> None:
            if self._tidies and read:
                self._board.remove(*read)  # at once: there may be hundreds, and the save ends after that

        return remove

    def _settle(self, name: str, answer: Callable[[], list[object]]) -> Any:
        key = self._key(name)
        if key not in self._read:
            self._read.append(key)
        stands = self._board.look(key)
        return json.loads(self._board.offer(key, json.dumps(answer())) if stands is None else stands)

    def _key(self, name: str) -> str:
        if self._number is None:
            self._number = numbers.take(self._about)
        return f"{self._about}-{self._number}-{name}"


def open_notes(run: Run, root: CheckpointURL, settings: Settings, of: Ranks) -> Notes | None:
    """The notes of the ranks of a manager; None if there is only one, or if they could not write any.

    Raises:
        CheckpointError: the ranks differ. On S3 those of another root do not meet, and so do not find out.
        StorageError: the board does not answer.
    """
    if of.size == 1 or (run.read_only and not is_initialized()):
        return None
    board = open_control_keys(root, current_attempt(root, settings), settings)
    if board.nearby and not run.read_only:
        number = numbers.next("manager")
        theirs = board.offer(f"manager-{number}", repr(tuple(run)))
        if theirs != repr(tuple(run)):
            raise differing({"this rank": tuple(run), "another one": theirs})
        numbers.take("manager")
    return Notes(board, f"{root} {run.read_only}", tidies=of.is_first)
