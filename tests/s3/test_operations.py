"""What is asked of S3, and what is made of its answers; also of those that a proxy or captive portal gave."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from botocore.exceptions import ClientError

from dcp_s3 import errors
from dcp_s3.memory import Piece
from dcp_s3.s3 import bucket, multipart
from dcp_s3.s3.bucket import Quirk
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.store import ABSENT, DeleteTarget, Expect, Upload
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault

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


def body(data: bytes, etag: str = '"e"') -> dict[str, Any]:
    return {"Body": io.BytesIO(data), "ETag": etag, "Metadata": {"Who": "me"}}


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
        (ABSENT, [refusal(409), {}], [{"IfNoneMatch"}, {"IfNoneMatch"}]),  # beside another conditional write
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
        (ABSENT, [refusal(501), refusal(412), body(b"theirs")], errors.PreconditionFailedError),  # the checksum first
    ],
)
def test_a_put_that_is_refused(expect: Expect, answers: list[Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        carry_out(put(expect), *answers)


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
    left, asked, names = carry_out(lambda: STORE.delete(targets), changed, head)
    assert (left, names) == (["b"], ["delete_objects", "head_object"])
    conditions = [{"Key": "a", "ETag": '"1"'}, {"Key": "b", "ETag": '"2"'}, {"Key": "c"}]
    assert asked[0]["Delete"]["Objects"] == conditions


def test_many_keys_are_deleted_a_thousand_at_a_time_and_none_is_left_out() -> None:
    keys = [f"k{number}" for number in range(2001)]
    left, asked, names = carry_out(lambda: STORE.delete(keys), {}, {}, {})
    assert (left, names) == ([], ["delete_objects", "delete_objects", "delete_object"])
    assert [each["Key"] for request in asked[:2] for each in request["Delete"]["Objects"]] == keys[:2000]
    assert asked[2]["Key"] == keys[2000]


def test_an_answer_about_keys_that_were_not_asked_for_is_not_believed() -> None:
    other = {"Errors": [{"Key": "x", "Code": "InternalError"}]}
    left, asked, _ = carry_out(lambda: STORE.delete("ab"), other, {})
    assert left == []
    assert [len(each["Delete"]["Objects"]) for each in asked] == [2, 2]


@pytest.mark.parametrize("status", [501, 405, 400])
def test_without_batches_each_key_has_a_request(status: int) -> None:
    left, asked, names = carry_out(lambda: STORE.delete("ab"), refusal(status), {}, {})
    assert "VersionId" not in str(asked), "with versions, what is deleted stays behind a marker"
    assert (left, names) == ([], ["delete_objects", "delete_object", "delete_object"])
    assert Quirk.NO_BATCH_DELETES in STORE.known.quirks


def test_credentials_that_have_expired_say_nothing_of_the_store() -> None:
    with pytest.raises(errors.CredentialsError):
        carry_out(lambda: STORE.delete("ab"), refusal(400, "ExpiredToken"))
    assert Quirk.NO_BATCH_DELETES not in STORE.known.quirks


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


# --- deletes, with a server ------------------------------------------------------------------------------


@pytest.fixture
def store(faulty: FaultyServer) -> S3Store:
    """With the objects a, b, c."""
    store = S3Store(BUCKET, Settings())
    store.map(lambda store, key: store.put(key, b"1"), "abc")
    return store


@pytest.mark.parametrize("keys", [["a"], ["a", "b"]])
def test_a_store_that_refuses_conditions_that_hold_is_asked_without(
    store: S3Store, faulty: FaultyServer, keys: list[str]
) -> None:
    faulty.rule = lambda request: Fault.error(412, "PreconditionFailed") if "if-match" in request.headers else None
    assert store.delete([DeleteTarget(key, store.head(key).etag) for key in keys]) == []
    assert not set(keys) & faulty.s3.objects(BUCKET).keys()


def test_throttled_keys_are_tried_again(store: S3Store, faulty: FaultyServer) -> None:
    faults = [Fault.delete_partly("SlowDown"), Fault.error(503, "SlowDown")] * 3
    faulty.rule = lambda request: faults.pop() if faults else None
    assert store.delete(["a", "b"]) == []
    assert (faults, faulty.s3.objects(BUCKET)) == ([], {"c": 1})


def test_newlines_in_keys_of_a_batch(store: S3Store, faulty: FaultyServer) -> None:
    """XML makes spaces of them unless they are escaped."""
    for key in ("a\n-2\r", "a -2 "):
        store.put(key, b"1")
    assert store.delete(["a\n-2\r", "b"]) == []
    assert faulty.s3.objects(BUCKET).keys() == {"a", "a -2 ", "c"}


def test_a_key_that_is_never_deleted_fails_and_the_others_go(store: S3Store, faulty: FaultyServer) -> None:
    faulty.rule = lambda _: Fault.delete_partly("AccessDenied")
    with pytest.raises(errors.AccessDeniedError, match="'a' was not deleted"):
        store.delete(["a", "b", "c"])
    assert faulty.s3.objects(BUCKET) == {"a": 1}


# --- answers that are not S3's: their heads were cut off, or others gave them -----------------------------

MIB = 2**20
DATA = bytes(range(256)) * (12 * MIB // 256)

PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Welcome to the guest network</body></html>"
HTML = {"Content-Type": "text/html"}
FORGED = {
    "empty": Fault.forge(200),
    "page": Fault.forge(200, PAGE, HTML),
    "page of XML": Fault.forge(200, b"<html><body/></html>", HTML),
    "page of comments": Fault.forge(200, b"<!-- a -->" * 40 + PAGE, HTML),  # each of which may end at a later one's end
    "page not found": Fault.forge(404, PAGE, HTML),
    "no content": Fault.forge(204),
    "another page": Fault.forge(203, PAGE, {**HTML, "ETag": '"static"'}),
    "to the login": Fault.forge(302, PAGE, HTML),  # with a Location, aiohttp would go there
    "done": Fault.forge(200, PAGE, HTML, applied=True),
    # The in-memory server sends Content-Length first and ETag last.
    **{f"cut off after {size}": Fault.cut_head(size) for size in range(0, 260, 13)},
}
KEYS = ["a", "b"]


def ranged(bucket: S3Store, _: str) -> bytes:
    memory = bytearray(900)
    bucket.read("a", 100, memoryview(memory))
    return bytes(memory)


def read_of_no_bucket(*_: Any) -> None:
    with pytest.raises(errors.BucketNotFoundError):
        S3Store("no-such-bucket", Settings()).get("key")


DO: dict[str, Callable[[S3Store, str], Any]] = {
    "PutObject": lambda bucket, _: bucket.put("new", DATA[:1000]),
    "GetObject": lambda bucket, _: bucket.get("a").data,
    "HeadObject": lambda bucket, _: bucket.head("a").size,
    "ListObjectsV2": lambda bucket, _: [each.key for each in bucket.list("").objects],
    "ListMultipartUploads": lambda bucket, _: [each.upload_id for each in bucket.uploads("upload")],
    "DeleteObject": lambda bucket, _: bucket.delete(["a"]),
    "DeleteObjects": lambda bucket, _: bucket.delete(KEYS),
    "AbortMultipartUpload": lambda bucket, upload_id: bucket.abort(Upload("upload", upload_id)),
    **dict.fromkeys(
        ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"),
        lambda bucket, _: bucket.put_stream("new", len(DATA), [Piece.of(memoryview(DATA))], part_size=5 * MIB).size,
    ),
}
"""What takes a request of that name, and whose result is right only if S3 answered."""
READS: dict[str, Callable[[S3Store, str], Any]] = {
    "GetObject of a range": ranged,
    "GetObject of no bucket": read_of_no_bucket,
}


def prepare() -> tuple[S3Store, str]:
    """A bucket with objects, and the id of an upload that is open there."""
    bucket = S3Store(BUCKET, Settings(retry_attempts=3))
    for key in KEYS:
        bucket.put(key, DATA[:1000])
    upload_id: str = bucket.client.create_multipart_upload(Bucket=BUCKET, Key="upload")["UploadId"]
    return bucket, upload_id


def is_plausible(operation: str, fault: Fault) -> bool:
    """Whether S3 may give this answer: to a HEAD none has a body, and that of a deletion has nothing else."""
    return (operation, fault.status) in {("HeadObject", 404), ("DeleteObject", 204), ("AbortMultipartUpload", 204)}


@pytest.mark.parametrize("operation", [*DO, *READS])
def test_an_answer_that_s3_did_not_give_is_not_believed(faulty: FaultyServer, operation: str) -> None:
    bucket, upload_id = prepare()
    before, work = faulty.s3.objects(BUCKET), {**DO, **READS}[operation]
    expected = work(bucket, upload_id)
    objects, uploads = faulty.s3.objects(BUCKET), faulty.s3.open_uploads(BUCKET)
    for name, fault in FORGED.items():
        if is_plausible(operation, fault):
            continue
        for key in faulty.s3.objects(BUCKET):
            bucket.delete([key])
        for each in bucket.uploads(""):
            bucket.abort(each)
        bucket, upload_id = prepare()
        assert (faulty.s3.objects(BUCKET), faulty.s3.open_uploads(BUCKET)) == (before, ["upload"])
        if operation == "ListMultipartUploads":
            expected = [upload_id]
        # What was done before another answered for it shows as done, or is done again.
        seen = faulty.once(operation.partition(" ")[0], fault)
        assert work(bucket, upload_id) == expected, name
        assert seen
        assert faulty.s3.objects(BUCKET) == objects, name
        if operation != "CreateMultipartUpload":  # one whose id was lost is left to prune
            assert faulty.s3.open_uploads(BUCKET) == uploads, name


@pytest.mark.parametrize("operation", DO)
def test_answers_that_s3_never_gives_are_an_error(faulty: FaultyServer, operation: str) -> None:
    _, upload_id = prepare()
    for fault in (Fault.forge(200), Fault.forge(200, PAGE, HTML), Fault.forge(302), Fault.forge(404, PAGE, HTML)):
        if is_plausible(operation, fault):
            continue
        faulty.rule = lambda request, fault=fault: fault if request.operation == operation else None
        with pytest.raises(errors.TransferError, match="proxy"):
            DO[operation](S3Store(BUCKET, Settings(retry_attempts=3)), upload_id)


@pytest.mark.parametrize("operation", ["ListObjectsV2", "ListMultipartUploads"])
def test_a_page_that_was_cut_off_is_not_the_last_one(faulty: FaultyServer, operation: str) -> None:
    """Of a body without a length, that is: one whose length is known is an error by itself."""
    bucket, upload_id = prepare()
    expected = DO[operation](bucket, upload_id)
    root = "ListBucketResult" if operation == "ListObjectsV2" else "ListMultipartUploadsResult"
    start = f"<{root}><Name>{BUCKET}</Name>"
    for body in (start, f"{start}<IsTruncated>true</IsTruncated></{root}>", f"<{root}>", f"<Some{root}></Some{root}>"):
        seen = faulty.once(operation, Fault.forge(200, body.encode()))
        assert DO[operation](bucket, upload_id) == expected, body
        assert seen


@pytest.mark.parametrize("operation", ["PutObject", "UploadPart"])
def test_a_checksum_of_other_bytes_is_not_taken_for_ours(faulty: FaultyServer, operation: str) -> None:
    bucket, upload_id = prepare()
    other = {"ETag": '"0123"', "x-amz-checksum-crc64nvme": "AAAAAAAAAAA="}
    seen = faulty.once(operation, Fault.forge(200, b"", other))
    DO[operation](bucket, upload_id)
    assert seen
    assert faulty.s3.read(BUCKET, "new") == (DATA[:1000] if operation == "PutObject" else DATA)
    faulty.rule = lambda request: Fault.forge(200, b"", other) if request.operation == operation else None
    with pytest.raises(errors.TransferError, match="checksum"):
        DO[operation](bucket, upload_id)
