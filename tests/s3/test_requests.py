"""Settings that go with every request, and the limit on what is sent."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.memory import Piece
from dcp_s3.offline.copy import copy
from dcp_s3.retention.prune import prune
from dcp_s3.s3.pressure import Pace
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault

MIB = 2**20
ROOT = f"s3://{BUCKET}/run"


def test_who_requests_pays_for_all_that_has_a_price(faulty: FaultyServer) -> None:
    """A bucket with requester pays refuses what lacks the header."""
    seen: set[str] = set()

    def rule(request: Any) -> Fault | None:
        seen.add(request.operation)
        return None if request.headers.get("x-amz-request-payer") == "requester" else Fault.error(403, "AccessDenied")

    faulty.rule = rule
    settings = {"requester_pays": True, "part_size": "5MiB"}
    for step in (1, 2):
        state = {"large": torch.randn(MIB * 3 // 2), "small": torch.randn(100)}
        dcp.save(state, storage_writer=S3StorageWriter(f"{ROOT}/step-{step}", settings=settings, separate=["small"]))
        dcp.load(state, storage_reader=S3StorageReader(f"{ROOT}/step-{step}", settings=settings))
    copy(f"{ROOT}/step-1", f"s3://{BUCKET}/copy", settings=settings)
    assert prune(ROOT, "latest:1", settings=settings, grace=0, force=True).ok
    store = S3Store(BUCKET, Settings(**settings))
    with pytest.raises(ZeroDivisionError):
        store.put_stream("run/broken", 12 * MIB, (Piece.of(bytes(6 * MIB)) if i < 2 else 1 // 0 for i in range(3)))
    store.head("copy/.metadata")
    store.delete(["copy/.metadata"])
    assert seen >= {
        "GetObject", "HeadObject", "PutObject", "CopyObject", "CreateMultipartUpload", "UploadPart",
        "CompleteMultipartUpload", "AbortMultipartUpload", "ListObjectsV2", "ListMultipartUploads",
        "DeleteObject", "DeleteObjects",
    }  # fmt: skip


def test_without_the_setting_nobody_offers_to_pay(faulty: FaultyServer) -> None:
    S3Store(BUCKET, Settings()).put("key", b"data")
    assert all("x-amz-request-payer" not in request.headers for request in faulty.s3.request_log)


# --- bandwidth ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [2**16, 10 * MIB, 200 * MIB])
@pytest.mark.parametrize("senders", [1, 32])
def test_so_many_bytes_per_second_are_let_through(rate: int, senders: int) -> None:
    """On a clock of its own: each sender sends its next slice when it may."""
    pace, sent = Pace(rate), 0
    due = [0.0] * senders
    while (now := min(due)) < 10:
        sender = due.index(now)
        due[sender] = now + max(pace.reserve(pace.slice_size, now), 1e-6)
        sent += pace.slice_size if due[sender] < 10 else 0
    assert 0.9 <= sent / (10 * rate) <= 1.1


def test_a_pause_is_not_made_up_for() -> None:
    pace = Pace(MIB)
    assert pace.reserve(MIB, 0.0) == 0
    assert pace.reserve(MIB, 100.0) == 0
    assert pace.reserve(MIB, 100.0) == pytest.approx(0.5)


def test_no_slice_keeps_a_connection_waiting_for_long() -> None:
    for rate in (2**16, MIB, 200 * MIB, 10 * 2**30):
        assert 64 * Pace(rate).slice_size / rate <= 16  # S3 drops a connection after 20 s without a byte


def test_uploads_keep_to_the_bandwidth(faulty: FaultyServer) -> None:
    store = S3Store(BUCKET, Settings(max_bandwidth="8MiB", part_size="5MiB"))
    began = time.monotonic()
    store.put_stream("key", 12 * MIB, [Piece.of(bytes(12 * MIB))])
    assert time.monotonic() - began >= 0.8
    assert faulty.s3.objects(BUCKET)["key"] == 12 * MIB
