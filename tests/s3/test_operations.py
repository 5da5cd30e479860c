"""Operations without any I/O: what they ask, and what they make of the answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from dcp_s3 import errors
from dcp_s3.s3 import listing, multipart, operations
from dcp_s3.s3.diagnosis import to_storage_error
from dcp_s3.s3.listing import delete
from dcp_s3.s3.operations import Operation, Quirk, Request, request_arguments
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.store import ABSENT, DeleteTarget, Expect

PLACE = S3Store("b", Settings(retry_attempts=3))


@pytest.fixture(autouse=True)
def _knowing_nothing() -> Iterator[None]:
    operations.forget()
    yield
    operations.forget()


def refusal(status: int, code: str = "") -> errors.StorageError:
    cause = ClientError({"Error": {"Code": code or str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}, "X")
    error = to_storage_error(cause, "X", "b", "k", 1)
    error.__cause__ = cause
    return error


def carry_out(operation: Operation[Any], *answers: Any) -> tuple[Any, list[Request]]:
    """The result with these answers, all of which are asked for, and the requests."""
    asked, left = [next(operation)], list(answers)
    try:
        while True:
            answer = left.pop(0)
            if isinstance(answer, Exception):
                asked.append(operation.throw(answer))
            else:
                parse = asked[-1].parse
                asked.append(operation.send(answer if parse is None else parse(answer)))
    except StopIteration as done:
        assert not left
        return done.value, asked


def body(data: bytes, etag: str = '"e"') -> dict[str, Any]:
    return {"Body": data, "ETag": etag, "Metadata": {"Who": "me"}}


def conditions(requests: list[Request]) -> list[set[str]]:
    return [{"IfMatch", "IfNoneMatch"} & set(request_arguments(each)) for each in requests]


@pytest.mark.parametrize(
    ("expect", "answers", "sent"),
    [
        (None, [{}], [set()]),
        (ABSENT, [{}], [{"IfNoneMatch"}]),
        (ABSENT, [refusal(412), body(b"ours")], [{"IfNoneMatch"}, set()]),
        (ABSENT, [refusal(412), refusal(404, "NoSuchKey"), {}], [{"IfNoneMatch"}, set(), {"IfNoneMatch"}]),
        (ABSENT, [refusal(412), refusal(412), {}], [{"IfNoneMatch"}, set(), {"IfNoneMatch"}]),
        (ABSENT, [refusal(501), refusal(501), {}], [{"IfNoneMatch"}, {"IfNoneMatch"}, set()]),
        (Expect('"e"'), [refusal(412), body(b"theirs"), {}], [{"IfMatch"}, set(), set()]),
    ],
)
def test_a_put_that_is_done(expect: Expect | None, answers: list[Any], sent: list[set[str]]) -> None:
    _, asked = carry_out(operations.put(PLACE, "k", b"ours", expect=expect), *answers)
    assert conditions(asked) == sent


@pytest.mark.parametrize(
    ("expect", "answers", "error"),
    [
        (ABSENT, [refusal(412), body(b"theirs")], errors.PreconditionFailedError),
        (Expect('"seen"'), [refusal(412), body(b"theirs")], errors.PreconditionFailedError),
        (Expect('"seen"'), [refusal(412), refusal(404, "NoSuchKey")], errors.PreconditionFailedError),
        (Expect('"seen"'), [refusal(404, "NoSuchKey")], errors.ObjectNotFoundError),
        (ABSENT, [refusal(412), refusal(412)] * 3, errors.TransferError),
        (ABSENT, [refusal(403)], errors.AccessDeniedError),
    ],
)
def test_a_put_that_is_refused(expect: Expect, answers: list[Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        carry_out(operations.put(PLACE, "k", b"ours", expect=expect), *answers)


def test_a_checksum_that_a_store_refuses_is_left_out_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    def with_checksum(requests: list[Request]) -> list[bool]:
        return ["ChecksumCRC64NVME" in request_arguments(each) for each in requests]

    _, asked = carry_out(operations.put(PLACE, "k", b""), refusal(400, "InvalidRequest"), {})
    assert with_checksum(asked) == [True, False]
    _, asked = carry_out(operations.put(PLACE, "l", b""), {})
    assert with_checksum(asked) == [False]
    assert caplog.text.count("refuses checksums") == 1
    asked_for = S3Store("b", Settings(checksum="crc64nvme"))
    _, asked = carry_out(operations.put(asked_for, "l", b""), {})
    assert with_checksum(asked) == [True], "what was asked for is not left out"


def test_a_checksum_that_was_not_why_is_sent_again() -> None:
    with pytest.raises(errors.StorageError, match="InvalidRequest"):
        carry_out(operations.put(PLACE, "k", b""), refusal(400, "InvalidRequest"), refusal(400, "InvalidArgument"))
    assert not operations.knows(Quirk.NO_CHECKSUMS, PLACE)


def test_a_condition_that_fails_behind_a_refused_checksum_is_not_written_over() -> None:
    with pytest.raises(errors.PreconditionFailedError):
        carry_out(
            operations.put(PLACE, "k", b"ours", expect=ABSENT), refusal(501), refusal(412), body(b"theirs")
        )  # fmt: skip
    assert operations.knows(Quirk.NO_CHECKSUMS, PLACE)


def test_a_refusal_of_a_delete_without_a_condition_is_an_error() -> None:
    answer = {"Errors": [{"Key": "a", "Code": "PreconditionFailed", "Message": ""}]}
    with pytest.raises(ClientError, match="'a' was not deleted"):
        carry_out(delete(PLACE, [DeleteTarget("a"), DeleteTarget("b")]), answer)


def test_a_batch_of_which_some_keys_are_left() -> None:
    targets = [DeleteTarget("a", '"1"'), DeleteTarget("b", '"2"'), DeleteTarget("c")]
    changed = {"Errors": [{"Key": "b", "Code": "PreconditionFailed"}, {"Key": "c", "Code": "NoSuchKey"}]}
    head = {"ContentLength": 1, "ETag": '"3"', "LastModified": "Wed, 21 Oct 2015 07:28:00 GMT"}
    left, asked = carry_out(delete(PLACE, targets), changed, head)
    assert left == ["b"]
    assert [each.operation for each in asked] == ["DeleteObjects", "HeadObject"]


@pytest.mark.parametrize(("status", "is_known"), [(501, True), (405, True), (400, False)])
def test_without_batches_each_key_has_a_request(status: int, is_known: bool) -> None:
    left, asked = carry_out(delete(PLACE, map(DeleteTarget, "ab")), refusal(status), {}, {})
    assert [each.operation for each in asked] == ["DeleteObjects", "DeleteObject", "DeleteObject"]
    assert operations.knows(Quirk.NO_BATCH_DELETES, PLACE) == is_known
    assert left == []


def test_a_completion_that_was_not_answered_is_known_by_its_object() -> None:
    gone, modified = refusal(404, "NoSuchUpload"), {"LastModified": "Wed, 21 Oct 2015 07:28:00 GMT"}
    carry_out(multipart.complete(PLACE, "k", "u", ["e"], size=7, crc=None), gone, {"ContentLength": 7, **modified})
    for answer in ({"ContentLength": 6, **modified}, refusal(404)):
        with pytest.raises(errors.ObjectNotFoundError, match="NoSuchUpload"):
            carry_out(multipart.complete(PLACE, "k", "u", ["e"], size=7, crc=None), gone, answer)


@pytest.mark.parametrize("date", ["Wed, 21 Oct 2015 07:28:00 GMT", "2015-10-21T07:28:00.000Z", "2015-10-21T07:28:00Z"])
def test_a_head_has_the_fields_of_every_store(date: str) -> None:
    answer = {
        "ContentLength": 3, "ETag": '"e"', "LastModified": date, "Metadata": {"Dcp-S3-Save-Id": "x"},
        "ChecksumCRC64NVME": "AAAAAAAAAAo=",
        "ResponseMetadata": {"HTTPHeaders": {"date": "Wed, 21 Oct 2015 07:28:05 GMT"}},
    }  # fmt: skip
    head, _ = carry_out(operations.head("k", checksum=True), answer)
    assert (head.size, head.etag, head.metadata) == (3, '"e"', {"dcp-s3-save-id": "x"})
    assert (head.modified_at, head.server_time, head.crc64nvme) == (1445412480, 1445412485, "000000000000000a")


def test_a_page_asks_for_the_next_one() -> None:
    answer = {
        "Contents": [{"Key": "a", "Size": 1, "LastModified": "2015-10-21T07:28:00.000Z"}],
        "CommonPrefixes": [{"Prefix": "a/"}], "IsTruncated": True, "NextContinuationToken": "t",
    }  # fmt: skip
    page, [first] = carry_out(listing.page(PLACE, "", "/"), answer)
    assert ([each.key for each in page.objects], page.prefixes, page.next_token) == (["a"], ("a/",), "t")
    assert "ContinuationToken" not in request_arguments(first)
    _, [second] = carry_out(listing.page(PLACE, "", "/", token=page.next_token), {})
    assert request_arguments(second)["ContinuationToken"] == "t"


def test_a_marker_of_one_page_is_not_sent_for_the_page_after_the_next() -> None:
    cut_off = {"IsTruncated": True, "NextKeyMarker": "a", "NextVersionIdMarker": "1"}
    _, asked = carry_out(listing.versions(PLACE, ""), cut_off, {"IsTruncated": True, "NextKeyMarker": "b"}, {})
    assert [request_arguments(each).get("VersionIdMarker") for each in asked] == [None, "1", None]


@pytest.mark.parametrize("answers", [[{}], [{"NextKeyMarker": "a"}, {"NextKeyMarker": "a"}]])
def test_a_listing_that_does_not_go_on_is_an_error(answers: list[dict[str, Any]]) -> None:
    with pytest.raises(errors.TransferError, match="does not say where to go on"):
        carry_out(listing.versions(PLACE, ""), *({"IsTruncated": True} | each for each in answers))


def test_the_start_of_an_object_is_one_request_but_where_there_are_no_ranges() -> None:
    answer = {"Body": b"0123", "ETag": '"e"', "Metadata": {"A": "1"}, "ContentRange": "bytes 0-3/10"}
    start, (asked,) = carry_out(operations.get_start("k", 4), answer)
    assert (start.size, start.object.data, start.object.etag, start.object.metadata) == (10, b"0123", '"e"', {"a": "1"})
    assert request_arguments(asked) == {"Key": "k", "Range": "bytes=0-3"}
    whole = {"Body": b"0123456789", "ETag": '"e"'}
    for first in (whole, {**answer, "ContentRange": "bytes 0-3/*"}, errors.OutOfRangeError("416")):
        start, asked = carry_out(operations.get_start("k", 4), first, whole)
        assert (start.size, start.object.data) == (10, b"0123456789")
        assert [request_arguments(each).get("Range") for each in asked] == ["bytes=0-3", None]
