"""Prune beside saves that commit while, or after, it took them for leftovers; cut off; and beside another prune."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
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
@pytest.mark.parametrize("how", ["pruned before", "listed", "gone"])
def test_a_save_whose_objects_a_prune_takes_or_is_about_to_take_is_not_committed(
    run: Run, overwrite: bool, how: str
) -> None:
    run.steps(3, *([2] if overwrite else []))
    before, metadata = run.objects("step-2"), run.get("step-2", ".metadata") if overwrite else b""
    committer, commit = run.begin("step-2", overwrite=overwrite, late=True)
    path, listed = commit.objects[0].path, deletion_object("ab", "cd")
    if how == "pruned before":
        run.clock.now += 2 * DAY
        run.prune("latest:3")
    else:  # after the committer's first look
        data = DeletionList(None, {}, {path: ""}).to_json()
        gone, named = partial(run.delete, "step-2", path), partial(run.put, "step-2", listed, data)
        run.once("put", "step-2/.metadata", named if how == "listed" else gone)
    with pytest.raises(errors.CheckpointDeletedError, match="to delete 1 of its 1" if how == "listed" else "are gone"):
        committer.commit(run.store, commit, spilled=False)
    assert {key: size for key, size in run.objects("step-2").items() if key not in (path, listed)} == before
    assert set(run.damages()) == {None}
    assert not overwrite or run.get("step-2", ".metadata") == metadata


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


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *product(
            ("committed", "uncommitted", "leftovers"), (*sorted(COORDINATION), manifest_object(SAVE + "00000001"))
        ),
        ("uncommitted", "committed"),
        ("leftovers", "overwritten"),
    ],
)
def test_a_save_that_goes_on_while_the_list_is_written_loses_nothing(run: Run, kind: str, change: str) -> None:
    run.steps(9, 2)
    metadata = run.memory.get("run/step-2/.metadata")
    if kind == "uncommitted":
        run.delete("step-2", ".metadata")
    if kind == "leftovers":
        run.put("step-2", "__0_0-abcdef.distcp")
    before = run.objects("step-2")
    run.clock.now += 2 * DAY
    changes: dict[str, Callable[[], object]] = {
        "committed": lambda: run.put("step-2", ".metadata", metadata.data, metadata.metadata),
        "overwritten": lambda: run.save("step-2", overwrite=True),
    }
    run.once("put", "deletion-", changes.get(change, lambda: run.put("step-2", change)))
    [left] = run.prune("latest:1" if kind == "committed" else "latest:9").left_alone
    assert left.name == "step-2"
    assert (f"it was {change}" if change in changes else "a save is in progress") in left.reason
    after = run.objects("step-2")
    if change == "overwritten":
        assert "__0_0-abcdef.distcp" in after
        assert lists(run, "step-2") == []
    else:
        assert after == {**before, change: 1} if change not in changes else {**before, ".metadata": len(metadata.data)}
    assert set(run.damages()) <= {None}


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


def in_turn(mixed: Mixed, seed: int, *work: Callable[[], PruneReport]) -> list[PruneReport]:
    """Carry out work on threads, of which one at a time goes on, up to its next request: which one is drawn."""
    draw, alive, turn = random.Random(seed).choice, list(range(len(work))), 0
    changed, mine = threading.Condition(), threading.local()

    def pass_on() -> None:
        nonlocal turn
        turn = draw(alive) if alive else turn
        changed.notify_all()

    def wait() -> None:
        assert changed.wait_for(lambda: turn == mine.number, 60)

    def rule(method: str, key: str) -> None:
        mixed.check_committed()
        with changed:
            pass_on()
            wait()

    def run(number: int) -> PruneReport:
        mine.number = number
        with changed:
            wait()
        try:
            return work[number]()
        finally:
            with changed:
                alive.remove(number)
                pass_on()

    mixed.run.rule = rule
    with ThreadPoolExecutor(len(work)) as pool:
        reports = list(pool.map(run, range(len(work))))
    mixed.run.rule = nothing
    return reports


@pytest.mark.parametrize("seed", range(12))
def test_three_at_once_in_random_order_are_harmless(mixed: Mixed, seed: int) -> None:
    apply, prune = partial(mixed.run.apply, make_plan(mixed)), partial(mixed.run.prune, "latest:1")
    assert all(each.ok for each in in_turn(mixed, seed, apply, apply, prune))
    mixed.prune_to_the_end()
