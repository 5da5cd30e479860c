"""Stores that refuse checksums: noticed once, and saves go on without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageReader, S3StorageWriter, errors, verify
from dcp_s3.s3 import operations
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

ROOT = f"s3://{BUCKET}/run"
STATE = {"small": torch.arange(10), "large": torch.arange(3 * 2**20, dtype=torch.float32)}


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    operations.forget()
    with serve(monkeypatch) as server:
        yield server


def save(name: str, **settings: Any) -> None:
    writer = S3StorageWriter(f"{ROOT}/{name}", max_objects=1, settings={"part_size": "5MiB", **settings})
    dcp.save(STATE, storage_writer=writer)


def has_checksum(request: Any) -> bool:
    return any(name.startswith("x-amz-checksum-") and name != "x-amz-checksum-mode" for name in request.headers)


class Refusing:
    """Refuses requests with checksums, of ``operations`` or of all, and counts them."""

    def __init__(self, *answer: Any, operations: tuple[str, ...] = ()) -> None:
        self.refused = 0
        self._answer = answer
        self._operations = operations

    def __call__(self, request: Any) -> Fault | None:
        if not has_checksum(request) or (self._operations and request.operation not in self._operations):
            return None
        self.refused += 1
        return Fault.error(*self._answer)


@pytest.mark.parametrize(
    ("answer", "operations"),
    [
        ((501, "NotImplemented"), ()),
        ((400, "InvalidRequest"), ("UploadPart",)),
        ((400, "InvalidArgument"), ("CompleteMultipartUpload",)),
        ((400, "InvalidRequest"), ("PutObject",)),
    ],
)
def test_a_store_that_refuses_checksums_is_saved_to_without(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture, answer: Any, operations: tuple[str, ...]
) -> None:
    faulty.rule = rule = Refusing(*answer, operations=operations)
    save("a")
    assert rule.refused
    assert "refuses checksums" in caplog.text
    refused = rule.refused
    save("b")
    assert rule.refused == refused, "it is remembered"
    for name in "ab":
        loaded = {key: torch.zeros_like(value) for key, value in STATE.items()}
        dcp.load(loaded, storage_reader=S3StorageReader(f"{ROOT}/{name}"))
        assert all(torch.equal(loaded[key], value) for key, value in STATE.items())
        report = verify(f"{ROOT}/{name}", full=True)
        assert (report.ok, report.items_without_checksum) == (True, 0)


def test_a_checksum_that_was_asked_for_is_not_left_out(faulty: FaultyServer) -> None:
    faulty.rule = Refusing(501, "NotImplemented")
    with pytest.raises(CheckpointException) as caught:
        save("a", checksum="crc64nvme")
    assert isinstance(caught.value.failures[0][0], errors.StorageError)
    assert faulty.s3.open_uploads(BUCKET) == []


def test_what_is_refused_for_another_reason_stays_refused(faulty: FaultyServer) -> None:
    faulty.rule = lambda r: Fault.error(400, "InvalidArgument") if r.operation == "UploadPart" else None
    with pytest.raises(CheckpointException) as caught:
        save("a")
    assert "InvalidArgument" in str(caught.value.failures[0][0])
    seen: list[bool] = []
    faulty.rule = lambda r: seen.append(has_checksum(r)) if r.operation == "UploadPart" else None
    save("b")
    assert seen
    assert all(seen), "checksums are sent as before"
