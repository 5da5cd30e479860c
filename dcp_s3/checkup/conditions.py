"""Checks of conditional requests: what keeps two writers of one checkpoint apart."""

from __future__ import annotations

from typing import Any

from dcp_s3 import errors
from dcp_s3.checkup.examination import PROBE, Examination
from dcp_s3.checkup.result import CheckResult, passed, skipped, warned
from dcp_s3.s3.diagnosis import answered_status

_REFUSED = (412, 409)  # 409: another conditional write is under way
_OTHER_ETAG = '"00000000000000000000000000000000"'
_ONE_WRITER = "save to each URL from one job only, and to a URL of its own for each save"


def answer_to(exam: Examination, operation: str, **arguments: Any) -> int:
    """Send a request to the probe object; the status of its answer.

    Raises:
        StorageError: there was no answer, or one that has nothing to do with conditions.
    """
    try:
        exam.ask(operation, PROBE, **arguments)
    except errors.StorageError as error:
        status = answered_status(error)
        if status in (*_REFUSED, 404, 501):
            return status
        raise
    return 200


def check_if_none_match(name: str, exam: Examination) -> CheckResult:
    """PutObject with ``If-None-Match: *`` on an object that is there."""
    exam.put(PROBE, b"first")
    status = answer_to(exam, "PutObject", Body=b"second", IfNoneMatch="*")
    exam.knows_if_none_match = status in _REFUSED
    if status in _REFUSED:
        return passed(name, f"honoured: a second write was refused with {status}; of two jobs that save to one URL, "
                      "one wins and the other is told")  # fmt: skip
    how = "not implemented (501)" if status == 501 else "ignored: a second write replaced the first"
    return warned(name, f"{how}; of two jobs that save to one URL at one time, neither is told", _ONE_WRITER)


def check_if_match(name: str, exam: Examination) -> CheckResult:
    """PutObject with ``If-Match``: once with the object's ETag, once with another."""
    exam.put(PROBE, b"first")
    etag = exam.ask("HeadObject", PROBE)["ETag"]
    other = answer_to(exam, "PutObject", Body=b"third", IfMatch=_OTHER_ETAG)
    if other not in (*_REFUSED, 404):
        how = "not implemented (501)" if other == 501 else "ignored"
        return warned(name, f"{how}; a save that overwrites does not notice one that committed meanwhile", _ONE_WRITER)
    if answer_to(exam, "PutObject", Body=b"second", IfMatch=etag) != 200:
        return warned(
            name, "refused even where the ETag is the object's; saves look at the object themselves and then write "
            "without it, so that one that overwrites may not notice another", _ONE_WRITER,
        )  # fmt: skip
    return passed(name, f"honoured: a write with another ETag was refused with {other}")


def check_conditional_delete(name: str, exam: Examination) -> CheckResult:
    """DeleteObject with ``If-Match`` and another ETag."""
    if not exam.may_delete:
        return skipped(name, "see DeleteObject")
    exam.put(PROBE, b"first")
    status = answer_to(exam, "DeleteObject", IfMatch=_OTHER_ETAG)
    if status in _REFUSED:
        return passed(name, f"honoured: with another ETag it was refused with {status}")
    how = "not implemented (501)" if status == 501 else "ignored"
    return warned(
        name, f"{how}; a save that overwrites a checkpoint just while prune deletes it may lose its .metadata",
        "a URL of its own for each save",
    )  # fmt: skip


def check_conditional_read(name: str, exam: Examination) -> CheckResult:
    """GetObject with ``If-Match`` and another ETag."""
    exam.put(PROBE, b"first")
    status = answer_to(exam, "GetObject", IfMatch=_OTHER_ETAG)
    if status in _REFUSED:
        return passed(name, f"honoured: with another ETag it was refused with {status}")
    return warned(
        name, "ignored; a load of an object that is replaced meanwhile finds out by its checksums only",
        "nothing, as long as checksums are on (DCP_S3_CHECKSUM)",
    )  # fmt: skip
