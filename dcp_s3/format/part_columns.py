"""The bytes of a part, as columns. Pure.

A part is: 8 bytes that name the format and its version; the length of the head, 4 bytes; the head, JSON; `ranges`;
`numbers`; `crcs`; the CRC-64/NVME of all that, 8 bytes. Of that CRC, the most significant byte is first, of other
numbers the least significant.

Whoever can write to the bucket can write a part: everything is checked.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_s3.checksum import crc64nvme
from dcp_s3.format.control_files import AttachmentEntry, ObjectEntry
from dcp_s3.format.layout import What, classify, is_inside

MAGIC = b"dcppart\x02"

# Rows of `numbers`. Tables are counted from 0, those of `OPTIONAL` from 1: 0 is none.
NAME, PROPERTIES, PLACE, OFFSETS, SIZES, WHOLE, DESCRIPTORS, OBJECT, FLAGS, CRCS = range(10)
# Rows of `ranges`. CRC is unsigned, whatever the type of the rows says.
OFFSET, LENGTH, RAW_OFFSET, BLOCK, CRC = range(5)
HAS_RAW_OFFSET, HAS_CRC, HAS_BLOCKS, IS_SHARD = 1, 2, 4, 8
"""Flags."""

_MAX_ITEM_BYTES = 2**44  # as format/metadata.py has it
_MAX_INT = 2**63
_MAX_DIM = 2**61  # so that the sum of an offset and a size is no overflow
_MAX_DIMS = 64
_HEAD = struct.Struct("<I")
_SAVE = re.compile("[0-9a-f]{1,64}")
_CRC_HEX = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, eq=False)
class Columns:
    """A part. Tables hold each value once; the items refer to them by number."""

    save: str
    rank: int
    world_size: int
    facts: Mapping[str, object]
    objects: tuple[ObjectEntry, ...]
    names: Sequence[str]
    paths: Sequence[str | None] | None
    """By name: see `path_code`; None for a name without a path."""
    properties: Sequence[tuple[Any, ...]]
    """dtype, layout, requires_grad, memory format, pin_memory, and what later versions of torch add (2.15: strides);
    torch's values as text."""
    shapes: Sequence[tuple[int, ...]]
    descriptors: Sequence[tuple[str, ...]]
    numbers: npt.NDArray[np.uint32]
    """Of shape (10, items). Rows: name; properties, 0 if it is no tensor; offsets in its index, offsets and sizes of
    its chunk, size of the whole tensor, in `shapes`; descriptors; object; flags; bytes of its CRCs of blocks."""
    ranges: npt.NDArray[np.int64]
    """Of shape (5, items). Rows: offset and length in the object; raw offset; bytes of a block; CRC."""
    crcs: memoryview
    """CRCs of blocks of all items, end to end."""


def pack(part: Columns) -> bytes:
    """The bytes of a part."""
    head = {
        "save": part.save,
        "rank": part.rank,
        "world_size": part.world_size,
        "facts": part.facts,
        "objects": [_entry_fields(each) for each in part.objects],
        "names": part.names,
        "paths": part.paths,
        "properties": part.properties,
        "shapes": part.shapes,
        "descriptors": part.descriptors,
        "items": part.numbers.shape[1],
        "crcs": len(part.crcs),
    }
    text = json.dumps(head, separators=(",", ":")).encode("ascii")
    text += b" " * (-(len(MAGIC) + _HEAD.size + len(text)) % 8)  # what follows is aligned
    sections = (part.ranges.astype("<i8"), part.numbers.astype("<u4"))
    data = b"".join((MAGIC, _HEAD.pack(len(text)), text, *(each.tobytes() for each in sections), part.crcs))
    return data + crc64nvme(data).to_bytes(8, "big")


def path_code(name: str, path: Sequence[str | int]) -> str:
    """A path as text: the lengths of its elements, where their texts with dots between them are the name (``i`` after
    that of a number); otherwise JSON."""
    if path and ".".join(map(str, path)) == name:
        return " ".join(f"{len(str(each))}{'i' if isinstance(each, int) else ''}" for each in path)
    return json.dumps(list(path), separators=(",", ":"))


