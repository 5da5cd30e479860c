"""Checks whether a reader could decode items without a checksum. Runs no pickled code. No I/O."""

from __future__ import annotations

import io
import pickle
import pickletools
import zipfile
from typing import Any, cast

import torch

from dcp_s3.offline.verify_plan import StoredItem
from dcp_s3.torch_private import ReaderTransforms, narrow_tensor_by_index

_ZIP = b"PK\x03\x04"
_PROTO = b"\x80"  # the first byte of every pickle since protocol 2
_BLOCK = 2**20


class UnknownExtensionError(ValueError):
    """An item went through a stream extension that is not registered here."""


def find_damage(data: io.BytesIO, item: StoredItem) -> str | None:
    """Say what is wrong with the bytes of an item; None if it can be decoded.

    A tensor is loaded as a reader would load it. For other objects the container is checked; then they are loaded where
    that runs no code (``weights_only``), otherwise their pickle is read through, not run. Items that went through
    stream extensions are only read to their end.

    Raises:
        UnknownExtensionError
    """
    try:
        if item.transforms:
            _drain(data, item)
            return None
        if data.getbuffer()[:4] == _ZIP or zipfile.is_zipfile(data):
            _check_zip(data, item)
        if item.shape is not None:
            _check_tensor(data, item.shape, item.dtype)
        else:
            _check_object(data)
    except (UnknownExtensionError, MemoryError):
        raise
    except Exception as error:
        if "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        return f"cannot be decoded: {type(error).__name__}: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _drain(data: io.BytesIO, item: StoredItem) -> None:
    transforms = ReaderTransforms()
    try:
        transforms.extension_registry.from_descriptor_list(item.transforms)
    except ValueError as error:
        raise UnknownExtensionError(str(error)) from error
    stream = transforms.transform_load_stream(cast(Any, None), item.transforms, data)
    while stream.read(_BLOCK):
        pass


def _check_zip(data: io.BytesIO, item: StoredItem) -> None:
    """Check every record of the archive, and its CRC-32 where torch computed one."""
    data.seek(0)
    with zipfile.ZipFile(data) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.file_size > item.length:
                raise ValueError(f"its record {record.filename} pretends to have {record.file_size} bytes")
            # Not computed under torch.serialization.set_crc32_options(False), nor for raw bytes framed by this package.
            unknown = record.CRC == 0 or (item.raw and "/data/" in record.filename)
            with archive.open(record) as stream:  # checks the record's own header
                while not unknown and stream.read(_BLOCK):
                    pass


def _check_tensor(data: io.BytesIO, shape: torch.Size, dtype: torch.dtype | None) -> None:
    data.seek(0)
    tensor = torch.load(data, map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"it is a {type(tensor).__name__}, not a tensor")
    if dtype is not None and tensor.dtype != dtype:
        raise ValueError(f"it is a {tensor.dtype}, recorded was {dtype}")
    if tensor.dim() != len(shape):
        raise ValueError(f"it has shape {tuple(tensor.size())}, recorded was {tuple(shape)}")
    found = narrow_tensor_by_index(tensor, [0] * len(shape), shape).size()
    if found != shape:
        raise ValueError(f"it has shape {tuple(found)}, recorded was {tuple(shape)}")


def _check_object(data: io.BytesIO) -> None:
    if not zipfile.is_zipfile(data):
        _read_through(data.getbuffer())
        return
    data.seek(0)
    try:
        torch.load(data, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:  # its classes need code, or it is damaged
        with zipfile.ZipFile(data) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            _read_through(archive.read(name))


def _read_through(pickled: bytes | memoryview) -> None:
    if bytes(pickled[:1]) != _PROTO:
        raise ValueError("it is neither a zip archive nor a pickle")
    for _ in pickletools.genops(io.BytesIO(pickled)):
        pass
