"""Ranged GETs into memory; broken bodies resume where they broke."""

import random
import threading
from typing import Any

import pytest

from dcp_s3 import errors
from dcp_s3.checksum import crc64nvme
from dcp_s3.limit import Cancelled, Limit
from dcp_s3.memory import ReadTarget
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.faulty import FaultyServer
from tests.memory_s3 import Fault

DATA = random.Random(3).randbytes(3_000_000)


@pytest.fixture
def stored(bucket: str) -> S3Store:
    target = S3Store(bucket, Settings())
    target.put("dir/ke y+%", DATA)
    return target


def test_connections_are_used_again(memory_server: Any, stored: S3Store) -> None:
    """A pool that had to open a new connection for each request would count them."""
    memory = bytearray(1000)
    manager = stored.client._endpoint.http_session._manager
    pool = manager.connection_from_url(stored.settings.endpoint_url)
    before = pool.num_connections
    for start in range(50):
        stored.read("dir/ke y+%", start, [ReadTarget(memoryview(memory))])
    assert pool.num_connections - before <= 2


def put(faulty: FaultyServer, data: bytes = DATA, **settings: Any) -> S3Store:
    target = S3Store("bucket", Settings(**settings))
    target.put("k", data)
    faulty.s3.reset_counters()
    return target


def test_a_broken_body_resumes_at_the_byte_reached(faulty: FaultyServer) -> None:
    target = put(faulty)
    ranges: list[str] = []

    def rule(request: Any) -> Fault | None:
        ranges.append(request.range)
        return Fault.truncate(after_bytes=1_000_000) if len(ranges) < 3 else None

    faulty.rule = rule
    memory = [bytearray(500_000), bytearray(len(DATA) - 500_000)]
    targets = [ReadTarget(memoryview(m), checksum=True) for m in memory]
    target.read("k", 0, targets)
    assert b"".join(memory) == DATA
    assert [t.crc for t in targets] == [crc64nvme(bytes(m)) for m in memory]
    assert ranges == [f"bytes={n}-{len(DATA) - 1}" for n in (0, 1_000_000, 2_000_000)]


def test_progress_is_not_counted_as_failure(faulty: FaultyServer) -> None:
    """Ten breaks, three attempts: each attempt moved on, so the download goes on."""
    target = put(faulty, retry_attempts=3)
    faulty.rule = lambda _: Fault.truncate(after_bytes=300_000)
    memory = bytearray(len(DATA))
    target.read("k", 0, [ReadTarget(memoryview(memory))])
    assert memory == DATA


def test_without_progress_the_attempts_run_out(faulty: FaultyServer) -> None:
    target = put(faulty, retry_attempts=3)
    faulty.rule = lambda _: Fault.truncate(after_bytes=0)
    with pytest.raises(errors.TransferError, match="after 3 attempts") as failure:
        target.read("k", 0, [ReadTarget(memoryview(bytearray(len(DATA))))])
    assert isinstance(failure.value.__cause__, Exception)


def test_an_object_replaced_meanwhile_is_not_mixed(faulty: FaultyServer) -> None:
    target = put(faulty)
    other = S3Store("bucket", Settings(concurrency=1))
    seen: list[int] = []

    def rule(request: Any) -> Fault | None:
        if request.operation != "GetObject":
            return None
        seen.append(1)
        if len(seen) == 1:
            return Fault.truncate(after_bytes=1000)
        if len(seen) == 2:
            other.put("k", b"x" * len(DATA))
            return Fault.error(503, "SlowDown")
        return None

    faulty.rule = rule
    with pytest.raises(errors.PreconditionFailedError, match="changed by someone else"):
        target.read("k", 0, [ReadTarget(memoryview(bytearray(len(DATA))))])


def test_cancelling(faulty: FaultyServer) -> None:
    cancel = threading.Event()
    cancel.set()
    target = put(faulty).within(Limit(cancel=cancel))
    with pytest.raises(Cancelled):
        target.read("k", 0, [ReadTarget(memoryview(bytearray(10)))])
