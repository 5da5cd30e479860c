"""Tensors that other writers stored: every byte right, and no more fetched than needed."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import TensorProperties as Properties
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_s3 import S3StorageReader, errors
from dcp_s3.format.blocks import make_storage_info
from dcp_s3.load import read
from dcp_s3.memory import crc64nvme
from tests.archives import records_of, rewritten, saved
from tests.end_to_end import loads
from tests.end_to_end.loads import failure
from tests.end_to_end.states import DTYPES, assert_same, blank, random_tensor
from tests.format.test_tensors import WRITERS
from tests.servers import S3Server

MIB = 2**20
HEADS = 4096
"""More than a head has that torch writes."""


class Item(NamedTuple):
    """A stored tensor, which is one chunk."""

    value: torch.Tensor
    data: bytes
    attributes: Mapping[str, Any] = {}


def put(s3: Any, bucket: str, items: Mapping[str, Item]) -> int:
    """A checkpoint at ``run`` of one object with ``items`` end to end; the bytes of its metadata."""
    body = bytearray()
    storage_data = {}
    entries: dict[str, Any] = {}
    for fqn, item in items.items():
        origin = torch.Size([0] * item.value.dim())
        chunk = ChunkStorageMetadata(origin, item.value.size())
        entries[fqn] = TensorStorageMetadata(Properties(dtype=item.value.dtype), item.value.size(), [chunk])
        info = make_storage_info("__0_0.distcp", len(body), len(item.data), **item.attributes)
        storage_data[MetadataIndex(fqn, origin, 0)] = info
        body += item.data
    metadata = pickle.dumps(Metadata(entries, {fqn: (fqn,) for fqn in items}, storage_data))
    s3.put_object(Bucket=bucket, Key="run/__0_0.distcp", Body=bytes(body))
    s3.put_object(Bucket=bucket, Key="run/.metadata", Body=metadata)
    return len(metadata)


class Boxes(DefaultLoadPlanner):
    """Loads each tensor of the state from where its box begins in the saved one."""

    def __init__(self, offsets: Mapping[str, Sequence[int]]) -> None:
        super().__init__()
        self._offsets = offsets

    def create_local_plan(self) -> LoadPlan:
        items = []
        for fqn, tensor in self.state_dict.items():
            origin = torch.Size([0] * tensor.dim())
            index = MetadataIndex(fqn, origin, 0)
            place = torch.Size(self._offsets.get(fqn, origin))
            items.append(ReadItem(LoadItemType.TENSOR, index, origin, index, place, tensor.size()))
        return LoadPlan(items)


class Loaded(NamedTuple):
    state: dict[str, torch.Tensor]
    requests: int
    """GETs, without that of the metadata."""
    size: int
    """Bytes that were sent, with the metadata."""


def load(
    server: S3Server,
    root: str,
    state: dict[str, torch.Tensor],
    offsets: Mapping[str, Sequence[int]] | None = None,
    **settings: Any,
) -> Loaded:
    handle = server.handle
    handle.reset_counters()
    reader = S3StorageReader(root, settings={"part_size": "5MiB", **settings})
    dcp.load(state, storage_reader=reader, planner=Boxes(offsets or {}))
    return Loaded(state, handle.counters.requests["GetObject"] - 1, handle.counters.bytes_out)


def load_whole(server: S3Server, root: str, items: Mapping[str, Item]) -> None:
    expected = {fqn: item.value for fqn, item in items.items()}
    assert_same(load(server, root, blank(expected)).state, expected)


def test_every_dtype_whole_and_in_parts(
    memory_server: S3Server, s3: Any, bucket: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "check_storages", lambda stream: pytest.fail("loaded by torch"))
    tensors = {str(dtype): random_tensor((7, 10_000), dtype, i) for i, dtype in enumerate(DTYPES)}
    tensors |= {"scalar": random_tensor((), torch.float64), "empty": torch.empty(3, 0)}
    items = {
        f"{writer} {name}": Item(value, write(saved(value)))
        for writer, write in WRITERS.items()
        for name, value in tensors.items()
    }
    put(s3, bucket, items)
    load_whole(memory_server, root, items)
    wanted = {name: item.value[1:5, 100:4000] for name, item in items.items() if item.value.numel() > 1}
    assert_same(load(memory_server, root, blank(wanted), dict.fromkeys(wanted, (1, 100))).state, wanted)


def test_only_what_is_needed_is_fetched(memory_server: S3Server, s3: Any, bucket: str, root: str) -> None:
    values = {f"t{i}": torch.arange(i, 48 * 32768 + i, dtype=torch.int32).view(48, -1) for i in range(2)}
    items = {name: Item(value, saved(value)) for name, value in values.items()}
    overhead = put(s3, bucket, items)
    boxes = [
        ((0, 0), (3, 32768)), ((17, 0), (2, 32768)), ((47, 0), (1, 32768)), ((1, 0), (47, 32768)),  # whole rows
        ((10, 1000), (20, 31)), ((40, 5), (1, 1)),
    ]  # fmt: skip
    for (row, column), (rows, columns) in boxes:
        wanted = {name: value[row : row + rows, column : column + columns] for name, value in values.items()}
        for dtype in (torch.int32, torch.int64):
            expected = {name: value.to(dtype) for name, value in wanted.items()}
            found = load(memory_server, root, blank(expected), dict.fromkeys(values, (row, column)))
            assert_same(found.state, expected)
            size = 4 * rows * columns
            # What lies between two runs of bytes is rather fetched if it is little.
            gaps = [4 * (row * 32768 + column)] + [4 * (32768 - columns)] * (rows - 1)
            size += sum(gap for gap in gaps if gap <= 256 * 2**10)
            assert found.size < 2 * (size + HEADS) + overhead + 4096
            assert found.requests <= 2 * (-(-size // (5 * MIB)) + 1)


# --- items that are not as expected --------------------------------------------------------------------


def _swapped(value: torch.Tensor) -> bytes:
    other = b"big" if sys.byteorder == "little" else b"little"
    swapped = value.view(torch.uint8).view(*value.shape, value.itemsize).flip(-1).contiguous()
    return rewritten(saved(value), changed={"byteorder": other, "data/0": bytes(swapped.numpy().tobytes())})


def _with_key(value: torch.Tensor) -> bytes:
    records = records_of(saved(value))
    pickled = records["data.pkl"].replace(b"X\x01\x00\x00\x000q", b"X\x01\x00\x00\x001q")
    return rewritten(saved(value), without=("data/0",), changed={"data.pkl": pickled, "data/1": records["data/0"]})


ODD: dict[str, Callable[[torch.Tensor], Item]] = {
    "transposed": lambda value: Item(value.t(), saved(value.t())),
    "aligned to pages": lambda value: Item(value, rewritten(saved(value), alignment=4096)),
    "a part of a storage": lambda value: Item(value[1:], saved(value[1:])),
    "not dense": lambda value: Item(value[:, 1:], saved(value[:, 1:])),
    "another byte order": lambda value: Item(value, _swapped(value)),
    "another key": lambda value: Item(value, _with_key(value)),
    "a parameter": lambda value: Item(value, saved(torch.nn.Parameter(value))),
    "of another dtype": lambda value: Item(value.double(), saved(value)),
    "a lazy negative": lambda value: Item(-value, saved(torch._neg_view(value))),
}


@pytest.mark.parametrize("writer", ["this torch", "old"])
@pytest.mark.parametrize("size", [10, 160], ids=["small", "large"])
def test_one_of_several_is_odd(
    memory_server: S3Server, s3: Any, bucket: str, root: str, size: int, writer: str
) -> None:
    """Before and between ordinary ones of the same shape, where it is not itself of another."""
    for place in (0, 2):
        items: dict[str, Item] = {}
        for i, (odd, make) in enumerate(ODD.items()):
            values = [random_tensor((size + i, size + i), torch.int32, n).float() for n in range(3)]
            ordinary = [Item(value, WRITERS[writer](saved(value))) for value in values]
            ordinary.insert(place, make(values[0]))
            items |= {f"{odd} {n}": item for n, item in enumerate(ordinary)}
        put(s3, bucket, items)
        load_whole(memory_server, root, items)
        wanted = {name: item.value[3:9, 5:8] for name, item in items.items()}
        assert_same(load(memory_server, root, blank(wanted), dict.fromkeys(items, (3, 5))).state, wanted)


DAMAGE: list[Callable[[bytes], bytes]] = [
    lambda data: b"PL" + data[2:],
    lambda data: data[:64] + bytes(6) + data[70:],
    lambda data: bytes(len(data)),
    lambda data: data[: len(data) // 2],
]


@pytest.mark.parametrize("size", [10, 150], ids=["small", "large"])
def test_damaged_heads_and_items_are_errors(
    memory_server: S3Server, s3: Any, bucket: str, root: str, size: int
) -> None:
    value = random_tensor((size, size), torch.float32)
    data = saved(value)
    whole = {"crc64nvme": crc64nvme(data)}  # as dcp_s3 records it of tensors that go through torch.save
    cases = [(Item(value, damage(data)), "'t'") for damage in DAMAGE]
    for position in (0, 800, len(data) - 1):
        damaged = bytearray(data)
        damaged[position] ^= 1
        cases.append((Item(value, bytes(damaged), whole), "CRC-64"))
    for item, says in cases:
        put(s3, bucket, {"t": item, "u": Item(value, data)})
        state = {"t": torch.zeros(size, size), "u": torch.zeros(size, size)}
        error = failure(lambda state=state: loads.load(state, root), errors.CorruptCheckpointError)
        assert says in str(error)
    put(s3, bucket, {"t": Item(value, data, whole)})
    assert_same(load(memory_server, root, {"t": torch.zeros(size, size)}).state, {"t": value})


def test_damage_that_only_torch_finds(memory_server: S3Server, s3: Any, bucket: str, root: str) -> None:
    data = saved({"a": 1}).replace(b"little", b"litt1e")
    place = {MetadataIndex("a"): make_storage_info("__0_0.distcp", 0, len(data))}
    metadata = Metadata({"a": BytesStorageMetadata()}, {"a": ("a",)}, place)
    s3.put_object(Bucket=bucket, Key="run/__0_0.distcp", Body=data)
    s3.put_object(Bucket=bucket, Key="run/.metadata", Body=pickle.dumps(metadata))
    error = failure(lambda: dcp.load({"a": None}, storage_reader=S3StorageReader(root)), errors.CorruptCheckpointError)
    assert "cannot be unpickled" in str(error)
