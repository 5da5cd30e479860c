"""Finds the bytes of a tensor in a torch.save archive from its beginning alone.

torch.save writes a zip archive: ``data.pkl`` (how the tensor is made from a storage), small records, the storage's raw
bytes as ``data/0``, and more records. A local header precedes each record. Its sizes are zero: the data descriptor
after a record tells where it ends. For the pickle and the storage, the end is known without it.
Only the globals that make an ordinary tensor are known, and they make a description of it.
"""

from __future__ import annotations

import io
import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from dcp_s3.format.allow_list import TENSORS, PickledTensor, find_plain, load_storage
from dcp_s3.format.unpickling import MalformedPickleError, UnsafeGlobalError, unpickle

MAX_HEAD = 64 * 2**10
"""Maximum bytes before a storage. torch 2.13 writes 704 for a usual tensor, 20 KiB if it aligns to pages."""

_MAX_RECORDS = 16
_MAX_SMALL_RECORD = 256
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_LOCAL_SIGNATURE = b"PK\x03\x04"
_DESCRIPTOR_SIGNATURE = b"PK\x07\x08"
_HAS_DESCRIPTOR = 0x8
_UTF8_NAMES = 0x800
_PROTOCOL = b"\x80\x02"  # protocol 2, as torch.save writes


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
    tensor: PickledTensor | None = None
    prefix, byteorder, position = "", "little", 0  # torch takes an archive without the record for little-endian
    for number in range(_MAX_RECORDS):
        record = _read_local_header(data, position, more)
        if number == 0:
            folder, _, name = record.name.partition("/")
            prefix = folder + "/"
            if name != "data.pkl":
                raise HeadError(f"its first record is {record.name!r}, not data.pkl")
            tensor, end = _read_pickle(data, record.start, more)
        else:
            if not record.name.startswith(prefix):
                raise HeadError(f"it has a record {record.name!r} outside of {prefix}")
            name = record.name.removeprefix(prefix)
            if tensor is not None and name == f"data/{tensor.storage.key}":
                if byteorder != sys.byteorder:
                    raise HeadError(f"its byte order is {byteorder!r}")
                _check_size(record, tensor.storage.nbytes)
                return _describe(tensor, record.start)
            if name.startswith("data/"):
                raise HeadError("it has another storage than the tensor's")
            end = _find_end(data, record, more)
            if name == "byteorder":
                byteorder = data[record.start : end].decode("latin-1")
        _check_size(record, end - record.start)
        position = _skip_descriptor(data, end, end - record.start, more) if record.has_descriptor else end
    raise HeadError(f"it has {_MAX_RECORDS} records before its storage")


# --- the archive ----------------------------------------------------------------------------------


class _Record(NamedTuple):
    """A record of the archive: its name, where its bytes begin, and their number (None: a descriptor tells it)."""

    name: str
    start: int
    size: int | None

    @property
    def has_descriptor(self) -> bool:
        return self.size is None


def _read_local_header(data: bytes, position: int, more: bool) -> _Record:
    if len(data) < position + _LOCAL_HEADER.size:
        raise HeadError("it ends within its records", truncated=more)
    signature, _, flags, method, _, _, _, stored, size, name_length, extra_length = _LOCAL_HEADER.unpack_from(
        data, position
    )
    if signature != _LOCAL_SIGNATURE:
        raise HeadError("it is no zip archive" if position == 0 else f"no record begins at its byte {position}")
    if method or flags & ~(_HAS_DESCRIPTOR | _UTF8_NAMES):
        raise HeadError("it is compressed or encrypted")
    name_start = position + _LOCAL_HEADER.size
    start = name_start + name_length + extra_length
    if len(data) < start:
        raise HeadError("it ends within its records", truncated=more)
    try:
        name = data[name_start : name_start + name_length].decode("utf-8")
    except UnicodeDecodeError:
        raise HeadError("the name of a record is no text") from None
    if flags & _HAS_DESCRIPTOR:
        return _Record(name, start, None)
    if stored != size:
        raise HeadError("it is compressed or encrypted")
    return _Record(name, start, size)


def _check_size(record: _Record, size: int) -> None:
    if record.size is not None and record.size != size:
        raise HeadError(f"{record.name} has {record.size} bytes, expected {size}")


def _find_end(data: bytes, record: _Record, more: bool) -> int:
    """The end of a record that is neither the pickle nor the storage."""
    if record.size is not None:
        end = record.start + record.size
        if record.size > _MAX_SMALL_RECORD:
            raise HeadError(f"{record.name} has {record.size} bytes")
    else:
        limit = record.start + _MAX_SMALL_RECORD + len(_DESCRIPTOR_SIGNATURE)
        end = data.find(_DESCRIPTOR_SIGNATURE, record.start, limit)
        if end < 0:
            raise HeadError(f"{record.name} has no end", truncated=more and len(data) < limit)
    if end > len(data):
        raise HeadError("it ends within its records", truncated=more)
    return end


def _skip_descriptor(data: bytes, position: int, size: int, more: bool) -> int:
    """The end of the data descriptor that begins at ``position`` and must tell ``size``.

    Its sizes have 4 or 8 bytes each. If 8, the second 4 bytes of the first are zero; if 4, they would tell ``size``.
    """
    if len(data) < position + 24:
        raise HeadError("it ends within its records", truncated=more)
    if data[position : position + 4] == _DESCRIPTOR_SIGNATURE:
        for form in ("<II", "<QQ"):
            end = position + 8 + struct.calcsize(form)
            if struct.unpack_from(form, data, position + 8) == (size, size) and data[end : end + 2] == b"PK":
                return end
    raise HeadError(f"a record does not end at its byte {position}")


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
