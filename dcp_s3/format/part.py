"""A part: what one rank wrote in a save without collectives. Pure.

All parts of a save together say as much as DCP's plan and its write results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem

from dcp_s3.format.manifest import ObjectEntry
from dcp_s3.torch_private import StorageInfo


@dataclass(frozen=True, slots=True)
class WrittenItem:
    """One item that a rank wrote."""

    index: MetadataIndex
    """Name, and the offsets of a chunk."""
    tensor: TensorWriteData | None
    """Chunk, whole shape and properties of a tensor; None for anything else."""
    storage: StorageInfo
    """Where it lies, with our facts about it (`storage_info`)."""


@dataclass(frozen=True)
class Part:
    """What one rank wrote, and what it holds."""

    save: str
    """Id that the ranks of the save have in common."""
    rank: int
    world_size: int
    """Number of ranks of the save."""
    written: tuple[WrittenItem, ...]
    objects: tuple[ObjectEntry, ...]
    """The rank's data objects."""
    held: frozenset[int]
    """Hashes (`item_hash`) of all items that the rank holds, whoever writes them."""
    paths: Mapping[str, tuple[str | int, ...]] | None = None
    """Path in the nested state by name, of the items that it wrote; None if its planner does not flatten."""
    number: int = 0
    """See `layout.part_object`."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """Of the rank, as JSON has it: throttled requests and so on; metrics and extra of the first rank."""


def item_hash(item: WriteItem) -> int:
    """64 bits of an item's name, kind, shape, dtype and place: the same on all ranks that hold the item."""
    data = item.tensor_data
    shape: tuple[object, ...] = ()
    if data is not None:
        shape = (tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes), str(data.properties.dtype))
    offset = None if item.index.offset is None else tuple(item.index.offset)
    text = repr((item.index.fqn, offset, item.type.name, shape))
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def digest_of(held: Iterable[int], attached: Iterable[str] = ()) -> str:
    """Digest (16 hex digits) of what a rank holds: the same on ranks that hold the same.

    Args:
        held: hashes of its items.
        attached: names of its attachments. No other rank can write what only a dead one has attached.
    """
    return digest_of_bytes(b"".join(each.to_bytes(8, "big") for each in sorted(held)), attached)


def digest_of_bytes(held: bytes, attached: Iterable[str]) -> str:
    """`digest_of` hashes in ascending order, 8 bytes each, the most significant first."""
    found = hashlib.blake2b(held, digest_size=8)
    for name in sorted(set(attached)):
        found.update(name.encode("utf-8", "surrogatepass") + b"\0")
    return found.hexdigest()
