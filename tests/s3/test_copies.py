"""Objects that S3 makes of ranges of others: in parts, checked, and never half there."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dcp_s3 import errors
from dcp_s3.limit import Cancelled
from dcp_s3.memory import Piece, crc64nvme
from dcp_s3.s3 import multipart
from dcp_s3.s3.bucket import Bucket, Quirk
from dcp_s3.s3.store import S3Store
from dcp_s3.s3.upload import Uploader
from dcp_s3.settings import MIN_PART_SIZE, Settings
from dcp_s3.store import CopyRange
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.servers import S3Server

PART = MIN_PART_SIZE

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
EACH = pytest.mark.parametrize("what", [WHOLE, JOINED], ids=["whole", "joined"])


def copy_to(store: S3Store, key: str, what: tuple[list[CopyRange], bytes], crc: int | None = None) -> bool:
    with Uploader(store) as uploader:
        made = uploader.copy(key, what[0], crc64nvme(what[1]) if crc is None else crc)
        assert not made or uploader.sent == len(what[1])
    return made


@pytest.mark.servers("memory", "moto", "rgw")  # not rclone, which does not copy parts
@pytest.mark.parametrize(
    ("what", "parts"), [(WHOLE, 0), (JOINED, 3), (ranges(("a", 0, len(A))), 3)], ids=["whole", "joined", "large"]
)
def test_a_copy_has_the_bytes_and_large_ones_are_made_in_parts(
    bucket: str, server: S3Server, what: Any, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multipart, "COPIED_PART_SIZE", PART)
    store = make_store(bucket)
    if server.handle is not None:
        server.handle.reset_counters()
    assert copy_to(store, "new", what)
    assert store.get("new").data == what[1]
    assert server.handle is None or server.handle.counters.requests.get("UploadPartCopy", 0) == parts


@EACH
@pytest.mark.parametrize("change", ["deleted", "replaced", "other_size"])
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_what_is_gone_is_not_copied(faulty: FaultyServer, what: Any, change: str, when: str) -> None:
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


@pytest.mark.parametrize(
    ("operations", "fault", "is_asked_again"),
    [
        *(
            ([operation], Fault.error(status, "NotImplemented"), status != 501)
            for operation in ("HeadObject", "CreateMultipartUpload", "UploadPartCopy")
            for status in (403, 500, 501)
        ),
        (["UploadPartCopy"], Fault.forge(200, b"<CopyPartResult></CopyPartResult>"), False),  # as rclone answers
        (["UploadPartCopy", "AbortMultipartUpload"], Fault.error(403, "AccessDenied"), True),
    ],
)
def test_what_s3_refuses_is_sent(
    faulty: FaultyServer, operations: list[str], fault: Fault, is_asked_again: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = make_store()
    faulty.rule = lambda request: fault if request.operation in operations else None
    with Uploader(store) as uploader:
        assert not uploader.copy("new", JOINED[0], crc64nvme(JOINED[1]))
    assert "s3://bucket/new is sent, as S3 does not copy it" in caplog.text
    assert multipart.can_copy(store) == is_asked_again
    left = ["new"] if "AbortMultipartUpload" in operations else []
    assert faulty.s3.open_uploads(BUCKET) == left
    assert uploader.unclean == set(left), "whoever has a journal keeps it"


@EACH
def test_a_copy_that_is_not_what_it_should_be_is_deleted(faulty: FaultyServer, what: Any) -> None:
    store = make_store()
    assert not copy_to(store, "new", what, crc=1)
    assert not store.exists("new")
    assert not faulty.s3.open_uploads(BUCKET)


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 tells no checksum."""
    head = Bucket.head
    monkeypatch.setattr(Bucket, "head", lambda self, key, *, checksum: head(self, key))


@pytest.mark.usefixtures("untold")
def test_where_s3_tells_no_checksum_the_copy_is_read(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store(bucket)

    def is_good(key: str, size: int, crc: int) -> bool:
        return multipart.is_good(store, key, size, crc, None, threading.Semaphore(2))

    assert is_good("a", len(A), crc64nvme(A))
    assert is_good("b", len(B), crc64nvme(B))
    assert not is_good("a", len(A), crc64nvme(A) ^ 1)
    assert not is_good("b", len(B) + 1, crc64nvme(B))
    monkeypatch.setattr(multipart, "_BLOCK", 100_000)
    assert is_good("a", len(A), crc64nvme(A))


@pytest.mark.usefixtures("untold")
def test_copies_that_are_read_share_the_memory_for_it(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store, slots, now, most = make_store(bucket), threading.Semaphore(3), list[int](), list[int]()

    def read(*_: Any) -> None:
        now.append(1)
        most.append(len(now))
        time.sleep(0.01)
        now.pop()

    monkeypatch.setattr(multipart, "read", read)
    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(multipart.is_good, store, "a", len(A), 0, None, slots) for _ in range(4)]:
            each.result()
    assert max(most) == 3


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
    store = make_store(stall_timeout=0.5, retry_attempts=100)
    faulty.rule = lambda request: Fault.reset() if request.operation == "CopyObject" else None
    with pytest.raises(errors.DeadlineExceededError):
        copy_to(store, "new", WHOLE)


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
