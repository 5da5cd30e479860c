"""Decides which steps to save, the same on all ranks. SIGTERM is seen here."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from dcp_s3.errors import CheckpointError, SaveProtocolError, SettingsError
from dcp_s3.manager.notes import Notes
from dcp_s3.manager.ranks import Ranks
from dcp_s3.manager.save_policy import (
    SaveMoment,
    SaveOnPreemption,
    SavePolicy,
    SavePolicyFunction,
    parts,
    steps_until_next_look,
)

logger = logging.getLogger(__name__)

_NO, _YES, _FAILED = 0, 1, 2


def check_save_policy(policy: object) -> None:
    """Refuse (SettingsError) what is no policy, or needs SIGTERM in another thread than the main one."""
    if policy is not None and not callable(policy):
        raise SettingsError(
            f"should_save is a {type(policy).__name__}, expected a policy, for example SaveEvery(steps=1000)"
        )
    if callable(policy) and _needs_signals(policy) and threading.current_thread() is not threading.main_thread():
        raise SettingsError(
            "SaveOnPreemption needs SIGTERM, which only the main thread can handle. Remedy: make the CheckpointManager "
            "there"
        )


def asks_ranks(policy: SavePolicyFunction | None) -> bool:
    """Whether the ranks have to tell each other what this policy says."""
    return policy is not None and any(not _is_by_step(each) for each in parts(policy))


def _is_by_step(policy: SavePolicyFunction) -> bool:
    return isinstance(policy, SavePolicy) and policy.by_step


def _needs_signals(policy: SavePolicyFunction) -> bool:
    return any(isinstance(each, SaveOnPreemption) for each in parts(policy))


class SigtermWatch:
    """Notes that SIGTERM has come, and calls the handler that was there before. For the main thread."""

    def __init__(self) -> None:
        self.seen = False
        self.at: float | None = None
        """When it came first, in seconds of time.monotonic."""
        self._process: int | None = os.getpid()
        self._before = signal.signal(signal.SIGTERM, self._handle) or signal.SIG_DFL

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # Not in a process that was forked since, for example to load data: it has to end. Nor after the watch: whoever
        # set a handler meanwhile may still call this one.
        watching = os.getpid() == self._process
        if watching and not self.seen:
            self.seen, self.at = True, time.monotonic()
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


class SaveDecisions:
    """Answers which steps to save.

    What policies say that go by steps alone, each rank knows. For the others the ranks meet in one all-reduce of five
    numbers, but not at each step (`steps_until_next_look`): at most after ``most_steps``. Their group is one that no
    save uses meanwhile. Those that are not `collective` have ``notes``.
    """

    def __init__(
        self,
        policy: SavePolicyFunction | None,
        ranks: Ranks,
        notes: Notes | None = None,
        most_steps: int = 100,
        *,
        now: Callable[[], float] = time.monotonic,
        is_saving: Callable[[], bool] = lambda: False,
    ) -> None:
        self._most_steps = most_steps
        given = () if policy is None else parts(policy)
        self._always = policy is None
        self._by_step = tuple(each for each in given if _is_by_step(each))
        self._told = tuple(each for each in given if each not in self._by_step)
        self._ranks, self._notes, self._now, self._is_saving = ranks, notes, now, is_saving
        self._since = now()
        self._last_step: int | None = None
        self._again: int | None = None
        self._answer: tuple[int, bool] | None = None
        self._look: tuple[int, float] | None = None  # step and time of the last look
        self._gap = 0
        self._saved_preempted = False
        self.preempted = False
        """Whether SIGTERM has come, as far as the ranks have told each other."""
        self._watch = SigtermWatch() if policy is not None and _needs_signals(policy) else None

    def should_save(self, step: int) -> bool:
        """Whether to save a step. The answer stays the same until something is saved or restored.

        Raises:
            SaveProtocolError: the ranks ask about different steps.
            CheckpointError: a policy has failed on the first rank.
        """
        if self._always:
            return True
        if step == self._last_step:
            return step == self._again  # otherwise it is there
        if self._answer is None or self._answer[0] != step:
            answer = any(policy(self._moment(step, self.preempted)) for policy in self._by_step)
            if not answer:
                answer = self._is_due(step) and self._look_at(step)
            elif self._watch is not None:
                self._look_at(step)  # beside a save it costs nothing, and this one is then also that for SIGTERM
            self._answer = step, answer
        return self._answer[1]

    def saved(self, step: int) -> None:
        """Tell that the save of a step begins, on all ranks."""
        self._saved_preempted = self.preempted
        self._begin(step)

    def failed_here(self, step: int) -> None:
        """Tell that a step could not be saved on this rank alone: the others go on from it, and here it may be tried
        again."""
        self.saved(step)
        self._again = step

    def restored(self, step: int) -> None:
        """Tell that the run goes on from a step, on all ranks."""
        self._begin(step)

    @property
    def sigterm_at(self) -> float | None:
        """When SIGTERM came to this process, in seconds of time.monotonic; None: it has not, or nobody watches."""
        return None if self._watch is None else self._watch.at

    def close(self) -> None:
        """End the watch for SIGTERM."""
        if self._watch is not None:
            self._watch.close()

    def _begin(self, step: int) -> None:
        self._last_step, self._since, self._again = step, self._now(), None
        self._answer = self._look = None
        self._gap = 0

    def _moment(self, step: int, preempted: bool) -> SaveMoment:
        preempted = preempted and not self._saved_preempted
        return SaveMoment(step, self._last_step, self._now() - self._since, preempted, self._is_saving())

    def _is_due(self, step: int) -> bool:
        """Whether the ranks need to look at this step."""
        if not self._told:
            return False
        if self._ranks.size == 1 or self._look is None:
            return True
        return not self._look[0] <= step < self._look[0] + self._gap

    def _look_at(self, step: int) -> bool:
        """Ask the policies that do not go by steps alone, on all ranks."""
        seen = self.preempted or (self._watch is not None and self._watch.seen)
        if self._notes is not None:
            answer, gap, seen = self._notes.decide(step, lambda seen: self._decide(step, seen), seen=seen)
        else:
            answer, gap, seen = self._meet(step, seen)
        if seen and not self.preempted:
            self.preempted = True
        self._look, self._gap = (step, self._now()), gap
        for_preemption = self._watch is not None and seen and not self._saved_preempted
        if for_preemption:
            self._gap = 1  # until it is saved
        if for_preemption and self._ranks.is_first:
            logger.warning("SIGTERM has come: step %d is saved", step)
        return answer == _YES or for_preemption

    def _meet(self, step: int, seen: bool) -> tuple[int, int, bool]:
        """What the first rank decides, and whether SIGTERM has come to any, by a collective."""
        failure: Exception | None = None
        answer, gap = _NO, 1
        if self._ranks.is_first:
            try:
                answer, gap = self._decide(step, seen)
            except Exception as error:  # noqa: BLE001 - the other ranks wait
                failure, answer = error, _FAILED
        answer, gap, seen = self._tell(step, answer, gap, seen)
        if failure is not None:
            raise failure
        if answer == _FAILED:
            raise CheckpointError(f"whether to save step {step} is not known: the policy has failed on rank 0")
        return answer, gap, seen

    def _decide(self, step: int, seen: bool) -> tuple[int, int]:
        """On a rank that may decide for all: whether to save, and in how many steps to look again if not. The
        answer of another one may stand."""
        moment = self._moment(step, seen)
        if any(policy(moment) for policy in self._told):
            return _YES, 1
        pace: float | None = None
        if self._look is not None and step > self._look[0]:
            pace = (self._now() - self._look[1]) / (step - self._look[0])
        gap = steps_until_next_look(self._told, moment, step_seconds=pace, last=self._gap)
        return _NO, min(gap, self._most_steps)

    def _tell(self, step: int, answer: int, gap: int, seen: bool) -> tuple[int, int, bool]:
        if self._ranks.size == 1:
            return answer, gap, seen
        numbers = torch.tensor([answer, gap, int(seen), step, -step], dtype=torch.int64)
        options: dict[str, Any] = {"op": dist.ReduceOp.MAX, "group": self._ranks.group}
        dist.all_reduce(numbers, **options)
        found = [int(number) for number in numbers]
        if found[3] != -found[4]:
            raise SaveProtocolError(
                f"the ranks ask whether to save different steps: {-found[4]} to {found[3]}. Remedy: call should_save "
                "and save with the same step on all"
            )
        return found[0], found[1], bool(found[2])
