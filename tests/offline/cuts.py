"""Metadata of tensors that were cut in some way, with checksums of real bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_s3.checksum import crc64nvme
from dcp_s3.format.blocks import make_storage_info

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Cut:
    """How one side stores a tensor."""

    boxes: Sequence[Box]
    """The chunks."""
    without: frozenset[int] = frozenset()
    """Numbers of the chunks that have no checksum."""


def grid(shape: Sequence[int], cuts: Sequence[Sequence[int]]) -> list[Box]:
    """The boxes between cuts in each dimension, in row-major order."""
    edges = [[0, *dim, size] for dim, size in zip(cuts, shape, strict=True)]
    spans = [list(itertools.pairwise(edge)) for edge in edges]
    return [(tuple(a for a, _ in box), tuple(b - a for a, b in box)) for box in itertools.product(*spans)]


def split(shape: Sequence[int], dim: int, count: int) -> list[Box]:
    """Chunks of ``count`` ranks, as torch cuts a dimension."""
    size = -(-shape[dim] // count)
    cuts: list[list[int]] = [[] for _ in shape]
    cuts[dim] = list(range(size, shape[dim], size))
    return grid(shape, cuts)


def bytes_of(tensor: torch.Tensor, box: Box) -> bytes:
    """The bytes of a chunk."""
    part = tensor
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        part = part.narrow(dim, start, length)
    return part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def metadata_of(tensors: dict[str, tuple[torch.Tensor, Cut]], objects: dict[str, bytes] | None = None) -> Metadata:
    """The metadata of a checkpoint with these tensors and objects."""
    entries: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for fqn, (tensor, cut) in tensors.items():
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in cut.boxes]
        entries[fqn] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
        for number, (box, chunk) in enumerate(zip(cut.boxes, chunks, strict=True)):
            data = bytes_of(tensor, box)
            storage[MetadataIndex(fqn, chunk.offsets, number)] = make_storage_info(
                "__0_0.distcp",
                0,
                len(data) + 64,
                raw_offset=64,
                crc64nvme=None if number in cut.without else crc64nvme(data),
            )
    for fqn, data in (objects or {}).items():
        entries[fqn] = BytesStorageMetadata()
        storage[MetadataIndex(fqn)] = make_storage_info("__0_0.distcp", 0, len(data), crc64nvme=crc64nvme(data))
    return Metadata(state_dict_metadata=entries, storage_data=storage)
