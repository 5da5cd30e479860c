"""Pickles that nobody should load: bombs, and a function that must never be called.

As a script (`python -m tests.hostile`) it decodes all bombs in a process with little memory, and prints a line of JSON
for each: its name, the error or what was loaded, and whether code ran or a class was changed.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import importlib
import io
import json
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.metadata import TensorProperties as Properties
from torch.distributed.checkpoint.metadata import TensorStorageMetadata as TensorMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_s3.format import allow_list, safe_items
from dcp_s3.format.allow_list import Allowed, Mirror, Opaque
from dcp_s3.format.archive import UNUSUAL_TENSORS
from dcp_s3.format.blocks import make_storage_info
from dcp_s3.format.metadata import load_metadata
from dcp_s3.format.safe_items import check_item
from dcp_s3.load.fetch import Fetcher
from dcp_s3.load.read import LoadExecutor
from dcp_s3.settings import Settings
from dcp_s3.torch_private import ReaderTransforms
from dcp_s3.url import parse_url
from tests.archives import saved as save
from tests.memory_store import MemoryStore

URL = "s3://bucket/step-1"
MEMORY = 2**29
"""Bytes of address space that the bombs get."""

_tripped = False


def trip(*arguments: Any) -> None:
    """What a pickle would call if it could."""
    global _tripped
    _tripped = True


def was_tripped() -> bool:
    """Whether `trip` was called since this was last asked."""
    global _tripped
    tripped, _tripped = _tripped, False
    return tripped


def classes() -> dict[str, Any]:
    """The attributes of all that a pickle may name, and of what stands for it, to be compared."""
    found: dict[str, Any] = {}
    for table in (allow_list.METADATA, safe_items.ITEMS, UNUSUAL_TENSORS):
        for known, stand_in in table.items():
            module, _, qualified = known.rpartition(".")
            with contextlib.suppress(ImportError, AttributeError):
                value = getattr(importlib.import_module(module), qualified)
                found[known] = _attributes(value)
                if isinstance(value, type) and issubclass(value, enum.Enum):
                    found |= {f"{known}.{each.name}": _attributes(each) for each in value}
            found[f"for {known}"] = _attributes(stand_in)
    others: list[Any] = [
        *allow_list.MIRRORS, *allow_list.MIRRORS.values(), Mirror, Opaque, Allowed,
        list, dict, set, collections.OrderedDict, torch.dtype, torch.float32,
    ]  # fmt: skip
    return found | {f"{value}": _attributes(value) for value in others}


def _attributes(value: Any) -> Any:
    slots = [getattr(value, slot) for slot in ("name", "_call", "_signatures") if isinstance(value, Allowed)]
    attributes = {key: id(item) for key, item in getattr(value, "__dict__", {}).items()}
    attributes.pop("__slotnames__", None)  # which pickle.dumps leaves there
    return type(value), slots, attributes


# --- pickles, by opcodes --------------------------------------------------------------------------------


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def name(module: str, qualified: str) -> bytes:
    return f"c{module}\n{qualified}\n".encode()


def call(module: str, qualified: str, *arguments: bytes) -> bytes:
    return name(module, qualified) + b"(" + b"".join(arguments) + b"tR"


def plain(value: Any) -> bytes:
    """The opcodes of a plain value, without memo."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 2)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]


def stream(opcodes: bytes) -> bytes:
    return b"\x80\x02" + opcodes + b"."


def doubling(levels: int, opcode: bytes = b"\x86", start: bytes = b")") -> bytes:
    """A tuple of the same tuple twice, of the same tuple twice, ..."""
    return start + b"".join(b"q\x01h\x01" + opcode for _ in range(levels))


def nested(levels: int, kind: str) -> bytes:
    begin, end = {"list": (b"]", b"a"), "tuple": (b"", b"\x85"), "dict": (b"}K\x01", b"s")}[kind]
    return begin * levels + b")" + end * levels


# --- metadata -------------------------------------------------------------------------------------------

_MARK = "@@planner@@"


def make_metadata(planner_data: Any = None) -> Metadata:
    """A tensor of two chunks and an object."""
    size = torch.Size([4, 2])
    chunks = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 2])) for row in (0, 2)]
    return Metadata(
        {"w": TensorMetadata(Properties(dtype=torch.bfloat16), size, chunks), "x": dcp.metadata.BytesStorageMetadata()},
        planner_data={"w": ("w",), "x": ("a", 0, "x")} if planner_data is None else planner_data,
        storage_data={
            MetadataIndex("w", [0, 0], 0): make_storage_info("__0_0.distcp", 0, 900, raw_offset=500, crc64nvme=2**63),
            MetadataIndex("w", [2, 0], 1): make_storage_info("__1_0.distcp", 0, 900, raw_offset=500, crc64nvme=1),
            MetadataIndex("x"): make_storage_info("__0_0.distcp", 900, 100),
        },
        storage_meta=StorageMeta(checkpoint_id=URL, save_id="1"),
        version="1.0.0",
    )


