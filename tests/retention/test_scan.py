"""What a scan finds for a plan: states, uploads, leftovers, damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import CheckpointCatalog, KeepLatest, KeepSteps
from dcp_s3.errors import SettingsError
from dcp_s3.format.layout import deletion_object, lease_object, spread
from dcp_s3.spill.background import stop_draining
from dcp_s3.spill.store import SpillStore
from tests.retention.making import get, is_manifest, keys, put, save, save_foreign, save_on_ranks
from tests.retention.runs import HOUR, ROOT, Clock, Run
from tests.spread import spread_out


def test_the_stores_clock_tells_a_save_in_progress_from_a_leftover(run: Run) -> None:
    run.steps(1, 2)
    run.delete("step-2", ".metadata")
    run.clock.now += 2 * HOUR
    assert run.states() == {"step-1": "committed", "step-2": "in_progress"}
    assert run.states(retention_grace="2h") == {"step-1": "committed", "step-2": "leftover"}
    run.put("step-2", "__1_0-ab.distcp")
    assert run.states(retention_grace="2h")["step-2"] == "in_progress"
    assert run.catalog().scan().now == run.clock.now


def test_marks_cost_no_request_but_for_the_reason_of_a_pin(run: Run) -> None:
    run.save("step-1", metrics={"loss": 1})
    run.pin("step-1")
    run.put("step-1", lease_object("ab", 600))
    run.clock.now += 60
    run.put("step-1", lease_object("cd", 100))
    run.put("step-1", deletion_object("ef"))
    run.calls.clear()
    [info] = run.catalog().checkpoints()
    assert info.pinned
    assert info.leased_until == run.clock.now - 60 + 600
    assert info.deletions == ("ef",)
    assert (info.etag, info.modified_at) != (None, None)
    assert run.calls == {"page": 2, "get": 2}
    run.annotate("step-1", {"acc": 2})
    run.calls.clear()
    [info] = run.catalog().checkpoints()
    assert info.metrics == {"loss": 1, "acc": 2}
    assert run.calls == {"page": 2, "get": 3}


def test_at_most_four_requests_for_a_checkpoint_of_ours(run: Run) -> None:
    run.save("step-1", metrics={"loss": 1})
    run.annotate("step-1", {"acc": 2})
    run.clock.now += 1
    run.put("step-1", ".dcp_s3/manifest-00000000000000ff.json", b"of a save in progress")
    run.calls.clear()
    [info] = run.catalog().checkpoints()
    assert info.metrics == {"loss": 1, "acc": 2}
    assert run.calls == {"page": 2, "head": 1, "get": 2}


def test_a_manifest_that_is_newer_than_its_metadata_is_not_believed(run: Run, tmp_path: Path) -> None:
    run.save_foreign("step-1", tmp_path)
    run.save("other-2", metrics={"loss": 1})
    manifest = next(path for path in run.objects("other-2") if is_manifest(path))
    run.clock.now += 1
    run.put("step-1", manifest, run.get("other-2", manifest))
    run.calls.clear()
    run.catalog().checkpoints()
    assert run.calls["head"] == 1


def test_a_directory_with_very_many_dotted_names_is_not_listed_whole() -> None:
    run = Run(page_size=3)
    run.save("step-1")
    for number in range(20):
        run.put("step-1", f".git/{number}")
    run.calls.clear()
    [info] = run.catalog().checkpoints()
    assert (info.committed, info.foreign) == (True, False)
    assert run.calls == {"page": 4, "get": 1}


def test_open_uploads_of_checkpoints_right_under_the_root(run: Run) -> None:
    wanted = {
        run.open_upload(key).upload_id: key
        for key in ("run/step-1/__0_0-ab.distcp", "run/new/__1_0.distcp", "run/new/__1_0.distcp")
    }
    for key in ("runner/step-1/__0_0-ab.distcp", "run/logs/events", "run/deep/er/__0_0-ab.distcp", "run/x.distcp"):
        run.open_upload(key)
    run.clock.now += 48 * HOUR
    young = run.open_upload("run/step-2/__0_0-ab.distcp")
    found = run.catalog().scan()
    assert {each.upload_id: each.key for each in found.uploads} == wanted | {young.upload_id: young.key}
    plan = found.plan(None, grace=24 * HOUR)
    assert {each.upload.upload_id for each in plan.uploads if each.action == "delete"} == set(wanted)


def test_an_upload_into_a_committed_checkpoint_keeps_it(run: Run) -> None:
    run.steps(1, 2, 3)
    run.open_upload("run/step-1/__0_0-ab.distcp")
    plan = run.catalog().scan().plan(KeepLatest(1), grace=HOUR)
    assert [info.name for info in plan.deleted] == ["step-2"]


def test_an_overwrite_is_seen_by_its_objects(run: Run, tmp_path: Path) -> None:
    run.save("step-1")
    run.save_foreign("step-2", tmp_path)
    run.save("step-3")
    run.clock.now += 99 * HOUR
    for name in ("step-1", "step-2"):
        run.put(name, "__0_0-abcdef.distcp")

    def deleted() -> list[str]:
        plan = run.catalog().scan(deep=True).plan(KeepLatest(1), grace=HOUR)
        return [info.name for info in plan.deleted]

    assert deleted() == []
    run.clock.now += HOUR
    assert deleted() == ["step-1", "step-2"]


def test_leftovers_of_other_saves_are_found_and_nothing_else(client: Any, clock: Clock) -> None:
    url = spread_out(client, save(f"{ROOT}/step-1", separate=["weight"]))
    spread_over = spread_out(client, save(f"{ROOT}/other-2"))
    stray = next(path for path in keys(client, spread_over) if "/__" in path)
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


def test_marks_are_no_leftovers_but_data_in_directories_below_is_none_of_ours(run: Run) -> None:
    run.save("step-1")
    run.pin("step-1")
    run.annotate("step-1", {"loss": 1})
    run.put("step-1", "__0_0-abcdef.distcp")
    run.put("step-1", spread("__0_1-abcdef.distcp", 2))
    run.clock.now += HOUR
    found = run.catalog().scan(deep=True)
    assert [each.key for each in found.leftovers] == ["run/step-1/__0_0-abcdef.distcp"]


def test_nothing_is_a_leftover_where_the_manifest_is_not_certain(client: Any, clock: Clock, tmp_path: Path) -> None:
    foreign = save_foreign(client, f"{ROOT}/step-1", tmp_path)
    copied = save(f"{ROOT}/step-2")
    put(client, copied, ".metadata", get(client, copied, ".metadata"))  # loses its user metadata
    ranks = save_on_ranks(f"{ROOT}/step-3", 1)
    for url in (foreign, copied, ranks):
        put(client, url, "__0_0-abcdef.distcp")
    clock.now += 99 * HOUR
    assert CheckpointCatalog(ROOT).scan(deep=True).leftovers == ()


def test_objects_of_a_checkpoint_that_is_replaced_meanwhile_are_no_leftovers(run: Run) -> None:
    run.save("step-1")
    run.once("head", "", lambda: run.save("step-1", overwrite=True))
    found = run.catalog().scan(deep=True)
    assert found.leftovers == ()
    assert [info.damage for info in found.checkpoints] == [None]


def test_a_checkpoint_that_is_deleted_meanwhile_is_not_committed(run: Run) -> None:
    run.save("step-1")
    run.once("head", "", lambda: run.delete("step-1", ".metadata"))
    [info] = run.catalog().scan(deep=True).checkpoints
    assert info.state == "incomplete"


def test_damage_is_seen_deep_only_and_does_not_cost_the_last_good_one(run: Run) -> None:
    for step in (1, 2, 3, 4):
        run.steps(step)
        run.clock.now += HOUR
        if step > 2:
            run.delete_data(f"step-{step}")
    assert {info.damage for info in run.catalog().scan().checkpoints} == {None}
    found = run.catalog().scan(deep=True)
    assert [info.damage is None for info in found.checkpoints] == [True, True, False, False]
    plan = found.plan(KeepLatest(1), grace=HOUR)
    assert [info.name for info in plan.deleted] == ["step-1", "step-3"]
    good = run.latest()
    assert good is not None
    assert good.name == "step-2"


def test_the_newest_is_looked_at_like_latest_does(run: Run, tmp_path: Path) -> None:
    run.steps(1)
    run.save_foreign("step-2", tmp_path)
    run.delete_data("step-2")
    found = run.catalog().scan(deep=True)
    assert [info.damage is None for info in found.checkpoints] == [True, False]
    assert {info.name for info in found.plan(KeepLatest(1), grace=0.0).kept} == {"step-1", "step-2"}


def test_a_scan_makes_few_requests(run: Run) -> None:
    run.steps(0, 1, 2)
    for deep, expected in (
        (False, {"page": 4, "get": 3, "uploads": 1}),
        (True, {"page": 8, "get": 5, "head": 3, "uploads": 1}),
    ):
        run.calls.clear()
        run.catalog().scan(deep=deep)
        assert run.calls == expected


# --- steps ---------------------------------------------------------------------------------------

NAMES = {
    "step-100": 100, "step_101": 101, "iter_0000102": 102, "checkpoint-103": 103, "global_step104": 104, "final": None,
}  # fmt: skip


def test_steps_of_foreign_names(run: Run) -> None:
    for name in NAMES:
        run.put(name, ".metadata")
    assert {info.name: info.step for info in run.catalog().checkpoints()} == NAMES


def test_a_pattern_decides_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save("step-100-v2")
    run.put("iter-7", ".metadata")

    def steps(**arguments: Any) -> dict[str, int | None]:
        return {info.name: info.step for info in run.catalog(**arguments).checkpoints()}

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


def test_best_passes_over_what_can_not_be_loaded(run: Run) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        run.save(f"step-{step}", metrics={"loss": loss})
    run.delete_data("step-2")
    catalog = run.catalog()
    found = [catalog.best("loss"), catalog.best("loss", "max"), catalog.best("acc")]
    assert [info and info.name for info in found] == ["step-3", "step-1", None]
    with pytest.raises(SettingsError, match="'min' or 'max'"):
        catalog.best("loss", "low")  # type: ignore[arg-type]


@pytest.mark.usefixtures("faulty")
def test_what_waits_in_the_spill_directory_is_local(tmp_path: Path) -> None:
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
