"""What loads are tested with: a checkpoint's objects in memory, boxes of its tensors, states on several ranks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.format.blocks import Blocks, make_storage_info, pack_crcs
from dcp_s3.limit import Limit
from dcp_s3.load.fetch import LOAD_BUFFERS, Fetcher
from dcp_s3.load.plan import Box
from dcp_s3.memory import crc64nvme, targets_of
from dcp_s3.settings import Settings
from dcp_s3.store import Into
from dcp_s3.url import parse_url
from tests.end_to_end.states import SMALL_PARTS, bits, random_tensor, random_values
from tests.faulty import BUCKET
from tests.memory_store import MemoryStore

URL = "s3://bucket/run"
RUN = f"s3://{BUCKET}"

Damage = Callable[[str, int, bytearray], None]


class _Objects(MemoryStore):
    def __init__(self, objects: Mapping[str, bytes], damage: Damage) -> None:
        super().__init__()
        self._objects, self._damage, self._asking = objects, damage, threading.Lock()
        self.asked: list[tuple[str, int, int]] = []
        self.distrusted: list[str] = []

    def within(self, limit: Limit) -> _Objects:
        return copy.copy(self)

    def distrust(self, key: str) -> None:
        self.distrusted.append(key.removeprefix("run/"))

    def read(self, key: str, start: int, into: Into, etag: str | None = None, **_: Any) -> None:
        path, targets = key.removeprefix("run/"), targets_of(into)
        size = sum(target.view.nbytes for target in targets)
        data = bytearray(self._objects[path][start : start + size])
        assert len(data) == size
        with self._asking:
            self.asked.append((path, start, size))
            self._damage(path, start, data)
        for target in targets:
            count = target.view.nbytes
            target.view[:] = data[:count]
            target.received(0, count)
            del data[:count]


class MemoryFetcher(Fetcher):
    """Reads from ``objects``, by path, and remembers what was asked for; ``damage`` may change what is received."""

    def __init__(self, objects: Mapping[str, bytes], *, damage: Damage = lambda *_: None) -> None:
        store = _Objects(objects, damage)
        super().__init__(store, parse_url(URL), Settings())
        self.asked, self.distrusted = store.asked, store.distrusted
        """Path, first byte and length of each read; the paths that are to be read anew."""


# --- tensors and boxes of them -----------------------------------------------------------------------


BLOCK = 64
"""Bytes with a checksum of their own: the fewest that are allowed."""
PATH = "__0_0.distcp"
KINDS = ["same", "strided", "cast"]


class Case(NamedTuple):
    """Saved tensors, each one chunk, and what each rank wants of them."""

    metadata: Metadata
    stored: bytes
    tensors: dict[str, torch.Tensor]
    wants: list[list[tuple[str, Box]]]

    @property
    def plans(self) -> list[list[ReadItem]]:
        def item(name: str, box: Box) -> ReadItem:
            origin = torch.Size([0] * self.tensors[name].dim())
            index = MetadataIndex(name, origin, 0)
            return ReadItem(LoadItemType.TENSOR, index, origin, index, *map(torch.Size, box))

        return [[item(*want) for want in wants] for wants in self.wants]

    def target(self, want: tuple[str, Box], kind: str) -> torch.Tensor:
        """A tensor to load that into."""
        dtype, lengths = self.tensors[want[0]].dtype if kind != "cast" else torch.complex128, want[1].lengths
        if kind == "strided":
            return torch.zeros(*lengths[::-1], 2, dtype=dtype)[..., 1].permute(tuple(range(len(lengths)))[::-1])
        return torch.zeros(lengths, dtype=dtype)

    def check(self, want: tuple[str, Box], found: torch.Tensor) -> None:
        expected = self.tensors[want[0]]
        for dim, (offset, length) in enumerate(zip(*want[1], strict=True)):
            expected = expected.narrow(dim, offset, length)
        if found.dtype == expected.dtype:
            assert bits(found) == bits(expected), want
        assert torch.equal(found.nan_to_num(), expected.to(found.dtype).nan_to_num()), want


def make_case(
    tensors: dict[str, torch.Tensor], wants: list[list[tuple[str, Box]]], *, gap: int = 30, checked: bool = True
) -> Case:
    stored = bytearray(b"\xee" * 5)
    entries: dict[str, Any] = {}
    infos: dict[MetadataIndex, Any] = {}
    for name, tensor in tensors.items():
        data = bits(tensor)
        crcs = [crc64nvme(data[:end]) for end in range(BLOCK, len(data), BLOCK)]
        index = MetadataIndex(name, torch.Size([0] * tensor.dim()), 0)
        blocks = Blocks(BLOCK, pack_crcs(crcs), crc64nvme(data)) if checked else None
        info = make_storage_info(PATH, len(stored), gap + len(data) + 7, raw_offset=gap, blocks=blocks,
                                 crc64nvme=crc64nvme(data) if checked else None)  # fmt: skip
        infos[index] = info
        chunk = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())
        entries[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.size(), [chunk])
        stored += b"\xdd" * gap + data + b"\xcc" * 7
    return Case(Metadata(entries, storage_data=infos), bytes(stored), tensors, wants)


@st.composite
def cases(draw: st.DrawFn, least: int = 1, checked: bool = True) -> Case:
    """Up to 4 tensors of up to 3 dimensions and 20 KiB, needed by 2 to 5 ranks, at ``least`` so long in each."""
    tensors, boxes = {}, []
    for number in range(draw(st.integers(1, 4))):
        sizes = draw(st.lists(st.integers(1, 11), max_size=3))
        dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128]))
        name = f"t{number}"
        tensors[name] = random_tensor(tuple(sizes), dtype, number)
        for _ in range(draw(st.integers(1, 3))):
            box = [draw(st.tuples(st.integers(0, size - 1), st.integers(least, size))) for size in sizes]
            lengths = tuple(min(length, size - at) for (at, length), size in zip(box, sizes, strict=True))
            boxes.append((name, Box(tuple(at for at, _ in box), lengths)))
        boxes.append((name, Box((0,) * len(sizes), tuple(sizes))))
    ranks = draw(st.integers(2, 5))
    wants = [draw(st.lists(st.sampled_from(boxes), max_size=6)) for _ in range(ranks)]
    return make_case(tensors, wants, gap=draw(st.integers(0, 70)), checked=checked)


# --- on several ranks ----------------------------------------------------------------------------------


def save(run: str, state: dict[str, Any], **options: Any) -> str:
    """On all ranks; the URL."""
    dcp.save(state, storage_writer=S3StorageWriter(f"{RUN}/{run}", settings=SMALL_PARTS, **options))
    return f"{RUN}/{run}"


def load_into(url: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """``state`` with what was loaded into it; ``planner``, ``buffers``; others: arguments of the reader."""
    planner, buffers = options.pop("planner", None), options.pop("buffers", LOAD_BUFFERS)
    reader = S3StorageReader(url, settings={**SMALL_PARTS, **options.pop("settings", {})}, **options)
    with mock.patch("dcp_s3.load.fetch.LOAD_BUFFERS", buffers):
        dcp.load(state, storage_reader=reader, planner=planner)
    return state


def large_state(blank: bool = False) -> dict[str, Any]:
    return {f"t{n}": torch.zeros(300_000 + n) if blank else random_values(n, 300_000 + n) for n in range(8)}


def assert_large(state: dict[str, Any]) -> None:
    for name, value in large_state().items():
        assert torch.equal(state[name], value), name
