"""Public objects show themselves in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import dcp_s3
from dcp_s3 import (
    CheckpointInfo,
    Decision,
    KeepBest,
    KeepLatest,
    Plan,
    Problem,
    PruneReport,
    SaveEvery,
)
from dcp_s3.units import one_line

URL = "s3://bucket/run/step-00000100"
INFO = CheckpointInfo(URL, URL.rpartition("/")[2], "committed", 100, 1.0, 8, 32, 3 * 2**30, {"val_loss": 1.25})
PLAN = Plan(1.0, 86400.0, (Decision(INFO, "keep", ("the newest",)), Decision(INFO, "delete", ("no policy keeps it",))))
PROBLEM = Problem("__0_0-ab.distcp", "model.weight", "has other bytes than were saved")

SHOWN: list[tuple[Callable[[], Any], str | None]] = [
    (lambda: dcp_s3.S3StorageWriter(URL, overwrite=True), f"S3StorageWriter('{URL}', overwrite=True)"),
    (lambda: dcp_s3.S3StorageReader(URL), f"S3StorageReader('{URL}')"),
    (lambda: dcp_s3.S3Stager(asynchronous=True), None),
    (lambda: dcp_s3.S3LoadPlanner(), None),
    (
        lambda: dcp_s3.CheckpointManager("s3://bkt/r", retention=KeepLatest(3), should_save=SaveEvery(steps=10)),
        "CheckpointManager('s3://bkt/r', retention='latest:3', should_save=SaveEvery(steps=10))",
    ),
    (lambda: dcp_s3.CheckpointCatalog("s3://bucket/run"), None),
    (lambda: dcp_s3.CatalogSnapshot("s3://bkt/r", 1.0, (INFO,)), None),
    (lambda: INFO, f"CheckpointInfo('{URL}', committed, 3.0 GiB, step=100, metrics={{'val_loss': 1.25}})"),
    (lambda: PLAN.decisions[0], "Decision(keep, 'step-00000100', the newest)"),
    (lambda: PLAN, "Plan(1 kept, 1 to delete (3.0 GiB))"),
    (lambda: PruneReport("s3://bkt/r", PLAN, dry_run=True), "PruneReport('s3://bkt/r', dry run: 1 to delete)"),
    (lambda: PROBLEM, "Problem('__0_0-ab.distcp', has other bytes than were saved, fqn='model.weight')"),
    (lambda: dcp_s3.VerifyReport(URL, "fast", 8, 200, 4096, 0, 0, ()), None),
    (lambda: dcp_s3.ExportResult(("a", "b"), 10, 2**20, 0), "ExportResult(2 files, 10 tensors, 1.0 MiB)"),
    (lambda: dcp_s3.ImportResult(10, 2**20), None),
    (lambda: dcp_s3.CheckResult("region", "ok", "eu-west-1"), "CheckResult('region', ok, eu-west-1)"),
    (lambda: dcp_s3.DoctorReport(URL, False, ()), None),
    (lambda: dcp_s3.stats(), None),
    (lambda: dcp_s3.EntryDiff("model.w", "tensor", "changed", "values"), None),
    (lambda: dcp_s3.CheckpointEntries(INFO, {}, (), ()), None),
    (lambda: dcp_s3.CheckpointDiff(INFO, INFO, (), {}, {}), None),
    (lambda: dcp_s3.CopyResult(5, 2048, 1024), "CopyResult(5 files, 2.0 KiB, 1.0 KiB moved)"),
    (lambda: dcp_s3.ReportData("s3://bkt/r", PLAN, "latest:3", (), 0), None),
    (lambda: dcp_s3.Fused(0, (4, 2, 2)), None),
    (lambda: dcp_s3.Settings(part_size="64MiB"), "Settings(part_size=67108864)"),
    (lambda: KeepLatest(3) | KeepBest(1, "loss", "min"), None),
    (lambda: dcp_s3.SaveContinuously() | SaveEvery(seconds="10m"), None),
    (lambda: dcp_s3.SaveMoment(5, None, 1.5, False), None),
]


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
    assert {name for name in public - made if not name.startswith(("Keep", "Save"))} == {"Policy"}


def test_it_stays_short_whatever_it_holds() -> None:
    url = f"s3://bucket/{'directory/' * 50}step-00000100"
    metrics, extra = {f"metric_{n}": n / 7 for n in range(50)}, {"note": "line\n" * 50}
    info = CheckpointInfo(url, "x", "committed", 100, 1.0, 8, 32, 5, metrics, extra=extra, damage="damaged " * 50)
    for value in (
        info, Decision(info, "keep", ("because " * 50,) * 50), Problem("path/" * 50, "fqn." * 50, "wrong\n" * 50),
        dcp_s3.S3StorageWriter(url), dcp_s3.CheckpointCatalog(url), dcp_s3.Settings(spill_dir="/" + "nvme" * 50),
    ):  # fmt: skip
        shown = repr(value)
        assert len(shown) <= 120, shown
        assert "\n" not in shown
        assert shown.startswith(type(value).__name__ + "(")


def test_what_does_not_fit_is_counted() -> None:
    shown = one_line("Thing", *(["x" * 30] * 9))
    assert shown == f"Thing({', '.join(['x' * 30] * 3)}, ... 6 more)"
    assert one_line("Thing", "x" * 200) == f"Thing({'x' * 30}...{'x' * 30})"
    assert one_line("Thing", a=None, b=1) == "Thing(b=1)"
