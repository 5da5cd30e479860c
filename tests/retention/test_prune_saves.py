"""Prune beside real saves and on a server: checkpoints of every writer, throttling, the spill tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import CheckpointCatalog, KeepLatest, annotate, latest, prune, remove
from dcp_s3.errors import CheckpointProtectedError
from dcp_s3.format.layout import lease_object
from dcp_s3.spill.drain import Drainer
from dcp_s3.spill.store import SpillStore
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.retention.making import get, keys, put, save, save_foreign, save_on_ranks
from tests.retention.runs import DAY, HOUR, ROOT, Clock
from tests.spread import spread_out


def steps(*numbers: int) -> None:
    for number in numbers:
        save(f"{ROOT}/step-{number}")


def names() -> list[str]:
    return [info.name for info in CheckpointCatalog(ROOT).checkpoints()]


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
