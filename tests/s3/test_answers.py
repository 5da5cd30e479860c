"""Answers that are not S3's: their heads were cut off, or a proxy or captive portal gave them in its place."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_s3 import errors
from dcp_s3.memory import Piece
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.store import Upload
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault

MIB = 2**20
DATA = bytes(range(256)) * (12 * MIB // 256)


def upload(key: str) -> None:
    store = S3Store(BUCKET, Settings(part_size="5MiB"))
    store.put_stream(key, len(DATA), [Piece.of(memoryview(DATA))], part_size=5 * MIB)


def begin(key: str) -> str:
    client = S3Store(BUCKET, Settings()).client
    upload_id: str = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload_id, PartNumber=1, Body=b"part")
    return upload_id


PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Welcome to the guest network</body></html>"
HTML = {"Content-Type": "text/html"}
FORGED = {
    "empty": Fault.forge(200),
    "page": Fault.forge(200, PAGE, HTML),
    "page of XML": Fault.forge(200, b"<html><body/></html>", HTML),
    "page not found": Fault.forge(404, PAGE, HTML),
    "no content": Fault.forge(204),
    "another page": Fault.forge(203, PAGE, {**HTML, "ETag": '"static"'}),
    "to the login": Fault.forge(302, PAGE, HTML),  # with a Location, aiohttp would go there
    "done": Fault.forge(200, PAGE, HTML, applied=True),
    # The in-memory server sends Content-Length first and ETag last.
    **{f"cut off after {size}": Fault.cut_head(size) for size in range(0, 260, 13)},
}
KEYS = ["a", "b"]


def ranged(bucket: S3Store) -> bytes:
    memory = bytearray(900)
    bucket.read("a", 100, memoryview(memory))
    return bytes(memory)


def missing(name: str) -> type[Exception]:
    with pytest.raises(errors.BucketNotFoundError) as failure:
        S3Store(name, Settings()).get("key")
    return failure.type


def do(bucket: S3Store, operation: str, upload_id: str) -> Any:
    """Something that takes a request of that name, and whose result is right only if S3 answered."""
    return {
        "PutObject": lambda: bucket.put("new", DATA[:1000]),
        "GetObject": lambda: bucket.get("a").data,
        "GetObject of a range": lambda: ranged(bucket),
        "GetObject of no bucket": lambda: missing("no-such-bucket"),
        "HeadObject": lambda: bucket.head("a").size,
        "ListObjectsV2": lambda: [each.key for each in bucket.list("").objects],
        "ListMultipartUploads": lambda: [each.upload_id for each in bucket.uploads("upload")],
        "DeleteObject": lambda: bucket.delete(["a"]),
        "DeleteObjects": lambda: bucket.delete(KEYS),
        "AbortMultipartUpload": lambda: bucket.abort(Upload("upload", upload_id)),
        "CreateMultipartUpload": lambda: upload("new"),
        "UploadPart": lambda: upload("new"),
        "CompleteMultipartUpload": lambda: upload("new"),
    }[operation]()


# fmt: off
OPERATIONS = [
    "PutObject", "GetObject", "HeadObject", "ListObjectsV2", "ListMultipartUploads", "DeleteObject",
    "DeleteObjects", "AbortMultipartUpload", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload",
]
# fmt: on


def prepare() -> tuple[S3Store, str]:
    bucket = S3Store(BUCKET, Settings(retry_attempts=3))
    for key in KEYS:
        bucket.put(key, DATA[:1000])
    return bucket, begin("upload")


def is_plausible(operation: str, fault: Fault) -> bool:
    """Whether S3 may give this answer: to a HEAD none has a body, and that of a deletion has nothing else."""
    return (operation, fault.status) in {("HeadObject", 404), ("DeleteObject", 204), ("AbortMultipartUpload", 204)}


def state(faulty: FaultyServer) -> tuple[dict[str, int], list[str]]:
    return faulty.s3.objects(BUCKET), faulty.s3.open_uploads(BUCKET)


@pytest.mark.parametrize("operation", [*OPERATIONS, "GetObject of a range", "GetObject of no bucket"])
def test_an_answer_that_s3_did_not_give_is_not_believed(faulty: FaultyServer, operation: str) -> None:
    bucket, upload_id = prepare()
    before = state(faulty)
    expected = do(bucket, operation, upload_id)
    after = state(faulty)
    for name, fault in FORGED.items():
        if is_plausible(operation, fault):
            continue
        for key in faulty.s3.objects(BUCKET):
            bucket.delete([key])
        for each in bucket.uploads(""):
            bucket.abort(each)
        bucket, upload_id = prepare()
        assert state(faulty) == before
        if operation == "ListMultipartUploads":
            expected = [upload_id]
        # What was done before another answered for it shows as done, or is done again.
        seen = faulty.once(operation.partition(" ")[0], fault)
        assert do(bucket, operation, upload_id) == expected, name
        assert seen
        assert faulty.s3.objects(BUCKET) == after[0], name
        if operation != "CreateMultipartUpload":  # one whose id was lost is left to prune
            assert faulty.s3.open_uploads(BUCKET) == after[1], name


@pytest.mark.parametrize("operation", OPERATIONS)
def test_answers_that_s3_never_gives_are_an_error(faulty: FaultyServer, operation: str) -> None:
    _, upload_id = prepare()
    for fault in (Fault.forge(200), Fault.forge(200, PAGE, HTML), Fault.forge(302), Fault.forge(404, PAGE, HTML)):
        if is_plausible(operation, fault):
            continue
        faulty.rule = lambda request, fault=fault: fault if request.operation == operation else None
        with pytest.raises(errors.TransferError, match="proxy"):
            do(S3Store(BUCKET, Settings(retry_attempts=3, part_size="5MiB")), operation, upload_id)


@pytest.mark.parametrize("operation", ["ListObjectsV2", "ListMultipartUploads"])
def test_a_page_that_was_cut_off_is_not_the_last_one(faulty: FaultyServer, operation: str) -> None:
    """Of a body without a length, that is: one whose length is known is an error by itself."""
    bucket, upload_id = prepare()
    expected = do(bucket, operation, upload_id)
    root = "ListBucketResult" if operation == "ListObjectsV2" else "ListMultipartUploadsResult"
    start = f"<{root}><Name>{BUCKET}</Name>"
    for body in (start, f"{start}<IsTruncated>true</IsTruncated></{root}>", f"<{root}>", f"<Some{root}></Some{root}>"):
        seen = faulty.once(operation, Fault.forge(200, body.encode()))
        assert do(bucket, operation, upload_id) == expected, body
        assert seen


@pytest.mark.parametrize("operation", ["PutObject", "UploadPart"])
def test_a_checksum_of_other_bytes_is_not_taken_for_ours(faulty: FaultyServer, operation: str) -> None:
    bucket, upload_id = prepare()
    other = {"ETag": '"0123"', "x-amz-checksum-crc64nvme": "AAAAAAAAAAA="}
    seen = faulty.once(operation, Fault.forge(200, b"", other))
    do(bucket, operation, upload_id)
    assert seen
    key = "new"
    assert faulty.s3.read(BUCKET, key) == (DATA[:1000] if operation == "PutObject" else DATA)
    faulty.rule = lambda request: Fault.forge(200, b"", other) if request.operation == operation else None
    with pytest.raises(errors.TransferError, match="checksum"):
        do(bucket, operation, upload_id)
