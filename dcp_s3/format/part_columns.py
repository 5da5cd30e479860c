"""The bytes of a part, as columns. Pure.

A part is: 8 bytes that name the format and its version; the length of the head, 4 bytes; the head, JSON; a record of
`ITEM` for each item; the items' CRCs of blocks, end to end; the hashes of what the rank holds, in ascending order, 8
bytes each, the most significant first; the CRC-64/NVME of all that, 8 bytes, the most significant first. Other numbers
have their least significant byte first.

Whoever can write to the bucket can write a part: everything is checked.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dcp_s3.checksum import crc64nvme
from dcp_s3.format.layout import What, classify, is_inside
from dcp_s3.format.manifest import AttachmentEntry, ObjectEntry

MAGIC = b"dcppart\x01"

ITEM = np.dtype([
    ("name", "<u4"),  # in `names`
    ("properties", "<u4"),  # in `properties`, from 1 on; 0: no tensor
    ("place", "<u4"),  # offset in the item's index: in `shapes`, from 1 on; 0: none
    ("offsets", "<u4"), ("sizes", "<u4"), ("whole", "<u4"),  # chunk and whole tensor, likewise
    ("object", "<u4"),  # in `objects`
    ("descriptors", "<u4"),  # in `descriptors`, from 1 on; 0: none
    ("held", "<u4"),  # its hash, in `held`
    ("flags", "<u4"),
    ("crcs", "<u4"),  # bytes of its CRCs of blocks
    ("offset", "<i8"), ("length", "<i8"), ("raw_offset", "<i8"), ("crc", "<u8"), ("block", "<i8"),
])  # fmt: skip
HAS_RAW_OFFSET, HAS_CRC, HAS_BLOCKS, IS_SHARD = 1, 2, 4, 8

_MAX_ITEM_BYTES = 2**44  # as format/metadata.py has it
_MAX_INT = 2**63
_MAX_DIMS = 64
_HEAD = struct.Struct("<I")
_SAVE = re.compile("[0-9a-f]{1,64}")
_CRC = re.compile("[0-9a-f]{16}")
DOTS = 1
"""In `paths`: the name, split at its dots."""


@dataclass(frozen=True, eq=False)
class Columns:
    """A part. Tables hold each value once; the items refer to them by number."""

    save: str
    rank: int
    world_size: int
    number: int
    facts: Mapping[str, object]
    objects: tuple[ObjectEntry, ...]
    names: Sequence[str]
    paths: Sequence[Any] | None
    """By name: `DOTS`, or a list of text and numbers; None for a name without a path."""
    properties: Sequence[tuple[Any, ...]]
    """dtype, layout, requires_grad, memory format, pin_memory; torch's values as text."""
    shapes: Sequence[tuple[int, ...]]
    descriptors: Sequence[tuple[str, ...]]
    items: npt.NDArray[np.void]
    """Records of `ITEM`."""
    crcs: memoryview
    """CRCs of blocks of all items, end to end."""
    held: npt.NDArray[np.uint64]
    """Hashes of what the rank holds, ascending, the most significant byte first."""


def pack(part: Columns) -> bytes:
    """The bytes of a part."""
    head = {
        "save": part.save,
        "rank": part.rank,
        "world_size": part.world_size,
        "number": part.number,
        "facts": part.facts,
        "objects": [_entry_fields(each) for each in part.objects],
        "names": part.names,
        "paths": part.paths,
        "properties": part.properties,
        "shapes": part.shapes,
        "descriptors": part.descriptors,
        "items": len(part.items),
        "crcs": len(part.crcs),
        "held": len(part.held),
    }
    text = json.dumps(head, separators=(",", ":")).encode("ascii")
    data = b"".join((MAGIC, _HEAD.pack(len(text)), text, part.items.tobytes(), part.crcs, part.held.tobytes()))
    return data + crc64nvme(data).to_bytes(8, "big")


def unpack(data: bytes) -> Columns:
    """The part of which these are the bytes; arrays and ``crcs`` are views of them.

    Raises:
        ValueError: damaged, truncated, of another version, or no part at all.
    """
    if data[: len(MAGIC)] != MAGIC:
        if data[: len(MAGIC) - 1] == MAGIC[:-1] and len(data) >= len(MAGIC):
            raise ValueError(f"part has format version {data[len(MAGIC) - 1]}, this dcp_s3 reads {MAGIC[-1]}")
        raise ValueError(f"not a part of a dcp_s3 save ({len(data)} bytes)")
    start = len(MAGIC) + _HEAD.size
    if len(data) < start + 8 or crc64nvme(memoryview(data)[:-8]) != int.from_bytes(data[-8:], "big"):
        raise ValueError(f"part is truncated or damaged: its {len(data)} bytes do not have its CRC-64/NVME")
    try:
        (length,) = _HEAD.unpack_from(data, len(MAGIC))
        head = json.loads(data[start : start + length])
        return _checked(head, memoryview(data)[start + length : -8])
    except ValueError as error:
        raise ValueError(f"not a part that dcp_s3 writes: {error}") from None
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a part that dcp_s3 writes: {error!r}") from None


