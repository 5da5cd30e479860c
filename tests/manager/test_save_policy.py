"""Policies of which steps to save, without a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch.distributed as dist

from dcp_s3.coordination.board import GroupBoard
from dcp_s3.coordination.identity import Attempt
from dcp_s3.errors import SettingsError
from dcp_s3.manager.deciding import SaveDecisions, SigtermWatch, check_save_policy
from dcp_s3.manager.notes import Notes
from dcp_s3.manager.ranks import Ranks, SeparateRanks
from dcp_s3.manager.save_policy import (
    SaveContinuously,
    SaveEvery,
    SaveFirst,
    SaveMoment,
    SaveOnPreemption,
    steps_until_next_look,
)


def moment(
    step: int, *, last: int | None = None, seconds: float = 0.0, preempted: bool = False, saving: bool = False
) -> SaveMoment:
    return SaveMoment(step, last, seconds, preempted, saving)


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def saved(decisions: SaveDecisions, steps: range, clock: Clock | None = None, pace: float = 1.0) -> list[int]:
    """The steps that a loop saves."""
    found = []
    for step in steps:
        if clock is not None:
            clock.seconds += pace
        if decisions.should_save(step):
            decisions.saved(step)
            found.append(step)
    return found


def decisions(policy: Any, clock: Clock | None = None) -> SaveDecisions:
    return SaveDecisions(policy, Ranks(None), now=clock or Clock())


# --- policies ------------------------------------------------------------------------------------


def test_every_so_many_steps_wherever_the_run_began() -> None:
    policy = SaveEvery(steps=100)
    assert [step for step in range(301) if policy(moment(step))] == [100, 200, 300]
    assert saved(decisions(policy), range(250, 501)) == [300, 400, 500]


def test_every_so_many_seconds_since_the_last_save_of_whatever_reason() -> None:
    clock = Clock()
    assert saved(decisions(SaveEvery(seconds=10), clock), range(1, 35), clock) == [10, 20, 30]
    clock = Clock()
    both = SaveEvery(seconds="10s") | SaveEvery(steps=15)
    assert saved(decisions(both, clock), range(1, 50), clock) == [10, 15, 25, 30, 40, 45]


def test_the_first_step_unless_the_run_goes_on() -> None:
    assert saved(decisions(SaveFirst() | SaveEvery(steps=100)), range(7, 201)) == [7, 100, 200]
    resumed = decisions(SaveFirst() | SaveEvery(steps=100))
    resumed.restored(100)
    assert saved(resumed, range(100, 201)) == [200]  # 100 is there


def test_as_soon_as_the_last_save_is_committed_but_no_sooner_than_asked() -> None:
    policy = SaveContinuously(min_steps=10, min_seconds="1m")
    assert policy(moment(1))
    assert policy(moment(20, last=10, seconds=60))
    assert not policy(moment(20, last=10, seconds=60, saving=True))
    assert not policy(moment(19, last=10, seconds=60))
    assert not policy(moment(20, last=10, seconds=59))
    clock, under_way = Clock(), [False]
    deciding = SaveDecisions(SaveContinuously(), Ranks(None), now=clock, is_saving=lambda: under_way[0])
    found = []
    for step in range(1, 31):  # each save takes 9 steps
        under_way[0] = bool(found) and step - found[-1] < 9
        if deciding.should_save(step):
            deciding.saved(step)
            found.append(step)
    assert found == [1, 10, 19, 28]


@pytest.mark.parametrize("arguments", [{"min_steps": 0}, {"min_steps": 1.5}, {"min_seconds": -1}])
def test_less_than_nothing_between_saves_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=f"SaveContinuously: {next(iter(arguments))} = "):
        SaveContinuously(**arguments)


def test_functions_are_policies_and_are_joined() -> None:
    mixed = (lambda moment: moment.step == 3) | SaveEvery(steps=5)
    assert saved(decisions(mixed), range(1, 11)) == [3, 5, 10]
    assert repr(SaveFirst() | SaveEvery(steps=5) | SaveOnPreemption()) == (
        "SaveFirst() | SaveEvery(steps=5) | SaveOnPreemption()"
    )
    assert SaveEvery(seconds=60) == SaveEvery(seconds="1m") != SaveEvery(steps=60)
    with pytest.raises(TypeError):
        SaveEvery(steps=5) | 5  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either steps or seconds"),
        ({"steps": 5, "seconds": 5}, "either steps or seconds"),
        ({"steps": 0}, "steps = 0, expected a whole number above 0"),
        ({"steps": 1.5}, r"steps = 1\.5"),
        ({"steps": True}, "steps = True"),
        ({"seconds": 0}, r"seconds = 0, .*steps=1"),
        ({"seconds": -1}, "seconds = -1: expected a duration"),
        ({"seconds": "often"}, "seconds = 'often': expected a number and a unit"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        SaveEvery(**arguments)


# --- when the ranks look --------------------------------------------------------------------------


def test_looks_are_rare_far_from_the_next_save_and_closer_near_it() -> None:
    policies = (SaveEvery(seconds=600),)
    assert steps_until_next_look(policies, moment(1), step_seconds=None, last=0) == 1
    assert steps_until_next_look(policies, moment(9), step_seconds=1.0, last=8) == 16  # at most twice as many
    assert steps_until_next_look(policies, moment(9), step_seconds=1.0, last=90) == 100
    assert steps_until_next_look(policies, moment(9, seconds=560), step_seconds=1.0, last=90) == 20
    assert steps_until_next_look(policies, moment(9, seconds=599), step_seconds=1.0, last=90) == 1


def test_a_commit_is_noticed_within_half_a_second() -> None:
    policies = (SaveContinuously(),)
    assert steps_until_next_look(policies, moment(9, last=1, saving=True), step_seconds=0.01, last=90) == 25
    assert steps_until_next_look(policies, moment(9, last=1, saving=True), step_seconds=2.0, last=90) == 1
    assert steps_until_next_look(
        (SaveContinuously(min_seconds=600),), moment(9, last=1, saving=True), step_seconds=1.0, last=90
    ) == 100  # fmt: skip


def test_a_signal_is_noticed_within_seconds_and_functions_are_asked_each_time() -> None:
    both = (SaveEvery(seconds=600), SaveOnPreemption())
    assert steps_until_next_look(both, moment(9), step_seconds=0.1, last=90) == 10
    assert steps_until_next_look((*both, lambda _: False), moment(9), step_seconds=0.1, last=90) == 1


# --- signals -------------------------------------------------------------------------------------


def test_a_rank_that_failed_alone_looks_when_the_others_do_and_may_try_again() -> None:
    policy = SaveEvery(steps=1000) | SaveEvery(seconds=900)
    board = GroupBoard(dist.HashStore(), Attempt("run", (), "", None, 2, 0))
    one, other = (SaveDecisions(policy, SeparateRanks(rank, 2), Notes(board, "run"), now=Clock()) for rank in (0, 1))
    # Those of a job are in as many processes: here the second would have numbers of its own.
    one._notes._number = other._notes._number = 0  # type: ignore[union-attr]
    for step in range(1, 1001):
        assert one.should_save(step) == other.should_save(step) == (step == 1000)
    one.saved(1000)
    other.failed_here(1000)
    assert not one.should_save(1000)
    assert other.should_save(1000)
    other.saved(1000)
    assert not other.should_save(1000)
    other.failed_here(1000)
    for step in range(1001, 2001):
        assert one.should_save(step) == other.should_save(step) == (step == 2000)


def test_a_rank_whose_answer_came_second_goes_by_the_first_one() -> None:
    """Both decide at once, and only one of them has got SIGTERM."""

    class Raced(GroupBoard):
        def offer(self, key: str, value: str) -> str:
            if "look-0" in key:
                super().offer(key, json.dumps([1, 0, 1, False]))
            return super().offer(key, value)

    board = Raced(dist.HashStore(), Attempt("run", (), "", None, 2, 0))
    found = SaveDecisions(SaveOnPreemption(), SeparateRanks(1, 2), Notes(board, "run"), now=Clock())
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert not found.should_save(1)
        assert not found.preempted, "nothing is saved at that step"
        assert found.should_save(2)
        assert found.preempted
    finally:
        found.close()


def test_preemption_saves_once_and_is_known_afterwards() -> None:
    found = decisions(SaveOnPreemption() | SaveEvery(steps=10))
    try:
        assert saved(found, range(1, 6)) == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert saved(found, range(6, 21)) == [6, 10, 20]
        assert found.preempted
    finally:
        found.close()


def test_a_save_by_steps_is_also_the_one_for_the_signal() -> None:
    found = decisions(SaveOnPreemption() | SaveEvery(steps=10))
    try:
        assert saved(found, range(1, 10)) == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert saved(found, range(10, 20)) == [10]
        assert found.preempted
    finally:
        found.close()


_FORKS = """
import os, signal, sys, time
from dcp_s3.manager.deciding import SigtermWatch
watch = SigtermWatch()
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
print(os.WIFSIGNALED(status) and os.WTERMSIG(status), watch.seen)
"""


def test_processes_that_are_forked_end_by_the_signal() -> None:
    done = subprocess.run([sys.executable, "-c", _FORKS], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["15", "True"]


_CLOSED_IN_ORDER = """
import os, signal, threading
from dcp_s3.manager.deciding import SigtermWatch
first, second = SigtermWatch(), SigtermWatch()
os.kill(os.getpid(), signal.SIGTERM)
assert first.seen and second.seen
first.close()
second.close()  # puts the first one's handler back
os.kill(os.getpid(), signal.SIGTERM)
print("still here")
"""


def test_closed_watches_do_not_keep_a_process_alive() -> None:
    done = subprocess.run([sys.executable, "-c", _CLOSED_IN_ORDER], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr


def test_the_handler_that_was_there_is_called_and_comes_back() -> None:
    seen: list[int] = []

    def mine(number: int, frame: Any) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGTERM, mine)
    try:
        watch = SigtermWatch()
        os.kill(os.getpid(), signal.SIGTERM)
        assert watch.seen
        assert seen == [signal.SIGTERM]
        watch.close()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_that_was_set_later_stays() -> None:
    before = signal.getsignal(signal.SIGTERM)
    watch = SigtermWatch()
    try:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        watch.close()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_are_told_that_they_cannot_watch() -> None:
    caught: list[Exception] = []

    def work() -> None:
        try:
            check_save_policy(SaveEvery(steps=5) | SaveOnPreemption())
        except SettingsError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
    check_save_policy(SaveOnPreemption())  # here