def metadata_with(opcodes: bytes) -> bytes:
    """Metadata whose planner_data is what ``opcodes`` make. They may use places 1 to 9 of the memo."""
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, 2)
    metadata = make_metadata(_MARK)
    pickler.dump([*(f"place {i}" for i in range(10)), metadata])
    data = buffer.getvalue()
    assert data.count(text(_MARK)) == 1
    # The list is taken off again: all but its last item.
    return data.replace(text(_MARK), opcodes).replace(b"]q\x00(", b"", 1).removesuffix(b"e.") + b"."


def decode_metadata(data: bytes) -> Metadata:
    return load_metadata(data, url=URL)


_SLICE = call("builtins", "slice", b"K\x00", b"K\x00", b"N")
METADATA_BOMBS: dict[str, bytes] = {
    "tuples that double": doubling(60),
    "lists that double, as text": call("builtins", "str", doubling(60, b"\x86", b"]")),
    "a list that doubles itself": b"](K\x01K\x02eq\x01" + (_SLICE + b"h\x01s") * 50,
    "bytes that double themselves": b"\x96" + struct.pack("<Q", 2) + b"ab" + b"q\x01" + (_SLICE + b"h\x01s") * 50,
    "a huge memo": b"K\x01r\xff\xff\xff\x7f",
    "a huge text": b"\x8d" + struct.pack("<Q", 2**60) + b"x",
    "a huge integer": b"\x8b\xff\xff\xff\x7f" + b"x",
    "huge bytes": b"\x8e" + struct.pack("<Q", 2**62),
    "a huge bytearray by opcode": b"\x96" + struct.pack("<Q", 2**40),
    "a huge frame": b"\x95" + struct.pack("<Q", 2**63) + b"N",
    "a bytearray of 1 TB": call("builtins", "bytearray", number(10**12)),
    "bytes of 1 TB": call("builtins", "bytes", number(10**12)),
    "a list of 10**12": call("builtins", "list", call("builtins", "range", b"K\x00", number(10**12), b"K\x01")),
    "a set of 10**12": call("builtins", "set", call("builtins", "range", b"K\x00", number(10**12), b"K\x01")),
    "a size of 10**12": call("torch", "Size", call("builtins", "range", b"K\x00", number(10**12), b"K\x01")),
    "a range of 10**12": call("builtins", "range", b"K\x00", number(10**12), b"K\x01"),
    "a dict that contains itself": b"}q\x01K\x01h\x01s",
    "a list that contains itself": b"]q\x01h\x01a",
    "10,000 lists": nested(10_000, "list"),
    "10,000 tuples": nested(10_000, "tuple"),
    "10,000 dicts": nested(10_000, "dict"),
    "a million marks": b"(" * 1_000_000,
    "a huge path": call("pathlib", "PosixPath", *[text("a" * 1000)] * 100),
    "a slow encoding": call("_codecs", "encode", text("a" * 100_000), text("idna")),
}
"""Name -> opcodes of a planner_data."""


# --- items ----------------------------------------------------------------------------------------------


