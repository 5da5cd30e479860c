"""Cuts replicated chunks, so that all ranks that hold one write a part of it, not one for all. Pure.

Orbax measured saves 1.67 to 2.39 times as fast (https://orbax.readthedocs.io, "replica-parallel").
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

from dcp_s3.errors import SaveProtocolError
from dcp_s3.save.plan import item_size

LARGE = 64 * 2**20
"""Bytes. A larger chunk is cut."""
SMALLEST = 16 * 2**20
"""Bytes that a rank is given at least: less is not worth a request."""
_CRUMB = 2**19  # bytes; no part is smaller, at the cost of parts that are larger or smaller by as much

LargeChunk: TypeAlias = tuple[MetadataIndex, torch.Size, torch.dtype]
"""What tells a large chunk of a rank from others: name and offset, shape, and dtype."""


@dataclass(frozen=True)
class Rows(WriteItem):
    """Some rows of a chunk. ``index`` is that of the chunk, by which a planner finds it."""

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """Place of the rows in the tensor."""
        return cast(TensorWriteData, self.tensor_data).chunk

    def narrow(self, whole: torch.Tensor) -> torch.Tensor:
        """The rows of the chunk ``whole``, not copied."""
        for dim, (start, first, length) in enumerate(
            zip(self.chunk.offsets, self.index.offset or (), self.chunk.sizes, strict=True)
        ):
            whole = whole.narrow(dim, start - first, length)
        return whole


def stored_index(item: WriteItem) -> MetadataIndex:
    """The index of an item in ``.metadata``."""
    return MetadataIndex(item.index.fqn, item.chunk.offsets) if isinstance(item, Rows) else item.index


def find_large(items: Sequence[WriteItem]) -> tuple[LargeChunk, ...]:
    """The chunks of a rank's whole plan that may be cut."""
    return tuple(key for item in items if (key := _key(item)) is not None)


def _key(item: WriteItem) -> LargeChunk | None:
    data = item.tensor_data
    if data is None or isinstance(item, Rows) or item_size(item) <= LARGE or item.index.offset != data.chunk.offsets:
        return None
    dtype = data.properties.dtype
    is_dense = data.properties.layout == torch.strided and not str(dtype).startswith(("torch.q", "torch.bits"))
    return (item.index, data.chunk.sizes, dtype) if is_dense else None


def split_replicated(plans: Sequence[SavePlan], held: Sequence[Sequence[LargeChunk]]) -> list[list[WriteItem]]:
    """Spread the large chunks of plans over the ranks that hold them, so that all ranks write about the same bytes.

    Chunks that few ranks hold are spread first. Those that the same ranks hold are laid end to end and cut where a rank
    has enough, so there is hardly more than one cut per rank.

    Args:
        plans: of all ranks, each item in one of them. Plans that are not usable (cached) get nothing.
        held: what each rank can write (`find_large` of its plan before replicated items were removed).
    """
    holders: dict[LargeChunk, list[int]] = {}
    for rank, keys in enumerate(held):
        for key in keys if plans[rank].usable else ():
            holders.setdefault(key, []).append(rank)
    groups: dict[tuple[int, ...], list[WriteItem]] = {}
    items: list[list[WriteItem]] = []
    for plan in plans:
        items.append([])
        for item in plan.items:
            large = _key(item)
            ranks = () if large is None else tuple(holders.get(large, ()))
            (groups.setdefault(ranks, []) if len(ranks) > 1 else items[-1]).append(item)
    loads = [sum(map(item_size, each)) for each in items]
    for holding, chunks in sorted(groups.items(), key=lambda group: len(group[0])):
        # Each rank's share: the least loaded ones get as much as brings them to one level.
        size = sum(map(item_size, chunks))
        least = sorted(holding, key=lambda rank: loads[rank])[: max(1, size // SMALLEST)]
        totals = itertools.accumulate((loads[rank] for rank in least), initial=size)
        levels = [total / count for count, total in enumerate(totals) if count]
        count = max(n for n, level in enumerate(levels, 1) if level >= loads[least[n - 1]])
        shares = [(rank, levels[count - 1] - loads[rank]) for rank in least[:count]]
        for rank, item in _cut(chunks, shares):
            items[rank].append(item)
            loads[rank] += item_size(item)
    return items


def _cut(items: Sequence[WriteItem], shares: Sequence[tuple[int, float]]) -> Iterator[tuple[int, WriteItem]]:
    """Give each rank its share of the bytes: whole items, or rows."""
    turns = list(shares)
    rank, room = turns.pop(0)
    for item in items:
        data = cast(TensorWriteData, item.tensor_data)
        offsets, sizes = data.chunk.offsets, data.chunk.sizes
        dim = next((dim for dim, size in enumerate(sizes) if size > 1), 0)
        row, start = item_size(item) / sizes[dim], 0
        while start < sizes[dim]:
            left = sizes[dim] - start
            count = min(left, max(0, round(room / row)))
            if not turns or (left - count) * row < _CRUMB:
                count = left
            elif count * row < _CRUMB:
                count = 0
            if count == sizes[dim]:
                yield rank, item
            elif count:
                at, lengths = list(offsets), list(sizes)
                at[dim], lengths[dim] = at[dim] + start, count
                place = ChunkStorageMetadata(torch.Size(at), torch.Size(lengths))
                yield rank, Rows(item.index, item.type, tensor_data=dataclasses.replace(data, chunk=place))
            start, room = start + count, room - count * row
            if start < sizes[dim]:
                rank, more = turns.pop(0)
                room += more


def with_rows(
    entries: Mapping[str, STORAGE_TYPES], rows: Iterable[tuple[str, ChunkStorageMetadata | None]]
) -> dict[str, STORAGE_TYPES]:
    """The metadata of a state's entries with the rows that were written in place of the chunks that they were cut from,
    all of which they must be (SaveProtocolError)."""
    parts: dict[str, list[ChunkStorageMetadata]] = {}
    for fqn, chunk in rows:
        if chunk is not None:
            parts.setdefault(fqn, []).append(chunk)
    found = dict(entries)
    for fqn, cut in parts.items():
        whole = cast(TensorStorageMetadata, entries[fqn])
        # The first rows of a chunk begin where it does. Those keep its number, which indices may have as a hint.
        chunks = {chunk.offsets: chunk for chunk in whole.chunks} | {chunk.offsets: chunk for chunk in cut}
        written, expected = (sum(math.prod(c.sizes) for c in each) for each in (chunks.values(), whole.chunks))
        if written != expected:
            raise SaveProtocolError(
                f"{written} of the {expected} elements of {fqn!r} were written: the ranks have cut it differently. "
                "Remedy: save again, with plans that are not cached, or without DCP_S3_SPLIT_REPLICATED"
            )
        found[fqn] = dataclasses.replace(whole, chunks=list(chunks.values()))
    return found