def path_from(name: str, code: str) -> tuple[str | int, ...]:
    """The path with this `path_code`.

    Raises:
        ValueError: it is none.
    """
    found: list[str | int] = []
    if code.startswith("["):
        found = _list(json.loads(code))
        if not all(type(each) is str or type(each) is int for each in found):
            raise ValueError(f"the path of {name!r} has other elements than text and numbers")
        return tuple(found)
    start = 0
    for each in code.split(" "):
        text = name[start : (start := start + int(each.removesuffix("i")))]
        found.append(int(text) if each.endswith("i") else text)
        start += 1
    if path_code(name, found) != code:
        raise ValueError(f"{code[:80]!r} is no path of {name!r}")
    return tuple(found)


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
    count, crcs = (_count(head[name]) for name in ("items", "crcs"))
    ends = 40 * count, 80 * count
    if len(body) != ends[1] + crcs:
        raise ValueError(f"{len(body)} bytes after its head, not those of the items that the head says")
    found = Columns(
        save=_text(head["save"]),
        rank=_count(head["rank"]),
        world_size=_count(head["world_size"]),
        facts=_dict(head["facts"]),
        objects=tuple(map(_entry, _list(head["objects"]))),
        names=_texts(head["names"]),
        paths=head["paths"],
        properties=[_frozen(_list(each)) for each in _list(head["properties"])],
        shapes=list(map(_shape, _list(head["shapes"]))),
        descriptors=[tuple(_texts(each)) for each in _list(head["descriptors"])],
        ranges=np.frombuffer(body[: ends[0]], "<i8").reshape(5, count),
        numbers=np.frombuffer(body[ends[0] : ends[1]], "<u4").reshape(10, count),
        crcs=body[ends[1] :],
    )
    if _SAVE.fullmatch(found.save) is None or found.rank >= found.world_size:
        raise ValueError(f"rank {found.rank} of {found.world_size} in save {found.save[:64]!r}")
    if found.paths is not None:
        paths = _list(found.paths)
        if len(paths) != len(found.names) or not set(map(type, paths)) <= {str, type(None)}:
            raise ValueError("its paths are not those of its names")
    if int(found.numbers[CRCS].sum(dtype=np.int64)) != crcs:
        raise ValueError("CRCs of blocks are missing, or left over")
    if count:
        _check_items(found)
    return found


def _check_items(part: Columns) -> None:
    numbers, ranges, shapes = part.numbers, part.ranges, len(part.shapes) + 1
    bounds = (
        len(part.names), len(part.properties) + 1, shapes, shapes, shapes, shapes, len(part.descriptors) + 1,
        len(part.objects), 16, 2**32,
    )  # fmt: skip
    for found, bound in zip(numbers.max(axis=1).tolist(), bounds, strict=True):
        if found >= bound:
            raise ValueError(f"an item refers to number {found} of {bound}")
    if ((numbers[OFFSETS : WHOLE + 1] > 0) != (numbers[PROPERTIES] > 0)).any():
        raise ValueError("a tensor without a chunk, or a chunk of what is no tensor")
    sizes = np.array([each.size for each in part.objects], np.int64)
    offsets, lengths = ranges[OFFSET], ranges[LENGTH]
    if (
        int(ranges[:CRC].min()) < 0
        or int(lengths.max()) > _MAX_ITEM_BYTES
        or (ranges[RAW_OFFSET] > lengths).any()
        or (lengths > sizes[numbers[OBJECT]] - offsets).any()
    ):
        raise ValueError("an item lies at no possible range of its object's bytes")


def _entry(fields: Any) -> ObjectEntry:
    path, size, crc, *more = _list(fields)
    if not is_inside(_text(path)) or classify(path).what is not What.DATA:
        raise ValueError(f"{path!r} is no data object of the checkpoint")
    if crc is not None and _CRC_HEX.fullmatch(_text(crc)) is None:
        raise ValueError(f"{crc!r} is no CRC-64/NVME")
    if not more:
        return ObjectEntry(path, _count(size), crc)
    (attachment,) = more
    return ObjectEntry.of({"path": path, "size": _count(size), "crc64nvme": crc, "attachment": _text(attachment)})


def _shape(sizes: Any) -> tuple[int, ...]:
    shape = tuple(_list(sizes))
    if not set(map(type, shape)) <= {int} or min(shape, default=0) < 0 or max(shape, default=0) > _MAX_DIM:
        raise ValueError(f"{str(shape)[:80]} is no shape")
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


def _frozen(value: Any) -> Any:
    if type(value) is dict:
        raise ValueError("an object where values belong")
    return tuple(map(_frozen, value)) if type(value) is list else value


def _dict(value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise ValueError(f"a {type(value).__name__}, expected an object")
    found: dict[str, Any] = value
    return found


def _texts(value: Any) -> list[str]:
    if not set(map(type, _list(value))) <= {str}:
        raise ValueError("a list with something else than text")
    found: list[str] = value
    return found


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__}, expected text")
    return value
