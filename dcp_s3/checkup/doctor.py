"""`doctor`: the permissions that dcp_s3 needs, the checks in their order, and the report."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import botocore.exceptions as boto

from dcp_s3 import errors
from dcp_s3.checkup import checks
from dcp_s3.checkup.probes import CheckResult, Examination, Status, from_error, ok, skip, warn
from dcp_s3.s3.diagnosis import permission_of
from dcp_s3.settings import SettingsLike
from dcp_s3.url import URLLike, parse_url

logger = logging.getLogger(__name__)

WORDS: dict[Status, str] = {"ok": "ok", "warning": "warning", "failed": "FAIL", "skipped": "skipped"}
_NAME_WIDTH = 24
_LATE_SECONDS = 1.0  # after Ctrl-C, until a request that was under way has been carried out

# --- permissions; docs/security.md shows the same --------------------------------------------------------


class Permission(NamedTuple):
    operations: tuple[str, ...]
    """S3's operations that the IAM action allows."""
    used_by: str
    without: str
    """What a training job without it has to expect."""
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
        required=True,
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
        "saves work; prune does not work, so uploads that broke stay open, and cost",
    ),
    Permission(
        ("DeleteObjects", "DeleteObject"), "overwriting, a save that fails, drain, prune",
        "saves and loads work, prune does not: nothing is ever deleted, nor what failed or overwritten saves leave",
    ),
)  # fmt: skip


# --- the checks ----------------------------------------------------------------------------------------


class Check(NamedTuple):
    name: str
    make: Callable[[Examination], CheckResult | None]
    """None: the operation is allowed."""
    needs: str = ""
    """The check that must not have failed. A check that was skipped passes its own reason on."""
    operation: str = ""
    """The operation that it tries to be allowed. What it returns is another fault than a refusal."""
    optional: bool = False
    """Whether saves and loads work without what it tries."""


CHECKS = (
    Check("settings", checks.check_settings),
    Check("versions", checks.check_versions),
    Check("credentials", checks.check_credentials, "settings"),
    Check("endpoint", checks.check_endpoint, "credentials"),
    Check("clock", checks.check_clock, "endpoint"),
    Check("ListObjectsV2", checks.do_list, "endpoint", "ListObjectsV2"),
    Check("PutObject", checks.do_put, "ListObjectsV2", "PutObject"),
    Check("GetObject", checks.do_get, "PutObject", "GetObject"),
    Check("DeleteObject", checks.do_delete, "PutObject", "DeleteObject"),
    Check("DeleteObjects", checks.do_delete_batch, "PutObject", "DeleteObjects"),
    Check("multipart upload", checks.do_multipart, "PutObject", "UploadPart"),
    Check("ListMultipartUploads", checks.do_list_uploads, "multipart upload", "ListMultipartUploads"),
    Check("AbortMultipartUpload", checks.do_abort, "multipart upload", "AbortMultipartUpload"),
    Check("If-None-Match", checks.check_if_none_match, "PutObject", optional=True),
    Check("If-Match", checks.check_if_match, "PutObject", optional=True),
    Check("conditional delete", checks.check_conditional_delete, "PutObject", optional=True),
    Check("checksums", checks.check_checksums, "PutObject", optional=True),
    Check("whole-object CRC-64", checks.check_whole_object, "multipart upload", optional=True),
    Check("copies", checks.check_copies, "multipart upload", optional=True),
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
    url: URLLike, settings: SettingsLike = None, *, on_result: Callable[[CheckResult], object] = lambda _: None
) -> DoctorReport:
    """Examine whether saves and loads below a URL will work, and what the store is able to do.

    Nothing is raised for what is found: the report has it, and ``print`` shows all of it. Small probe objects are
    written below the URL, under a name of their own, and removed again, also after a failure or Ctrl-C. ``on_result``
    is called after each check.

    Raises:
        InvalidURLError: the URL is none of S3, or too long for names below it.

    >>> doctor("s3://bucket/run").ok
    True
    """
    exam = Examination(parse_url(url), settings)
    parse_url(str(exam.probes))  # its names are not too long
    results: dict[str, CheckResult] = {}
    try:
        for check in CHECKS:
            results[check.name] = replace(_make(check, exam, results), name=check.name)
            on_result(results[check.name])
        if exam.keys or exam.uploads:
            found = ok(f"nothing is left below {exam.probes}")
            if left := exam.remove():
                found = warn(f"not removed: {'; '.join(left)}", f"delete what is below {exam.probes}")
            results["clean-up"] = replace(found, name="clean-up")
            on_result(results["clean-up"])
    except BaseException:  # a second Ctrl-C gives up
        if exam.keys or exam.uploads:
            time.sleep(_LATE_SECONDS)
            for each in exam.remove():
                logger.warning("not removed: %s. Remedy: delete what is below %s", each, exam.probes)
        raise
    return DoctorReport(str(exam.url), tuple(results.values()), exam.server or str(exam.url.bucket))


def _make(check: Check, exam: Examination, results: Mapping[str, CheckResult]) -> CheckResult:
    """What a check finds, or why it cannot be made."""
    needed = results.get(check.needs)
    if needed is not None and needed.status == "skipped":
        return needed
    if needed is not None and needed.status == "failed":
        return skip(f"not checked: see {check.needs}")
    permission = next((each for each in PERMISSIONS if check.operation in each.operations), None)
    try:
        found = check.make(exam) or ok("")
    except (errors.DcpS3Error, boto.BotoCoreError, boto.ClientError, OSError, ValueError) as error:
        status: Status = "warning" if check.optional or (permission and not permission.required) else "failed"
        return from_error(error, status=status, consequence=permission.without if permission else "")
    if found.found or permission is None:
        return found
    return replace(found, found=f"allowed; needed for {permission.used_by.replace('`', '')} ({permission.action})")


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
    checks: tuple[CheckResult, ...]
    """The checks, in the order in which they were made."""
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

    def __getitem__(self, name: str) -> CheckResult:
        """The check of that name; KeyError if it was not made."""
        return {each.name: each for each in self.checks}[name]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = [asdict(each) for each in self.checks]
        return {"url": self.url, "ok": self.ok, "row": self.row, "checks": found}

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
    summary = f"{report.url}: {verdict}: {told}"
    row = ["this store's row in the table of docs/stores.md", report.row]
    return "\n".join([summary, *row, *map(format_result, report.failed)])
