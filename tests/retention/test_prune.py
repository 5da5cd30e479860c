"""Prune on a server whose clock and faults the test sets: what goes, what stays, and what changed since the plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from dcp_s3 import CheckpointCatalog, KeepLatest, annotate, apply_plan, latest, pin, prune, remove
from dcp_s3.checkpoint.lease import DELETION_BEGINS
from dcp_s3.errors import CheckpointDeletedError, CheckpointNotFoundError, CheckpointProtectedError, SettingsError
from dcp_s3.format.layout import deletion_object, lease_object
from dcp_s3.s3 import retry
from dcp_s3.spill.drain import Drainer
from dcp_s3.spill.store import SpillStore
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault, MemoryS3
from tests.retention.catalogs import Clock
from tests.retention.making import delete, get, keys, put, save, save_foreign, save_on_ranks
from tests.spread import spread_out

ROOT = f"s3://{BUCKET}/run"
HOUR = 3600.0
DAY = 24 * HOUR


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[FaultyServer]:
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.001)
    server = FaultyServer()
    server.s3 = MemoryS3(fault=lambda request: server.rule(request), clock=clock)
    with serve(monkeypatch, server):
        yield server


@pytest.fixture
def client(faulty: FaultyServer) -> Iterator[Any]:
    made = boto3.Session().client("s3", endpoint_url=faulty.s3.endpoint_url)
    yield made
    made.close()


def steps(*numbers: int) -> None:
    for number in numbers:
        save(f"{ROOT}/step-{number}")


def names() -> list[str]:
    return [info.name for info in CheckpointCatalog(ROOT).checkpoints()]


def test_what_no_policy_keeps_goes_and_nothing_else(faulty: FaultyServer, client: Any) -> None:
    steps(1, 10, 100, 2)
    for near in ("run/step-1.txt", "run/step-1x", "runner/step-1/.metadata", "run/step-1/notes.txt",
                 "run/step-1/ema/.metadata", "run/step-1/ema/__0_0.distcp"):  # fmt: skip
        client.put_object(Bucket=BUCKET, Key=near, Body=b"x")
    before = faulty.s3.objects(BUCKET)
    seen: list[tuple[int, int]] = []
    report = prune(ROOT, "latest:2", progress=lambda *step: seen.append(step))
    assert [each.name for each in report.deleted] == ["step-1", "step-2"]
    assert (report.ok, report.left_alone, report.finished, report.leftovers) == (True, (), (), ())
    assert seen == [(1, 2), (2, 2)]
    after = faulty.s3.objects(BUCKET)
    gone = set(before) - set(after)
    assert not set(after) - set(before)
    assert {key.rpartition("/")[0].removesuffix("/.dcp_s3") for key in gone} == {"run/step-1", "run/step-2"}
    assert sorted(keys(client, f"{ROOT}/step-1")) == ["ema/.metadata", "ema/__0_0.distcp", "notes.txt"]
    assert (report.objects, report.size) == (len(gone), sum(before[key] for key in gone))
    again = prune(ROOT, "latest:2")
    assert again.plan.empty
    assert again.objects == 0
    assert faulty.s3.objects(BUCKET) == after


def test_a_dry_run_and_a_prune_without_policies_delete_no_checkpoint(
    faulty: FaultyServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps(1, 2)
    before = faulty.s3.objects(BUCKET)
    report = prune(ROOT, KeepLatest(1), dry_run=True)
    assert (report.dry_run, [info.name for info in report.plan.deleted], report.deleted) == (True, ["step-1"], ())
    assert prune(ROOT).plan.empty
    assert faulty.s3.objects(BUCKET) == before
    monkeypatch.setenv("DCP_S3_RETENTION", "latest:1")
    assert [each.name for each in prune(ROOT).deleted] == ["step-1"]


def test_the_commit_goes_first_and_the_list_last(faulty: FaultyServer, client: Any) -> None:
    steps(1, 2)
    faulty.s3.reset_counters()
    prune(ROOT, "latest:1")
    changes = [
        (each.operation, each.key.removeprefix("run/step-1/"), each.headers.get("if-match") is not None)
        for each in faulty.s3.request_log
        if each.method in ("PUT", "POST", "DELETE")
    ]
    (put_list, list_key, _), *others = changes
    assert (put_list, others) == (
        "PutObject",
        [("DeleteObject", ".metadata", True), ("DeleteObjects", "", False), ("DeleteObject", list_key, False)],
    )


CHANGES: dict[str, Callable[[Any], Any]] = {
    "overwritten": lambda client: save(f"{ROOT}/step-1", overwrite=True),
    "pinned": lambda client: pin(f"{ROOT}/step-1"),
    "lease": lambda client: put(client, f"{ROOT}/step-1", lease_object("ab", 600)),
    "metrics were added": lambda client: annotate(f"{ROOT}/step-1", {"loss": 1}),
    "gone": lambda client: remove(f"{ROOT}/step-1"),
    "a save is in progress": lambda client: put(client, f"{ROOT}/step-1", "__0_0-abcdef.distcp"),
    "which was to stay": lambda client: remove(f"{ROOT}/step-2"),
}


@pytest.mark.parametrize("why", CHANGES)
def test_what_changed_since_the_plan_is_left_alone(faulty: FaultyServer, client: Any, clock: Clock, why: str) -> None:
    steps(1, 2)
    clock.now += 1
    plan = CheckpointCatalog(ROOT).scan(deep=True).plan(KeepLatest(1), grace=HOUR)
    CHANGES[why](client)
    before = faulty.s3.objects(BUCKET)
    report = apply_plan(ROOT, plan)
    assert [each.name for each in report.left_alone] == ["step-1"]
    assert why in report.left_alone[0].reason
    assert (report.deleted, report.ok) == ((), True)
    assert faulty.s3.objects(BUCKET) == before


@pytest.mark.parametrize("why", [why for why in CHANGES if why not in ("gone", "which was to stay")])
def test_what_changes_while_its_list_is_written_is_left_alone_and_the_list_withdrawn(
    faulty: FaultyServer, client: Any, clock: Clock, why: str
) -> None:
    if why == "a save is in progress":
        CHANGES[why] = lambda client: put(client, f"{ROOT}/step-1", ".dcp_s3/manifest-00000000000000ff.json")
    steps(1, 2)
    before = faulty.s3.objects(BUCKET)
    clock.now += 1

    def change(request: Any) -> None:
        if request.operation == "PutObject" and "deletion-" in request.key:
            faulty.rule = lambda _: None
            CHANGES[why](client)

    faulty.rule = change
    report = prune(ROOT, "latest:1")
    assert [each.name for each in report.left_alone] == ["step-1"]
    assert why in report.left_alone[0].reason
    assert not [key for key in faulty.s3.objects(BUCKET) if "deletion-" in key]
    assert why == "overwritten" or set(before) <= set(faulty.s3.objects(BUCKET))
    assert "step-1" in names()


def test_what_is_replaced_at_the_last_moment_stays(faulty: FaultyServer, client: Any) -> None:
    steps(1, 2)

    def replace(request: Any) -> None:
        if request.operation == "DeleteObject" and request.key.endswith(".metadata"):
            faulty.rule = lambda _: None
            save(f"{ROOT}/step-1", overwrite=True)

    faulty.rule = replace
    report = prune(ROOT, "latest:1")
    assert "overwritten" in report.left_alone[0].reason
    assert [info.damage for info in CheckpointCatalog(ROOT).scan(deep=True).checkpoints] == [None, None]


def test_a_save_that_was_to_replace_what_a_prune_deleted_commits(faulty: FaultyServer, client: Any) -> None:
    steps(1, 2)

    def delete_it(request: Any) -> None:
        if request.operation == "PutObject" and ".distcp" in request.key:
            faulty.rule = lambda _: None
            prune(ROOT, "latest:1")

    faulty.rule = delete_it
    save(f"{ROOT}/step-1", overwrite=True)
    assert faulty.rule({}) is None
    assert [info.damage for info in CheckpointCatalog(ROOT).scan(deep=True).checkpoints] == [None, None]


def test_leftovers_and_uploads_go_after_the_grace_period(faulty: FaultyServer, client: Any, clock: Clock) -> None:
    steps(1)
    delete(client, save(f"{ROOT}/step-0"), ".metadata")
    put(client, f"{ROOT}/step-1", "__0_0-abcdef.distcp")
    for step in (0, 1, 7):
        client.create_multipart_upload(Bucket=BUCKET, Key=f"run/step-{step}/__0_1-abcdef.distcp")
    client.create_multipart_upload(Bucket=BUCKET, Key="run/logs/events")
    before = faulty.s3.objects(BUCKET)
    clock.now += 2 * HOUR
    report = prune(ROOT, grace="3h")
    assert (report.objects, report.aborted, report.plan.empty) == (0, (), True)
    assert faulty.s3.objects(BUCKET) == before
    clock.now += 2 * HOUR
    report = prune(ROOT, grace="3h")
    assert [each.name for each in report.deleted] == ["step-0"]
    assert [(each.name, each.objects) for each in report.leftovers] == [("step-1", 1)]
    assert len(report.aborted) == 3
    assert faulty.s3.open_uploads(BUCKET) == ["run/logs/events"]
    assert keys(client, f"{ROOT}/step-0") == {}
    assert names() == ["step-1"]
    assert latest(ROOT) is not None


def test_a_save_that_goes_on_within_the_grace_period_is_not_harmed(
    faulty: FaultyServer, client: Any, clock: Clock
) -> None:
    """It is halted before its commit, an hour and a half after its first object."""
    steps(1, 2)
    reports = []

    def halt(request: Any) -> None:
        if request.operation == "PutObject" and "manifest" in request.key:
            faulty.rule = lambda _: None
            clock.now += 1.5 * HOUR
            reports.append(prune(ROOT, "latest:1", grace="2h"))

    for url, options in ((f"{ROOT}/step-3", {}), (f"{ROOT}/step-2", {"overwrite": True})):
        faulty.rule = halt
        save(url, **options)
        assert [info.damage for info in CheckpointCatalog(ROOT).scan(deep=True).checkpoints][-1] is None
    assert [[each.name for each in report.deleted] for report in reports] == [["step-1"], []]
    assert names() == ["step-2", "step-3"]


def test_a_grace_period_that_is_too_short_has_to_be_forced_and_costs_a_save_its_objects(
    faulty: FaultyServer, client: Any, clock: Clock
) -> None:
    with pytest.raises(SettingsError, match="grace = '59m' is under 1 h"):
        prune(ROOT, grace="59m")
    with pytest.raises(SettingsError, match="grace = 'soon', expected seconds"):
        prune(ROOT, grace="soon")
    delete(client, save(f"{ROOT}/step-1"), ".metadata")
    clock.now += 1
    assert [each.name for each in prune(ROOT, grace=0, force=True).deleted] == ["step-1"]


@pytest.mark.parametrize("kind", ["foreign", "ranks", "spread", "annotated", "damaged"])
def test_checkpoints_of_every_kind_go_whole(
    faulty: FaultyServer, client: Any, clock: Clock, tmp_path: Path, kind: str
) -> None:
    url = f"{ROOT}/step-1"
    if kind == "foreign":
        save_foreign(client, url, tmp_path)
    elif kind == "ranks":
        save_on_ranks(url, 2)
    else:
        save(url, separate=["weight"])
    if kind == "spread":
        spread_out(client, url)
    if kind == "annotated":
        annotate(url, {"loss": 1})
    if kind == "damaged":
        put(client, url, ".metadata", get(client, url, ".metadata")[:100])
    put(client, url, lease_object("ab", 60))
    clock.now += 2 * DAY
    steps(2)
    report = prune(ROOT, "latest:1")
    assert ([each.name for each in report.deleted], report.left_alone, report.failures) == (["step-1"], (), ())
    assert keys(client, url) == {}


def test_a_rank_checkpoint_hidden_by_another_never_comes_back(faulty: FaultyServer, client: Any, clock: Clock) -> None:
    url = save_on_ranks(f"{ROOT}/step-1", 1)
    put(client, url, ".metadata", get(client, save(f"{ROOT}/other-step-1"), ".metadata"))
    clock.now += 2 * DAY
    steps(2)
    plan = CheckpointCatalog(ROOT).scan(deep=True).plan(KeepLatest(1), grace=DAY)
    seen: list[str] = []

    def reset(request: Any) -> Fault | None:
        if request.operation != "DeleteObject" or not request.key.endswith("step-1/.metadata"):
            return None
        seen.append(request.key)
        return Fault.reset()

    faulty.rule = reset
    prune(ROOT, "latest:1", settings={"retry_attempts": 1})
    faulty.rule = lambda _: None
    assert seen
    assert {"step-1", "other-step-1"} <= {info.name for info in plan.deleted}
    left = keys(client, url)
    assert ".metadata" in left
    assert "__0.metadata" not in left


def test_one_that_fails_does_not_stop_the_others(faulty: FaultyServer, client: Any) -> None:
    steps(1, 2, 3)
    faulty.rule = lambda request: (
        Fault.error(403, "AccessDenied") if "step-1/" in request.key and request.method == "DELETE" else None
    )
    report = prune(ROOT, "latest:1")
    assert [each.name for each in report.deleted] == ["step-2"]
    assert [each.name for each in report.failures] == ["step-1"]
    assert "s3:DeleteObject" in report.failures[0].error
    assert not report.ok
    assert report.to_dict()["failures"][0]["name"] == "step-1"
    faulty.rule = lambda _: None
    assert [each.name for each in prune(ROOT, "latest:1").deleted] == ["step-1"]
    assert keys(client, f"{ROOT}/step-1") == {}


def test_throttled_keys_are_tried_again(faulty: FaultyServer, client: Any) -> None:
    steps(1, 2, 3)
    left = [6]

    def throttle(request: Any) -> Fault | None:
        if request.operation == "DeleteObjects" and left[0]:
            left[0] -= 1
            return Fault.delete_partly("SlowDown") if left[0] % 2 else Fault.error(503, "SlowDown")
        return None

    faulty.rule = throttle
    report = prune(ROOT, "latest:1")
    assert (left, report.ok, len(report.deleted)) == ([0], True, 2)
    assert {key.split("/")[1] for key in faulty.s3.objects(BUCKET)} == {"step-3"}


def test_the_list_of_a_deletion_that_was_given_up_is_withdrawn_when_readers_ignore_it(
    faulty: FaultyServer, client: Any, clock: Clock
) -> None:
    steps(1, 2)
    info = CheckpointCatalog(ROOT).checkpoints()[0]
    put(client, f"{ROOT}/step-1", deletion_object(info.deletion_id, "ab"))
    clock.now += DELETION_BEGINS - 1
    prune(ROOT)
    assert deletion_object(info.deletion_id, "ab") in keys(client, f"{ROOT}/step-1")
    clock.now += 2
    prune(ROOT)
    assert deletion_object(info.deletion_id, "ab") not in keys(client, f"{ROOT}/step-1")
    assert [info.damage for info in CheckpointCatalog(ROOT).scan(deep=True).checkpoints] == [None, None]


def test_a_pin_that_comes_after_a_deletion_is_none(faulty: FaultyServer, client: Any) -> None:
    steps(1, 2)

    def delete_it(request: Any) -> None:
        if request.operation == "PutObject" and request.key.endswith("/pin"):
            faulty.rule = lambda _: None
            prune(ROOT, "latest:1")

    faulty.rule = delete_it
    with pytest.raises(CheckpointDeletedError):
        pin(f"{ROOT}/step-1")
    assert keys(client, f"{ROOT}/step-1") == {}


def test_a_pin_that_comes_after_the_last_look_waits_and_says_that_it_was_late(
    faulty: FaultyServer, client: Any
) -> None:
    steps(1, 2)
    written = threading.Event()
    caught: list[BaseException] = []

    def pin_it() -> None:
        try:
            pin(f"{ROOT}/step-1")
        except CheckpointDeletedError as error:
            caught.append(error)

    thread = threading.Thread(target=pin_it)

    def meanwhile(request: Any) -> None:
        if request.operation == "DeleteObject" and request.key.endswith("step-1/.metadata"):
            thread.start()
            assert written.wait(30)
        elif request.operation == "ListObjectsV2" and "deletion-" in request.query["prefix"]:
            written.set()  # by the pin, which looks for deletions

    faulty.rule = meanwhile
    assert [each.name for each in prune(ROOT, "latest:1").deleted] == ["step-1"]
    thread.join()
    assert caught
    assert keys(client, f"{ROOT}/step-1") == {}


def test_latest_looks_again_when_its_choice_is_pruned(faulty: FaultyServer, client: Any) -> None:
    steps(1)

    def go_on(request: Any) -> None:
        if request.operation == "GetObject" and request.key.endswith(".metadata"):
            faulty.rule = lambda _: None
            steps(2, 3)
            prune(ROOT, "latest:1")

    faulty.rule = go_on
    found = latest(ROOT)
    assert found is not None
    assert found.name == "step-3"


# --- rm ------------------------------------------------------------------------------------------


def test_remove_takes_one_even_the_newest(faulty: FaultyServer, client: Any, clock: Clock) -> None:
    steps(1, 12)
    url = f"{ROOT}/step-1"
    done = remove(url)
    assert (done.name, done.objects) == ("step-1", 3)
    assert keys(client, url) == {}
    assert names() == ["step-12"]
    with pytest.raises(CheckpointNotFoundError, match="nothing of a checkpoint"):
        remove(url)
    remove(f"{ROOT}/step-12")
    assert faulty.s3.objects(BUCKET) == {}


PROTECTED: dict[str, Callable[[Any], Any]] = {
    "pinned": lambda client: pin(f"{ROOT}/step-1"),
    "lease": lambda client: put(client, f"{ROOT}/step-1", lease_object("ab", 600)),
    "object|was written": lambda client: put(client, f"{ROOT}/step-1", "__0_0-abcdef.distcp"),
    "upload": lambda client: client.create_multipart_upload(Bucket=BUCKET, Key="run/step-1/__0_0-ab.distcp"),
}


@pytest.mark.parametrize("why", PROTECTED)
@pytest.mark.parametrize("committed", [True, False])
def test_remove_refuses_what_is_protected_unless_forced(
    faulty: FaultyServer, client: Any, why: str, committed: bool
) -> None:
    url = save(f"{ROOT}/step-1")
    PROTECTED[why](client)
    if not committed:
        delete(client, url, ".metadata")
    before = faulty.s3.objects(BUCKET)
    with pytest.raises(CheckpointProtectedError):
        remove(url)
    assert faulty.s3.objects(BUCKET) == before
    remove(url, force=True)
    left = keys(client, url)
    assert all(".dcp_s3/pin" in path or "lease" in path for path in left)
    assert faulty.s3.open_uploads(BUCKET) == []


# --- the spill tier ------------------------------------------------------------------------------


def test_a_spilled_save_that_waits_on_this_host_loses_nothing(
    faulty: FaultyServer, client: Any, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its objects are on S3 for two days already; its commit is not."""
    monkeypatch.setattr("dcp_s3.spill.saving.drain_in_background", lambda *_, **__: None)
    spilling = {"spill_dir": str(tmp_path), "durability": "local", "retry_attempts": 1}
    steps(1, 2)
    save(f"{ROOT}/step-3", settings=spilling)
    faulty.rule = lambda request: Fault.error(500, "InternalError") if request.key.endswith(".json") else None
    Drainer(SpillStore(tmp_path)).run()
    faulty.rule = lambda _: None
    before = keys(client, f"{ROOT}/step-3")
    files = sorted(tmp_path.rglob("*"))
    assert [path.endswith(".distcp") for path in before] == [True]
    clock.now += 2 * DAY
    with pytest.raises(CheckpointProtectedError, match="spill directory"):
        remove(f"{ROOT}/step-3", settings=spilling)
    report = prune(ROOT, "latest:1", settings=spilling)
    assert [each.name for each in report.deleted] == ["step-1"]
    assert keys(client, f"{ROOT}/step-3") == before
    assert sorted(tmp_path.rglob("*")) == files
    assert Drainer(SpillStore(tmp_path)).run().committed == [f"{ROOT}/step-3"]
    found = latest(ROOT)
    assert found is not None
    assert found.name == "step-3"
