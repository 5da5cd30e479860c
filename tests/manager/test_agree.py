"""What the ranks of a job agree on: through a process group, or keys of a store. What goes on behind the training:
saves that wait for their upload, what becomes of their failures, and retention. All without S3."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dcp_s3 import errors
from dcp_s3.coordination.identity import Attempt
from dcp_s3.manager.agree import ControlKeys, Ranks, StoreRanks
from dcp_s3.manager.background import BackgroundRetention
from dcp_s3.manager.inflight import SavesInFlight
from dcp_s3.manager.select_checkpoint import ChosenCheckpoint
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url
from tests.memory_store import MemoryStore

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


def _at(step: int) -> ChosenCheckpoint:
    return ChosenCheckpoint(f"s3://bucket/run/step-{step}", step)


def _never(*_: Any) -> Any:
    raise AssertionError("asked, though there is an answer")


def test_different_steps_on_the_ranks_and_a_policy_that_fails_on_the_first_rank_fail_on_all() -> None:
    def broken(_: bool) -> Any:
        raise ZeroDivisionError("mine")

    found = on_threads(2, lambda ranks: ranks.decide(7 + ranks.rank, lambda _: (False, 1), False))
    assert all("different steps on the ranks: 7 and 8" in str(each) for each in found)
    first, second = on_threads(2, lambda ranks: ranks.decide(2, broken, False))
    assert type(first) is ZeroDivisionError
    assert "step 2 is not known: the policy has failed on rank 0" in str(second)


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


def test_the_first_choice_stands_for_all_who_ask_for_the_same() -> None:
    ranks = store_ranks(3, MemoryKeys())
    assert ranks[2].choose("latest", lambda: _at(5)) == _at(5)
    assert [each.choose("latest", _never) for each in ranks[:2]] == [_at(5)] * 2
    assert ranks[2].choose("latest", lambda: None) is None
    assert ranks[1].choose("latest", _never) is None, "that there is nothing stands, too"
    with pytest.raises(errors.CheckpointError, match="restore asks for different steps"):
        ranks[0].choose(("best", "loss", None), _never)


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


_PATIENCE_SECONDS = 60


class Uploads:
    """Saves whose uploads a test ends."""

    def __init__(self, queue: int = 2) -> None:
        self.saves = SavesInFlight(0, queue=queue)
        self.begun: list[int] = []
        self.good: list[int] = []
        self.futures: dict[int, Future[None]] = {}

    def start(self, *steps: int) -> None:
        for step in steps:
            begin, done = functools.partial(self._begin, step), functools.partial(self.good.append, step)
            self.saves.start(step, f"{ROOT}/{step}", begin, done)

    def fail(self, step: int) -> None:
        self.futures[step].set_exception(OSError(f"no room for {step}"))

    def _begin(self, step: int) -> Future[None]:
        self.begun.append(step)
        return self.futures.setdefault(step, Future())


def test_one_uploads_at_a_time_whether_or_not_the_one_before_succeeded() -> None:
    uploads = Uploads()
    uploads.start(1, 2, 3)
    assert uploads.begun == [1]
    uploads.fail(1)
    assert uploads.begun == [1, 2]
    uploads.futures[2].set_result(None)
    assert uploads.begun == [1, 2, 3]
    assert uploads.good == [2]
    assert uploads.saves.is_under_way


def test_a_save_that_cannot_begin_is_raised_at_once_and_one_that_is_done_is_over() -> None:
    saves = SavesInFlight(0)

    def cannot() -> Any:
        raise OSError("no thread")

    with pytest.raises(errors.SaveFailedError, match="no thread"):
        saves.start(1, f"{ROOT}/1", cannot, lambda: None)
    saves.raise_failure()
    saves.start(2, f"{ROOT}/2", lambda: None, lambda: None)
    assert not saves.is_under_way
    assert saves.last_good == 2


def test_each_failure_is_raised_once_the_last_one_with_the_others_as_its_context() -> None:
    uploads = Uploads()
    uploads.start(1, 2, 3, 4)
    for step in (1, 2, 3):
        uploads.fail(step)
    with pytest.raises(errors.SaveFailedError, match="no room for 2") as caught:
        uploads.saves.raise_failure(2)
    assert "no room for 1" in str(caught.value.__context__)
    with pytest.raises(errors.SaveFailedError, match="no room for 3"):
        uploads.saves.raise_failure()
    uploads.saves.raise_failure()


def test_who_waits_for_a_step_does_not_wait_for_newer_ones() -> None:
    uploads = Uploads()
    uploads.start(1, 2)
    uploads.futures[1].set_result(None)
    thread = threading.Thread(target=uploads.saves.settle, args=(1,), daemon=True)
    thread.start()
    thread.join(_PATIENCE_SECONDS)
    assert not thread.is_alive()
    assert uploads.saves.is_under_way


class StandInPrune:
    """Counts its calls, which end when the test lets them, or fail."""

    def __init__(self) -> None:
        self.calls = 0
        self.began = threading.Semaphore(0)
        self.go = threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def __call__(self, check: Any) -> None:
        self.calls += 1
        self.began.release()
        assert self.go.wait(60)
        check()
        if self.error is not None:
            raise self.error


def committed(_: float) -> None:
    """A save that is."""


def test_saves_that_commit_while_a_prune_runs_share_the_next_one() -> None:
    prune = StandInPrune()
    prune.go.clear()
    retention = BackgroundRetention(prune, str(ROOT))
    retention.saved(committed)
    assert prune.began.acquire(timeout=60)
    for _ in range(5):
        retention.saved(committed)  # returns at once
    prune.go.set()
    assert retention.close(60)
    assert prune.calls == 2


@pytest.mark.parametrize("error", [OSError("the disk cannot be read"), errors.CheckpointError("set aside")])
def test_a_save_that_can_not_be_committed_deletes_nothing_and_does_not_end_retention(error: Exception) -> None:
    prune, waited = StandInPrune(), threading.Event()

    def fails(_: float) -> None:
        waited.set()
        raise error

    for later, pruned in (((), 0), ((committed,), 1)):
        retention = BackgroundRetention(prune, str(ROOT))
        waited.clear()
        retention.saved(fails)
        assert waited.wait(60)
        for each in later:
            retention.saved(each)
        assert retention.close(60)
        assert prune.calls == pruned


def test_close_gives_up_on_a_prune_that_takes_too_long_and_tells_it_to_end(caplog: pytest.LogCaptureFixture) -> None:
    prune = StandInPrune()
    prune.go.clear()
    prune.error = errors.CheckpointError("it was not told to end")
    retention = BackgroundRetention(prune, str(ROOT))
    retention.saved(committed)
    assert prune.began.acquire(timeout=60)
    thread = retention._thread
    assert thread is not None
    with caplog.at_level(logging.WARNING):
        assert not retention.close(0.01)
    assert "was not done within" in caplog.text
    prune.go.set()
    thread.join(60)
    assert not thread.is_alive()
    assert "it was not told to end" not in caplog.text
    retention.saved(committed)
    assert prune.calls == 1
