"""docs/security.md says what is so: operations that are called, their permissions, and what a refusal reads like."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageReader, S3StorageWriter, errors, latest, list_checkpoints, prune, remove
from dcp_s3.offline.copy import copy
from dcp_s3.s3.diagnosis import permission_of
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from dcp_s3.spill.drain import Drainer, DrainReport
from dcp_s3.spill.store import SpillStore
from tests.faulty import BUCKET, FaultyServer, serve
from tests.memory_s3 import Fault
from tests.spill.making import begin_multipart, large_state

DOCUMENT = (Path(__file__).parents[1] / "docs" / "security.md").read_text()
ROOT = f"s3://{BUCKET}/run"
OWNER = "123456789012"


def actions(*names: str) -> set[str]:
    """Of the statements with "Allow" in the document, by Sid."""
    blocks = [json.loads(block) for block in re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)]
    statements = [each for block in blocks for each in block.get("Statement", ()) if each["Effect"] == "Allow"]
    return {action for each in statements if each["Sid"] in names for action in each["Action"]}


OPERATIONS = set(
    re.findall(r"`(\w+)`", DOCUMENT.partition("named below:")[2].partition("`s3:ListBucket` is needed")[0])
)
TRAINING = actions("TrainingObjects", "TrainingBucket")
PRUNING = actions("PruningObjects", "PruningLists", "PruningBucket")
READING = actions("ReadingObjects", "ReadingBucket")


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyServer]:
    monkeypatch.setattr("dcp_s3.spill.saving.drain_in_background", lambda *_, **__: None)
    monkeypatch.setenv("DCP_S3_PART_SIZE", "5MiB")
    monkeypatch.setenv("DCP_S3_EXPECTED_BUCKET_OWNER", OWNER)
    with serve(monkeypatch) as server:
        server.s3.reset_counters()
        yield server


def save(url: str, seed: int = 0, **options: Any) -> None:
    dcp.save(large_state(seed), storage_writer=S3StorageWriter(url, **options))


def load(url: str) -> dict[str, torch.Tensor]:
    state = {"large": torch.zeros(large_state()["large"].shape)}
    dcp.load(state, storage_reader=S3StorageReader(url))
    return state


def drain(directory: Path, url: str) -> DrainReport:
    """Spill a save whose multipart upload was begun, then drain it."""
    save(url, max_objects=1, settings={"durability": "local", "spill_dir": str(directory)})
    store = SpillStore(directory)
    (data,) = [found for found in store.scan() if found.journal.commit is None]
    (spilled,) = data.journal.objects
    key = url.removeprefix(f"s3://{BUCKET}/") + "/" + spilled.entry.path
    begin_multipart(S3Store(BUCKET, Settings()), key, (data.path / spilled.file).read_bytes()[: 5 * 2**20])
    return Drainer(store).run()


def test_pruning_needs_its_policy(faulty: FaultyServer) -> None:
    for step in (1, 2, 3):
        save(f"{ROOT}/step-{step}")
    begin_multipart(S3Store(BUCKET, Settings()), "run/step-1/__0_0-ab.distcp", b"x" * 5 * 2**20)
    faulty.s3.reset_counters()
    remove(f"{ROOT}/step-1", force=True)
    assert prune(ROOT, "latest:1").deleted
    check_owner(faulty)
    called = set(faulty.s3.counters.requests)
    assert {permission_of(operation) for operation in called} == PRUNING
    assert {name for name in OPERATIONS if name[0].isupper()} >= called
    puts = [request.key for request in faulty.s3.request_log if request.operation == "PutObject"]
    assert len(puts) == 2
    assert all(fnmatch.fnmatch(key, "run/*/.dcp_s3/deletion-*") for key in puts)


@contextlib.contextmanager
def refusing(server: FaultyServer, operation: str, status: int, error: type[BaseException]) -> Iterator[None]:
    """What is done in the body fails, because the server refuses an operation."""
    fault = Fault.error(status, "InternalError" if status == 500 else "AccessDenied")
    server.rule = lambda request: fault if request.operation == operation else None
    with pytest.raises(error):
        yield
    server.rule = lambda _: None


def test_the_policies_allow_what_is_called_and_every_request_carries_the_owner(
    faulty: FaultyServer, tmp_path: Path
) -> None:
    save(f"{ROOT}/a")
    save(f"{ROOT}/a", 1, overwrite=True)
    faulty.once("CreateMultipartUpload", Fault.apply_then_reset())
    save(f"{ROOT}/b")
    with refusing(faulty, "UploadPart", 500, CheckpointException):
        save(f"{ROOT}/failing", settings={"retry_attempts": 1})
    drain(tmp_path / "spill", f"{ROOT}/c")
    copy(f"{ROOT}/a", tmp_path / "copy")
    copy(tmp_path / "copy", f"{ROOT}/d")
    with refusing(faulty, "UploadPart", 403, errors.StorageError):
        copy(tmp_path / "copy", f"{ROOT}/e")
    writing = set(faulty.s3.counters.requests)
    check_owner(faulty)
    faulty.s3.reset_counters()
    load(f"{ROOT}/a")
    with pytest.raises(CheckpointException):
        load(f"{ROOT}/nothing")
    assert latest(ROOT) is not None
    list_checkpoints(ROOT)
    copy(f"{ROOT}/a", tmp_path / "read")
    reading = set(faulty.s3.counters.requests)
    check_owner(faulty)
    assert {permission_of(operation) for operation in writing | reading} == TRAINING
    assert {permission_of(operation) for operation in reading} == READING
    pruning = {"DeleteObject"}
    assert {name for name in OPERATIONS if name[0].isupper()} == writing | reading | pruning


def check_owner(server: FaultyServer) -> None:
    """All requests carry the expected owner, but for the two by which a test plays a process that died."""
    log = [request for request in server.s3.request_log if request.operation != "CreateBucket"]
    without = [request.operation for request in log if request.headers.get("x-amz-expected-bucket-owner") != OWNER]
    assert sorted(without) in ([], ["CreateMultipartUpload", "UploadPart"])


def test_without_deletes_and_aborts_saves_work_and_say_what_stays(
    faulty: FaultyServer, caplog: pytest.LogCaptureFixture
) -> None:
    save(f"{ROOT}/a")
    faulty.rule = lambda request: Fault.error(403, "AccessDenied") if request.operation.startswith("Del") else None
    save(f"{ROOT}/a", 1, overwrite=True)
    assert "s3:DeleteObject" in caplog.text
    faulty.rule = lambda _: None
    assert torch.equal(load(f"{ROOT}/a")["large"], large_state(1)["large"])
    denied = ("UploadPart", "AbortMultipartUpload")
    faulty.rule = lambda request: Fault.error(403, "AccessDenied") if request.operation in denied else None
    with pytest.raises(CheckpointException):
        save(f"{ROOT}/b")
    assert "s3:AbortMultipartUpload" in caplog.text
