"""Damage to data is found, named, and repaired where it can be; wrong bytes never reach a tensor unnoticed."""

from __future__ import annotations

import json
import logging
import os
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.format.blocks import get_crc, get_raw_offset
from tests.end_to_end.damaging import SETTINGS, Saved, make_state
from tests.end_to_end.states import assert_same, blank, every_kind
from tests.flipping import flip_in_flight

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
TENSORS = ["large", "medium", "small.w7"]


def assert_names(error: errors.DcpS3Error, fqn: str, info: Any, start: int, stored: bytes) -> None:
    """The message says which bytes, what they should be and what they are."""
    assert isinstance(error, errors.CorruptCheckpointError)
    message = str(error)
    end = start + len(stored) - 1
    assert repr(fqn) in message
    assert f"bytes {start} to {end} of {info.relative_path}" in message
    found, expected = crc64nvme(stored), get_crc(info)
    assert expected is not None
    assert found != expected
    assert f"CRC-64/NVME {crc_hex(found)}, recorded was {crc_hex(expected)}" in message


# --- at rest --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fqn", TENSORS)
def test_a_flipped_bit_in_a_tensor(saved: Saved, fqn: str) -> None:
    info = saved.info(fqn)
    start, length = saved.raw(fqn)
    data = saved.flip(info.relative_path, start + length // 2)
    assert_names(saved.failure_of_load(), fqn, info, start, data[start : start + length])


@pytest.mark.parametrize("fqn", TENSORS)
@pytest.mark.parametrize("end", ["first", "last"])
def test_a_flipped_bit_at_either_end_of_a_tensor(memory_server: Any, saved: Saved, fqn: str, end: str) -> None:
    info = saved.info(fqn)
    start, length = saved.raw(fqn)
    data = saved.flip(info.relative_path, start if end == "first" else start + length - 1)
    assert_names(saved.failure_of_load(), fqn, info, start, data[start : start + length])


def test_a_flipped_bit_that_is_loaded_into_other_memory(memory_server: Any, saved: Saved) -> None:
    """Into strided memory and through a conversion, the bytes take another way."""
    start, length = saved.raw("medium")
    saved.flip(saved.info("medium").relative_path, start + length - 1)
    strided = torch.zeros(1000, 300, dtype=torch.bfloat16).t()
    error = saved.failure_of_load({"medium": strided})
    assert isinstance(error, errors.CorruptCheckpointError)
    assert not strided.any(), "damaged bytes reached the tensor"
    with pytest.raises(CheckpointException, match="CorruptCheckpointError"):
        saved.load({"medium": torch.zeros(300, 1000)})


@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_a_flipped_bit_in_an_object(memory_server: Any, saved: Saved, place: float) -> None:
    info = saved.info("objects.text")
    data = saved.flip(info.relative_path, info.offset + int(place * (info.length - 1)))
    stored = data[info.offset : info.offset + info.length]
    assert_names(saved.failure_of_load(), "objects.text", info, info.offset, stored)


def test_every_byte_of_an_object_counts(memory_server: Any, saved: Saved) -> None:
    """Pickled data is unpickled: not one byte of it may go unverified."""
    info = saved.info("objects.numbers")
    original = saved.get(info.relative_path)
    for position in range(info.offset, info.offset + info.length, 37):
        saved.flip(info.relative_path, position)
        error = saved.failure_of_load({"objects": {"numbers": []}})
        assert isinstance(error, errors.CorruptCheckpointError), position
        assert "'objects.numbers'" in str(error)
        saved.put(info.relative_path, original)


def test_flipped_bits_in_framing_change_nothing(memory_server: Any, saved: Saved, caplog: Any) -> None:
    """Raw bytes are read directly: what torch.save puts around them is not even looked at."""
    positions = []
    for fqn in TENSORS:
        info = saved.info(fqn)
        start, length = saved.raw(fqn)
        positions += [*range(info.offset, start, 5), *range(start + length, info.offset + info.length, 5)]
    assert len(positions) > 100
    saved.flip(saved.info("large").relative_path, *positions)
    assert_same(saved.load(), saved.state)
    assert not [record for record in caplog.records if record.name.startswith("dcp_s3")]


def test_other_tensors_of_a_damaged_object_can_be_loaded(memory_server: Any, saved: Saved) -> None:
    start, _ = saved.raw("medium")
    saved.flip(saved.info("medium").relative_path, start)
    rest = {key: value for key, value in saved.state.items() if key != "medium"}
    assert_same(saved.load(blank(rest)), rest)


def last_item(saved: Saved) -> Any:
    return max(saved.metadata.storage_data.values(), key=lambda info: info.offset)


@pytest.mark.parametrize("keep", [0, 1, 0.3, 0.99])
def test_a_truncated_object(saved: Saved, keep: float) -> None:
    path = last_item(saved).relative_path
    data = saved.get(path)
    saved.put(path, data[: 1 if keep == 1 else int(keep * len(data))])
    error = saved.failure_of_load()
    assert isinstance(error, errors.CorruptCheckpointError)
    assert re.search(rf"{re.escape(path)} ends before byte \d+", str(error))


def test_an_object_without_its_last_needed_byte(memory_server: Any, saved: Saved) -> None:
    info = last_item(saved)
    saved.put(info.relative_path, saved.get(info.relative_path)[: info.offset + info.length - 1])
    raw_offset = get_raw_offset(info)
    if raw_offset is None:
        assert isinstance(saved.failure_of_load(), errors.CorruptCheckpointError)
    else:  # only framing is missing
        assert_same(saved.load(), saved.state)


def test_a_deleted_object(saved: Saved) -> None:
    path = saved.info("medium").relative_path
    saved.delete(path)
    error = saved.failure_of_load()
    assert isinstance(error, errors.CorruptCheckpointError)
    assert f"its object {path} does not exist" in str(error)


@pytest.mark.parametrize("change", ["longer", "shifted", "shorter", "same size"])
def test_a_replaced_object(memory_server: Any, saved: Saved, change: str) -> None:
    path = saved.info("large").relative_path
    data = saved.get(path)
    other = {
        "longer": os.urandom(len(data) + 1000),
        "shifted": b"x" + data,
        "shorter": data[: len(data) // 2],
        "same size": os.urandom(len(data)),
    }[change]
    saved.put(path, other)
    error = saved.failure_of_load()
    assert isinstance(error, errors.CorruptCheckpointError)
    assert path in str(error)


def test_an_object_of_another_checkpoint(memory_server: Any, s3: Any, bucket: str, root: str, saved: Saved) -> None:
    """The same state with one other value: all is valid there, and in the same place."""
    state = make_state()
    state["medium"][-1, -1] = 1
    other = Saved(s3, bucket, f"{root}/other", state=state)
    assert other.raw("medium") == saved.raw("medium")
    info = saved.info("medium")
    data = other.get(other.info("medium").relative_path)
    saved.put(info.relative_path, data)
    start, length = saved.raw("medium")
    assert_names(saved.failure_of_load(), "medium", info, start, data[start : start + length])


# --- in flight ------------------------------------------------------------------------------------------


IN_FLIGHT = [*TENSORS, "objects.text"]


def stored_bytes(saved: Saved, fqn: str) -> bytes:
    """A few bytes in the middle of the item that are nowhere else."""
    info = saved.info(fqn)
    start, length = saved.raw(fqn) if fqn in TENSORS else (info.offset, info.length)
    data = saved.get(info.relative_path)
    if fqn == "objects.text":
        return b"something"
    found = data[start + length // 2 :][:9]
    assert data.count(found) == 1
    return found


@pytest.mark.parametrize("fqn", IN_FLIGHT)
def test_damage_in_flight_is_repaired(
    memory_server: Any, saved: Saved, monkeypatch: pytest.MonkeyPatch, caplog: Any, fqn: str
) -> None:
    memory_server.handle.reset_counters()
    assert_same(saved.load(), saved.state)
    usual = memory_server.handle.counters.requests["GetObject"]
    seen = flip_in_flight(monkeypatch, stored_bytes(saved, fqn), times=1)
    memory_server.handle.reset_counters()
    with caplog.at_level(logging.WARNING, logger="dcp_s3"):
        assert_same(saved.load(), saved.state)
    assert len(seen) == 1
    again = 2 if fqn == "large" else 1  # of 5 MiB at most
    assert memory_server.handle.counters.requests["GetObject"] == usual + again
    (record,) = (r for r in caplog.records if "checksum" in r.getMessage())
    assert record.levelno == logging.WARNING
    assert repr(fqn) in record.getMessage()
    assert saved.url in record.getMessage()


@pytest.mark.parametrize("fqn", IN_FLIGHT)
def test_damage_in_flight_again_and_again_is_an_error(
    memory_server: Any, saved: Saved, monkeypatch: pytest.MonkeyPatch, fqn: str
) -> None:
    seen = flip_in_flight(monkeypatch, stored_bytes(saved, fqn), times=100)
    error = saved.failure_of_load()
    assert isinstance(error, errors.CorruptCheckpointError)
    assert repr(fqn) in str(error)
    assert len(seen) == 2


# --- without checksums ----------------------------------------------------------------------------------


def test_checksums_are_recorded_for_every_item(memory_server: Any, saved: Saved) -> None:
    assert saved.metadata.storage_data
    for index, info in saved.metadata.storage_data.items():
        data = saved.get(info.relative_path)
        start, length = (saved.raw(index.fqn)) if get_raw_offset(info) else (info.offset, info.length)
        assert get_crc(info) == crc64nvme(data[start : start + length]), index


def test_checksum_none_records_none_and_loads(memory_server: Any, s3: Any, bucket: str, root: str) -> None:
    saved = Saved(s3, bucket, root, checksum="none")
    stored = pickle.loads(saved.get(".metadata"))
    assert {get_crc(info) for info in stored.storage_data.values()} == {None}
    keys = [found["Key"] for found in s3.list_objects_v2(Bucket=bucket)["Contents"]]
    (manifest,) = (json.loads(saved.get(key.removeprefix("run/"))) for key in keys if "/manifest-" in key)
    assert [entry["crc64nvme"] for entry in manifest["objects"]] == [None]
    assert_same(saved.load(), saved.state)


@pytest.mark.parametrize("checksum", ["none", "crc64nvme"])
def test_damage_without_recorded_checksums_is_no_crash(
    memory_server: Any, s3: Any, bucket: str, root: str, checksum: str
) -> None:
    """Objects cut short or missing are found by their length alone."""
    saved = Saved(s3, bucket, root, checksum=checksum)
    path = saved.info("large").relative_path
    saved.put(path, saved.get(path)[:1000])
    assert isinstance(saved.failure_of_load(), errors.CorruptCheckpointError)
    saved.delete(path)
    assert isinstance(saved.failure_of_load(), errors.CorruptCheckpointError)


def test_damage_without_checksums_that_unpickling_trips_over_is_named(
    memory_server: Any, s3: Any, bucket: str, root: str
) -> None:
    """What other writers wrote has no checksums either."""
    saved = Saved(s3, bucket, root, checksum="none")
    info = saved.info("objects.text")
    data = saved.get(info.relative_path)
    saved.put(info.relative_path, data[: info.offset] + bytes(info.length) + data[info.offset + info.length :])
    error = saved.failure_of_load()
    assert isinstance(error, errors.CorruptCheckpointError)
    assert "'objects.text'" in str(error)


# --- metadata -------------------------------------------------------------------------------------------


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
