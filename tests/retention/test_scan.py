"""What a scan finds for a plan: states, uploads, leftovers, damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from dcp_s3 import CheckpointCatalog, KeepLatest, KeepSteps, annotate, pin
from dcp_s3.errors import SettingsError
from dcp_s3.format.layout import deletion_object, lease_object
from dcp_s3.retention import catalog
from dcp_s3.s3 import listing, many
from dcp_s3.s3.store import S3Store
from dcp_s3.spill.background import stop_draining
from dcp_s3.spill.store import SpillStore
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import MemoryS3
from tests.retention.making import delete, get, is_manifest, keys, put, save, save_foreign, save_on_ranks
from tests.spread import spread_out

ROOT = f"s3://{BUCKET}/run"
HOUR = 3600.0


class Clock:
    """The server's: far from that of this host."""

    def __init__(self) -> None:
        self.now = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[FaultyServer]:
    server = FaultyServer()
    server.s3 = MemoryS3(fault=lambda request: server.rule(request), clock=clock)
    with serve(monkeypatch, server):
        yield server


@pytest.fixture
def client(faulty: FaultyServer) -> Iterator[Any]:
    made = boto3.Session().client("s3", endpoint_url=faulty.s3.endpoint_url)
    yield made
    made.close()


def states(**settings: Any) -> dict[str, str]:
    return {info.name: info.state for info in CheckpointCatalog(ROOT, settings=settings).checkpoints()}


