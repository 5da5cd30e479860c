"""Multipart uploads that exist on S3: found, looked into, aborted."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import pytest

from dcp_s3 import errors
from dcp_s3.checksum import crc64nvme
from dcp_s3.s3 import multipart
from dcp_s3.s3.multipart import KnownPart
from dcp_s3.s3.operations import checksum_arguments
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import MIN_PART_SIZE, Settings
from dcp_s3.store import Upload
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault

PART = MIN_PART_SIZE
KEY = "run/ke y+ü%"


def list_uploads(bucket: S3Store, key: str) -> list[str]:
    """Of exactly this key."""
    return [each.upload_id for each in bucket.uploads(key) if each.key == key]


def list_parts(bucket: S3Store, key: str, upload_id: str) -> dict[int, KnownPart]:
    return multipart.find_parts(bucket, key).get(upload_id, {})


def begin(bucket: S3Store, key: str, parts: dict[int, bytes]) -> str:
    algorithm = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
    upload_id: str = bucket.client.create_multipart_upload(Bucket=bucket.name, Key=key, **algorithm)["UploadId"]
    for number, data in parts.items():
        bucket.client.upload_part(
            Bucket=bucket.name, Key=key, UploadId=upload_id, PartNumber=number, Body=data,
            **checksum_arguments(bucket.settings, crc64nvme(data)),
        )  # fmt: skip
    return upload_id


def test_uploads_and_their_parts_are_found_and_aborted(bucket: str) -> None:
    target = S3Store(bucket, Settings())
    assert list_uploads(target, KEY) == []
    data = {1: random.Random(1).randbytes(PART), 2: random.Random(2).randbytes(100)}
    first, second = begin(target, KEY, data), begin(target, KEY, {})
    assert sorted(list_uploads(target, KEY)) == sorted([first, second])
    parts = list_parts(target, KEY, first)
    assert {number: part.size for number, part in parts.items()} == {1: PART, 2: 100}
    for number, part in parts.items():
        right, wrong = data[number], bytes(len(data[number]))

        def checks(data: bytes) -> dict[str, str]:
            return checksum_arguments(target.settings, crc64nvme(data))

        assert not part.matches(part.size, checks(wrong), [memoryview(wrong)])
        assert not part.matches(part.size - 1, checks(right[:-1]), [memoryview(right[:-1])])
        known_by_md5 = part.etag.strip('"') == hashlib.md5(right).hexdigest()
        if part.checksum or known_by_md5:
            assert part.matches(part.size, checks(right), [memoryview(right)])
    assert list_parts(target, KEY, second) == {}
    target.abort(Upload(KEY, first))
    assert list_uploads(target, KEY) == [second]
    assert list_parts(target, KEY, first) == {}
    assert multipart.abort_quietly(target, KEY, second)
    assert list_uploads(target, KEY) == []
    target.abort(Upload(KEY, second))  # it is gone: as asked for


def test_uploads_of_keys_that_only_begin_alike_are_not_taken(bucket: str) -> None:
    target = S3Store(bucket, Settings())
    longer, ours = begin(target, "run/a-and-more", {1: b"x"}), begin(target, "run/a", {1: b"x"})
    assert set(multipart.find_parts(target, "run/a")) == {ours}
    target.abort(Upload("run/a", ours))
    target.abort(Upload("run/a-and-more", longer))


@pytest.mark.servers("memory", "moto", "rgw")
def test_a_bucket_that_is_missing_is_told_apart_from_an_upload_that_is(bucket: str) -> None:
    target = S3Store("no-such-" + bucket, Settings())
    with pytest.raises(errors.BucketNotFoundError):
        list_uploads(target, KEY)
    with pytest.raises(errors.BucketNotFoundError):
        list_parts(target, KEY, "x")
    with pytest.raises(errors.BucketNotFoundError):
        target.abort(Upload(KEY, "x"))


def by_pages(monkeypatch: pytest.MonkeyPatch, target: S3Store, method: str, **limit: int) -> list[dict[str, Any]]:
    """Let S3 answer in small pages; returns the requests."""
    asked: list[dict[str, Any]] = []
    real = getattr(target.client, method)

    def limited(**arguments: Any) -> Any:
        asked.append(arguments)
        return real(**{**arguments, **limit})

    monkeypatch.setattr(target.client, method, limited)
    return asked


@pytest.mark.servers("memory", "rgw")  # moto takes no notice of the limit, or leaves parts out
def test_uploads_and_parts_of_many_pages_are_all_found(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = S3Store(bucket, Settings())
    uploads = sorted(begin(target, KEY, {}) for _ in range(4))
    full = begin(target, KEY, {number: bytes(number) for number in (1, 2, 3, 5, 8)})
    more = begin(target, KEY + "-more", {})
    with monkeypatch.context() as patch:
        asked = by_pages(patch, target, "list_multipart_uploads", MaxUploads=2)
        assert sorted(list_uploads(target, KEY)) == sorted([*uploads, full])
        assert len(asked) == 3
        by_pages(patch, target, "list_parts", MaxParts=2)
        parts = list_parts(target, KEY, full)
        assert {number: part.size for number, part in parts.items()} == {1: 1, 2: 2, 3: 3, 5: 5, 8: 8}
    for upload_id in (*uploads, full):
        target.abort(Upload(KEY, upload_id))
    target.abort(Upload(KEY + "-more", more))


def test_an_answer_that_is_lost_costs_nothing(faulty: FaultyServer) -> None:
    target = S3Store(BUCKET, Settings())
    upload_id = begin(target, KEY, {1: b"x"})
    assert faulty.once("ListMultipartUploads", Fault.reset()) == []
    assert list_uploads(target, KEY) == [upload_id]
    assert faulty.once("ListParts", Fault.error(503, "SlowDown")) == []
    assert list(list_parts(target, KEY, upload_id)) == [1]
    seen = faulty.once("AbortMultipartUpload", Fault.apply_then_reset())
    target.abort(Upload(KEY, upload_id))
    assert seen == [KEY]
    assert faulty.s3.open_uploads(BUCKET) == []


def test_a_refusal_is_an_error_and_quietly_a_warning(faulty: FaultyServer, caplog: pytest.LogCaptureFixture) -> None:
    target = S3Store(BUCKET, Settings())
    faulty.rule = lambda _: Fault.error(403, "AccessDenied")
    with pytest.raises(errors.AccessDeniedError):
        list_uploads(target, KEY)
    assert list_parts(target, KEY, "x") == {}
    assert "does not list multipart uploads" in caplog.text
    with pytest.raises(errors.AccessDeniedError):
        target.abort(Upload(KEY, "x"))
    assert not multipart.abort_quietly(target, KEY, "x")
    assert "stays open" in caplog.text


def test_a_part_is_known_by_a_checksum_or_else_by_the_md5_in_its_etag() -> None:
    data = b"some bytes"
    views, md5 = [memoryview(data)[:4], memoryview(data)[4:]], hashlib.md5(data).hexdigest()
    size, sums = len(data), {"ChecksumCRC64NVME": "right"}
    assert KnownPart("etag", size, "right").matches(size, sums, views)
    assert not KnownPart(f'"{md5}"', size, "wrong").matches(size, sums, views)
    assert not KnownPart("etag", size + 1, "right").matches(size, sums, views)
    assert KnownPart(f'"{md5}"', size, None).matches(size, sums, views)
    assert not KnownPart('"etag"', size, None).matches(size, sums, views)
    assert KnownPart(md5, size, "right").matches(size, {}, views)
