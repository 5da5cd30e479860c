"""``.metadata`` made of columns: the same as `dump_metadata` of as many objects, without making any. Pure.

Items' pickles are records of fixed width, which numpy fills. What they have in common is pickled first, by Python's
pickler; records refer to it by its number in the pickle's memo.
"""

from __future__ import annotations

import io
import itertools
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint import metadata as dcp

from dcp_s3.format.layout import DCP_VERSION
from dcp_s3.format.metadata import seal
from dcp_s3.format.part import (
    BLOCK,
    CRC,
    CRCS,
    FLAGS,
    HAS_BLOCKS,
    HAS_CRC,
    HAS_RAW_OFFSET,
    LENGTH,
    NAME,
    OBJECT,
    OFFSET,
    OFFSETS,
    PLACE,
    PROPERTIES,
    RAW_OFFSET,
    SIZES,
    WHOLE,
)
from dcp_s3.torch_private import StorageInfo

Ints: TypeAlias = npt.NDArray[np.integer[Any]]

_SLAB = 2**14  # records at a time: a few MB
_PROTOCOL = 4
_KEYS = (
    "state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", "properties", "size", "chunks",
    "offsets", "sizes", "fqn", "offset", "index", "relative_path", "length", "raw_offset", "crc64nvme",
    "crc64nvme_block", "crc64nvme_blocks",
)  # fmt: skip
_CLASSES = (
    dcp.Metadata, dcp.TensorStorageMetadata, dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata, dcp.MetadataIndex,
    StorageInfo, torch.Size,
)  # fmt: skip
_BEGIN, _END = b")\x81}(", b"ub"  # of an instance, after its class; of its state and the instance
_NONE = b"N"


@dataclass(frozen=True, eq=False)
class StoredItems:
    """All items of a checkpoint. Tables hold each value once; the items refer to them by number."""

    names: Sequence[str]
    """In the order of their entries. Each has an item."""
    shapes: Sequence[tuple[int, ...]]
    properties: Sequence[dcp.TensorProperties]
    paths: Sequence[str]
    """Relative paths of objects."""
    numbers: Ints
    """As in `Columns`, of all ranks. The chunks of a tensor have this order."""
    ranges: npt.NDArray[np.int64]
    """As in `Columns`."""
    crcs: npt.NDArray[np.uint64]
    """CRCs of blocks, as they are stored: those of an item follow each other."""
    crc_starts: Ints
    """By item: where its own begin."""


def dump_items(
    items: StoredItems, *, planner_data: dict[str, tuple[str | int, ...]] | None, storage_meta: dcp.StorageMeta
) -> bytes:
    """``.metadata`` of a checkpoint with these items, as torch's FileSystemReader and `load_metadata` read it."""
    stream = io.BytesIO()
    memo = _Memo(stream, items, planner_data, storage_meta)
    get = memo.get
    order = stable_order(items.numbers[NAME])
    starts = group_starts(items.numbers[NAME][order])
    counts = np.diff(starts, append=len(order))
    stream.write(get(dcp.Metadata) + _BEGIN + get("state_dict_metadata") + b"}")
    _write_entries(stream, memo, items, order, starts, counts)
    stream.write(get("planner_data") + (_NONE if planner_data is None else get(planner_data)))
    stream.write(get("storage_meta") + get(storage_meta) + get("version") + get(DCP_VERSION))
    stream.write(get("storage_data") + b"}")
    hints = np.empty(len(order), np.int32)
    hints[order] = np.arange(len(order)) - np.repeat(starts, counts)
    _write_storage(stream, memo, items, hints)
    stream.write(_END + b".")
    return seal(stream)


def stable_order(values: Ints) -> Ints:
    """The order that sorts values from 0 on. The same values keep theirs."""
    if len(values) and int(values.max()) < 2**16:
        values = values.astype(np.uint16)  # numpy sorts those in linear time
    return values.argsort(kind="stable")


def group_starts(ordered: Ints) -> Ints:
    """Where a run of the same values begins, in values in order."""
    return np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))) if len(ordered) else np.zeros(0, int)


class _Memo:
    """Writes the beginning of the pickle, with all that items refer to, and knows the numbers of that."""

    def __init__(
        self, stream: io.BytesIO, items: StoredItems, planner_data: Any, storage_meta: dcp.StorageMeta
    ) -> None:
        self._common = (
            _CLASSES, _KEYS, DCP_VERSION, list(items.properties), list(items.names), planner_data, list(items.paths),
            storage_meta,
        )  # fmt: skip
        pickler = pickle.Pickler(stream, _PROTOCOL)
        pickler.dump(self._common)
        memo = cast(Any, pickler).memo.copy()
        self._numbers = {key: number for key, (number, _) in memo.items()}
        stream.seek(-1, io.SEEK_END)
        stream.write(b"0")  # instead of the end: takes the value off the stack, and the memo stays
        self.names, self.paths = (
            np.array([self._numbers[id(each)] for each in values], np.uint32) for values in (items.names, items.paths)
        )
        self.shapes = np.zeros(len(items.shapes), np.uint32)
        dims, first = np.array([len(each) for each in items.shapes], np.uint8), len(memo)
        for count in sorted(set(dims.tolist())):
            which = np.flatnonzero(dims == count)
            self.shapes[which] = np.arange(first, first + len(which))
            first += len(which)
            values = np.array([items.shapes[each] for each in which.tolist()], np.int64).reshape(len(which), count)
            sizes = [each for dim in range(count) for each in _integer(values[:, dim])]
            _write_records(stream, len(which), [self.get(torch.Size) + b"(", *sizes, b"t\x85R\x940"])

    def get(self, value: Any) -> bytes:
        """What puts a value of `_common` on the stack."""
        value = _SAME.get(value, value) if isinstance(value, str) else value
        number = self._numbers[id(value)]
        return b"h" + bytes((number,)) if number < 256 else b"j" + number.to_bytes(4, "little")


