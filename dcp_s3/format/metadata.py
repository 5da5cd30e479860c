"""``.metadata``: DCP's pickled Metadata, read without running what a pickle may hold.

A checkpoint's bucket is often writable by more people than may run code on a cluster. The unpickler makes what DCP's
planners and storage layers put into metadata, and nothing else; then every field that loading relies on is checked.
"""

from __future__ import annotations

import math
import operator
import pickle
import reprlib
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, NoReturn, TypeGuard

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_s3.collector import collector_paused
from dcp_s3.errors import CorruptMetadataError, UnsafeMetadataError
from dcp_s3.format.layout import is_inside
from dcp_s3.format.metadata_globals import build_of, find_global
from dcp_s3.format.nesting import check_nesting
from dcp_s3.format.records import make_shortcuts
from dcp_s3.format.unpickle import MalformedPickleError, UnsafeGlobalError, unpickle
from dcp_s3.torch_private import StorageInfo

# An item of one object: S3's largest object is 50 TiB, what is pickled or encoded goes through memory.
_MAX_ITEM_BYTES = 2**44
_MAX_INT = 2**63
# Of what planners add: a plan of a nested state is flat. Values that occur often are pickled once.
_MAX_DEPTH = 50
_MAX_UNFOLDING = 1000
_KNOWN_FIELDS = {"state_dict_metadata", "storage_data", "storage_meta", "version"}


def dump_metadata(metadata: Metadata) -> bytes:
    """The bytes of ``.metadata``, as torch's FileSystemWriter writes them."""
    return pickle.dumps(metadata)


def load_metadata(data: bytes, *, url: str) -> Metadata:
    """Unpickle ``.metadata`` by the allow-list and check it.

    Args:
        data: the object's bytes.
        url: URL of the checkpoint, for messages.

    Raises:
        UnsafeMetadataError: a global outside the list, or an object outside the checkpoint's prefix.
        CorruptMetadataError: truncated, empty, not DCP metadata, or of fields that can not be.
    """
    with collector_paused():
        return _load(data, url)


def _load(data: bytes, url: str) -> Metadata:
    try:
        metadata, _ = unpickle(data, find_global, build_of, make_shortcuts=make_shortcuts)
    except UnsafeGlobalError as error:
        raise UnsafeMetadataError(
            f"the metadata of {url} names the global {error}, which DCP's metadata never needs: loading it could "
            "run code. Nothing was loaded. If the checkpoint should be trusted, find out who wrote it and with what",
            url=url,
        ) from None
    except MalformedPickleError as error:
        raise CorruptMetadataError(
            f"the metadata of {url} ({len(data)} bytes) can not be read: {error}. "
            "It is truncated or damaged: load an earlier checkpoint, or restore the object from a backup",
            url=url,
        ) from None
    if type(metadata) is not Metadata or type(getattr(metadata, "state_dict_metadata", None)) is not dict:
        raise CorruptMetadataError(
            f"the metadata of {url} is a pickled {type(metadata).__name__}, not DCP metadata",
            url=url,
        )
    _check_entries(metadata.state_dict_metadata, url)
    _check_storage(metadata.storage_data, url)
    _check_rest(metadata, url, max_nodes=_MAX_UNFOLDING * len(data))
    return metadata


def _check_entries(entries: dict[Any, Any], url: str) -> None:
    for fqn, entry in entries.items():
        if type(fqn) is not str:
            _fail(url, fqn, "is a name that is no string")
        if type(entry) is TensorStorageMetadata:
            if not _is_tensor(vars(entry)):
                _fail(url, fqn, "has no complete description of its shape, dtype and chunks")
        elif type(entry) is not BytesStorageMetadata:
            _fail(url, fqn, f"is a {type(entry).__name__}")


def _is_tensor(fields: dict[str, Any]) -> bool:
    """Whether everything is there that loading will rely on; a damaged pickle may leave out attributes."""
    size, properties, chunks = fields.get("size"), fields.get("properties"), fields.get("chunks")
    if not _is_shape(size) or type(properties) is not TensorProperties or type(chunks) is not list:
        return False
    if not isinstance(vars(properties).get("dtype"), torch.dtype) or math.prod(size) > _MAX_INT // 16:
        return False
    for chunk in chunks:
        if type(chunk) is not ChunkStorageMetadata:
            return False
        offsets, sizes = vars(chunk).get("offsets"), vars(chunk).get("sizes")
        if not _is_shape(offsets) or not _is_shape(sizes) or not len(offsets) == len(sizes) == len(size):
            return False
        if any(map(operator.gt, map(operator.add, offsets, sizes), size)):
            return False
    return True


