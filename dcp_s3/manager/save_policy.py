"""Policies: which steps of a run to save. Pure.

A policy is a function of a `SaveMoment`. `SaveEvery`, `SaveContinuously`, `SaveFirst` and `SaveOnPreemption` are joined
by ``|``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from dcp_s3.errors import SettingsError
from dcp_s3.units import parse_duration


@dataclass(frozen=True)
class SaveMoment:
    """What a policy knows about the step that may be saved.

    >>> warmup = lambda moment: moment.step < 100 and moment.step % 10 == 0
    >>> with CheckpointManager("s3://bucket/new", should_save=warmup | SaveEvery(steps=1000)) as manager:
    ...     [step for step in range(1, 2001) if manager.should_save(step)]
    [10, 20, 30, 40, 50, 60, 70, 80, 90, 1000, 2000]
    """

    step: int
    """The step."""
    last_step: int | None
    """The step that the manager has saved or restored last; None if there is none."""
    seconds: float
    """Seconds since that, or since the manager was made, on the clock of the rank that decides: the first one, or with
    ``coordination="s3"`` the one that comes first."""
    preempted: bool
    """Whether SIGTERM has come, and nothing was saved since. Always False without `SaveOnPreemption`."""
    saving: bool = False
    """Whether a save is under way, on the rank that decides: it is not committed yet, and has not failed."""


SavePolicyFunction = Callable[[SaveMoment], bool]
"""Whether to save. Any function of this shape will do as a policy."""


class SavePolicy(ABC):
    """Base of the policies here. ``|`` makes one that saves when either does.

    >>> SaveFirst() | SaveEvery(steps=1000) | SaveEvery(seconds="15m") | SaveOnPreemption()
    SaveFirst() | SaveEvery(steps=1000) | SaveEvery(seconds=900) | SaveOnPreemption()
    """

    @abstractmethod
    def __call__(self, moment: SaveMoment, /) -> bool:
        """Whether to save."""

    @property
    def by_step(self) -> bool:
        """Whether the ranks decide alike without telling each other."""
        return False

    def due_in(self, moment: SaveMoment) -> float:
        """Seconds for which it says no for certain, whatever the steps; 0 if that is not known."""
        return 0.0

    def __or__(self, other: SavePolicyFunction) -> SaveAny:
        return SaveAny((*parts(self), *parts(other))) if callable(other) else NotImplemented

    def __ror__(self, other: SavePolicyFunction) -> SaveAny:
        return SaveAny((*parts(other), *parts(self))) if callable(other) else NotImplemented


def parts(policy: SavePolicyFunction) -> tuple[SavePolicyFunction, ...]:
    """The policies that were joined by ``|``."""
    return policy.policies if isinstance(policy, SaveAny) else (policy,)


@dataclass(frozen=True)
class SaveAny(SavePolicy):
    """Saves when any of several policies does."""

    policies: tuple[SavePolicyFunction, ...]

    def __call__(self, moment: SaveMoment, /) -> bool:
        return any(policy(moment) for policy in self.policies)

    def __repr__(self) -> str:
        return " | ".join(repr(policy) for policy in self.policies)


class SaveEvery(SavePolicy):
    """Saves every so many steps, or every so many seconds.

    Every N steps are the steps N, 2N, 3N and so on, wherever a run began; step 0 is not one of them (`SaveFirst`). The
    seconds count from the begin of the last save, of whatever reason, on the clock of the first rank.

    >>> SaveEvery(steps=1000) | SaveEvery(seconds="10m")
    SaveEvery(steps=1000) | SaveEvery(seconds=600)

    Args:
        seconds: number of seconds, or text like ``10m``.

    Raises:
        SettingsError: not exactly one of the two is given, or it is not above 0.
    """

    def __init__(self, *, steps: int | None = None, seconds: float | str | None = None) -> None:
        if (steps is None) == (seconds is None):
            raise SettingsError(
                "SaveEvery takes either steps or seconds. Remedy, for both: SaveEvery(steps=1000) | "
                "SaveEvery(seconds=600)"
            )
        if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
            raise SettingsError(f"SaveEvery: steps = {steps!r}, expected a whole number above 0")
        self.steps = steps
        try:
            self.seconds = None if seconds is None else parse_duration(seconds)
        except ValueError as error:
            raise SettingsError(f"SaveEvery: seconds = {seconds!r}: {error}") from None
        if self.seconds == 0:
            raise SettingsError("SaveEvery: seconds = 0, expected more. Remedy, for every step: SaveEvery(steps=1)")

    def __call__(self, moment: SaveMoment, /) -> bool:
        if self.steps is not None:
            return moment.step > 0 and moment.step % self.steps == 0
        return moment.seconds >= (self.seconds or 0.0)

    @property
    def by_step(self) -> bool:
        return self.steps is not None

    def due_in(self, moment: SaveMoment) -> float:
        return 0.0 if self.seconds is None else max(0.0, self.seconds - moment.seconds)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SaveEvery) and (self.steps, self.seconds) == (other.steps, other.seconds)

    def __hash__(self) -> int:
        return hash((self.steps, self.seconds))

    def __repr__(self) -> str:
        return f"SaveEvery(steps={self.steps})" if self.seconds is None else f"SaveEvery(seconds={self.seconds:g})"


@dataclass(frozen=True)
class SaveFirst(SavePolicy):
    """Saves the first step that it is asked about, unless the run goes on from a checkpoint: so that a run has one
    early, and what is wrong with saving shows at once.

    >>> SaveFirst() | SaveEvery(steps=1000)
    SaveFirst() | SaveEvery(steps=1000)
    """

    @property
    def by_step(self) -> bool:
        return True

    def __call__(self, moment: SaveMoment, /) -> bool:
        return moment.last_step is None


class SaveContinuously(SavePolicy):
    """Saves as soon as the last save is committed, so that a failure costs as little work as the link to S3 allows.

    The first rank says when it is committed (with ``coordination="s3"`` the one that comes first). The ranks ask it
    about four times a second, or at each step that takes longer.

    >>> SaveContinuously() | SaveOnPreemption()
    SaveContinuously() | SaveOnPreemption()
    >>> SaveContinuously(min_steps=100, min_seconds="1m")
    SaveContinuously(min_steps=100, min_seconds=60)

    Args:
        min_steps: number of steps from one save to the next, at least.
        min_seconds: number of seconds from the begin of one save to the next, at least; or text like ``1m``.

    Raises:
        SettingsError: a number is not allowed.
    """

    def __init__(self, *, min_steps: int = 1, min_seconds: float | str = 0.0) -> None:
        if isinstance(min_steps, bool) or not isinstance(min_steps, int) or min_steps < 1:
            raise SettingsError(f"SaveContinuously: min_steps = {min_steps!r}, expected a whole number above 0")
        self.min_steps = min_steps
        try:
            self.min_seconds = parse_duration(min_seconds)
        except ValueError as error:
            raise SettingsError(f"SaveContinuously: min_seconds = {min_seconds!r}: {error}") from None

    def __call__(self, moment: SaveMoment, /) -> bool:
        if moment.saving or moment.last_step is None:
            return not moment.saving
        return moment.seconds >= self.min_seconds and abs(moment.step - moment.last_step) >= self.min_steps

    def due_in(self, moment: SaveMoment) -> float:
        left = 0.0 if moment.last_step is None else max(0.0, self.min_seconds - moment.seconds)
        return max(left, COMMIT_SECONDS) if moment.saving else left

    def __eq__(self, other: object) -> bool:
        mine = self.min_steps, self.min_seconds
        return isinstance(other, SaveContinuously) and mine == (other.min_steps, other.min_seconds)

    def __hash__(self) -> int:
        return hash((self.min_steps, self.min_seconds))

    def __repr__(self) -> str:
        steps = None if self.min_steps == 1 else self.min_steps
        seconds = f"{self.min_seconds:g}" if self.min_seconds else None
        shown = {"min_steps": steps, "min_seconds": seconds}
        return f"SaveContinuously({', '.join(f'{name}={value}' for name, value in shown.items() if value)})"


COMMIT_SECONDS = 0.5
"""Seconds after which a commit is noticed, at most. Saves take seconds."""


@dataclass(frozen=True)
class SaveOnPreemption(SavePolicy):
    """Saves once when SIGTERM has come, on whichever rank.

    From when the manager is made until it is closed, SIGTERM no longer ends the process: the training ends itself, see
    `CheckpointManager.preempted`. A handler that was there before is called, too.

    >>> SaveEvery(steps=1000) | SaveOnPreemption()
    SaveEvery(steps=1000) | SaveOnPreemption()
    """

    def __call__(self, moment: SaveMoment, /) -> bool:
        return moment.preempted

    def due_in(self, moment: SaveMoment) -> float:
        return NOTICE_SECONDS


NOTICE_SECONDS = 2.0
"""Seconds after which a signal on another rank is noticed, about. What sends SIGTERM waits 30 s or more."""


def steps_until_next_look(
    policies: tuple[SavePolicyFunction, ...], moment: SaveMoment, *, step_seconds: float | None, last: int
) -> int:
    """In how many steps the ranks need to ask the first one again, which has just said no.

    Half of what is left until a policy may say yes, at the pace of the steps so far (``step_seconds``), because the
    pace may change; at most twice as many steps as the ``last`` time, and 100.
    """
    if step_seconds is None:
        return 1
    left = min(policy.due_in(moment) if isinstance(policy, SavePolicy) else 0.0 for policy in policies)
    steps = min(left / 2 / max(step_seconds, 1e-6), 2 * last, 100)
    return max(1, int(steps))