_SAME = {each: each for each in (*_KEYS, DCP_VERSION)}


def _write_entries(
    stream: io.BytesIO, memo: _Memo, items: StoredItems, order: Ints, starts: Ints, counts: Ints
) -> None:
    """``state_dict_metadata``: what each name is, in the order of the table of names."""
    get, numbers = memo.get, items.numbers
    chunks = io.BytesIO()
    tensors = order[numbers[PROPERTIES][order] > 0]
    width = _write_records(
        chunks,
        len(tensors),
        [
            get(dcp.ChunkStorageMetadata) + _BEGIN,
            get("offsets") + b"j", memo.shapes[numbers[OFFSETS][tensors] - 1],
            get("sizes") + b"j", memo.shapes[numbers[SIZES][tensors] - 1],
            _END + b"a",
        ],
    )  # fmt: skip
    records, done = chunks.getbuffer(), 0
    firsts = order[starts]
    begin = get(dcp.TensorStorageMetadata) + _BEGIN + get("properties")
    properties = [get(each) for each in items.properties]
    size, between, other = get("size") + b"j", get("chunks") + b"]", get(dcp.BytesStorageMetadata) + b")\x81s"
    rows = zip(
        memo.names[numbers[NAME][firsts]].tolist(),
        numbers[PROPERTIES][firsts].tolist(),
        memo.shapes[numbers[WHOLE][firsts] - 1].tolist() if len(memo.shapes) else [0] * len(firsts),
        counts.tolist(),
        strict=True,
    )
    for name, kind, whole, count in rows:
        stream.write(b"j" + name.to_bytes(4, "little"))
        if kind:
            stream.write(begin + properties[kind - 1] + size + whole.to_bytes(4, "little") + between)
            stream.write(records[done * width : (done + count) * width])
            stream.write(_END + b"s")
            done += count
        else:
            stream.write(other)


def _write_storage(stream: io.BytesIO, memo: _Memo, items: StoredItems, hints: Ints) -> None:
    """``storage_data``: where each item lies. In a slab, items whose pickles have the same width follow each other."""
    get = memo.get
    for slab in range(0, len(hints), _SLAB):
        # What the width of each item's pickle depends on.
        numbers = items.numbers[:, slab : slab + _SLAB]
        kinds = (numbers[FLAGS] & (HAS_RAW_OFFSET | HAS_CRC | HAS_BLOCKS)).astype(np.int64)
        kinds |= np.where(numbers[PROPERTIES] > 0, 8, 0) | np.where(numbers[PLACE] > 0, 16, 0)
        kinds |= numbers[CRCS].astype(np.int64) << 6
        order = stable_order(kinds)
        bounds = [*group_starts(kinds[order]).tolist(), len(order)]
        for start, stop in itertools.pairwise(bounds):
            chosen, kind = slab + order[start:stop], int(kinds[order[start]])
            numbers, ranges = items.numbers[:, chosen], items.ranges[:, chosen]
            layout: list[bytes | Ints] = [
                get(dcp.MetadataIndex) + _BEGIN + get("fqn") + b"j", memo.names[numbers[NAME]],
                get("index"), *([b"J", hints[chosen]] if kind & 8 else [_NONE]),
            ]  # fmt: skip
            if kind & 16:
                layout += [get("offset") + b"j", memo.shapes[numbers[PLACE] - 1]]
            layout += [
                _END + get(StorageInfo) + _BEGIN + get("relative_path") + b"j", memo.paths[numbers[OBJECT]],
                get("offset"), *_integer(ranges[OFFSET]), get("length"), *_integer(ranges[LENGTH]),
            ]  # fmt: skip
            if kind & HAS_RAW_OFFSET:
                layout += [get("raw_offset"), *_integer(ranges[RAW_OFFSET])]
            if kind & HAS_CRC:
                layout += [get("crc64nvme") + b"\x8a\x09", ranges[CRC].view(np.uint64), b"\0"]
            if kind & HAS_BLOCKS:
                length = kind >> 6
                crcs = items.crcs[items.crc_starts[chosen, None] + np.arange(length // 8)].view(np.uint8)
                layout += [get("crc64nvme_block"), *_integer(ranges[BLOCK])]
                layout += [get("crc64nvme_blocks") + b"B" + length.to_bytes(4, "little"), crcs]
            _write_records(stream, len(chosen), [*layout, _END + b"s"])


def _integer(values: Ints) -> list[bytes | Ints]:
    """Integers, all in the same number of bytes."""
    if len(values) and int(values.max()) < 2**31:
        return [b"J", values.astype(np.int32)]
    return [b"\x8a\x08", values]


def _write_records(stream: io.BytesIO, count: int, layout: Sequence[bytes | Ints]) -> int:
    """Write records of the same bytes and of values, the least significant byte first. Returns the bytes of one."""
    template = b""
    fields: list[tuple[np.dtype[Any], int, npt.NDArray[Any]]] = []
    for part in layout:
        if isinstance(part, bytes):
            template += part
            continue
        width = part.dtype.itemsize * (part.shape[1] if part.ndim == 2 else 1)
        if width:
            kind = part.dtype.newbyteorder("<") if part.ndim == 1 else np.dtype((np.void, width))
            values = part if part.ndim == 1 else part.view(kind).reshape(len(part))
            fields.append((kind, len(template), values))
            template += bytes(width)
    records = np.empty(count, np.dtype((np.void, len(template))))
    records[:] = np.void(template)
    for kind, start, values in fields:
        view = np.ndarray((count,), kind, records.data, start, (len(template),)) if count else values
        view[...] = values
    stream.write(records.data)
    return len(template)
