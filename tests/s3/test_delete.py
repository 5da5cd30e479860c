"""Deletes on S3: a prune on every server, versions, batches, and stores that are different."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dcp_s3 import errors, latest, prune, remove
from dcp_s3.s3 import operations
from dcp_s3.s3.listing import StoredVersion, old_versions
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.store import DeleteTarget
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.retention.making import keys, put, save

NAMES = ["step-1", "step 2", "step+3", "%20 step 4", "ü-step5", "step&<6>", "a\"b'step7", "step-10"]
RUN = f"s3://{BUCKET}/run"


def test_names_of_every_kind_and_only_these(s3: Any, root: str) -> None:
    run = root + "/läuf +%2B"
    for name in NAMES:
        save(f"{run}/{name}")
        save(f"{run}x/{name}")
    kept = {"step-10": keys(s3, f"{run}/step-10")}
    others = keys(s3, f"{run}x")
    report = prune(run, "steps:10")
    assert (report.ok, report.left_alone) == (True, ())
    assert {each.name for each in report.deleted} == set(NAMES) - set(kept)
    assert keys(s3, run) == {f"{name}/{path}": size for name, found in kept.items() for path, size in found.items()}
    assert keys(s3, f"{run}x") == others


# --- versions ------------------------------------------------------------------------------------


@pytest.fixture
def versioned(s3: Any, bucket: str, root: str) -> Iterator[str]:
    s3.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})
    yield root
    for each in versions(s3, bucket):
        s3.delete_object(Bucket=bucket, Key=each["Key"], VersionId=each["VersionId"])


def versions(s3: Any, bucket: str) -> list[dict[str, Any]]:
    pages = list(s3.get_paginator("list_object_versions").paginate(Bucket=bucket))
    return [each for page in pages for name in ("Versions", "DeleteMarkers") for each in page.get(name, ())]


@pytest.mark.servers("moto")
def test_all_versions_leaves_nothing_of_what_goes_and_all_of_what_stays(s3: Any, bucket: str, versioned: str) -> None:
    for step in (1, 2):
        save(f"{versioned}/step-{step}")
    save(f"{versioned}/step-1", overwrite=True)
    put(s3, f"{versioned}/step-1", "notes.txt")
    save(f"{versioned}/step-10")  # the last to be committed, which always stays, is the newest
    before = {(each["Key"], each["VersionId"]) for each in versions(s3, bucket)}
    report = prune(versioned, "latest:1", all_versions=True)
    assert (report.ok, [each.name for each in report.deleted]) == (True, ["step-1", "step-2"])
    left = versions(s3, bucket)
    # What the overwriting save had replaced has other names, and was deleted by it.
    replaced = [each for each in left if "/step-1/" in each["Key"] and not each["Key"].endswith("notes.txt")]
    assert not [each for each in left if each["Key"].endswith(("step-1/.metadata", "metrics.json"))]
    assert not [each for each in left if "deletion-" in each["Key"] or "/step-2/" in each["Key"]]
    assert len(replaced) == 4  # a data object and a manifest, with a marker each
    stays = {each for each in before if "/step-10/" in each[0] or each[0].endswith("notes.txt")}
    assert stays <= {(each["Key"], each["VersionId"]) for each in left}
    assert latest(versioned) is not None
    remove(f"{versioned}/step-10", all_versions=True)
    assert not [each for each in versions(s3, bucket) if "/step-10/" in each["Key"]]


def test_all_versions_needs_a_store_that_lists_them(faulty: FaultyServer) -> None:
    for step in (1, 2):
        save(f"{RUN}/step-{step}")
    before = faulty.s3.objects(BUCKET)
    with pytest.raises(errors.StorageError, match="ListObjectVersions"):
        prune(RUN, "latest:1", all_versions=True)
    assert faulty.s3.objects(BUCKET) == before


def test_markers_go_last_and_what_is_current_stays() -> None:
    def version(key: str, number: str, **fields: bool) -> StoredVersion:
        return StoredVersion(key, number, **({"is_current": False, "is_marker": False} | fields))

    found = [
        version("m", "3", is_current=True), version("m", "2", is_marker=True), version("m", "1"),
        version("d", "2", is_current=True, is_marker=True), version("d", "1"), version("other", "1"),
    ]  # fmt: skip
    steps = old_versions(found, {"m"}, {"d"})
    assert [[(each.key, each.version_id) for each in step] for step in steps] == [
        [("m", "1")], [("d", "1")], [("m", "2"), ("d", "2")],
    ]  # fmt: skip


# --- batches, and stores that are different ------------------------------------------------------


@pytest.fixture
def store(faulty: FaultyServer) -> S3Store:
    """With the objects a, b, c."""
    operations.forget()
    store = S3Store(BUCKET, Settings())
    for key in "abc":
        store.put(key, b"1")
    return store


@pytest.mark.parametrize("status", [501, 400])
def test_without_deleteobjects_objects_go_one_by_one(store: S3Store, faulty: FaultyServer, status: int) -> None:
    faulty.s3.reset_counters()
    faulty.rule = lambda request: (
        Fault.error(status, "InvalidRequest") if request.operation == "DeleteObjects" else None
    )
    assert store.delete(["a", "b"]) == []
    assert faulty.s3.objects(BUCKET) == {"c": 1}
    store.delete(["b", "c"])
    assert faulty.s3.objects(BUCKET) == {}
    assert faulty.s3.counters.requests["DeleteObjects"] == 1 + (status == 400)


@pytest.mark.parametrize("keys", [["a"], ["a", "b"]])
def test_a_store_that_refuses_conditions_that_hold_is_asked_without(
    store: S3Store, faulty: FaultyServer, keys: list[str]
) -> None:
    faulty.rule = lambda request: Fault.error(412, "PreconditionFailed") if "if-match" in request.headers else None
    assert store.delete([DeleteTarget(key, store.head(key).etag) for key in keys]) == []
    assert not set(keys) & faulty.s3.objects(BUCKET).keys()


def test_throttled_keys_are_tried_again(store: S3Store, faulty: FaultyServer) -> None:
    left = [6]

    def throttle(request: Any) -> Fault | None:
        if request.operation == "DeleteObjects" and left[0]:
            left[0] -= 1
            return Fault.delete_partly("SlowDown") if left[0] % 2 else Fault.error(503, "SlowDown")
        return None

    faulty.rule = throttle
    assert store.delete(["a", "b"]) == []
    assert (left, faulty.s3.objects(BUCKET)) == ([0], {"c": 1})


def test_newlines_in_keys_of_a_batch(store: S3Store, faulty: FaultyServer) -> None:
    """XML makes spaces of them unless they are escaped."""
    for key in ("a\n-2\r", "a -2 "):
        store.put(key, b"1")
    assert store.delete(["a\n-2\r", "b"]) == []
    assert faulty.s3.objects(BUCKET).keys() == {"a", "a -2 ", "c"}


def test_a_key_that_is_never_deleted_fails_and_the_others_go(store: S3Store, faulty: FaultyServer) -> None:
    faulty.rule = lambda _: Fault.delete_partly("AccessDenied")
    with pytest.raises(errors.AccessDeniedError, match="'a' was not deleted"):
        store.delete(["a", "b", "c"])
    assert faulty.s3.objects(BUCKET) == {"a": 1}
