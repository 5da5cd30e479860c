"""Prune beside saves that commit while, or after, it took them for leftovers; cut off; and beside another prune."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dcp_s3 import KeepLatest, Plan, PruneReport, errors
from dcp_s3.checkpoint.lease import DELETION_BEGINS
from dcp_s3.coordination import processes
from dcp_s3.format.control_files import DeletionList
from dcp_s3.format.layout import CLAIM, deletion_object, manifest_object
from dcp_s3.retention.plan import BOARDS_STAY
from tests.retention.runs import BOARD, COORDINATION, DAY, HOUR, Mixed, Run, deleted, keep_steps, nothing

SAVE = "0123456789abcdef"


def lists(run: Run, name: str) -> list[str]:
    return [path for path in run.objects(name) if "deletion-" in path]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_whose_objects_a_prune_took_is_not_committed(run: Run, overwrite: bool) -> None:
    run.steps(3, *([2] if overwrite else []))
    before = run.objects("step-2")
    committer, commit = run.begin("step-2", overwrite=overwrite, late=True)
    run.clock.now += 2 * DAY
    run.prune("latest:3")
    with pytest.raises(errors.CheckpointDeletedError, match="objects are gone"):
        committer.commit(run.store, commit, spilled=False)
    assert run.objects("step-2") == before
    assert set(run.damages()) == {None}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("how", ["listed", "gone"])
def test_a_commit_whose_objects_go_after_its_first_look_is_withdrawn(run: Run, overwrite: bool, how: str) -> None:
    run.steps(3, *([2] if overwrite else []))
    before, metadata = run.objects("step-2"), run.get("step-2", ".metadata") if overwrite else b""
    committer, commit = run.begin("step-2", overwrite=overwrite, late=True)
    path = commit.objects[0].path
    listed = DeletionList(None, {}, {path: ""}).to_json()
    change = partial(run.delete, "step-2", path)
    if how == "listed":
        change = partial(run.put, "step-2", deletion_object("ab", "cd"), listed)
    run.once("put", "step-2/.metadata", change)
    with pytest.raises(
        errors.CheckpointDeletedError, match="about to delete 1 of its 1" if how == "listed" else "gone"
    ):
        committer.commit(run.store, commit, spilled=False)
    left = run.objects("step-2")
    assert {key: size for key, size in left.items() if key not in (path, deletion_object("ab", "cd"))} == before
    assert set(run.damages()) == {None}
    assert not overwrite or run.get("step-2", ".metadata") == metadata


def test_what_was_committed_after_the_listing_is_left_alone(run: Run) -> None:
    run.steps(9, 2)
    metadata = run.memory.get("run/step-2/.metadata")
    run.delete("step-2", ".metadata")
    run.clock.now += 2 * DAY
    run.once("put", "deletion-", lambda: run.put("step-2", ".metadata", metadata.data, metadata.metadata))
    report = run.prune()
    assert [(each.name, each.reason) for each in report.left_alone] == [("step-2", "it was committed")]
    assert lists(run, "step-2") == []
    assert run.damages() == [None, None]


def test_a_save_that_was_to_replace_what_a_prune_deleted_commits(run: Run) -> None:
    run.steps(1, 2)
    run.once("put", ".distcp", lambda: run.prune("latest:1"))
    run.save("step-1", overwrite=True)
    assert run.damages() == [None, None]


@pytest.mark.parametrize("path", [".metadata", "__0.metadata"])
def test_a_commit_that_s3_carries_out_after_a_prune_is_damaged_and_goes(run: Run, path: str) -> None:
    """Others had committed the checkpoint, and it was pruned since."""
    run.steps(1)
    run.save("step-2", rank=None if path == ".metadata" else 0)
    late = run.memory.get(f"run/step-2/{path}")
    run.steps(3)
    run.prune(keep_steps(1))
    run.put("step-2", path, late.data, late.metadata)
    run.put("step-4", path, late.data, late.metadata)
    for infos in (run.catalog().checkpoints(), run.catalog().scan().checkpoints):
        assert [info.name for info in infos if info.damage is None] == ["step-1", "step-3"]
        assert all("is not there" in (info.damage or "is not there") for info in infos)
    assert run.latest() == "step-3"
    assert deleted(run.prune("latest:1")) == ["step-1", "step-2"]
    assert run.objects("step-2") == {}
    run.steps(5)
    assert deleted(run.prune("latest:1")) == ["step-3", "step-4"]


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds by which this host's time is later than it is."""
    late, real = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + late[0])
    return late


