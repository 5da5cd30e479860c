"""What a catalog finds under a root, and with which requests; metrics and pins that are put there later."""

from __future__ import annotations

import io
import math
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_s3 import KeepLatest, errors
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import METRICS, deletion_object, lease_object, spread
from dcp_s3.format.metadata import seal
from dcp_s3.retention import marks
from dcp_s3.s3 import retry
from dcp_s3.settings import Settings
from dcp_s3.spill.saving import spill_commit
from dcp_s3.spill.store import SpillStore
from dcp_s3.url import parse_url
from tests.retention.runs import HOUR, ROOT, Run


def test_checkpoints_are_listed_in_order_of_steps(run: Run, tmp_path: Path) -> None:
    before = time.time()
    for name in ("step-10", "step-9", "step-100"):
        run.save(name, metrics={"loss": 0.5, "note": name}, objects=2)
    run.save_foreign("epoch-300", tmp_path)
    found = run.catalog().checkpoints()
    assert [(info.name, info.step) for info in found[:-1]] == [("step-9", 9), ("step-10", 10), ("step-100", 100)]
    for info in found:
        data = [size for path, size in run.objects(info.name).items() if path.endswith(".distcp")]
        assert (info.url, info.state) == (f"{ROOT}/{info.name}", "committed")
        assert (info.objects, info.size) == (len(data), sum(data))
    for info in found[:-1]:
        assert (info.objects, info.world_size, info.foreign) == (2, 1, False)
        assert info.metrics == {"loss": 0.5, "note": info.name}
        assert before <= (info.created_at or 0) <= time.time()
    last = found[-1]
    assert (last.step, last.foreign, last.world_size, last.created_at) == (300, True, None, run.clock.now)
    assert run.catalog().latest() == last


def test_a_torn_save_is_in_progress_then_a_leftover_and_never_latest(run: Run) -> None:
    run.steps(1, 2, 3)
    for name in ("step-2", "step-3"):  # of one the manifest is still there: the last instant before the commit
        run.delete(name, ".metadata")
    run.delete("step-3", run.manifests("step-3")[0])
    for hours, state in ((0, "in_progress"), (2, "leftover")):
        run.clock.now += hours * HOUR
        assert run.states(retention_grace="2h") == {"step-1": "committed", "step-2": state, "step-3": state}
        assert run.latest() == "step-1"
    run.put("step-2", "__1_0-ab.distcp")
    assert run.states(retention_grace="2h")["step-2"] == "in_progress"
    assert run.catalog().scan().now == run.clock.now


def test_ranks_without_collectives_count_when_all_have_committed(run: Run) -> None:
    run.save_on_ranks("step-4", 2, metrics={"loss": 0.5})
    run.steps(1)
    info = run.catalog().latest()
    assert info is not None
    assert (info.name, info.state, info.world_size) == ("step-4", "committed", 2)
    assert (info.objects, info.metrics) == (2, {"loss": 0.5})
    for rank in (1, 0):
        run.delete("step-4", f"__{rank}.metadata")
        assert run.states()["step-4"] == "in_progress"
        assert run.latest() == "step-1"


def test_of_two_manifests_the_one_of_the_committed_save_counts(run: Run) -> None:
    run.save("run-12", metrics={"loss": 2.0})
    [manifest] = run.manifests("run-12")
    run.forget_metadata("run-12")
    assert (run.only().foreign, run.only().world_size, run.only().metrics) == (False, 1, {"loss": 2.0})
    for save_id in ("0000000000000000", "ffffffffffffffff"):
        run.put("run-12", f".dcp_s3/manifest-{save_id}.json", run.get("run-12", manifest).replace(b"2.0", b"9.0"))
    assert run.only().metrics == {"loss": 2.0}
    run.save("run-13")
    [manifest] = run.manifests("run-13")
    run.clock.now += 1
    run.put("run-13", manifest.replace("manifest-", "manifest-0"), run.get("run-13", manifest))
    run.delete("run-13", manifest)  # the only one there is of a save in progress
    assert {info.name: info.foreign for info in run.catalog().checkpoints()} == {"run-12": False, "run-13": True}


