"""Makes one checkpoint's metadata of the parts that its ranks wrote. Pure.

What DCP's coordinator makes of plans and write results, from parts alone: the same entries, duplicates dropped, and
the same checks.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from dcp_s3.collector import collector_paused
from dcp_s3.errors import SaveProtocolError, ShardingError
from dcp_s3.format.manifest import ObjectEntry
from dcp_s3.format.metadata import dump_metadata
from dcp_s3.format.part import Part, WrittenItem, digest_of
from dcp_s3.format.part_codec import decode
from dcp_s3.format.part_columns import IS_SHARD, unpack
from dcp_s3.torch_private import CURRENT_DCP_VERSION, StorageInfo


@dataclass(frozen=True)
class MergedSave:
    """What the parts of a save say together."""

    metadata: bytes
    """``.metadata``, pickled as torch's FileSystemReader reads it."""
    items: int
    """Number of stored items."""
    objects: tuple[ObjectEntry, ...]
    """Data objects of all parts."""


class Merging:
    """The parts of one save, as far as they are known.

    Args:
        save: id that the ranks of the save have in common.
        world_size: number of its ranks.
    """

    def __init__(self, save: str, world_size: int) -> None:
        self._save, self._world_size = save, world_size
        self._parts: dict[tuple[int, int], Part] = {}
        self._written: dict[tuple[int, int], tuple[list[int], list[bool]]] = {}

    def add(self, data: bytes) -> tuple[int, int]:
        """Add a part as it was read. The same part twice is harmless.

        Returns:
            Its rank and number.

        Raises:
            ValueError: no part, damaged, or of another save; nothing was added.
        """
        columns = unpack(data)
        if (columns.save, columns.world_size) != (self._save, self._world_size):
            raise ValueError(
                f"part of rank {columns.rank} belongs to save {columns.save} of {columns.world_size} ranks, expected "
                f"{self._save} of {self._world_size}"
            )
        key = columns.rank, columns.number
        part = decode(data)
        self._parts[key] = part
        self._written[key] = (
            columns.held[columns.items["held"]].tolist(),
            (columns.items["flags"] & IS_SHARD).astype(bool).tolist(),
        )
        return key

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks whose part number 0 is there."""
        return frozenset(rank for rank, number in self._parts if number == 0)

    @property
    def parts(self) -> frozenset[tuple[int, int]]:
        """Rank and number of each part that is there."""
        return frozenset(self._parts)

    @property
    def digests(self) -> dict[int, str]:
        """Digest of what each of these ranks holds."""
        return {rank: digest_of(part.held) for (rank, number), part in sorted(self._parts.items()) if number == 0}

    @property
    def facts(self) -> dict[tuple[int, int], Mapping[str, object]]:
        """Facts of each part, by rank and number."""
        return {key: part.facts for key, part in sorted(self._parts.items())}

    def unwritten(self, excluded: Collection[int] = ()) -> dict[int, list[int]]:
        """Hashes of items that a rank holds and none has written, by the rank that is to write them.

        The holders' numbers of items differ as little as a greedy choice can make them. The same parts and ``excluded``
        always give the same answer.

        Args:
            excluded: ranks that cannot write any more, although their parts are there.

        Raises:
            SaveProtocolError: an item is held by ``excluded`` ranks alone.
        """
        written = {each for hashes, _ in self._written.values() for each in hashes}
        holders: dict[int, list[int]] = {}
        for (rank, number), part in sorted(self._parts.items()):
            if number == 0:
                for each in part.held - written:
                    holders.setdefault(each, []).append(rank)
        return assign(holders, frozenset(excluded))

    def merged(self, *, save_id: str, checkpoint_id: str) -> MergedSave:
        """Metadata of the whole save. The same parts always give the same bytes.

        Of several items with the same index, that of the lowest rank counts.

        Args:
            save_id: id of the commit.
            checkpoint_id: URL of the checkpoint.

        Raises:
            ShardingError: the chunks of a tensor are of different wholes, outside of it, overlap, or do not fill it.
            SaveProtocolError: an item that a rank holds was not written, or a name is a tensor on one rank only.
        """
        if waiting := self.unwritten():
            raise SaveProtocolError(
                f"{sum(map(len, waiting.values()))} items that ranks {_some(waiting)} hold were written by no rank, so "
                "nothing was committed"
            )
        with collector_paused():
            parts = [self._parts[key] for key in sorted(self._parts)]
            storage_data: dict[MetadataIndex, StorageInfo] = {}
            entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
            ranks: dict[str, list[int]] = {}
            wholes: dict[str, tuple[torch.Size, torch.dtype, int]] = {}
            for rank, item, is_shard in self._items():
                fqn, data = item.index.fqn, item.tensor
                if is_shard and data is not None:
                    _check_whole(wholes, fqn, rank, data.size, data.properties.dtype)
                if item.index in storage_data:
                    continue
                entry, index = entries.get(fqn), item.index
                if data is None and entry is None:
                    entries[fqn] = BytesStorageMetadata()
                elif data is not None and not isinstance(entry, BytesStorageMetadata):
                    if entry is None:
                        entry = entries[fqn] = TensorStorageMetadata(data.properties, data.size, [])
                    _check_whole(wholes, fqn, rank, data.size, data.properties.dtype)
                    index = MetadataIndex(fqn, index.offset, len(entry.chunks))
                    entry.chunks.append(data.chunk)
                else:
                    first, other = (rank, ranks[fqn][0])[:: -1 if data is None else 1]
                    raise SaveProtocolError(
                        f"{fqn!r} is a tensor on rank {first}, but none on rank {other}. Remedy: give them different "
                        "names"
                    )
                ranks.setdefault(fqn, []).append(rank)
                storage_data[index] = item.storage
            for fqn, entry in entries.items():
                if isinstance(entry, TensorStorageMetadata):
                    check_chunks(fqn, entry.size, entry.chunks, ranks[fqn], filled=self._world_size > 1)
            metadata = Metadata(
                entries,
                planner_data=_paths(parts),
                storage_data=storage_data,
                storage_meta=StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id),
                version=CURRENT_DCP_VERSION,
            )
            objects = tuple(entry for part in parts for entry in part.objects)
            return MergedSave(dump_metadata(metadata), len(storage_data), objects)

    def _items(self) -> Iterator[tuple[int, WrittenItem, bool]]:
        for key in sorted(self._parts):
            for item, is_shard in zip(self._parts[key].written, self._written[key][1], strict=True):
                yield key[0], item, is_shard


def assign(holders: Mapping[int, Sequence[int]], excluded: frozenset[int]) -> dict[int, list[int]]:
    """Give each hash to one of its holders, to the one with the fewest so far.

    Raises:
        SaveProtocolError: all holders of a hash are ``excluded``.
    """
    found: dict[int, list[int]] = {}
    for each in sorted(holders):
        live = [rank for rank in holders[each] if rank not in excluded]
        if not live:
            raise SaveProtocolError(
                f"items that only ranks {_some(holders[each])} hold were written by no rank, and these ranks no longer "
                "answer. Remedy: load the checkpoint before this one"
            )
        found.setdefault(min(live, key=lambda rank: (len(found.get(rank, ())), rank)), []).append(each)
    return dict(sorted(found.items()))


def _paths(parts: Sequence[Part]) -> dict[str, tuple[str | int, ...]] | None:
    """Paths of all parts, those of the lowest rank first; None if no rank's planner flattens."""
    if all(part.paths is None for part in parts):
        return None
    found: dict[str, tuple[str | int, ...]] = {}
    for part in parts:
        for name, path in (part.paths or {}).items():
            found.setdefault(name, path)
    return found


