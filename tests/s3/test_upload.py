"""Objects from buffers, and those that S3 makes of ranges of others: in parts, checked, and never half there."""

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
from dcp_s3.s3.bucket import Bucket, Quirk
from dcp_s3.s3.multipart import MAX_PARTS, choose_part_size
from dcp_s3.s3.store import S3Store
from dcp_s3.s3.upload import Uploader
from dcp_s3.settings import MAX_PART_SIZE, MIN_PART_SIZE, Settings
from dcp_s3.store import CopyRange, ObjectHead, Upload
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault

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


def test_small_objects_take_one_request(memory_server: Any, bucket: str) -> None:
    target = make_bucket(bucket)
    target.client  # noqa: B018 - made before counting
    memory_server.handle.reset_counters()
    with Uploader(target) as uploader:
        for name in "abc":
            uploader.put_stream(name, PART, [Piece.of(bytes(PART))])
    assert dict(memory_server.handle.counters.requests) == {"PutObject": 3}


def upload(target: S3Store, data: bytes, key: str = "k") -> None:
    target.put_stream(key, len(data), [Piece.of(data)])


DATA = random.Random(1).randbytes(4 * PART + 99)


PASSING = [
    Fault.error(503, "SlowDown"), Fault.error(500, "InternalError"), Fault.reset(), Fault.reset_request(100_000),
    Fault.apply_then_reset(),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_faults_that_pass_do_not_harm(faulty: FaultyServer, seed: int) -> None:
    rng, lock, hits = random.Random(seed), threading.Lock(), list[Fault]()

    def rule(_: Any) -> Fault | None:
        with lock:
            fault = rng.choice([*PASSING, *[None] * 8])
            hits.extend([fault] if fault else [])
            return fault

    target = make_bucket("bucket", retry_attempts=20)
    faulty.rule = rule
    for round_ in range(6):
        upload(target, DATA, f"k{round_}")
    assert hits
    assert all(faulty.s3.read("bucket", f"k{round_}") == DATA for round_ in range(6))


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


def test_the_error_of_a_part_does_not_keep_its_memory(faulty: FaultyServer) -> None:
    faulty.once("UploadPart", Fault.error(500, "InternalError"))

    def pieces() -> Iterator[Piece]:
        memory = mmap.mmap(-1, len(DATA))
        kept.append(weakref.ref(memory))
        yield Piece.of(memory)

    kept: list[weakref.ref[mmap.mmap]] = []
    with Uploader(make_bucket("bucket", retry_attempts=1), isolated=True) as uploader:
        with pytest.raises(errors.TransferError) as failed:
            uploader.put_stream("k", len(DATA), pieces())
        deadline = time.monotonic() + 10
        while kept[0]() is not None and time.monotonic() < deadline:  # the other parts end by themselves
            time.sleep(0.01)
            gc.collect()
        assert failed.value.__traceback__ is not None
        assert kept[0]() is None


def test_damage_on_the_wire_is_noticed_and_repaired(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first body is damaged behind the checksum; the server rejects it, the second is right."""
    from dcp_s3.s3 import body

    damaged: list[int] = []
    original = body.Chunks.__iter__

    def chunks(self: Any) -> Any:
        sent = b"".join(original(self))
        if len(sent) > 1000 and not damaged:
            damaged.append(1)
            sent = sent[:500] + bytes([sent[500] ^ 1]) + sent[501:]
        yield sent

    monkeypatch.setattr(body.Chunks, "__iter__", chunks)
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
    assert faulty.once("AbortMultipartUpload", Fault.apply_then_reset()) == []
    target.abort(Upload(KEY, upload_id))
    assert faulty.s3.open_uploads("bucket") == []


# --- copies ------------------------------------------------------------------------------------------

SOURCES = {key: random.Random(key).randbytes(size) for key, size in {"a": 3 * PART, "b": 1000}.items()}
A, B = SOURCES["a"], SOURCES["b"]


def make_store(bucket: str = BUCKET, **settings: Any) -> S3Store:
    store = S3Store(bucket, Settings(**{"part_size": PART, "retry_attempts": 3, **settings}))
    for key, data in SOURCES.items():
        store.put_stream(key, len(data), [Piece.of(data)])
    return store


def ranges(*spans: tuple[str, int, int]) -> tuple[list[CopyRange], bytes]:
    """Ranges, and the bytes of the object that they make."""
    made = [CopyRange(key, start, stop, len(SOURCES[key]), crc64nvme(SOURCES[key])) for key, start, stop in spans]
    return made, b"".join(SOURCES[key][start:stop] for key, start, stop in spans)


WHOLE = ranges(("b", 0, 1000))
JOINED = ranges(("a", 7, PART + 7), ("a", 2 * PART, 3 * PART), ("b", 3, 999))


def copy_to(store: S3Store, key: str, what: tuple[list[CopyRange], bytes], crc: int | None = None) -> bool:
    with Uploader(store) as uploader:
        made = uploader.copy(key, what[0], crc64nvme(what[1]) if crc is None else crc)
        assert not made or uploader.sent == len(what[1])
    return made


@pytest.mark.servers("memory", "moto", "rgw")  # not rclone, which does not copy parts
@pytest.mark.parametrize("what", [WHOLE, JOINED], ids=["whole", "joined"])
def test_a_copy_has_the_bytes(bucket: str, what: tuple[list[CopyRange], bytes]) -> None:
    store = make_store(bucket)
    assert copy_to(store, "new", what)
    assert store.get("new").data == what[1]


def test_large_objects_are_copied_in_parts(bucket: str, memory_server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multipart, "COPIED_PART_SIZE", PART)
    store, what = make_store(bucket), ranges(("a", 0, len(A)))
    memory_server.handle.reset_counters()
    assert copy_to(store, "new", what)
    assert store.get("new").data == A
    assert memory_server.handle.counters.requests["UploadPartCopy"] == 3


@pytest.mark.parametrize("what", [WHOLE, JOINED], ids=["whole", "joined"])
@pytest.mark.parametrize("change", ["deleted", "replaced", "other_size"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_is_gone_is_not_copied(
    faulty: FaultyServer, what: tuple[list[CopyRange], bytes], change: str, when: str
) -> None:
    store = make_store()

    def happen() -> None:
        faulty.rule = lambda _: None
        if change == "deleted":
            store.delete(["b"])
        else:
            store.put("b", bytes(1000 if change == "replaced" else 2000))

    def rule(request: Any) -> Fault | None:
        if request.operation in ("CopyObject", "CreateMultipartUpload"):
            happen()
        return None

    if when == "before":
        happen()
    else:
        faulty.rule = rule
    assert not copy_to(store, "new", what)
    assert not store.exists("new")
    assert not faulty.s3.open_uploads(BUCKET)


@pytest.mark.parametrize(
    "operation", ["HeadObject", "CopyObject", "CreateMultipartUpload", "UploadPartCopy", "CompleteMultipartUpload"]
)
@pytest.mark.parametrize("fault", [Fault.reset(), Fault.apply_then_reset(), Fault.error(503, "SlowDown")], ids=str)
def test_faults_that_pass_do_not_harm_copies(faulty: FaultyServer, operation: str, fault: Fault) -> None:
    store, what = make_store(), WHOLE if operation.endswith("Object") else JOINED
    seen = faulty.once(operation, fault)
    assert copy_to(store, "new", what)
    assert seen
    assert store.get("new").data == what[1]


@pytest.mark.parametrize("operation", ["HeadObject", "CreateMultipartUpload", "UploadPartCopy"])
@pytest.mark.parametrize("status", [403, 500, 501])
def test_what_s3_refuses_is_sent(
    faulty: FaultyServer, operation: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store()
    faulty.rule = lambda request: Fault.error(status, "NotImplemented") if request.operation == operation else None
    assert not copy_to(store, "new", JOINED)
    assert "s3://bucket/new is sent, as S3 does not copy it" in caplog.text
    faulty.rule = lambda _: None
    assert not faulty.s3.open_uploads(BUCKET)
    assert multipart.can_copy(store) == (status != 501), "a store that does not copy is not asked again"


def test_a_store_that_answers_copies_of_parts_without_an_etag_is_not_asked_again(faulty: FaultyServer) -> None:
    """As rclone does."""
    store, empty = make_store(), Fault.forge(200, b"<CopyPartResult></CopyPartResult>")
    faulty.rule = lambda request: empty if request.operation == "UploadPartCopy" else None
    assert not copy_to(store, "new", JOINED)
    assert not multipart.can_copy(store)
    assert not faulty.s3.open_uploads(BUCKET)


@pytest.mark.parametrize("what", [WHOLE, JOINED], ids=["whole", "joined"])
def test_a_copy_that_is_not_what_it_should_be_is_deleted(
    faulty: FaultyServer, what: tuple[list[CopyRange], bytes]
) -> None:
    store = make_store()
    assert not copy_to(store, "new", what, crc=1)
    assert not store.exists("new")
    assert not faulty.s3.open_uploads(BUCKET)


def test_where_s3_tells_no_checksum_the_copy_is_read(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(bucket)
    head = Bucket.head

    def without(self: Bucket, key: str, *, checksum: bool = False) -> ObjectHead:
        return head(self, key)

    def is_good(key: str, size: int, crc: int) -> bool:
        return multipart.is_good(store, key, size, crc, None, threading.Semaphore(2))

    monkeypatch.setattr(Bucket, "head", without)
    assert is_good("a", len(A), crc64nvme(A))
    assert is_good("b", len(B), crc64nvme(B))
    assert not is_good("a", len(A), crc64nvme(A) ^ 1)
    assert not is_good("b", len(B) + 1, crc64nvme(B))
    monkeypatch.setattr(multipart, "_BLOCK", 100_000)
    assert is_good("a", len(A), crc64nvme(A))


@pytest.mark.parametrize("stopped", [False, True])
def test_a_batch_that_fails_or_is_stopped_leaves_no_copies(faulty: FaultyServer, stopped: bool) -> None:
    uploader = Uploader(make_store())
    if stopped:
        faulty.rule = lambda request: uploader.stop() if request.operation == "UploadPartCopy" else None

    def save() -> None:
        with uploader:
            assert uploader.copy("one", WHOLE[0], crc64nvme(WHOLE[1]))
            assert uploader.copy("two", JOINED[0], crc64nvme(JOINED[1]))
            raise ValueError

    with pytest.raises(Cancelled if stopped else ValueError):
        save()
    assert set(faulty.s3.objects(BUCKET)) == set(SOURCES)
    assert not faulty.s3.open_uploads(BUCKET)


def test_a_deadline_ends_copies(faulty: FaultyServer) -> None:
    store = make_store(stall_timeout=0.5)
    faulty.rule = lambda request: Fault.reset() if request.operation == "CopyObject" else None
    store = S3Store(BUCKET, store.settings.model_copy(update={"retry_attempts": 100}))
    with pytest.raises(errors.DeadlineExceededError):
        copy_to(store, "new", WHOLE)


def test_copies_are_encrypted_and_stored_as_what_is_sent(faulty: FaultyServer) -> None:
    arguments = {"sse": "aws:kms", "sse_kms_key_id": "key", "storage_class": "STANDARD_IA", "requester_pays": True}
    store = make_store(**arguments)
    seen: dict[str, dict[str, str]] = {}
    faulty.rule = lambda request: seen.setdefault(request.operation, dict(request.headers)) and None
    assert copy_to(store, "one", WHOLE)
    assert copy_to(store, "two", JOINED)
    for operation in ("CopyObject", "CreateMultipartUpload"):
        assert seen[operation]["x-amz-server-side-encryption"] == "aws:kms"
        assert seen[operation]["x-amz-storage-class"] == "STANDARD_IA"
    for operation in ("CopyObject", "UploadPartCopy"):
        assert seen[operation]["x-amz-copy-source-if-match"]
        assert seen[operation]["x-amz-request-payer"] == "requester"


def test_a_bucket_of_s3_express_copies_nothing(faulty: FaultyServer) -> None:
    store = S3Store("bucket--use1-az4--x-s3", Settings())
    assert not multipart.can_copy(store)
    faulty.rule = lambda _: pytest.fail("no request")
    with Uploader(store) as uploader:
        assert not uploader.copy("new", WHOLE[0], 0)


def test_a_store_that_refuses_checksums_of_copies_still_checks_what_is_sent(faulty: FaultyServer) -> None:
    def rule(request: Any) -> Fault | None:
        names = {name.lower() for name in request.headers}
        refused = request.operation == "CopyObject" and "x-amz-checksum-algorithm" in names
        return Fault.error(501, "NotImplemented") if refused else None

    store, faulty.rule = make_store(), rule
    assert copy_to(store, "new", WHOLE)
    assert store.get("new").data == WHOLE[1]
    assert Quirk.NO_CHECKSUMS not in store.known.quirks
    assert multipart.can_copy(store)


def test_an_upload_of_a_copy_that_stays_open_is_known(faulty: FaultyServer) -> None:
    store, refused = make_store(), ("UploadPartCopy", "AbortMultipartUpload")
    faulty.rule = lambda request: Fault.error(403, "AccessDenied") if request.operation in refused else None
    with Uploader(store) as uploader:
        assert not uploader.copy("new", JOINED[0], crc64nvme(JOINED[1]))
    assert uploader.unclean == {"new"}, "whoever has a journal keeps it"


def test_copies_that_are_read_share_the_memory_for_it(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, slots, lock, head = make_store(bucket), threading.Semaphore(3), threading.Lock(), Bucket.head
    monkeypatch.setattr(Bucket, "head", lambda self, key, *, checksum: head(self, key))
    now: list[int] = []
    most: list[int] = []

    def read(*_: Any) -> None:
        with lock:
            now.append(1)
            most.append(len(now))
        time.sleep(0.01)
        with lock:
            now.pop()

    monkeypatch.setattr(multipart, "read", read)
    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(multipart.is_good, store, "a", len(A), 0, None, slots) for _ in range(4)]:
            each.result()
    assert max(most) == 3
