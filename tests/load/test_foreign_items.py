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
from tests.format.test_stored import WRITERS
from tests.retention.making import put
from tests.servers import S3Server

MIB = 2**20
HEADS = 4096
"""More than a head has that torch writes."""


class Item(NamedTuple):
    """A stored tensor, which is one chunk."""

    value: torch.Tensor
    data: bytes
    attributes: Mapping[str, Any] = {}


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


class Foreign:
    """A checkpoint of one object."""

    def __init__(self, server: S3Server, s3: Any, root: str) -> None:
        self.handle, self._s3, self.root = server.handle, s3, root

    def put(self, items: Mapping[str, Item]) -> int:
        """``items`` end to end; the bytes of the metadata."""
        body, storage_data, entries = bytearray(), {}, dict[str, Any]()
        for fqn, item in items.items():
            origin = torch.Size([0] * item.value.dim())
            chunk = ChunkStorageMetadata(origin, item.value.size())
            entries[fqn] = TensorStorageMetadata(Properties(dtype=item.value.dtype), item.value.size(), [chunk])
            info = make_storage_info("__0_0.distcp", len(body), len(item.data), **item.attributes)
            storage_data[MetadataIndex(fqn, origin, 0)] = info
            body += item.data
        return self.put_raw(bytes(body), Metadata(entries, {fqn: (fqn,) for fqn in items}, storage_data))

    def put_raw(self, data: bytes, metadata: Metadata) -> int:
        put(self._s3, self.root, "__0_0.distcp", data)
        put(self._s3, self.root, ".metadata", pickle.dumps(metadata))
        return len(pickle.dumps(metadata))

    def check(self, expected: Mapping[str, torch.Tensor], place: Sequence[int] = ()) -> None:
        """Load boxes that begin at ``place``, or whole tensors."""
        self.handle.reset_counters()
        state = blank(dict(expected))
        reader = S3StorageReader(self.root, settings={"part_size": "5MiB"})
        dcp.load(state, storage_reader=reader, planner=Boxes(dict.fromkeys(expected, place) if place else {}))
        assert_same(state, expected)

    def failure(self, state: Any) -> str:
        return str(failure(lambda: loads.load(state, self.root), errors.CorruptCheckpointError))


@pytest.fixture
def foreign(memory_server: S3Server, s3: Any, root: str) -> Foreign:
    return Foreign(memory_server, s3, root)


def test_every_dtype_whole_and_in_parts(foreign: Foreign, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "check_storages", lambda stream: pytest.fail("loaded by torch"))
    tensors = {str(dtype): random_tensor((7, 10_000), dtype, i) for i, dtype in enumerate(DTYPES)}
    tensors |= {"scalar": random_tensor((), torch.float64), "empty": torch.empty(3, 0)}
    items = {
        f"{writer} {name}": Item(value, write(saved(value)))
        for writer, write in WRITERS.items()
        for name, value in tensors.items()
    }
    foreign.put(items)
    foreign.check({name: item.value for name, item in items.items()})
    parts = {name: item.value[1:5, 100:4000] for name, item in items.items() if item.value.numel() > 1}
    foreign.check(parts, (1, 100))


def test_only_what_is_needed_is_fetched(foreign: Foreign) -> None:
    values = {f"t{i}": torch.arange(i, 48 * 32768 + i, dtype=torch.int32).view(48, -1) for i in range(2)}
    overhead = foreign.put({name: Item(value, saved(value)) for name, value in values.items()})
    boxes = [
        ((0, 0), (3, 32768)), ((17, 0), (2, 32768)), ((47, 0), (1, 32768)), ((1, 0), (47, 32768)),  # whole rows
        ((10, 1000), (20, 31)), ((40, 5), (1, 1)),
    ]  # fmt: skip
    for (row, column), (rows, columns) in boxes:
        wanted = {name: value[row : row + rows, column : column + columns] for name, value in values.items()}
        for dtype in (torch.int32, torch.int64):
            foreign.check({name: value.to(dtype) for name, value in wanted.items()}, (row, column))
            size = 4 * rows * columns
            # What lies between two runs of bytes is rather fetched if it is little.
            gaps = [4 * (row * 32768 + column)] + [4 * (32768 - columns)] * (rows - 1)
            size += sum(gap for gap in gaps if gap <= 256 * 2**10)
            counters = foreign.handle.counters
            assert counters.bytes_out < 2 * (size + HEADS) + overhead + 4096
            assert counters.requests["GetObject"] - 1 <= 2 * (-(-size // (5 * MIB)) + 1)  # without the metadata


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
def test_one_of_several_is_odd(foreign: Foreign, size: int, writer: str) -> None:
    """Before and between ordinary ones of the same shape, where it is not itself of another."""
    for place in (0, 2):
        items: dict[str, Item] = {}
        for i, (odd, make) in enumerate(ODD.items()):
            values = [random_tensor((size + i, size + i), torch.int32, n).float() for n in range(3)]
            ordinary = [Item(value, WRITERS[writer](saved(value))) for value in values]
            ordinary.insert(place, make(values[0]))
            items |= {f"{odd} {n}": item for n, item in enumerate(ordinary)}
        foreign.put(items)
        foreign.check({name: item.value for name, item in items.items()})
        foreign.check({name: item.value[3:9, 5:8] for name, item in items.items()}, (3, 5))


DAMAGE: list[Callable[[bytes], bytes]] = [
    lambda data: b"PL" + data[2:],
    lambda data: data[:64] + bytes(6) + data[70:],
    lambda data: bytes(len(data)),
    lambda data: data[: len(data) // 2],
]


@pytest.mark.parametrize("size", [10, 150], ids=["small", "large"])
def test_damaged_heads_and_items_are_errors(foreign: Foreign, size: int) -> None:
    value = random_tensor((size, size), torch.float32)
    data = saved(value)
    whole = {"crc64nvme": crc64nvme(data)}  # as dcp_s3 records it of tensors that go through torch.save
    cases = [(Item(value, damage(data)), "'t'") for damage in DAMAGE]
    for position in (0, 800, len(data) - 1):
        damaged = bytearray(data)
        damaged[position] ^= 1
        cases.append((Item(value, bytes(damaged), whole), "CRC-64"))
    for item, says in cases:
        foreign.put({"t": item, "u": Item(value, data)})
        assert says in foreign.failure({"t": torch.zeros(size, size), "u": torch.zeros(size, size)})
    foreign.put({"t": Item(value, data, whole)})
    foreign.check({"t": value})


def test_damage_that_only_torch_finds(foreign: Foreign) -> None:
    data = saved({"a": 1}).replace(b"little", b"litt1e")
    place = {MetadataIndex("a"): make_storage_info("__0_0.distcp", 0, len(data))}
    foreign.put_raw(data, Metadata({"a": BytesStorageMetadata()}, {"a": ("a",)}, place))
    assert "cannot be unpickled" in foreign.failure({"a": None})
