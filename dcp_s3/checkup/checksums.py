"""Checks of checksums: whether the store knows those that are sent, and refuses what does not have them."""

from __future__ import annotations

from typing import Any

from dcp_s3 import errors
from dcp_s3.checksum import ChecksumAlgorithm
from dcp_s3.checkup.examination import PROBE, Examination
from dcp_s3.checkup.result import CheckResult, passed, skipped, warned
from dcp_s3.s3.diagnosis import answered_code, answered_status
from dcp_s3.s3.operations import checksum_arguments, wire_checksum

_DATA, _OTHER = b"what is sent", b"what it is said to be"
_IGNORED = "damage on the way to it goes unnoticed until a load, which always compares"
_NOTHING = "nothing, if the network has checksums of its own (TLS has); dcp-s3 verify --full after important saves"


def _algorithm_name(algorithm: ChecksumAlgorithm) -> str:
    return {"crc64nvme": "CRC-64/NVME", "crc32c": "CRC-32C"}.get(algorithm, algorithm)


def _judge(name: str, exam: Examination, accepted: str, error: errors.StorageError | None, shown: str) -> CheckResult:
    """The result for a body with a wrong checksum: ``error`` is the answer, None if it was accepted.

    Args:
        name: name of the check.
        exam: the examination.
        accepted: what was done, for people.
        error: the refusal.
        shown: what the store says of checksums afterwards.
    """
    algorithm = _algorithm_name(wire_checksum(exam.settings))
    if error is None:
        return warned(name, f"{algorithm} is accepted, but not compared: {accepted} with a wrong one{shown}; "
                      f"{_IGNORED}", _NOTHING)  # fmt: skip
    if answered_status(error) != 400:
        raise error
    return passed(name, f"{algorithm} is compared: a wrong one was refused ({answered_code(error)}){shown}")


def _refusal(exam: Examination, operation: str, **arguments: Any) -> errors.StorageError | None:
    """The answer to a body with a wrong checksum; None if it is accepted."""
    try:
        # A save would send it again, and say so. Here the refusal is what is asked for.
        exam.ask(operation, PROBE, attempts=1, **arguments)
    except errors.StorageError as first:
        if answered_status(first) == 400:
            return first
        try:
            exam.ask(operation, PROBE, **arguments)
        except errors.StorageError as error:
            return error
    return None


def check_object_checksum(name: str, exam: Examination) -> CheckResult:
    """PutObject with its checksum, and with a wrong one."""
    if wire_checksum(exam.settings) == "none":
        return _off(name)
    try:
        exam.put(PROBE, _DATA, **checksum_arguments(exam.settings, _DATA))
    except errors.StorageError as error:
        return _unknown(name, exam, error)
    shown = _shown(exam)
    refusal = _refusal(exam, "PutObject", Body=_DATA, **checksum_arguments(exam.settings, _OTHER))
    return _judge(name, exam, "an object was stored", refusal, shown)


def check_part_checksum(name: str, exam: Examination) -> CheckResult:
    """UploadPart with its checksum, and with a wrong one; and what the whole object then has."""
    algorithm = wire_checksum(exam.settings)
    if algorithm == "none":
        return _off(name)
    kind: dict[str, Any] = {"ChecksumAlgorithm": algorithm.upper()}
    if algorithm == "crc64nvme":
        kind["ChecksumType"] = "FULL_OBJECT"
    right: dict[str, Any] = checksum_arguments(exam.settings, _DATA)
    try:
        upload = exam.begin_upload(PROBE, **kind)
    except errors.StorageError as error:
        return _unknown(name, exam, error)
    part: dict[str, Any] = {"UploadId": upload, "PartNumber": 1, "Body": _DATA}
    refusal = _refusal(exam, "UploadPart", **part, **checksum_arguments(exam.settings, _OTHER))
    try:
        etag = exam.ask("UploadPart", PROBE, **part, **right)["ETag"]
        parts = [{"PartNumber": 1, "ETag": etag, **right}]
        whole = {**right, "ChecksumType": "FULL_OBJECT"} if algorithm == "crc64nvme" else {}
        exam.ask("CompleteMultipartUpload", PROBE, UploadId=upload, MultipartUpload={"Parts": parts}, **whole)
    except errors.StorageError as error:
        return _unknown(name, exam, error)
    exam.uploads.remove((exam.key(PROBE), upload))
    return _judge(name, exam, "a part was stored", refusal, _shown(exam))


def _shown(exam: Examination) -> str:
    """What a HeadObject says of the probe object's checksum."""
    answer = exam.ask("HeadObject", PROBE, ChecksumMode="ENABLED")
    if not any(each in answer for each in ("ChecksumCRC64NVME", "ChecksumCRC32C")):
        return "; HeadObject shows none"
    kind = answer.get("ChecksumType")
    return f"; HeadObject shows it ({kind})" if kind else "; HeadObject shows it"


def _unknown(name: str, exam: Examination, error: errors.StorageError) -> CheckResult:
    if answered_status(error) not in (400, 501):
        raise error
    algorithm = _algorithm_name(wire_checksum(exam.settings))
    found = f"the store does not know {algorithm} ({answered_code(error)})"
    if exam.settings.checksum == "auto":
        return warned(name, f"{found}: objects are sent without; {_IGNORED}", _NOTHING)
    return CheckResult(
        name, "failed", f"{found}, but DCP_S3_CHECKSUM={exam.settings.checksum} insists on it",
        "DCP_S3_CHECKSUM=auto, which does without where it is not known",
    )  # fmt: skip


def _off(name: str) -> CheckResult:
    return skipped(name, "DCP_S3_CHECKSUM=none: nothing is compared, neither by saves nor by loads")
