"""``.metadata``: DCP's pickled Metadata, read without running what a pickle may hold.

A checkpoint's bucket is often writable by more people than may run code on a cluster. The unpickler knows the
classes that DCP's planners and storage layers put into metadata, and refuses every other global.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata

from dcp_s3.errors import CorruptMetadataError, UnsafeMetadataError
from dcp_s3.format.layout import is_inside

_DCP = "torch.distributed.checkpoint."
_ALLOWED: frozenset[tuple[str, str]] = frozenset(
    {
        *((_DCP + "metadata", name) for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )),
        (_DCP + "filesystem", "_StorageInfo"),
        (_DCP + "filesystem", "_StoragePrefix"),
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
        ("collections", "OrderedDict"),
        ("collections", "defaultdict"),
        # StorageMeta.checkpoint_id of torch's FileSystemWriter.
        *((module, name) for module in ("pathlib", "pathlib._local") for name in (
            "PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath",
        )),
        *(("builtins", name) for name in (
            "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set",
            "slice", "str", "tuple",
        )),
        ("_codecs", "encode"),
    }
)  # fmt: skip


class _AllowListUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise UnsafeMetadataError(f"{module}.{name}")


def dump_metadata(metadata: Metadata) -> bytes:
    """The bytes of ``.metadata``, as torch's FileSystemWriter writes them."""
    return pickle.dumps(metadata)


def load_metadata(data: bytes, *, url: str) -> Metadata:
    """Unpickle ``.metadata`` by the allow-list.

    Args:
        data: the object's bytes.
        url: URL of the checkpoint, for messages.

    Raises:
        UnsafeMetadataError: a global outside the list, or an object outside the checkpoint's prefix.
        CorruptMetadataError: truncated, empty, or not DCP metadata.
    """
    try:
        metadata = _AllowListUnpickler(io.BytesIO(data)).load()
    except UnsafeMetadataError as error:
        raise UnsafeMetadataError(
            f"the metadata of {url} names the global {error}, which DCP's metadata never needs: loading it could "
            "run code. Nothing was loaded. If the checkpoint should be trusted, find out who wrote it and with what",
            url=url,
        ) from None
    except Exception as error:
        raise CorruptMetadataError(
            f"the metadata of {url} ({len(data)} bytes) can not be read: {type(error).__name__}: {error}. "
            "It is truncated or damaged: load an earlier checkpoint, or restore the object from a backup",
            url=url,
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(getattr(metadata, "state_dict_metadata", None), dict):
        raise CorruptMetadataError(
            f"the metadata of {url} is a pickled {type(metadata).__name__}, not DCP metadata",
            url=url,
        )
    for index, info in (getattr(metadata, "storage_data", None) or {}).items():
        path = getattr(info, "relative_path", None)
        if not isinstance(path, str) or not is_inside(path):
            raise UnsafeMetadataError(
                f"the metadata of {url} places {getattr(index, 'fqn', index)!r} at {path!r}, outside the "
                "checkpoint: it was tampered with, or written by something else than a DCP storage writer",
                url=url,
            )
        if not _is_range(getattr(info, "offset", None), getattr(info, "length", None)):
            raise _contradiction(url, index, "lies at no possible range of bytes")
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and not _is_complete(entry):
            raise _contradiction(url, fqn, "has no complete description of its shape, dtype and chunks")
    return metadata


# An item of one object: S3's largest object is 50 TiB, what is pickled or encoded goes through memory.
_MAX_ITEM_BYTES = 2**44


def _is_range(offset: object, length: object) -> bool:
    return isinstance(offset, int) and isinstance(length, int) and offset >= 0 and 0 <= length <= _MAX_ITEM_BYTES


def _is_complete(entry: TensorStorageMetadata) -> bool:
    """Whether everything is there that loading will rely on; a damaged pickle may leave out attributes."""
    fields = vars(entry)
    chunks = fields.get("chunks")
    return (
        isinstance(fields.get("size"), torch.Size)
        and isinstance(getattr(fields.get("properties"), "dtype", None), torch.dtype)
        and isinstance(chunks, list)
        and all(
            isinstance(chunk, ChunkStorageMetadata)
            and isinstance(vars(chunk).get("offsets"), torch.Size)
            and isinstance(vars(chunk).get("sizes"), torch.Size)
            for chunk in chunks
        )
    )


def _contradiction(url: str, index: object, what: str) -> CorruptMetadataError:
    return CorruptMetadataError(
        f"the metadata of {url} is damaged: {getattr(index, 'fqn', index)!r} {what}. Load an earlier checkpoint",
        url=url,
    )