def test_directories_without_anything_of_a_checkpoint_are_left_out(run: Run) -> None:
    run.steps(1)
    run.save("nested/500")  # named like a hash prefix
    run.save("torn/1000")
    run.delete("torn/1000", ".metadata")
    run.put("", "logs/events.out")
    run.put("", "loose-file")
    assert run.names() == ["step-1"]
    assert run.names(f"{ROOT}/nested") == ["500"]
    assert run.names(f"{ROOT}/torn") == ["1000"]
    assert run.names("s3://bucket") == []
    run.memory.put("step-3/.metadata", b"x")
    assert run.names("s3://bucket/") == ["step-3"]  # a bucket may be the root


def test_data_that_an_earlier_version_spread_is_part_of_its_checkpoint_and_nothing_alone(run: Run) -> None:
    run.save("step-8", objects=3, digits=2)
    assert (run.only().committed, run.only().objects, run.damages()) == (True, 3, [None])
    assert run.names(f"{ROOT}/step-8") == []  # its directories are no checkpoints
    for path in run.objects("step-8"):
        if not path.endswith(".distcp"):
            run.delete("step-8", path)
    assert run.names() == []


def test_listings_of_many_pages() -> None:
    run = Run(page_size=2)
    for number in range(5):
        run.put("", f"dir-{number}/file")
        run.put("zzz-step-3", f"__{number}_0.distcp")
        run.put("step-2", lease_object(f"{number:016x}", 900))
    run.save("step-1", objects=3)
    run.steps(2)
    found = [(info.name, info.objects) for info in run.catalog().checkpoints()]
    assert found == [("step-1", 3), ("step-2", 1), ("zzz-step-3", 5)]
    assert [each.name for each in run.prune("latest:1").deleted] == ["step-1"]
    assert run.latest() == "step-2"


def test_a_lost_or_broken_manifest_leaves_the_checkpoint_committed(run: Run) -> None:
    for step, data in enumerate((None, b"{}", b"\xff\x00")):
        run.steps(step)
        [manifest] = run.manifests(f"step-{step}")
        run.delete(f"step-{step}", manifest) if data is None else run.put(f"step-{step}", manifest, data)
    assert [(info.state, info.objects) for info in run.catalog().checkpoints()] == [("committed", 1)] * 3


def test_a_request_that_fails_is_an_error_not_a_gap(run: Run) -> None:
    run.steps(1, 2)
    run.rule = lambda method, key: errors.TransferError("SlowDown") if method == "get" and "step-2/" in key else None
    for look_at in (run.names, run.latest, lambda: run.prune("latest:1")):
        with pytest.raises(errors.TransferError):
            look_at()
    assert {key.split("/")[1] for key in run.objects()} == {"step-1", "step-2"}


@pytest.mark.parametrize("all_of_it", [True, False])
def test_latest_looks_again_when_its_choice_is_pruned(run: Run, all_of_it: bool) -> None:
    run.steps(1, 2)

    def go_on() -> None:
        run.steps(3, 4)
        run.delete("step-2", ".metadata")
        if all_of_it:
            run.prune("latest:1", grace=0, force=True)

    run.once("get", "step-2/.metadata", go_on)
    assert run.latest() == "step-4"


def truncate(run: Run, name: str) -> None:
    found = run.memory.get(f"run/{name}/.metadata")
    run.put(name, ".metadata", found.data[:-20], found.metadata)


def write_with_newer_torch(run: Run, name: str) -> None:
    """A class that no torch has today, in a checkpoint that is otherwise whole."""
    found = run.memory.get(f"run/{name}/.metadata")
    data = found.data.replace(b"BytesStorageMetadata", b"NewerStorageMetadata")
    assert data != found.data
    fields = {key: value for key, value in found.metadata.items() if "crc" not in key}
    run.put(name, ".metadata", seal(io.BytesIO(data[: -17 - data[-17]])), fields)
    [manifest] = run.manifests(name)
    read = Manifest.from_json(run.get(name, manifest))
    read.writer["torch"] = "99.0"
    run.put(name, manifest, read.to_json())


