"""S3 refuses, is slow or is gone while a save runs: with a spill directory the save is not lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageReader, S3StorageWriter, errors, latest
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.spill.background import stop_draining
from tests.end_to_end.states import assert_same, blank, every_kind
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

MIB = 2**20
URL = f"s3://{BUCKET}/run/step-2"
PREVIOUS = f"s3://{BUCKET}/run/step-1"


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setenv("DCP_S3_PART_SIZE", "5MiB")
    monkeypatch.setenv("DCP_S3_RETRY_ATTEMPTS", "2")
    monkeypatch.setenv("DCP_S3_SPILL_AFTER", "2s")
    with serve(monkeypatch) as server:
        yield server


@pytest.fixture
def spill_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "spill"
    monkeypatch.setenv("DCP_S3_SPILL_DIR", str(path))
    yield path
    stop_draining()


def make_state(seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    return {**every_kind(), "large": torch.randn(6 * MIB), "step": seed}


def refuse_all(_: Any) -> Fault:
    return Fault.error(503, "SlowDown")


def allow_all(_: Any) -> None:
    return None


def parts_on_s3() -> list[int]:
    """The numbers of all parts of the bucket's multipart uploads."""
    client = S3Store(BUCKET, Settings()).client
    uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    listed = [client.list_parts(Bucket=BUCKET, Key=each["Key"], UploadId=each["UploadId"]) for each in uploads]
    return [part["PartNumber"] for each in listed for part in each.get("Parts", [])]


def assert_complete(url: str, expected: dict[str, Any]) -> None:
    found = blank(expected)
    dcp.load(found, storage_reader=S3StorageReader(url))
    assert_same(found, expected)


def assert_nothing_is_left(server: FaultyServer, spill_dir: Path) -> None:
    assert not list((spill_dir / "saves").iterdir())
    assert not (spill_dir / "refused").exists()
    assert server.s3.open_uploads(BUCKET) == []


def test_local_durability_needs_no_s3_during_the_save(faulty: FaultyServer, spill_dir: Path) -> None:
    state = make_state(1)
    faulty.rule = refuse_all
    writer = S3StorageWriter(URL, settings={"durability": "local"})
    dcp.save(state, storage_writer=writer)
    with pytest.raises(TimeoutError):
        writer.wait_committed(timeout=0.5)
    faulty.rule = allow_all
    writer.wait_committed(timeout=60)
    assert_complete(URL, state)
    assert_nothing_is_left(faulty, spill_dir)


def test_s3_durability_waits_for_s3(faulty: FaultyServer, spill_dir: Path) -> None:
    state = make_state(2)
    faulty.rule = refuse_all
    future = dcp.async_save(state, storage_writer=S3StorageWriter(URL))
    deadline = time.monotonic() + 60
    while not list(spill_dir.glob("saves/*-commit-*")):
        assert time.monotonic() < deadline, "the commit does not wait on disk"
        time.sleep(0.05)
    assert not future.done()
    faulty.rule = allow_all
    future.result(60)
    assert_complete(URL, state)
    assert_nothing_is_left(faulty, spill_dir)


def test_without_a_spill_directory_the_save_fails_and_the_previous_checkpoint_stays(faulty: FaultyServer) -> None:
    before = make_state(3)
    dcp.save(before, storage_writer=S3StorageWriter(PREVIOUS))
    faulty.rule = refuse_all
    with pytest.raises(CheckpointException) as caught:
        dcp.save(make_state(4), storage_writer=S3StorageWriter(URL))
    (cause, _) = caught.value.failures[0]
    assert isinstance(cause, errors.TransferError)
    faulty.rule = allow_all
    found = latest(f"s3://{BUCKET}/run")
    assert found is not None
    assert found.url == PREVIOUS
    assert_complete(PREVIOUS, before)
    assert faulty.s3.open_uploads(BUCKET) == []


def test_an_outage_in_the_middle_sends_only_what_s3_does_not_have(faulty: FaultyServer, spill_dir: Path) -> None:
    state = {"large": torch.randn(16 * MIB)}
    sent: list[Any] = []
    down = threading.Event()

    def rule(request: Any) -> Fault | None:
        if request.operation == "UploadPart":
            if len(sent) >= 6:
                down.set()
            else:
                sent.append(request)
        return Fault.error(503, "SlowDown") if down.is_set() else None

    faulty.rule = rule
    future = dcp.async_save(state, storage_writer=S3StorageWriter(URL, max_objects=1))
    deadline = time.monotonic() + 60
    while not list(spill_dir.glob("saves/*-commit-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    faulty.rule = lambda request: Fault.error(503, "SlowDown") if request.operation == "UploadPart" else None
    stored = parts_on_s3()  # a request that did not get through in time was made again: not always six
    again: list[int] = []

    def count(request: Any) -> None:
        if request.operation == "UploadPart":
            again.append(int(request.query["partNumber"]))

    faulty.rule = count
    future.result(60)
    assert stored, "S3 had none before the outage: the test shows nothing"
    assert sorted(stored + again) == list(range(1, 14)), "64 MiB in parts of 5 MiB, each of them once"
    assert_complete(URL, state)
    assert_nothing_is_left(faulty, spill_dir)


def test_a_slow_s3_is_given_up(faulty: FaultyServer, spill_dir: Path) -> None:
    state = {"large": torch.randn(16 * MIB)}
    faulty.rule = lambda request: Fault.delay(3) if request.operation == "UploadPart" else None
    future = dcp.async_save(state, storage_writer=S3StorageWriter(URL, settings={"spill_after": 1}))
    deadline = time.monotonic() + 60
    while not list(spill_dir.glob("saves/*-commit-*")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    faulty.rule = allow_all
    future.result(60)
    assert_complete(URL, state)
    assert_nothing_is_left(faulty, spill_dir)
