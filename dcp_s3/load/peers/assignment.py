"""What the coordinator of a load tells each rank about bytes that several of them need. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_s3.format.blocks import MIN_BLOCK, Blocks
from dcp_s3.format.saved_entries import find_chunk
from dcp_s3.format.storage_info import get_blocks, get_crc, get_raw_offset
from dcp_s3.load.boxes import Box


class Offer(NamedTuple):
    """In the local plan of a rank that can share."""

    rank: int
    """In the load's group."""
    world_size: int
    """Of the group."""


class StoredChunk(NamedTuple):
    """A stored item as bytes to be read."""

    path: str
    """Object, relative to the checkpoint."""
    base: int
    """First byte in the object."""
    nbytes: int
    """Length."""
    blocks: Blocks | None
    """Its checksums, None without."""
    sizes: tuple[int, ...]
    """In elements; of items that are read as a whole, the number of bytes."""
    itemsize: int
    """Bytes of an element."""
    whole: bool
    """Whether it is decoded when all of it is there, rather than raw bytes of a tensor."""

    @property
    def block(self) -> int:
        """Any multiple of this many bytes is a place where it can be cut."""
        if self.whole:
            return self.nbytes
        return MIN_BLOCK if self.blocks is None else self.blocks.size


class SharedPart(NamedTuple):
    """A run of bytes of a stored chunk, as one rank sees it."""

    items: tuple[int, ...]
    """Numbers of the rank's items that need of it."""
    start: int
    """First byte in the chunk."""
    stop: int
    """The one behind the last."""


Boxes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Offsets and lengths of boxes of a chunk."""


class Peer(NamedTuple):
    """A rank to which the owner of a piece sends."""

    rank: int
    """In the load's group."""
    needs: tuple[Boxes | None, ...] | None
    """For each part, the boxes of its items, or None where the one that there is contains the part. None if that is so
    in all parts."""


class SharedPiece(NamedTuple):
    """What one request fetches and several ranks need, as one of these sees it."""

    number: int
    """In the order in which all ranks go through them."""
    owner: int
    """Rank that fetches it."""
    parts: tuple[SharedPart, ...]
    """In the order in which they lie in the object."""
    peers: tuple[Peer, ...]
    """For the owner only: to whom it is sent."""


class Assignment(NamedTuple):
    """What one rank has to do with shared pieces."""

    item_count: int
    """Of its plan."""
    pieces: tuple[SharedPiece, ...]
    """Those that it fetches or needs, in order of their numbers."""

    def shared_items(self) -> set[int]:
        """Numbers of the items that come by pieces, and by pieces alone."""
        return {number for piece in self.pieces for part in piece.parts for number in part.items}


def all_offered(offers: Sequence[object]) -> bool:
    """Whether these are the offers of all ranks of a group, in order of ranks."""
    return all(isinstance(o, Offer) and o == (rank, len(offers)) for rank, o in enumerate(offers))


def find_stored(metadata: Metadata, index: MetadataIndex, kind: LoadItemType) -> StoredChunk | None:
    """How the stored item at ``index`` is read; None if it can not be shared, or the metadata contradicts itself."""
    info = metadata.storage_data.get(index)
    if info is None or info.length <= 0:
        return None
    saved, raw_offset = metadata.state_dict_metadata.get(index.fqn), get_raw_offset(info)
    if raw_offset is None or getattr(info, "transform_descriptors", None) or kind == LoadItemType.BYTE_IO:
        crc = get_crc(info) if raw_offset is None else None  # else it is that of a part of the item
        blocks = None if crc is None else Blocks(info.length, b"", crc)
        return StoredChunk(info.relative_path, info.offset, info.length, blocks, (info.length,), 1, True)
    if not isinstance(saved, TensorStorageMetadata) or (chunk := find_chunk(saved, index)) is None:
        return None
    itemsize = saved.properties.dtype.itemsize
    nbytes = chunk.sizes.numel() * itemsize
    if nbytes == 0 or raw_offset + nbytes > info.length:
        return None
    blocks = get_blocks(info, nbytes)
    base = info.offset + raw_offset
    return StoredChunk(info.relative_path, base, nbytes, blocks, tuple(chunk.sizes), itemsize, False)


def box_of(item: ReadItem, stored: StoredChunk) -> Box:
    """What ``item`` needs of its stored chunk."""
    if stored.whole:
        return Box((0,), (stored.nbytes,))
    return Box(tuple(item.storage_offsets), tuple(item.lengths))
