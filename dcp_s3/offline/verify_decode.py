"""Items without a checksum: whether their bytes are what a reader can decode. Runs no pickled code. No I/O."""

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
    """What is wrong with the bytes of an item, None if it can be decoded.

    A tensor is loaded as a reader would load it. Of other objects the container is checked, and where that is possible
    without running code (``weights_only``) they are loaded; otherwise their pickle is read through, not run. What went
    through stream extensions is read to its end only.

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
            _check_tensor(data, item.shape)
        else:
            _check_object(data)
    except (UnknownExtensionError, MemoryError):
        raise
    except Exception as error:
        if "can't allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        return f"can not be decoded: {type(error).__name__}: {_first_line(error)}"
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
    """Every record of the archive, and its CRC-32 where torch computed one."""
    data.seek(0)
    with zipfile.ZipFile(data) as archive:
        for record in archive.infolist():
            if record.compress_type != zipfile.ZIP_STORED or record.file_size > item.length:
                raise ValueError(f"its record {record.filename} pretends to have {record.file_size} bytes")
            # Not computed: under torch.serialization.set_crc32_options(False), and of raw bytes that we framed.
            unknown = record.CRC == 0 or (item.raw and "/data/" in record.filename)
            with archive.open(record) as stream:  # looks at the record's own header
                while not unknown and stream.read(_BLOCK):
                    pass


def _check_tensor(data: io.BytesIO, shape: torch.Size) -> None:
    data.seek(0)
    tensor = torch.load(data, map_location="cpu", weights_only=True)
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"it is a {type(tensor).__name__}, not a tensor")
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
    except pickle.UnpicklingError:  # of classes that need code, or damaged
        with zipfile.ZipFile(data) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            _read_through(archive.read(name))


def _read_through(pickled: bytes | memoryview) -> None:
    if bytes(pickled[:1]) != _PROTO:
        raise ValueError("it is neither a zip archive nor a pickle")
    for _ in pickletools.genops(io.BytesIO(pickled)):
        pass
