"""Policies of which steps to save, what the ranks decide by them, and SIGTERM: without a server."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dcp_s3 import SaveContinuously, SaveEvery, SaveOnPreemption
from dcp_s3.errors import SettingsError
from dcp_s3.manager.agree import Ranks
from dcp_s3.manager.step_policy import SigtermFlag, StepDecisions, check_policy
from tests.manager.test_agree import MemoryKeys, ThreadRanks, on_threads, store_ranks


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def decisions(policy: Any, clock: Clock | None = None, ranks: Ranks | None = None) -> StepDecisions:
    return StepDecisions(policy, ranks or Ranks(None), now=clock or Clock())


def saved(deciding: StepDecisions, steps: Iterable[int], clock: Clock | None = None, pace: float = 1.0) -> list[int]:
    """The steps that a loop saves."""
    found = []
    for step in steps:
        if clock is not None:
            clock.seconds += pace
        if deciding.should_save(step):
            deciding.saved(step)
            found.append(step)
    return found


def test_every_so_many_steps_wherever_the_run_began() -> None:
    assert saved(decisions(SaveEvery(steps=100)), range(301)) == [100, 200, 300]
    resumed = decisions(SaveEvery(steps=100))
    resumed.restored(300)
    assert saved(resumed, range(300, 501)) == [400, 500]


def test_every_so_many_seconds_since_the_last_save_of_whatever_reason() -> None:
    clock = Clock()
    assert saved(decisions(SaveEvery(seconds=10), clock), range(1, 35), clock) == [10, 20, 30]
    clock = Clock()
    both = SaveEvery(seconds="10s") | SaveEvery(steps=15)
    assert saved(decisions(both, clock), range(1, 50), clock) == [10, 15, 25, 30, 40, 45]


def test_functions_are_policies_and_are_joined() -> None:
    mixed = (lambda moment: moment.step == 3) | SaveEvery(steps=5)
    assert saved(decisions(mixed), range(1, 11)) == [3, 5, 10]
    assert repr(SaveContinuously() | SaveEvery(steps=5)) == "SaveContinuously() | SaveEvery(steps=5)"
    assert SaveEvery(seconds=60) == SaveEvery(seconds="1m") != SaveEvery(steps=60)
    with pytest.raises(TypeError):
        SaveEvery(steps=5) | 5  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either steps or seconds"),
        ({"steps": 5, "seconds": 5}, "either steps or seconds"),
        ({"steps": 0}, "steps = 0, expected a whole number above 0"),
        ({"steps": True}, "steps = True"),
        ({"seconds": 0}, r"seconds = 0, .*steps=1"),
        ({"seconds": "often"}, "SaveEvery: seconds = 'often': expected a number and a unit"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        SaveEvery(**arguments)


def test_the_first_ranks_clock_decides_for_all_in_few_meetings() -> None:
    def train(ranks: ThreadRanks) -> tuple[list[int], int]:
        clock = Clock()
        policy = SaveEvery(seconds=300) | SaveEvery(steps=500)
        deciding = StepDecisions(policy, ranks, now=clock)
        return saved(deciding, range(1, 1001), clock, 1.0 if ranks.is_first else -1e6), ranks.meetings

    (steps, meetings), *others = on_threads(3, train)
    assert others == [(steps, meetings)] * 2
    assert steps == [300, 500, 800, 1000]
    assert meetings < 60  # in 1000 steps


def test_steps_alone_need_no_meeting_and_functions_are_asked_each_time() -> None:
    def train(policy: Any) -> list[tuple[list[int], int]]:
        return on_threads(2, lambda ranks: (saved(StepDecisions(policy, ranks), range(1, 21)), ranks.meetings))

    assert train(SaveEvery(steps=8)) == [([8, 16], 0)] * 2
    assert train(lambda moment: moment.step in (1, 15)) == [([1, 15], 20)] * 2


@pytest.mark.parametrize(
    ("policy", "saving", "pace", "steps"),
    [
        (SaveEvery(seconds=3600), False, 1.0, 100),  # at most
        (SaveEvery(seconds=600), False, 10.0, 16),  # half of what is left
        (SaveContinuously(), True, 0.01, 25),  # half a second
        (SaveContinuously(), True, 2.0, 1),
        (SaveEvery(seconds=3600) | SaveOnPreemption(), False, 0.1, 10),  # two seconds
    ],
)
def test_looks_are_as_rare_as_the_next_save_allows(policy: Any, saving: bool, pace: float, steps: int) -> None:
    asked: list[int] = []

    class Counted(Ranks):
        def maxima(self, numbers: list[int]) -> list[int]:
            asked.append(numbers[4])
            return numbers

    counted, clock = Counted(None), Clock()
    counted.size = 2
    deciding = StepDecisions(policy, counted, now=clock, is_saving=lambda: saving)
    deciding.restored(0)
    for step in range(1, 400):
        clock.seconds += pace
        if deciding.should_save(step):
            break
    deciding.close()
    assert asked[:4] == ([1, 2, 3, 4] if steps == 1 else [1, 2, 4, 8])
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert max(gaps) == steps


def test_preemption_saves_once_and_is_known_afterwards_a_save_by_steps_is_also_the_one_for_it() -> None:
    for at, steps in ((6, [6, 10, 20]), (10, [10, 20])):
        with contextlib.closing(decisions(SaveOnPreemption() | SaveEvery(steps=10))) as deciding:
            assert saved(deciding, range(1, at)) == []
            signal.raise_signal(signal.SIGTERM)
            assert saved(deciding, range(at, 21)) == steps
            assert deciding.preempted


def test_without_collectives_a_rank_whose_answer_came_second_goes_by_the_first_one() -> None:
    """Both decide at once, and only one of them has got SIGTERM."""

    class Raced(MemoryKeys):
        def offer(self, key: str, value: str) -> str:
            if "decision-0" in key:
                super().offer(key, "[1, false, 1, false]")
            return super().offer(key, value)

    with contextlib.closing(decisions(SaveOnPreemption(), ranks=store_ranks(2, Raced())[1])) as deciding:
        signal.raise_signal(signal.SIGTERM)
        assert not deciding.should_save(1)
        assert not deciding.preempted, "nothing is saved at that step"
        assert deciding.should_save(2)
        assert deciding.preempted


_FORKS = """
import os, signal, sys, time
from dcp_s3.manager.step_policy import SigtermFlag
flag = SigtermFlag()
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    os.write(writing, b"x")  # Python forgets signals that come before it has forked
    time.sleep(60)
    os._exit(0)
