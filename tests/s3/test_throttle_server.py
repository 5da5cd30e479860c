"""Saves and loads against a server that throttles."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.memory import Piece, ReadTarget
from dcp_s3.s3 import connections, throttle
from dcp_s3.s3.download import fetch_into
from dcp_s3.s3.store import S3Store
from dcp_s3.s3.throttle import Gate, gate_of
from dcp_s3.settings import Settings
from dcp_s3.spill.background import stop_draining
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.s3.waiting import LONG, until

pytestmark = [
    pytest.mark.usefixtures("new_gates"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


@pytest.fixture
def eight_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process begins with eight, however many cores this machine has."""
    monkeypatch.setattr(connections, "first_width", lambda cores, ranks: 8)


def test_a_save_and_a_load_go_on_with_as_many_requests_as_s3_takes(faulty: FaultyServer) -> None:
    """The server takes three data requests at a time. Each tensor is an object of its own."""
    refused, lock = [0], threading.Lock()

    def rule(request: Any) -> Fault | None:
        if request.operation not in ("PutObject", "UploadPart", "GetObject"):
            return None
        if faulty.s3.in_flight <= 3:
            return Fault.delay(0.01)
        with lock:
            refused[0] += 1
        return Fault.error(503, "SlowDown")

    faulty.rule = rule
    settings = {"concurrency": 16, "retry_attempts": 100}
    state = {f"t{n}": torch.full((100,), float(n)) for n in range(60)}
    url = f"s3://{BUCKET}/run"
    dcp.save(state, storage_writer=S3StorageWriter(url, separate=list(state), settings=settings))
    found = {name: torch.zeros(100) for name in state}
    dcp.load(found, storage_reader=S3StorageReader(url, settings=settings))
    assert all(torch.equal(found[name], state[name]) for name in state)
    (gate,) = throttle.snapshot().values()
    assert gate.throttled == refused[0] > 0
    assert 1 <= gate.decreases <= gate.throttled
    assert (gate.in_flight, gate.waiting) == (0, 0)
    assert gate.limit < 16


def make_bucket(**settings: Any) -> S3Store:
    return S3Store(BUCKET, Settings(**settings))


def put(bucket: S3Store, key: str) -> None:
    bucket.put_stream(key, 3, [Piece.of(b"abc")])


def get(bucket: S3Store, key: str) -> bytes:
    memory = bytearray(3)
    fetch_into(bucket, key, 0, [ReadTarget(memoryview(memory))])
    return bytes(memory)


def gate_of_bucket(bucket: S3Store) -> Gate:
    return gate_of(bucket.settings.endpoint_url, bucket.name, bucket.settings.concurrency)


@pytest.mark.usefixtures("eight_connections")
def test_the_limit_grows_back(faulty: FaultyServer) -> None:
    bucket = make_bucket(concurrency=8)
    faulty.once("PutObject", Fault.error(503, "SlowDown"))
    put(bucket, "k")
    gate = gate_of_bucket(bucket)
    assert gate.state.limit == 4
    limits = []
    while gate.state.limit < 8:
        assert get(bucket, "k") == b"abc"
        limits.append(gate.state.limit)
        assert len(limits) < 100
    assert limits == sorted(limits)
    assert set(limits) == {4, 5, 6, 7, 8}


@pytest.mark.parametrize("first", ["upload", "download"])
def test_uploads_and_downloads_share_one_limit(faulty: FaultyServer, first: str) -> None:
    bucket = make_bucket(concurrency=2, endpoint_url=faulty.s3.endpoint_url)
    put(bucket, "k")
    gate, go_on, begun = gate_of_bucket(bucket), threading.Event(), threading.Event()
    gate.signal(time.monotonic())
    assert gate.state.limit == 1

    def rule(request: Any) -> None:
        if request.key == "held":
            begun.set()
            assert go_on.wait(LONG)

    with ThreadPoolExecutor(2) as pool:
        put(bucket, "held")  # to have it for the download; the limit is two again
        gate.signal(time.monotonic())
        faulty.rule = rule
        held = pool.submit(put if first == "upload" else get, bucket, "held")
        assert begun.wait(LONG)
        other = pool.submit(get if first == "upload" else put, bucket, "k")
        try:
            until(lambda: gate.state.waiting == 1)
            assert bucket.get("k").data == b"abc", "a small request passes"
        finally:
            go_on.set()
        held.result(LONG)
        other.result(LONG)
    assert gate.state.waiting == 0


