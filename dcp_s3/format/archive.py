"""Finds the bytes of a tensor in a torch.save archive from its beginning alone.

torch.save writes a zip archive: ``data.pkl`` (how the tensor is made from a storage), small records, the storage's raw
bytes as ``data/0``, and more records. A local header precedes each record. Its sizes are zero: a data descriptor
after the record has them. For the pickle and the storage, the end is known without it.
Only the globals that make an ordinary tensor are known, and they make a description of it.
"""

from __future__ import annotations

import io
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dcp_s3.format.allow_list import Names, find_plain, table
from dcp_s3.format.unpickling import MalformedPickleError, UnsafeGlobalError, expect, unpickle

MAX_HEAD = 64 * 2**10
"""Maximum bytes before a storage. torch 2.13 writes 704 for a usual tensor, 20 KiB if it aligns to pages."""

_MAX_RECORDS = 16
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_LOCAL_SIGNATURE = b"PK\x03\x04"
_HAS_DESCRIPTOR = 0x8
_UTF8_NAMES = 0x800
_PROTOCOL = b"\x80\x02"  # protocol 2, as torch.save writes


# --- what a pickle says of tensors ----------------------------------------------------------------

_MAX_COUNT = 2**62  # elements


class _StorageType(NamedTuple):
    """The type of a storage, like ``torch.FloatStorage``: its dtype, or None if it holds mere bytes."""

    dtype: torch.dtype | None


class PickledStorage(NamedTuple):
    """A storage, whose bytes are elsewhere."""

    key: str
    """Name of the storage in its archive."""
    nbytes: int
    """Size in bytes."""
    dtype: torch.dtype | None
    """Dtype of its elements; None if it consists of mere bytes."""


class PickledTensor(NamedTuple):
    """A tensor, or a parameter. It lies within its storage."""

    storage: PickledStorage
    dtype: torch.dtype
    offset: int
    """Offset of the first element, in elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements."""
    is_unusual: bool
    """Whether something must still be done with it: it is a conjugate, for example."""


def load_storage(found: Any) -> PickledStorage:
    """The storage that a persistent id describes; MalformedPickleError if it does not."""
    # ("storage", type, key, location, number of elements)
    right = type(found) is tuple and len(found) == 5 and found[0] == "storage" and type(found[1]) is _StorageType
    if not right or not (type(found[2]) is type(found[3]) is str) or not _is_count(found[4]):
        raise MalformedPickleError("a storage is not described as torch does")
    _, kind, key, _, numel = found
    return PickledStorage(key, numel * (kind.dtype.itemsize if kind.dtype else 1), kind.dtype)


def _tensor(arguments: Sequence[Any], dtype: Any, *, is_unusual: bool) -> PickledTensor:
    """The tensor of a storage, offset, shape, strides, requires_grad and hooks."""
    storage, offset, shape, strides, requires_grad, hooks = arguments
    if not _is_count(offset) or not _are_counts(shape) or not _are_counts(strides) or len(shape) != len(strides):
        raise MalformedPickleError("a tensor without a shape")
    if type(requires_grad) is not bool or type(hooks) is not OrderedDict:
        raise MalformedPickleError("a tensor that is not an ordinary one")
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    end = offset if 0 in shape else offset + last + 1
    if end * dtype.itemsize > storage.nbytes:
        raise MalformedPickleError("a tensor that is larger than its storage")
    return PickledTensor(storage, dtype, offset, tuple(shape), tuple(strides), is_unusual)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _are_counts(values: object) -> bool:
    return type(values) in (tuple, torch.Size) and all(map(_is_count, values))  # type: ignore[call-overload]


