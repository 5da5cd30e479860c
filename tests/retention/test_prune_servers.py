"""Prune on real servers: names, versions, and stores that have no DeleteObjects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dcp_s3 import CheckpointCatalog, errors, latest, prune, remove
from dcp_s3.s3 import operations, retry
from dcp_s3.s3.listing import StoredVersion, old_versions
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.store import DeleteTarget
from dcp_s3.url import parse_url
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault
from tests.retention.making import keys, put, save

NAMES = ["step-1", "step 2", "step+3", "%20 step 4", "ü-step5", "step&<6>", "a\"b'step7", "step-10"]


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


def test_keys_of_every_kind_in_one_batch(s3: Any, bucket: str) -> None:
    names = ["a b", "a+b", "a%20b", "ü/\U0001f600", "&<>\"'", "]]>", "a", "ab", "__0_0.distcp"]
    for name in [*names, *(f"{name}x" for name in names)]:
        s3.put_object(Bucket=bucket, Key=f"run/{name}", Body=b"1")
    assert S3Store(bucket, Settings()).delete([DeleteTarget(f"run/{name}") for name in names]) == []
    assert set(keys(s3, f"s3://{bucket}/run")) == {f"{name}x" for name in names}


@pytest.mark.servers("memory")
def test_newlines_in_the_name_of_a_checkpoint(s3: Any, root: str) -> None:
    for name in ("step-1", "step\n-2\r", "step-3"):
        save(f"{root}/{name}")
    assert prune(root, "latest:1").ok
    assert {path.split("/")[0] for path in keys(s3, root)} == {"step-3"}


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
def test_with_versions_deleted_checkpoints_stay_behind_markers(s3: Any, bucket: str, versioned: str) -> None:
    for step in (1, 2):
        save(f"{versioned}/step-{step}")
    before = {(each["Key"], each["VersionId"]) for each in versions(s3, bucket)}
    assert prune(versioned, "latest:1").ok
    assert [info.name for info in CheckpointCatalog(versioned).checkpoints()] == ["step-2"]
    assert before <= {(each["Key"], each["VersionId"]) for each in versions(s3, bucket)}


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


def test_all_versions_needs_a_store_that_lists_them(s3: Any, root: str, memory_server: Any) -> None:
    for step in (1, 2):
        save(f"{root}/step-{step}")
    before = keys(s3, root)
    with pytest.raises(errors.StorageError, match="ListObjectVersions"):
        prune(root, "latest:1", all_versions=True)
    assert keys(s3, root) == before


def test_markers_go_last_and_what_is_current_stays() -> None:
    def version(key: str, number: str, **fields: bool) -> StoredVersion:
        return StoredVersion(key, number, **({"is_current": False, "is_marker": False} | fields))

    found = [
        version("m", "3", is_current=True),
        version("m", "2", is_marker=True),
        version("m", "1"),
        version("d", "2", is_current=True, is_marker=True),
        version("d", "1"),
        version("other", "1"),
    ]
    steps = old_versions(found, {"m"}, {"d"})
    assert [[(each.key, each.version_id) for each in step] for step in steps] == [
        [("m", "1")],
        [("d", "1")],
        [("m", "2"), ("d", "2")],
    ]


# --- stores that are different -------------------------------------------------------------------


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.001)
    operations.forget()
    with serve(monkeypatch) as server:
        yield server


@pytest.mark.parametrize("status", [501, 400])
def test_without_deleteobjects_objects_go_one_by_one(faulty: FaultyServer, status: int) -> None:
    run = f"s3://{BUCKET}/run"
    for step in (1, 2, 3):
        save(f"{run}/step-{step}")
    faulty.s3.reset_counters()
    faulty.rule = lambda request: (
        Fault.error(status, "InvalidRequest") if request.operation == "DeleteObjects" else None
    )
    assert prune(run, "latest:1", settings={"concurrency": 1}).ok
    assert {key.split("/")[1] for key in faulty.s3.objects(BUCKET)} == {"step-3"}
    before = faulty.s3.counters.requests["DeleteObjects"]
    save(f"{run}/step-4")
    assert prune(run, "latest:1").ok
    assert faulty.s3.counters.requests["DeleteObjects"] - before == (status == 400)


def test_a_store_that_refuses_conditions_that_hold_is_asked_without(faulty: FaultyServer) -> None:
    run = f"s3://{BUCKET}/run"
    for step in (1, 2):
        save(f"{run}/step-{step}")
    faulty.rule = lambda request: Fault.error(412, "PreconditionFailed") if "if-match" in request.headers else None
    assert [each.name for each in prune(run, "latest:1").deleted] == ["step-1"]


def test_a_batch_deletes_what_has_its_etag_and_says_what_has_not(faulty: FaultyServer) -> None:
    bucket = S3Store(BUCKET, Settings())
    for key in ("a", "b", "c"):
        bucket.put(key, b"1")
    etags = {key: bucket.get(key).etag for key in ("a", "b", "c")}
    bucket.put("b", b"2")
    targets = [
        DeleteTarget("a", etags["a"]),
        DeleteTarget("b", etags["b"]),
        DeleteTarget("c"),
        DeleteTarget("gone", '"x"'),
    ]
    assert bucket.delete(targets) == ["b"]
    assert faulty.s3.objects(BUCKET) == {"b": 1}
    assert parse_url(f"s3://{BUCKET}").bucket == BUCKET
    assert bucket.delete([DeleteTarget("b", etags["b"])]) == ["b"]


def test_a_key_that_is_never_deleted_fails_and_the_others_go(faulty: FaultyServer) -> None:
    bucket = S3Store(BUCKET, Settings())
    for key in ("a", "b"):
        bucket.put(key, b"1")
    faulty.rule = lambda _: Fault.delete_partly("AccessDenied")
    with pytest.raises(errors.AccessDeniedError, match="'a' was not deleted"):
        bucket.delete([DeleteTarget("a"), DeleteTarget("b")])
    assert faulty.s3.objects(BUCKET) == {"a": 1}


def test_batches_have_a_thousand_keys(faulty: FaultyServer) -> None:
    save(f"s3://{BUCKET}/run/step-2")
    store: Any = faulty.s3._store
    stored = store.get(BUCKET, "run/step-2/.metadata")
    for number in range(2100):
        store.put(BUCKET, f"run/step-1/__{number}_0-abcdef.distcp", stored.body, headers={})
    faulty.s3.reset_counters()
    assert remove(f"s3://{BUCKET}/run/step-1", force=True).objects == 2100
    assert faulty.s3.counters.requests["DeleteObjects"] == 3
