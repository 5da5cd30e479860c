"""All checks in their order, and how they depend on each other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import botocore.exceptions as boto

from dcp_s3 import errors
from dcp_s3.checkup import access, checksums, conditions, configuration, host, identity, network
from dcp_s3.checkup.examination import Examination
from dcp_s3.checkup.permissions import bucket_arn, prune_versions_policy, training_policy
from dcp_s3.checkup.result import CheckResult, DoctorReport, from_error, passed, skipped, warned
from dcp_s3.settings import SettingsLike
from dcp_s3.url import URLLike, parse_url


@dataclass(frozen=True)
class Check:
    """One check."""

    name: str
    make: Callable[[str, Examination], CheckResult]
    """Makes the result from its name and the examination."""
    needs: tuple[str, ...] = ()
    """Names of checks that must not have failed."""
    writes: bool = False
    """Whether it writes to the bucket."""
    online: bool = True
    """Whether it needs the endpoint."""


_S3 = ("settings", "credentials", "endpoint", "bucket")
_PROBE = (*_S3, "PutObject")
_UPLOAD = (*_S3, "CreateMultipartUpload", "UploadPart")

CHECKS = (
    Check("settings", host.check_settings, online=False),
    Check("versions", host.check_versions, online=False),
    Check("endpoint", network.check_endpoint, ("settings",)),
    Check("credentials", identity.check_credentials, ("settings",), online=False),
    Check("latency", network.check_latency, ("settings", "credentials", "endpoint")),
    Check("region", network.check_region, ("latency",)),
    Check("clock", network.check_clock, ("latency",)),
    Check("identity", identity.check_identity, ("latency",)),
    Check("bucket", network.check_bucket, ("settings", "credentials", "endpoint", "region")),
    Check("bucket owner", network.check_owner, _S3),
    Check("missing object", access.check_missing_object, _S3),
    Check("ListObjectsV2", access.check_list, _S3),
    Check("PutObject", access.check_put, _S3, writes=True),
    Check("GetObject", access.check_get, _PROBE, writes=True),
    Check("HeadObject", access.check_head, _PROBE, writes=True),
    Check("DeleteObject", access.check_delete, _PROBE, writes=True),
    Check("DeleteObjects", access.check_delete_batch, _PROBE, writes=True),
    Check("CreateMultipartUpload", access.check_create_upload, _PROBE, writes=True),
    Check("UploadPart", access.check_upload_part, (*_S3, "CreateMultipartUpload"), writes=True),
    Check("ListMultipartUploads", access.check_list_uploads, _UPLOAD, writes=True),
    Check("ListParts", access.check_list_parts, _UPLOAD, writes=True),
    Check("CompleteMultipartUpload", access.check_complete, _UPLOAD, writes=True),
    Check("AbortMultipartUpload", access.check_abort, _UPLOAD, writes=True),
    Check("If-None-Match", conditions.check_if_none_match, _PROBE, writes=True),
    Check("If-Match", conditions.check_if_match, (*_PROBE, "HeadObject"), writes=True),
    Check("conditional delete", conditions.check_conditional_delete, _PROBE, writes=True),
    Check("conditional read", conditions.check_conditional_read, (*_PROBE, "GetObject"), writes=True),
    Check(".metadata", access.check_commit, _PROBE, writes=True),
    Check(".dcp_s3/", access.check_control, _PROBE, writes=True),
    Check("CopyObject", access.check_copy, (*_PROBE, "GetObject"), writes=True),
    Check("checksums of objects", checksums.check_object_checksum, (*_PROBE, "HeadObject"), writes=True),
    Check("checksums of parts", checksums.check_part_checksum, (*_UPLOAD, "HeadObject"), writes=True),
    Check("lifecycle", configuration.check_lifecycle, _S3),
    Check("incomplete uploads", configuration.check_incomplete_uploads, _S3),
    Check("versioning", configuration.check_versioning, _S3),
    Check("ListObjectVersions", access.check_list_versions, (*_S3, "versioning")),
    Check("object lock", configuration.check_object_lock, _S3),
    Check("encryption", configuration.check_encryption, _S3),
    Check("spill disk", host.check_spill, ("settings",), online=False),
    Check("memory", host.check_memory, ("settings",), online=False),
    Check("open files", host.check_open_files, ("settings",), online=False),
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
    """`doctor`, with a function that is called with each result as soon as it is there."""
    exam = Examination(parse_url(url), read_only, settings)
    parse_url(str(exam.probes))
    began = time.monotonic()
    results: dict[str, CheckResult] = {}

    def add(result: CheckResult) -> None:
        results[result.name] = result
        on_result(result)

    with exam.removing():
        for check in CHECKS:
            if not (check.writes and read_only):
                add(_run(check, exam, results))
        if not read_only and "PutObject" in results and (exam.keys or exam.uploads):
            add(_timed(lambda: _clean_up("clean-up", exam)))
    region = str(exam.client.meta.region_name or "") if results["endpoint"].passed else ""
    arn, prefix = bucket_arn(exam.url.bucket, region), exam.url.prefix
    policies = {
        "training": training_policy(arn, prefix, kms_key=exam.kms_key),
        "prune_versions": prune_versions_policy(arn, prefix),
    }
    seconds = time.monotonic() - began
    return DoctorReport(str(exam.url), read_only, tuple(results.values()), policies, seconds, denied=exam.denied)


def _run(check: Check, exam: Examination, results: dict[str, CheckResult]) -> CheckResult:
    lacking = next((name for name in check.needs if not results[name].passed), None)
    if lacking is not None:
        return skipped(check.name, f"not checked: see {lacking}")
    if check.online and exam.dead:
        return skipped(check.name, f"not checked: {exam.dead}")
    return _timed(lambda: _make(check, exam))


def _make(check: Check, exam: Examination) -> CheckResult:
    try:
        return check.make(check.name, exam)
    except (errors.DcpS3Error, boto.BotoCoreError, boto.ClientError, OSError, ValueError) as error:
        return from_error(check.name, error)


def _timed(make: Callable[[], CheckResult]) -> CheckResult:
    began = time.monotonic()
    return replace(make(), seconds=time.monotonic() - began)


def _clean_up(name: str, exam: Examination) -> CheckResult:
    probes = exam.probes
    left = exam.remove()
    if left:
        return warned(name, f"not removed: {'; '.join(left)}", f"have somebody delete what is below {probes}")
    return passed(name, f"nothing is left below {probes}")
