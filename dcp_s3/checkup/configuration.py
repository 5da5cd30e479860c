"""Checks of the bucket's configuration: versions, locks, lifecycle rules, encryption. They only read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from dcp_s3 import errors
from dcp_s3.checkup.examination import Examination
from dcp_s3.checkup.permissions import CONFIGURATION
from dcp_s3.checkup.result import CheckResult, passed, skipped, warned
from dcp_s3.s3.diagnosis import answered_code, answered_status

Rule = Mapping[str, Any]

_ABORT_DAYS = 7
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/storage-class-intro.html: to be restored before they can be read
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")


def _read(exam: Examination, operation: str) -> dict[str, Any] | str:
    """The bucket's configuration, empty if there is none; or why it cannot be known."""
    try:
        return exam.ask(operation)
    except errors.AccessDeniedError:
        return f"not allowed to look: {CONFIGURATION[operation]} would be needed"
    except errors.StorageError as error:
        code, status = answered_code(error), answered_status(error)
        if status == 404 and code != "NoSuchBucket":
            return {}
        if status in (400, 405, 501):
            return f"the store does not tell ({code or status})"
        if code == "NotAnsweredByS3":
            return "the store does not tell: it answers something else"
        raise


def check_lifecycle(name: str, exam: Examination) -> CheckResult:
    """Whether a lifecycle rule would expire or archive checkpoints."""
    answer = _read(exam, "GetBucketLifecycleConfiguration")
    if isinstance(answer, str):
        return skipped(name, answer)
    exam.lifecycle = list(answer.get("Rules", ()))
    harm = [text for rule in exam.lifecycle if (text := find_harm(rule, exam.url.key("")))]
    if harm:
        return warned(
            name, f"below {exam.url}: {'; '.join(harm)}: checkpoints would lose single objects, or not be readable",
            "narrow the rule to another prefix, or remove it; dcp-s3 prune deletes whole checkpoints",
        )  # fmt: skip
    return passed(name, "no rule expires or archives checkpoints")


def check_incomplete_uploads(name: str, exam: Examination) -> CheckResult:
    """Whether a lifecycle rule aborts multipart uploads that killed processes leave open."""
    if exam.lifecycle is None:
        return skipped(name, "see lifecycle")
    days = [
        rule["AbortIncompleteMultipartUpload"].get("DaysAfterInitiation")
        for rule in exam.lifecycle
        if _is_on(rule) and "AbortIncompleteMultipartUpload" in rule and _covers(rule, exam.url.key(""))
    ]
    if days:
        return passed(name, f"a rule aborts multipart uploads after {min(days)} days")
    return warned(
        name, "no rule aborts the multipart uploads that killed processes leave: they cost, and no listing shows them",
        f"add the lifecycle rule {json.dumps(abort_rule(exam.url.prefix))}",
    )  # fmt: skip


def check_versioning(name: str, exam: Examination) -> CheckResult:
    """Whether deleted checkpoints stay as old versions."""
    answer = _read(exam, "GetBucketVersioning")
    if isinstance(answer, str):
        return skipped(name, answer)
    status = answer.get("Status")
    if status is None:
        return passed(name, "off: what is deleted is gone")
    exam.is_versioned = True
    kept = f"{status.lower()}: deleted and overwritten checkpoints stay as old versions, and cost"
    remedy = f"dcp-s3 prune --all-versions, or the lifecycle rule {json.dumps(noncurrent_rule(exam.url.prefix))}"
    if exam.lifecycle is None:
        return warned(name, f"{kept}, unless a lifecycle rule removes them, which cannot be seen", remedy)
    if any(_is_on(rule) and "NoncurrentVersionExpiration" in rule and _covers(rule, exam.url.key(""))
           for rule in exam.lifecycle):  # fmt: skip
        return passed(name, f"{status.lower()}; a rule removes old versions")
    return warned(name, kept, remedy)


def check_object_lock(name: str, exam: Examination) -> CheckResult:
    """Whether a default retention keeps objects from being deleted."""
    answer = _read(exam, "GetObjectLockConfiguration")
    if isinstance(answer, str):
        return skipped(name, answer)
    retention = answer.get("ObjectLockConfiguration", {}).get("Rule", {}).get("DefaultRetention")
    if not retention:
        return passed(name, "no default retention")
    span = f"{retention['Days']} days" if "Days" in retention else f"{retention.get('Years')} years"
    return warned(
        name, f"every object is locked for {span} ({retention.get('Mode')}): prune hides checkpoints, but they cost "
        "until then; so do the few bytes that this examination wrote",
        "a bucket without default retention, or one whose retention is shorter than your checkpoints are kept",
    )  # fmt: skip


