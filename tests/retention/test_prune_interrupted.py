"""A prune that is cut off at any request, or meets another one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from dcp_s3 import KeepLatest, Plan, PruneReport
from dcp_s3.coordination import processes
from dcp_s3.errors import TransferError
from tests.retention.runs import HOUR, Mixed, deleted, keep_steps, nothing


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mixed:
    monkeypatch.setattr(processes, "_PATIENCE", 0.0)  # with a store that refuses what is no part of a save
    return Mixed(tmp_path)


def cut_off(mixed: Mixed, plan: Plan, requests: int, *, applied: bool) -> int:
    """Carry out so many requests, the last one without an answer (not at all unless ``applied``). Returns how many were
    not needed."""
    left = requests

    def die(method: str, key: str) -> Exception | None:
        nonlocal left
        mixed.check_committed()
        if not method.startswith("after "):
            left -= 1
            return TransferError("the process is dead") if left < (0 if applied else 1) else None
        return TransferError("the process is dead") if left <= 0 else None

    mixed.run.rule = die
    mixed.run.apply(plan)
    mixed.run.rule = nothing
    mixed.check_committed()
    return left


def make_plan(mixed: Mixed) -> Plan:
    return mixed.run.catalog().scan().plan(KeepLatest(1), grace=HOUR)


def test_a_prune_alone_does_all(mixed: Mixed) -> None:
    objects = len(mixed.keys)
    report = mixed.run.prune("latest:1")
    mixed.check_done()
    assert (report.ok, report.left_alone) == (True, ())
    assert deleted(report) == ["step-1", "step-2", "step-5"]
    assert report.objects == objects - len(mixed.keep)


@pytest.mark.parametrize("applied", [True, False])
def test_cut_off_at_any_request_it_tears_nothing_and_the_next_one_completes_it(mixed: Mixed, applied: bool) -> None:
    plan = make_plan(mixed)
    seen: set[frozenset[str]] = set()
    requests, left = 0, 0
    while left <= 0:
        requests += 1
        mixed.put_back()
        left = cut_off(mixed, plan, requests, applied=applied)
        if mixed.keys not in seen:  # whatever its requests were, the next prune sees only this
            seen.add(mixed.keys)
            mixed.prune_to_the_end()
    assert requests > 20
    assert len(seen) > 10


@pytest.mark.parametrize("seed", range(4))
def test_cut_off_again_and_again_it_gets_there(mixed: Mixed, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(8):
        cut_off(mixed, make_plan(mixed), rng.randint(1, 20), applied=rng.random() < 0.5)
    mixed.prune_to_the_end()


def cut_off_after_the_commit(mixed: Mixed) -> None:
    """So that lists name what is left."""
    dead = TransferError("the process is dead")
    mixed.run.rule = lambda method, key: dead if method == "delete" and ".metadata" not in key else None
    assert not mixed.run.prune("latest:1").ok
    mixed.run.rule = nothing


def test_what_was_written_since_a_deletion_was_cut_off_stays(mixed: Mixed) -> None:
    """A foreign checkpoint is put back under the same names while a list names them."""
    data = {path: mixed.run.get("step-2", path) for path in mixed.run.objects("step-2")}
    cut_off_after_the_commit(mixed)
    assert ".metadata" not in mixed.run.objects("step-2")
    mixed.run.clock.now += 1
    for path, each in data.items():
        mixed.run.put("step-2", path, each)
    mixed.run.prune(keep_steps(2))
    assert set(mixed.run.objects("step-2")) == set(data)


def test_a_checkpoint_that_came_back_from_a_copy_is_not_torn_by_an_old_list(mixed: Mixed) -> None:
    metadata = mixed.run.memory.get("run/step-1/.metadata")
    cut_off_after_the_commit(mixed)
    mixed.run.put("step-1", ".metadata", metadata.data, metadata.metadata)
    report = mixed.run.prune(keep_steps(1))
    assert "run/step-1/.metadata" in mixed.keys
    mixed.check_committed()
    assert report.ok


# --- two at once ---------------------------------------------------------------------------------


class Turns:
    """Lets one of several threads go on at a time, up to its next request: which one is drawn."""

    def __init__(self, seed: int, work: Sequence[Callable[[], PruneReport]], check: Callable[[], None]) -> None:
        self._draw, self._check = random.Random(seed).choice, check
        self._waiting = threading.Condition()
        self._alive = list(range(len(work)))
        self._turn = 0
        self._mine = threading.local()
        self._work = work

    def run(self) -> list[PruneReport]:
        with ThreadPoolExecutor(len(self._work)) as pool:
            return list(pool.map(self._run, self._alive))

    def _run(self, number: int) -> PruneReport:
        self._mine.number = number
        try:
            with self._waiting:
                self._waiting.wait_for(lambda: self._turn == number, 60)
            return self._work[number]()
        finally:
            with self._waiting:
                self._alive = [each for each in self._alive if each != number]
                self._next()

    def _next(self) -> None:
        if self._alive:
            self._turn = self._draw(self._alive)
            self._waiting.notify_all()

    def rule(self, method: str, key: str) -> None:
        self._check()
        with self._waiting:
            self._next()
            assert self._waiting.wait_for(lambda: self._turn == self._mine.number, 60)


@pytest.mark.parametrize("seed", range(12))
def test_three_at_once_in_random_order_are_harmless(mixed: Mixed, seed: int) -> None:
    plan = make_plan(mixed)
    apply, prune = partial(mixed.run.apply, plan), partial(mixed.run.prune, "latest:1")
    turns = Turns(seed, [apply, apply, prune], mixed.check_committed)
    mixed.run.rule = turns.rule
    reports = turns.run()
    mixed.run.rule = nothing
    assert all(each.ok for each in reports)
    mixed.prune_to_the_end()
