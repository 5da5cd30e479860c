"""``.metadata``: DCP's pickled Metadata, read without running what a pickle may hold.

More people can often write to a checkpoint's bucket than may run code on a cluster. Only what DCP's planners and
storage layers put into metadata is unpickled, as mirrors of their classes. Every field that loading relies on is
checked, and the rest is made plain data. Only then do mirrors become instances of torch's classes.

A seal follows the pickle, where no unpickler looks: who wrote it, and a CRC-64/NVME. No copy of the object is without.
"""

from __future__ import annotations

import copyreg
import functools
import io
import math
import operator
import pickle
import reprlib
from collections.abc import Callable
from typing import Any, NoReturn, TypeGuard, cast

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

from dcp_s3.errors import CorruptCheckpointError, UnsafeMetadataError
from dcp_s3.format.allow_list import MIRRORS, find_in_metadata
from dcp_s3.format.cover import find_contradiction
from dcp_s3.format.layout import is_inside
from dcp_s3.format.unpickling import (
    MalformedPickleError,
    PlainCheck,
    UnsafeGlobalError,
    check_memo,
    unpickle,
)
from dcp_s3.memory import crc64nvme, crc_hex
from dcp_s3.process import __version__, collector_paused
from dcp_s3.torch_private import StorageInfo

# Limit of one item. S3's largest object is 50 TiB, but pickled or encoded items go through memory.
_MAX_ITEM_BYTES = 2**44
_MAX_INT = 2**63
# Attributes that are checked here, all of them of plain types.
_CHECKED = {
    Metadata: frozenset({"state_dict_metadata", "storage_data", "storage_meta"}),
    TensorStorageMetadata: frozenset({"properties", "size", "chunks"}),
    ChunkStorageMetadata: frozenset({"offsets", "sizes"}),
    MetadataIndex: frozenset({"fqn", "offset", "index"}),
    TensorProperties: frozenset({"dtype", "layout", "requires_grad", "memory_format", "pin_memory", "strides"}),
    BytesStorageMetadata: frozenset(),
    StorageInfo: frozenset({
        "relative_path", "offset", "length", "transform_descriptors",
        "raw_offset", "crc64nvme", "crc64nvme_block", "crc64nvme_blocks",  # see format/blocks.py
    }),
}  # fmt: skip
_MIRRORS = {cls: (MIRRORS[cls], checked) for cls, checked in _CHECKED.items()}
_set = object.__setattr__  # for instances whose class refuses it
_new = copyreg.__newobj__  # type: ignore[attr-defined]  # makes an instance without its constructor: what pickles call


def dump_metadata(metadata: Metadata) -> bytes:
    """Pickle ``.metadata`` as torch's FileSystemWriter does.

    Each rank has sent names and shapes of its own. Here one pickled object stands for all that are equal.
    """
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = copyreg.dispatch_table | _reducers()
    pickler.dump(metadata)
    return seal_stream(stream)


def _reducers() -> dict[type, Callable[[Any], Any]]:
    """How to pickle what there is one of for each item: in half of the time that their classes' own way takes."""
    names: dict[str, str] = {}
    shapes: dict[torch.Size, torch.Size] = {}
    name, shape, size = names.setdefault, shapes.setdefault, torch.Size

    def reduce_index(index: MetadataIndex) -> Any:
        state = vars(index).copy()
        fqn, offset = index.fqn, index.offset
        state["fqn"] = name(fqn, fqn)
        if type(offset) is size:
            state["offset"] = shape(offset, offset)
        return _new, (MetadataIndex,), state

    def reduce_chunk(chunk: ChunkStorageMetadata) -> Any:
        state = vars(chunk).copy()
        offsets, sizes = chunk.offsets, chunk.sizes
        if type(offsets) is type(sizes) is size:
            state["offsets"], state["sizes"] = shape(offsets, offsets), shape(sizes, sizes)
        return _new, (ChunkStorageMetadata,), state

    def reduce_info(info: StorageInfo) -> Any:
        state = vars(info)
        if None in state.values():
            state = {name: value for name, value in state.items() if value is not None}  # as torch does
        return _new, (StorageInfo,), state

    return {MetadataIndex: reduce_index, ChunkStorageMetadata: reduce_chunk, StorageInfo: reduce_info}