def _check_whole(
    wholes: dict[str, tuple[torch.Size, torch.dtype, int]], fqn: str, rank: int, size: torch.Size, dtype: torch.dtype
) -> None:
    first_size, first_dtype, first = wholes.setdefault(fqn, (size, dtype, rank))
    if (size, dtype) != (first_size, first_dtype):
        raise ShardingError(
            f"{fqn!r} is {_text(first_dtype, first_size)} on rank {first}, but {_text(dtype, size)} on rank {rank}. "
            "Remedy: give it one shape and dtype on all ranks",
            fqn=fqn,
        )


def check_chunks(
    fqn: str, size: torch.Size, chunks: Sequence[ChunkStorageMetadata], ranks: Sequence[int], *, filled: bool
) -> None:
    """What DCP's `_validate_global_plan` checks of a tensor.

    Args:
        fqn: name of the tensor.
        size: shape of the tensor.
        chunks: its chunks.
        ranks: rank of each.
        filled: whether they must fill the tensor.

    Raises:
        ShardingError: a chunk is outside of the tensor, two overlap, or they do not fill it.
    """
    if not size:
        return
    for chunk, rank in zip(chunks, ranks, strict=True):
        places = zip(chunk.offsets, chunk.sizes, size, strict=False)
        if not len(chunk.offsets) == len(chunk.sizes) == len(size) or any(a + b > c for a, b, c in places):
            raise ShardingError(
                f"{fqn!r} has shape {tuple(size)}, but {_box(chunk)} of rank {rank} is outside of it", fqn=fqn
            )
    if pair := _find_overlap(size, chunks):
        one, other = sorted(pair)
        raise ShardingError(
            f"{_box(chunks[one])} of rank {ranks[one]} and {_box(chunks[other])} of rank {ranks[other]} of {fqn!r} "
            "overlap",
            fqn=fqn,
        )
    volume, whole = sum(math.prod(chunk.sizes) for chunk in chunks), math.prod(size)
    if filled and volume != whole:
        raise ShardingError(
            f"{fqn!r} has {whole} elements, but the chunks of ranks {_some(ranks)} have {volume}. A rank may have "
            "saved another state",
            fqn=fqn,
        )


def _find_overlap(size: torch.Size, chunks: Sequence[ChunkStorageMetadata]) -> tuple[int, int] | None:
    """Positions of two chunks that overlap: a sweep along the longest dimension, as DCP does it."""
    dim = max(range(len(size)), key=lambda each: size[each])
    active: list[tuple[int, int]] = []
    for number in sorted(range(len(chunks)), key=lambda each: (chunks[each].offsets[dim], *chunks[each].offsets)):
        start = chunks[number].offsets[dim]
        del active[: bisect_right(active, (start, len(chunks)))]
        for _, other in active:
            if _overlap(chunks[number], chunks[other]):
                return number, other
        insort(active, (start + chunks[number].sizes[dim], number))
    return None


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        start < other_start + other_length and other_start < start + length
        for start, length, other_start, other_length in zip(
            one.offsets, one.sizes, other.offsets, other.sizes, strict=True
        )
    )


def _box(chunk: ChunkStorageMetadata) -> str:
    return f"the chunk of shape {tuple(chunk.sizes)} at {tuple(chunk.offsets)}"


def _text(dtype: torch.dtype, size: torch.Size) -> str:
    return f"{dtype} of shape {tuple(size)}"


def _some(ranks: Collection[int]) -> str:
    found = sorted(set(ranks))
    return ", ".join(map(str, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
