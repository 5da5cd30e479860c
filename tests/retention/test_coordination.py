"""Saves without collectives beside a prune: their claims, parts, intents, notices and manifests; a run's boards."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_s3 import CheckpointCatalog, S3StorageReader, copy, latest, list_checkpoints, prune, remove
from dcp_s3.checkpoint import commit_state
from dcp_s3.checkpoint.commit import Commit, make_commit, publish
from dcp_s3.checkpoint.commit_state import LATE, Beginning, Previous, SaveIdentity
from dcp_s3.errors import (
    CheckpointDeletedError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    CheckpointProtectedError,
)
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import CLAIM, joint_object, manifest_object
from dcp_s3.format.metadata import load_metadata
from dcp_s3.retention.show import describe
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import resolve_settings
from dcp_s3.url import parse_url
from tests.faulty import BUCKET, FaultyServer
from tests.retention.making import delete, get, is_manifest, keys, put, save, zeros
from tests.retention.runs import DAY, ROOT, Clock

SAVE = "0123456789abcdef"
COORDINATION = {CLAIM, joint_object(SAVE, "part", 1), joint_object(SAVE, "intent", 2), joint_object(SAVE, "roll", "ef")}
BOARD = ".dcp_s3/board-ab-queue"
URL = f"{ROOT}/step-2"


def load(url: str) -> None:
    dcp.load(zeros(), storage_reader=S3StorageReader(url), no_dist=True)


def merged(client: Any, url: str, merger: str) -> Commit:
    """What one more merger of the save that was committed at ``url`` would commit."""
    [path] = [path for path in keys(client, url) if is_manifest(path)]
    metadata = load_metadata(get(client, url, ".metadata"), url=url)
    identity = SaveIdentity(parse_url(url), SAVE + merger)
    metadata.storage_meta = StorageMeta(checkpoint_id=url, save_id=identity.save_id)
    objects = Manifest.from_json(get(client, url, path)).objects
    return make_commit(identity, metadata, objects, step=2, world_size=1, metrics={})


def store() -> S3Store:
    return S3Store(BUCKET, resolve_settings(None))


@pytest.mark.parametrize("path", sorted(COORDINATION))
def test_a_save_that_has_written_no_data_is_in_progress_and_then_a_leftover(
    faulty: FaultyServer, client: Any, clock: Clock, path: str
) -> None:
    save(f"{ROOT}/step-1")
    put(client, URL, path)
    assert [info.state for info in CheckpointCatalog(ROOT).checkpoints()] == ["committed", "in_progress"]
    assert not prune(ROOT).deleted
    with pytest.raises(CheckpointProtectedError, match="save is in progress"):
        remove(URL)
    clock.now += 2 * DAY
    assert [info.state for info in CheckpointCatalog(ROOT).checkpoints()] == ["committed", "leftover"]
    assert [each.name for each in prune(ROOT).deleted] == ["step-2"]
    assert keys(client, URL) == {}


def test_what_lies_beside_a_checkpoint_goes_when_all_of_it_is_old(
    faulty: FaultyServer, client: Any, clock: Clock
) -> None:
    save(f"{ROOT}/step-9")
    before = keys(client, save(URL))
    for path in COORDINATION - {CLAIM}:
        put(client, URL, path)
    clock.now += 2 * DAY
    put(client, URL, CLAIM)
    assert prune(ROOT).leftovers == ()
    assert not prune(ROOT, "latest:1").deleted  # somebody saves there
    clock.now += 2 * DAY
    [left] = prune(ROOT).leftovers
    assert (left.name, left.objects) == ("step-2", len(COORDINATION))
    assert keys(client, URL) == before


def test_a_claim_that_another_save_took_meanwhile_stays(faulty: FaultyServer, client: Any, clock: Clock) -> None:
    save(URL)
    clock.now += 1
    put(client, URL, CLAIM, b"old")
    clock.now += 2 * DAY

    def claim(request: Any) -> None:
        if request.operation in ("DeleteObject", "DeleteObjects"):
            faulty.rule = lambda _: None
            put(client, URL, CLAIM, b"new")

    faulty.rule = claim
    prune(ROOT)
    assert get(client, URL, CLAIM) == b"new"


@pytest.mark.parametrize("path", [*sorted(COORDINATION), manifest_object(SAVE + "00000001")])
@pytest.mark.parametrize("kind", ["committed", "uncommitted", "leftovers"])
def test_a_save_that_goes_on_while_the_list_is_written_loses_nothing(
    faulty: FaultyServer, client: Any, clock: Clock, path: str, kind: str
) -> None:
    save(f"{ROOT}/step-9")
    save(URL)
    if kind == "uncommitted":
        delete(client, URL, ".metadata")
    if kind == "leftovers":
        put(client, URL, "__0_0-abcdef.distcp")
    before = keys(client, URL)
    clock.now += 2 * DAY

    def write(request: Any) -> None:
        if "deletion-" in request.key and request.method == "PUT":
            faulty.rule = lambda _: None
            put(client, URL, path)

    faulty.rule = write
    report = prune(ROOT, "latest:1" if kind == "committed" else "latest:9")
    assert [each.name for each in report.left_alone] == ["step-2"]
    assert "a save is in progress" in report.left_alone[0].reason
    assert keys(client, URL) == {**before, path: 1}


def test_of_several_mergers_manifests_the_one_that_the_commit_names_counts(
    faulty: FaultyServer, client: Any, clock: Clock
) -> None:
    save(URL)
    commits = [merged(client, URL, f"0000000{number}") for number in range(3)]
    [path] = [path for path in keys(client, URL) if is_manifest(path)]
    delete(client, URL, path)
    delete(client, URL, ".metadata")
    for number in (0, 2):  # killed before they committed
        put(client, URL, manifest_object(commits[number].identity.save_id), commits[number].manifest)
    clock.now += 1
    publish(store(), commits[1], Previous(), keep_objects=True)
    with pytest.raises(CheckpointExistsError):
        publish(store(), commits[2], Previous(), keep_objects=True)
    info = latest(ROOT)
    assert info is not None
    assert (info.save_id, info.damage) == (SAVE + "00000001", None)
    load(URL)
    assert all(each.used for each in describe(URL).objects)
    copy(URL, f"s3://{BUCKET}/elsewhere/step-2")
    assert {path for path in keys(client, f"s3://{BUCKET}/elsewhere/step-2") if is_manifest(path)} == {
        manifest_object(SAVE + "00000001")
    }
    clock.now += 2 * DAY
    [left] = prune(ROOT).leftovers
    assert left.objects == 2
    assert [path for path in keys(client, URL) if is_manifest(path)] == [manifest_object(SAVE + "00000001")]
    load(URL)


def test_a_merger_that_comes_after_the_checkpoint_was_pruned_does_not_bring_it_back(
    faulty: FaultyServer, client: Any, clock: Clock
) -> None:
    save(URL)
    late = merged(client, URL, "00000001")
    save(f"{ROOT}/step-9")
    assert [each.name for each in prune(ROOT, "latest:1").deleted] == ["step-2"]
    with pytest.raises(CheckpointDeletedError):
        publish(store(), late, Previous(), keep_objects=True, is_late=lambda: True)
    assert ".metadata" not in keys(client, URL)


def test_a_merge_is_late_if_any_rank_began_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_state.time, "time", lambda: 10_000.0)
    begun = Beginning(at=9_999.0)
    assert not begun.is_late()
    assert not begun.at_the_earliest([10_001.0]).is_late()
    assert begun.at_the_earliest([9_000.0, 10_000.0 - LATE - 1]).is_late()
    assert Beginning(at=1.0).at_the_earliest([9_999.0]).is_late()


def test_a_copy_leaves_out_what_ranks_told_each_other(faulty: FaultyServer, client: Any) -> None:
    before = keys(client, save(URL))
    for path in (*COORDINATION, BOARD):
        put(client, URL, path)
    copy(URL, f"{ROOT}/step-3")
    assert keys(client, f"{ROOT}/step-3").keys() == before.keys()


def test_boards_make_a_run_no_checkpoint(faulty: FaultyServer, client: Any) -> None:
    put(client, ROOT, BOARD)
    assert latest(ROOT) is None
    assert list_checkpoints(ROOT) == []
    assert list_checkpoints(f"s3://{BUCKET}") == []
    with pytest.raises(CheckpointNotFoundError):
        describe(ROOT)
    save(URL)
    assert [info.name for info in list_checkpoints(ROOT)] == ["step-2"]
    assert list_checkpoints(f"s3://{BUCKET}") == []


def test_a_run_with_boards_is_not_listed_whole(faulty: FaultyServer, client: Any) -> None:
    put(client, ROOT, BOARD)
    save(URL)
    faulty.s3.reset_counters()
    assert list_checkpoints(f"s3://{BUCKET}") == []
    listed = [entry for entry in faulty.s3.counters.requests.items() if entry[0] == "ListObjectsV2"]
    assert listed == [("ListObjectsV2", 3)]  # the bucket, what begins with a dot in the run, and its directories


def test_old_boards_go(faulty: FaultyServer, client: Any, clock: Clock) -> None:
    save(f"{ROOT}/step-9")
    put(client, ROOT, BOARD)
    put(client, ROOT, ".dcp_s3/other")
    clock.now += DAY - 60
    put(client, ROOT, ".dcp_s3/board-cd-queue")
    assert prune(ROOT, grace="1h").leftovers == ()
    clock.now += 120
    plan = prune(ROOT, grace="1h", dry_run=True).plan
    assert not plan.empty
    assert [each.key for each in plan.boards] == [f"run/{BOARD}"]
    assert prune(ROOT, grace="48h").leftovers == ()
    [left] = prune(ROOT, grace="1h").leftovers
    assert (left.name, left.objects) == (".dcp_s3", 1)
    assert {path for path in keys(client, ROOT) if path.startswith(".dcp_s3/")} == {
        ".dcp_s3/board-cd-queue",
        ".dcp_s3/other",
    }


def test_the_claim_of_a_checkpoint_stays_and_goes_with_it(faulty: FaultyServer, client: Any, clock: Clock) -> None:
    put(client, URL, CLAIM)
    save(URL)
    before = keys(client, URL)
    assert prune(ROOT).leftovers == ()
    clock.now += 2 * DAY
    assert prune(ROOT).leftovers == ()
    assert keys(client, URL) == before
    put(client, f"{ROOT}/step-9", CLAIM)
    save(f"{ROOT}/step-9")
    assert [each.name for each in prune(ROOT, "latest:1").deleted] == ["step-2"]
    assert keys(client, URL) == {}


def test_a_checkpoint_of_a_moment_ago_is_pruned_though_it_was_claimed(
    faulty: FaultyServer, client: Any, clock: Clock
) -> None:
    for name in ("step-2", "step-9"):
        put(client, f"{ROOT}/{name}", CLAIM)
        save(f"{ROOT}/{name}")
    assert [each.name for each in prune(ROOT, "latest:1").deleted] == ["step-2"]
