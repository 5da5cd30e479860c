"""A reader's lease: there while it loads, renewed, gone afterwards; and what a reader does about a deletion."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import CheckpointCatalog, S3StorageReader
from dcp_s3.checkpoint import lease as lease_module
from dcp_s3.checkpoint.lease import DELETION_BEGINS, ReaderLease
from dcp_s3.errors import (
    AccessDeniedError,
    CheckpointDeletedError,
    CheckpointNotFoundError,
    SettingsError,
    TransferError,
)
from dcp_s3.format.layout import LEASE_PREFIX, deletion_object
from tests.faulty import BUCKET, FaultyServer
from tests.retention.making import save, state, zeros
from tests.retention.runs import Run

URL = f"s3://{BUCKET}/run/step-1"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """With step-1, and no patience for deletions that are withdrawn."""
    monkeypatch.setattr(lease_module, "_WITHDRAWAL", 0.0)
    run = Run()
    run.steps(1)
    return run


def leases(run: Run) -> list[str]:
    return [path for path in run.objects("step-1") if path.startswith(LEASE_PREFIX)]


def take(run: Run) -> ReaderLease:
    lease = ReaderLease(run.store, run.url("step-1"), 600.0)
    lease.take()
    return lease


def of_loads(faulty: FaultyServer) -> list[str]:
    return [key for key in faulty.s3.objects(BUCKET) if "/lease-" in key]


@pytest.fixture
def leasing(faulty: FaultyServer, monkeypatch: pytest.MonkeyPatch) -> FaultyServer:
    monkeypatch.setenv("DCP_S3_READER_LEASE", "10m")
    save(URL)
    return faulty


def load(**arguments: Any) -> None:
    loaded = zeros()
    dcp.load(loaded, storage_reader=S3StorageReader(URL, **arguments), no_dist=True)
    assert torch.equal(loaded["weight"], state()["weight"])


def test_there_is_a_lease_while_it_loads_and_none_afterwards(leasing: FaultyServer) -> None:
    seen: list[Any] = []

    def note(request: Any) -> None:
        if request.operation == "GetObject" and request.key.endswith((".metadata", ".distcp")):
            leasing.rule = lambda _: None
            seen.extend(info.leased_until for info in CheckpointCatalog(f"s3://{BUCKET}/run").checkpoints())
            leasing.rule = note

    leasing.rule = note
    load()
    assert len(seen) >= 2
    assert None not in seen
    assert of_loads(leasing) == []
    leasing.rule = lambda _: None
    leasing.s3.reset_counters()
    load(settings={"reader_lease": None})
    assert set(leasing.s3.counters.requests) == {"GetObject"}
    for value in ("5s", "31d"):
        with pytest.raises(SettingsError, match="reader_lease"):
            S3StorageReader(URL, settings={"reader_lease": value})


def test_a_load_that_fails_and_a_reader_that_is_reset_leave_no_lease(leasing: FaultyServer) -> None:
    reader = S3StorageReader(URL)
    reader.read_metadata()
    assert len(of_loads(leasing)) == 1
    reader.reset()
    assert of_loads(leasing) == []
    with pytest.raises(CheckpointNotFoundError):
        S3StorageReader(f"s3://{BUCKET}/run/none").read_metadata()
    assert of_loads(leasing) == []
    [data] = [key for key in leasing.s3.objects(BUCKET) if key.endswith(".distcp")]
    leasing.s3._store.delete(BUCKET, [data])
    with pytest.raises(dcp.api.CheckpointException):
        load()
    assert of_loads(leasing) == []


def test_it_is_renewed_while_it_is_needed(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    lease, renewals, failed = take(run), threading.Semaphore(0), list[str]()
    lease._seconds = 0.03  # type: ignore[assignment]

    def note(method: str, key: str) -> Exception | None:
        if method != "put":
            return None
        renewals.release()
        if not failed:
            failed.append(key)
            return TransferError("InternalError")
        return None

    run.rule = note
    run.clock.now += 3000
    with lease.renewed():
        for _ in range(4):
            assert renewals.acquire(timeout=30)
        assert run.only().leased_until == run.clock.now + 600
    assert "could not be renewed now" in caplog.text
    assert leases(run) == []


@pytest.mark.parametrize(
    ("method", "said", "left"),
    [("put", "no lease could be written", 0), ("delete", "stays until it ends, in at most 600 s", 1)],
)
def test_a_lease_that_can_not_be_written_or_deleted_is_a_warning(
    run: Run, caplog: pytest.LogCaptureFixture, method: str, said: str, left: int
) -> None:
    run.rule = lambda found, _: AccessDeniedError("no") if found == method else None
    with take(run).renewed():
        pass
    assert said in caplog.text
    assert len(leases(run)) == left


def test_a_deletion_that_has_begun_is_seen(run: Run) -> None:
    lease, own = take(run), {run.only().deletion_id}
    run.put("step-1", deletion_object("00ff"))  # of an earlier save
    lease.check_not_deleted(own)
    with pytest.raises(CheckpointDeletedError, match="is being deleted"):
        lease.check_not_deleted(None)  # without collectives a rank does not know the other ranks' ids
    run.put("step-1", deletion_object(*own))
    with pytest.raises(CheckpointDeletedError, match="is being deleted"):
        lease.check_not_deleted(own)
    run.clock.now += DELETION_BEGINS + 1  # whoever began it has not gone on
    lease.check_not_deleted(own)
    run.once("page", "deletion-", lambda: run.delete("step-1", ".metadata"))  # done before the look
    with pytest.raises(CheckpointDeletedError):
        lease.check_not_deleted(own)


def test_a_deletion_that_is_withdrawn_is_waited_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "_WITHDRAWAL", 60.0)
    lease, own = take(run), run.only().deletion_id
    run.put("step-1", deletion_object(own))
    looks: list[str] = []

    def withdraw(method: str, key: str) -> None:
        if method == "page" and "deletion-" in key:
            looks.append(key)
            if len(looks) == 2:
                run.delete("step-1", deletion_object(own))

    run.rule = withdraw
    lease.check_not_deleted({own})
    assert len(looks) == 2
