"""A part: what one rank wrote in a save without collectives, and its bytes. Pure.

All parts of a save together say as much as DCP's plan and its write results. Their bytes are compact, with a version
and a CRC-64/NVME; nothing in them is pickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem

from dcp_s3.format.blocks import Blocks, make_storage_info
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.part_columns import (
    CRC,
    CRCS,
    HAS_BLOCKS,
    HAS_CRC,
    HAS_RAW_OFFSET,
    IS_SHARD,
    Columns,
    pack,
    path_code,
    path_from,
    unpack,
)
from dcp_s3.torch_private import StorageInfo


@dataclass(frozen=True, slots=True)
class WrittenItem:
    """One item that a rank wrote."""

    index: MetadataIndex
    """Name, and the offsets of a chunk."""
    tensor: TensorWriteData | None
    """Chunk, whole shape and properties of a tensor; None for anything else."""
    storage: StorageInfo
    """Where it lies, with our facts about it (`blocks`)."""
    is_shard: bool
    """Whether its name has other chunks, perhaps on other ranks."""


@dataclass(frozen=True)
class Part:
    """What one rank wrote."""

    save: str
    """Nonce of the save."""
    rank: int
    world_size: int
    """Number of ranks of the save."""
    written: tuple[WrittenItem, ...]
    objects: tuple[ObjectEntry, ...]
    """The rank's data objects."""
    paths: Mapping[str, tuple[str | int, ...]] | None = None
    """Path in the nested state by name, of the items that it wrote; None if its planner does not flatten."""
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
    """Digest (16 hex digits) of the hashes of what a rank holds: the same on ranks that hold the same.

    Names of attachments count, because no other rank can write what only a dead one has attached.
    """
    found = hashlib.blake2b(b"".join(each.to_bytes(8, "big") for each in sorted(held)), digest_size=8)
    for name in sorted(set(attached)):
        found.update(name.encode("utf-8", "surrogatepass") + b"\0")
    return found.hexdigest()


# --- bytes ----------------------------------------------------------------------------------------

_Key = TypeVar("_Key", bound=Hashable)

_FIELDS = 5  # of a TensorProperties' state, in all versions of torch
_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)  # the others cannot be pickled
_VALUES: dict[str, dict[str, Any]] = {
    "dtype": {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)},
    "layout": {str(each): each for each in vars(torch).values() if isinstance(each, torch.layout)},
    "memory format": {str(each): each for each in _FORMATS},
}
_STORAGE = {field.name for field in dataclasses.fields(StorageInfo)} | {
    "raw_offset", "crc64nvme", "crc64nvme_block", "crc64nvme_blocks",  # see format/blocks.py
}  # fmt: skip


def encode(part: Part) -> bytes:
    """The bytes of a part.

    Raises:
        ValueError: it cannot be told in a part: an item in no object of it.
    """
    objects = {each.path: number for number, each in enumerate(part.objects)}
    names, shapes = _Table[str](), _Table[tuple[int, ...]]()
    properties, descriptors = _Table[tuple[Any, ...]](), _Table[tuple[str, ...]]()
    crcs: list[bytes] = []
    numbers: list[tuple[int, ...]] = []
    ranges: list[tuple[int, ...]] = []
    for item in part.written:
        facts, data = vars(item.storage), item.tensor
        if unknown := facts.keys() - _STORAGE:
            raise ValueError(f"{item.index.fqn!r} has storage data that a part cannot hold: {min(unknown)}")
        if item.storage.relative_path not in objects:
            raise ValueError(f"{item.index.fqn!r} lies in {item.storage.relative_path!r}, no object of the part")
        raw_offset, crc = facts.get("raw_offset"), facts.get("crc64nvme")
        block, transforms, place = facts.get("crc64nvme_block"), item.storage.transform_descriptors, item.index.offset
        flags = HAS_RAW_OFFSET * (raw_offset is not None) + HAS_CRC * (crc is not None)
        flags += HAS_BLOCKS * (block is not None) + IS_SHARD * item.is_shard
        crcs.append(facts.get("crc64nvme_blocks") or b"")
        chunk = () if data is None else (data.chunk.offsets, data.chunk.sizes, data.size)
        numbers.append(
            (
                names[item.index.fqn],
                0 if data is None else 1 + properties[_properties_text(data.properties)],
                0 if place is None else 1 + shapes[tuple(place)],
                *((1 + shapes[tuple(each)] for each in chunk) if chunk else (0, 0, 0)),
                0 if transforms is None else 1 + descriptors[tuple(transforms)],
                objects[item.storage.relative_path],
                flags,
                len(crcs[-1]),
            )
        )
        ranges.append((item.storage.offset, item.storage.length, raw_offset or 0, block or 0, crc or 0))
    paths = None
    if part.paths is not None:
        for name in part.paths:
            names[name]
        paths = [path_code(name, part.paths[name]) if name in part.paths else None for name in names]
    packed = pack(
        Columns(
            save=part.save, rank=part.rank, world_size=part.world_size, facts=part.facts,
            objects=part.objects, names=list(names), paths=paths, properties=list(properties), shapes=list(shapes),
            descriptors=list(descriptors), numbers=np.array(numbers, np.uint32).reshape(-1, 10).T,
            ranges=np.array(ranges, np.uint64).reshape(-1, 5).T.view(np.int64),
            crcs=memoryview(b"".join(crcs)),
        )
    )  # fmt: skip
    if _paths_of(unpack(packed)) != part.paths:  # what no other rank would take is found out here
        raise ValueError("a path in the nested state has other elements than text and numbers")
    return packed


