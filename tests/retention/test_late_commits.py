"""Saves that commit after a prune took them for leftovers, and deletions that are slower than readers wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageReader, latest, pin, prune
from dcp_s3.checkpoint import commit_state, committer, deletion
from dcp_s3.checkpoint.commit import publish
from dcp_s3.errors import CheckpointDeletedError
from dcp_s3.format.layout import lease_object
from dcp_s3.s3.store import S3Store
from dcp_s3.store import ListedObject
from tests.faulty import FaultyServer
from tests.memory_s3 import Fault
from tests.retention.making import delete, get, keys, put, save, zeros
from tests.retention.runs import DAY, ROOT, Clock

URL = f"{ROOT}/step-2"


def load(url: str) -> None:
    dcp.load(zeros(), storage_reader=S3StorageReader(url), no_dist=True)


def lists(client: Any, url: str) -> list[str]:
    return [path for path in keys(client, url) if "deletion-" in path]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_whose_objects_a_prune_took_is_not_committed(
    faulty: FaultyServer, client: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    save(f"{ROOT}/step-3")
    if overwrite:
        save(URL)
    before = keys(client, URL)
    monkeypatch.setattr(commit_state, "LATE", -1.0)

    def late(*arguments: Any, **options: Any) -> None:
        clock.now += 2 * DAY
        prune(ROOT, "latest:3")
        publish(*arguments, **options)

    monkeypatch.setattr(committer, "publish", late)
    with pytest.raises(dcp.api.CheckpointException) as caught:
        save(URL, overwrite=overwrite)
    [error] = [each[0] for each in caught.value.failures.values()]
    assert isinstance(error, CheckpointDeletedError)
    assert "objects are gone" in str(error)
    assert keys(client, URL) == before
    if overwrite:
        load(URL)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_commit_between_a_prunes_look_and_its_deletes_is_withdrawn(
    faulty: FaultyServer, client: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    save(f"{ROOT}/step-3")
    if overwrite:
        save(URL)
    before = keys(client, URL)
    metadata = get(client, URL, ".metadata") if overwrite else b""
    monkeypatch.setattr(commit_state, "LATE", -1.0)
    real, commits, raised = S3Store.delete, list[Any](), list[Exception]()

    def later(*arguments: Any, **options: Any) -> None:
        commits.append((arguments, options))

    def delete(store: Any, targets: Any) -> Any:
        if commits:
            arguments, options = commits.pop()
            # Its first look came before the prune's list.
            looks = iter([None, commit_state.find_loss])
            monkeypatch.setattr("dcp_s3.checkpoint.commit.find_loss", lambda *a: (look := next(looks)) and look(*a))
            with pytest.raises(CheckpointDeletedError) as caught:
                publish(*arguments, **options)
            raised.append(caught.value)
        return real(store, targets)

    monkeypatch.setattr(committer, "publish", later)
    save(URL, overwrite=overwrite)
    clock.now += 2 * DAY
    monkeypatch.setattr(S3Store, "delete", delete)
    assert prune(ROOT, "latest:3").ok
    assert [str(each).count("about to delete") for each in raised] == [1]
    assert keys(client, URL) == before
    if overwrite:
        assert get(client, URL, ".metadata") == metadata
        load(URL)


def test_what_was_committed_after_the_listing_is_left_alone(faulty: FaultyServer, client: Any, clock: Clock) -> None:
    save(f"{ROOT}/step-9")
    save(URL)
    metadata = get(client, URL, ".metadata")
    delete(client, URL, ".metadata")
    clock.now += 2 * DAY

    def commit(request: Any) -> None:
        if "deletion-" in request.key and request.method == "PUT":
            faulty.rule = lambda _: None
            put(client, URL, ".metadata", metadata)

    faulty.rule = commit
    report = prune(ROOT)
    assert [(each.name, each.reason) for each in report.left_alone] == [("step-2", "it was committed")]
    assert lists(client, URL) == []
    load(URL)


def test_a_pin_while_s3_is_slow_to_delete_is_refused_or_kept(
    faulty: FaultyServer, client: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(f"{ROOT}/step-1")
    save(URL)
    url = f"{ROOT}/step-1"
    now = [0.0]
    real = deletion.time.monotonic
    monkeypatch.setattr(deletion.time, "monotonic", lambda: real() + now[0])

    def throttle(request: Any) -> Fault | None:
        if request.operation == "DeleteObject" and request.key.endswith(".metadata"):
            now[0] += deletion.DELETION_BEGINS
            clock.now += deletion.DELETION_BEGINS
            return Fault.error(503, "SlowDown")
        return None

    faulty.rule = throttle
    prune(ROOT, "latest:1")
    faulty.rule = lambda _: None
    load(url)
    clock.now += 1
    pin(url, "the paper's baseline")
    prune(ROOT, "latest:1")
    load(url)
    assert lists(client, url) == []


def test_what_is_written_again_with_equal_bytes_is_no_part_of_a_deletion_that_was_cut_off(
    faulty: FaultyServer, client: Any, clock: Clock
) -> None:
    save(f"{ROOT}/step-1")
    save(URL)
    url = f"{ROOT}/step-1"
    data = {path: get(client, url, path) for path in keys(client, url) if path != ".metadata"}
    faulty.rule = lambda request: Fault.error(403, "AccessDenied") if request.operation == "DeleteObjects" else None
    assert not prune(ROOT, "latest:1").ok
    faulty.rule = lambda _: None
    [path] = lists(client, url)
    listed = deletion.DeletionList.from_json(get(client, url, path))
    found = [
        ListedObject(f"run/step-1/{path}", len(data[path]), clock.now + 1, etag)
        for path, etag in listed.objects.items()
    ]
    directory = deletion.Directory.of(deletion.CheckpointURL("bucket", "run/step-1"), found)
    assert deletion.still_there(directory, listed, written_at=clock.now).objects == {}
    assert deletion.still_there(directory, listed, written_at=clock.now + 1).objects == listed.objects


def test_a_delete_that_s3_refuses_leaves_no_list(faulty: FaultyServer, client: Any, clock: Clock) -> None:
    save(f"{ROOT}/step-1")
    save(URL)
    faulty.rule = lambda request: (
        Fault.error(403, "AccessDenied")
        if request.operation == "DeleteObject" and request.key.endswith(".metadata")
        else None
    )
    assert not prune(ROOT, "latest:1").ok
    assert lists(client, f"{ROOT}/step-1") == []
    pin(f"{ROOT}/step-1")


def test_many_leases_of_the_newest_do_not_hide_it(faulty: FaultyServer, client: Any, clock: Clock) -> None:
    save(f"{ROOT}/step-1")
    save(URL)
    for number in range(1001):
        faulty.s3._store.put("bucket", f"run/step-2/{lease_object(f'{number:016x}', 900)}", b"", headers={})
    assert [each.name for each in prune(ROOT, "latest:1").deleted] == ["step-1"]
    assert latest(ROOT).name == "step-2"
