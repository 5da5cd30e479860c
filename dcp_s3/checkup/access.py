"""Checks of each permission that dcp_s3 needs, by doing it to a probe object."""

from __future__ import annotations

import contextlib
from typing import Any

from dcp_s3 import errors
from dcp_s3.checkup.examination import PROBE, Examination
from dcp_s3.checkup.permissions import permission_for
from dcp_s3.checkup.result import CheckResult, failed, from_error, passed, skipped, warned
from dcp_s3.format.layout import METADATA, deletion_object, manifest_object
from dcp_s3.s3.diagnosis import answered_code, answered_status, permission_of

_DATA = bytes(range(256))
_COPY = "__0_1-probe.distcp"


def _needed(operation: str) -> str:
    needed = permission_for(operation)
    return f"allowed; needed for {needed.used_by.replace('`', '')} ({needed.action})"


def _refused(name: str, error: errors.StorageError, operation: str, *, required: bool) -> CheckResult:
    """The result for an operation that failed, with what it means for training."""
    status = "failed" if required else "warning"
    return from_error(name, error, status=status, consequence=permission_for(operation).without)  # type: ignore[arg-type]


def check_missing_object(name: str, exam: Examination) -> CheckResult:
    """Whether an object that is not there reads as missing, rather than as forbidden."""
    try:
        exam.ask("GetObject", METADATA, Range="bytes=0-0")
    except errors.ObjectNotFoundError:
        return passed(name, "reads as missing, so that saves to a new URL can begin")
    except errors.AccessDeniedError as error:
        return _refused(name, error, "ListObjectsV2", required=True)
    except errors.StorageError as error:
        return from_error(name, error)
    return failed(name, f"{exam.probes}/{METADATA} was never written, but is there", "is the endpoint an S3?")


def check_list(name: str, exam: Examination) -> CheckResult:
    """ListObjectsV2 with the URL's prefix."""
    try:
        exam.ask(name, Prefix=exam.url.key(""), MaxKeys=1)
    except errors.StorageError as error:
        return _refused(name, error, name, required=True)
    return passed(name, _needed(name))


def check_put(name: str, exam: Examination) -> CheckResult:
    """PutObject, of a name like a checkpoint's data object."""
    try:
        exam.put(PROBE, _DATA)
    except errors.StorageError as error:
        return _refused(name, error, name, required=True)
    return passed(name, _needed(name))


def check_get(name: str, exam: Examination) -> CheckResult:
    """GetObject, of a range."""
    try:
        answer = exam.ask(name, PROBE, Range="bytes=16-31")
    except errors.StorageError as error:
        return _refused(name, error, name, required=True)
    if answer["Body"] != _DATA[16:32]:
        return failed(
            name,
            f"bytes 16 to 31 were asked for; the answer has {len(answer['Body'])} others",
            "the endpoint, or a proxy before it, does not do ranges: loads need them",
        )
    return passed(name, _needed(name).replace("allowed", "allowed, in ranges", 1))


def check_head(name: str, exam: Examination) -> CheckResult:
    """HeadObject."""
    try:
        answer = exam.ask(name, PROBE)
    except errors.StorageError as error:
        return _refused(name, error, name, required=True)
    if answer["ContentLength"] != len(_DATA):
        return failed(name, f"{len(_DATA)} bytes were written, it says {answer['ContentLength']}", "is it an S3?")
    return passed(name, _needed(name))


def check_delete(name: str, exam: Examination) -> CheckResult:
    """DeleteObject. Without it, only one probe object is written."""
    try:
        exam.ask(name, PROBE)
    except errors.StorageError as error:
        exam.may_delete = False
        return _refused(name, error, name, required=False)
    return passed(name, _needed(name))


def check_delete_batch(name: str, exam: Examination) -> CheckResult:
    """DeleteObjects, of two objects."""
    if not exam.may_delete:
        return _would_stay(name)
    for each in (PROBE, _COPY):
        exam.put(each, _DATA)
    objects = [{"Key": exam.key(each)} for each in (PROBE, _COPY)]
    try:
        answer = exam.ask(name, Delete={"Objects": objects, "Quiet": True})
    except errors.StorageError as error:
        if answered_status(error) in (400, 405, 411, 501):
            return warned(
                name, f"the store has none ({answered_code(error)}): objects are deleted one by one",
                "nothing; prune takes a request for each object instead of one for a thousand",
            )  # fmt: skip
        return _refused(name, error, name, required=False)
    for entry in answer.get("Errors", ()):
        return warned(
            name, f"{entry.get('Code')} for {entry.get('Key')!r}: {permission_for(name).without}",
            f"the credentials need {permission_of(name)}",
        )  # fmt: skip
    return passed(name, _needed(name))


def check_list_versions(name: str, exam: Examination) -> CheckResult:
    """ListObjectVersions, where there are any."""
    if not exam.is_versioned:
        return skipped(name, "the bucket keeps no old versions")
    try:
        exam.ask(name, Prefix=exam.url.key(""), MaxKeys=1)
    except errors.StorageError as error:
        return _refused(name, error, name, required=False)
    return passed(name, _needed(name))


def check_create_upload(name: str, exam: Examination) -> CheckResult:
    """CreateMultipartUpload."""
    try:
        exam.upload = exam.begin_upload(PROBE)
    except errors.StorageError as error:
        return _refused(name, error, name, required=True)
    return passed(name, _needed(name))