def decode(data: bytes) -> Part:
    """The part that `encode` made these bytes of.

    Raises:
        ValueError: damaged, truncated, of another version, or not a part.
    """
    columns = unpack(data)
    shapes = list(map(torch.Size, columns.shapes))
    properties = [make_properties(each) for each in columns.properties]
    ends = itertools.accumulate(columns.numbers[CRCS].tolist(), initial=0)
    rows = (columns.numbers.T.tolist(), columns.ranges.T.tolist(), columns.ranges[CRC].view(np.uint64).tolist())
    written = tuple(
        _item(columns, shapes, properties, numbers, [*ranges[:CRC], crc], bytes(columns.crcs[slice(*blocks)]))
        for numbers, ranges, crc, blocks in zip(*rows, itertools.pairwise(ends), strict=True)
    )
    return Part(
        save=columns.save,
        rank=columns.rank,
        world_size=columns.world_size,
        written=written,
        objects=columns.objects,
        paths=_paths_of(columns),
        facts=columns.facts,
    )


def _paths_of(columns: Columns) -> dict[str, tuple[str | int, ...]] | None:
    if columns.paths is None:
        return None
    pairs = zip(columns.names, columns.paths, strict=True)
    return {name: path_from(name, code) for name, code in pairs if code is not None}


def make_properties(text: Sequence[Any]) -> TensorProperties:
    """The properties of a tensor. Raises `ValueError` if torch knows no such values."""
    try:
        dtype, layout, requires_grad, memory_format, pin_memory, *added = text
        if type(requires_grad) is not bool or type(pin_memory) is not bool:
            raise ValueError("flags that are neither true nor false")
        found = _VALUES["dtype"][dtype], _VALUES["layout"][layout], _VALUES["memory format"][memory_format]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"part has properties of a tensor that this torch does not know: {error}") from None
    made: Any = TensorProperties(found[0], found[1], requires_grad, found[2], pin_memory)
    if added:
        made.__setstate__((*made.__getstate__()[:_FIELDS], *added))
    return cast(TensorProperties, made)


class _Table(dict[_Key, int]):
    """Numbers the different values that it is asked for."""

    def __missing__(self, key: _Key) -> int:
        self[key] = len(self)
        return self[key]


def _properties_text(properties: TensorProperties) -> tuple[Any, ...]:
    added = list(cast(Any, properties).__getstate__()[_FIELDS:])  # torch 2.15: strides
    while added and added[-1] is None:
        added.pop()
    text = (
        str(properties.dtype), str(properties.layout), properties.requires_grad, str(properties.memory_format),
        properties.pin_memory, *added,
    )  # fmt: skip
    make_properties(text)
    return text


def _item(
    columns: Columns,
    shapes: list[torch.Size],
    properties: list[TensorProperties],
    numbers: list[int],
    ranges: list[int],
    crcs: bytes,
) -> WrittenItem:
    name, kind, place, offsets, sizes, whole, transforms, object_, flags, _ = numbers
    offset, length, raw_offset, block, crc = ranges
    storage = make_storage_info(
        columns.objects[object_].path,
        offset,
        length,
        transform_descriptors=list(columns.descriptors[transforms - 1]) if transforms else None,
        raw_offset=raw_offset if flags & HAS_RAW_OFFSET else None,
        crc64nvme=crc if flags & HAS_CRC else None,
        blocks=Blocks(block, crcs, crc) if flags & HAS_BLOCKS else None,
    )
    tensor = None
    if kind:
        chunk = ChunkStorageMetadata(shapes[offsets - 1], shapes[sizes - 1])
        tensor = TensorWriteData(chunk, properties[kind - 1], shapes[whole - 1])
    index = MetadataIndex(columns.names[name], shapes[place - 1] if place else None)
    return WrittenItem(index, tensor, storage, bool(flags & IS_SHARD))