def test_a_pin_while_s3_is_slow_to_delete_is_refused_or_kept(run: Run, late: list[float]) -> None:
    run.steps(1, 2)

    def throttle(method: str, key: str) -> Exception | None:
        if method != "delete" or not key.endswith("step-1/.metadata"):
            return None
        late[0] += DELETION_BEGINS
        run.clock.now += DELETION_BEGINS
        return errors.TransferError("SlowDown")

    run.rule = throttle
    assert not run.prune("latest:1").ok
    run.rule = lambda method, key: None
    run.clock.now += 1
    run.pin("step-1", "the paper's baseline")
    run.prune("latest:1")
    assert run.damages() == [None, None]
    assert lists(run, "step-1") == []


def test_a_list_whose_time_was_over_before_its_first_delete_is_withdrawn(run: Run, late: list[float]) -> None:
    run.steps(1, 2)
    run.once("put", "deletion-", lambda: late.insert(0, DELETION_BEGINS))
    report = run.prune("latest:1")
    assert [(each.name, "too slow" in each.reason) for each in report.left_alone] == [("step-1", True)]
    assert (lists(run, "step-1"), run.names()) == ([], ["step-1", "step-2"])


# --- saves without collectives: claims, parts, intents, notices, manifests, boards ----------------------


@pytest.mark.parametrize("path", sorted(COORDINATION))
def test_a_save_that_has_written_no_data_is_in_progress_and_then_a_leftover(run: Run, path: str) -> None:
    run.steps(1)
    run.put("step-2", path)
    assert run.states() == {"step-1": "committed", "step-2": "in_progress"}
    assert not run.prune().deleted
    with pytest.raises(errors.CheckpointProtectedError, match="save is in progress"):
        run.remove("step-2")
    run.clock.now += 2 * DAY
    assert run.states() == {"step-1": "committed", "step-2": "leftover"}
    assert deleted(run.prune()) == ["step-2"]
    assert run.objects("step-2") == {}


def test_what_lies_beside_a_checkpoint_goes_when_all_of_it_is_old(run: Run) -> None:
    run.steps(9, 2)
    before = run.objects("step-2")
    for path in COORDINATION[1:]:
        run.put("step-2", path)
    run.clock.now += 2 * DAY
    run.put("step-2", CLAIM)
    assert run.prune().leftovers == ()
    assert not run.prune("latest:1").deleted  # somebody saves there
    run.clock.now += 2 * DAY
    [left] = run.prune().leftovers
    assert (left.name, left.objects) == ("step-2", len(COORDINATION))
    assert run.objects("step-2") == before


def test_a_claim_that_another_save_took_meanwhile_stays(run: Run) -> None:
    run.steps(2)
    run.clock.now += 1
    run.put("step-2", CLAIM, b"old")
    run.clock.now += 2 * DAY
    run.once("delete", "", lambda: run.put("step-2", CLAIM, b"new"))
    run.prune()
    assert run.get("step-2", CLAIM) == b"new"


@pytest.mark.parametrize("path", [*sorted(COORDINATION), manifest_object(SAVE + "00000001")])
@pytest.mark.parametrize("kind", ["committed", "uncommitted", "leftovers"])
def test_a_save_that_goes_on_while_the_list_is_written_loses_nothing(run: Run, path: str, kind: str) -> None:
    run.steps(9, 2)
    if kind == "uncommitted":
        run.delete("step-2", ".metadata")
    if kind == "leftovers":
        run.put("step-2", "__0_0-abcdef.distcp")
    before = run.objects("step-2")
    run.clock.now += 2 * DAY
    run.once("put", "deletion-", lambda: run.put("step-2", path))
    report = run.prune("latest:1" if kind == "committed" else "latest:9")
    assert [each.name for each in report.left_alone] == ["step-2"]
    assert "a save is in progress" in report.left_alone[0].reason
    assert run.objects("step-2") == {**before, path: 1}


