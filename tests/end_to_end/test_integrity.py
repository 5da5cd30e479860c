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

from dcp_s3 import S3StorageReader, errors
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.format.blocks import get_crc, get_raw_offset
from tests.end_to_end.conftest import SETTINGS, Saved, make_state
from tests.end_to_end.states import assert_same, blank, every_kind
from tests.flipping import flip_in_flight
from tests.servers import NAMES

pytestmark = pytest.mark.servers("memory")
TENSORS = ["large", "medium", "small.w7"]
ITEMS = [*TENSORS, "objects.text"]


def place_of(saved: Saved, fqn: str) -> tuple[int, int]:
    """First byte and length, in the object, of what the checksum of an item covers."""
    info = saved.info(fqn)
    return saved.raw(fqn) if get_raw_offset(info) else (info.offset, info.length)


def assert_found(saved: Saved, fqn: str, data: bytes) -> None:
    """A load fails, and says which bytes of an object, now ``data``, are damaged, what they should be and are."""
    info, (start, length) = saved.info(fqn), place_of(saved, fqn)
    error = saved.failure_of_load()
    assert isinstance(error, errors.CorruptCheckpointError)
    message = str(error)
    assert repr(fqn) in message
    assert f"bytes {start} to {start + length - 1} of {info.relative_path}" in message
    found, expected = crc64nvme(data[start : start + length]), get_crc(info)
    assert expected is not None
    assert found != expected
    assert f"CRC-64/NVME {crc_hex(found)}, recorded was {crc_hex(expected)}" in message


def assert_corrupt(saved: Saved, said: str = "") -> None:
    error = saved.failure_of_load()
    assert isinstance(error, errors.CorruptCheckpointError)
    assert said in str(error)


# --- at rest --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fqn", ITEMS)
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_a_flipped_bit_in_an_item(saved: Saved, fqn: str, place: float) -> None:
    start, length = place_of(saved, fqn)
    assert_found(saved, fqn, saved.flip(saved.info(fqn).relative_path, start + int(place * (length - 1))))


def test_a_flipped_bit_that_is_loaded_into_other_memory_or_not_at_all(memory_server: Any, saved: Saved) -> None:
    """Into strided memory and through a conversion, the bytes take another way."""
    start, length = saved.raw("medium")
    saved.flip(saved.info("medium").relative_path, start + length - 1)
    strided = torch.zeros(1000, 300, dtype=torch.bfloat16).t()
    error = saved.failure_of_load({"medium": strided})
    assert isinstance(error, errors.CorruptCheckpointError)
    assert not strided.any(), "damaged bytes reached the tensor"
    with pytest.raises(CheckpointException, match="CorruptCheckpointError"):
        saved.load({"medium": torch.zeros(300, 1000)})
    rest = {key: value for key, value in saved.state.items() if key != "medium"}
    assert_same(saved.load(blank(rest)), rest)


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
        info, (start, length) = saved.info(fqn), saved.raw(fqn)
        positions += [*range(info.offset, start, 5), *range(start + length, info.offset + info.length, 5)]
    assert len(positions) > 100
    saved.flip(saved.info("large").relative_path, *positions)
    assert_same(saved.load(), saved.state)
    assert not [record for record in caplog.records if record.name.startswith("dcp_s3")]


@pytest.mark.servers(*NAMES)
@pytest.mark.parametrize("keep", [0, 1e-9, 0.3, 0.99])
def test_a_truncated_object(saved: Saved, keep: float) -> None:
    path = saved.info("large").relative_path
    data = saved.get(path)
    saved.put(path, data[: int(keep * len(data)) + (0 < keep < 0.1)])
    error = saved.failure_of_load()
    assert isinstance(error, errors.CorruptCheckpointError)
    assert re.search(rf"{re.escape(path)} ends before byte \d+", str(error))


def test_an_object_without_its_last_needed_byte(memory_server: Any, saved: Saved) -> None:
    info = max(saved.metadata.storage_data.values(), key=lambda info: info.offset)
    saved.put(info.relative_path, saved.get(info.relative_path)[: info.offset + info.length - 1])
    if get_raw_offset(info) is None:
        assert_corrupt(saved)
    else:  # only framing is missing
        assert_same(saved.load(), saved.state)


