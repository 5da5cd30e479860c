"""A part: what one rank wrote in a save without collectives, and its bytes. Pure.

Nothing in it is pickled. The bytes: 8 that name the format and its version; the length of the head, 4 bytes; the head,
JSON; `Columns.ranges`, `numbers` and `crcs`; the CRC-64/NVME of all that, 8 bytes, the most significant first. Other
numbers are little-endian.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem

from dcp_s3.format import allow_list
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.layout import What, classify, is_inside
from dcp_s3.memory import crc64nvme
from dcp_s3.torch_private import StorageInfo

MAGIC = b"dcppart\x03"

# Rows of `numbers`. Tables are counted from 0; those of properties and shapes from 1: 0 is none.
NAME, PROPERTIES, PLACE, OFFSETS, SIZES, WHOLE, OBJECT, FLAGS, CRCS = range(9)
# Rows of `ranges`. CRC is unsigned, whatever the type of the rows says.
OFFSET, LENGTH, RAW_OFFSET, BLOCK, CRC = range(5)
HAS_RAW_OFFSET, HAS_CRC, HAS_BLOCKS, IS_SHARD = 1, 2, 4, 8
"""Flags."""

_BEFORE_HEAD = len(MAGIC) + 4
_MAX_DIM = 2**61  # so that the sum of an offset and a size is no overflow
_Key = TypeVar("_Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class WrittenItem:
    """One item that a rank wrote."""

    index: MetadataIndex
    tensor: TensorWriteData | None
    """None for anything but a tensor."""
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
    """Of the rank, as JSON has it: when it began and so on; metrics and extra of the first rank."""


@dataclass(frozen=True, eq=False)
class Columns:
    """A part as columns. Tables hold each value once; the items refer to them by number."""

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
    numbers: npt.NDArray[np.uint32]
    """Of shape (9, items). Rows: name; properties, 0 if it is no tensor; offsets in its index, offsets and sizes of its
    chunk, size of the whole tensor, in `shapes`; object; flags; bytes of its CRCs of blocks."""
    ranges: npt.NDArray[np.int64]
    """Of shape (5, items). Rows: offset and length in the object; raw offset; bytes of a block; CRC."""
    crcs: memoryview
    """CRCs of blocks of all items, end to end."""


def item_hash(item: WriteItem) -> int:
    """64 bits of an item's name, kind, shape, dtype and place: the same on all ranks that hold the item."""
    data, offset = item.tensor_data, item.index.offset
    shape: tuple[object, ...] = ()
    if data is not None:
        shape = (tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes), str(data.properties.dtype))
    text = repr((item.index.fqn, None if offset is None else tuple(offset), item.type.name, shape))
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


def digest_of(held: Iterable[int], attached: Iterable[str] = ()) -> str:
    """Digest (16 hex digits) of the hashes of what a rank holds, and the names of its attachments, which no other rank
    could write: the same on ranks that hold the same."""
    found = hashlib.blake2b(b"".join(each.to_bytes(8, "big") for each in sorted(held)), digest_size=8)
    for name in sorted(set(attached)):
        found.update(name.encode("utf-8", "surrogatepass") + b"\0")
    return found.hexdigest()


# --- to bytes -------------------------------------------------------------------------------------

_STORAGE = {
    "relative_path", "offset", "length", "raw_offset", "crc64nvme", "crc64nvme_block", "crc64nvme_blocks",
}  # fmt: skip
"""Of a `StorageInfo`, see format/blocks.py."""


class Table(dict[_Key, int]):
    """Numbers the different values that it is asked for."""

    def __missing__(self, key: _Key) -> int:
        self[key] = len(self)
        return self[key]