def archive(pickled: bytes, *entries: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """What torch.save writes, around any pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for path, data in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n"), *entries):
            file.writestr(f"archive/{path}", data)
    return buffer.getvalue()


def storage(numel: int, kind: str = "FloatStorage", key: str = "0") -> bytes:
    """Opcodes of a storage."""
    return b"(" + text("storage") + name("torch", kind) + text(key) + text("cpu") + number(numel) + b"tQ"


def tensor(numel: int, offset: int, shape: bytes, strides: bytes) -> bytes:
    """Opcodes of a tensor."""
    hooks = call("collections", "OrderedDict")
    return call("torch._utils", "_rebuild_tensor_v2", storage(numel), number(offset), shape, strides, b"\x89", hooks)


_DATA = ("data/0", bytes(16))
ITEM_BOMBS: dict[str, bytes] = {
    **{f"{label}, item": archive(stream(bomb)) for label, bomb in METADATA_BOMBS.items() if len(bomb) < 1_000_000},
    "a tensor of 4 TB": archive(stream(call("torch", "Tensor", number(10**12)))),
    "a storage of 1 TB": archive(stream(call("torch.storage", "UntypedStorage", number(10**12)))),
    "a storage beyond its record": archive(stream(storage(10**12)), _DATA),
    "a storage of negative length": archive(stream(storage(-1)), _DATA),
    "a tensor beyond its storage": archive(stream(tensor(4, 0, plain((10**12,)), plain((1,)))), _DATA),
    "a tensor before its storage": archive(stream(tensor(4, -10, plain((2,)), plain((1,)))), _DATA),
    "a tensor with wide strides": archive(stream(tensor(4, 0, plain((2, 2)), plain((10**12, 1)))), _DATA),
    "a compressed pickle": archive(stream(plain(bytes(2**24)) + b"0N"), compression=zipfile.ZIP_DEFLATED),
    "a compressed storage": archive(
        stream(storage(2**24, "ByteStorage")), ("data/0", bytes(2**24)), compression=zipfile.ZIP_DEFLATED
    ),
    "old format, a storage of 4 TB": save(torch.ones(3), _use_new_zipfile_serialization=False).replace(
        b"K\x03N", number(10**12) + b"N"
    ),
    "an old tar": b"storages" + bytes(249) + b"ustar" + bytes(10_000),
}
"""Name -> bytes of an item."""


def decode_item(data: bytes) -> Any:
    """An item that is no tensor, as the reader does: checked, then loaded without restriction."""
    found = io.BytesIO(data)
    check_item(found, fqn="x", url=URL, verified=True)
    return torch.load(found, weights_only=False)


def decode_tensor(data: bytes, shape: tuple[int, ...] = (2, 2)) -> torch.Tensor:
    """A tensor that another writer stored, as the reader does."""
    size, zeros = torch.Size(shape), torch.Size([0] * len(shape))
    target = torch.zeros(size)
    planner = SimpleNamespace(resolve_tensor=lambda item: target)
    index = MetadataIndex("w", zeros)
    metadata = Metadata(
        {"w": TensorMetadata(Properties(dtype=torch.float32), size, [ChunkStorageMetadata(zeros, size)])},
        storage_data={index: make_storage_info("__0_0.distcp", 0, len(data))},
    )
    item = ReadItem(LoadItemType.TENSOR, index, zeros, index, zeros, size)
    fetcher = Fetcher(MemoryStore(), parse_url(URL), Settings())
    executor = LoadExecutor(fetcher, metadata, ReaderTransforms(None), allow_dtype_cast=False)
    (transfer,), _ = executor.prepare([item], planner, {0})  # type: ignore[arg-type]
    if data:
        transfer.memory(0, len(data))[:] = data
    assert transfer.complete is not None
    transfer.complete(transfer)
    return target


# --- the process ----------------------------------------------------------------------------------------


def _cases() -> Iterator[tuple[str, Callable[[bytes], Any], bytes]]:
    for label, opcodes in METADATA_BOMBS.items():
        yield label, decode_metadata, metadata_with(opcodes)
        yield f"{label}, alone", decode_metadata, stream(opcodes)
    for label, data in ITEM_BOMBS.items():
        yield label, decode_item, data
        yield f"{label}, tensor", decode_tensor, data

    for label, opcodes in HOSTILE.items():
        yield label, decode_item, archive(stream(opcodes))
        yield f"{label}, metadata", decode_metadata, metadata_with(opcodes)


def main() -> None:
    """Decode every bomb in `MEMORY` bytes more than now."""
    decode_item(save({"a": torch.ones(3)}))  # what is imported at first use
    cases = list(_cases())
    before = classes()
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for label, decode, data in cases:
        try:
            found = f"loaded {type(decode(data)).__name__}"
        except Exception as error:  # noqa: BLE001 - which is what is asked
            found = f"{type(error).__module__}.{type(error).__name__}: {str(error)[:300]}"
        print(json.dumps({"case": label, "found": found, "ran": was_tripped()}), flush=True)
    print(json.dumps({"unchanged": classes() == before}))


# --- items of numpy's and the standard library's values --------------------------------------------------


def dtype(kind: str, state: Any = (3, "<", None, None, None, -1, -1, 0)) -> bytes:
    """Opcodes of a dtype, with ``state``."""
    return call("numpy", "dtype", text(kind), b"\x89", b"\x88") + (plain(state) + b"b" if state is not None else b"")


U1 = dtype("u1", (3, "|", None, None, None, -1, -1, 0))


def array(shape: Any, data: bytes, *, kind: bytes | None = None, start: Any = (0,), version: int = 1) -> bytes:
    """Opcodes of an array."""
    made = call("numpy._core.multiarray", "_reconstruct", name("numpy", "ndarray"), plain(start), latin(b"b"))
    return made + b"(" + number(version) + plain(shape) + (kind or U1) + b"\x89" + latin(data) + b"tb"


def latin(data: bytes) -> bytes:
    """Opcodes of bytes."""
    return call("_codecs", "encode", text(data.decode("latin-1")), text("latin1"))


def scalar(kind: bytes, data: bytes) -> bytes:
    """Opcodes of a scalar of numpy."""
    return call("numpy._core.multiarray", "scalar", kind, latin(data))


_RANGE = call("builtins", "range", b"K\x00", number(10**12), b"K\x01")
"""One of 10**12."""
TEXT = (3, "<", None, None, None, 12, 4, 8)
HOSTILE: dict[str, bytes] = {
    "an array larger than its bytes": array((10**12,), b"x"),
    "an array smaller than its bytes": array((1,), b"xyz"),
    "an array of negative size": array((-1, -3), b"xyz"),
    "an array that begins large": array((1,), b"x", start=(10**12,)),
    "an array without end": array((2**40, 0, 2**40), b""),
    "an array of many dimensions": array((1,) * 65, b"x"),
    "an array of a later version": array((1,), b"x", version=2),
    "an array of sizes that are no numbers": array((True, 1.0), b"x"),
    "an array of objects": array((1,), bytes(8), kind=dtype("O8", (3, "|", None, None, None, -1, -1, 63))),
    "an array of pointers": array((1,), bytes(8), kind=dtype("O8", None)),
    "an array of records": array((1,), bytes(4), kind=dtype("V4", (3, "|", None, ("a",), {"a": 1}, 4, 1, 0))),
    "an array that is filled twice": array((1,), b"x") + b"(K\x01" + plain((1,)) + U1 + b"\x89" + latin(b"y") + b"tb",
    "an array of something else": call(
        "numpy._core.multiarray", "_reconstruct", name("collections", "deque"), plain((0,)), latin(b"b")
    ),
    "an array of texts that are none": array((1,), b"\xff" * 12, kind=dtype("U3", TEXT)),
    "an array by its class": call("numpy", "ndarray", plain((10**12,))),
    "an array by its class's new": name("numpy", "ndarray") + plain(((10**12,),)) + b"\x81",
    "a dtype of huge texts": dtype("U3", (3, "<", None, None, None, 10**9, 4, 8)),
    "a dtype of negative texts": dtype("U3", (3, "<", None, None, None, -12, 4, 8)),
    "a dtype with fields": dtype("u1", (3, "|", None, ("a",), {"a": (1, 2)}, -1, -1, 0)),
    "a dtype with a subarray": dtype("u1", (3, "|", (1, (2,)), None, None, -1, -1, 0)),
    "a dtype of another byte order": dtype("u4", (3, "x", None, None, None, -1, -1, 0)),
    "a dtype that is numpy's own": call("numpy", "dtype", text("f4"), b"\x89", b"\x89"),
    "a dtype that is aligned": call("numpy", "dtype", text("f4"), b"\x88", b"\x88"),
    "a dtype of a list": call("numpy", "dtype", plain([("a", "f4")]), b"\x89", b"\x88"),
    "a dtype of fields": call("numpy", "dtype", text("f4,f4"), b"\x89", b"\x88"),
    "a dtype that changes": dtype("U3", TEXT) + plain(TEXT) + b"b",
    "a scalar of few bytes": scalar(dtype("u8"), b"xyz"),
    "a scalar of an object": scalar(dtype("O8", (3, "|", None, None, None, -1, -1, 63)), bytes(8)),
    "a deque of 10**12": call("collections", "deque", _RANGE),
    "a counter of 10**12": call("collections", "Counter", _RANGE),
    "a date of no calendar": call("datetime", "date", latin(b"\x07\xe4\x02\x1f")),
    "a date of numbers": call("datetime", "date", number(2020), b"K\x01", b"K\x01"),
    "a date with a zone of its own": call(
        "datetime", "datetime", latin(b"\x07\xe4\x02\x01" + bytes(6)), call("tests.hostile", "trip")
    ),
    "a time of no clock": call("datetime", "time", latin(b"\x19" + bytes(5))),
    "a huge timedelta": call("datetime", "timedelta", number(10**20), b"K\x00", b"K\x00"),
    "a zone of two days": call("datetime", "timezone", call("datetime", "timedelta", b"K\x02", b"K\x00", b"K\x00")),
    "a stream of a file": call("_io", "FileIO", text("/etc/passwd")),
    "a factory of its own": call("collections", "defaultdict", name("tests.hostile", "trip")),
    "a deque of what it calls": call("collections", "deque") + call("tests.hostile", "trip") + b"a",
    "attributes of a class": name("collections", "deque") + plain({"append": 1}) + b"b",
    "attributes of an array's class": name("numpy", "ndarray") + plain((None, {"x": 1})) + b"b",
    "attributes of a date": call("datetime", "timedelta", b"K\x01", b"K\x02", b"K\x03") + plain({"x": 1}) + b"b",
    "a tensor of a huge range": tensor(4, 0, _RANGE, _RANGE),
}
"""Name -> opcodes."""


if __name__ == "__main__":
    main()