def open_upload(client: Any, key: str) -> str:
    return str(client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"])


def test_the_servers_clock_tells_a_save_in_progress_from_a_leftover(client: Any, clock: Clock) -> None:
    save(f"{ROOT}/step-1")
    delete(client, save(f"{ROOT}/step-2"), ".metadata")
    clock.now += 2 * HOUR
    assert states() == {"step-1": "committed", "step-2": "in_progress"}
    assert states(retention_grace="2h") == {"step-1": "committed", "step-2": "leftover"}
    put(client, f"{ROOT}/step-2", "__1_0-ab.distcp")
    assert states(retention_grace="2h")["step-2"] == "in_progress"
    assert CheckpointCatalog(ROOT).scan().now == clock.now


def test_marks_cost_no_request_but_for_the_reason_of_a_pin(faulty: FaultyServer, client: Any, clock: Clock) -> None:
    url = save(f"{ROOT}/step-1", metrics={"loss": 1})
    pin(url)
    put(client, url, lease_object("ab", 600))
    clock.now += 60
    put(client, url, lease_object("cd", 100))
    put(client, url, deletion_object("ef"))
    faulty.s3.reset_counters()
    [info] = CheckpointCatalog(ROOT).checkpoints()
    assert info.pinned
    assert info.leased_until == clock.now - 60 + 600
    assert info.deletions == ("ef",)
    assert (info.etag, info.modified_at) != (None, None)
    assert dict(faulty.s3.counters.requests) == {"ListObjectsV2": 2, "GetObject": 2}
    annotate(url, {"acc": 2})
    faulty.s3.reset_counters()
    [info] = CheckpointCatalog(ROOT).checkpoints()
    assert info.metrics == {"loss": 1, "acc": 2}
    assert dict(faulty.s3.counters.requests) == {"ListObjectsV2": 2, "GetObject": 3}


def test_at_most_four_requests_for_a_checkpoint_of_ours(faulty: FaultyServer, client: Any, clock: Clock) -> None:
    url = save(f"{ROOT}/step-1", metrics={"loss": 1})
    annotate(url, {"acc": 2})
    clock.now += 1
    put(client, url, ".dcp_s3/manifest-00000000000000ff.json", b"of a save in progress")
    faulty.s3.reset_counters()
    [info] = CheckpointCatalog(ROOT).checkpoints()
    assert info.metrics == {"loss": 1, "acc": 2}
    assert dict(faulty.s3.counters.requests) == {"ListObjectsV2": 2, "HeadObject": 1, "GetObject": 2}


def test_a_manifest_that_is_newer_than_its_metadata_is_not_believed(client: Any, clock: Clock, tmp_path: Path) -> None:
    url = save_foreign(client, f"{ROOT}/step-1", tmp_path)
    other = save(f"{ROOT}/other-2", metrics={"loss": 1})
    manifest = next(path for path in keys(client, other) if is_manifest(path))
    clock.now += 1
    put(client, url, manifest, get(client, other, manifest))
    seen: list[str] = []
    original = S3Store.head

    def head(self: Any, key: str) -> Any:
        seen.append(key)
        return original(self, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Store, "head", head)
        CheckpointCatalog(ROOT).checkpoints()
    assert seen == ["run/step-1/.metadata"]


def test_a_directory_with_very_many_dotted_names_is_not_listed_whole(
    faulty: FaultyServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PAGE_SIZE", 3)
    url = save(f"{ROOT}/step-1")
    for number in range(20):
        put(client, url, f".git/{number}")
    faulty.s3.reset_counters()
    [info] = CheckpointCatalog(ROOT).checkpoints()
    assert (info.committed, info.foreign) == (True, False)
    assert dict(faulty.s3.counters.requests) == {"ListObjectsV2": 4, "GetObject": 1}


def test_open_uploads_of_checkpoints_right_under_the_root(
    client: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listing, "PAGE_SIZE", 2)
    wanted = {open_upload(client, key): key for key in ("run/step-1/__0_0-ab.distcp", "run/new/__1_0.distcp")}
    wanted[open_upload(client, "run/new/__1_0.distcp")] = "run/new/__1_0.distcp"
    for key in ("runner/step-1/__0_0-ab.distcp", "run/logs/events", "run/deep/er/__0_0-ab.distcp", "run/x.distcp"):
        open_upload(client, key)
    clock.now += 48 * HOUR
    young = open_upload(client, "run/step-2/__0_0-ab.distcp")
    found = CheckpointCatalog(ROOT).scan()
    assert {each.upload_id: each.key for each in found.uploads} == wanted | {young: "run/step-2/__0_0-ab.distcp"}
    plan = found.plan(None, grace=24 * HOUR)
    assert {each.upload.upload_id for each in plan.uploads if each.action == "delete"} == set(wanted)


def test_an_upload_into_a_committed_checkpoint_keeps_it(client: Any) -> None:
    for step in (1, 2, 3):
        save(f"{ROOT}/step-{step}")
    open_upload(client, "run/step-1/__0_0-ab.distcp")
    plan = CheckpointCatalog(ROOT).scan().plan(KeepLatest(1), grace=HOUR)
    assert [info.name for info in plan.deleted] == ["step-2"]


def test_an_overwrite_is_seen_by_its_objects(client: Any, clock: Clock, tmp_path: Path) -> None:
    ours, foreign = save(f"{ROOT}/step-1"), save_foreign(client, f"{ROOT}/step-2", tmp_path)
    save(f"{ROOT}/step-3")
    clock.now += 99 * HOUR
    for url in (ours, foreign):
        put(client, url, "__0_0-abcdef.distcp")

    def deleted() -> list[str]:
        plan = CheckpointCatalog(ROOT).scan(deep=True).plan(KeepLatest(1), grace=HOUR)
        return [info.name for info in plan.deleted]

    assert deleted() == []
    clock.now += HOUR
    assert deleted() == ["step-1", "step-2"]


def test_leftovers_of_other_saves_are_found_and_nothing_else(client: Any, clock: Clock) -> None:
    url = spread_out(client, save(f"{ROOT}/step-1", separate=["weight"]))
    spread = spread_out(client, save(f"{ROOT}/other-2"))
    stray = next(path for path in keys(client, spread) if "/__" in path)
    ours = {"__0_0-abcdef.distcp", ".dcp_s3/manifest-00000000000000ff.json", stray}
    for path in (
        *ours,
        "__0_0.distcp",
        "notes.txt",
        "notes/__0_0-abcdef.distcp",
        ".dcp_s3/other",
        "zz/__0_0-ab.distcp",
    ):
        put(client, url, path)
    put(client, url, lease_object("ab", 60))
    put(client, url, lease_object("cd", 3600))
    pin(url)
    annotate(url, {"loss": 1})
    clock.now += 1800
    assert CheckpointCatalog(ROOT).scan().leftovers == ()
    found = CheckpointCatalog(ROOT).scan(deep=True)
    leftovers = {each.key.removeprefix("run/step-1/"): each.is_lease for each in found.leftovers}
    assert leftovers == dict.fromkeys(ours, False) | {lease_object("ab", 60): True}
    assert {each.checkpoint for each in found.leftovers} == {"step-1"}
    assert all(each.action == "keep" for each in found.plan(None, grace=HOUR).leftovers if not each.leftover.is_lease)
    clock.now += HOUR
    old = CheckpointCatalog(ROOT).scan(deep=True)
    assert {each.action for each in old.plan(None, grace=HOUR).leftovers} == {"delete"}


def test_nothing_is_a_leftover_where_the_manifest_is_not_certain(client: Any, clock: Clock, tmp_path: Path) -> None:
    foreign = save_foreign(client, f"{ROOT}/step-1", tmp_path)
    copied = save(f"{ROOT}/step-2")
    put(client, copied, ".metadata", get(client, copied, ".metadata"))  # loses its user metadata
    ranks = save_on_ranks(f"{ROOT}/step-3", 1)
    for url in (foreign, copied, ranks):
        put(client, url, "__0_0-abcdef.distcp")
    clock.now += 99 * HOUR
    assert CheckpointCatalog(ROOT).scan(deep=True).leftovers == ()


def test_objects_of_a_checkpoint_that_is_replaced_meanwhile_are_no_leftovers(faulty: FaultyServer, client: Any) -> None:
    url = save(f"{ROOT}/step-1")

    def replace(request: Any) -> None:
        if request.operation == "HeadObject":
            faulty.rule = lambda _: None
            save(url, overwrite=True)

    faulty.rule = replace
    found = CheckpointCatalog(ROOT).scan(deep=True)
    assert found.leftovers == ()
    assert [info.damage for info in found.checkpoints] == [None]


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_committed(faulty: FaultyServer, client: Any) -> None:
    url = save(f"{ROOT}/step-1")

    def prune(request: Any) -> None:
        if request.operation == "HeadObject":
            faulty.rule = lambda _: None
            delete(client, url, ".metadata")

    faulty.rule = prune
    [info] = CheckpointCatalog(ROOT).scan(deep=True).checkpoints
    assert info.state == "incomplete"


def test_damage_is_seen_deep_only_and_does_not_cost_the_last_good_one(client: Any, clock: Clock) -> None:
    for step in (1, 2, 3, 4):
        url = save(f"{ROOT}/step-{step}")
        clock.now += HOUR
        if step > 2:
            delete(client, url, next(path for path in keys(client, url) if path.endswith(".distcp")))
    assert {info.damage for info in CheckpointCatalog(ROOT).scan().checkpoints} == {None}
    found = CheckpointCatalog(ROOT).scan(deep=True)
    assert [info.damage is None for info in found.checkpoints] == [True, True, False, False]
    plan = found.plan(KeepLatest(1), grace=HOUR)
    assert [info.name for info in plan.deleted] == ["step-1", "step-3"]
    good = CheckpointCatalog(ROOT).latest()
    assert good is not None
    assert good.name == "step-2"


def test_the_newest_is_looked_at_like_latest_does(client: Any, clock: Clock, tmp_path: Path) -> None:
    save(f"{ROOT}/step-1")
    foreign = save_foreign(client, f"{ROOT}/step-2", tmp_path)
    delete(client, foreign, next(path for path in keys(client, foreign) if path.endswith(".distcp")))
    found = CheckpointCatalog(ROOT).scan(deep=True)
    assert [info.damage is None for info in found.checkpoints] == [True, False]
    assert {info.name for info in found.plan(KeepLatest(1), grace=0.0).kept} == {"step-1", "step-2"}


def test_requests_of_a_scan_are_counted(faulty: FaultyServer, client: Any) -> None:
    for step in range(3):
        save(f"{ROOT}/step-{step}")
    for deep, expected in (
        (False, {"ListObjectsV2": 4, "GetObject": 3, "ListMultipartUploads": 1}),
        (True, {"ListObjectsV2": 8, "GetObject": 5, "HeadObject": 3, "ListMultipartUploads": 1}),
    ):
        faulty.s3.reset_counters()
        CheckpointCatalog(ROOT).scan(deep=deep)
        assert dict(faulty.s3.counters.requests) == expected


def test_few_checkpoints_are_looked_at_at_a_time(
    faulty: FaultyServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(40):
        put(client, f"{ROOT}/step-{step}", ".metadata")
    at_once = peak = 0
    original = catalog.inspect

    def counted(*arguments: Any) -> Any:
        nonlocal at_once, peak
        at_once += 1
        peak = max(peak, at_once)
        try:
            return original(*arguments)
        finally:
            at_once -= 1

    monkeypatch.setattr("dcp_s3.retention.catalog.inspect", counted)
    monkeypatch.setattr(many, "AT_ONCE", 5)
    assert len(CheckpointCatalog(ROOT).checkpoints()) == 40
    assert 1 < peak <= 5


# --- steps ---------------------------------------------------------------------------------------

NAMES = {
    "step-100": 100, "step_101": 101, "iter_0000102": 102, "checkpoint-103": 103, "global_step104": 104, "final": None,
}  # fmt: skip


def test_steps_of_foreign_names(client: Any) -> None:
    for name in NAMES:
        put(client, f"{ROOT}/{name}", ".metadata")
    assert {info.name: info.step for info in CheckpointCatalog(ROOT).checkpoints()} == NAMES


def test_a_pattern_decides_alone(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save(f"{ROOT}/step-100-v2")
    put(client, f"{ROOT}/iter-7", ".metadata")

    def steps(**arguments: Any) -> dict[str, int | None]:
        return {info.name: info.step for info in CheckpointCatalog(ROOT, **arguments).checkpoints()}

    assert steps() == {"step-100-v2": 100, "iter-7": 7}
    assert steps(patterns=r"step-(\d+)") == {"step-100-v2": 100, "iter-7": None}
    assert steps(patterns=[r"nothing(\d)", r"v(\w+)", r"iter-(\d+)"]) == {"step-100-v2": 2, "iter-7": 7}
    monkeypatch.setenv("DCP_S3_STEP_PATTERN", r"step-(\d+)")
    assert steps() == {"step-100-v2": 100, "iter-7": None}
    assert steps(patterns=[]) == {"step-100-v2": 100, "iter-7": 7}


@pytest.mark.parametrize("pattern", ["step-(", r"step-\d+", r"(\w+)-(\d+)", "a{99999999999}(1)"])
def test_a_bad_pattern_is_named(pattern: str) -> None:
    with pytest.raises(SettingsError, match=r"step-\(\\d\+\)") as caught:
        CheckpointCatalog(ROOT, patterns=pattern)
    assert repr(pattern) in str(caught.value)
    with pytest.raises(SettingsError, match="step_pattern"):
        CheckpointCatalog(ROOT, settings={"step_pattern": pattern})


def test_best_passes_over_what_can_not_be_loaded(client: Any) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        url = save(f"{ROOT}/step-{step}", metrics={"loss": loss})
        if step == 2:
            delete(client, url, next(path for path in keys(client, url) if path.endswith(".distcp")))
    catalog = CheckpointCatalog(ROOT)
    found = [catalog.best("loss"), catalog.best("loss", "max"), catalog.best("acc")]
    assert [info and info.name for info in found] == ["step-3", "step-1", None]
    with pytest.raises(SettingsError, match="'min' or 'max'"):
        catalog.best("loss", "low")  # type: ignore[arg-type]


def test_what_waits_in_the_spill_directory_is_local(client: Any, tmp_path: Path) -> None:
    local = {"spill_dir": str(tmp_path)}
    save(f"{ROOT}/step-1")
    save(f"{ROOT}/step-2")
    with SpillStore(tmp_path).drainer():  # nothing drains it meanwhile
        for name in ("step-1", "step-3"):
            save(f"{ROOT}/{name}", overwrite=True, settings={**local, "durability": "local"})
        here, elsewhere = (CheckpointCatalog(ROOT, settings=each).scan() for each in (local, None))
        stop_draining()
    assert [(info.name, info.state, info.waiting) for info in here.checkpoints] == [
        ("step-1", "committed", True), ("step-2", "committed", False), ("step-3", "local", True),
    ]  # fmt: skip
    assert not any(info.waiting for info in elsewhere.checkpoints)
    assert here.plan(KeepSteps([9]), grace=0.0).deleted == ()
    assert [info.name for info in elsewhere.plan(KeepSteps([9]), grace=0.0).deleted] == ["step-1"]
