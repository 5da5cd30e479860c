"""What the ranks of a manager tell each other without collectives: notes on a board."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from dcp_s3.coordination.board import Board
from dcp_s3.errors import CheckpointError, SaveProtocolError
from dcp_s3.manager.choosing import ChosenCheckpoint


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
    for all.

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
        self._restores = self._looks = 0
        self._last_save = "none"
        self._tried: str | None = None
        self._read: list[str] = []  # since the last save began
        self._read_before: list[str] = []  # between that and the one before it

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
        """Whether to save a step: answer, steps until the next look, and whether SIGTERM has come to a rank.

        Args:
            step: the step. The ranks have to ask about the same.
            decide: decides, if no rank has, from whether SIGTERM has come.
            seen: whether SIGTERM has come to this rank.

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
