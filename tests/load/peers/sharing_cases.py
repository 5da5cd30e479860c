"""Checkpoints of one object in memory, and ranks that need boxes of their chunks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_s3.checksum import crc64nvme
from dcp_s3.format.blocks import Blocks, make_storage_info, pack_crcs
from dcp_s3.load.boxes import Box

BLOCK = 64
PATH = "__0_0.distcp"
DTYPES = [torch.uint8, torch.int16, torch.float32, torch.complex128]


class Case(NamedTuple):
    """A checkpoint and the boxes that each rank needs: (name, box) in order."""

    metadata: Metadata
    stored: bytes
    tensors: dict[str, torch.Tensor]
    wants: list[list[tuple[str, Box]]]

    @property
    def plans(self) -> list[list[ReadItem]]:
        return [[read_item(name, box, self.tensors[name].dim()) for name, box in wants] for wants in self.wants]


def read_item(name: str, box: Box, dims: int) -> ReadItem:
    index = MetadataIndex(name, torch.Size([0] * dims), 0)
    return ReadItem(
        LoadItemType.TENSOR, index, torch.Size([0] * dims), index, torch.Size(box.offsets), torch.Size(box.lengths)
    )


def make_case(tensors: dict[str, torch.Tensor], wants: list[list[tuple[str, Box]]], gap: int = 30) -> Case:
    stored = bytearray(b"\xee" * 5)
    entries: dict[str, Any] = {}
    infos: dict[MetadataIndex, Any] = {}
    for name, tensor in tensors.items():
        data = bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""
        crcs = [crc64nvme(data[:end]) for end in range(BLOCK, len(data), BLOCK)]
        index = MetadataIndex(name, torch.Size([0] * tensor.dim()), 0)
        infos[index] = make_storage_info(
            PATH, len(stored), gap + len(data) + 7, raw_offset=gap, crc64nvme=crc64nvme(data),
            blocks=Blocks(BLOCK, pack_crcs(crcs), crc64nvme(data)),
        )  # fmt: skip
        chunk = ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())
        entries[name] = TensorStorageMetadata(TensorProperties(tensor.dtype), tensor.size(), [chunk])
        stored += b"\xdd" * gap + data + b"\xcc" * 7
    return Case(Metadata(entries, storage_data=infos), bytes(stored), tensors, wants)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to 4 tensors of up to 3 dimensions and 20 KiB, needed by 2 to 5 ranks."""
    tensors, boxes = {}, []
    for number in range(draw(st.integers(1, 4))):
        sizes = draw(st.lists(st.integers(1, 11), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        count = torch.Size(sizes).numel() * dtype.itemsize
        generator = torch.Generator().manual_seed(number)
        data = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
        name = f"t{number}"
        tensors[name] = data.view(dtype).view(sizes)
        for _ in range(draw(st.integers(1, 3))):
            box = [draw(st.tuples(st.integers(0, size - 1), st.integers(1, size))) for size in sizes]
            lengths = tuple(min(length, size - at) for (at, length), size in zip(box, sizes, strict=True))
            boxes.append((name, Box(tuple(at for at, _ in box), lengths)))
        boxes.append((name, Box((0,) * len(sizes), tuple(sizes))))
    ranks = draw(st.integers(2, 5))
    wants = [draw(st.lists(st.sampled_from(boxes), max_size=6)) for _ in range(ranks)]
    return make_case(tensors, wants)