os.read(reading, 1)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
os.kill(os.getpid(), signal.SIGTERM)
print(os.WIFSIGNALED(status) and os.WTERMSIG(status), flag.seen)
"""


def test_a_forked_process_ends_by_the_signal() -> None:
    done = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "15 True\n"), done.stderr


@pytest.mark.parametrize("later", [False, True])
def test_the_handler_that_was_there_is_called_and_comes_back_unless_another_was_set_since(later: bool) -> None:
    seen: list[int] = []

    def mine(number: int, frame: Any) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGTERM, mine)
    try:
        flag = SigtermFlag()
        signal.raise_signal(signal.SIGTERM)
        assert flag.seen
        assert seen == [signal.SIGTERM]
        if later:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        flag.close()
        assert signal.getsignal(signal.SIGTERM) is (signal.SIG_IGN if later else mine)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_are_told_that_they_cannot_watch() -> None:
    with ThreadPoolExecutor(1) as pool:
        caught = pool.submit(check_policy, SaveEvery(steps=5) | SaveOnPreemption()).exception()
    assert isinstance(caught, SettingsError)
    assert "main thread" in str(caught)
    check_policy(SaveOnPreemption())  # here
    with pytest.raises(SettingsError, match=r"should_save is a int, .*SaveEvery\(steps=1000\)"):
        check_policy(100)