def _rebuild(
    name: str, make: Callable[..., PickledTensor], *lengths: int, in_bytes: bool = False
) -> tuple[str, Callable[..., PickledTensor]]:
    """A function that makes a tensor of so many arguments, the first of which is a storage (of elements, or bytes)."""

    def call(*arguments: Any) -> PickledTensor:
        right = len(arguments) in lengths and type(arguments[0]) is PickledStorage
        right = right and (arguments[0].dtype is None) == in_bytes
        expect(right and (not in_bytes or isinstance(arguments[6], torch.dtype)), f"torch._utils.{name}")
        return make(*arguments)

    return name, call


_STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    "QUInt8": torch.quint8, "QInt8": torch.qint8, "QInt32": torch.qint32, "QUInt4x2": torch.quint4x2,
    "QUInt2x4": torch.quint2x4,
}  # fmt: skip
TENSORS: dict[Names, Any] = {
    **{(module, f"{name}Storage"): _StorageType(dtype)
       for module in ("torch", "torch.cuda") for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): _StorageType(None),
    **table(
        # After the hooks may come something unusual; in v3, whose storage holds bytes, a dtype before that.
        _rebuild("_rebuild_tensor_v2", lambda *a: _tensor(a[:6], a[0].dtype, is_unusual=len(a) > 6), 6, 7),
        _rebuild("_rebuild_tensor_v3", lambda *a: _tensor(a[:6], a[6], is_unusual=len(a) > 7), 7, 8, in_bytes=True),
        ("_rebuild_parameter", lambda tensor, *_: tensor, (PickledTensor, bool, OrderedDict)),
        module="torch._utils",
    ),
}  # fmt: skip
UNUSUAL_TENSORS = table(
    # Without requires_grad and hooks; with a quantizer's parameters before them.
    _rebuild("_rebuild_tensor", lambda *a: _tensor((*a, False, OrderedDict()), a[0].dtype, is_unusual=True), 4),
    _rebuild("_rebuild_qtensor", lambda *a: _tensor((*a[:4], *a[5:]), a[0].dtype, is_unusual=True), 7),
    module="torch._utils",
)
"""Functions that only torch itself may judge."""


# --- the head of an archive -----------------------------------------------------------------------


class HeadError(Exception):
    """The bytes are not the beginning of an ordinary tensor, as torch.save writes it. ``args[0]`` says why.

    Attributes:
        truncated: whether more bytes might change that.
    """

    def __init__(self, reason: str, *, truncated: bool = False) -> None:
        super().__init__(reason)
        self.truncated = truncated


