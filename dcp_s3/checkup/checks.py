"""The checks: this host, the way to S3, each permission by a request, what the store does with what it is sent."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import botocore.exceptions as boto
import botocore.session

from dcp_s3 import errors
from dcp_s3.checkup.probes import DATA, PROBE, CheckResult, Examination, fail, from_error, ok, skip, warn
from dcp_s3.memory import crc64nvme, encode_crc
from dcp_s3.process import TESTED, __version__, release
from dcp_s3.retention.policy import policy_from_settings
from dcp_s3.s3.bucket import creation_arguments, server_time
from dcp_s3.s3.client import find_chain, get_client
from dcp_s3.s3.diagnosis import answered_code, answered_status, to_storage_error
from dcp_s3.settings import ENV_PREFIX, resolve_settings, unknown_variables
from dcp_s3.spill.store import as_spill_error
from dcp_s3.units import format_size

# --- this host -----------------------------------------------------------------------------------------


def check_settings(exam: Examination) -> CheckResult:
    settings = exam.settings = resolve_settings(exam.given)
    policy_from_settings(settings)
    chain, unknown = find_chain(settings), unknown_variables()
    if unknown:
        remedies = "; ".join(f"{variable}: {remedy}" for variable, remedy in unknown.items())
        return warn(f"not a setting of dcp_s3, so without effect: {', '.join(unknown)}", remedies)
    shown = [f"{ENV_PREFIX}{each.upper()}={getattr(settings, each)}" for each in sorted(settings.model_fields_set)]
    shown += [f"{each} {value.value} ({value.source})" for each, value in chain.items()]
    return ok(f"valid; set are {', '.join(shown)}" if shown else "valid; none is set")


def check_versions(exam: Examination) -> CheckResult:
    versions = {package: importlib.metadata.version(package) for package in ("torch", "awscrt", "boto3")}
    found = f"dcp_s3 {__version__}, Python {platform.python_version()}, "
    found += ", ".join(f"{package} {version}" for package, version in versions.items())
    if release(versions["torch"])[:2] > release(TESTED[-1]):
        return warn(
            f"{found}: dcp_s3 was never run with this torch, the newest was {TESTED[-1]}",
            "save and load a small state first; pip install --upgrade dcp-s3, or an earlier torch",
        )
    return ok(found)


def check_spill(exam: Examination) -> CheckResult:
    if exam.settings.spill_dir is None:
        return skip("DCP_S3_SPILL_DIR is unset: while S3 is away, saves fail")
    path = Path(exam.settings.spill_dir)
    there = next(each for each in (path, *path.parents) if each.exists())
    with as_spill_error(path, "write"), tempfile.TemporaryFile(dir=there) as file:
        file.write(b"doctor")
        file.flush()
        os.fsync(file.fileno())
    free = shutil.disk_usage(there).free
    found = f"{path}, {format_size(free)} free"
    return ok(found) if free >= 2**30 else warn(f"{found}: hardly room for a checkpoint", "use a larger disk")


# --- the way to S3 -------------------------------------------------------------------------------------

# A round trip between regions; in one region it takes a few milliseconds, and S3 answers within tens.
_FAR_SECONDS = 0.15
# https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html: RequestTimeTooSkewed
_SKEW_WARNS, _SKEW_FAILS = 60.0, 900.0
_RENEWED = ("assume-role", "assume-role-with-web-identity", "container-role", "iam-role", "custom-process")


def check_credentials(exam: Examination) -> CheckResult:
    session = botocore.session.get_session()
    try:
        credentials: Any = session.get_credentials()
        frozen = credentials and credentials.get_frozen_credentials()
        if not (frozen and frozen.access_key and frozen.secret_key):
            raise boto.NoCredentialsError
    except boto.BotoCoreError as error:
        return from_error(to_storage_error(error, "HeadBucket", exam.url.bucket, "", 1))
    key, method = str(frozen.access_key), str(credentials.method)
    # An id that can be recognised, but not used.
    found = f"{key[:4]}... from {method}"
    found += "" if method == "env" else f", profile {session.profile or 'default'!r}"
    if not frozen.token or method in _RENEWED:
        return ok(f"{found}; they {'are renewed' if frozen.token else 'do not expire'}")
    return warn(
        f"{found}; they are temporary (a session token), and not renewed",
        "for long runs an instance or pod role, or credential_process in the profile: those are renewed",
    )


def check_endpoint(exam: Examination) -> CheckResult:
    where, seconds = str(get_client(exam.settings).meta.endpoint_url), 0.0
    for _ in range(2):  # the first one connects
        began, clock = time.monotonic(), time.time()
        try:
            answer: Mapping[str, Any] = exam.ask("HeadBucket", attempts=1)
        except errors.StorageError as error:
            if not isinstance(error.__cause__, boto.ClientError):  # a refusal is an answer, too
                remedy = (
                    "check DCP_S3_ENDPOINT_URL (or AWS_ENDPOINT_URL_S3, or the profile), DNS, firewall and proxy; "
                    "AWS_CA_BUNDLE names the file of a certificate's authority; DCP_S3_ADDRESSING_STYLE=path keeps the "
                    "bucket out of the host's name"
                )
                return replace(from_error(error), remedy=remedy)
            answer = error.__cause__.response
        seconds = time.monotonic() - began
    exam.server = str(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("server", ""))
    there = server_time(answer)
    if there is not None:
        exam.skew = clock + seconds / 2 - (there + 0.5)  # a Date is cut to the second below
    found = f"{where} answers in {seconds * 1000:.1f} ms"
    if seconds > _FAR_SECONDS:
        return warn(f"{found}: S3 is far away", "train in the region of the bucket; does a proxy lead elsewhere?")
    return ok(found)


def check_clock(exam: Examination) -> CheckResult:
    if exam.skew is None:
        return skip("the endpoint's answers have no Date", cell="not told")
    seconds = abs(exam.skew)
    if seconds < 2:
        return ok("this host's clock agrees with the endpoint's", cell="agrees")
    cell = f"{seconds:.0f} s {'behind' if exam.skew > 0 else 'ahead'}"  # the endpoint's clock, seen from this host
    found = f"this host's clock is {seconds:.0f} s {'ahead of' if exam.skew > 0 else 'behind'} the endpoint's"
    if seconds <= _SKEW_WARNS:
        return ok(found, cell=cell)
    remedy = "synchronise it (NTP, chrony); S3 refuses requests from 15 minutes on"
    return (fail if seconds > _SKEW_FAILS else warn)(found, remedy, cell=cell)


# --- permissions: None says that it is allowed ---------------------------------------------------------

_OTHER = bytes(256)
_COPY = "__0_1-probe.distcp"


def do_list(exam: Examination) -> CheckResult | None:
    exam.ask("ListObjectsV2", Prefix=exam.url.key(""), MaxKeys=1)
    try:  # whether an object that is not there reads as missing, rather than as forbidden
        exam.ask("GetObject", "missing", Range="bytes=0-0")
    except errors.ObjectNotFoundError:
        return None
    return fail("an object that was never written is there", "is the endpoint an S3?")


def do_put(exam: Examination) -> None:
    exam.put(PROBE, DATA)


def do_get(exam: Examination) -> CheckResult | None:
    size = exam.ask("HeadObject", PROBE)["ContentLength"]
    data = exam.ask("GetObject", PROBE, Range="bytes=16-31")["Body"]
    if size == len(DATA) and data == DATA[16:32]:
        return None
    return fail(
        f"of {len(DATA)} bytes it has {size}; 16 of them were asked for, the answer has {len(data)}, or others",
        "the endpoint, or a proxy before it, does not do ranges: loads need them",
    )


def do_delete(exam: Examination) -> None:
    exam.ask("DeleteObject", PROBE)


def do_multipart(exam: Examination) -> CheckResult | None:
    exam.complete_upload(exam.begin_upload())
    size = exam.ask("HeadObject", PROBE)["ContentLength"]
    return None if size == len(DATA) else fail(f"of {len(DATA)} bytes {size} are there", "is the endpoint an S3?")


def do_list_uploads(exam: Examination) -> CheckResult | None:
    """Begins an upload, which `do_abort` goes on with."""
    upload = exam.begin_upload()
    remedy = "a lifecycle rule or job of the store's own that aborts them"
    # Of a directory, as prune asks.
    answer, code = exam.attempt((404, 405, 501), "ListMultipartUploads", Prefix=exam.key(""))
    if code:
        found = f"the store does not list multipart uploads ({code}): those that were left open may cost storage"
        return warn(found, remedy, cell="no")
    if upload in [str(each.get("UploadId")) for each in answer.get("Uploads", ())]:
        return ok("", cell="yes")
    found = "allowed, but it does not show an open upload: prune will not find what killed processes leave"
    return warn(found, remedy, cell="not what is open")


def do_abort(exam: Examination) -> None:
    ((_, upload),) = exam.uploads
    exam.ask("AbortMultipartUpload", PROBE, UploadId=upload)
    exam.uploads.clear()


def do_delete_batch(exam: Examination) -> CheckResult | None:
    exam.put(PROBE, DATA)
    delete = {"Objects": [{"Key": exam.key(PROBE)}]}
    answer, code = exam.attempt((400, 405, 411, 501), "DeleteObjects", Delete=delete)
    if code:
        remedy = "nothing; prune takes a request for each object instead of one for a thousand"
        return warn(f"the store has none ({code}): objects are deleted one by one", remedy)
    for entry in answer.get("Errors", ()):
        return warn(f"{entry.get('Code')} for {entry.get('Key')!r}", "the credentials need s3:DeleteObject")
    return None


# --- what the store does: conditions, checksums, copies, lifecycle rules ---------------------------------

_REFUSED = (412, 409)  # 409: another conditional write is under way
_OTHER_ETAG = '"00000000000000000000000000000000"'
_ONE_WRITER = "save to each URL from one job only, and to a URL of its own for each save"


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
    return _try_condition(exam, "PutObject", consequence, _ONE_WRITER, Body=b"second", IfNoneMatch="*")


def check_if_match(exam: Examination) -> CheckResult:
    consequence = "a save that overwrites does not notice one that committed meanwhile"
    found = _try_condition(exam, "PutObject", consequence, _ONE_WRITER, Body=b"third", IfMatch=_OTHER_ETAG)
    etag = exam.ask("HeadObject", PROBE)["ETag"] if found.status == "ok" else ""
    if etag and exam.attempt((*_REFUSED, 404, 501), "PutObject", PROBE, Body=b"second", IfMatch=etag)[1]:
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
    chosen = exam.settings.checksum
    if chosen == "none":
        return skip("DCP_S3_CHECKSUM=none: nothing is compared, neither by saves nor by loads")
    ignored = "damage on the way to it goes unnoticed until a load, which always compares"
    remedy = "nothing, if the network has checksums (TLS has); dcp-s3 verify --full after important saves"
    given = creation_arguments(exam.settings, data=True)
    right, wrong = (given | {"ChecksumCRC64NVME": encode_crc(crc64nvme(data))} for data in (DATA, _OTHER))
    exam.keys.add(exam.key(PROBE))
    _, code = exam.attempt((400, 501), "PutObject", PROBE, Body=DATA, **right)
    if code:
        found = f"the store does not know CRC-64/NVME ({code})"
        if chosen == "auto":
            return warn(f"{found}: objects are sent without; {ignored}", remedy, cell="refused")
        wanted = "DCP_S3_CHECKSUM=auto, which does without where it is not known"
        return fail(f"{found}, but DCP_S3_CHECKSUM={chosen} insists on it", wanted, cell="refused")
    # A save would send it again, and say so. Here the refusal is what is asked for.
    _, code = exam.attempt((400,), "PutObject", PROBE, attempts=1, Body=DATA, **wrong)
    if code:
        return ok(f"CRC-64/NVME is compared: a wrong one was refused ({code})", cell="compared (CRC-64/NVME)")
    found = f"CRC-64/NVME is accepted, but not compared: an object was stored with a wrong one; {ignored}"
    return warn(found, remedy, cell="not compared (CRC-64/NVME)")


def check_whole_object(exam: Examination) -> CheckResult:
    """Whether the store compares and keeps the CRC-64 of an object of several parts, by an upload of one."""
    whole, wrong = {"ChecksumType": "FULL_OBJECT"}, {"ChecksumCRC64NVME": encode_crc(crc64nvme(_OTHER))}
    before = set(exam.uploads)
    try:
        exam.complete_upload(exam.begin_upload(ChecksumAlgorithm="CRC64NVME", **whole), **whole, **wrong)
    except errors.StorageError as error:
        if answered_status(error) not in (400, 501):
            raise
        code = answered_code(error)
        if exam.uploads == before:
            return skip(f"no upload with it can be begun ({code}): one of several parts goes without", cell="refused")
        return ok(f"a wrong CRC-64 of a whole object is refused ({code})", cell="compared")
    kept = exam.ask("HeadObject", PROBE, ChecksumMode="ENABLED").get("ChecksumCRC64NVME")
    found = "the CRC-64 of a whole object is accepted, and not compared"
    return skip(f"{found}; the parts' own are seen to by the check before", cell="kept" if kept else "not kept")


def check_copies(exam: Examination) -> CheckResult:
    """Whether objects, and parts of them, are copied inside of the store."""
    exam.put(PROBE, DATA)
    source = {"CopySource": {"Bucket": exam.url.bucket, "Key": exam.key(PROBE)}}
    exam.keys.add(exam.key(_COPY))
    refusals = (400, 403, 404, 405, 501)
    objects, _ = exam.attempt(refusals, "CopyObject", _COPY, **source)
    part = {"UploadId": exam.begin_upload(), "PartNumber": 1} if objects.get("CopyObjectResult") else None
    parts = exam.attempt(refusals, "UploadPartCopy", PROBE, **part, **source)[0] if part else {}
    done = [name for name, is_so in (("objects", part), ("parts", parts.get("CopyPartResult"))) if is_so]
    cell = ", ".join(done) or "no"
    if len(done) == 2:
        return ok("objects and parts of them are copied inside of the store", cell=cell)
    found = f"copied inside of the store: {cell}; incremental saves send the rest, `dcp-s3 cp` within the store fails"
    return warn(found, "copy checkpoints by way of a directory", cell=cell)


def check_versioning(exam: Examination) -> CheckResult:
    try:
        status = exam.ask("GetBucketVersioning").get("Status")
    except errors.StorageError as error:
        return skip(f"not known; needs s3:GetBucketVersioning: {from_error(error).found}")
    if not status:
        return skip("the bucket keeps no old versions: what is deleted is gone", cell="off")
    return warn(
        f"versioning is {status.lower()}: deleted and overwritten checkpoints stay as old versions, and cost",
        "a lifecycle rule for noncurrent versions (docs/deletion.md)",
        cell="on" if status == "Enabled" else "suspended",
    )


def check_lifecycle(exam: Examination) -> CheckResult:
    try:
        rules = exam.ask("GetBucketLifecycleConfiguration").get("Rules", ())
    except errors.StorageError as error:
        rules = ()
        if answered_code(error) != "NoSuchLifecycleConfiguration":
            return skip(f"not known; needs s3:GetLifecycleConfiguration: {from_error(error).found}")
    harm = [str(rule.get("ID", "without an ID")) for rule in rules if does_harm(rule, exam.url.key(""))]
    if harm:
        return warn(
            f"rules expire or archive single objects below {exam.url}: {', '.join(harm)}",
            "narrow them to another prefix, or remove them; dcp-s3 prune deletes whole checkpoints",
        )
    return ok("no rule expires or archives checkpoints")


def does_harm(rule: Mapping[str, Any], prefix: str) -> bool:
    """Whether a lifecycle rule expires or archives objects of checkpoints below a prefix (``run/``, or empty)."""
    found = rule.get("Filter") or {}
    both = found.get("And") or {}
    filtered = str(found.get("Prefix") or both.get("Prefix") or rule.get("Prefix") or "")
    if str(rule.get("Status")) != "Enabled" or found.get("Tag") or both.get("Tags"):  # dcp_s3's objects have no tags
        return False
    if not (prefix.startswith(filtered) or filtered.startswith(prefix)):
        return False
    # https://docs.aws.amazon.com/AmazonS3/latest/userguide/storage-class-intro.html: to be restored before a read
    archives = {each.get("StorageClass") for each in rule.get("Transitions", ())} & {"GLACIER", "DEEP_ARCHIVE"}
    return bool(archives or {"Days", "Date"} & set(rule.get("Expiration", ())))