def _entry_fields(entry: ObjectEntry) -> list[Any]:
    fields: list[Any] = [entry.path, entry.size, entry.crc64nvme]
    return [*fields, entry.attachment] if isinstance(entry, AttachmentEntry) else fields


# --- checks ---------------------------------------------------------------------------------------


def _checked(head: dict[str, Any], body: memoryview) -> Columns:
    counts = [_count(head[name]) for name in ("items", "crcs", "held")]
    items_end = counts[0] * ITEM.itemsize
    crcs_end = items_end + counts[1]
    if len(body) != crcs_end + 8 * counts[2]:
        raise ValueError(f"{len(body)} bytes after its head, not those of the items that the head says")
    found = Columns(
        save=_text(head["save"]),
        rank=_count(head["rank"]),
        world_size=_count(head["world_size"]),
        number=_count(head["number"]),
        facts=_dict(head["facts"]),
        objects=tuple(map(_entry, _list(head["objects"]))),
        names=_list(head["names"]),
        paths=head["paths"],
        properties=[tuple(_list(each)) for each in _list(head["properties"])],
        shapes=list(map(_shape, _list(head["shapes"]))),
        descriptors=[tuple(map(_text, _list(each))) for each in _list(head["descriptors"])],
        items=np.frombuffer(body[:items_end], ITEM),
        crcs=body[items_end:crcs_end],
        held=np.frombuffer(body[crcs_end:], ">u8"),
    )
    if _SAVE.fullmatch(found.save) is None or found.rank >= found.world_size:
        raise ValueError(f"rank {found.rank} of {found.world_size} in save {found.save[:64]!r}")
    if not all(map(_is_text, found.names)):
        raise ValueError("a name is no text")
    if found.paths is not None:
        _check_paths(_list(found.paths), len(found.names))
    if np.any(found.held[1:] <= found.held[:-1]):
        raise ValueError("the hashes of what it holds are not in order")
    _check_items(found)
    return found


def _check_items(part: Columns) -> None:
    items = part.items
    if not len(items):
        if len(part.crcs):
            raise ValueError("CRCs of blocks of no item")
        return
    tensors = np.minimum(items["properties"], 1)
    bounds = {
        "name": len(part.names), "object": len(part.objects), "held": len(part.held),
        "properties": len(part.properties) + 1, "descriptors": len(part.descriptors) + 1,
        "place": len(part.shapes) + 1, "offsets": len(part.shapes) + 1, "sizes": len(part.shapes) + 1,
        "whole": len(part.shapes) + 1, "flags": 16,
    }  # fmt: skip
    for column, bound in bounds.items():
        if int(items[column].max()) >= bound:
            raise ValueError(f"an item's {column} is none of the {bound} in the part")
    for column in ("offsets", "sizes", "whole"):
        if not np.array_equal(np.minimum(items[column], 1), tensors):
            raise ValueError(f"a tensor without {column}, or {column} of what is no tensor")
    for column in ("offset", "length", "raw_offset", "block"):
        if int(items[column].min()) < 0:
            raise ValueError(f"an item's {column} is negative")
    lengths, offsets = items["length"], items["offset"]
    if int(lengths.max()) > _MAX_ITEM_BYTES or np.any(items["raw_offset"] > lengths):
        raise ValueError("an item lies at no possible range of bytes")
    sizes = np.array([each.size for each in part.objects], np.int64)
    if np.any(lengths > sizes[items["object"]] - offsets):
        raise ValueError("an item ends after the end of its object")
    if int(items["crcs"].sum(dtype=np.int64)) != len(part.crcs):
        raise ValueError("CRCs of blocks are missing, or left over")


def _check_paths(paths: Sequence[Any], count: int) -> None:
    if len(paths) != count:
        raise ValueError(f"{len(paths)} paths of {count} names")
    for path in paths:
        if path is None or (type(path) is int and path == DOTS):
            continue
        if not all(type(each) is str or type(each) is int for each in _list(path)):
            raise ValueError("a path has other elements than text and numbers")


def _entry(fields: Any) -> ObjectEntry:
    path, size, crc, *more = _list(fields)
    if not is_inside(_text(path)) or classify(path).what is not What.DATA:
        raise ValueError(f"{path!r} is no data object of the checkpoint")
    if crc is not None and _CRC.fullmatch(_text(crc)) is None:
        raise ValueError(f"{crc!r} is no CRC-64/NVME")
    if not more:
        return ObjectEntry(path, _count(size), crc)
    (attachment,) = more
    return ObjectEntry.of({"path": path, "size": _count(size), "crc64nvme": crc, "attachment": _text(attachment)})


def _shape(sizes: Any) -> tuple[int, ...]:
    shape = tuple(map(_count, _list(sizes)))
    if len(shape) > _MAX_DIMS or math.prod(shape) > _MAX_INT // 16:
        raise ValueError(f"a shape with {len(shape)} dimensions, or too many elements")
    return shape


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_INT:
        raise ValueError(f"{str(value)[:40]!r} is no number of anything")
    return value


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"a {type(value).__name__}, expected a list")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"a {type(value).__name__}, expected an object")
    return cast(dict[str, Any], value)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__}, expected text")
    return value
