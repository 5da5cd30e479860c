"""Prune beside saves: those that commit while, or after, it took them for leftovers, and those without collectives."""

from __future__ import annotations

import time
from functools import partial

import pytest

from dcp_s3.checkpoint.lease import DELETION_BEGINS
from dcp_s3.errors import (
    CheckpointDeletedError,
    CheckpointProtectedError,
    TransferError,
)
from dcp_s3.format.control_files import DeletionList
from dcp_s3.format.layout import CLAIM, deletion_object, manifest_object
from dcp_s3.retention.plan import BOARDS_STAY
from tests.retention.runs import BOARD, COORDINATION, DAY, Run, deleted, keep_steps

SAVE = "0123456789abcdef"


def lists(run: Run, name: str) -> list[str]:
    return [path for path in run.objects(name) if "deletion-" in path]


# --- saves that commit late ------------------------------------------------------------------------------


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_whose_objects_a_prune_took_is_not_committed(run: Run, overwrite: bool) -> None:
    run.steps(3, *([2] if overwrite else []))
    before = run.objects("step-2")
    committer, commit = run.begin("step-2", overwrite=overwrite, late=True)
    run.clock.now += 2 * DAY
    run.prune("latest:3")
    with pytest.raises(CheckpointDeletedError, match="objects are gone"):
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
    with pytest.raises(CheckpointDeletedError, match="about to delete 1 of its 1" if how == "listed" else "gone"):
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


# --- deletions that are slow, or refused -----------------------------------------------------------------


def test_a_pin_while_s3_is_slow_to_delete_is_refused_or_kept(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.steps(1, 2)
    now, real = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + now[0])

    def throttle(method: str, key: str) -> Exception | None:
        if method != "delete" or not key.endswith("step-1/.metadata"):
            return None
        now[0] += DELETION_BEGINS
        run.clock.now += DELETION_BEGINS
        return TransferError("SlowDown")

    run.rule = throttle
    assert not run.prune("latest:1").ok
    run.rule = lambda method, key: None
    run.clock.now += 1
    run.pin("step-1", "the paper's baseline")
    run.prune("latest:1")
    assert run.damages() == [None, None]
    assert lists(run, "step-1") == []


def test_a_list_whose_time_was_over_before_its_first_delete_is_withdrawn(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.steps(1, 2)
    real, late = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + late[0])

    def dawdle() -> None:
        late[0] = DELETION_BEGINS

    run.once("put", "deletion-", dawdle)
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
    with pytest.raises(CheckpointProtectedError, match="save is in progress"):
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
