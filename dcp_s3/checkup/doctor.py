"""`doctor`: the permissions that dcp_s3 needs, the checks in their order, and the report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import botocore.exceptions as boto

from dcp_s3 import errors
from dcp_s3.checkup import checks
from dcp_s3.checkup.probes import CheckResult, Examination, Status, from_error, ok, skip
from dcp_s3.s3.diagnosis import permission_of
from dcp_s3.settings import SettingsLike
from dcp_s3.url import URLLike, parse_url

WORDS: dict[Status, str] = {"ok": "ok", "warning": "warning", "failed": "FAIL", "skipped": "skipped"}
_NAME_WIDTH = 24

# --- permissions; docs/security.md shows the same --------------------------------------------------------


class Permission(NamedTuple):
    operations: tuple[str, ...]
    """S3's operations that the IAM action allows."""
    used_by: str
    without: str
    """What a training job without it has to expect."""
    on_bucket: bool = False
    """Whether it is granted on the bucket, not on its objects."""
    required: bool = False
    """Whether saves or loads do not work without it."""

    @property
    def action(self) -> str:
        return permission_of(self.operations[0])


PERMISSIONS = (
    Permission(("GetObject", "HeadObject"), "everything", "neither saves nor loads work", required=True),
    Permission(
        ("ListObjectsV2",), "overwriting, `latest`, listing, copies, drain, prune",
        "a missing checkpoint reads as forbidden: saves to a new URL and `latest` do not work",
        on_bucket=True, required=True,
    ),
    Permission(
        ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"),
        "save, upload, drain; prune, for its lists", "no save works", required=True,
    ),
    Permission(
        ("AbortMultipartUpload",), "a save that fails, drain, prune",
        "saves work; one that fails leaves its multipart upload open, which costs until a lifecycle rule aborts it",
    ),
    Permission(
        ("ListMultipartUploads",), "drain, prune",
        "saves work; prune does not work, so uploads that broke stay open, and cost", on_bucket=True,
    ),
    Permission(
        ("DeleteObjects", "DeleteObject"), "overwriting, a save that fails, drain, prune",
        "saves and loads work, prune does not: nothing is ever deleted, nor what failed or overwritten saves leave",
    ),
)  # fmt: skip


def permission_for(operation: str) -> Permission:
    return next(each for each in PERMISSIONS if operation in each.operations)


# --- the checks ----------------------------------------------------------------------------------------


class Check(NamedTuple):
    name: str
    make: Callable[[Examination], CheckResult | None]
    """None: the operation is allowed."""
    needs: str = ""
    """The check that must not have failed. A check that was skipped passes its own reason on."""
    operation: str = ""
    """The operation that it tries to be allowed. What it returns is another fault than a refusal."""
    writes: bool = False
    """Whether it writes to the bucket."""
    optional: bool = False
    """Whether saves and loads work without what it tries."""


CHECKS = (
    Check("settings", checks.check_settings),
    Check("versions", checks.check_versions),
    Check("credentials", checks.check_credentials, "settings"),
    Check("endpoint", checks.check_endpoint, "credentials"),
    Check("clock", checks.check_clock, "endpoint"),
    Check("ListObjectsV2", checks.do_list, "endpoint", "ListObjectsV2"),
    Check("PutObject", checks.do_put, "ListObjectsV2", "PutObject", writes=True),
    Check("GetObject", checks.do_get, "PutObject", "GetObject", writes=True),
    Check("DeleteObject", checks.do_delete, "PutObject", "DeleteObject", writes=True),
    Check("DeleteObjects", checks.do_delete_batch, "PutObject", "DeleteObjects", writes=True),
    Check("multipart upload", checks.do_multipart, "PutObject", "UploadPart", writes=True),
    Check("ListMultipartUploads", checks.do_list_uploads, "multipart upload", "ListMultipartUploads", writes=True),
    Check("AbortMultipartUpload", checks.do_abort, "multipart upload", "AbortMultipartUpload", writes=True),
    Check("If-None-Match", checks.check_if_none_match, "PutObject", writes=True, optional=True),
    Check("If-Match", checks.check_if_match, "PutObject", writes=True, optional=True),
    Check("conditional delete", checks.check_conditional_delete, "PutObject", writes=True, optional=True),
    Check("checksums", checks.check_checksums, "PutObject", writes=True, optional=True),
    Check("whole-object CRC-64", checks.check_whole_object, "multipart upload", writes=True, optional=True),
    Check("copies", checks.check_copies, "multipart upload", writes=True, optional=True),
    Check("lifecycle", checks.check_lifecycle, "ListObjectsV2", optional=True),
    Check("versioning", checks.check_versioning, "ListObjectsV2", optional=True),
    Check("spill disk", checks.check_spill, "settings"),
)


COLUMNS = (
    ("If-None-Match, If-Match, delete", ("If-None-Match", "If-Match", "conditional delete")),
    ("checksum on upload", ("checksums",)),
    ("whole-object CRC-64", ("whole-object CRC-64",)),
    ("lists uploads", ("ListMultipartUploads",)),
    ("versions", ("versioning",)),
    ("copies", ("copies",)),
    ("clock", ("clock",)),
)
"""Columns of the table of stores in docs/stores.md, and the checks that fill them."""


