"""The in-memory S3 server answers boto3 as S3 does, and fails on demand."""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
)

from tests.memory_s3 import Counters, Fault, MemoryS3, MemoryS3Process, Reader, Reads, fetch_counters, reset_counters
from tests.memory_s3.memory import BLOCK_SIZE, Pool
from tests.memory_s3.store import paginate

BUCKET = "bucket"
MIB = 1 << 20
BROKEN = (ConnectionClosedError, EndpointConnectionError, HTTPClientError, ConnectionError)


def client(memory: MemoryS3 | MemoryS3Process, *, key: str = "test") -> Any:
    return boto3.client(
        "s3",
        endpoint_url=memory.endpoint_url,
        aws_access_key_id=key,
        aws_secret_access_key="secret",
        region_name="us-east-1",
        config=Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1, "mode": "standard"},
        ),
    )


def crc32(data: bytes) -> str:
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()


def code(error: pytest.ExceptionInfo[ClientError]) -> tuple[int, str]:
    response = error.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


@pytest.fixture
def memory() -> Iterator[MemoryS3]:
    with MemoryS3(preallocate=16 * MIB) as running:
        running.create_bucket(BUCKET)
        yield running


@pytest.fixture
def s3(memory: MemoryS3) -> Iterator[Any]:
    connected = client(memory)
    yield connected
    connected.close()


def raw(memory: MemoryS3) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(memory.endpoint_url.removeprefix("http://"), timeout=10)