def encode(part: Part) -> bytes:
    """The bytes of a part.

    Raises:
        ValueError: it cannot be told in a part: an item in no object of it, or something of another type.
    """
    objects = {each.path: number for number, each in enumerate(part.objects)}
    names, shapes = Table[str](), Table[tuple[int, ...]]()
    properties = Table[tuple[Any, ...]]()
    crcs: list[bytes] = []
    numbers: list[tuple[int, ...]] = []
    ranges: list[tuple[int, ...]] = []
    for item in part.written:
        facts = {name: value for name, value in vars(item.storage).items() if value is not None}
        data, place = item.tensor, item.index.offset
        if unknown := facts.keys() - _STORAGE:
            raise ValueError(f"{item.index.fqn!r} has storage data that a part cannot hold: {min(unknown)}")
        if item.storage.relative_path not in objects:
            raise ValueError(f"{item.index.fqn!r} lies in {item.storage.relative_path!r}, no object of the part")
        raw_offset, crc, block = (facts.get(each) for each in ("raw_offset", "crc64nvme", "crc64nvme_block"))
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
    head = {
        "save": part.save, "rank": part.rank, "world_size": part.world_size, "facts": part.facts,
        "objects": [asdict(each) for each in part.objects], "names": list(names), "paths": paths,
        "properties": list(properties), "shapes": list(shapes), "items": len(numbers),
    }  # fmt: skip
    text = json.dumps(head, separators=(",", ":")).encode("ascii")
    text += b" " * (-(_BEFORE_HEAD + len(text)) % 8)  # what follows is aligned
    columns = (
        np.array(ranges, np.uint64).reshape(-1, 5).T.astype("<u8").tobytes(),
        np.array(numbers, np.uint32).reshape(-1, 9).T.astype("<u4").tobytes(),
    )
    body = b"".join((MAGIC, len(text).to_bytes(4, "little"), text, *columns, *crcs))
    packed = body + crc64nvme(body).to_bytes(8, "big")
    unpack(packed)  # what no other rank would take is found out here
    return packed


def path_code(name: str, path: Sequence[str | int]) -> str:
    """A path as text: the lengths of its elements (``i`` after a number's), if joined by dots they are the name;
    otherwise JSON."""
    if not set(map(type, path)) <= {str, int}:
        raise ValueError(f"the path of {name!r} has other elements than text and numbers")
    if path and ".".join(map(str, path)) == name:
        return " ".join(f"{len(str(each))}{'i' if isinstance(each, int) else ''}" for each in path)
    return json.dumps(list(path), separators=(",", ":"))


def path_from(name: str, code: str) -> tuple[str | int, ...]:
    """The path with this `path_code`; ValueError if it is none."""
    if code.startswith("["):
        return tuple(json.loads(code))
    found: list[str | int] = []
    start = 0
    for each in code.split(" "):
        text = name[start : (start := start + int(each.removesuffix("i")))]
        found.append(int(text) if each.endswith("i") else text)
        start += 1
    return tuple(found)


# --- from bytes -----------------------------------------------------------------------------------


