"""Policies of which steps to save, what the ranks decide by them, and SIGTERM: without a server."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dcp_s3 import errors
from dcp_s3.coordination.identity import Attempt
from dcp_s3.errors import SettingsError
from dcp_s3.manager.agree import ControlKeys, Ranks, StoreRanks
from dcp_s3.manager.select_checkpoint import ChosenCheckpoint
from dcp_s3.manager.step_policy import (
    SaveContinuously,
    SaveEvery,
    SaveOnPreemption,
    SigtermFlag,
    StepDecisions,
    check_policy,
)
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url
from tests.memory_store import MemoryStore


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def decisions(policy: Any, clock: Clock | None = None, **options: Any) -> StepDecisions:
    return StepDecisions(policy, Ranks(None), now=clock or Clock(), **options)


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


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def watched() -> Iterator[Callable[..., StepDecisions]]:
    made: list[StepDecisions] = []

    def make(policy: Any, ranks: Ranks | None = None) -> StepDecisions:
        made.append(StepDecisions(policy, ranks or Ranks(None), now=Clock()))
        return made[-1]

    yield make
    for each in reversed(made):
        each.close()


# --- ranks that are threads -----------------------------------------------------------------------------

ROOT, ATTEMPT = parse_url("s3://bucket/run"), Attempt("run", (0,), "token", None, 2, 0)


class ThreadRanks(Ranks):
    """One of several ranks that agree as those of a process group do. Counts how often."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.group, self._own_group = None, False
        self.rank, self.size, self._values, self._barrier = rank, len(values), values, barrier
        self.meetings = 0

    def gather(self, value: Any) -> list[Any]:
        self.meetings += 1
        self._barrier.wait()
        self._values[self.rank] = value
        self._barrier.wait()
        return list(self._values)

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]

    def maxima(self, numbers: list[int]) -> list[int]:
        return [max(column) for column in zip(*self.gather(numbers), strict=True)]