def check_encryption(name: str, exam: Examination) -> CheckResult:
    """How new objects are encrypted."""
    answer = _read(exam, "GetBucketEncryption")
    if isinstance(answer, str):
        return skipped(name, answer)
    rules = answer.get("ServerSideEncryptionConfiguration", {}).get("Rules", ())
    default: Rule = next((rule.get("ApplyServerSideEncryptionByDefault", {}) for rule in rules), {})
    algorithm = exam.settings.sse or default.get("SSEAlgorithm")
    key = exam.settings.sse_kms_key_id or default.get("KMSMasterKeyID") or ""
    source = "DCP_S3_SSE" if exam.settings.sse else "the bucket's default"
    if algorithm is None:
        return passed(name, "none by default, and DCP_S3_SSE is unset")
    if not algorithm.startswith("aws:kms"):
        return passed(name, f"{algorithm} ({source})")
    exam.kms_key = key if key.startswith("arn:") else "arn:aws:kms:REGION:ACCOUNT:key/KEY"
    if not any(rule.get("BucketKeyEnabled") for rule in rules):
        return warned(
            name, f"{algorithm} ({source}) without a bucket key: each object costs a request to KMS, which throttles",
            'turn the bucket key on ("BucketKeyEnabled": true)',
        )  # fmt: skip
    return passed(name, f"{algorithm} ({source}), with a bucket key; kms:GenerateDataKey and kms:Decrypt are needed")


# --- rules, pure ----------------------------------------------------------------------------------------


def abort_rule(prefix: str) -> dict[str, Any]:
    """The lifecycle rule that aborts multipart uploads which were left open."""
    return {
        "ID": "abort-uploads-of-killed-processes",
        "Status": "Enabled",
        "Filter": {"Prefix": f"{prefix}/" if prefix else ""},
        "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": _ABORT_DAYS},
    }


def noncurrent_rule(prefix: str) -> dict[str, Any]:
    """The lifecycle rule that removes old versions, and delete markers with nothing behind them."""
    return {
        "ID": "remove-old-versions",
        "Status": "Enabled",
        "Filter": {"Prefix": f"{prefix}/" if prefix else ""},
        "NoncurrentVersionExpiration": {"NoncurrentDays": 7},
        "Expiration": {"ExpiredObjectDeleteMarker": True},
    }


def find_harm(rule: Rule, prefix: str) -> str:
    """What a lifecycle rule would do to current objects below a prefix; empty if nothing that harms checkpoints.

    Args:
        rule: as from GetBucketLifecycleConfiguration.
        prefix: key prefix of the checkpoints, with a slash at its end, or empty.
    """
    if not _is_on(rule) or not _touches(rule, prefix):
        return ""
    expiration = rule.get("Expiration", {})
    harm = []
    if "Days" in expiration:
        harm.append(f"deletes objects after {expiration['Days']} days")
    elif "Date" in expiration:
        harm.append(f"deletes objects from {expiration['Date']} on")
    harm += [
        f"moves objects to {each['StorageClass']}, to be restored before they can be read"
        for each in rule.get("Transitions", ())
        if each.get("StorageClass") in _ARCHIVES
    ]
    return f"rule {rule.get('ID', 'without an ID')!r} {' and '.join(harm)}" if harm else ""


def _is_on(rule: Rule) -> bool:
    return str(rule.get("Status")) == "Enabled"


def _touches(rule: Rule, prefix: str) -> bool:
    """Whether a rule applies to any object below a prefix. Objects of dcp_s3 have no tags."""
    filtered = _filter_of(rule)
    if filtered is None:
        return False
    return prefix.startswith(filtered) or filtered.startswith(prefix)


def _covers(rule: Rule, prefix: str) -> bool:
    """Whether a rule applies to all objects below a prefix."""
    filtered = _filter_of(rule)
    return filtered is not None and prefix.startswith(filtered) and not _sizes(rule)


def _filter_of(rule: Rule) -> str | None:
    """The key prefix of a rule; None if it applies to tagged objects only."""
    found = rule.get("Filter") or {}
    both = found.get("And") or {}
    if found.get("Tag") or both.get("Tags"):
        return None
    return str(found.get("Prefix") or both.get("Prefix") or rule.get("Prefix") or "")


def _sizes(rule: Rule) -> Iterable[str]:
    found = rule.get("Filter") or {}
    return [name for name in {**found, **(found.get("And") or {})} if name.startswith("ObjectSize")]