_SEAL = b"\0dcp_s3\1"
_SEAL_LENGTH = len(_SEAL) + 8


def seal(pickled: bytes) -> bytes:
    """``.metadata`` with this pickle.

    After it: who wrote it (ASCII), the length of that (1 byte), a mark, and the CRC-64/NVME of all that (big-endian).
    """
    stream = io.BytesIO(pickled)
    stream.seek(0, io.SEEK_END)
    return seal_stream(stream)


def seal_stream(stream: io.BytesIO) -> bytes:
    """`seal` what was written to a stream, without a copy: it may have a gigabyte."""
    writer = f"torch {torch.__version__} and dcp_s3 {__version__}".encode("ascii", "replace")[:255]
    stream.write(b"".join((writer, bytes([len(writer)]), _SEAL)))
    with stream.getbuffer() as body:
        crc = crc64nvme(body)
    stream.write(crc.to_bytes(8, "big"))
    return stream.getvalue()


def find_writer(data: bytes) -> str | None:
    """Who wrote ``.metadata``, for messages; None if it has no seal."""
    if data[-_SEAL_LENGTH:-8] != _SEAL:
        return None
    stop = len(data) - _SEAL_LENGTH - 1
    return data[stop - data[stop] : stop].decode("ascii", "replace")


def find_damage(data: bytes, crc: str | None = None) -> str | None:
    """How the bytes of ``.metadata`` differ from their checksum, in a seal or as ``crc`` in the object's user metadata.
    None: they do not. Empty: they have none."""
    if data[-_SEAL_LENGTH:-8] == _SEAL:
        found, recorded = crc_hex(crc64nvme(memoryview(data)[:-8])), data[-8:].hex()
    elif crc is not None:
        found, recorded = crc_hex(crc64nvme(data)), crc
    else:
        return ""
    return None if found == recorded else f"its CRC-64/NVME is {found}, recorded was {recorded}"


def load_metadata(data: bytes, *, url: str, crc: str | None = None, of_rank: bool = False) -> Metadata:
    """Compare ``.metadata`` with its checksum, unpickle it with the allow-list, and check it.

    Without a checksum (other writers', or written before the seal and copied without user metadata), the metadata must
    also agree with itself, see `find_contradiction`, and `is_unproven`.

    Args:
        crc: CRC-64/NVME of the object in its user metadata (`crc_hex`), if it has one.
        of_rank: whether it is a single rank's, which describes only a part of each tensor.

    Raises:
        UnsafeMetadataError: a global outside the list, or an object outside the checkpoint's prefix.
        CorruptCheckpointError: other bytes than were written, truncated, empty, not DCP metadata, or with impossible
            fields.
    """
    damage = find_damage(data, crc)
    if damage:
        raise CorruptCheckpointError(
            f"the metadata of {url} is damaged: {damage}. Remedy: load an earlier checkpoint, or restore the object "
            "from a backup",
            url=url,
        )
    with collector_paused():
        try:
            metadata = _load(data, url, proven=damage is None, filled=not of_rank)
        except UnsafeGlobalError as error:
            writer = find_writer(data) or "an unknown version of torch"
            raise UnsafeMetadataError(
                f"the metadata of {url}, written by {writer}, names the global {error}: DCP's metadata never needs it, "
                f"or torch {torch.__version__} here does not know it, and loading it could run code. Nothing was "
                "loaded. Remedy: load it with the versions that wrote it, or later ones; if none of yours can have "
                "written that, it was tampered with",
                url=url,
            ) from None
        except MalformedPickleError as error:
            raise CorruptCheckpointError(
                f"the metadata of {url} ({len(data)} bytes) cannot be read: {error}. It is truncated or damaged: load "
                "an earlier checkpoint, or restore the object from a backup",
                url=url,
            ) from None
    vars(metadata).pop(_UNPROVEN, None)
    if damage is not None:
        mark_unproven(metadata)
    return metadata