@pytest.mark.parametrize("prunes", [False, True])
def test_who_looks_for_the_newest_says_why_it_passes_over_others(
    run: Run, caplog: pytest.LogCaptureFixture, prunes: bool
) -> None:
    def look_at() -> object:
        return run.prune(KeepLatest(2), dry_run=True) if prunes else run.latest()

    run.steps(1, 2, 3, 4, 5, 6)
    look_at()
    assert caplog.messages == []
    truncate(run, "step-2")
    run.delete_data("step-3")
    [data] = [path for path in run.objects("step-4") if path.endswith(".distcp")]
    run.put("step-4", data, run.get("step-4", data)[:-1])
    write_with_newer_torch(run, "step-5")
    run.put("step-6", ".metadata", pickle.dumps(print))
    look_at()
    assert run.latest() == "step-1"
    said = caplog.messages[:5]
    assert [each.split()[0] for each in said] == [f"{ROOT}/step-{step}" for step in (6, 5, 4, 3, 2)]
    assert all(each.endswith(f"The next one that can be is {ROOT}/step-1") for each in said)
    assert f"torch {torch.__version__}" in said[1]
    assert "Remedy: load it with the versions that wrote it" in said[1]
    assert "its CRC-64/NVME is" in said[4]
    assert "Remedy: load an earlier checkpoint" in said[4]


def test_marks_are_seen_and_only_metrics_and_pins_cost_a_request(run: Run) -> None:
    run.save("step-1", metrics={"loss": 1})
    run.put("step-1", lease_object("ab", 600))
    run.clock.now += 60
    run.put("step-1", lease_object("cd", 100))
    run.put("step-1", deletion_object("ef"))
    run.calls.clear()
    info = run.only()
    assert (info.pinned, info.leased_until, info.deletions) == (False, run.clock.now - 60 + 600, ("ef",))
    assert run.calls == {"page": 2, "get": 1}
    run.annotate("step-1", {"acc": 2})
    for pin, reason in (
        (b'{"reason": "for\\nthe paper"}', "for the paper"), (b'{"reason": 3}', None), (b"[]", None), (b"\xff", None),
    ):  # fmt: skip
        run.put("step-1", ".dcp_s3/pin", pin)
        run.calls.clear()
        info = run.only()
        assert (info.metrics, info.pinned, info.pin_reason) == ({"loss": 1, "acc": 2}, True, reason)
        assert run.calls == {"page": 2, "get": 3}
    run.rule = lambda method, key: errors.AccessDeniedError("s3:GetObject") if key.endswith("/pin") else None
    assert (run.only().pinned, run.only().pin_reason) == (True, None)


def test_a_scan_and_latest_make_few_requests(run: Run) -> None:
    run.steps(0, 1, 2)
    looks: list[tuple[Callable[[], object], dict[str, int]]] = [
        (run.names, {"page": 4, "get": 3}),
        (run.latest, {"page": 5, "get": 5}),
        (run.catalog().scan, {"page": 4, "get": 4, "uploads": 1}),
    ]
    for look_at, expected in looks:
        run.calls.clear()
        look_at()
        assert run.calls == expected
    run.clock.now += 1
    run.put("step-2", ".dcp_s3/manifest-00000000000000ff.json", b"of a save in progress")
    run.put("step-1", "__0_0-abcdef.distcp")
    for look_at, heads in ((run.names, 1), (run.catalog().scan, 3)):
        run.calls.clear()
        look_at()
        assert run.calls["head"] == heads


