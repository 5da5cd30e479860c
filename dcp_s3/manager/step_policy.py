"""Which steps of a run to save: policies (pure), and how the ranks decide alike.

A policy is a function of a `SaveMoment`. `SaveEvery`, `SaveContinuously` and `SaveOnPreemption` are joined by ``|``.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from dcp_s3.errors import SettingsError
from dcp_s3.manager.agree import Ranks
from dcp_s3.units import parse_duration

logger = logging.getLogger(__name__)

_MOST_STEPS = 100
_COMMIT_SECONDS = 0.5  # after which a commit is noticed, at most: saves take seconds
_NOTICE_SECONDS = 2.0  # after which a signal on another rank is noticed, about: what sends SIGTERM waits 30 s or more


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

    >>> SaveEvery(steps=1000) | SaveEvery(seconds="15m") | SaveOnPreemption()
    SaveEvery(steps=1000) | SaveEvery(seconds=900) | SaveOnPreemption()
    """

    by_step = False
    """Whether the ranks decide alike without exchanging anything."""

    @abstractmethod
    def __call__(self, moment: SaveMoment, /) -> bool:
        """Whether to save."""

    def due_in(self, moment: SaveMoment) -> float:
        """Seconds for which it says no for certain, whatever the steps; 0 if that is not known."""
        return 0.0

    def __or__(self, other: SavePolicyFunction) -> SaveAny:
        return SaveAny((*parts(self), *parts(other))) if callable(other) else NotImplemented

    def __ror__(self, other: SavePolicyFunction) -> SaveAny:
        return SaveAny((*parts(other), *parts(self))) if callable(other) else NotImplemented

    def __repr__(self) -> str:
        shown = [
            f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in vars(self).items()
            if value != getattr(type(self), name, None)
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class SaveAny(SavePolicy):
    """Saves when any of several policies does."""

    policies: tuple[SavePolicyFunction, ...]

    def __call__(self, moment: SaveMoment, /) -> bool:
        return any(policy(moment) for policy in self.policies)

    def __repr__(self) -> str:
        return " | ".join(repr(policy) for policy in self.policies)


def parts(policy: SavePolicyFunction | None) -> tuple[SavePolicyFunction, ...]:
    """The policies that were joined by ``|``; none of None."""
    if policy is None:
        return ()
    return policy.policies if isinstance(policy, SaveAny) else (policy,)


@dataclass(frozen=True, repr=False, kw_only=True)
class SaveEvery(SavePolicy):
    """Saves every so many steps, or every so many seconds.

    ``steps=N`` saves the steps N, 2N, 3N and so on, wherever a run began; not step 0. The seconds count from the
    beginning of the last save, whatever caused it, on the clock of the first rank.

    >>> SaveEvery(steps=1000) | SaveEvery(seconds="10m")
    SaveEvery(steps=1000) | SaveEvery(seconds=600)

    Args:
        seconds: number of seconds, or text like ``10m``.

    Raises:
        SettingsError: not exactly one of the two is given, or it is not above 0.
    """

    steps: int | None = None
    seconds: float | str | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None):
            both = "SaveEvery(steps=1000) | SaveEvery(seconds=600)"
            raise SettingsError(f"SaveEvery takes either steps or seconds. Remedy, for both: {both}")
        if self.seconds is not None:
            try:
                object.__setattr__(self, "seconds", float(parse_duration(self.seconds)))
            except ValueError as error:
                raise SettingsError(f"SaveEvery: seconds = {self.seconds!r}: {error}") from None
        elif isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise SettingsError(f"SaveEvery: steps = {self.steps!r}, expected a whole number above 0")
        if self.seconds == 0:
            raise SettingsError("SaveEvery: seconds = 0, expected more. Remedy, for every step: SaveEvery(steps=1)")

    def __call__(self, moment: SaveMoment, /) -> bool:
        if self.steps is not None:
            return moment.step > 0 and moment.step % self.steps == 0
        return self.due_in(moment) == 0

    @property
    def by_step(self) -> bool:  # type: ignore[override]
        return self.steps is not None

    def due_in(self, moment: SaveMoment) -> float:
        return max(0.0, float(self.seconds or 0) - moment.seconds)


@dataclass(frozen=True, repr=False)
class SaveContinuously(SavePolicy):
    """Saves as soon as the last save is committed, so that a failure costs as little work as the link to S3 allows.

    The first rank says when it is committed (with ``coordination="s3"`` the one that comes first). The ranks ask it
    about four times a second, or at each step that takes longer.

    >>> SaveContinuously() | SaveOnPreemption()
    SaveContinuously() | SaveOnPreemption()
    """

    def __call__(self, moment: SaveMoment, /) -> bool:
        return not moment.saving

    def due_in(self, moment: SaveMoment) -> float:
        return _COMMIT_SECONDS if moment.saving else 0.0


@dataclass(frozen=True, repr=False)
class SaveOnPreemption(SavePolicy):
    """Saves once when SIGTERM has come, on whichever rank: all ranks save the same step.

    While the manager is open, SIGTERM no longer ends the process: the training ends itself, see
    `CheckpointManager.preempted`. A handler that was there before is called, too.

    >>> SaveEvery(steps=1000) | SaveOnPreemption()
    SaveEvery(steps=1000) | SaveOnPreemption()
    """

    def __call__(self, moment: SaveMoment, /) -> bool:
        return moment.preempted

    def due_in(self, moment: SaveMoment) -> float:
        return _NOTICE_SECONDS