def _load(data: bytes, url: str, *, proven: bool, filled: bool) -> Metadata:
    if not proven:
        check_memo(data)
    stream = io.BytesIO(data)
    loaded = unpickle(stream, find_in_metadata)
    try:
        metadata = _Checks(url).check(loaded)
    except (TypeError, KeyError) as error:  # names of attributes that have no hash, and the like
        raise MalformedPickleError(f"{type(error).__name__}: {str(error)[:200]}") from error
    if not proven:
        if stream.tell() != len(data):
            raise MalformedPickleError("something follows its end")
        contradiction = find_contradiction(metadata, filled=filled)
        if contradiction is not None:
            raise MalformedPickleError(f"it contradicts itself: {contradiction}")
    return metadata


_UNPROVEN = "unproven"  # an attribute that only a Metadata has which was loaded


def mark_unproven(metadata: Metadata) -> Metadata:
    """See `is_unproven`. Returns its argument."""
    setattr(metadata, _UNPROVEN, True)
    return metadata


def is_unproven(metadata: Metadata) -> bool:
    """Whether metadata was loaded without a checksum, so that items themselves must say what they are."""
    return getattr(metadata, _UNPROVEN, False)


class _Checks:
    """Checks mirrors, and makes torch's metadata of them."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._plain = PlainCheck()
        self._fits = functools.cache(_fits)  # tensors are cut alike

    def check(self, metadata: Any) -> Metadata:
        if type(metadata) is not MIRRORS[Metadata] or type(vars(metadata).get("state_dict_metadata")) is not dict:
            raise CorruptCheckpointError(
                f"the metadata of {self._url} is a pickled {type(metadata).__name__}, not DCP metadata", url=self._url
            )
        self._check_entries(vars(metadata)["state_dict_metadata"])
        if vars(metadata).get("storage_data") is not None:
            vars(metadata)["storage_data"] = self._check_storage(vars(metadata)["storage_data"])
        self._check_meta(vars(metadata))
        vars(metadata).pop("all_local_plans", None)  # Megatron's, which are not kept
        try:
            self._plain.check_attributes(metadata, _CHECKED[Metadata])
        except MalformedPickleError as error:
            self._fail("planner_data", f"cannot be used: {error}")
        _set(metadata, "__class__", Metadata)
        return cast(Metadata, metadata)

    def _check_entries(self, entries: dict[Any, Any]) -> None:
        for fqn, entry in entries.items():
            if type(fqn) is not str:
                self._fail(fqn, "is a name that is no string")
            if self._is(entry, TensorStorageMetadata):
                if not self._is_tensor(vars(entry)):
                    self._fail(fqn, "has no complete description of its shape, dtype and chunks")
            elif not self._is(entry, BytesStorageMetadata):
                self._fail(fqn, f"is a {type(entry).__name__}")

    def _is_tensor(self, fields: dict[str, Any]) -> bool:
        # A damaged pickle may lack attributes.
        size, properties, chunks = fields.get("size"), fields.get("properties"), fields.get("chunks")
        if not _is_shape(size) or not self._is(properties, TensorProperties) or type(chunks) is not list:
            return False
        if "dtype" not in vars(properties) or math.prod(size) > _MAX_INT // 16:
            return False
        for chunk in chunks:
            if not self._is(chunk, ChunkStorageMetadata):
                return False
            found = chunk.__dict__
            offsets, sizes = found.get("offsets"), found.get("sizes")
            if not type(offsets) is type(sizes) is torch.Size or not self._fits(offsets, sizes, size):
                return False
        return True

    def _check_storage(self, storage_data: Any) -> dict[Any, Any]:
        """Check where the items lie. Returns that by indices that have torch's hash."""
        if type(storage_data) is not dict:
            raise CorruptCheckpointError(
                f"the metadata of {self._url} is damaged: where its items lie is a {type(storage_data).__name__}, "
                "expected a dict. Load an earlier checkpoint",
                url=self._url,
            )
        inside: set[str] = set()
        for index, info in storage_data.items():
            if not self._is(index, MetadataIndex) or not _is_index(index.__dict__.get):
                self._fail(index, "is not the index of an item")
            path = getattr(info, "relative_path", None)
            if type(path) is not str or (path not in inside and not is_inside(path)):
                raise UnsafeMetadataError(
                    f"the metadata of {self._url} places {_name(index)} at {reprlib.repr(path)}, outside the "
                    "checkpoint: it was tampered with, or written by something else than a DCP storage writer",
                    url=self._url,
                )
            inside.add(path)
            if not self._is(info, StorageInfo) or not _is_range(info.__dict__.get):
                self._fail(index, "lies at no possible range of bytes")
        return dict(storage_data.items())

    def _is(self, value: Any, cls: type) -> bool:
        """Whether ``value`` stands for an instance of torch's ``cls``. If so, it becomes one."""
        mirror, checked = _MIRRORS[cls]
        if type(value) is not mirror:
            return type(value) is cls  # already: it occurs twice
        if not checked.issuperset(value.__dict__):
            self._plain.check_attributes(value, checked)
        _set(value, "__class__", cls)
        return True

    def _check_meta(self, fields: dict[str, Any]) -> None:
        # Loading does not need these.
        meta = fields.get("storage_meta")
        if meta is not None:
            if type(meta) is not MIRRORS[StorageMeta]:
                self._fail("storage_meta", f"is a {type(meta).__name__}")
            self._plain.check_attributes(meta)
            _set(meta, "__class__", StorageMeta)
            if not _is_text(vars(meta).get("save_id")):
                self._fail("storage_meta.save_id", "is no string")
        if not _is_text(fields.get("version")):
            self._fail("version", "is no string")

    def _fail(self, index: object, what: str) -> NoReturn:
        raise CorruptCheckpointError(
            f"the metadata of {self._url} is damaged: {_name(index)} {what}. Load an earlier checkpoint", url=self._url
        )


