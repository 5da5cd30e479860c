"""What an `adversary` may do, as plain values."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from hypothesis import strategies as st

_STEPS = (*range(16), 20, 25, 30, 40, 60, 100)
_ACTORS = 8


class Kind(Enum):
    """What the adversary does to one rank, or to all."""

    RUN = "run"
    """Nothing."""
    REFUSE = "refuse"
    """Its next request fails without effect."""
    LOSE = "lose"
    """Its next write is carried out, and the answer is lost."""
    DELAY = "delay"
    """Its next write seems to fail, and is carried out later."""
    REPEAT = "repeat"
    """Its next write is carried out, and once more later, as after a retry."""
    LAND = "land"
    """A write that is still under way is carried out now."""
    KILL = "kill"
    """It ends here, for good."""
    HOLD = "hold"
    """It stands still until `FREE`, or until nobody else goes on."""
    FREE = "free"
    """All that stand still go on."""
    RESTART = "restart"
    """The job begins again, while all ranks of before stand still."""
    CRASH = "crash"
    """All ranks end, and the job begins again."""


@dataclass(frozen=True)
class Move:
    """One decision of the adversary, and what runs after it."""

    kind: Kind = Kind.RUN
    actor: int = 0
    """Number of the rank among those that live, or of the write among those under way, modulo how many there are."""
    steps: int = 0
    """Points that are passed after it."""
    alone: bool = False
    """Whether only that rank passes them; otherwise all take turns."""


def moves(kinds: Collection[Kind], *, most: int = 10, longest: int = 100) -> st.SearchStrategy[list[Move]]:
    """Lists of at most so many moves of these kinds, each of at most ``longest`` steps."""
    allowed = [Kind.RUN, *kinds]
    steps_of = [each for each in _STEPS if each <= longest]

    def decode(number: int) -> Move:
        number, steps = divmod(number, len(steps_of))
        number, alone = divmod(number, 2)
        kind, actor = divmod(number, _ACTORS)
        return Move(allowed[kind], actor, steps_of[steps], bool(alone))

    # One number for a move: drawing is what takes hypothesis longest.
    numbers = st.lists(st.integers(0, len(allowed) * _ACTORS * 2 * len(steps_of) - 1), max_size=most)
    return numbers.map(lambda each: list(map(decode, each)))
