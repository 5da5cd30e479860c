"""Objects from buffers: in parts, checked, and never half there."""

import gc
import mmap
import random
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_s3 import errors
from dcp_s3.limit import Cancelled, Limit
from dcp_s3.memory import Piece, crc64nvme
from dcp_s3.s3 import multipart
from dcp_s3.s3.body import Chunks
from dcp_s3.s3.multipart import MAX_PARTS, choose_part_size
from dcp_s3.s3.store import S3Store
from dcp_s3.s3.upload import Uploader
from dcp_s3.settings import MAX_PART_SIZE, MIN_PART_SIZE, Settings
from dcp_s3.store import Upload
from tests.faulty import FaultyServer
from tests.memory_s3 import Fault
from tests.s3.waiting import until

PART = MIN_PART_SIZE


@given(st.integers(0, 40 * 2**40), st.integers(MIN_PART_SIZE, MAX_PART_SIZE))
def test_the_part_size_grows_only_where_10000_parts_would_not_do(size: int, wished: int) -> None:
    chosen = choose_part_size(size, wished)
    assert wished <= chosen <= MAX_PART_SIZE
    assert -(-size // chosen) <= MAX_PARTS * 9 // 10 + 1
    if chosen > wished:
        assert -(-size // wished) > MAX_PARTS * 8 // 10


def test_an_object_that_s3_cannot_hold() -> None:
    with pytest.raises(errors.SettingsError, match="max_objects"):
        choose_part_size(60 * 2**40, 32 * 2**20)


def make_bucket(name: str, **settings: Any) -> S3Store:
    return S3Store(name, Settings(**{"part_size": PART, "concurrency": 3, **settings}))


def upload(target: S3Store, data: bytes, key: str = "k") -> None:
    target.put_stream(key, len(data), [Piece.of(data)])


DATA = random.Random(1).randbytes(4 * PART + 99)


def test_an_object_of_one_part_is_one_request(faulty: FaultyServer) -> None:
    for data in (b"", DATA[:PART]):
        upload(make_bucket("bucket"), data)
    assert faulty.s3.counters.requests == {"PutObject": 2}


PASSING = [
    Fault.error(503, "SlowDown"), Fault.error(500, "InternalError"), Fault.reset(), Fault.reset_request(100_000),
    Fault.apply_then_reset(),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_faults_that_pass_do_not_harm(faulty: FaultyServer, seed: int) -> None:
    rng, hits = random.Random(seed), set[Fault | None]()

    def rule(_: Any) -> Fault | None:
        hits.add(fault := rng.choice([*PASSING, *[None] * 8]))
        return fault

    target = make_bucket("bucket", retry_attempts=20)
    faulty.rule = rule
    for round_ in range(6):
        upload(target, DATA, f"k{round_}")
        assert faulty.s3.read("bucket", f"k{round_}") == DATA
    assert hits - {None}


@pytest.mark.parametrize("operation", ["UploadPart", "CompleteMultipartUpload", "CreateMultipartUpload", "PutObject"])
def test_a_failure_leaves_no_upload_and_no_object(faulty: FaultyServer, operation: str) -> None:
    def rule(request: Any) -> Any:
        return Fault.error(503, "SlowDown") if request.operation == operation and "bad" in request.key else None

    faulty.rule = rule
    target = make_bucket("bucket", retry_attempts=2)

    def save() -> None:
        with Uploader(target) as uploader:
            uploader.put_stream("good", len(DATA), [Piece.of(DATA)])
            uploader.put_stream("bad", len(DATA), [Piece.of(b"small" if operation == "PutObject" else DATA)])

    with pytest.raises(errors.TransferError, match=operation):
        save()
    assert faulty.s3.open_uploads("bucket") == []
    assert faulty.s3.objects("bucket") == {}
    assert not [t for t in threading.enumerate() if t.name.startswith("dcp_s3-upload")]


def test_an_object_that_is_put_again_leaves_no_upload_of_the_first_try(faulty: FaultyServer) -> None:
    refused = faulty.once("UploadPart", Fault.error(500, "InternalError"))
    with Uploader(make_bucket("bucket", retry_attempts=1), isolated=True) as uploader:
        with pytest.raises(errors.TransferError):
            uploader.put_stream("k", len(DATA), [Piece.of(DATA)])
        again = uploader.put_stream("k", len(DATA), [Piece.of(DATA)], last_resort=True)
    assert refused
    assert again.crc64nvme == crc64nvme(DATA)
    assert (faulty.s3.read("bucket", "k"), faulty.s3.open_uploads("bucket")) == (DATA, [])


@pytest.mark.parametrize("is_early", [False, True], ids=["all submitted", "more to come"])
def test_the_error_of_a_part_does_not_keep_its_memory(faulty: FaultyServer, is_early: bool) -> None:
    failing = faulty.once("UploadPart", Fault.error(500, "InternalError"))

    def pieces() -> Iterator[Piece]:
        memory = mmap.mmap(-1, len(DATA))
        kept.append(weakref.ref(memory))
        for start in range(0, len(DATA), PART) if is_early else ():
            if start == 2 * PART:
                until(lambda: bool(failing))
                time.sleep(0.2)  # until the answer has arrived
            yield Piece.of(memoryview(memory)[start : start + PART])
        if not is_early:
            yield Piece.of(memory)

    kept: list[weakref.ref[mmap.mmap]] = []
    with Uploader(make_bucket("bucket", retry_attempts=1), isolated=True) as uploader:
        with pytest.raises(errors.TransferError) as failed:
            uploader.put_stream("k", len(DATA), pieces())
        until(lambda: gc.collect() >= 0 and kept[0]() is None)  # the other parts end by themselves
        assert failed.value.__traceback__ is not None


def test_damage_on_the_wire_is_noticed_and_repaired(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first body is damaged behind the checksum; the server rejects it, the second is right."""
    damaged, original = list[int](), Chunks.__iter__

    def chunks(self: Any) -> Any:
        sent = b"".join(original(self))
        if len(sent) > 1000 and not damaged:
            damaged.append(1)
            sent = sent[:500] + bytes([sent[500] ^ 1]) + sent[501:]
        yield sent

    monkeypatch.setattr(Chunks, "__iter__", chunks)
    upload(make_bucket("bucket"), DATA)
    assert damaged
    assert faulty.s3.read("bucket", "k") == DATA


def test_a_batch_that_is_stopped_cancels_what_is_under_way_and_what_begins_later(faulty: FaultyServer) -> None:
    under_way, stopped = threading.Event(), threading.Event()

    def pieces() -> Iterator[Piece]:
        under_way.set()
        assert stopped.wait(10)
        yield Piece.of(DATA)
        yield Piece.of(DATA)

    def put(uploader: Uploader, key: str, data: Iterable[Piece]) -> None:
        with pytest.raises(Cancelled):
            uploader.put_stream(key, 2 * len(DATA), data)

    with Uploader(make_bucket("bucket"), isolated=True) as uploader, ThreadPoolExecutor(1) as pool:
        before = pool.submit(put, uploader, "before", pieces())
        assert under_way.wait(10)
        uploader.stop()
        stopped.set()
        before.result()
        put(uploader, "after", [Piece.of(b"x")])
    assert faulty.s3.objects("bucket") == {}


@pytest.mark.parametrize(
    ("answer", "refusing"),
    [
        ((501, "NotImplemented"), ()),
        ((400, "InvalidRequest"), ("UploadPart",)),
        ((400, "InvalidArgument"), ("CompleteMultipartUpload",)),
        ((400, "InvalidRequest"), ("PutObject",)),
    ],
)
def test_a_store_that_refuses_checksums_is_written_to_without(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture, answer: tuple[int, str], refusing: tuple[str, ...]
) -> None:
    refused: list[str] = []

    def rule(request: Any) -> Fault | None:
        sent = any(name.startswith("x-amz-checksum-") and name != "x-amz-checksum-mode" for name in request.headers)
        if not sent or (refusing and request.operation not in refusing):
            return None
        refused.append(request.operation)
        return Fault.error(*answer)

    faulty.rule = rule
    target, counts = make_bucket("bucket"), []
    for key in "ab":
        for data in (DATA, DATA[:100]):
            stored = target.put_stream(key, len(data), [Piece.of(data)])
            assert stored.crc64nvme == crc64nvme(data), "known all the same"
            assert faulty.s3.read("bucket", key) == data
        counts.append(len(refused))
    assert 0 < counts[0] == counts[1], "it is remembered"
    assert "refuses checksums" in caplog.text
    if "PutObject" not in refusing:  # one that was asked for is not left out
        with pytest.raises(errors.StorageError):
            upload(make_bucket("bucket", checksum="crc64nvme"), DATA, "c")
        assert "c" not in faulty.s3.objects("bucket")
        assert faulty.s3.open_uploads("bucket") == []


def test_waiting_for_bandwidth_is_not_s3s_slowness(faulty: FaultyServer) -> None:
    faulty.once("PutObject", Fault.apply_then_reset())  # after the body
    data = bytes(2**20)
    target = make_bucket("bucket", max_bandwidth=2**20).within(Limit(patience=0.5, hang=0.5))
    began = time.monotonic()
    with Uploader(target, part_size=PART, isolated=True) as uploader:
        uploader.put_stream("k", len(data), [Piece.of(data)])
    assert time.monotonic() - began > 1
    assert faulty.s3.read("bucket", "k") == data


KEY = "run/ke y+ü%"


def begin(bucket: S3Store, key: str) -> str:
    return str(bucket.client.create_multipart_upload(Bucket=bucket.name, Key=key)["UploadId"])


def opened(bucket: S3Store) -> list[tuple[str, str]]:
    return sorted((each.key, each.upload_id) for each in bucket.uploads("run/ke"))


@pytest.mark.servers("memory", "rgw", "rclone")  # moto takes no notice of the limit
def test_open_uploads_of_many_pages_are_found_and_aborted(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dcp_s3.s3.listing.PAGE_SIZE", 2)
    target = make_bucket(bucket)
    assert opened(target) == []
    uploads = sorted([(KEY, begin(target, KEY)) for _ in range(4)] + [(KEY + "-more", begin(target, KEY + "-more"))])
    other = begin(target, "run/other")
    assert opened(target) == uploads
    for _ in range(2):  # one that is gone: as asked for
        for key, upload_id in uploads:
            target.abort(Upload(key, upload_id))
    assert opened(target) == []
    assert multipart.abort_quietly(target, "run/other", other)


def test_refusals_of_uploads_are_errors_and_quietly_a_warning(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    target, nowhere = make_bucket("bucket"), make_bucket("no-such-bucket")
    for call in (lambda: nowhere.uploads(KEY), lambda: nowhere.abort(Upload(KEY, "x"))):
        with pytest.raises(errors.BucketNotFoundError):
            call()
    upload_id = begin(target, KEY)
    faulty.rule = lambda _: Fault.error(403, "AccessDenied")
    with pytest.raises(errors.AccessDeniedError):
        target.uploads(KEY)
    assert not multipart.abort_quietly(target, KEY, upload_id)
    assert "stays open" in caplog.text
    faulty.once("AbortMultipartUpload", Fault.apply_then_reset())
    target.abort(Upload(KEY, upload_id))
    assert faulty.s3.open_uploads("bucket") == []
