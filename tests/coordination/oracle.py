"""What `Merging` must say, item by item: DCP's objects, pickled by Python, checked one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from dcp_s3.errors import SaveProtocolError, ShardingError
from dcp_s3.format.layout import DCP_VERSION
from dcp_s3.format.part import Part
from dcp_s3.torch_private import StorageInfo


def merge(parts: Sequence[Part], *, save_id: str, checkpoint_id: str) -> Metadata:
    """The metadata of all parts of a save.

    Raises:
        ShardingError, SaveProtocolError: as `Merging.merged`.
    """
    parts = sorted(parts, key=lambda part: part.rank)
    storage_data: dict[MetadataIndex, StorageInfo] = {}
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    wholes: dict[str, tuple[torch.Size, torch.dtype]] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for item in (each for part in parts for each in part.written):
        fqn, data, index = item.index.fqn, item.tensor, item.index
        if data is not None and item.is_shard:
            _check_whole(wholes, fqn, data.size, data.properties.dtype)
        if index in storage_data:
            continue
        entry = entries.get(fqn)
        if data is None and entry is None:
            entries[fqn] = BytesStorageMetadata()
        elif data is not None and not isinstance(entry, BytesStorageMetadata):
            if entry is None:
                entry = entries[fqn] = TensorStorageMetadata(data.properties, data.size, [])
            _check_whole(wholes, fqn, data.size, data.properties.dtype)
            index = MetadataIndex(fqn, index.offset, len(entry.chunks))
            entry.chunks.append(data.chunk)
        else:
            raise SaveProtocolError(f"{fqn!r} is a tensor and something else")
        storage_data[index] = item.storage
    for part in parts:
        for name, path in (part.paths or {}).items():
            paths.setdefault(name, path)
    for fqn, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            _check_chunks(fqn, entry.size, entry.chunks, filled=parts[0].world_size > 1)
    return Metadata(
        entries,
        planner_data=None if all(part.paths is None for part in parts) else paths,
        storage_data=storage_data,
        storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id),
        version=DCP_VERSION,
    )


def _check_whole(
    wholes: dict[str, tuple[torch.Size, torch.dtype]], fqn: str, size: torch.Size, dtype: torch.dtype
) -> None:
    if wholes.setdefault(fqn, (size, dtype)) != (size, dtype):
        raise ShardingError("different", fqn=fqn)


def _check_chunks(fqn: str, size: torch.Size, chunks: Sequence[ChunkStorageMetadata], *, filled: bool) -> None:
    if not all(len(chunk.offsets) == len(chunk.sizes) == len(size) for chunk in chunks):
        raise ShardingError("dimensions", fqn=fqn)
    for number, chunk in enumerate(chunks if size else []):
        if any(a + b > c for a, b, c in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            raise ShardingError("outside", fqn=fqn)
        for other in chunks[:number]:
            if 0 in (*chunk.sizes, *other.sizes):
                continue
            boxes = zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
            if all(a < c + d and c < a + b for a, b, c, d in boxes):
                raise ShardingError("overlap", fqn=fqn)
    if filled and sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        raise ShardingError("holes", fqn=fqn)
