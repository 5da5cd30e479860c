"""Reports of roots that a test describes."""

from __future__ import annotations

from typing import Any

from dcp_s3.checkpoint.info import CheckpointInfo, LeftoverObject
from dcp_s3.reporting.report import ReportData, gather
from dcp_s3.retention.plan import CatalogSnapshot, OpenUpload
from tests.retention.histories import DAY, NOW, info

HOUR = 3600.0
ROOT = "s3://bucket/run"


def saved(step: int | None, hours_ago: float, **fields: Any) -> CheckpointInfo:
    """A committed checkpoint; other names by ``name``."""
    at = NOW - hours_ago * HOUR
    name = fields.pop("name", f"step-{step}")
    usual = {
        "created_at": at,
        "modified_at": at,
        "started_at": at - 60,
        "size": 2**30,
        "metrics": {"loss": 1 / (1 + (step or 0))},
    }
    return info(name, **({"step": step} | usual | fields))


def hourly(count: int, **fields: Any) -> list[CheckpointInfo]:
    """One each hour until an hour ago, 100 steps apart."""
    return [saved(100 * number, count + 1 - number, **fields) for number in range(1, count + 1)]


def data_of(
    infos: list[CheckpointInfo],
    policy: Any = None,
    *,
    uploads: tuple[OpenUpload, ...] = (),
    leftovers: tuple[LeftoverObject, ...] = (),
) -> ReportData:
    """What a report of these checkpoints shows."""
    snapshot = CatalogSnapshot(ROOT, NOW, tuple(infos), uploads, leftovers)
    return gather(snapshot, policy, grace=DAY)
