"""The zip archive that torch.save writes for a tensor, and where the tensor's bytes lie in it.

The archive has ``data.pkl`` (how the tensor is made from a storage), small records, the storage's raw bytes as
``data/0``, and more records. A local header precedes each record. Its sizes are zero: a data descriptor after the
record has them. For the pickle and the storage, the end is known without it.

An upload is a `Frame`'s header, tensor memory, trailer: no byte of the tensor is copied. The zip CRC-32 of the data
record is that of no data. torch.load does not check it (we check our own CRC-64), but ``unzip -t`` would complain.
"""

from __future__ import annotations

import functools
import io
import math
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dcp_s3.format.allow_list import PLAIN, MalformedPickleError, UnsafeGlobalError, expect, table, unpickle

SIGNATURE = b"PK\x03\x04"
"""Of each record, and so of an archive."""
PROTOCOL = 2
"""Of pickles that torch.save writes."""

# --- frames ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """The bytes around the raw bytes of one tensor in its item."""

    header: bytes
    """Bytes before the raw bytes; their length is the raw offset inside the item."""
    trailer: bytes
    nbytes: int
    """Length of the raw bytes."""

    @property
    def length(self) -> int:
        """Number of bytes of the whole item, the same as torch.save's."""
        return len(self.header) + self.nbytes + len(self.trailer)


class FramingError(RuntimeError):
    """This version of torch writes an archive whose layout is not one storage between two runs of records."""


class _Recorder(io.RawIOBase):
    """File object for torch.save that records what is written, and the holes between, in bytes."""

    def __init__(self) -> None:
        self.runs: list[list[bytes]] = [[]]
        """What is written before the first hole, after it, and so on."""
        self.holes: list[int] = []
        self._position = 0

    def write(self, data: Any) -> int:
        self.runs[-1].append(bytes(data))
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        skipped = offset - (self._position if whence == io.SEEK_SET else 0)
        if skipped < 0:
            raise FramingError("torch.save seeked in an unexpected way under skip_data")
        if skipped:
            self.holes.append(skipped)
            self.runs.append([])
            self._position += skipped
        return self._position


@functools.lru_cache(maxsize=4096)
def compute_frame(dtype: torch.dtype, shape: torch.Size) -> Frame:
    """The frame of a contiguous CPU tensor of ``dtype`` and ``shape`` whose storage holds only its own bytes, exactly
    as this torch writes it: under ``skip_data``, torch.save writes everything except the raw bytes.

    Allocates (but never touches) memory of the tensor's size. torch.save takes about 80 us for a frame, one of the most
    recent 4096 less than 1 us. Safe to use from several threads.

    Raises:
        FramingError: torch's archive layout has changed; callers fall back to torch.save.
    """
    template = torch.empty(shape, dtype=dtype, device="cpu")
    recorder = _Recorder()
    with torch.serialization.skip_data():
        torch.save(template, recorder)  # type: ignore[arg-type]
    if recorder.holes != ([template.nbytes] if template.nbytes else []):
        raise FramingError(f"torch.save left other holes than one of {template.nbytes} bytes for the data")
    header, *trailer = (b"".join(run) for run in recorder.runs)
    return Frame(header, b"".join(trailer), template.nbytes)


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
    dtype: torch.dtype | None
    """None if it consists of mere bytes."""


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
    """The storage that a persistent id describes: "storage", type, key, location, number of elements."""
    right = type(found) is tuple and len(found) == 5 and found[0] == "storage" and type(found[1]) is _StorageType
    if not right or not (type(found[2]) is type(found[3]) is str) or not _are_counts(found[4:]):
        raise MalformedPickleError("a storage is not described as torch does")
    _, kind, key, _, numel = found
    return PickledStorage(key, numel * (kind.dtype.itemsize if kind.dtype else 1), kind.dtype)


def _are_counts(values: object) -> bool:
    known = type(values) in (tuple, torch.Size)
    return known and all(type(value) is int and 0 <= value < _MAX_COUNT for value in values)  # type: ignore[attr-defined]


def _rebuild(name: str, *lengths: int, in_bytes: bool = False, pick: Callable[..., tuple[Any, ...]]) -> tuple[Any, ...]:
    """A function of torch that makes a tensor of so many arguments, the first of which is a storage (of elements, or of
    bytes). ``pick`` gives the storage's offset, shape, strides, requires_grad, hooks, dtype, and whether it is unusual.
    """

    def call(*arguments: Any) -> PickledTensor:
        right = len(arguments) in lengths and type(arguments[0]) is PickledStorage
        expect(right and (arguments[0].dtype is None) == in_bytes, f"torch._utils.{name}")
        offset, shape, strides, requires_grad, hooks, dtype, is_unusual = pick(*arguments)
        if not _are_counts((offset,)) or not _are_counts(shape) or not _are_counts(strides):
            raise MalformedPickleError("a tensor without a shape")
        right = type(requires_grad) is bool and type(hooks) is OrderedDict and isinstance(dtype, torch.dtype)
        if not right or len(shape) != len(strides):
            raise MalformedPickleError("a tensor that is not an ordinary one")
        last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        end = offset if 0 in shape else offset + last + 1
        if end * dtype.itemsize > arguments[0].nbytes:
            raise MalformedPickleError("a tensor that is larger than its storage")
        return PickledTensor(arguments[0], dtype, offset, tuple(shape), tuple(strides), is_unusual)

    return name, call


