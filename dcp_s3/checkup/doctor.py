"""`doctor`: the checks in their order, how they depend on each other, and the report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import botocore.exceptions as boto

from dcp_s3 import errors
from dcp_s3.checkup import bucket, host
from dcp_s3.checkup.bucket import permitted
from dcp_s3.checkup.probes import (
    CheckResult,
    Examination,
    Status,
    bucket_arn,
    from_error,
    ok,
    prune_versions_policy,
    skip,
    training_policy,
    warn,
)
from dcp_s3.settings import SettingsLike
from dcp_s3.url import URLLike, parse_url

WORDS: dict[Status, str] = {"ok": "ok", "warning": "warning", "failed": "FAIL", "skipped": "skipped"}
"""For a pipe."""
TICKS: dict[Status, str] = {"ok": "✓", "warning": "!", "failed": "✗", "skipped": "-"}
"""For a terminal."""
_NAME_WIDTH = 24


@dataclass(frozen=True)
class Check:
    name: str
    make: Callable[[Examination], CheckResult]
    needs: tuple[str, ...] = ()
    """Names of checks that must not have failed."""
    writes: bool = False
    """Whether it writes to the bucket."""
    deletes: bool = False
    """Whether what it writes must be deleted again."""
    online: bool = True
    """Whether it needs the endpoint."""


_S3 = ("settings", "credentials", "endpoint", "bucket")
_PROBE = (*_S3, "PutObject")
_UPLOAD = (*_PROBE, "multipart upload")

CHECKS = (
    Check("settings", host.check_settings, online=False),
    Check("versions", host.check_versions, online=False),
    Check("credentials", host.check_credentials, ("settings",), online=False),
    Check("endpoint", host.check_endpoint, ("settings", "credentials")),
    Check("clock", host.check_clock, _S3[:3]),
    Check("identity", host.check_identity, _S3[:3]),
    Check("bucket", bucket.check_bucket, _S3[:3]),
    Check("ListObjectsV2", permitted("ListObjectsV2", bucket.do_list), _S3),
    Check("PutObject", permitted("PutObject", bucket.do_put), _S3, writes=True),
    Check("GetObject", permitted("GetObject", bucket.do_get), _PROBE, writes=True),
    Check("DeleteObject", permitted("DeleteObject", bucket.do_delete), _PROBE, writes=True),
    Check("DeleteObjects", permitted("DeleteObjects", bucket.do_delete_batch), _PROBE, writes=True, deletes=True),
    Check("multipart upload", permitted("UploadPart", bucket.do_multipart), _PROBE, writes=True),
    Check("ListMultipartUploads", permitted("ListMultipartUploads", bucket.do_list_uploads), _UPLOAD, writes=True),
    Check("ListParts", permitted("ListParts", bucket.do_list_parts), _UPLOAD, writes=True),
    Check("AbortMultipartUpload", permitted("AbortMultipartUpload", bucket.do_abort), _UPLOAD, writes=True),
    Check("If-None-Match", bucket.check_if_none_match, _PROBE, writes=True),
    Check("If-Match", bucket.check_if_match, _PROBE, writes=True),
    Check("conditional delete", bucket.check_conditional_delete, _PROBE, writes=True, deletes=True),
    Check("commit", bucket.check_commit, _PROBE, writes=True, deletes=True),
    Check("checksums", bucket.check_checksums, _PROBE, writes=True),
    Check("lifecycle", bucket.check_lifecycle, _S3),
    Check("ListObjectVersions", permitted("ListObjectVersions", bucket.do_list_versions), _S3),
    Check("spill disk", host.check_spill, ("settings",), online=False),
)


def doctor(url: URLLike, settings: SettingsLike = None, read_only: bool = False) -> DoctorReport:
    """Examine whether saves and loads below a URL will work, and what the store is able to do.

    Nothing is raised for what is found: the report has it. Small probe objects are written below the URL, under a name
    of their own, and removed again, also after a failure or Ctrl-C.

    Args:
        url: ``s3://bucket/prefix`` below which checkpoints are to lie.
        settings: a `Settings`, or a mapping of those that differ from the environment.
        read_only: leave out everything that writes, to the bucket and to the spill directory.

    Raises:
        InvalidURLError: the URL is none of S3, or too long for names below it.

    ``print`` shows the whole report.

    >>> doctor("s3://bucket/run").ok
    True
    """
    return examine(url, settings, read_only=read_only, on_result=lambda _: None)


def examine(
    url: URLLike, settings: SettingsLike, *, read_only: bool, on_result: Callable[[CheckResult], None]
) -> DoctorReport:
    exam = Examination(parse_url(url), read_only, settings)
    parse_url(str(exam.probes))
    began = time.monotonic()
    results: dict[str, CheckResult] = {}

    def make(check: Check) -> None:
        started = time.monotonic()
        try:
            found = _find_reason_to_skip(check, exam, results) or check.make(exam)
        except (errors.DcpS3Error, boto.BotoCoreError, boto.ClientError, OSError, ValueError) as error:
            found = from_error(error)
        results[check.name] = replace(found, name=check.name, seconds=time.monotonic() - started)
        on_result(results[check.name])

    with exam.removing():
        for check in CHECKS:
            if not (check.writes and read_only):
                make(check)
        if exam.keys or exam.uploads:
            make(Check("clean-up", _clean_up, online=False))
    region = str(exam.client.meta.region_name or "") if results["settings"].passed else ""
    arn, key = bucket_arn(exam.url.bucket, region), exam.settings.sse_kms_key_id or ""
    policies = {
        "training": training_policy(arn, exam.url.prefix, kms_key=key if key.startswith("arn:") else ""),
        "prune_versions": prune_versions_policy(arn, exam.url.prefix),
    }
    seconds = time.monotonic() - began
    return DoctorReport(str(exam.url), read_only, tuple(results.values()), policies, seconds, denied=exam.denied)


def _find_reason_to_skip(check: Check, exam: Examination, results: Mapping[str, CheckResult]) -> CheckResult | None:
    lacking = next((name for name in check.needs if not results[name].passed), None)
    if lacking is not None:
        return skip(f"not checked: see {lacking}")
    if exam.dead and check.online:
        return skip(f"not checked: {exam.dead}")
    if check.deletes and not exam.may_delete:
        return skip("the probe object could not be deleted again: see DeleteObject")
    return None


def _clean_up(exam: Examination) -> CheckResult:
    left = exam.remove()
    if left:
        return warn(f"not removed: {'; '.join(left)}", f"have somebody delete what is below {exam.probes}")
    return ok(f"nothing is left below {exam.probes}")


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
    policies: Mapping[str, Mapping[str, Any]]
    """IAM policies for this bucket and prefix: ``training`` (save, load, prune), and ``prune_versions``: what pruning
    all versions needs besides."""
    seconds: float = 0.0
    """Seconds that all checks took."""
    denied: bool = False
    """Whether a permission was refused, so that a policy helps."""

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
        return {
            "url": self.url,
            "ok": self.ok,
            "read_only": self.read_only,
            "seconds": self.seconds,
            "checks": [asdict(each) for each in self.checks],
            "policies": dict(self.policies),
        }

    def __repr__(self) -> str:
        return (
            f"DoctorReport({self.url!r}, {len(self.checks)} checks, {len(self.failed)} failed, "
            f"{len(self.warnings)} warnings)"
        )

    def __str__(self) -> str:
        return "\n".join([*map(format_result, self.checks), conclude(self)])


def format_result(result: CheckResult, marks: dict[Status, str] = WORDS) -> str:
    """One check: a line with what was found, and if there is one, a second with the remedy."""
    width = max(map(len, marks.values())) + 2
    line = f"{marks[result.status]:<{width}}{result.name:<{_NAME_WIDTH}}{result.found}"
    return f"{line}\n{'':<{width + _NAME_WIDTH}}Remedy: {result.remedy}" if result.remedy else line


def conclude(report: DoctorReport, *, policy: bool = False) -> str:
    """What follows the checks: policies if asked for or if they help, the summary, and what failed once more."""
    lines = []
    if policy or report.denied:
        lines = [
            "IAM policy to save, load and prune here (stores other than AWS may have their own):",
            json.dumps(report.policies["training"], indent=2),
            "To prune all versions of a versioned bucket, also:",
            json.dumps(report.policies["prune_versions"], indent=2),
        ]
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
    lines.append(f"{report.url}: {verdict}: {told}, in {report.seconds:.1f} s")
    return "\n".join([*lines, *map(format_result, report.failed)])