@dataclass(frozen=True)
class ArchiveHead:
    """Description of a tensor, from the beginning of its torch.save archive. It is one run of bytes."""

    length: int
    """Number of bytes before the storage's."""
    raw_offset: int
    """Offset of the tensor's first byte in the archive."""
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Dimensions as they lie in the bytes, the outermost first; ``(0, 1, ...)`` is row-major."""

    @property
    def is_row_major(self) -> bool:
        """Whether the bytes are those of a contiguous tensor of this shape."""
        return self.order == tuple(range(len(self.shape)))


def parse_head(data: bytes) -> ArchiveHead:
    """Parse the head of the archive that begins with ``data``; looks at `MAX_HEAD` bytes at most.

    Raises:
        HeadError: it is compressed, damaged, not in this machine's byte order, not dense, or not a tensor with a
            storage of its own; or ``data`` ends before the storage.
    """
    more = len(data) < MAX_HEAD
    data = data[:MAX_HEAD]
    name, start, _ = _read_local_header(data, 0, more)
    folder, _, name = name.partition("/")
    if name != "data.pkl":
        raise HeadError(f"its first record is {name!r}, not data.pkl")
    tensor, end = _read_pickle(data, start, more)
    byteorder = "little"  # torch takes an archive without the record for little-endian
    for _ in range(_MAX_RECORDS):
        position = data.find(_LOCAL_SIGNATURE, end)  # after the record, and its data descriptor if it has one
        if position < 0:
            raise HeadError("it ends within its records", truncated=more)
        name, start, size = _read_local_header(data, position, more)
        if name == f"{folder}/data/{tensor.storage.key}":
            if byteorder != sys.byteorder:
                raise HeadError(f"its byte order is {byteorder!r}")
            if size not in (None, tensor.storage.nbytes):
                raise HeadError(f"{name} has {size} bytes, expected {tensor.storage.nbytes}")
            return _describe(tensor, start)
        if name.startswith(f"{folder}/data/"):
            raise HeadError("it has another storage than the tensor's")
        if name == f"{folder}/byteorder":
            byteorder = "big" if data.startswith(b"big", start) else "little"
        end = start
    raise HeadError(f"it has {_MAX_RECORDS} records before its storage")


def _read_local_header(data: bytes, position: int, more: bool) -> tuple[str, int, int | None]:
    """A record of the archive: its name, where its bytes begin, and their number (None: a descriptor tells it)."""
    name_start = position + _LOCAL_HEADER.size
    if len(data) < name_start:
        raise HeadError("it ends within its records", truncated=more)
    signature, _, flags, method, _, _, _, stored, size, name_length, extra_length = _LOCAL_HEADER.unpack_from(
        data, position
    )
    if signature != _LOCAL_SIGNATURE:
        raise HeadError("it is no zip archive")
    described = bool(flags & _HAS_DESCRIPTOR)
    if method or flags & ~(_HAS_DESCRIPTOR | _UTF8_NAMES) or (not described and stored != size):
        raise HeadError("it is compressed or encrypted")
    start = name_start + name_length + extra_length
    if len(data) < start:
        raise HeadError("it ends within its records", truncated=more)
    name = data[name_start : name_start + name_length].decode("utf-8", "replace")
    return name, start, None if described else size


# --- the pickle -----------------------------------------------------------------------------------


def _read_pickle(data: bytes, start: int, more: bool) -> tuple[PickledTensor, int]:
    if data[start : start + 2] != _PROTOCOL:
        raise HeadError(f"its pickle does not begin with {_PROTOCOL!r}", truncated=more and len(data) < start + 2)
    stream = io.BytesIO(data)
    stream.seek(start)
    try:
        found = unpickle(stream, _find_global, load_storage)
    except UnsafeGlobalError as error:
        raise HeadError(f"it needs {error.args[0]}") from None
    except MalformedPickleError as error:
        raise HeadError(f"its pickle is no tensor's: {error}", truncated=more) from None
    if not isinstance(found, PickledTensor):
        raise HeadError("its pickle is no tensor's")
    if found.is_unusual:
        raise HeadError("its tensor is not an ordinary one")
    return found, stream.tell()


def _find_global(module: str, name: str) -> Any:
    found = TENSORS.get((module, name))
    if found is None and (name == "OrderedDict" or module == "torch"):
        found = find_plain(module, name)
    if found is None:
        raise UnsafeGlobalError(module, name)
    return found


# --- the tensor -----------------------------------------------------------------------------------


def _describe(tensor: PickledTensor, start: int) -> ArchiveHead:
    order = find_order(tensor.shape, tensor.strides)
    if order is None:
        raise HeadError("its tensor is not dense")
    itemsize = tensor.dtype.itemsize
    nbytes = math.prod(tensor.shape) * itemsize
    return ArchiveHead(start, start + tensor.offset * itemsize, nbytes, tensor.dtype, tensor.shape, order)


def find_order(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """The order of dimensions in which a tensor is row-major, the outermost first; None if it is not dense.

    Dimensions of one element stay where they are as far as the others allow.
    """
    natural = tuple(range(len(shape)))
    if 0 in shape:
        return natural
    wide = [dim for dim in natural if shape[dim] != 1]
    by_stride = sorted(wide, key=lambda dim: -strides[dim])
    expected = 1
    for dim in reversed(by_stride):
        if strides[dim] != expected:
            return None
        expected *= shape[dim]
    moved = iter(by_stride)
    return tuple(dim if shape[dim] == 1 else next(moved) for dim in natural)