def doctor(
    url: URLLike,
    settings: SettingsLike = None,
    read_only: bool = False,
    *,
    on_result: Callable[[CheckResult], object] = lambda _: None,
) -> DoctorReport:
    """Examine whether saves and loads below a URL will work, and what the store is able to do.

    Nothing is raised for what is found: the report has it, and ``print`` shows all of it. Small probe objects are
    written below the URL, under a name of their own, and removed again, also after a failure or Ctrl-C. ``read_only``
    leaves out everything that writes, to the bucket and to the spill directory. ``on_result`` is called after each
    check.

    Raises:
        InvalidURLError: the URL is none of S3, or too long for names below it.

    >>> doctor("s3://bucket/run").ok
    True
    """
    exam = Examination(parse_url(url), read_only, settings)
    parse_url(str(exam.probes))  # its names are not too long
    began = time.monotonic()
    results: dict[str, CheckResult] = {}

    def make(check: Check) -> None:
        found = _find_reason_to_skip(check, results) or _make(check, exam)
        results[check.name] = replace(found, name=check.name)
        on_result(results[check.name])

    with exam.removing():
        for check in CHECKS:
            if not (check.writes and read_only):
                make(check)
        if exam.keys or exam.uploads:
            make(Check("clean-up", checks.clean_up, optional=True))
    store = exam.server or str(exam.url.bucket)
    return DoctorReport(str(exam.url), read_only, tuple(results.values()), time.monotonic() - began, store)


def _make(check: Check, exam: Examination) -> CheckResult:
    needed = permission_for(check.operation) if check.operation else None
    try:
        found = check.make(exam) or ok("")
    except (errors.DcpS3Error, boto.BotoCoreError, boto.ClientError, OSError, ValueError) as error:
        is_optional = check.optional or (needed is not None and not needed.required)
        return from_error(
            error, status="warning" if is_optional else "failed", consequence=needed.without if needed else ""
        )
    if found.found or needed is None:
        return found
    return replace(found, found=f"allowed; needed for {needed.used_by.replace('`', '')} ({needed.action})")


def _find_reason_to_skip(check: Check, results: Mapping[str, CheckResult]) -> CheckResult | None:
    needed = results.get(check.needs)
    if needed is None or needed.passed:
        return None
    return needed if needed.status == "skipped" else skip(f"not checked: see {check.needs}")


# --- the report ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DoctorReport:
    """What `dcp_s3.doctor` found. ``print`` shows it as plain text.

    >>> report = doctor("s3://bucket/run")
    >>> report.ok, [check.name for check in report.failed]
    (True, [])
    """

    url: str
    """URL that was examined."""
    read_only: bool
    """Whether everything that writes was left out."""
    checks: tuple[CheckResult, ...]
    """The checks, in the order in which they were made."""
    seconds: float = 0.0
    """Seconds that all checks took."""
    store: str = ""
    """What the endpoint calls itself; the bucket's name if it does not say."""

    @property
    def row(self) -> str:
        """The store's row in the table of docs/stores.md, as Markdown; ``unknown``: it was not found out."""
        cells = {each.name: each.cell or "unknown" for each in self.checks}
        columns = [", ".join(cells.get(name, "unknown") for name in names) for _, names in COLUMNS]
        return f"| {' | '.join([self.store.replace('|', ' '), *columns])} |"

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[CheckResult, ...]:
        """The checks that failed."""
        return tuple(each for each in self.checks if each.status == "failed")

    @property
    def warnings(self) -> tuple[CheckResult, ...]:
        """The checks that found something to be known."""
        return tuple(each for each in self.checks if each.status == "warning")

    def __getitem__(self, name: str) -> CheckResult:
        """The check of that name; KeyError if it was not made."""
        return {each.name: each for each in self.checks}[name]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields = ("url", "ok", "read_only", "seconds", "row")
        return {**{name: getattr(self, name) for name in fields}, "checks": [asdict(each) for each in self.checks]}

    def __repr__(self) -> str:
        return (
            f"DoctorReport({self.url!r}, {len(self.checks)} checks, {len(self.failed)} failed, "
            f"{len(self.warnings)} warnings)"
        )

    def __str__(self) -> str:
        return "\n".join([*map(format_result, self.checks), conclude(self)])


def format_result(result: CheckResult) -> str:
    """One check: a line with what was found, and if there is one, a second with the remedy."""
    width = max(map(len, WORDS.values())) + 2
    line = f"{WORDS[result.status]:<{width}}{result.name:<{_NAME_WIDTH}}{result.found}"
    return f"{line}\n{'':<{width + _NAME_WIDTH}}Remedy: {result.remedy}" if result.remedy else line


def conclude(report: DoctorReport) -> str:
    """What follows the checks: the summary, and what failed once more."""
    counts = Counter(each.status for each in report.checks)
    told = ", ".join(f"{counts[status]} {word}" for status, word in WORDS.items() if counts[status])
    verdict = "saves and loads will work" if report.ok else "saves or loads will not work"
    if report.ok and report.read_only:
        verdict = "nothing failed; whether saves work was not tried (read-only)"
    summary = f"{report.url}: {verdict}: {told}, in {report.seconds:.1f} s"
    row = [] if report.read_only else ["this store's row in the table of docs/stores.md", report.row]
    return "\n".join([summary, *row, *map(format_result, report.failed)])
