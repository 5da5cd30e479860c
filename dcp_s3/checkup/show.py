"""A report as text. Pure."""

from __future__ import annotations

import json

from dcp_s3.checkup.result import CheckResult, DoctorReport, Status

WORDS: dict[Status, str] = {"ok": "ok", "warning": "warning", "failed": "FAIL", "skipped": "skipped"}
"""For a pipe."""
TICKS: dict[Status, str] = {"ok": "✓", "warning": "!", "failed": "✗", "skipped": "-"}
"""For a terminal."""
_NAME_WIDTH = 24


def format_result(result: CheckResult, marks: dict[Status, str] = WORDS) -> str:
    """One check: a line with what was found, and if there is one, a second with the remedy."""
    width = max(map(len, marks.values())) + 2
    line = f"{marks[result.status]:<{width}}{result.name:<{_NAME_WIDTH}}{result.found}"
    return f"{line}\n{'':<{width + _NAME_WIDTH}}Remedy: {result.remedy}" if result.remedy else line


def summarize(report: DoctorReport) -> str:
    """One line about all checks."""
    counts = [
        (len(report.having("ok")), "ok"),
        (len(report.warnings), "warning" if len(report.warnings) == 1 else "warnings"),
        (len(report.failed), "failed"),
        (len(report.having("skipped")), "skipped"),
    ]
    verdict = "saves and loads will work" if report.ok else "saves or loads will not work"
    if report.ok and report.read_only:
        verdict = "nothing failed; whether saves work was not tried (read-only)"
    told = ", ".join(f"{count} {what}" for count, what in counts if count)
    return f"{report.url}: {verdict}: {told}, in {report.seconds:.1f} s"


def format_policies(report: DoctorReport) -> str:
    """The IAM policies to paste."""
    return "\n".join(
        (
            "IAM policy to save, load and prune here (stores other than AWS may have their own):",
            json.dumps(report.policies["training"], indent=2),
            "To prune all versions of a versioned bucket, also:",
            json.dumps(report.policies["prune_versions"], indent=2),
        )
    )


def to_text(report: DoctorReport) -> str:
    """The whole report, plainly."""
    return "\n".join([*map(format_result, report.checks), conclude(report)])


def conclude(report: DoctorReport, *, policy: bool = False) -> str:
    """What follows the checks: policies if asked for or if they help, the summary, and what failed once more."""
    lines = [summarize(report)]
    if policy or report.denied:
        lines.insert(0, format_policies(report))
    return "\n".join([*lines, *map(format_result, report.failed)])
