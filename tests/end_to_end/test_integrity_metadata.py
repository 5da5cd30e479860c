"""Damage to ``.metadata``, and metadata that was tampered with: our errors, no code run, no wrong bytes."""

from __future__ import annotations

import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.format.blocks import get_crc
from tests.end_to_end.damaging import SETTINGS, Saved
from tests.end_to_end.states import assert_same, blank, every_kind

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class _Code:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


@pytest.mark.parametrize("keep", [0, 1, 0.5, 0.999])
def test_truncated_metadata(saved: Saved, keep: float) -> None:
    data = saved.get(".metadata")
    saved.put(".metadata", data[: 1 if keep == 1 else int(keep * len(data))])
    assert isinstance(saved.failure_of_load(), errors.CorruptCheckpointError)


@pytest.mark.parametrize(
    "data",
    [b"not a pickle", b"\x80\x05", pickle.dumps({"a": 1}), pickle.dumps(None), os.urandom(1000), b"PK\x03\x04"],
    ids=["text", "head", "dict", "None", "random", "zip"],
)
def test_replaced_metadata(memory_server: Any, saved: Saved, data: bytes) -> None:
    saved.put(".metadata", data)
    assert isinstance(saved.failure_of_load(), errors.CorruptCheckpointError)


def test_flipped_bits_in_metadata_load_what_was_saved_or_fail_with_our_error(memory_server: Any, saved: Saved) -> None:
    original = saved.get(".metadata")
    target = {"small": {"w7": torch.zeros(9, 5)}}
    expected = {"small": {"w7": saved.state["small"]["w7"]}}
    failed, others = 0, []
    for position in range(0, len(original), len(original) // 100):
        saved.flip(".metadata", position)
        target["small"]["w7"].zero_()
        try:
            saved.load(target)
        except CheckpointException as failure:
            ((error, _),) = failure.failures.values()
            failed += 1
            # The planner looks for its entries before anything is read, and has an error of its own for those missing.
            if not isinstance(error, errors.CheckpointError) and "Missing key in checkpoint" not in str(error):
                others.append((position, repr(error)))
        else:
            assert_same(target, expected)
        saved.put(".metadata", original)
    assert failed > 10
    assert not others


@pytest.mark.parametrize("field", ["planner_data", "storage_meta", "state_dict_metadata"])
def test_code_in_metadata_is_not_run(memory_server: Any, saved: Saved, tmp_path: Any, field: str) -> None:
    saved.change_metadata(lambda metadata: setattr(metadata, field, _Code(f"touch {tmp_path}/owned")))
    error = saved.failure_of_load()
    assert isinstance(error, errors.UnsafeMetadataError)
    assert "system" in str(error)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("path", ["../other/__0_0.distcp", "/etc/passwd", ""])
def test_metadata_that_points_elsewhere(memory_server: Any, saved: Saved, path: str) -> None:
    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "medium":
                info.relative_path = path

    saved.change_metadata(change)
    error = saved.failure_of_load()
    assert isinstance(error, errors.UnsafeMetadataError)
    assert "'medium'" in str(error)


def _drop(metadata: Metadata, info: Any) -> None:
    metadata.storage_data = {index: i for index, i in metadata.storage_data.items() if i is not info}


def _no_storage_data(metadata: Metadata, info: Any) -> None:
    metadata.storage_data = None


@pytest.mark.parametrize("fqn", ["medium", "objects.text"])
@pytest.mark.parametrize(
    "change",
    [
        _drop,
        _no_storage_data,
        lambda _, info: setattr(info, "offset", info.offset + 1),
        lambda _, info: setattr(info, "offset", -10),
        lambda _, info: setattr(info, "offset", 2**50),
        lambda _, info: setattr(info, "length", 5),
        lambda _, info: setattr(info, "length", 0),
        lambda _, info: setattr(info, "crc64nvme", info.crc64nvme ^ 1),
        lambda _, info: setattr(info, "relative_path", "other.distcp"),
    ],
    ids=["dropped", "no storage_data", "offset+1", "offset<0", "offset=2**50", "length=5", "length=0", "crc", "path"],
)
def test_tampered_storage_data(memory_server: Any, saved: Saved, fqn: str, change: Any) -> None:
    def apply(metadata: Metadata) -> None:
        (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == fqn)
        change(metadata, info)

    saved.change_metadata(apply)
    error = saved.failure_of_load()
    assert isinstance(error, errors.CorruptCheckpointError)


@pytest.mark.parametrize("raw_offset", [-1, 0, 1, 10**9])
def test_a_tampered_raw_offset(memory_server: Any, saved: Saved, raw_offset: int) -> None:
    def apply(metadata: Metadata) -> None:
        (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == "medium")
        info.raw_offset = raw_offset

    saved.change_metadata(apply)
    error = saved.failure_of_load()
    assert isinstance(error, errors.CorruptCheckpointError)


@pytest.mark.timeout(120)  # whoever takes its memory for it does not end in hours
def test_an_item_said_to_be_larger_than_any_object(memory_server: Any, saved: Saved) -> None:
    def apply(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == "objects.text":
                info.length = 2**45

    saved.change_metadata(apply)
    error = saved.failure_of_load()
    assert isinstance(error, errors.CorruptCheckpointError)


def test_a_tensor_that_is_said_to_be_an_object_and_the_reverse(memory_server: Any, saved: Saved) -> None:
    def swap(metadata: Metadata) -> None:
        entries = metadata.state_dict_metadata
        entries["medium"], entries["objects.text"] = entries["objects.text"], entries["medium"]

    saved.change_metadata(swap)
    with pytest.raises(CheckpointException):
        saved.load()


def test_a_reader_is_usable_again_after_damage(memory_server: Any, saved: Saved) -> None:
    info = saved.info("medium")
    start, _ = saved.raw("medium")
    original = saved.get(info.relative_path)
    saved.flip(info.relative_path, start)
    reader = S3StorageReader(saved.url, settings=SETTINGS)
    with pytest.raises(CheckpointException):
        dcp.load(blank(saved.state), storage_reader=reader)
    saved.put(info.relative_path, original)
    state = blank(saved.state)
    dcp.load(state, storage_reader=reader)
    assert_same(state, saved.state)


def test_every_kind_of_entry_is_verified(memory_server: Any, s3: Any, bucket: str, root: str) -> None:
    """Strided, conjugated, of every dtype: what is written without a checksum would be loaded unverified."""
    metadata = dcp.save(every_kind(), storage_writer=S3StorageWriter(root))
    missing = [index.fqn for index, info in metadata.storage_data.items() if get_crc(info) is None]
    assert not missing