def check_policy(policy: object) -> None:
    """Refuse (SettingsError) what is no policy, or needs SIGTERM in another thread than the main one."""
    if policy is not None and not callable(policy):
        expected = "expected a policy, for example SaveEvery(steps=1000)"
        raise SettingsError(f"should_save is a {type(policy).__name__}, {expected}")
    if _watches(policy) and threading.current_thread() is not threading.main_thread():
        why = "SaveOnPreemption needs SIGTERM, which only the main thread can handle"
        raise SettingsError(f"{why}. Remedy: make the CheckpointManager there")


def asks_ranks(policy: SavePolicyFunction | None) -> bool:
    """Whether the ranks have to exchange anything to decide by this policy."""
    return not all(isinstance(each, SavePolicy) and each.by_step for each in parts(policy))


def _watches(policy: SavePolicyFunction | None) -> bool:
    return any(isinstance(each, SaveOnPreemption) for each in parts(policy))


class SigtermFlag:
    """Notes that SIGTERM has come, and calls the handler that was there before. For the main thread."""

    def __init__(self) -> None:
        self.seen = False
        self._process: int | None = os.getpid()
        self._before = signal.signal(signal.SIGTERM, self._handle) or signal.SIG_DFL

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Not in a process that was forked since, for example to load data: it has to end. Nor after `close`: whoever
        # set a handler meanwhile may still call this one.
        watching = os.getpid() == self._process
        self.seen = self.seen or watching
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL and not watching:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def close(self) -> None:
        """Put the previous handler back, unless somebody has set another one meanwhile, which may call this one: it
        only passes signals on from now on."""
        self._process = None
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before)


class StepDecisions:
    """Decides which steps to save, the same on all ranks. What goes by steps alone, each rank knows. For the rest the
    ranks come together (`Ranks.decide`): at half of the steps that are left until a policy may say yes, at least every
    `_MOST_STEPS`."""

    def __init__(
        self,
        policy: SavePolicyFunction | None,
        ranks: Ranks,
        *,
        now: Callable[[], float] = time.monotonic,
        is_saving: Callable[[], bool] = lambda: False,
        flag: SigtermFlag | None = None,
    ) -> None:
        self._ranks, self._now, self._is_saving, self._always = ranks, now, is_saving, policy is None
        self._by_step = tuple(each for each in parts(policy) if not asks_ranks(each))
        self._asked = tuple(each for each in parts(policy) if asks_ranks(each))
        self._flag = SigtermFlag() if flag is None and _watches(policy) else flag
        self.preempted = False
        """Whether SIGTERM has come to a rank, as all know."""
        self._saved_preempted = False
        self.restored(None)

    def restored(self, step: int | None, *, again: int | None = None) -> None:
        """The run goes on from a step, on all ranks. ``again``: a step to be saved although it is that one."""
        self._last_step, self._since, self._again, self._gap = step, self._now(), again, 0
        self._answer: tuple[int, bool] | None = None
        self._look: tuple[int, float] | None = None  # step and time of the last exchange

    def saved(self, step: int, *, again: bool = False) -> None:
        """The save of a step begins. ``again``: it failed on this rank alone, which may try the step again."""
        self._saved_preempted = self.preempted
        self.restored(step, again=step if again else None)

    def close(self) -> None:
        """End the watch for SIGTERM."""
        if self._flag is not None:
            self._flag.close()

    def should_save(self, step: int) -> bool:
        """Whether to save a step. The answer stays the same until something is saved or restored."""
        if self._always:
            return True
        if step == self._last_step:
            return step == self._again
        if self._answer is None or self._answer[0] != step:
            answer = any(policy(self._moment(step, self.preempted)) for policy in self._by_step)
            look, last = self._look, self._gap
            far = self._ranks.size > 1 and look is not None and look[0] <= step < look[0] + last
            # Where steps say yes, too, if SIGTERM is watched for: then this save is also the one for it.
            if self._flag is not None if answer else self._asked and not far:
                answer = self._ask(step) or answer
            self._answer = step, answer
        return self._answer[1]

    def _moment(self, step: int, preempted: bool) -> SaveMoment:
        preempted = preempted and not self._saved_preempted
        return SaveMoment(step, self._last_step, self._now() - self._since, preempted, self._is_saving())

    def _ask(self, step: int) -> bool:
        def decide(seen: bool) -> tuple[bool, int]:
            """For all ranks: whether to save, and in how many steps to ask again if not."""
            moment = self._moment(step, seen)
            if any(policy(moment) for policy in self._asked):
                return True, 1
            if self._look is None or step <= self._look[0]:
                return False, 1
            # The pace may change, so only half of what is left, and at most twice as many steps as the last time.
            pace = max(1e-6, (self._now() - self._look[1]) / (step - self._look[0]))
            left = min(each.due_in(moment) if isinstance(each, SavePolicy) else 0.0 for each in self._asked)
            return False, max(1, int(min(left / 2 / pace, 2 * self._gap, _MOST_STEPS)))

        seen = self.preempted or (self._flag is not None and self._flag.seen)
        answer, self._gap, seen = self._ranks.decide(step, decide, seen)
        self.preempted = self.preempted or seen
        self._look = step, self._now()
        if self._flag is None or not self.preempted or self._saved_preempted:
            return answer
        self._gap = 1  # until it is saved
        if self._ranks.is_first:
            logger.warning("SIGTERM has come: step %d is saved", step)
        return True
