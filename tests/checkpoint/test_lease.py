"""A reader's lease: there while it loads, renewed, gone afterwards; and what a reader does about a deletion."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import CheckpointCatalog, S3StorageReader
from dcp_s3.checkpoint import lease
from dcp_s3.checkpoint.lease import DELETION_BEGINS, ReaderLease
from dcp_s3.errors import CheckpointDeletedError, CheckpointNotFoundError, SettingsError
from dcp_s3.format.layout import LEASE_PREFIX, classify, deletion_object
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.url import parse_url
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault, MemoryS3
from tests.retention.making import delete, keys, put, save, save_foreign, save_on_ranks, state, zeros

ROOT = f"s3://{BUCKET}/run"
URL = f"{ROOT}/step-1"


class Clock:
    now = 1_000_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Iterator[FaultyServer]:
    monkeypatch.setenv("DCP_S3_READER_LEASE", "10m")
    monkeypatch.setattr(lease, "_WITHDRAWAL", 0.0)
    server = FaultyServer()
    server.s3 = MemoryS3(fault=lambda request: server.rule(request), clock=clock)
    with serve(monkeypatch, server):
        yield server


@pytest.fixture
def client(faulty: FaultyServer) -> Iterator[Any]:
    made = boto3.Session().client("s3", endpoint_url=faulty.s3.endpoint_url)
    yield made
    made.close()


def leases(client: Any, url: str = URL) -> list[str]:
    return [path for path in keys(client, url) if path.startswith(LEASE_PREFIX)]


def load(url: str = URL, **arguments: Any) -> dict[str, Any]:
    loaded = zeros()
    dcp.load(loaded, storage_reader=S3StorageReader(url, **arguments), no_dist=True)
    return loaded


def failure_of_load(url: str = URL) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        load(url)
    return caught.value.failures[0][0]  # type: ignore[no-any-return]


def test_there_is_a_lease_while_it_loads_and_none_afterwards(faulty: FaultyServer, client: Any, clock: Clock) -> None:
    save(URL)
    seen: list[tuple[str, list[float | None]]] = []

    def note(request: Any) -> None:
        if request.operation == "GetObject" and request.key.endswith((".metadata", ".distcp")):
            faulty.rule = lambda _: None
            seen.append((request.key, [info.leased_until for info in CheckpointCatalog(ROOT).checkpoints()]))
            faulty.rule = note

    faulty.rule = note
    assert torch.equal(load()["weight"], state()["weight"])
    assert len(seen) >= 2
    assert all(ends == [clock.now + 600] for _, ends in seen)
    assert leases(client) == []


def test_without_the_setting_nothing_is_written(faulty: FaultyServer) -> None:
    save(URL)
    faulty.s3.reset_counters()
    load(settings={"reader_lease": None})
    assert set(faulty.s3.counters.requests) == {"GetObject"}


def test_a_failed_load_leaves_no_lease(faulty: FaultyServer, client: Any) -> None:
    assert isinstance(failure_of_load(), CheckpointNotFoundError)
    assert keys(client, URL) == {}
    save(URL)
    delete(client, URL, next(path for path in keys(client, URL) if path.endswith(".distcp")))
    failure_of_load()
    assert leases(client) == []


def test_each_rank_without_collectives_has_its_lease(faulty: FaultyServer, client: Any) -> None:
    save_on_ranks(URL, 1)
    taken = []

    def note(request: Any) -> None:
        if request.operation == "PutObject":
            taken.append(request.key)

    faulty.rule = note
    assert torch.equal(load()["weight"], state()["weight"])
    assert len(taken) == 2  # one was in vain: there is no global metadata
    assert leases(client) == []


def test_a_reset_reader_gives_its_lease_back(faulty: FaultyServer, client: Any) -> None:
    save(URL)
    reader = S3StorageReader(URL)
    reader.read_metadata()
    [path] = leases(client)
    assert classify(path).seconds == 600
    reader.reset()
    assert leases(client) == []


def test_it_is_renewed_while_it_is_needed(
    faulty: FaultyServer, client: Any, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    save(URL)
    renewals = threading.Semaphore(0)
    lease = ReaderLease(S3Store(BUCKET, Settings()), parse_url(URL), 0.03)  # rounded up to 1 s
    lease.take()
    lease._seconds = 0.03  # type: ignore[assignment]

    def note(request: Any) -> Fault | None:
        if request.operation != "PutObject":
            return None
        renewals.release()
        return (
            Fault.error(500, "InternalError")
            if "lease" in request.key and len(failed) < 1 and not failed.append(1)
            else None
        )

    failed: list[int] = []
    faulty.rule = note
    clock.now += 3000
    with lease.renewed():
        for _ in range(4):
            assert renewals.acquire(timeout=30)
        [info] = CheckpointCatalog(ROOT).checkpoints()
        assert info.leased_until == clock.now + 1
    assert "could not be renewed now" in caplog.text
    assert leases(client) == []


@pytest.mark.parametrize(
    ("operation", "said", "left"),
    [("PutObject", "no lease could be written", 0), ("DeleteObject", "stays until it ends, in at most 600 s", 1)],
)
def test_a_lease_that_can_not_be_written_or_deleted_is_a_warning(
    faulty: FaultyServer, client: Any, caplog: pytest.LogCaptureFixture, operation: str, said: str, left: int
) -> None:
    save(URL)
    faulty.rule = lambda request: Fault.error(403, "AccessDenied") if request.operation == operation else None
    assert torch.equal(load()["weight"], state()["weight"])
    assert said in caplog.text
    assert len(leases(client)) == left


def test_a_deletion_that_has_begun_is_seen(faulty: FaultyServer, client: Any, clock: Clock) -> None:
    save(URL)
    [info] = CheckpointCatalog(ROOT).checkpoints()
    put(client, URL, deletion_object("00ff"))  # of an earlier save
    load()
    put(client, URL, deletion_object(info.deletion_id))
    error = failure_of_load()
    assert isinstance(error, CheckpointDeletedError)
    assert "is being deleted" in str(error)
    assert leases(client) == []
    clock.now += DELETION_BEGINS + 1  # whoever began it has not gone on
    load()


@pytest.mark.parametrize("kind", ["foreign", "ranks"])
def test_a_deletion_of_a_checkpoint_of_another_kind_is_seen(
    faulty: FaultyServer, client: Any, tmp_path: Any, kind: str
) -> None:
    if kind == "foreign":
        save_foreign(client, URL, tmp_path)
        [info] = CheckpointCatalog(ROOT).checkpoints()
        put(client, URL, deletion_object(info.deletion_id))
    else:
        save_on_ranks(URL, 1)
        put(client, URL, deletion_object("ab"))
    assert "is being deleted" in str(failure_of_load())


def test_a_deletion_that_is_withdrawn_is_waited_for(
    faulty: FaultyServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_WITHDRAWAL", 60.0)
    save(URL)
    [info] = CheckpointCatalog(ROOT).checkpoints()
    put(client, URL, deletion_object(info.deletion_id))
    looks = []

    def withdraw(request: Any) -> None:
        if request.operation == "ListObjectsV2" and "deletion-" in request.query["prefix"]:
            looks.append(request)
            if len(looks) == 2:
                faulty.s3._store.delete(BUCKET, [f"run/step-1/{deletion_object(info.deletion_id)}"])

    faulty.rule = withdraw
    assert torch.equal(load()["weight"], state()["weight"])
    assert len(looks) == 2


def test_a_deletion_that_was_done_between_metadata_and_look_is_seen(faulty: FaultyServer, client: Any) -> None:
    save(URL)

    def delete_all(request: Any) -> None:
        if request.operation == "ListObjectsV2" and "deletion-" in request.query["prefix"]:
            faulty.s3._store.delete(BUCKET, [key for key in faulty.s3.objects(BUCKET) if "lease" not in key])

    faulty.rule = delete_all
    assert isinstance(failure_of_load(), CheckpointDeletedError)


@pytest.mark.parametrize("value", ["5s", "31d", "soon"])
def test_bad_durations(value: str) -> None:
    with pytest.raises(SettingsError, match="reader_lease"):
        S3StorageReader(URL, settings={"reader_lease": value})
