"""`doctor`: the permissions that dcp_s3 needs, the checks in their order, and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import botocore.exceptions as boto

from dcp_s3 import errors
from dcp_s3.checkup import bucket, host
from dcp_s3.checkup.probes import DATA, PROBE, CheckResult, Examination, Status, from_error, ok, skip
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
        ("ListMultipartUploads",), "a save after a lost answer, drain, prune",
        "saves work; after a lost answer a multipart upload may stay open; prune does not work", on_bucket=True,
    ),
    Permission(("ListParts",), "drain", "saves work; a drain sends objects whose upload was begun anew"),
    Permission(
        ("DeleteObjects", "DeleteObject"), "overwriting, a save that fails, drain, prune",
        "saves and loads work, prune does not: nothing is ever deleted, nor what failed or overwritten saves leave",
    ),
    Permission(("ListObjectVersions",), "bench", "bench leaves old versions of its objects", on_bucket=True),
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
    deletes: bool = False
    """Whether what it writes must be deleted again."""

    @property
    def online(self) -> bool:
        """Whether it needs the endpoint."""
        return self.needs not in ("", "settings")


CHECKS = (
    Check("settings", host.check_settings),
    Check("versions", host.check_versions),
    Check("credentials", host.check_credentials, "settings"),
    Check("endpoint", host.check_endpoint, "credentials"),
    Check("clock", host.check_clock, "endpoint"),
    Check("identity", host.check_identity, "endpoint"),
    Check("bucket", bucket.check_bucket, "endpoint"),
    Check("ListObjectsV2", bucket.do_list, "bucket", "ListObjectsV2"),
    Check("PutObject", lambda exam: exam.put(PROBE, DATA), "bucket", "PutObject", writes=True),
    Check("GetObject", bucket.do_get, "PutObject", "GetObject", writes=True),
    Check("DeleteObject", lambda exam: exam.do("DeleteObject", PROBE), "PutObject", "DeleteObject", writes=True),
    Check("DeleteObjects", bucket.do_delete_batch, "PutObject", "DeleteObjects", writes=True, deletes=True),
    Check("multipart upload", bucket.do_multipart, "PutObject", "UploadPart", writes=True),
    Check("ListMultipartUploads", bucket.do_list_uploads, "multipart upload", "ListMultipartUploads", writes=True),
    Check("ListParts", bucket.do_list_parts, "multipart upload", "ListParts", writes=True),
    Check("AbortMultipartUpload", bucket.do_abort, "multipart upload", "AbortMultipartUpload", writes=True),
    Check("If-None-Match", bucket.check_if_none_match, "PutObject", writes=True),
    Check("If-Match", bucket.check_if_match, "PutObject", writes=True),
    Check("conditional delete", bucket.check_conditional_delete, "PutObject", writes=True, deletes=True),
    Check("commit", bucket.check_commit, "PutObject", writes=True, deletes=True),
    Check("checksums", bucket.check_checksums, "PutObject", writes=True),
    Check("whole-object CRC-64", bucket.check_whole_object, "multipart upload", writes=True),
    Check("copies", bucket.check_copies, "multipart upload", writes=True, deletes=True),
    Check("lifecycle", bucket.check_lifecycle, "bucket"),
    Check("ListObjectVersions", bucket.do_list_versions, "bucket", "ListObjectVersions"),
    Check("spill disk", host.check_spill, "settings"),
)


COLUMNS = (
    ("If-None-Match, If-Match, delete", ("If-None-Match", "If-Match", "conditional delete")),
    ("checksum on upload", ("checksums",)),
    ("whole-object CRC-64", ("whole-object CRC-64",)),
    ("lists uploads", ("ListMultipartUploads",)),
    ("versions", ("ListObjectVersions",)),
    ("copies", ("copies",)),
    ("clock", ("clock",)),
)
"""Columns of the table of stores in docs/stores.md, and the checks that fill them."""


def doctor(url: URLLike, settings: SettingsLike = None, read_only: bool = False) -> DoctorReport:
    """Examine whether saves and loads below a URL will work, and what the store is able to do.

    Nothing is raised for what is found: the report has it, and ``print`` shows all of it. Small probe objects are
    written below the URL, under a name of their own, and removed again, also after a failure or Ctrl-C. ``read_only``
    leaves out everything that writes, to the bucket and to the spill directory.

    Raises:
        InvalidURLError: the URL is none of S3, or too long for names below it.

    >>> doctor("s3://bucket/run").ok
    True
    """
    return examine(url, settings, read_only=read_only)


def examine(
    url: URLLike,
    settings: SettingsLike,
    *,
    read_only: bool,
    on_result: Callable[[CheckResult], object] = lambda _: None,
) -> DoctorReport:
    exam = Examination(parse_url(url), read_only, settings)
    parse_url(str(exam.probes))
    began = time.monotonic()
    results: dict[str, CheckResult] = {}

    def make(check: Check) -> None:
        started = time.monotonic()
        found = _find_reason_to_skip(check, exam, results) or _make(check, exam)
        results[check.name] = replace(found, name=check.name, seconds=time.monotonic() - started)
        if on_result is not None:
            on_result(results[check.name])

    with exam.removing():
        for check in CHECKS:
            if not (check.writes and read_only):
                make(check)
        if exam.keys or exam.uploads:
            make(Check("clean-up", bucket.clean_up))
    store = exam.server or str(exam.url.bucket)
    return DoctorReport(str(exam.url), read_only, tuple(results.values()), time.monotonic() - began, store)


def _make(check: Check, exam: Examination) -> CheckResult:
    needed = permission_for(check.operation) if check.operation else None
    try:
        found = check.make(exam)
    except (errors.DcpS3Error, boto.BotoCoreError, boto.ClientError, OSError, ValueError) as error:
        if needed is None or not isinstance(error, errors.StorageError):
            return from_error(error)
        return from_error(error, status="failed" if needed.required else "warning", consequence=needed.without)
    found = found or ok("")
    if found.found or needed is None:
        return found
    return replace(found, found=f"allowed; needed for {needed.used_by.replace('`', '')} ({needed.action})")


def _find_reason_to_skip(check: Check, exam: Examination, results: Mapping[str, CheckResult]) -> CheckResult | None:
    needed = results.get(check.needs)
    if needed is not None and not needed.passed:
        return needed if needed.status == "skipped" else skip(f"not checked: see {check.needs}")
    if exam.dead and check.online:
        return skip(f"not checked: {exam.dead}")
    if check.deletes and results["DeleteObject"].status != "ok":
        return skip("the probe object could not be deleted again: see DeleteObject")
    return None


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
        return self.having("failed")

    @property
    def warnings(self) -> tuple[CheckResult, ...]:
        """The checks that found something to be known."""
        return self.having("warning")

    def having(self, status: Status) -> tuple[CheckResult, ...]:
        """The checks of one status."""
        return tuple(each for each in self.checks if each.status == status)

    def __getitem__(self, name: str) -> CheckResult:
        """The check of that name, or KeyError if it was not made."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(f"no check {name!r} was made; there are: {', '.join(each.name for each in self.checks)}")

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
    warnings = "warnings" if len(report.warnings) > 1 else "warning"
    counts: dict[Status, str] = {"ok": "ok", "warning": warnings, "failed": "failed", "skipped": "skipped"}
    told = ", ".join(f"{len(found)} {word}" for status, word in counts.items() if (found := report.having(status)))
    verdict = "saves and loads will work" if report.ok else "saves or loads will not work"
    if report.ok and report.read_only:
        verdict = "nothing failed; whether saves work was not tried (read-only)"
    summary = f"{report.url}: {verdict}: {told}, in {report.seconds:.1f} s"
    row = [] if report.read_only else ["this store's row in the table of docs/stores.md", report.row]
    return "\n".join([summary, *row, *map(format_result, report.failed)])