_DTYPES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    "QUInt8": torch.quint8, "QInt8": torch.qint8, "QInt32": torch.qint32, "QUInt4x2": torch.quint4x2,
    "QUInt2x4": torch.quint2x4,
}  # fmt: skip
TENSORS: dict[str, Any] = {
    **PLAIN,
    **{f"{module}.{name}Storage": _StorageType(dtype)
       for module in ("torch", "torch.cuda") for name, dtype in _DTYPES.items()},
    "torch.storage.UntypedStorage": _StorageType(None),
    **table(
        # After the hooks may come something unusual; in v3, whose storage holds bytes, a dtype before that.
        _rebuild("_rebuild_tensor_v2", 6, 7, pick=lambda s, *a: (*a[:5], s.dtype, len(a) > 5)),
        _rebuild("_rebuild_tensor_v3", 7, 8, pick=lambda s, *a: (*a[:6], len(a) > 6), in_bytes=True),
        ("_rebuild_parameter", lambda tensor, *_: tensor, (PickledTensor, bool, OrderedDict)),
        prefix="torch._utils.",
    ),
}  # fmt: skip
"""Stand-ins for the globals of tensors and plain values."""
UNUSUAL_TENSORS = table(
    # Without requires_grad and hooks; with a quantizer's parameters before them.
    _rebuild("_rebuild_tensor", 4, pick=lambda s, *a: (*a, False, OrderedDict(), s.dtype, True)),
    _rebuild("_rebuild_qtensor", 7, pick=lambda s, *a: (*a[:3], *a[4:], s.dtype, True)),
    prefix="torch._utils.",
)
"""Functions that only torch itself may judge."""


# --- the head of a tensor's archive ---------------------------------------------------------------

MAX_HEAD = 64 * 2**10
"""Maximum bytes before a storage. torch 2.13 writes 704 for a usual tensor, 20 KiB if it aligns to pages."""

_MAX_RECORDS = 16
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_HAS_DESCRIPTOR = 0x8
_UTF8_NAMES = 0x800


@dataclass(frozen=True)
class ArchiveHead:
    """Description of a contiguous tensor, from the beginning of its torch.save archive. It is one run of bytes."""

    length: int
    """Number of bytes before the storage's."""
    raw_offset: int
    """Of the tensor's first byte in the archive."""
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def parse_head(data: bytes) -> ArchiveHead | None:
    """Parse the head of the archive that begins with ``data``; looks at `MAX_HEAD` bytes at most. None if it is
    compressed, damaged, not in this machine's byte order, not contiguous, or not a tensor with a storage of its own; or
    if ``data`` ends before the storage."""
    data = data[:MAX_HEAD]
    name, start, _ = _read_local_header(data, 0)
    folder, _, name = name.partition("/")
    if name != "data.pkl":
        return None
    stream = io.BytesIO(data)
    stream.seek(start)
    try:
        tensor = unpickle(stream, TENSORS, find_outside=load_storage, protocol=PROTOCOL)
    except (UnsafeGlobalError, MalformedPickleError):
        return None
    if not isinstance(tensor, PickledTensor) or tensor.is_unusual:
        return None
    expected = 1
    for extent, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if extent != 1 and stride != expected and 0 not in tensor.shape:
            return None  # not contiguous
        expected *= extent
    end = stream.tell()
    byteorder = "little"  # torch takes an archive without the record for little-endian
    for _ in range(_MAX_RECORDS):
        # After the record, and its data descriptor if it has one.
        name, end, size = _read_local_header(data, data.find(SIGNATURE, end))
        if name == f"{folder}/data/{tensor.storage.key}":
            if byteorder != sys.byteorder or size not in (None, tensor.storage.nbytes):
                return None
            itemsize = tensor.dtype.itemsize
            nbytes = math.prod(tensor.shape) * itemsize
            return ArchiveHead(end, end + tensor.offset * itemsize, nbytes, tensor.dtype, tensor.shape)
        if not end or name.startswith(f"{folder}/data/"):
            return None  # no more records, or another storage than the tensor's
        if name == f"{folder}/byteorder":
            byteorder = "big" if data.startswith(b"big", end) else "little"
    return None


def _read_local_header(data: bytes, position: int) -> tuple[str, int, int | None]:
    """A record of the archive: its name, where its bytes begin, and their number (None: a descriptor tells it). They
    begin at 0 if no record is there that is whole, neither compressed nor encrypted."""
    none = "", 0, None
    name_start = position + _LOCAL_HEADER.size
    if position < 0 or len(data) < name_start:
        return none
    signature, _, flags, method, _, _, _, stored, size, name_length, extra_length = _LOCAL_HEADER.unpack_from(
        data, position
    )
    described = bool(flags & _HAS_DESCRIPTOR)
    start = name_start + name_length + extra_length
    if signature != SIGNATURE or method or flags & ~(_HAS_DESCRIPTOR | _UTF8_NAMES) or len(data) < start:
        return none
    if not described and stored != size:
        return none
    name = data[name_start : name_start + name_length].decode("utf-8", "replace")
    return name, start, None if described else size