def on_threads(size: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """What ``work`` returns on each rank, or the error that it raises."""
    values, barrier = [None] * size, threading.Barrier(size, timeout=60)

    def run(rank: int) -> Any:
        try:
            return work(ThreadRanks(rank, values, barrier))
        except BaseException as error:  # noqa: BLE001 - looked at by the test
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


class MemoryKeys(ControlKeys):
    """Control keys below the root of a run in memory."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), ROOT, ATTEMPT)

    @property
    def keys(self) -> list[str]:
        return [each.key for each in self._store.list("").objects]


def store_ranks(size: int, keys: ControlKeys) -> list[StoreRanks]:
    """The ranks of a job without collectives, each as in a process of its own."""
    numbers = [defaultdict[str, Any](itertools.count) for _ in range(size)]
    return [StoreRanks(ROOT, Settings(), rank, size, keys, "run", numbers[rank]) for rank in range(size)]


# --- policies ------------------------------------------------------------------------------------


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


# --- when the ranks come together ------------------------------------------------------------------


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


# --- SIGTERM -------------------------------------------------------------------------------------


def test_preemption_saves_once_and_is_known_afterwards(watched: Any) -> None:
    deciding = watched(SaveOnPreemption() | SaveEvery(steps=10))
    assert saved(deciding, range(1, 6)) == []
    terminate()
    assert saved(deciding, range(6, 21)) == [6, 10, 20]
    assert deciding.preempted


def test_a_save_by_steps_is_also_the_one_for_the_signal(watched: Any) -> None:
    deciding = watched(SaveOnPreemption() | SaveEvery(steps=10))
    assert saved(deciding, range(1, 10)) == []
    terminate()
    assert saved(deciding, range(10, 20)) == [10]


def test_a_signal_that_one_rank_has_seen_makes_all_save_the_same_step() -> None:
    class Flag(SigtermFlag):
        def __init__(self) -> None:
            self.seen = False

    def train(ranks: ThreadRanks) -> list[int]:
        flag = Flag()
        deciding = StepDecisions(SaveOnPreemption(), ranks, flag=flag)
        steps = saved(deciding, range(1, 6))
        flag.seen = ranks.rank == 1
        return steps + saved(deciding, range(6, 200))

    first, second = on_threads(2, train)
    assert first == second
    assert len(first) == 1


def test_without_collectives_a_rank_whose_answer_came_second_goes_by_the_first_one(watched: Any) -> None:
    """Both decide at once, and only one of them has got SIGTERM."""

    class Raced(MemoryKeys):
        def offer(self, key: str, value: str) -> str:
            if "decision-0" in key:
                super().offer(key, "[1, false, 1, false]")
            return super().offer(key, value)

    deciding = watched(SaveOnPreemption(), store_ranks(2, Raced())[1])
    terminate()
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
        terminate()
        assert flag.seen
        assert seen == [signal.SIGTERM]
        if later:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        flag.close()
        assert signal.getsignal(signal.SIGTERM) is (signal.SIG_IGN if later else mine)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_other_threads_are_told_that_they_cannot_watch() -> None:
    caught: list[Exception] = []

    def work() -> None:
        try:
            check_policy(SaveEvery(steps=5) | SaveOnPreemption())
        except SettingsError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "main thread" in str(caught[0])
    check_policy(SaveOnPreemption())  # here
    with pytest.raises(SettingsError, match=r"should_save is a int, .*SaveEvery\(steps=1000\)"):
        check_policy(100)


# --- what ranks agree on --------------------------------------------------------------------------------


def _at(step: int) -> ChosenCheckpoint:
    return ChosenCheckpoint(f"s3://bucket/run/step-{step}", step)


def _never(*_: Any) -> Any:
    raise AssertionError("asked, though there is an answer")


# --- ranks that meet -------------------------------------------------------------------------------------


def test_ranks_that_ask_about_different_steps_all_raise() -> None:
    found = on_threads(2, lambda ranks: ranks.decide(7 + ranks.rank, lambda _: (False, 1), False))
    assert all("different steps on the ranks: 7 and 8" in str(each) for each in found)


def test_a_policy_that_fails_on_the_first_rank_fails_on_all() -> None:
    def broken(_: bool) -> Any:
        raise ZeroDivisionError("mine")

    first, second = on_threads(2, lambda ranks: ranks.decide(2, broken, False))
    assert type(first) is ZeroDivisionError
    assert "step 2 is not known: the policy has failed on rank 0" in str(second)


# --- ranks that settle it through a store ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "hash", "tcp"])
def test_in_the_store_of_a_process_group_the_first_value_stands(kind: str, tmp_path: Path) -> None:
    made: dict[str, Callable[[], Any]] = {
        "file": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "hash": dist.HashStore,
        "tcp": lambda: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    }
    first, second = (ControlKeys(MemoryStore(), ROOT, ATTEMPT, store) for store in [made[kind]()] * 2)
    assert first.look("a") is second.look("a") is None
    assert [keys.offer("a", value) for keys, value in ((second, "2"), (first, "1"))] == ["2", "2"]
    assert first.look("a") == "2"
    first.remove("a")
    assert second.look("a") is None
    assert first.offer("a", "3") == second.look("a") == "3"


def test_the_first_choice_stands_for_all() -> None:
    ranks = store_ranks(3, MemoryKeys())
    assert ranks[2].choose("latest", lambda: _at(5)) == _at(5)
    assert [each.choose("latest", _never) for each in ranks[:2]] == [_at(5)] * 2
    assert ranks[2].choose("latest", lambda: None) is None
    assert ranks[1].choose("latest", _never) is None, "that there is nothing stands, too"


@pytest.mark.parametrize(
    "data", [b"", b"{}", b'{"note": "[]", "crc64nvme": "0"}', b'{"note": 1, "crc64nvme": "0"}', b"[1]"]
)
def test_an_answer_that_is_damaged_or_foreign_is_refused_rather_than_replaced_by_one_s_own(data: bytes) -> None:
    keys = MemoryKeys()
    first, second = store_ranks(2, keys)
    first.choose("latest", lambda: _at(5))
    [key], store = keys.keys, keys._store
    store.put(key, data)
    with pytest.raises(errors.SaveProtocolError, match=f"{key} is damaged.*Remedy: delete it, and restart"):
        second.choose("latest", lambda: _at(6))
    assert store.get(key).data == data


def test_ranks_that_ask_for_different_checkpoints_are_told() -> None:
    first, second = store_ranks(2, MemoryKeys())
    first.choose(("latest", None, None), lambda: _at(5))
    with pytest.raises(errors.CheckpointError, match="restore asks for different steps"):
        second.choose(("best", "loss", None), _never)


def test_the_first_decision_stands_and_sigterm_of_any_rank_is_in_the_next() -> None:
    ranks = store_ranks(3, MemoryKeys())
    assert ranks[1].decide(10, lambda seen: (seen, 3), False) == (False, 3, False)
    assert ranks[0].decide(10, _never, True) == (False, 3, False), "what another rank decided"
    assert ranks[2].decide(10, _never, False) == (False, 3, False)
    assert ranks[2].decide(13, lambda seen: (seen, 1), False) == (True, 1, True)
    assert ranks[1].decide(13, _never, False) == (True, 1, True)
    with pytest.raises(errors.SaveProtocolError, match="different steps on the ranks: 13 and 14"):
        ranks[0].decide(14, _never, False)


def test_the_answers_that_all_have_read_are_removed_by_one_rank_two_saves_later() -> None:
    keys = MemoryKeys()
    ranks = store_ranks(3, keys)

    def save(step: int) -> None:
        for each in ranks:
            with pytest.raises(errors.SaveProtocolError, match="which is rank 0 of 1 now"):
                each.count(f"s3://bucket/run/step-{step}", step)  # in this process

    def decide(step: int) -> None:
        for each in ranks:
            each.decide(step, lambda _: (True, 1), False)

    def left() -> list[str]:
        return sorted(key.partition("-0-")[2] for key in keys.keys)

    ranks[0].choose("latest", lambda: _at(5))
    decide(10)
    save(10)
    decide(11)
    for each in ranks:
        each.committed(10)
    assert left() == ["decision-0", "decision-1", "restore-1-none"], "one may have been missing in the save"
    assert ranks[1].choose("latest", lambda: _at(6)) == _at(6), "not what was chosen before the save"
    save(11)
    decide(12)
    ranks[1].committed(11)
    assert "decision-0" in left()
    ranks[0].committed(11)
    assert left() == ["decision-1", "decision-2", "restore-1-10"]