def _is_shape(value: Any) -> TypeGuard[torch.Size]:
    return type(value) is torch.Size and (not value or min(value) >= 0)


def _fits(offsets: torch.Size, sizes: torch.Size, size: torch.Size) -> bool:
    """Whether a chunk lies inside a tensor of shape ``size``."""
    if not _is_shape(offsets) or not _is_shape(sizes) or not len(offsets) == len(sizes) == len(size):
        return False
    return not any(map(operator.gt, map(operator.add, offsets, sizes), size))


def _is_index(get: Callable[..., Any]) -> bool:
    offset, index = get("offset"), get("index", 0)
    return (
        type(get("fqn")) is str
        and (offset is None or _is_shape(offset))
        and (index is None or (type(index) is int and 0 <= index < _MAX_INT))
    )


def _is_range(get: Callable[..., Any]) -> bool:
    """Whether offset, length and the added facts (see format/blocks.py) are possible."""
    offset, length, descriptors = get("offset"), get("length"), get("transform_descriptors")
    raw_offset, crc, block = get("raw_offset", 0), get("crc64nvme", 0), get("crc64nvme_block", 0)
    return (
        type(offset) is type(length) is type(raw_offset) is type(crc) is type(block) is int
        and 0 <= offset < _MAX_INT
        and 0 <= raw_offset <= length <= _MAX_ITEM_BYTES
        and 0 <= crc < 2**64
        and 0 <= block < _MAX_INT
        and type(get("crc64nvme_blocks", b"")) is bytes
        and (descriptors is None or (type(descriptors) in (list, tuple) and all(type(d) is str for d in descriptors)))
    )


def _is_text(value: object) -> bool:
    return value is None or type(value) is str


def _name(index: object) -> str:
    fqn = getattr(index, "fqn", index)
    return reprlib.repr(fqn) if isinstance(fqn, str) else f"a {type(index).__name__}"
