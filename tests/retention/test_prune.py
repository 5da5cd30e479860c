"""What a prune takes, what stays, and what changed since the plan."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dcp_s3 import KeepLatest, errors
from dcp_s3.checkpoint.lease import DELETION_BEGINS
from dcp_s3.format.layout import deletion_object, lease_object
from dcp_s3.settings import Settings
from dcp_s3.spill.saving import spill_commit
from dcp_s3.spill.store import SpillStore
from tests.retention.runs import DAY, HOUR, Run, deleted


def test_what_no_policy_keeps_goes_and_nothing_else(run: Run) -> None:
    run.steps(1, 10, 100, 2)
    for near in ("run/step-1.txt", "run/step-1x", "runner/step-1/.metadata", "run/step-1/notes.txt",
                 "run/step-1/ema/.metadata", "run/step-1/ema/__0_0.distcp"):  # fmt: skip
        run.memory.put(near, b"x")
    before = run.objects()
    seen: list[tuple[int, int]] = []
    report = run.prune("latest:2", progress=lambda *step: seen.append(step))
    assert deleted(report) == ["step-1", "step-2"]
    assert (report.ok, report.left_alone, report.finished, report.leftovers) == (True, (), (), ())
    assert seen == [(1, 2), (2, 2)]
    after = run.objects()
    gone = set(before) - set(after)
    assert not set(after) - set(before)
    assert {key.rpartition("/")[0].removesuffix("/.dcp_s3") for key in gone} == {"run/step-1", "run/step-2"}
    assert sorted(run.objects("step-1")) == ["ema/.metadata", "ema/__0_0.distcp", "notes.txt"]
    assert (report.objects, report.size) == (len(gone), sum(before[key] for key in gone))
    again = run.prune("latest:2")
    assert again.plan.empty
    assert again.objects == 0
    assert run.objects() == after


def test_a_dry_run_and_a_prune_without_policies_delete_no_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.steps(1, 2)
    report = run.prune(KeepLatest(1), dry_run=True)
    assert (report.dry_run, [info.name for info in report.plan.deleted], report.deleted) == (True, ["step-1"], ())
    assert run.prune().plan.empty
    assert run.names() == ["step-1", "step-2"]
    monkeypatch.setenv("DCP_S3_RETENTION", "latest:1")
    assert deleted(run.prune()) == ["step-1"]


def test_a_grace_period_that_is_too_short_has_to_be_forced(run: Run) -> None:
    for grace, said in (("59m", "is under 1 h"), ("soon", "expected seconds")):
        with pytest.raises(errors.SettingsError, match=f"grace = '{grace}'.* {said}"):
            run.prune(grace=grace)
    run.put("step-1", "__0_0-ab.distcp")
    run.clock.now += 1
    assert deleted(run.prune(grace=0, force=True)) == ["step-1"]


CHANGES: dict[str, Callable[[Run], Any]] = {
    "overwritten": lambda run: run.save("step-1", overwrite=True),
    "pinned": lambda run: run.pin("step-1"),
    "lease": lambda run: run.put("step-1", lease_object("ab", 600)),
    "metrics were added": lambda run: run.annotate("step-1", {"loss": 1}),
    "gone": lambda run: run.remove("step-1"),
    "a save is in progress": lambda run: [
        run.put("step-1", path) for path in ("__0_0-abcdef.distcp", ".dcp_s3/manifest-00000000000000ff.json")
    ],
    "which was to stay": lambda run: run.remove("step-2"),
}


LATE = [why for why in CHANGES if why not in ("gone", "which was to stay")]


@pytest.mark.parametrize(
    ("why", "before"),
    [*((why, "") for why in CHANGES), *((why, "put deletion-") for why in LATE), ("overwritten", "delete .metadata")],
)
def test_what_changed_since_the_plan_or_the_list_is_left_alone(run: Run, why: str, before: str) -> None:
    run.steps(1, 2)
    run.clock.now += 1
    plan = run.catalog().scan().plan(KeepLatest(1), grace=HOUR)
    if before:
        run.once(*before.split(), lambda: CHANGES[why](run))
    else:
        CHANGES[why](run)
    objects = run.objects()
    report = run.apply(plan)
    assert [each.name for each in report.left_alone] == ["step-1"]
    assert why in report.left_alone[0].reason
    assert (report.deleted, report.ok) == ((), True)
    assert not [key for key in run.objects() if "deletion-" in key]
    assert set(run.damages()) == {None}
    assert why == "overwritten" or set(objects) <= set(run.objects())


def test_leftovers_and_uploads_go_after_the_grace_period(run: Run) -> None:
    run.steps(0, 1)
    run.delete("step-0", ".metadata")
    run.put("step-1", "__0_0-abcdef.distcp")
    for step in (0, 1, 7):
        run.memory.begin(f"run/step-{step}/__0_1-abcdef.distcp")
    others = ["run/deep/er/__0_0-ab.distcp", "run/logs/events", "run/x.distcp", "runner/step-1/__0_0-ab.distcp"]
    for key in others:
        run.memory.begin(key)
    before = run.objects()
    run.clock.now += 2 * HOUR
    report = run.prune(grace="3h")
    assert (report.objects, report.aborted, report.plan.empty) == (0, (), True)
    assert run.objects() == before
    run.clock.now += 2 * HOUR
    report = run.prune(grace="3h")
    assert deleted(report) == ["step-0"]
    assert [(each.name, each.objects) for each in report.leftovers] == [("step-1", 1)]
    assert len(report.aborted) == 3
    assert sorted(each.key for each in run.memory.uploads("")) == others
    assert run.objects("step-0") == {}
    assert run.names() == ["step-1"]
    assert run.latest() is not None


def test_a_manifest_whose_name_says_another_id_stops_no_prune(run: Run) -> None:
    run.steps(1, 2, 3)
    key = run.url("step-1").key(run.manifests("step-1")[0])
    run.memory.put(key, json.dumps(json.loads(run.memory.get(key).data) | {"save_id": "ab" * 12}).encode())
    assert "step-2" in deleted(run.prune("latest:1"))


def test_one_that_fails_does_not_stop_the_others(run: Run) -> None:
    run.steps(1, 2, 3)
    refused = errors.AccessDeniedError("s3:DeleteObject")
    run.rule = lambda method, key: refused if method == "delete" and "step-1/" in key else None
    report = run.prune("latest:1")
    assert deleted(report) == ["step-2"]
    assert [each.name for each in report.failures] == ["step-1"]
    assert "s3:DeleteObject" in report.failures[0].reason
    assert not report.ok
    assert report.to_dict()["failures"][0]["name"] == "step-1"
    run.rule = lambda method, key: None
    run.prune("latest:1")
    assert run.objects("step-1") == {}


def test_the_list_of_a_deletion_that_was_given_up_is_withdrawn_when_readers_ignore_it(run: Run) -> None:
    run.steps(1, 2)
    path = deletion_object(run.catalog().checkpoints()[0].deletion_id, "ab")
    run.put("step-1", path)
    run.clock.now += DELETION_BEGINS - 1
    run.prune()
    assert path in run.objects("step-1")
    run.clock.now += 2
    run.prune()
    assert path not in run.objects("step-1")
    assert run.damages() == [None, None]


def test_a_pin_that_comes_after_a_deletion_is_none(run: Run) -> None:
    run.steps(1, 2)
    run.once("put", "/pin", lambda: run.prune("latest:1"))
    with pytest.raises(errors.CheckpointDeletedError):
        run.pin("step-1")
    assert run.objects("step-1") == {}


@pytest.mark.parametrize("kind", ["ranks", "spread", "damaged"])
def test_checkpoints_of_every_kind_go_whole(run: Run, kind: str) -> None:
    """Foreign ones, and those with metrics: `Mixed`."""
    if kind == "ranks":
        run.save_on_ranks("step-1", 2)
    else:
        run.save("step-1", objects=2, digits=2 * (kind == "spread"))
    if kind == "damaged":
        run.put("step-1", ".metadata", run.get("step-1", ".metadata")[:100])
    run.put("step-1", lease_object("ab", 60))
    run.clock.now += 2 * DAY
    run.steps(2)
    report = run.prune("latest:1")
    assert (deleted(report), report.left_alone, report.failures) == (["step-1"], (), ())
    assert run.objects("step-1") == {}


def test_a_rank_checkpoint_hidden_by_another_never_comes_back(run: Run) -> None:
    run.save_on_ranks("step-1", 1)
    run.put("step-1", ".metadata", run.get(run.save("other-step-1"), ".metadata"))
    run.clock.now += 2 * DAY
    run.steps(2)
    run.rule = lambda method, key: (
        errors.TransferError("reset") if method == "delete" and key == "run/step-1/.metadata" else None
    )
    assert [each.name for each in run.prune("latest:1").failures] == ["step-1"]
    left = run.objects("step-1")
    assert ".metadata" in left
    assert "__0.metadata" not in left


def test_the_commit_goes_first_and_the_list_last(run: Run) -> None:
    run.steps(1, 2)
    changes: list[tuple[str, str]] = []
    run.rule = lambda method, key: changes.append((method, key)) if method in ("put", "delete") else None
    run.prune("latest:1")
    (put, listed), commit, _, last = changes
    assert (put, "deletion-" in listed) == ("put", True)
    assert [commit, last] == [("delete", "run/step-1/.metadata"), ("delete", listed)]


def test_a_save_whose_commit_waits_on_this_host_loses_nothing(run: Run, tmp_path: Path) -> None:
    """Its objects are on S3 for two days already."""
    run.steps(1, 2)
    _, commit = run.begin("step-3")
    spill_commit(SpillStore(tmp_path), commit, Settings(), created_at=time.time(), overwrite=False)
    before, files = run.objects("step-3"), sorted(tmp_path.rglob("*"))
    run.clock.now += 2 * DAY
    spilling = {"spill_dir": str(tmp_path)}
    with pytest.raises(errors.CheckpointProtectedError, match="spill directory"):
        run.remove("step-3", settings=spilling)
    assert deleted(run.prune("latest:1", settings=spilling)) == ["step-1"]
    assert (run.objects("step-3"), sorted(tmp_path.rglob("*"))) == (before, files)


def test_remove_takes_one_even_the_newest(run: Run) -> None:
    run.steps(1, 12)
    done = run.remove("step-1")
    assert (done.name, done.objects) == ("step-1", 3)
    assert run.objects("step-1") == {}
    assert run.names() == ["step-12"]
    with pytest.raises(errors.CheckpointNotFoundError, match="nothing of a checkpoint"):
        run.remove("step-1")
    run.remove("step-12")
    assert run.objects() == {}


PROTECTED: dict[str, Callable[[Run], Any]] = {
    "pinned": lambda run: run.pin("step-1"),
    "lease": lambda run: run.put("step-1", lease_object("ab", 600)),
    "object": lambda run: run.put("step-1", "__0_0-abcdef.distcp"),
    "upload": lambda run: run.memory.begin("run/step-1/__0_0-ab.distcp"),
}


@pytest.mark.parametrize("why", PROTECTED)
@pytest.mark.parametrize("committed", [True, False])
def test_remove_refuses_what_is_protected_unless_forced(run: Run, why: str, committed: bool) -> None:
    run.steps(1)
    PROTECTED[why](run)
    if not committed:
        run.delete("step-1", ".metadata")
    before = run.objects()
    with pytest.raises(errors.CheckpointProtectedError):
        run.remove("step-1")
    assert run.objects() == before
    run.remove("step-1", force=True)
    assert all(".dcp_s3/pin" in path or "lease" in path for path in run.objects("step-1"))
    assert run.memory.uploads("") == []
