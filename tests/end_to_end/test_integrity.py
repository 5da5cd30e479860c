"""Damage to data is found, named, and repaired where it can be; wrong bytes never reach a tensor unnoticed."""

from __future__ import annotations

import json
import logging
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3 import errors
from dcp_s3.checksum import crc64nvme, crc_hex
from dcp_s3.format.blocks import get_crc, get_raw_offset
from tests.end_to_end.conftest import Saved, make_state
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


@pytest.mark.servers(*NAMES)
def test_a_truncated_object_and_one_that_is_gone(saved: Saved) -> None:
    path = saved.info("large").relative_path
    data = saved.get(path)
    for keep in (0, 1, len(data) // 3, len(data) - 2000):
        saved.put(path, data[:keep])
        assert_corrupt(saved, f"{path} ends before byte ")
    saved.delete(path)
    assert_corrupt(saved, f"its object {path} does not exist")


def test_an_object_of_another_checkpoint(s3: Any, bucket: str, root: str, saved: Saved) -> None:
    """The same state with one other value: all is valid there, and in the same place."""
    state = make_state()
    state["medium"][-1, -1] = 1
    other = Saved(s3, bucket, f"{root}/other", state=state)
    assert other.raw("medium") == saved.raw("medium")
    data = other.get(other.info("medium").relative_path)
    saved.put(saved.info("medium").relative_path, data)
    assert_found(saved, "medium", data)


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