def test_small_requests_lower_the_limit(faulty: FaultyServer) -> None:
    bucket = make_bucket(concurrency=8)
    put(bucket, "k")
    for operation, request in {
        "HeadObject": lambda: bucket.head("k"),
        "ListObjectsV2": lambda: bucket.list(""),
        "DeleteObject": lambda: bucket.delete(["k"]),
    }.items():
        before = gate_of_bucket(bucket).state
        seen = faulty.once(operation, Fault.error(503, "SlowDown"))
        request()
        assert seen
        after = gate_of_bucket(bucket).state
        assert after.decreases == before.decreases + 1
        assert after.limit <= max(before.limit // 2, 2)  # what then succeeds in its turn raises it again


@pytest.mark.usefixtures("eight_connections")
def test_looking_at_many_checkpoints_lowers_the_limit(faulty: FaultyServer) -> None:
    seen = faulty.once("ListObjectsV2", Fault.error(503, "SlowDown"))
    assert dcp_s3.list_checkpoints(f"s3://{BUCKET}/run", settings={"concurrency": 8}) == []
    assert seen
    assert gate_of_bucket(make_bucket(concurrency=8)).state.limit == 4


def test_endpoints_and_buckets_have_limits_of_their_own() -> None:
    gates = [gate_of(endpoint, bucket, 8) for endpoint in (None, "http://a", "http://b") for bucket in ("x", "y")]
    gates[0].signal(time.monotonic())
    assert [gate.state.limit for gate in gates] == [4, 8, 8, 8, 8, 8]
    assert gate_of(None, "x", 4) is gates[0]
    assert set(throttle.snapshot()) == {
        "s3://x", "s3://y", "http://a/x", "http://a/y", "http://b/x", "http://b/y",
    }  # fmt: skip


def _in_child(sender: Any) -> None:
    gate = gate_of("http://a", "x", 8)
    sender.send((gate.state.limit, gate.state.in_flight, sorted(throttle.snapshot())))


def test_a_forked_child_has_a_limit_of_its_own() -> None:
    gate = gate_of("http://a", "x", 8)
    gate.signal(time.monotonic())
    assert gate.enter()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_in_child, args=(sender,))
    with throttle._lock, gate._lock:  # as if other threads held them
        child.start()
    assert receiver.poll(LONG)
    assert receiver.recv() == (8, 0, ["http://a/x"])
    child.join(LONG)
    assert child.exitcode == 0
    assert (gate.state.limit, gate.state.in_flight) == (4, 1)


def test_a_save_that_waits_too_long_at_the_gate_is_spilled(
    faulty: FaultyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is refused: S3 throttled others before, which hold the only place."""
    bucket = make_bucket(concurrency=2)
    gate = gate_of_bucket(bucket)
    gate.signal(time.monotonic())
    assert gate.enter()
    before = dcp_s3.stats().spill.refused_bytes
    settings = {"concurrency": 2, "spill_dir": str(tmp_path), "spill_after": 0.2}
    future = dcp.async_save(
        {"w": torch.ones(10)}, storage_writer=S3StorageWriter(f"s3://{BUCKET}/run", settings=settings)
    )
    try:
        until(lambda: dcp_s3.stats().spill.refused_bytes > before)
        assert not future.done()
    finally:
        gate.leave(0, succeeded=False, throttled=False)
    future.result(LONG)
    found = {"w": torch.zeros(10)}
    dcp.load(found, storage_reader=S3StorageReader(f"s3://{BUCKET}/run"))
    assert torch.equal(found["w"], torch.ones(10))
    stop_draining()


@pytest.mark.usefixtures("eight_connections")
def test_stats_are_plain_numbers(faulty: FaultyServer) -> None:
    bucket = make_bucket(concurrency=8, endpoint_url=faulty.s3.endpoint_url)
    faulty.once("PutObject", Fault.error(503, "SlowDown"))
    put(bucket, "k")
    found = dcp_s3.stats().to_dict()
    assert found["throttle"] == {
        f"{faulty.s3.endpoint_url}/{BUCKET}": {
            "limit": 4, "in_flight": 0, "waiting": 0, "throttled": 1, "decreases": 1, "waited": 0.0,
        }
    }  # fmt: skip
    assert found["saves"]["failed"] == dcp_s3.stats().saves.failed
    assert json.loads(json.dumps(found)) == found