@pytest.mark.parametrize("change", ["longer", "shifted", "shorter", "same size", "deleted"])
def test_a_replaced_object(memory_server: Any, saved: Saved, change: str) -> None:
    path = saved.info("large").relative_path
    data = saved.get(path)
    other = {
        "longer": os.urandom(len(data) + 1000),
        "shifted": b"x" + data,
        "shorter": data[: len(data) // 2],
        "same size": os.urandom(len(data)),
    }
    if change == "deleted":
        saved.delete(path)
        assert_corrupt(saved, f"its object {path} does not exist")
    else:
        saved.put(path, other[change])
        assert_corrupt(saved, path)


def test_an_object_of_another_checkpoint(s3: Any, bucket: str, root: str, saved: Saved) -> None:
    """The same state with one other value: all is valid there, and in the same place."""
    state = make_state()
    state["medium"][-1, -1] = 1
    other = Saved(s3, bucket, f"{root}/other", state=state)
    assert other.raw("medium") == saved.raw("medium")
    data = other.get(other.info("medium").relative_path)
    saved.put(saved.info("medium").relative_path, data)
    assert_found(saved, "medium", data)


def test_a_reader_is_usable_again_after_damage(memory_server: Any, saved: Saved) -> None:
    path = saved.info("medium").relative_path
    original = saved.get(path)
    saved.flip(path, saved.raw("medium")[0])
    reader = S3StorageReader(saved.url, settings=SETTINGS)
    with pytest.raises(CheckpointException):
        dcp.load(blank(saved.state), storage_reader=reader)
    saved.put(path, original)
    state = blank(saved.state)
    dcp.load(state, storage_reader=reader)
    assert_same(state, saved.state)


# --- in flight ------------------------------------------------------------------------------------------


def stored_bytes(saved: Saved, fqn: str) -> bytes:
    """A few bytes in the middle of the item that are nowhere else."""
    if fqn == "objects.text":
        return b"something"
    start, length = saved.raw(fqn)
    data = saved.get(saved.info(fqn).relative_path)
    found = data[start + length // 2 :][:9]
    assert data.count(found) == 1
    return found


@pytest.mark.parametrize("fqn", ITEMS)
def test_damage_in_flight_is_repaired_once(
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

    seen = flip_in_flight(monkeypatch, stored_bytes(saved, fqn), times=100)
    assert_corrupt(saved, repr(fqn))
    assert len(seen) == 2


# --- without checksums ----------------------------------------------------------------------------------


def test_checksums_are_recorded_for_every_item(s3: Any, bucket: str, root: str) -> None:
    """Strided, conjugated, of every dtype: what is written without a checksum would be loaded unverified."""
    saved = Saved(s3, bucket, root, state={**make_state(), **every_kind()})
    assert saved.metadata.storage_data
    for index, info in saved.metadata.storage_data.items():
        start, length = place_of(saved, index.fqn)
        assert get_crc(info) == crc64nvme(saved.get(info.relative_path)[start : start + length]), index


def test_checksum_none_records_none_and_loads(s3: Any, bucket: str, root: str) -> None:
    saved = Saved(s3, bucket, root, checksum="none")
    stored = pickle.loads(saved.get(".metadata"))
    assert {get_crc(info) for info in stored.storage_data.values()} == {None}
    keys = [found["Key"] for found in s3.list_objects_v2(Bucket=bucket)["Contents"]]
    (manifest,) = (json.loads(saved.get(key.removeprefix("run/"))) for key in keys if "/manifest-" in key)
    assert [entry["crc64nvme"] for entry in manifest["objects"]] == [None]
    assert_same(saved.load(), saved.state)


def test_damage_without_checksums_is_found_by_lengths_and_by_unpickling(s3: Any, bucket: str, root: str) -> None:
    """What other writers wrote has no checksums either."""
    saved = Saved(s3, bucket, root, checksum="none")
    info = saved.info("objects.text")
    data = saved.get(info.relative_path)
    saved.put(info.relative_path, data[: info.offset] + bytes(info.length) + data[info.offset + info.length :])
    assert_corrupt(saved, "'objects.text'")
    saved.put(info.relative_path, data[:1000])
    assert_corrupt(saved)
    saved.delete(info.relative_path)
    assert_corrupt(saved)


# --- metadata (each of its bits is flipped in test_flipped_metadata) --------------------------------------


class _Code:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


def test_metadata_that_is_cut_off(memory_server: Any, saved: Saved) -> None:
    data = saved.get(".metadata")
    for length in (0, len(data) // 2, len(data) - 10):  # the last: the pickle is whole, the seal is not
        saved.put(".metadata", data[:length])
        assert_corrupt(saved)


@pytest.mark.parametrize("field", ["planner_data", "storage_meta", "state_dict_metadata"])
def test_code_in_metadata_is_not_run(memory_server: Any, saved: Saved, tmp_path: Any, field: str) -> None:
    saved.change_metadata(lambda metadata: setattr(metadata, field, _Code(f"touch {tmp_path}/owned")))
    error = saved.failure_of_load()
    assert isinstance(error, errors.UnsafeMetadataError)
    assert "system" in str(error)
    assert not (tmp_path / "owned").exists()


@pytest.mark.timeout(120)  # whoever takes the memory for 2**45 bytes does not end in hours
@pytest.mark.parametrize(
    ("change", "items"),
    [
        *((change, 2) for change in ("offset + 1", "offset = -10", "offset = 2**50", "length = 5", "length = 0")),
        ("relative_path = 'other.distcp'", 2), ("crc64nvme ^ 1", 2), ("length = 2**45", 0),
        *((f"raw_offset = {offset}", 1) for offset in (-1, 0, 1, 10**9)),
    ],
)  # fmt: skip
def test_tampered_storage_data(memory_server: Any, saved: Saved, change: str, items: int) -> None:
    """Of a tensor, of an object, or of both, one after the other."""
    original = saved.get(".metadata")
    for fqn in (("objects.text",), ("medium",), ("medium", "objects.text"))[items]:
        name = change.split()[0]
        value = eval(change.partition(" = ")[2] or change, {name: vars(saved.info(fqn)).get(name)})
        saved.change_info(fqn, **{name: value})
        assert_corrupt(saved)
        saved.put(".metadata", original)


def test_storage_data_that_is_missing(memory_server: Any, saved: Saved) -> None:
    original = saved.get(".metadata")

    def drop(metadata: Metadata, fqn: str) -> None:
        metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if i.fqn != fqn}

    for fqn in ("medium", "objects.text"):
        saved.change_metadata(lambda metadata, fqn=fqn: drop(metadata, fqn))
        assert_corrupt(saved)
        saved.put(".metadata", original)
    saved.change_metadata(lambda metadata: setattr(metadata, "storage_data", None))
    assert_corrupt(saved)


def test_a_tensor_that_is_said_to_be_an_object_and_the_reverse(memory_server: Any, saved: Saved) -> None:
    def swap(metadata: Metadata) -> None:
        entries = metadata.state_dict_metadata
        entries["medium"], entries["objects.text"] = entries["objects.text"], entries["medium"]

    saved.change_metadata(swap)
    with pytest.raises(CheckpointException):
        saved.load()