def test_leftovers_of_other_saves_are_found_and_nothing_else(run: Run) -> None:
    run.save("step-1", objects=2)
    ours = {"__0_0-abcdef.distcp", ".dcp_s3/manifest-00000000000000ff.json"}
    others = (
        "__0_0.distcp",
        spread("__0_7-abcdef.distcp", 2),
        "notes.txt",
        "notes/__0_0-ab.distcp",
        "x/__0_0-ab.distcp",
    )
    for path in (*ours, *others, ".dcp_s3/other", lease_object("ab", 60), lease_object("cd", 3600)):
        run.put("step-1", path)
    run.pin("step-1")
    run.annotate("step-1", {"loss": 1})
    run.clock.now += 1800
    found = run.catalog().scan()
    leftovers = {each.key.removeprefix("run/step-1/"): each.is_lease for each in found.leftovers}
    assert leftovers == dict.fromkeys(ours, False) | {lease_object("ab", 60): True}
    assert {each.checkpoint for each in found.leftovers} == {"step-1"}
    assert found.plan(None, grace=HOUR).leftovers == ()
    run.clock.now += HOUR
    old = run.catalog().scan()
    assert old.plan(None, grace=HOUR).leftovers == old.leftovers


def test_nothing_is_a_leftover_where_the_manifest_is_not_certain(run: Run, tmp_path: Path) -> None:
    run.save_foreign("step-1", tmp_path)
    run.steps(2)
    run.forget_metadata("step-2")
    run.save_on_ranks("step-3", 1)
    for name in ("step-1", "step-2", "step-3"):
        run.put(name, "__0_0-abcdef.distcp")
    run.clock.now += 99 * HOUR
    assert run.catalog().scan().leftovers == ()


def test_what_is_replaced_or_deleted_meanwhile(run: Run) -> None:
    run.steps(1)
    run.put("step-1", "__0_0-abcdef.distcp")
    run.once("head", "", lambda: run.save("step-1", overwrite=True))
    found = run.catalog().scan()
    assert ([info.damage for info in found.checkpoints], found.leftovers) == ([None], ())
    run.once("get", "step-1/.metadata", lambda: run.save("step-1", overwrite=True))
    assert run.damages() == [None]
    run.delete("step-1", "__0_0-abcdef.distcp")
    run.once("get", "step-1/.metadata", lambda: (run.save("step-1", overwrite=True), run.delete_data("step-1")))
    assert "is not there" in str(run.damages())
    run.once("head", "", lambda: run.delete("step-1", ".metadata"))
    assert run.damages() == ["its .metadata is listed, but cannot be read"]


@pytest.mark.parametrize("kept", [[1], []])
@pytest.mark.parametrize("method", ["get", "page"])
def test_what_was_the_latest_is_pruned_while_it_is_looked_at(run: Run, kept: list[int], method: str) -> None:
    run.steps(*kept, 2)

    def prune_to(step: int) -> None:
        run.save(f"step-{step}")
        run.memory.delete([f"run/step-{step - 1}/{path}" for path in run.objects(f"step-{step - 1}")])

    run.once(method, "step-2/", lambda: prune_to(3))
    assert run.names()[-1] == "step-3"
    run.once(method, "step-3/", lambda: prune_to(4))
    assert run.latest() == "step-4"


def test_damage_of_part_does_not_cost_the_last_good_one(run: Run, tmp_path: Path) -> None:
    run.steps(1, 2, 3)
    run.save_foreign("step-4", tmp_path)
    for name in ("step-3", "step-4"):
        run.delete_data(name)
    assert [info.damage is None for info in run.catalog().checkpoints()] == [True, True, True, False]
    found = run.catalog().scan()
    assert [info.damage is None for info in found.checkpoints] == [True, True, False, False]
    plan = found.plan(KeepLatest(1), grace=HOUR)
    assert [info.name for info in plan.deleted] == ["step-1", "step-3"]
    assert run.latest() == "step-2"