def _is_shape(value: Any) -> TypeGuard[torch.Size]:
    return type(value) is torch.Size and (not value or min(value) >= 0)


def _check_storage(storage_data: Any, url: str) -> None:
    if storage_data is None:
        return
    if type(storage_data) is not dict:
        raise CorruptMetadataError(
            f"the metadata of {url} is damaged: where its items lie is a {type(storage_data).__name__}, expected a "
            "dict. Load an earlier checkpoint",
            url=url,
        )
    inside: set[str] = set()
    for index, info in storage_data.items():
        if type(index) is not MetadataIndex or not _is_index(vars(index)):
            _fail(url, index, "is not the index of an item")
        path = getattr(info, "relative_path", None)
        if type(path) is str and path not in inside and is_inside(path):
            inside.add(path)
        if type(path) is not str or path not in inside:
            raise UnsafeMetadataError(
                f"the metadata of {url} places {_name(index)} at {reprlib.repr(path)}, outside the "
                "checkpoint: it was tampered with, or written by something else than a DCP storage writer",
                url=url,
            )
        if type(info) is not StorageInfo or not _is_range(vars(info)):
            _fail(url, index, "lies at no possible range of bytes")


def _is_index(fields: dict[str, Any]) -> bool:
    offset, index = fields.get("offset"), fields.get("index")
    return (
        type(fields.get("fqn")) is str
        and (offset is None or _is_shape(offset))
        and (index is None or (type(index) is int and 0 <= index < _MAX_INT))
    )


def _is_range(fields: dict[str, Any]) -> bool:
    """Whether offset, length and the facts that are added to them (see format/storage_info.py) can be."""
    offset, length, descriptors = fields.get("offset"), fields.get("length"), fields.get("transform_descriptors")
    if type(offset) is not int or type(length) is not int or not 0 <= offset < _MAX_INT:
        return False
    return (
        0 <= length <= _MAX_ITEM_BYTES
        and (descriptors is None or (type(descriptors) in (list, tuple) and all(type(d) is str for d in descriptors)))
        and _is_int_or_missing(fields, "raw_offset", length + 1)
        and _is_int_or_missing(fields, "crc64nvme", 2**64)
    )


def _is_int_or_missing(fields: dict[str, Any], name: str, end: int) -> bool:
    return name not in fields or (type(fields[name]) is int and 0 <= fields[name] < end)


def _is_text(value: object) -> bool:
    return value is None or type(value) is str


_STORAGE_META: dict[str, Callable[[Any], bool]] = {
    "checkpoint_id": lambda value: _is_text(value) or isinstance(value, PurePath),
    "save_id": _is_text,
    "load_id": _is_text,
    "modules": lambda value: type(value) is list and all(map(_is_text, value)),
}


def _check_rest(metadata: Metadata, url: str, *, max_nodes: int) -> None:
    """What is not needed to load: it must only do no harm to whoever looks at it."""
    meta = getattr(metadata, "storage_meta", None)
    if meta is not None:
        if type(meta) is not StorageMeta:
            _fail(url, "storage_meta", f"is a {type(meta).__name__}")
        for name, is_right in _STORAGE_META.items():
            if name in vars(meta) and not is_right(vars(meta)[name]):
                _fail(url, f"storage_meta.{name}", f"is a {type(vars(meta)[name]).__name__}")
    if not _is_text(getattr(metadata, "version", None)):
        _fail(url, "version", "is no string")
    rest = {name: value for name, value in vars(metadata).items() if name not in _KNOWN_FIELDS}
    try:
        check_nesting(rest, max_depth=_MAX_DEPTH, max_nodes=max_nodes)
    except MalformedPickleError as error:
        _fail(url, "planner_data", f"can not be used: {error}")


def _name(index: object) -> str:
    fqn = getattr(index, "fqn", index)
    return reprlib.repr(fqn) if isinstance(fqn, str) else f"a {type(index).__name__}"


def _fail(url: str, index: object, what: str) -> NoReturn:
    raise CorruptMetadataError(
        f"the metadata of {url} is damaged: {_name(index)} {what}. Load an earlier checkpoint",
        url=url,
    )
