"""Answers whose heads were cut off: a connection that ends inside the headers looks like an end of the headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.memory_s3 import Fault
from dcp_s3 import errors
from dcp_s3.settings import Settings
from dcp_s3.transport.bucket import Bucket
from dcp_s3.transport.download import Target, fetch_into
from dcp_s3.transport.files import FileTransfer, upload_files
from dcp_s3.transport.multipart import list_parts, list_uploads
from dcp_s3.transport.parts import Piece
from dcp_s3.transport.upload import Uploader
from tests.faulty import BUCKET, FaultyServer

MIB = 2**20
DATA = bytes(range(256)) * (12 * MIB // 256)


def upload(key: str) -> None:
    with Uploader(Bucket(BUCKET, Settings(part_size="5MiB"))) as uploader:
        each = uploader.start(key, len(DATA), part_size=5 * MIB)
        each.write(Piece.of(memoryview(DATA)))
        each.finish()


def begin(key: str) -> str:
    client = Bucket(BUCKET, Settings()).client
    upload_id: str = client.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"]
    client.upload_part(Bucket=BUCKET, Key=key, UploadId=upload_id, PartNumber=1, Body=b"part")
    return upload_id


# The in-memory server sends Content-Length first and ETag last.
@pytest.mark.parametrize("operation", ["GetObject", "HeadObject", "ListObjectsV2", "ListMultipartUploads", "ListParts"])
def test_what_is_read_is_whole(faulty: FaultyServer, operation: str) -> None:
    bucket = Bucket(BUCKET, Settings())
    bucket.write("key", DATA[:1000], metadata={"a": "b"})
    upload_id = begin("upload")
    read, expected = {
        "GetObject": (lambda: bucket.get("key").data, DATA[:1000]),
        "HeadObject": (lambda: bucket.head("key")["ContentLength"], 1000),
        "ListObjectsV2": (lambda: list(bucket.list("k")), [("key", 1000)]),
        "ListMultipartUploads": (lambda: list_uploads(bucket, "upload"), [upload_id]),
        "ListParts": (lambda: [part.size for part in list_parts(bucket, "upload", upload_id).values()], [4]),
    }[operation]
    for size in range(0, 260, 3):
        seen = faulty.once(operation, Fault.cut_head(size))
        assert read() == expected, size
        assert seen


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
def test_what_is_written_is_whole(faulty: FaultyServer, operation: str) -> None:
    for size in range(0, 260, 9):
        seen = faulty.once(operation, Fault.cut_head(size))
        upload("key")
        assert seen
        assert faulty.s3.read(BUCKET, "key") == DATA
        assert faulty.s3.open_uploads(BUCKET) == []


def test_the_cause_of_an_error_is_whole(faulty: FaultyServer) -> None:
    for size in range(0, 260, 3):
        faulty.once("GetObject", Fault.cut_head(size))
        with pytest.raises(errors.BucketNotFoundError):
            Bucket("no-such-bucket", Settings()).get("key")


def test_ranges_are_whole(faulty: FaultyServer) -> None:
    bucket = Bucket(BUCKET, Settings())
    bucket.write("key", DATA)
    for size in range(0, 260, 13):
        faulty.once("GetObject", Fault.cut_head(size))
        memory = bytearray(1000)
        fetch_into(bucket, "key", 100, [Target(memoryview(memory))])
        assert bytes(memory) == DATA[100:1100]


@pytest.mark.parametrize("fault", [Fault.apply_then_reset(), Fault.cut_head(0)], ids=["reset", "cut_head"])
def test_a_file_whose_completion_was_not_heard_of_is_uploaded_again(
    faulty: FaultyServer, tmp_path: Path, fault: Fault
) -> None:
    (tmp_path / "file").write_bytes(DATA)
    seen = faulty.once("CompleteMultipartUpload", fault)
    upload_files(Bucket(BUCKET, Settings(part_size="5MiB")), [FileTransfer("key", tmp_path / "file")])
    assert seen
    assert faulty.s3.read(BUCKET, "key") == DATA
    assert faulty.s3.open_uploads(BUCKET) == []
