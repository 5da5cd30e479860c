"""Public objects show themselves in one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import dcp_s3
from dcp_s3 import (
    CatalogSnapshot,
    CheckpointCatalog,
    CheckpointDiff,
    CheckpointEntries,
    CheckpointInfo,
    CheckpointManager,
    CheckResult,
    CopyResult,
    Decision,
    DoctorReport,
    EntryDiff,
    ExportResult,
    Fused,
    ImportResult,
    KeepBest,
    KeepDaily,
    KeepLatest,
    Plan,
    Problem,
    PruneReport,
    ReportData,
    S3LoadPlanner,
    S3Stager,
    S3StorageReader,
    S3StorageWriter,
    SaveEvery,
    SaveMoment,
    SaveOnPreemption,
    Settings,
    VerifyReport,
    stats,
)
from dcp_s3.units import one_line

URL = "s3://bucket/run/step-00000100"
INFO = CheckpointInfo(URL, URL.rpartition("/")[2], "committed", 100, 1.0, 8, 32, 3 * 2**30, {"val_loss": 1.25})
KEEP = Decision(INFO, "keep", ("the newest", "latest:3, number 1"))
DELETE = Decision(INFO, "delete", ("no policy keeps it",))
PLAN = Plan(1.0, 86400.0, (KEEP, DELETE))
PROBLEM = Problem("__0_0-ab.distcp", "model.weight", "has other bytes than were saved")


def _report(*problems: Problem) -> VerifyReport:
    return VerifyReport(URL, "fast", 8, 200, 4096, 0, 0, 0, problems)


SHOWN = [
    (lambda: S3StorageWriter(URL), f"S3StorageWriter('{URL}')"),
    (lambda: S3StorageWriter(), "S3StorageWriter()"),
    (lambda: S3StorageWriter(URL, overwrite=True), f"S3StorageWriter('{URL}', overwrite=True)"),
    (lambda: S3StorageReader(URL), f"S3StorageReader('{URL}')"),
    (lambda: S3Stager(asynchronous=True), "S3Stager(asynchronous=True)"),
    (lambda: S3LoadPlanner(), "S3LoadPlanner(allow_partial_load=False)"),
    (lambda: CheckpointManager("s3://bkt/r", read_only=True), "CheckpointManager('s3://bkt/r', read_only=True)"),
    (
        lambda: CheckpointManager(
            "s3://bkt/r", retention=KeepLatest(3), should_save=SaveEvery(steps=10), step_format="{step}"
        ),
        "CheckpointManager('s3://bkt/r', retention='latest:3', should_save=SaveEvery(steps=10), step_format='{step}')",
    ),
    (lambda: CheckpointCatalog("s3://bucket/run"), "CheckpointCatalog('s3://bucket/run')"),
    (lambda: CatalogSnapshot("s3://bkt/r", 1.0, (INFO,)), "CatalogSnapshot('s3://bkt/r', 1 checkpoint)"),
    (lambda: INFO, f"CheckpointInfo('{URL}', committed, 3.0 GiB, step=100, metrics={{'val_loss': 1.25}})"),
    (lambda: KEEP, "Decision(keep, 'step-00000100', the newest, latest:3, number 1)"),
    (lambda: PLAN, "Plan(1 kept, 1 to delete (3.0 GiB))"),
    (lambda: PruneReport("s3://bkt/r", PLAN, dry_run=True), "PruneReport('s3://bkt/r', dry run: 1 to delete)"),
    (lambda: PruneReport("s3://bkt/r", PLAN), "PruneReport('s3://bkt/r', 0 deleted (0 B in 0 objects))"),
    (lambda: PROBLEM, "Problem('__0_0-ab.distcp', has other bytes than were saved, fqn='model.weight')"),
    (lambda: _report(), f"VerifyReport('{URL}', ok, fast, objects=8, items=200)"),
    (lambda: ExportResult(("a", "b"), 10, 2**20, 0), "ExportResult(2 files, 10 tensors, 1.0 MiB)"),
    (lambda: ImportResult(10, 0, 2**20), "ImportResult(10 tensors, 1.0 MiB)"),
    (lambda: CheckResult("region", "ok", "eu-west-1"), "CheckResult('region', ok, eu-west-1)"),
    (lambda: DoctorReport(URL, False, ()), None),
    (lambda: stats(), None),
    (lambda: EntryDiff("model.w", "tensor", "changed", "values"), "EntryDiff('model.w', changed, what='values')"),
    (lambda: CheckpointEntries(INFO, {}, (), ()), f"CheckpointEntries('{URL}', 0 tensors, 0 parameters, 0 B)"),
    (
        lambda: CheckpointDiff(INFO, INFO, (), {}, {}),
        "CheckpointDiff('step-00000100', 'step-00000100', 0 of 0 entries differ)",
    ),
    (lambda: CopyResult(5, 2048, 1024), "CopyResult(5 files, 2.0 KiB, 1.0 KiB moved)"),
    (
        lambda: ReportData("s3://bkt/r", PLAN, "latest:3", (), 0),
        "ReportData('s3://bkt/r', 2 checkpoints, 0 problems, policy='latest:3')",
    ),
    (lambda: Fused(0, (4, 2, 2)), "Fused(dim=0, lengths=(4, 2, 2), copies=None)"),
    (lambda: Settings(), "Settings()"),
    (
        lambda: Settings(spill_dir="/nvme", part_size="64MiB", load_timeout=5),
        "Settings(part_size=67108864, load_timeout=5.0, spill_dir='/nvme')",
    ),
    (lambda: KeepLatest(3) | KeepBest(1, "loss", "min"), None),
    (lambda: KeepDaily(7), "KeepDaily(n=7)"),
    (lambda: SaveFirst() | SaveEvery(seconds="10m") | SaveOnPreemption(), None),
    (
        lambda: SaveMoment(5, None, 1.5, False),
        "SaveMoment(step=5, last_step=None, seconds=1.5, preempted=False, saving=False)",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("make", "expected"), SHOWN)
def test_it_is_one_short_line(make: Callable[[], Any], expected: str | None) -> None:
    shown = repr(make())
    if expected is not None:
        assert shown == expected
    assert "\n" not in shown
    assert len(shown) <= 120


def test_every_public_class_is_shown_here() -> None:
    made = {type(make()).__name__ for make, _ in SHOWN}
    public = {name for name in dcp_s3.__all__ if isinstance(getattr(dcp_s3, name), type)}
    of_one_number = {f"Keep{name}" for name in ("Best", "Every", "Hourly", "Latest", "Weekly", "Within")}
    alike = {"SaveContinuously", "SaveEvery", "SaveOnPreemption"} | of_one_number
    assert public - made - alike - {"Policy", "SavePolicy"} == set()


def _long(count: int) -> Sequence[Any]:
    url = f"s3://bucket/{'directory/' * count}step-00000100"
    info = CheckpointInfo(
        url, "step-00000100", "committed", 100, 1.0, 8, 32, 5, {f"metric_{n}": n / 7 for n in range(count)},
        extra={"note": "line\n" * count}, damage="damaged " * count,
    )  # fmt: skip
    problems = tuple(Problem(f"{'path/' * count}x", "fqn." * count, "wrong\n" * count) for _ in range(count))
    return (
        info, Decision(info, "keep", ("because " * count,) * count), problems[0], _report(*problems),
        S3StorageWriter(url), S3StorageReader(url), CheckpointCatalog(url),
        ExportResult(("name",) * count, count, count, count),
        Settings(spill_dir="/" + "nvme" * count, endpoint_url=f"https://{'s3.' * 20}test", region="x" * count,
                 rank_timeout=1, storage_class="y" * count, sse_kms_key_id="z" * count, retention="latest:3 " * count),
    )  # fmt: skip


def test_it_stays_short_whatever_it_holds() -> None:
    for value in _long(50):
        shown = repr(value)
        assert len(shown) <= 120, shown
        assert "\n" not in shown
        assert shown.startswith(type(value).__name__ + "(")


def test_settings_show_what_is_set_wherever_they_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("DCP_S3_REGION", "eu-central-1")
    assert f"{Settings()}" == repr(Settings()) == "Settings(region='eu-central-1')"


def test_what_does_not_fit_is_counted() -> None:
    shown = one_line("Thing", *(["x" * 30] * 9))
    assert shown == f"Thing({', '.join(['x' * 30] * 3)}, ... 6 more)"
    assert one_line("Thing", "x" * 200) == f"Thing({'x' * 30}...{'x' * 30})"
    assert one_line("Thing", a=None, b=1) == "Thing(b=1)"
