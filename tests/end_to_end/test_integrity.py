"""Damage to data and metadata is found, named, and repaired where it can be; no wrong byte reaches a tensor unnoticed.

Every bit of ``.metadata`` is tried by the reader's own function; of metadata without a seal, every 13th unless
DCP_S3_TEST_FLIPS is set. Where it finds nothing, and in some other cases, everything that reads metadata is tried as
well: DCP_S3_TEST_FLIPS such bits, evenly spread; 0 stands for all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from dcp_s3 import CheckpointManager, S3StorageReader, S3StorageWriter, errors, read_tensor, verify
from dcp_s3.format.blocks import get_facts
from dcp_s3.format.metadata import load_metadata
from dcp_s3.memory import crc64nvme, crc_hex
from tests.end_to_end import loads
from tests.end_to_end.states import assert_same, blank, random_tensor
from tests.flipping import flip_in_flight
from tests.offline import conftest as offline
from tests.ranks import run_ranks
from tests.servers import NAMES

pytestmark = pytest.mark.servers("memory")
ITEMS = ["large", "medium", "small.w7", "objects.text"]


def make_state() -> dict[str, Any]:
    """A tensor that takes several requests, one for itself, several that share one, and objects."""
    return {
        "large": random_tensor((1500, 1000), torch.float32, 1),
        "medium": random_tensor((300, 1000), torch.bfloat16, 2),
        "small": {f"w{i}": random_tensor((9, 5), torch.float32, 10 + i) for i in range(20)},
        "objects": {"text": "something", "numbers": [1, 2, 3]},
    }


class Saved(offline.Saved):
    """It is in one object, and can be loaded."""

    def __init__(self, s3: Any, root: str, **settings: Any) -> None:
        super().__init__(s3, root)
        self.state = make_state()
        self.save(self.state, writer={"max_objects": 1}, **settings)

    def covered(self, fqn: str) -> tuple[int, int]:
        """First byte and length, in the object, of what the checksum of an item covers."""
        info = self.info(fqn)
        if not get_facts(info)[0]:
            return info.offset, info.length
        entry: Any = self.metadata.state_dict_metadata[fqn]
        return info.offset + get_facts(info)[0], entry.size.numel() * entry.properties.dtype.itemsize

    def load(self, state: Any = None) -> Any:
        return loads.load(blank(self.state) if state is None else state, self.url, settings=offline.SETTINGS)

    def assert_corrupt(self, said: str = "", state: Any = None) -> str:
        """No load; returns what the error says."""
        error = loads.failure(lambda: self.load(state), errors.CorruptCheckpointError)
        assert error.url == self.url
        assert self.url in str(error)
        assert said in str(error)
        return str(error)


@pytest.fixture
def saved(s3: Any, root: str) -> Saved:
    return Saved(s3, root)


# --- at rest --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fqn", ITEMS)
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_a_flipped_bit_in_an_item(saved: Saved, fqn: str, place: float) -> None:
    info, (start, length) = saved.info(fqn), saved.covered(fqn)
    saved.flip(info.relative_path, start + int(place * (length - 1)))
    message = saved.assert_corrupt(repr(fqn))
    assert f"bytes {start} to {start + length - 1} of {info.relative_path}" in message
    found, expected = crc64nvme(saved.get(info.relative_path)[start : start + length]), get_facts(info)[1]
    assert expected is not None
    assert f"CRC-64/NVME {crc_hex(found)}, recorded was {crc_hex(expected)}" in message


def test_a_flipped_bit_that_is_loaded_into_other_memory_or_not_at_all(memory_server: Any, saved: Saved) -> None:
    """Into strided memory and through a conversion, the bytes take another way."""
    start, length = saved.covered("medium")
    saved.flip(saved.info("medium").relative_path, start + length - 1)
    strided = torch.zeros(1000, 300, dtype=torch.bfloat16).t()
    saved.assert_corrupt(state={"medium": strided})
    assert not strided.any(), "damaged bytes reached the tensor"
    saved.assert_corrupt(state={"medium": torch.zeros(300, 1000)})
    rest = {key: value for key, value in saved.state.items() if key != "medium"}
    assert_same(saved.load(blank(rest)), rest)


@pytest.mark.servers(*NAMES)
@pytest.mark.parametrize("checksum", ["auto", "none"])
def test_a_truncated_object_and_one_that_is_gone(s3: Any, root: str, checksum: str) -> None:
    saved = Saved(s3, root, checksum=checksum)
    path = saved.info("large").relative_path
    data = saved.get(path)
    for keep in (0, 1, len(data) // 3, len(data) - 2000):
        saved.put(path, data[:keep])
        saved.assert_corrupt(f"{path} ends before byte ")
    saved.delete(path)
    saved.assert_corrupt(f"its object {path} does not exist")


def test_damage_without_checksums_is_found_by_unpickling(s3: Any, root: str) -> None:
    saved = Saved(s3, root, checksum="none")
    info = saved.info("objects.text")
    data = saved.get(info.relative_path)
    saved.put(info.relative_path, data[: info.offset] + bytes(info.length) + data[info.offset + info.length :])
    saved.assert_corrupt("'objects.text'")


def stored_bytes(saved: Saved, fqn: str) -> bytes:
    if fqn == "objects.text":
        return b"something"
    start, length = saved.covered(fqn)
    data = saved.get(saved.info(fqn).relative_path)
    found = data[start + length // 2 :][:9]
    assert data.count(found) == 1
    return found


@pytest.mark.parametrize("fqn", ITEMS)
def test_damage_in_flight_is_repaired_once(
    memory_server: Any, saved: Saved, monkeypatch: pytest.MonkeyPatch, caplog: Any, fqn: str
) -> None:
    seen = flip_in_flight(monkeypatch, stored_bytes(saved, fqn), times=1)
    with caplog.at_level(logging.WARNING, logger="dcp_s3"):
        assert_same(saved.load(), saved.state)
    assert len(seen) == 1
    (record,) = (r for r in caplog.records if "checksum" in r.getMessage())
    assert record.levelno == logging.WARNING
    assert repr(fqn) in record.getMessage()
    assert saved.url in record.getMessage()

    seen = flip_in_flight(monkeypatch, stored_bytes(saved, fqn), times=100)
    saved.assert_corrupt(repr(fqn))
    assert len(seen) == 2


# --- metadata -------------------------------------------------------------------------------------------


@pytest.mark.timeout(120)  # whoever takes the memory for 2**45 bytes does not end in hours
def test_tampered_storage_data(saved: Saved) -> None:
    def tampered(fqn: str, field: str, value: Any) -> Callable[[Metadata], None]:
        def change(metadata: Metadata) -> None:
            (info,) = (info for index, info in metadata.storage_data.items() if index.fqn == fqn)
            vars(info)[field] = value

        return change

    def drop(metadata: Metadata) -> None:
        metadata.storage_data = {i: info for i, info in metadata.storage_data.items() if i.fqn != "medium"}

    both = [
        ("offset", -10), ("offset", 1), ("offset", 2**50), ("length", 0), ("length", 5), ("relative_path", "x.distcp"),
        ("crc64nvme", 1),
    ]  # fmt: skip
    changes = [
        drop,
        lambda metadata: setattr(metadata, "storage_data", None),
        tampered("objects.text", "length", 2**45),
        *(tampered("medium", "raw_offset", value) for value in (-1, 0, 1, 10**9)),
        *(tampered(fqn, *each) for fqn in ("medium", "objects.text") for each in both),
    ]
    original = saved.get(".metadata")
    for change in changes:
        saved.change_metadata(change)
        saved.assert_corrupt()
        saved.put(".metadata", original, {})


_FLIPS = int(os.environ.get("DCP_S3_TEST_FLIPS", "6"))
_MEMORY = 300 * 2**20


def _small_state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "model": {"a.weight": torch.randn(6, 4), "b.weight": torch.randn(6, 4), "b.bias": torch.randn(3).bfloat16()},
        "count": torch.tensor(7),
        "wide": torch.randn(3, 4),
        "step": 17,
    }


def _sharded() -> dict[str, Any]:
    state, mesh = _small_state(), init_device_mesh("cpu", (dist.get_world_size(),))
    for name in ("a.weight", "b.weight"):
        state["model"][name] = distribute_tensor(state["model"][name], mesh, [Shard(0)])
    return state


def _save_twice(root: str, directory: str) -> None:
    for step in (1, 2):
        dcp.save(_sharded(), storage_writer=S3StorageWriter(f"{root}/ours/step-{step:08d}"))
        dcp.save(_sharded(), storage_writer=dcp.FileSystemWriter(directory))


@pytest.fixture(params=["as saved", "copied", "copied, of an earlier version", "torch's"])
def checkpoint(request: Any, s3: Any, bucket: str, root: str, tmp_path: Path) -> Any:
    """The root with two checkpoints; the second is to be damaged. And its key, bytes and user metadata."""
    kind = request.param
    run_ranks(2, _save_twice, root, str(tmp_path / "torch"))
    if kind == "torch's":
        root = f"{root}/torch"
        for step in (1, 2):
            for path in (tmp_path / "torch").iterdir():
                s3.put_object(Bucket=bucket, Key=f"run/torch/step-{step:08d}/{path.name}", Body=path.read_bytes())
    else:
        root = f"{root}/ours"
    key = f"{root.removeprefix(f's3://{bucket}/')}/step-00000002/.metadata"
    found = s3.get_object(Bucket=bucket, Key=key)
    data, fields = found["Body"].read(), found["Metadata"] if kind == "as saved" else {}
    if kind == "copied, of an earlier version":
        data = data[: -17 - data[-17]]  # without the seal

    def put(changed: bytes) -> None:
        s3.put_object(Bucket=bucket, Key=key, Body=changed, Metadata=fields)

    return kind, root, data, put


@pytest.mark.counted
def test_a_flipped_bit_loads_what_was_saved_or_is_found(checkpoint: Any) -> None:
    kind, root, data, put = checkpoint
    found, missed = [], []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    sealed, every = kind in ("as saved", "copied"), "DCP_S3_TEST_FLIPS" in os.environ
    for bit in range(0, 8 * len(data), 1 if sealed or every else 13):
        try:
            load_metadata(_flip(data, bit), url="s3://bucket/step-2")
        except (errors.CorruptCheckpointError, errors.UnsafeMetadataError):
            found.append(bit)
        else:
            missed.append(bit)
    assert (not missed) == sealed
    wrong = []
    for bit in (*_some(missed), *_some(found)[::10]):
        put(_flip(data, bit))
        try:
            _check(root, kind)
        except Exception as error:  # noqa: BLE001 - all of them are told at the end
            wrong.append((bit, repr(error)[:300]))
    assert not wrong, f"{len(wrong)}: {wrong[:10]}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < _MEMORY


def _flip(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _some(bits: list[int]) -> list[int]:
    return bits[:: max(1, len(bits) // _FLIPS)] if _FLIPS else bits


def _check(root: str, kind: str) -> None:
    url = f"{root}/step-00000002"
    state = blank(_small_state())
    try:
        dcp.load(state, storage_reader=S3StorageReader(url), no_dist=True)
    except CheckpointException as failure:
        for error, _ in failure.failures.values():
            assert isinstance(error, errors.DcpS3Error), repr(error)
    else:
        assert_same(state, _small_state())
    flat, _ = flatten_state_dict(_small_state())
    for name in set(flat) - {"step"}:
        with contextlib.suppress(errors.DcpS3Error):
            assert_same(read_tensor(url, name), flat[name])
    state = blank(_small_state())
    with CheckpointManager(root) as manager:
        try:
            assert manager.restore(state) in (1, 2)
            assert_same(state, _small_state())
        except errors.DcpS3Error:
            if kind in ("as saved", "copied"):
                raise


def _drop_chunk(metadata: Metadata) -> None:
    _, second = metadata.state_dict_metadata["model.a.weight"].chunks
    metadata.state_dict_metadata["model.a.weight"].chunks.remove(second)
    del metadata.storage_data[MetadataIndex("model.a.weight", second.offsets)]


def _cut_chunk(metadata: Metadata) -> None:
    vars(metadata.state_dict_metadata["wide"].chunks[0])["sizes"] = torch.Size([3, 0])


def _change_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.a.weight"].properties.dtype = torch.int32


def test_edited_metadata(checkpoint: Any) -> None:
    kind, root, data, put = checkpoint
    url = f"{root}/step-00000002"
    for edit in (_cut_chunk, _drop_chunk, _change_dtype):
        metadata, state = pickle.loads(data), blank(_small_state())
        edit(metadata)
        put(pickle.dumps(metadata))
        assert edit is _change_dtype or not verify(url).ok
        if kind == "torch's" and edit is _change_dtype:  # its items say what they are, and are loaded as that
            loads.load(state, url)
        else:
            loads.failure(lambda: loads.load(blank(_small_state()), url), errors.CorruptCheckpointError)
            with CheckpointManager(root) as manager:
                assert manager.restore(state) == 1
        assert_same(state, _small_state())