def test_leftovers_of_a_checkpoint_that_is_replaced_while_their_list_is_written_stay(run: Run) -> None:
    run.steps(9, 2)
    run.put("step-2", "__0_0-abcdef.distcp")
    run.clock.now += 2 * DAY
    run.once("put", "deletion-", lambda: run.save("step-2", overwrite=True))
    report = run.prune()
    assert [(each.name, each.reason) for each in report.left_alone] == [("step-2", "it was overwritten")]
    assert "__0_0-abcdef.distcp" in run.objects("step-2")
    assert lists(run, "step-2") == []


def test_the_list_of_leftovers_has_no_etags_so_that_nobody_finishes_it_without_a_look(run: Run) -> None:
    run.steps(9)
    run.put("step-9", "__0_0-abcdef.distcp")
    run.clock.now += 2 * DAY
    seen: list[DeletionList] = []
    run.once("delete", "", lambda: seen.extend(
        DeletionList.from_json(run.get("step-9", path)) for path in lists(run, "step-9")
    ))  # fmt: skip
    run.prune()
    assert [each.objects for each in seen] == [{"__0_0-abcdef.distcp": ""}]


def test_boards_make_a_run_no_checkpoint_and_go_when_they_are_old(run: Run) -> None:
    run.put("", BOARD)
    assert (run.latest(), run.names(), run.names("s3://bucket")) == (None, [], [])
    run.put("", ".dcp_s3/other")
    run.steps(9)
    run.clock.now += BOARDS_STAY - 60
    run.put("", ".dcp_s3/board-cd-queue")
    assert run.prune(grace="1h").plan.empty
    run.clock.now += 120
    assert run.prune(grace="48h").plan.empty
    [left] = run.prune(grace="1h").leftovers
    assert (left.name, left.objects) == (".dcp_s3", 1)
    assert {path for path in run.objects() if path.startswith("run/.dcp_s3/")} == {
        "run/.dcp_s3/board-cd-queue", "run/.dcp_s3/other",
    }  # fmt: skip
    run.clock.now += 2 * DAY
    run.put("", BOARD)
    run.clock.now += 1.5 * DAY
    assert run.prune(grace="48h").leftovers  # each by itself: one within the grace period keeps no other
    assert "run/.dcp_s3/board-cd-queue" not in run.objects()
    assert f"run/{BOARD}" in run.objects()


# --- prunes that are cut off at any request, or meet another one ---------------------------------------


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
            return errors.TransferError("the process is dead") if left < (0 if applied else 1) else None
        return errors.TransferError("the process is dead") if left <= 0 else None

    mixed.run.rule = die
    mixed.run.apply(plan)
    mixed.run.rule = nothing
    mixed.check_committed()
    return left


def make_plan(mixed: Mixed) -> Plan:
    return mixed.run.catalog().scan().plan(KeepLatest(1), grace=HOUR)


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
    dead = errors.TransferError("the process is dead")
    mixed.run.rule = lambda method, key: dead if method == "delete" and ".metadata" not in key else None
    assert not mixed.run.prune("latest:1").ok
    mixed.run.rule = nothing


def test_what_was_written_since_a_deletion_was_cut_off_stays(mixed: Mixed) -> None:
    """Another library saves the same bytes under the same names while a list names them: their ETags are the same."""
    before, storage = mixed.run.memory.snapshot()[0], mixed.run.memory._storage
    cut_off_after_the_commit(mixed)
    assert ".metadata" not in mixed.run.objects("step-2")
    mixed.run.clock.now += 1
    again = {key: entry for key, entry in before.items() if key.startswith("run/step-2/") and ".metadata" not in key}
    for key, entry in again.items():
        storage.objects[key] = replace(entry, modified_at=mixed.run.clock.now)
    mixed.run.prune(keep_steps(2))
    assert {f"run/step-2/{path}" for path in mixed.run.objects("step-2")} == set(again)


def test_a_checkpoint_that_came_back_from_a_copy_is_not_torn_by_an_old_list(mixed: Mixed) -> None:
    metadata = mixed.run.memory.get("run/step-1/.metadata")
    cut_off_after_the_commit(mixed)
    mixed.run.put("step-1", ".metadata", metadata.data, metadata.metadata)
    report = mixed.run.prune(keep_steps(1))
    assert "run/step-1/.metadata" in mixed.keys
    mixed.check_committed()
    assert report.ok


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