def unpack(data: bytes) -> Columns:
    """The part of which these are the bytes; arrays and ``crcs`` are views of them.

    Raises:
        ValueError: damaged, truncated, of another version, no part at all, or one whose items cannot be where it says.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise ValueError(f"not a part of a save that this dcp_s3 reads ({len(data)} bytes, {data[: len(MAGIC)]!r})")
    if len(data) < _BEFORE_HEAD + 8 or crc64nvme(memoryview(data)[:-8]) != int.from_bytes(data[-8:], "big"):
        raise ValueError(f"part is truncated or damaged: its {len(data)} bytes do not have its CRC-64/NVME")
    try:
        end = _BEFORE_HEAD + int.from_bytes(data[len(MAGIC) : _BEFORE_HEAD], "little")
        head = json.loads(data[_BEFORE_HEAD:end])
        body, count = memoryview(data)[end:-8], head.pop("items")
        found = Columns(
            **{
                **head,
                "objects": tuple(map(ObjectEntry.of, head["objects"])),
                "properties": list(map(_frozen, head["properties"])),
                "shapes": list(map(tuple, head["shapes"])),
            },
            ranges=np.frombuffer(body[: 40 * count], "<i8").reshape(5, count),
            numbers=np.frombuffer(body[40 * count : 76 * count], "<u4").reshape(9, count),
            crcs=body[76 * count :],
        )
        _check(found)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a part that dcp_s3 writes: {error!r}") from None
    return found


def _check(part: Columns) -> None:
    """Whoever can write to the bucket can write a part: what it says must at least be possible."""
    for entry in part.objects:
        if not is_inside(entry.path) or classify(entry.path).what is not What.DATA or entry.size < 0:
            raise ValueError(f"{entry.path!r} is no data object of the checkpoint")
    for shape in part.shapes:
        if not all(type(size) is int and 0 <= size <= _MAX_DIM for size in shape) or math.prod(shape) > _MAX_DIM:
            raise ValueError(f"{str(shape)[:80]} is no shape")
    if not set(map(type, part.names)) <= {str} or not 0 <= part.rank < part.world_size:
        raise ValueError("names that are no text, or no such rank")
    if part.paths is not None and len(part.paths) != len(part.names):
        raise ValueError("its paths are not those of its names")
    numbers, ranges, shapes = part.numbers, part.ranges, len(part.shapes) + 1
    if int(numbers[CRCS].sum(dtype=np.int64)) != len(part.crcs) or (numbers[CRCS] % 8).any():
        raise ValueError("CRCs of blocks are missing, or left over")
    if not numbers.shape[1]:
        return
    bounds = (
        len(part.names), len(part.properties) + 1, shapes, shapes, shapes, shapes, len(part.objects), 16, 2**32,
    )  # fmt: skip
    if (numbers.max(axis=1) >= np.array(bounds)).any():
        raise ValueError("an item refers to what is not there")
    if ((numbers[OFFSETS : WHOLE + 1] > 0) != (numbers[PROPERTIES] > 0)).any():
        raise ValueError("a tensor without a chunk, or a chunk of what is no tensor")
    sizes = np.array([each.size for each in part.objects], np.int64)
    offsets, lengths = ranges[OFFSET], ranges[LENGTH]
    if int(ranges[:CRC].min()) < 0 or (lengths > sizes[numbers[OBJECT]] - offsets).any():
        raise ValueError("an item lies at no possible range of its object's bytes")


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


# --- properties of tensors ------------------------------------------------------------------------

_VALUES = {str(each): each for each in vars(torch).values() if isinstance(each, (torch.dtype, torch.layout))}
# What stands for a memory format in the state of properties. The other formats cannot be pickled.
_FORMATS = {
    str(each): cast(Any, TensorProperties(memory_format=each)).__getstate__()[3].value
    for each in (torch.contiguous_format, torch.channels_last, torch.preserve_format)
}


def make_properties(text: Sequence[Any]) -> TensorProperties:
    """The properties of a tensor, which nobody may change. Raises `ValueError` if torch knows no such values."""
    try:
        dtype, layout, requires_grad, memory_format, *others = text
        state = _VALUES[dtype], _VALUES[layout], requires_grad, _FORMATS[memory_format], *others
        return allow_list.make_properties(state)
    except (KeyError, TypeError, ValueError, allow_list.MalformedPickleError, allow_list.UnsafeGlobalError) as error:
        raise ValueError(f"part has properties of a tensor that this torch does not know: {error}") from None


def _properties_text(properties: TensorProperties) -> tuple[Any, ...]:
    added = list(cast(Any, properties).__getstate__()[5:])  # torch 2.15: strides
    while added and added[-1] is None:
        added.pop()
    text = (
        str(properties.dtype), str(properties.layout), properties.requires_grad, str(properties.memory_format),
        properties.pin_memory, *added,
    )  # fmt: skip
    make_properties(text)
    return text
