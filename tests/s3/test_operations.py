"""What is asked of S3, and what is made of its answers, without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from dcp_s3 import errors
from dcp_s3.s3 import bucket, multipart
from dcp_s3.s3.bucket import Quirk, forget_quirks, knows
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.store import ABSENT, DeleteTarget, Expect

STORE = S3Store("b", Settings(retry_attempts=3))


class Client:
    """Gives these answers, one for each request."""

    def __init__(self, answers: tuple[Any, ...]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def request(**arguments: Any) -> Any:
            self.asked.append((name, {name: value for name, value in arguments.items() if name != "Bucket"}))
            answer = self.answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return request


@pytest.fixture(autouse=True)
def _knowing_nothing() -> Iterator[None]:
    forget_quirks()
    yield
    forget_quirks()


def refusal(status: int, code: str = "") -> ClientError:
    return ClientError({"Error": {"Code": code or str(status)}, "ResponseMetadata": {"HTTPStatusCode": status}}, "X")


def carry_out(operation: Callable[[], Any], *answers: Any) -> tuple[Any, list[dict[str, Any]], list[str]]:
    """The result with these answers, all of which are asked for; the arguments of the requests; and their names."""
    client = Client(answers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bucket, "get_client", lambda _: client)
        result = operation()
    assert not client.answers
    return result, [arguments for _, arguments in client.asked], [name for name, _ in client.asked]


class Body:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self) -> bytes:
        return self.data


def body(data: bytes, etag: str = '"e"') -> dict[str, Any]:
    return {"Body": Body(data), "ETag": etag, "Metadata": {"Who": "me"}}


def conditions(requests: list[dict[str, Any]]) -> list[set[str]]:
    return [{"IfMatch", "IfNoneMatch"} & set(each) for each in requests]


def put(expect: Expect | None = None, store: S3Store = STORE) -> Callable[[], None]:
    return lambda: store.put("k", b"ours", expect=expect)


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
    _, asked, _ = carry_out(put(expect), *answers)
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
        carry_out(put(expect), *answers)


def test_a_condition_that_fails_behind_a_refused_checksum_is_not_written_over() -> None:
    with pytest.raises(errors.PreconditionFailedError):
        carry_out(put(ABSENT), refusal(501), refusal(412), body(b"theirs"))


def test_a_write_whose_condition_is_required_is_not_made_without() -> None:
    with pytest.raises(errors.PreconditionFailedError, match="does not know conditional writes"):
        carry_out(put(Expect(required=True)), refusal(501), refusal(501))


def test_a_refusal_of_a_delete_without_a_condition_is_an_error() -> None:
    answer = {"Errors": [{"Key": "a", "Code": "PreconditionFailed", "Message": ""}]}
    with pytest.raises(errors.StorageError, match="'a' was not deleted"):
        carry_out(lambda: STORE.delete("ab"), answer)


def test_a_batch_of_which_some_keys_are_left() -> None:
    targets = [DeleteTarget("a", '"1"'), DeleteTarget("b", '"2"'), DeleteTarget("c")]
    changed = {"Errors": [{"Key": "b", "Code": "PreconditionFailed"}, {"Key": "c", "Code": "NoSuchKey"}]}
    head = {"ContentLength": 1, "ETag": '"3"', "LastModified": "Wed, 21 Oct 2015 07:28:00 GMT"}
    left, _, names = carry_out(lambda: STORE.delete(targets), changed, head)
    assert (left, names) == (["b"], ["delete_objects", "head_object"])


@pytest.mark.parametrize("status", [501, 405, 400])
def test_without_batches_each_key_has_a_request(status: int) -> None:
    left, asked, names = carry_out(lambda: STORE.delete("ab"), refusal(status), {}, {})
    assert "VersionId" not in str(asked), "with versions, what is deleted stays behind a marker"
    assert (left, names) == ([], ["delete_objects", "delete_object", "delete_object"])
    assert knows(Quirk.NO_BATCH_DELETES, STORE)


def test_a_completion_that_was_not_answered_is_known_by_its_object() -> None:
    gone, modified = refusal(404, "NoSuchUpload"), {"LastModified": "Wed, 21 Oct 2015 07:28:00 GMT"}

    def complete() -> None:
        multipart.complete(STORE, "k", "u", ["e"], size=7, crc=None)

    carry_out(complete, gone, {"ContentLength": 7, **modified})
    for answer in ({"ContentLength": 6, **modified}, refusal(404)):
        with pytest.raises(errors.ObjectNotFoundError, match="NoSuchUpload"):
            carry_out(complete, gone, answer)


@pytest.mark.parametrize("date", ["Wed, 21 Oct 2015 07:28:00 GMT", "2015-10-21T07:28:00.000Z", "2015-10-21T07:28:00Z"])
def test_a_head_has_the_fields_of_every_store(date: str) -> None:
    answer = {
        "ContentLength": 3, "ETag": '"e"', "LastModified": date, "Metadata": {"Dcp-S3-Save-Id": "x"},
        "ChecksumCRC64NVME": "AAAAAAAAAAo=",
        "ResponseMetadata": {"HTTPHeaders": {"date": "Wed, 21 Oct 2015 07:28:05 GMT"}},
    }  # fmt: skip
    head, _, _ = carry_out(lambda: STORE.head("k", checksum=True), answer)
    assert (head.size, head.etag, head.metadata) == (3, '"e"', {"dcp-s3-save-id": "x"})
    assert (head.modified_at, head.server_time, head.crc64nvme) == (1445412480, 1445412485, "000000000000000a")


@pytest.mark.parametrize("answers", [[{}], [{"NextKeyMarker": "a"}, {"NextKeyMarker": "a"}]])
def test_a_listing_that_does_not_go_on_is_an_error(answers: list[dict[str, Any]]) -> None:
    with pytest.raises(errors.TransferError, match="does not say where to go on"):
        carry_out(lambda: STORE.uploads(""), *({"IsTruncated": True} | each for each in answers))


def test_no_such_upload_for_a_bucket_without_uploads_means_none() -> None:
    assert carry_out(lambda: STORE.uploads("k"), refusal(404, "NoSuchUpload"))[0] == ()
