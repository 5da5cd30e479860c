"""What the tests of whole examinations share."""

from __future__ import annotations

from dcp_s3.checkup.doctor import DoctorReport
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault

URL = f"s3://{BUCKET}/run"
BEFORE = {"run/before": len(b"kept"), "run/step-1/.metadata": 0}
OPEN = "run/step-1/__0_0-ab.distcp"
DENIED = Fault.error(403, "AccessDenied")


def deny(server: FaultyServer, *operations: str, key: str = "") -> None:
    """Let the server refuse these operations, on keys that end with ``key``."""
    server.rule = lambda request: DENIED if request.operation in operations and request.key.endswith(key) else None


def statuses(report: DoctorReport) -> dict[str, str]:
    return {each.name: each.status for each in report.checks}
