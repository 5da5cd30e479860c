"""Copies from S3 to S3: whole or not there, made by S3 itself where it can, and going on after a kill."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_s3
from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.format.layout import lease_object
from dcp_s3.offline.copy import copy
from dcp_s3.s3 import multipart
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import MIN_PART_SIZE
from dcp_s3.url import parse_url
from tests.end_to_end.loads import assert_loads
from tests.faulty import BUCKET, FaultyServer, close_clients
from tests.killing import AtRequest, begin, kill_all, new_process, running, wait_until_quiet
from tests.memory_s3 import Fault
from tests.objects import separate_objects
from tests.retention.making import delete, get, is_manifest, keys, put, save, save_foreign, save_on_ranks, state

_URL, _COPY = f"s3://{BUCKET}/run/step-1", f"s3://{BUCKET}/copies/step-1"


@pytest.fixture
def s3_of(faulty: FaultyServer) -> Any:
    return boto3.client("s3", endpoint_url=faulty.s3.endpoint_url)


def save_large(url: str) -> torch.Tensor:
    tensor = torch.randint(0, 255, (3 * MIN_PART_SIZE,), dtype=torch.uint8)
    with separate_objects("weight", "half"):
        dcp.save({"t": tensor, **state()}, storage_writer=S3StorageWriter(url), no_dist=True)
    return tensor


def refused_copy(faulty: FaultyServer, operation: str, key: str = "") -> None:
    """Copy, while the store refuses one request."""
    faulty.once(operation, Fault.error(403, "AccessDenied"), key=key)
    with pytest.raises(errors.AccessDeniedError):
        copy(_URL, _COPY, operation == "PutObject")


def zero_data(s3: Any, url: str) -> str:
    """Damage an object, with a checksum that fits."""
    path, size = next(found for found in keys(s3, url).items() if found[0].endswith(".distcp"))
    where = parse_url(url)
    S3Store(where.bucket, dcp_s3.Settings()).put(where.key(path), bytes(size))
    return path


def test_a_copy_is_the_checkpoint_without_pin_leases_and_leftovers(root: str, s3: Any) -> None:
    url = f"{root}/step 7+%é"
    writer = S3StorageWriter(url, metrics={"loss": 0.25})
    writer.attach("tokenizer/vocab.json", b"{}")
    dcp.save(state(), storage_writer=writer, no_dist=True)
    dcp_s3.annotate(url, {"accuracy": 0.75})
    belongs = keys(s3, url)
    dcp_s3.pin(url)
    put(s3, url, lease_object("ab", 3600))
    put(s3, url, "__0_9-abcdef.distcp", b"left over")
    put(s3, url, "500/.metadata")
    result = copy(url, f"{root}/copy-7")
    assert keys(s3, f"{root}/copy-7") == belongs
    assert (result.files, result.size) == (len(belongs), sum(belongs.values()))
    assert_loads(f"{root}/copy-7", state())
    copied = next(info for info in dcp_s3.list_checkpoints(root) if info.name == "copy-7")
    assert (copied.metrics, copied.foreign, copied.pinned) == ({"loss": 0.25, "accuracy": 0.75}, False, False)
    assert dcp_s3.verify(f"{root}/copy-7", full=True).ok
    assert copy(url, f"{root}/copy-7").moved == 0
    assert keys(s3, f"{root}/copy-7") == belongs


def test_foreign_checkpoints_and_ranks_without_collectives(root: str, s3: Any, tmp_path: Path) -> None:
    copy(save_foreign(s3, f"{root}/1", tmp_path), f"{root}/2")
    assert_loads(f"{root}/2", state())
    assert copy(f"{root}/1", f"{root}/2").moved == 0
    url = save_on_ranks(f"{root}/3", 2)
    copy(url, f"{root}/4")
    assert keys(s3, f"{root}/4") == keys(s3, url)
    delete(s3, f"{root}/4", "__0.metadata")  # as a copy that was cut off between the two
    assert copy(url, f"{root}/4").moved == 0
    assert keys(s3, f"{root}/4") == keys(s3, url)


def test_the_old_one_stays_whole_until_the_commit(faulty: FaultyServer, s3_of: Any) -> None:
    save(_URL)
    save(_COPY, metrics={"old": 1})
    before = get(s3_of, _COPY, ".metadata")
    with pytest.raises(errors.CheckpointExistsError):
        copy(_URL, _COPY)
    refused_copy(faulty, "PutObject", ".metadata")
    assert get(s3_of, _COPY, ".metadata") == before
    assert_loads(_COPY, state())
    copy(_URL, _COPY, True)
    assert keys(s3_of, _COPY) == keys(s3_of, _URL)
    assert copy(_URL, _COPY, True).moved == 0
    assert_loads(_COPY, state())


def test_a_copy_that_lost_data_is_no_checkpoint_until_it_is_whole_and_without_a_manifest_it_is(
    faulty: FaultyServer, s3_of: Any
) -> None:
    copy(save(_URL), _COPY)
    zero_data(s3_of, _COPY)
    refused_copy(faulty, "CopyObject")
    assert ".metadata" not in keys(s3_of, _COPY)
    copy(_URL, _COPY)
    assert_loads(_COPY, state())
    delete(s3_of, _COPY, next(path for path in keys(s3_of, _COPY) if is_manifest(path)))
    refused_copy(faulty, "PutObject", "manifest")
    assert_loads(_COPY, state())
    copy(_URL, _COPY)
    assert keys(s3_of, _COPY) == keys(s3_of, _URL)


@pytest.mark.servers("memory")
def test_a_directory_with_anything_else_is_not_written_to(root: str, s3: Any, tmp_path: Path) -> None:
    url = save(f"{root}/1")
    put(s3, url, "notes.txt", b"of the checkpoint")
    for name in ("other.txt", "notes.txt"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(errors.CheckpointExistsError, match="is not empty"):
            copy(url, tmp_path)
        assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]
        (tmp_path / name).unlink()
    assert copy(url, tmp_path).moved > 0
    assert copy(url, tmp_path).moved == 0
    with pytest.raises(errors.CheckpointExistsError):
        copy(save(f"{root}/2"), tmp_path)


# --- by whom -------------------------------------------------------------------------------------------


def test_no_data_passes_through_this_machine(faulty: FaultyServer) -> None:
    save_large(_URL)
    faulty.s3.reset_counters()
    copy(_URL, _COPY)
    assert faulty.s3.counters.requests["CopyObject"] >= 1
    assert faulty.s3.counters.bytes_out < MIN_PART_SIZE
    assert faulty.s3.counters.bytes_in < MIN_PART_SIZE
    faulty.s3.reset_counters()
    copied = copy(_URL, _COPY)
    assert copied.moved == 0
    assert faulty.s3.counters.requests["HeadObject"] <= copied.files, "each file is looked at once"


def test_a_damaged_copy_is_found_by_the_checksum_of_the_store(faulty: FaultyServer, s3_of: Any) -> None:
    data = zero_data(s3_of, save(_URL))
    with pytest.raises(errors.CorruptCheckpointError, match="verify --full"):
        copy(_URL, _COPY)
    assert not {".metadata", data} & keys(s3_of, _COPY).keys()


def _copy_in_a_process(environment: Mapping[str, str], output: Path) -> None:
    begin(environment, output)
    multipart.COPIED_PART_SIZE = MIN_PART_SIZE
    copy(_URL, _COPY)


@pytest.mark.skipif(sys.platform != "linux", reason="relies on Linux's signals")
@pytest.mark.parametrize("applied", [False, True], ids=["not_applied", "applied"])
@pytest.mark.parametrize("operation", ["CopyObject", "UploadPartCopy", "CompleteMultipartUpload", "PutObject"])
def test_after_a_kill_a_second_run_finishes(
    operation: str, applied: bool, faulty: FaultyServer, s3_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, key = 2 if "Copy" in operation else 1, ".metadata" if operation == "PutObject" else ""
    monkeypatch.setattr(multipart, "COPIED_PART_SIZE", MIN_PART_SIZE)
    tensor = save_large(_URL)
    close_clients()  # or this process would be connected while it waits for quiet
    moment = AtRequest(operation, count, applied=applied, key=key)
    with moment.on(faulty):
        process = new_process(_copy_in_a_process, dict(os.environ), tmp_path / "output")
        with running([process]):
            assert moment.reached.wait(120), (tmp_path / "output").read_text()
            kill_all([process])
    wait_until_quiet(faulty)
    result = copy(_URL, _COPY)
    if key == ".metadata":
        assert result.moved == 0
    assert keys(s3_of, _COPY) == keys(s3_of, _URL)
    assert_loads(_COPY, {"t": tensor})
    assert dcp_s3.verify(_COPY, full=True).ok
    assert get(s3_of, _COPY, ".metadata") == get(s3_of, _URL, ".metadata")


def _put_foreign(s3: Any, url: str, directory: Path, value: float, *, save_id: bool = False) -> Path:
    tensors = {name: torch.full((10,), value) for name in "abcd"}
    writer = dcp.FileSystemWriter(directory, single_file_per_rank=False, overwrite=True)
    dcp.save(tensors, storage_writer=writer, no_dist=True)
    if not save_id:  # as torch saved before 2.3: ``.metadata`` is the same for all values
        metadata = pickle.loads((directory / ".metadata").read_bytes())
        metadata.storage_meta = None
        (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    for file in directory.iterdir():
        put(s3, url, file.name, file.read_bytes())
    return directory


def _values(reader: Any) -> set[float]:
    loaded = {name: torch.zeros(10) for name in "abcd"}
    dcp.load(loaded, storage_reader=reader, no_dist=True)
    return {value for tensor in loaded.values() for value in tensor.tolist()}


@pytest.mark.parametrize("to_directory", [False, True], ids=["copy", "download"])
def test_a_copy_is_never_of_two_saves(
    faulty: FaultyServer, s3_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to_directory: bool
) -> None:
    _put_foreign(s3_of, _URL, tmp_path / "torch", 1.0, save_id=True)
    destination = tmp_path / "copy" if to_directory else _COPY
    move = S3Store.map

    def move_before(self: S3Store, function: Any, items: Any) -> Any:
        found = move(self, function, items)
        if items:
            _put_foreign(s3_of, _URL, tmp_path / "torch", 2.0, save_id=True)
        return found

    monkeypatch.setattr(S3Store, "map", move_before)
    with pytest.raises(errors.CheckpointError, match="have changed meanwhile"):
        copy(_URL, destination)
    monkeypatch.setattr(S3Store, "map", move)
    assert not (tmp_path / "copy" / ".metadata").exists()
    assert ".metadata" not in keys(s3_of, _COPY)
    copy(_URL, destination)  # what is there is of the first save, in files of the same names and sizes
    assert _values(dcp.FileSystemReader(destination) if to_directory else S3StorageReader(_COPY)) == {2.0}


def test_another_save_with_the_same_metadata_is_not_overwritten(
    faulty: FaultyServer, s3_of: Any, tmp_path: Path
) -> None:
    _put_foreign(s3_of, _URL, tmp_path / "1", 1.0)
    there = _put_foreign(s3_of, _COPY, tmp_path / "2", 2.0)
    for destination in (_COPY, there):
        with pytest.raises(errors.CheckpointExistsError):
            copy(_URL, destination)
    assert _values(S3StorageReader(_COPY)) == _values(dcp.FileSystemReader(there)) == {2.0}
    for destination in (_COPY, there):
        copy(_URL, destination, True)
    assert _values(S3StorageReader(_COPY)) == _values(dcp.FileSystemReader(there)) == {1.0}


def test_a_good_copy_is_recognized_without_checksums_of_the_store(
    faulty: FaultyServer, s3_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dcp_s3.offline.copy.BLOCK", 100)  # larger ones are not compared whole
    head = S3Store.head
    monkeypatch.setattr(S3Store, "head", lambda self, key, **_: head(self, key))
    _put_foreign(s3_of, _URL, tmp_path / "1", 1.0)
    copy(_URL, _COPY)
    faulty.once("CopyObject", Fault.error(403, "AccessDenied"))
    assert copy(_URL, _COPY).moved == 0
    assert _values(S3StorageReader(_COPY)) == {1.0}
    faulty.rule = lambda _: None
    delete(s3_of, _COPY, ".metadata")  # what is there may be of another save then
    _put_foreign(s3_of, _URL, tmp_path / "2", 2.0)
    copy(_URL, _COPY)
    assert _values(S3StorageReader(_COPY)) == {2.0}


def test_what_is_saved_there_meanwhile_is_not_deleted(
    faulty: FaultyServer, s3_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy(save(_URL), _COPY)
    delete(s3_of, _COPY, next(path for path in keys(s3_of, _COPY) if path.endswith(".distcp")))
    remove = S3Store.delete

    def save_before(self: S3Store, targets: Any) -> Any:
        monkeypatch.setattr(S3Store, "delete", remove)
        save(_COPY, overwrite=True)
        return remove(self, targets)

    monkeypatch.setattr(S3Store, "delete", save_before)
    with pytest.raises(errors.CheckpointExistsError):
        copy(_URL, _COPY)
    assert_loads(_COPY, state())
