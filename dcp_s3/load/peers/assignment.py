"""The coordinator's orders to each rank of a load about bytes that several ranks need. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_s3.format.blocks import MIN_BLOCK, Blocks, get_blocks, get_crc, get_raw_offset
from dcp_s3.format.metadata import is_unproven
from dcp_s3.format.saved_entries import find_chunk
from dcp_s3.load.boxes import Box


class Offer(NamedTuple):
    """The offer to share, in the local plan of a rank that can."""

    rank: int
    """Rank in the load's group."""
    world_size: int
    """Number of ranks in the group."""


class StoredChunk(NamedTuple):
    """A stored item as bytes to be read."""

    path: str
    """Path of the object, relative to the checkpoint."""
    base: int
    """First byte of the chunk in the object."""
    nbytes: int
    """Length in bytes."""
    blocks: Blocks | None
    """Checksums of the chunk, None without."""
    sizes: tuple[int, ...]
    """Shape in elements; for items that are read as a whole, the number of bytes."""
    itemsize: int
    """Bytes of an element."""
    whole: bool
    """Whether it is decoded once all of it has arrived; else it is the raw bytes of a tensor."""

    @property
    def block(self) -> int:
        """The chunk can be cut at every multiple of this many bytes."""
        if self.whole:
            return self.nbytes
        return MIN_BLOCK if self.blocks is None else self.blocks.size


class SharedPart(NamedTuple):
    """A run of bytes of a stored chunk, as one rank sees it."""

    items: tuple[int, ...]
    """Numbers of the rank's items that need bytes of the part."""
    start: int
    """First byte in the chunk."""
    stop: int
    """The byte after the last."""


Boxes = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
"""Offsets and lengths of boxes of a chunk."""


class Peer(NamedTuple):
    """A rank that the owner of a piece sends to."""

    rank: int
    """Rank in the load's group."""
    needs: tuple[Boxes | None, ...] | None
    """For each part, the boxes of its items, or None where the part's only box contains all of it. None if so in all
    parts."""


class SharedPiece(NamedTuple):
    """The bytes that one request fetches and several ranks need, as seen by one of these ranks."""

    number: int
    """Place in the order in which all ranks process the pieces."""
    owner: int
    """Rank that fetches the piece."""
    parts: tuple[SharedPart, ...]
    """Parts in the order in which they lie in the object."""
    peers: tuple[Peer, ...]
    """Ranks that the piece is sent to; for the owner only."""


class Assignment(NamedTuple):
    """One rank's work on shared pieces."""

    item_count: int
    """Number of items in the rank's plan."""
    pieces: tuple[SharedPiece, ...]
    """Pieces that the rank fetches or needs, in order of their numbers."""

    def shared_items(self) -> set[int]:
        """Numbers of the items that arrive in pieces, and only so."""
        return {number for piece in self.pieces for part in piece.parts for number in part.items}


def all_offered(offers: Sequence[object]) -> bool:
    """Whether these are the offers of all ranks of a group, in order of ranks."""
    return all(isinstance(o, Offer) and o == (rank, len(offers)) for rank, o in enumerate(offers))


def find_stored(metadata: Metadata, index: MetadataIndex, kind: LoadItemType) -> StoredChunk | None:
    """The stored item at ``index``; None if it cannot be shared, or the metadata contradicts itself."""
    info = metadata.storage_data.get(index)
    if info is None or info.length <= 0:
        return None
    saved, raw_offset = metadata.state_dict_metadata.get(index.fqn), get_raw_offset(info)
    if raw_offset is None or getattr(info, "transform_descriptors", None) or kind == LoadItemType.BYTE_IO:
        crc = get_crc(info) if raw_offset is None else None  # else it covers only a part of the item
        blocks = None if crc is None else Blocks(info.length, b"", crc)
        return StoredChunk(info.relative_path, info.offset, info.length, blocks, (info.length,), 1, True)
    if is_unproven(metadata):
        return None  # each rank that needs it looks at its head
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
    """The box of its stored chunk that ``item`` needs."""
    if stored.whole:
        return Box((0,), (stored.nbytes,))
    return Box(tuple(item.storage_offsets), tuple(item.lengths))