@pytest.mark.usefixtures("_own_environment")
def test_what_waits_in_the_spill_directory_is_local(run: Run, tmp_path: Path) -> None:
    run.steps(1, 2)
    for name in ("step-1", "step-3"):
        _, commit = run.begin(name, overwrite=True)
        spill_commit(SpillStore(tmp_path), commit, Settings(), created_at=time.time(), overwrite=True)
        run.delete(name, commit.objects[0].path)
    theirs = replace(run.begin("step-4")[1], manifest=b"of a newer version")
    other = replace(theirs, identity=replace(theirs.identity, url=parse_url("s3://other/run/step-4")))
    spill_commit(SpillStore(tmp_path), other, Settings(), created_at=time.time(), overwrite=True)
    run.delete("step-4", theirs.objects[0].path)
    here, elsewhere = (run.catalog(settings=each).scan() for each in ({"spill_dir": str(tmp_path)}, None))
    assert [(info.name, info.state, info.waiting) for info in here.checkpoints] == [
        ("step-1", "committed", True), ("step-2", "committed", False), ("step-3", "local", True),
    ]  # fmt: skip
    assert not any(info.waiting for info in elsewhere.checkpoints)
    assert here.plan(lambda *_: {}, grace=0.0).deleted == ()
    assert [info.name for info in elsewhere.plan(lambda *_: {}, grace=0.0).deleted] == ["step-1"]


def test_marks_need_a_committed_checkpoint_and_metrics_that_can_be_stored(run: Run) -> None:
    values = math.inf, None, [1], 1j
    refused: tuple[Any, ...] = {}, {"": 1}, {3: 1}, "loss=1", *({"loss": value} for value in values)
    for metrics in refused:
        with pytest.raises(errors.SettingsError, match=r"expected a mapping|cannot be stored"):
            run.annotate("step-1", metrics)
    assert not run.calls
    run.steps(1)
    run.delete("step-1", ".metadata")
    before = run.objects()
    for name in ("step-1", "step-2"):
        for mark in (lambda name=name: run.annotate(name, {"loss": 1}), lambda name=name: run.pin(name)):
            with pytest.raises(errors.CheckpointNotFoundError, match="no committed checkpoint"):
                mark()
    assert run.objects() == before


def test_metrics_belong_to_one_save_and_the_pin_to_the_url(run: Run) -> None:
    run.save("step-1", metrics={"loss": 1.0})
    run.annotate("step-1", {"val_loss": 0.5})
    run.pin("step-1")
    run.forget_metadata("step-1")  # as a copy does
    assert run.annotate("step-1", {"nan": math.nan}).keys() == {"val_loss", "nan"}
    run.save("step-1", metrics={"loss": 2.0}, overwrite=True)
    assert (run.only().metrics, run.only().pinned) == ({"loss": 2.0}, True)
    assert run.annotate("step-1", {"acc": 1, "note": "ünï", "good": True}) == {"acc": 1, "note": "ünï", "good": True}
    assert run.annotate("step-1", {"acc": 2, "loss": 3}).keys() == {"acc", "note", "good", "loss"}
    assert run.only().metrics == {"loss": 3, "acc": 2, "note": "ünï", "good": True}


def test_a_damaged_file_of_metrics_is_replaced(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    run.save("step-1", metrics={"loss": 1})
    for data in (b"", b"[]", b'{"format_version": 9, "metrics": {}}', b'{"format_version": 1, "metrics": 3}'):
        run.put("step-1", METRICS, data)
        caplog.clear()
        assert run.only().metrics == {"loss": 1}
        assert "are not used" in caplog.text
        assert run.annotate("step-1", {"acc": 2}) == {"acc": 2}
        assert run.only().metrics == {"loss": 1, "acc": 2}


def test_a_writer_that_meets_others_merges_until_there_is_no_end_of_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.steps(1)
    run.once("put", METRICS, lambda: run.annotate("step-1", {"b": 2}))
    assert run.annotate("step-1", {"a": 1}) == {"a": 1, "b": 2} == run.only().metrics
    monkeypatch.setattr(marks, "_CONFLICTS", 3)
    monkeypatch.setattr(retry, "BACKOFF_BASE", 0.0)
    run.rule = lambda method, key: errors.PreconditionFailedError("met") if method == "put" else None
    with pytest.raises(errors.PreconditionFailedError):
        run.annotate("step-1", {"a": 2})