@pytest.mark.parametrize("size", [0, BLOCK_SIZE, 3 * BLOCK_SIZE + 5])
def test_what_is_put_is_got_whatever_its_blocks(memory: MemoryS3, s3: Any, size: int) -> None:
    data = bytes(i * 7 % 251 for i in range(1000)) * (size // 1000 + 1)
    data = data[:size]
    s3.put_object(Bucket=BUCKET, Key="a b/ü+%", Body=data)
    assert s3.get_object(Bucket=BUCKET, Key="a b/ü+%")["Body"].read() == data == memory.read(BUCKET, "a b/ü+%")
    assert memory.objects(BUCKET) == {"a b/ü+%": size}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pages_are_the_listing_in_pieces_and_never_exceed_their_limit(size: int) -> None:
    keys = ["a/1", "a/2", "b/1", "c", "d/1", "d/2", "e"]
    found, after = list[str](), ""
    while True:
        page = paginate(keys, prefix="", delimiter="/", after=after, max_keys=size)
        assert len(page.keys) + len(page.prefixes) <= size
        found += sorted([*page.keys, *page.prefixes])
        if page.next_after is None:
            break
        after = page.next_after
    assert found == ["a/", "b/", "c", "d/", "e"]
    page = paginate(keys, prefix="", delimiter="/", after="a/1", max_keys=size)
    assert "a/" not in page.prefixes, "it came before"


class TestMultipart:
    def begin(self, s3: Any, **arguments: Any) -> dict[str, Any]:
        answer = s3.create_multipart_upload(Bucket=BUCKET, Key="k", **arguments)
        return {"Bucket": BUCKET, "Key": "k", "UploadId": answer["UploadId"]}

    def test_a_wrong_part_list_is_refused(self, s3: Any) -> None:
        upload = self.begin(s3)
        first = s3.upload_part(**upload, PartNumber=1, Body=b"small")["ETag"]
        second = s3.upload_part(**upload, PartNumber=2, Body=b"last")["ETag"]

        def complete(*parts: tuple[int, str]) -> tuple[int, str]:
            chosen = [{"PartNumber": number, "ETag": etag} for number, etag in parts]
            with pytest.raises(ClientError) as error:
                s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": chosen})
            return code(error)

        assert complete((1, second)) == (400, "InvalidPart")
        assert complete((3, first)) == (400, "InvalidPart")
        assert complete((2, second), (1, first)) == (400, "InvalidPartOrder")
        assert complete((1, first), (2, second)) == (400, "EntityTooSmall")

    def test_a_list_of_uploads_goes_on_behind_one_that_is_gone(self, s3: Any) -> None:
        ids = {key: s3.create_multipart_upload(Bucket=BUCKET, Key=key)["UploadId"] for key in "abc"}
        page = s3.list_multipart_uploads(Bucket=BUCKET, MaxUploads=2)
        s3.abort_multipart_upload(Bucket=BUCKET, Key="b", UploadId=ids["b"])
        rest = s3.list_multipart_uploads(
            Bucket=BUCKET, KeyMarker=page["NextKeyMarker"], UploadIdMarker=page["NextUploadIdMarker"]
        )
        assert [each["Key"] for each in rest["Uploads"]] == ["c"]


class TestChecksums:
    DATA = b"tensor bytes"

    @pytest.mark.parametrize("algorithm", ["CRC64NVME", "CRC32C", "CRC32", "SHA256"])
    def test_a_wrong_checksum_is_refused(self, memory: MemoryS3, s3: Any, algorithm: str) -> None:
        pytest.importorskip("awscrt")
        right = s3.put_object(Bucket=BUCKET, Key="k", Body=self.DATA, ChecksumAlgorithm=algorithm)
        name = f"Checksum{algorithm}"
        other = s3.put_object(Bucket=BUCKET, Key="l", Body=b"other", ChecksumAlgorithm=algorithm)
        assert right[name] != other[name]
        with pytest.raises(ClientError) as error:
            s3.put_object(Bucket=BUCKET, Key="k", Body=b"corrupt", **{name: right[name]})
        assert code(error) == (400, "BadDigest")
        got = s3.get_object(Bucket=BUCKET, Key="k", ChecksumMode="ENABLED")
        assert got[name] == right[name]
        assert memory.read(BUCKET, "k") == self.DATA

    @pytest.mark.parametrize("http_chunked", [False, True])
    @pytest.mark.parametrize("good", [False, True])
    def test_chunked_bodies_with_a_trailer(self, memory: MemoryS3, http_chunked: bool, good: bool) -> None:
        trailer = crc32(self.DATA if good else b"other")
        encoded = (
            b"6;chunk-signature=ab\r\n" + self.DATA[:6] + b"\r\n6\r\n" + self.DATA[6:] + b"\r\n"
            b"0\r\nx-amz-checksum-crc32:" + trailer.encode() + b"\r\n\r\n"
        )
        headers = {
            "x-amz-content-sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
            "x-amz-decoded-content-length": str(len(self.DATA)),
            "x-amz-trailer": "x-amz-checksum-crc32",
        }
        connection = raw(memory)
        for _ in range(2):  # the connection stays usable
            if http_chunked:
                pieces = [encoded[i : i + 7] for i in range(0, len(encoded), 7)]
                connection.request("PUT", "/bucket/k", iter(pieces), headers, encode_chunked=True)
            else:
                connection.request("PUT", "/bucket/k", encoded, headers)
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == (200 if good else 400)
            assert good or b"BadDigest" in text
        connection.close()
        assert memory.objects(BUCKET) == ({"k": len(self.DATA)} if good else {})


class TestFaults:
    """Beyond what the tests of dcp_s3 see of them: what was applied, and what the connection is good for."""

    def test_a_connection_is_usable_after_a_refusal(self, memory: MemoryS3) -> None:
        memory.fault = lambda request: Fault.error(503, "SlowDown") if request.key == "a" else None
        connection, statuses = raw(memory), []
        for key in "ab":
            connection.request("PUT", f"/{BUCKET}/{key}", b"x" * 1000)
            answer = connection.getresponse()
            answer.read()
            statuses.append(answer.status)
        connection.close()
        assert statuses == [503, 200]

    @pytest.mark.parametrize(
        ("fault", "applied"),
        [
            (Fault.error(503, "SlowDown"), False), (Fault.reset(), False), (Fault.reset_request(100_000), False),
            (Fault.forge(203, b"<html/>"), False), (Fault.forge(200, applied=True), True),
            (Fault.apply_then_reset(), True), (Fault.cut_head(20), True), (Fault.drip(10_000), True),
            (Fault.repeat(), True), (Fault.delay(0), True),
        ],
        ids=lambda value: getattr(value, "kind", value),
    )  # fmt: skip
    def test_what_is_applied_and_what_is_not(self, memory: MemoryS3, s3: Any, fault: Fault, applied: bool) -> None:
        memory.fault = lambda request: fault
        with contextlib.suppress(ClientError, *BROKEN):
            s3.put_object(Bucket=BUCKET, Key="k", Body=b"x" * MIB)
        assert memory.objects(BUCKET) == ({"k": MIB} if applied else {})

    @pytest.mark.parametrize("fault", [Fault.truncate(600), Fault.reset_response(600)], ids=lambda fault: fault.kind)
    def test_a_body_that_is_cut_off_is_noticed(self, memory: MemoryS3, s3: Any, fault: Fault) -> None:
        s3.put_object(Bucket=BUCKET, Key="k", Body=b"x" * 1000)
        memory.fault = lambda request: fault
        with pytest.raises((*BROKEN, IncompleteReadError, ResponseStreamingError)):
            s3.get_object(Bucket=BUCKET, Key="k")["Body"].read()
        assert memory.counters.bytes_out == 600

    def test_some_keys_are_not_deleted(self, memory: MemoryS3, s3: Any) -> None:
        for key in ("a", "b", "c"):
            s3.put_object(Bucket=BUCKET, Key=key, Body=b"x")
        memory.fault = lambda request: Fault.delete_partly("SlowDown")
        keys = {"Objects": [{"Key": key} for key in ("a", "b", "c")], "Quiet": True}
        (failed,) = s3.delete_objects(Bucket=BUCKET, Delete=keys)["Errors"]
        assert (failed["Key"], failed["Code"]) == ("a", "SlowDown")
        assert list(memory.objects(BUCKET)) == ["a"]

    def test_a_repeated_request_is_carried_out_twice(self, memory: MemoryS3, s3: Any) -> None:
        memory.fault = lambda request: Fault.repeat()
        with pytest.raises(ClientError) as error:
            s3.put_object(Bucket=BUCKET, Key="key", Body=b"data", IfNoneMatch="*")
        assert code(error)[0] == 412
        assert memory.objects(BUCKET) == {"key": 4}

    def test_the_fault_function_sees_the_request(self, memory: MemoryS3, s3: Any) -> None:
        s3.put_object(Bucket=BUCKET, Key="k", Body=b"0123456789")
        memory.reset_counters()
        s3.get_object(Bucket=BUCKET, Key="k", Range="bytes=2-3")
        (request,) = memory.request_log
        assert (request.operation, request.bucket, request.key) == ("GetObject", BUCKET, "k")
        assert request.range == "bytes=2-3"
        assert memory.counters.bytes_out == 2


class TestServer:
    def test_a_foreign_access_key_is_refused(self) -> None:
        with MemoryS3(access_key="mine") as memory:
            client(memory, key="mine").create_bucket(Bucket="b")
            with pytest.raises(ClientError) as error:
                client(memory, key="yours").put_object(Bucket="b", Key="k", Body=b"x")
            assert code(error) == (403, "InvalidAccessKeyId")
            connection = raw(memory)
            connection.request("GET", "/b/k")
            assert b"AccessDenied" in connection.getresponse().read()
            connection.close()

    def test_what_is_not_http_is_refused(self, memory: MemoryS3) -> None:
        host, port = memory.endpoint_url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            sock.sendall(b"nonsense\r\n\r\n")
            assert sock.makefile("rb").read().startswith(b"HTTP/1.1 400 ")

    def test_a_part_is_got_by_its_number(self, s3: Any) -> None:
        upload = {
            "Bucket": BUCKET,
            "Key": "k",
            "UploadId": s3.create_multipart_upload(Bucket=BUCKET, Key="k")["UploadId"],
        }
        parts = [{"PartNumber": n, "ETag": s3.upload_part(**upload, PartNumber=n, Body=body)["ETag"]}
                 for n, body in enumerate((b"a" * 5 * MIB, b"last"), 1)]  # fmt: skip
        s3.complete_multipart_upload(**upload, MultipartUpload={"Parts": parts})
        answer = s3.get_object(Bucket=BUCKET, Key="k", PartNumber=2)
        assert (answer["Body"].read(), answer["PartsCount"]) == (b"last", 2)

    def test_memory_is_recycled(self) -> None:
        pool = Pool(4 * BLOCK_SIZE)
        body = pool.allocate(2 * BLOCK_SIZE + 1)
        part = body.slice(5, 10)
        assert pool.free_bytes == BLOCK_SIZE
        too_much = pool.allocate(2 * BLOCK_SIZE)
        assert len(too_much) == 2 * BLOCK_SIZE
        del body
        assert pool.free_bytes == BLOCK_SIZE
        del part
        assert pool.free_bytes == 4 * BLOCK_SIZE


class TestCounters:
    def test_reads_are_counted_by_access_key_and_object(self, memory: MemoryS3) -> None:
        first, second = client(memory, key="first"), client(memory, key="second")
        first.put_object(Bucket=BUCKET, Key="a/b", Body=b"0123456789")
        for s3 in (first, first, second):
            s3.get_object(Bucket=BUCKET, Key="a/b", Range="bytes=2-5")["Body"].read()
        second.head_object(Bucket=BUCKET, Key="a/b")
        assert fetch_counters(memory.endpoint_url).reads == {
            Reader("first", "a/b"): Reads(2, 8),
            Reader("second", "a/b"): Reads(1, 4),
        }

    def test_another_process_reads_and_resets_them(self) -> None:
        with MemoryS3Process() as memory:
            s3 = client(memory)
            s3.create_bucket(Bucket=BUCKET)
            s3.put_object(Bucket=BUCKET, Key="k", Body=b"x" * 1000)
            s3.get_object(Bucket=BUCKET, Key="k")["Body"].read()
            counters = fetch_counters(memory.endpoint_url)
            assert counters.requests == {"CreateBucket": 1, "PutObject": 1, "GetObject": 1}
            assert counters.answers == {200: 3}
            assert (counters.bytes_in, counters.bytes_out) == (1000, 1000)
            reset_counters(memory.endpoint_url)
            assert fetch_counters(memory.endpoint_url) == Counters()

    def test_they_wait_for_requests_under_way(self, memory: MemoryS3) -> None:
        begun, go_on = threading.Event(), threading.Event()

        def hold(_: object) -> None:
            begun.set()
            assert go_on.wait(30)

        client(memory).put_object(Bucket=BUCKET, Key="k", Body=b"x" * 10)
        memory.fault = hold
        with ThreadPoolExecutor(2) as pool:
            read = pool.submit(lambda: client(memory).get_object(Bucket=BUCKET, Key="k")["Body"].read())
            assert begun.wait(30)
            counters = pool.submit(fetch_counters, memory.endpoint_url)
            go_on.set()
            assert counters.result().bytes_out == len(read.result()) == 10

    def test_what_a_client_broke_off_counts(self, memory: MemoryS3) -> None:
        client(memory).put_object(Bucket=BUCKET, Key="k", Body=b"x" * 64 * MIB)
        sock = raw(memory)
        sock.request("GET", f"/{BUCKET}/k")
        answer = sock.getresponse()
        assert len(answer.read(MIB)) == MIB
        answer.close()
        sock.close()
        assert MIB <= fetch_counters(memory.endpoint_url).bytes_out < 64 * MIB
