"""Checks of the bucket: each permission by a request, what the store does with conditions and checksums."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from dcp_s3 import errors
from dcp_s3.checksum import crc64nvme, encode_crc
from dcp_s3.checkup.probes import CONFIGURATION, DATA, PROBE, CheckResult, Examination, fail, from_error, ok, skip, warn
from dcp_s3.format.layout import METADATA, deletion_object, manifest_object
from dcp_s3.s3.diagnosis import answered_code, answered_status
from dcp_s3.s3.operations import checksum_arguments

# --- permissions: None says that it is allowed ---------------------------------------------------------

_OTHER = bytes(256)
_COPY = "__0_1-probe.distcp"


def check_bucket(exam: Examination) -> CheckResult:
    try:
        answer = exam.ask("ListObjectsV2", Prefix=exam.url.key(""), MaxKeys=1)
    except errors.AccessDeniedError:
        return warn(f"{exam.url.bucket!r} is there, or hidden: it may not be listed", "see the check ListObjectsV2")
    there = "there are objects" if answer.get("Contents") else "there is nothing yet"
    return ok(f"{exam.url.bucket!r} is there; {there} below {exam.url}")


def do_list(exam: Examination) -> CheckResult | None:
    exam.ask("ListObjectsV2", Prefix=exam.url.key(""), MaxKeys=1)
    try:  # whether an object that is not there reads as missing, rather than as forbidden
        exam.ask("GetObject", METADATA, Range="bytes=0-0")
    except errors.ObjectNotFoundError:
        return None
    return fail(f"{exam.probes}/{METADATA} was never written, but is there", "is the endpoint an S3?")


def do_get(exam: Examination) -> CheckResult | None:
    size = exam.ask("HeadObject", PROBE)["ContentLength"]
    data = exam.ask("GetObject", PROBE, Range="bytes=16-31")["Body"]
    if size == len(DATA) and data == DATA[16:32]:
        return None
    return fail(
        f"of {len(DATA)} bytes it has {size}; 16 of them were asked for, the answer has {len(data)}, or others",
        "the endpoint, or a proxy before it, does not do ranges: loads need them",
    )


def do_multipart(exam: Examination) -> CheckResult | None:
    exam.complete_upload(exam.key(PROBE), exam.begin_upload())
    size = exam.ask("HeadObject", PROBE)["ContentLength"]
    return None if size == len(DATA) else fail(f"of {len(DATA)} bytes {size} are there", "is the endpoint an S3?")


def do_list_uploads(exam: Examination) -> CheckResult | None:
    """Begins an upload, which `do_list_parts` and `do_abort` go on with."""
    upload = exam.begin_upload()
    remedy = "a lifecycle rule or job of the store's own that aborts them"
    try:
        answer = exam.ask("ListMultipartUploads", Prefix=exam.key(""))  # of a directory, as prune asks
    except errors.StorageError as error:
        found = f"the store does not list multipart uploads ({_code_if(error, 404, 405, 501)})"
        return warn(f"{found}: those that were left open may cost storage", remedy, cell="no")
    if upload in [str(each.get("UploadId")) for each in answer.get("Uploads", ())]:
        return CheckResult("", "ok", "", cell="yes")
    found = "allowed, but it does not show an open upload: prune will not find what killed processes leave"
    return warn(found, remedy, cell="not what is open")


def do_list_parts(exam: Examination) -> CheckResult | None:
    _, upload = exam.uploads[-1]
    exam.ask("UploadPart", PROBE, UploadId=upload, PartNumber=1, Body=DATA)
    answer = exam.ask("ListParts", PROBE, UploadId=upload)
    if [each.get("PartNumber") for each in answer.get("Parts", ())] == [1]:
        return None
    return warn("allowed, but it does not show the part that was sent", "nothing; a drain sends it again")


def do_abort(exam: Examination) -> None:
    exam.ask("AbortMultipartUpload", PROBE, UploadId=exam.uploads[-1][1])
    exam.uploads.pop()


def do_delete_batch(exam: Examination) -> CheckResult | None:
    names = (PROBE, _COPY)
    for name in names:
        exam.put(name, DATA)
    try:
        answer = exam.ask("DeleteObjects", Delete={"Objects": [{"Key": exam.key(name)} for name in names]})
    except errors.StorageError as error:
        found = f"the store has none ({_code_if(error, 400, 405, 411, 501)}): objects are deleted one by one"
        return warn(found, "nothing; prune takes a request for each object instead of one for a thousand")
    for entry in answer.get("Errors", ()):
        return warn(f"{entry.get('Code')} for {entry.get('Key')!r}", "the credentials need s3:DeleteObject")
    return None


def do_list_versions(exam: Examination) -> CheckResult | None:
    try:
        status = exam.ask("GetBucketVersioning").get("Status")
    except errors.StorageError as error:
        return skip(f"not known; needs {CONFIGURATION['GetBucketVersioning']}: {from_error(error).found}")
    if not status:
        return skip("the bucket keeps no old versions: what is deleted is gone", cell="off")
    exam.is_versioned = True
    exam.ask("ListObjectVersions", Prefix=exam.url.key(""), MaxKeys=1)
    return warn(
        f"versioning is {status.lower()}: deleted and overwritten checkpoints stay as old versions, and cost",
        "a lifecycle rule for noncurrent versions (docs/deletion.md)",
        cell="on" if status == "Enabled" else "suspended",
    )


def check_commit(exam: Examination) -> CheckResult:
    """Write and delete what a commit and prune do: a policy may decide by the key, or by the condition."""
    deletion = deletion_object("0" * 16)
    for path in (METADATA, manifest_object("0" * 16), deletion):
        condition = {"IfNoneMatch": "*"} if path == METADATA and exam.knows_if_none_match else {}
        try:
            with contextlib.suppress(errors.PreconditionFailedError):  # an earlier attempt wrote it: nobody else knows
                exam.put(path, b"", **condition)
            exam.ask("DeleteObject", path)
        except errors.StorageError as error:
            if path == deletion:
                return from_error(error, status="warning", consequence="prune cannot delete checkpoints")
            return from_error(error, consequence="saves write all data and then fail to commit")
    return ok(f"{METADATA} and objects in .dcp_s3/ were written and deleted")


# --- what the store does: conditions, checksums, lifecycle rules ---------------------------------------

_REFUSED = (412, 409)  # 409: another conditional write is under way
_OTHER_ETAG = '"00000000000000000000000000000000"'
_ONE_WRITER = "save to each URL from one job only, and to a URL of its own for each save"


def _code_if(error: errors.StorageError, *statuses: int) -> str:
    """The code of an answer that has one of these statuses; another error is raised again."""
    if answered_status(error) not in statuses:
        raise error
    return answered_code(error)


def _try_condition(exam: Examination, operation: str, consequence: str, remedy: str, **arguments: Any) -> CheckResult:
    """Whether a condition that does not hold for the probe object, which is there, is refused."""
    exam.put(PROBE, b"first")
    try:
        exam.ask(operation, PROBE, **arguments)
    except errors.StorageError as error:
        status = answered_status(error)
        if status in _REFUSED or (status == 404 and operation == "PutObject" and "IfMatch" in arguments):
            return ok(f"honoured: refused with {status}", cell="honoured")
        if status == 501:
            return warn(f"not implemented (501); {consequence}", remedy, cell="not implemented")
        if status != 404:
            raise
    return warn(f"ignored; {consequence}", remedy, cell="ignored")


def check_if_none_match(exam: Examination) -> CheckResult:
    consequence = "of two jobs that save to one URL at one time, neither is told"
    found = _try_condition(exam, "PutObject", consequence, _ONE_WRITER, Body=b"second", IfNoneMatch="*")
    exam.knows_if_none_match = found.status == "ok"
    return found


def check_if_match(exam: Examination) -> CheckResult:
    consequence = "a save that overwrites does not notice one that committed meanwhile"
    found = _try_condition(exam, "PutObject", consequence, _ONE_WRITER, Body=b"third", IfMatch=_OTHER_ETAG)
    if found.status != "ok":
        return found
    try:
        exam.ask("PutObject", PROBE, Body=b"second", IfMatch=exam.ask("HeadObject", PROBE)["ETag"])
    except errors.StorageError as error:
        _code_if(error, *_REFUSED, 404, 501)
        return warn(
            "refused even where the ETag is the object's; saves look at the object themselves and then write "
            "without it, so that one that overwrites may not notice another",
            _ONE_WRITER,
            cell="refused always",
        )
    return found


def check_conditional_delete(exam: Examination) -> CheckResult:
    consequence = "a save that overwrites a checkpoint just while prune deletes it may lose its .metadata"
    return _try_condition(exam, "DeleteObject", consequence, "a URL of its own for each save", IfMatch=_OTHER_ETAG)


def check_checksums(exam: Examination) -> CheckResult:
    if exam.settings.checksum == "none":
        return skip("DCP_S3_CHECKSUM=none: nothing is compared, neither by saves nor by loads")
    shown = "CRC-64/NVME"
    ignored = "damage on the way to it goes unnoticed until a load, which always compares"
    remedy = "nothing, if the network has checksums (TLS has); dcp-s3 verify --full after important saves"
    try:
        exam.put(PROBE, DATA, **checksum_arguments(exam.settings, crc64nvme(DATA)))
    except errors.StorageError as error:
        found = f"the store does not know {shown} ({_code_if(error, 400, 501)})"
        if exam.settings.checksum == "auto":
            return warn(f"{found}: objects are sent without; {ignored}", remedy, cell="refused")
        wanted = "DCP_S3_CHECKSUM=auto, which does without where it is not known"
        return fail(f"{found}, but DCP_S3_CHECKSUM={exam.settings.checksum} insists on it", wanted, cell="refused")
    try:
        # A save would send it again, and say so. Here the refusal is what is asked for.
        exam.ask("PutObject", PROBE, attempts=1, Body=DATA, **checksum_arguments(exam.settings, crc64nvme(_OTHER)))
    except errors.StorageError as error:
        found = f"{shown} is compared: a wrong one was refused ({_code_if(error, 400)})"
        return ok(found, cell=f"compared ({shown})")
    found = f"{shown} is accepted, but not compared: an object was stored with a wrong one; {ignored}"
    return warn(found, remedy, cell=f"not compared ({shown})")


def check_whole_object(exam: Examination) -> CheckResult:
    """Whether the store compares and keeps the CRC-64 of an object of several parts, by an upload of one."""
    whole, wrong = {"ChecksumType": "FULL_OBJECT"}, {"ChecksumCRC64NVME": encode_crc(crc64nvme(_OTHER))}
    refused: tuple[int, ...] = (400, 501)
    try:
        upload = exam.begin_upload(ChecksumAlgorithm="CRC64NVME", **whole)
        exam.complete_upload(exam.key(PROBE), upload, **whole, **wrong)
    except errors.StorageError as error:
        if not exam.uploads:
            found = f"no upload with it can be begun ({_code_if(error, *refused)}): one of several parts goes without"
            return skip(found, cell="refused")
        found = f"a wrong CRC-64 of a whole object is refused ({_code_if(error, *refused)})"
        return ok(f"{found}: so is an object whose parts are not in order", cell="compared")
    kept = exam.ask("HeadObject", PROBE, ChecksumMode="ENABLED").get("ChecksumCRC64NVME")
    found = "the CRC-64 of a whole object is accepted, and not compared"
    return skip(f"{found}; the parts' own are seen to by the check before", cell="kept" if kept else "not kept")


def check_copies(exam: Examination) -> CheckResult:
    """Whether objects, and parts of them, are copied inside of the store."""
    exam.put(PROBE, DATA)
    source: dict[str, Any] = {"CopySource": {"Bucket": exam.url.bucket, "Key": exam.key(PROBE)}}
    exam.keys.append(exam.key(_COPY))
    done: list[str] = []
    try:
        if exam.ask("CopyObject", _COPY, **source).get("CopyObjectResult"):
            done.append("objects")
        answer = exam.ask("UploadPartCopy", PROBE, UploadId=exam.begin_upload(), PartNumber=1, **source)
        if answer.get("CopyPartResult"):
            done.append("parts")
    except errors.StorageError as error:
        _code_if(error, 400, 403, 404, 405, 501)
    cell = ", ".join(done) or "no"
    if len(done) == 2:
        return ok("objects and parts of them are copied inside of the store", cell=cell)
    found = f"copied inside of the store: {cell}; the bytes of others pass through the host of `dcp-s3 cp`"
    return warn(found, "nothing; copies take longer", cell=cell)


def check_lifecycle(exam: Examination) -> CheckResult:
    try:
        rules = exam.ask("GetBucketLifecycleConfiguration").get("Rules", ())
    except errors.StorageError as error:
        rules = ()
        if answered_code(error) != "NoSuchLifecycleConfiguration":
            needed = CONFIGURATION["GetBucketLifecycleConfiguration"]
            return skip(f"not known; needs {needed}: {from_error(error).found}")
    harm = [text for rule in rules if (text := find_harm(rule, exam.url.key("")))]
    if harm:
        return warn(
            f"below {exam.url}: {'; '.join(harm)}: checkpoints would lose single objects, or not be readable",
            "narrow the rule to another prefix, or remove it; dcp-s3 prune deletes whole checkpoints",
        )
    return ok("no rule expires or archives checkpoints")


def find_harm(rule: Mapping[str, Any], prefix: str) -> str:
    """What a lifecycle rule would do to checkpoints below a prefix (``run/``, or empty), or nothing."""
    found = rule.get("Filter") or {}
    both = found.get("And") or {}
    filtered = str(found.get("Prefix") or both.get("Prefix") or rule.get("Prefix") or "")
    if str(rule.get("Status")) != "Enabled" or found.get("Tag") or both.get("Tags"):  # dcp_s3's objects have no tags
        return ""
    if not (prefix.startswith(filtered) or filtered.startswith(prefix)):
        return ""
    when, expiration = {"Days": "deletes objects after {} days", "Date": "deletes objects from {} on"}, "Expiration"
    harm = [text.format(rule[expiration][key]) for key, text in when.items() if key in rule.get(expiration, ())]
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/storage-class-intro.html
    moves = [each.get("StorageClass") for each in rule.get("Transitions", ())]
    archives = [name for name in moves if name in ("GLACIER", "DEEP_ARCHIVE")]
    harm += [f"moves objects to {name}, to be restored before they can be read" for name in archives]
    return f"rule {rule.get('ID', 'without an ID')!r} {' and '.join(harm)}" if harm else ""


def clean_up(exam: Examination) -> CheckResult:
    left = exam.remove()
    if left:
        return warn(f"not removed: {'; '.join(left)}", f"have somebody delete what is below {exam.probes}")
    return ok(f"nothing is left below {exam.probes}")