def check_upload_part(name: str, exam: Examination) -> CheckResult:
    """UploadPart."""
    try:
        exam.ask(name, PROBE, UploadId=exam.upload, PartNumber=1, Body=_DATA)
    except errors.StorageError as error:
        return _refused(name, error, name, required=True)
    return passed(name, _needed(name))


def check_list_uploads(name: str, exam: Examination) -> CheckResult:
    """ListMultipartUploads: whether it shows the one that is open."""
    try:
        answer = exam.ask(name, Prefix=exam.key(PROBE))
    except errors.StorageError as error:
        if answered_status(error) in (404, 405, 501):
            return warned(
                name, f"the store does not list multipart uploads ({answered_code(error)}): those that were left open "
                "may cost storage", "a lifecycle rule or job of the store's own that aborts them",
            )  # fmt: skip
        return _refused(name, error, name, required=False)
    if exam.upload not in [str(each.get("UploadId")) for each in answer.get("Uploads", ())]:
        return warned(
            name, "allowed, but it does not show an upload that is open: prune will not find what killed processes "
            "leave", "a lifecycle rule or job of the store's own that aborts them",
        )  # fmt: skip
    return passed(name, _needed(name))


def check_list_parts(name: str, exam: Examination) -> CheckResult:
    """ListParts: whether it shows the part that was sent."""
    try:
        answer = exam.ask(name, PROBE, UploadId=exam.upload)
    except errors.StorageError as error:
        return _refused(name, error, name, required=False)
    if [each.get("PartNumber") for each in answer.get("Parts", ())] != [1]:
        return warned(name, "allowed, but it does not show the part that was sent", "nothing; a drain sends it again")
    return passed(name, _needed(name))


def check_complete(name: str, exam: Examination) -> CheckResult:
    """CompleteMultipartUpload."""
    exam.keys.append(exam.key(PROBE))
    try:
        parts = [{"PartNumber": 1, "ETag": _etag_of_part(exam)}]
        exam.ask(name, PROBE, UploadId=exam.upload, MultipartUpload={"Parts": parts})
        answer = exam.ask("HeadObject", PROBE)
    except errors.StorageError as error:
        return _refused(name, error, name, required=True)
    exam.uploads.remove((exam.key(PROBE), exam.upload))
    if answer["ContentLength"] != len(_DATA):
        return failed(name, f"of {len(_DATA)} bytes {answer['ContentLength']} are there", "is it an S3?")
    return passed(name, _needed(name))


def _etag_of_part(exam: Examination) -> str:
    """The part's ETag: it is sent once more, which replaces it."""
    answer: dict[str, Any] = exam.ask("UploadPart", PROBE, UploadId=exam.upload, PartNumber=1, Body=_DATA)
    return str(answer["ETag"])


def check_abort(name: str, exam: Examination) -> CheckResult:
    """AbortMultipartUpload."""
    upload = exam.begin_upload(PROBE)
    try:
        exam.ask(name, PROBE, UploadId=upload)
    except errors.StorageError as error:
        return _refused(name, error, name, required=False)
    exam.uploads.remove((exam.key(PROBE), upload))
    return passed(name, _needed(name))


def check_commit(name: str, exam: Examination) -> CheckResult:
    """PutObject of ``.metadata``, on the condition that it is not there: a policy may decide by the key, or by the
    condition. It is removed at once."""
    return _put_named(name, exam, METADATA, "saves write all data and then fail to commit")


def check_control(name: str, exam: Examination) -> CheckResult:
    """PutObject of the objects in ``.dcp_s3/``: manifests, and the lists of deletions."""
    found = _put_named(name, exam, manifest_object("0" * 16), "saves write all data and then fail to commit")
    if found.status != "ok":
        return found
    return _put_named(name, exam, deletion_object("0" * 16), "prune cannot delete checkpoints", required=False)


def _put_named(
    name: str, exam: Examination, path: str, consequence: str, *, required: bool = True
) -> CheckResult:  # fmt: skip
    if not exam.may_delete:
        return _would_stay(name)
    condition = {"IfNoneMatch": "*"} if path == METADATA and exam.knows_if_none_match else {}
    try:
        with contextlib.suppress(errors.PreconditionFailedError):  # an earlier attempt wrote it: nobody else knows it
            exam.put(path, b"", **condition)
        exam.ask("DeleteObject", path)
    except errors.StorageError as error:
        return from_error(name, error, status="failed" if required else "warning", consequence=consequence)
    return passed(name, f"{path} was written and deleted")


def check_copy(name: str, exam: Examination) -> CheckResult:
    """CopyObject, from one probe object to another."""
    if not exam.may_delete:
        return _would_stay(name)
    exam.put(PROBE, _DATA)
    exam.keys.append(exam.key(_COPY))
    try:
        exam.ask(name, _COPY, CopySource={"Bucket": exam.url.bucket, "Key": exam.key(PROBE)})
        copied = exam.ask("GetObject", _COPY)["Body"] == _DATA
    except errors.StorageError as error:
        return from_error(name, error, status="warning", consequence="copies go through this host, or do not work")
    if not copied:
        return warned(name, "the copy is not what was copied", "do not copy checkpoints within this store")
    return passed(name, "allowed; needed for copies within S3 (s3:GetObject, s3:PutObject)")


def _would_stay(name: str) -> CheckResult:
    return skipped(name, "the probe object could not be deleted again: see DeleteObject")
