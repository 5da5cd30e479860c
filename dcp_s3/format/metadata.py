"""``.metadata``: DCP's pickled Metadata, read without running what a pickle may hold.

More people can often write to a checkpoint's bucket than may run code on a cluster. Only what DCP's planners and
storage layers put into metadata is unpickled, as mirrors of their classes. Every field that loading relies on is
checked, and the rest must be plain data. Only then do mirrors become instances of torch's classes.

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
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeGuard, cast

import torch
from torch.distributed.checkpoint import metadata as dcp

from dcp_s3.errors import CorruptCheckpointError, UnsafeMetadataError
from dcp_s3.format.allow_list import (
    CHECKED,
    LEAVES,
    METADATA,
    MIRRORS,
    MalformedPickleError,
    UnsafeGlobalError,
    find_memory_format,
    unpickle,
)
from dcp_s3.format.layout import is_inside
from dcp_s3.format.saved_entries import find_contradiction
from dcp_s3.memory import crc64nvme, crc_hex
from dcp_s3.process import __version__, collector_paused
from dcp_s3.torch_private import StorageInfo

VERSIONS = {"dcp_s3": __version__, "torch": str(torch.__version__)}
"""The libraries that write a checkpoint, for its manifest."""

# --- writing --------------------------------------------------------------------------------------

_new = copyreg.__newobj__  # type: ignore[attr-defined]  # makes an instance without its constructor: what pickles call


def dump_metadata(metadata: dcp.Metadata) -> bytes:
    """Pickle ``.metadata`` as torch's FileSystemWriter does, in half of the time, and equal names and shapes, which
    each rank has sent as its own, once."""
    names: dict[str, str] = {}
    shapes: dict[torch.Size, torch.Size] = {}
    name, shape, size = names.setdefault, shapes.setdefault, torch.Size

    def reduce_index(index: dcp.MetadataIndex) -> Any:
        state = vars(index).copy()
        fqn, offset = index.fqn, index.offset
        state["fqn"] = name(fqn, fqn)
        if type(offset) is size:
            state["offset"] = shape(offset, offset)
        return _new, (dcp.MetadataIndex,), state

    def reduce_chunk(chunk: dcp.ChunkStorageMetadata) -> Any:
        state = vars(chunk).copy()
        offsets, sizes = chunk.offsets, chunk.sizes
        if type(offsets) is type(sizes) is size:
            state["offsets"], state["sizes"] = shape(offsets, offsets), shape(sizes, sizes)
        return _new, (dcp.ChunkStorageMetadata,), state

    def reduce_info(info: StorageInfo) -> Any:
        state = vars(info)
        if None in state.values():
            state = {name: value for name, value in state.items() if value is not None}  # as torch does
        return _new, (StorageInfo,), state

    stream = io.BytesIO()
    pickler = pickle.Pickler(stream)
    pickler.dispatch_table = copyreg.dispatch_table | {
        dcp.MetadataIndex: reduce_index, dcp.ChunkStorageMetadata: reduce_chunk, StorageInfo: reduce_info,
    }  # fmt: skip
    pickler.dump(metadata)
    return seal(stream)


_SEAL = b"\0dcp_s3\1"
_SEAL_LENGTH = len(_SEAL) + 8


def seal(stream: io.BytesIO) -> bytes:
    """``.metadata`` with the pickle that was written to a stream. After it: who wrote it (ASCII), the length of that (1
    byte), a mark, and the CRC-64/NVME of all that (big-endian)."""
    writer = f"torch {torch.__version__} and dcp_s3 {__version__}".encode("ascii", "replace")[:255]
    stream.seek(0, io.SEEK_END)
    stream.write(b"".join((writer, bytes([len(writer)]), _SEAL)))
    with stream.getbuffer() as body:
        crc = crc64nvme(body)
    stream.write(crc.to_bytes(8, "big"))
    return stream.getvalue()


# --- reading --------------------------------------------------------------------------------------


def load_metadata(data: bytes, *, url: str, crc: str | None = None, of_rank: bool = False) -> dcp.Metadata:
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
    is_sealed = data[-_SEAL_LENGTH:-8] == _SEAL
    proven = is_sealed or crc is not None
    with collector_paused():
        try:
            found = crc_hex(crc64nvme(memoryview(data)[:-8] if is_sealed else data))
            recorded = data[-8:].hex() if is_sealed else crc
            if proven and found != recorded:
                raise MalformedPickleError(f"its CRC-64/NVME is {found}, recorded was {recorded}")
            stream = io.BytesIO(data)
            metadata = _Checks(url).check(unpickle(stream, METADATA, find_other=find_memory_format, proven=proven))
            vars(metadata).pop(_UNPROVEN, None)
            if not proven:
                if stream.tell() != len(data):
                    raise MalformedPickleError("something follows its end")
                contradiction = find_contradiction(metadata, filled=not of_rank)
                if contradiction is not None:
                    raise MalformedPickleError(f"it contradicts itself: {contradiction}")
                vars(metadata)[_UNPROVEN] = True
        except UnsafeGlobalError as error:
            writer = "an unknown version of torch"
            if is_sealed:
                stop = len(data) - _SEAL_LENGTH - 1
                writer = data[stop - data[stop] : stop].decode("ascii", "replace")
            raise UnsafeMetadataError(
                f"the metadata of {url}, written by {writer}, names the global {error}: DCP's metadata never needs it, "
                f"or torch {torch.__version__} here does not know it, and loading it could run code. Nothing was "
                "loaded. Remedy: load it with the versions that wrote it, or later ones; if none of yours can have "
                "written that, it was tampered with",
                url=url,
            ) from None
        except (MalformedPickleError, RecursionError, TypeError, KeyError) as error:  # names that have no hash
            raise CorruptCheckpointError(
                f"the metadata of {url} ({len(data)} bytes) is damaged or truncated: {str(error)[:1000]}. Remedy: load "
                "an earlier checkpoint, or restore the object from a backup",
                url=url,
            ) from None
    return metadata


_UNPROVEN = "unproven"  # an attribute that only a Metadata has which was loaded


def is_unproven(metadata: dcp.Metadata) -> bool:
    """Whether metadata was loaded without a checksum, so that items themselves must say what they are."""
    return getattr(metadata, _UNPROVEN, False)


_set = object.__setattr__  # for instances whose class refuses it
# Limit of one item. S3's largest object is 50 TiB, but pickled or encoded items go through memory.
_MAX_ITEM_BYTES = 2**44
_MAX_INT = 2**63
_MAX_DIMS = 64  # as many as torch's kernels take
_MAX_DEPTH = 50  # the paths in a nested state are flat


@dataclass(eq=False)
class _Checks:
    """Checks mirrors, and makes torch's metadata of them."""

    _url: str
    _fits: Callable[..., bool] = field(default_factory=lambda: functools.cache(_fits))
    """Tensors are cut alike."""
    _known: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """Plain values that hold others: id -> the value (kept so that its id is not reused), and how deeply it is nested.
    They may share parts."""

    def check(self, metadata: Any) -> dcp.Metadata:
        """The metadata that a mirror stands for."""
        if type(metadata) is not MIRRORS[dcp.Metadata] or type(vars(metadata).get("state_dict_metadata")) is not dict:
            raise MalformedPickleError(f"it is a pickled {type(metadata).__name__}, not DCP metadata")
        fields = vars(metadata)
        fields.pop("all_local_plans", None)  # Megatron's, which are not kept
        for fqn, entry in fields["state_dict_metadata"].items():
            if type(fqn) is not str:
                _fail(fqn, "is a name that is no string")
            if not self._is(entry, dcp.TensorStorageMetadata):
                if not self._is(entry, dcp.BytesStorageMetadata):
                    _fail(fqn, f"is a {type(entry).__name__}")
                continue
            get = vars(entry).get  # a damaged pickle may lack attributes
            size, properties, chunks = get("size"), get("properties"), get("chunks")
            right = _is_shape(size) and math.prod(size) <= _MAX_INT // 16 and type(chunks) is list
            right = right and self._is(properties, dcp.TensorProperties) and "dtype" in vars(properties)
            for chunk in chunks if right else ():
                get = chunk.__dict__.get if self._is(chunk, dcp.ChunkStorageMetadata) else {}.get
                offsets, sizes = get("offsets"), get("sizes")
                right = type(offsets) is type(sizes) is torch.Size and self._fits(offsets, sizes, size)
                if not right:
                    break
            if not right:
                _fail(fqn, "has no complete description of its shape, dtype and chunks")
        if fields.get("storage_data") is not None:
            fields["storage_data"] = self._check_storage(fields["storage_data"])
        # Loading does not need the rest.
        meta, texts = fields.get("storage_meta"), (str, type(None))
        if meta is not None and not (self._is(meta, dcp.StorageMeta) and type(vars(meta).get("save_id")) in texts):
            _fail("storage_meta", "is no StorageMeta with an id of a save")
        if type(fields.get("version")) not in texts:
            _fail("version", "is no string")
        self._is(metadata, dcp.Metadata)  # with plain values in planner_data
        return cast(dcp.Metadata, metadata)

    def _is(self, value: Any, cls: type) -> bool:
        """Whether ``value`` stands for an instance of torch's ``cls``. If so, it becomes one."""
        mirror, checked = MIRRORS[cls], CHECKED[cls]
        if type(value) is not mirror:
            return type(value) is cls  # already: it occurs twice
        if not checked.issuperset(value.__dict__):
            for name in value.__dict__.keys() - checked:
                if type(name) is not str or name.startswith("__"):
                    raise MalformedPickleError(f"a {cls.__name__} has an attribute {str(name)[:50]!r}")
                self._height(value.__dict__[name])
        _set(value, "__class__", cls)
        return True

    def _height(self, value: Any) -> int:
        """How deeply a plain value is nested. Planners add them, and nothing here relies on them. They must be harmless
        to look at, copy or send on: without a class or function in them, not containing themselves, and not nested
        deeply."""
        kind = type(value)
        if kind in LEAVES:
            return 0
        if kind is tuple and LEAVES.issuperset(map(type, value)):  # a path; there are many
            return 1
        if id(value) not in self._known:
            if kind not in (dict, OrderedDict, tuple, list, set, frozenset) or (kind is OrderedDict and vars(value)):
                raise MalformedPickleError(f"it has a {kind.__name__} where a value belongs, or one with attributes")
            parts = [*value, *value.values()] if isinstance(value, dict) else value
            self._known[id(value)] = value, _MAX_DEPTH  # as long as it is under way: it may contain itself
            height = 1 + max(map(self._height, parts), default=0)
            if height > _MAX_DEPTH:
                raise MalformedPickleError(f"it is nested more than {_MAX_DEPTH} levels deep, or contains itself")
            self._known[id(value)] = value, height
        return self._known[id(value)][1]

    def _check_storage(self, storage_data: Any) -> dict[Any, Any]:
        """Check where the items lie. Returns that by indices that have torch's hash."""
        if type(storage_data) is not dict:
            _fail("storage_data", f"is a {type(storage_data).__name__}")
        inside: set[str] = set()
        for index, info in storage_data.items():
            get = index.__dict__.get if self._is(index, dcp.MetadataIndex) else {}.get
            place, hint = get("offset"), get("index", 0)
            if (
                type(get("fqn")) is not str
                or (place is not None and not _is_shape(place))
                or (hint is not None and (type(hint) is not int or not 0 <= hint < _MAX_INT))
            ):
                _fail(index, "is not the index of an item")
            path = getattr(info, "relative_path", None)
            if type(path) is not str or (path not in inside and not is_inside(path)):
                raise UnsafeMetadataError(
                    f"the metadata of {self._url} places {_name(index)} at {reprlib.repr(path)}, outside the "
                    "checkpoint: it was tampered with, or written by something else than a DCP storage writer",
                    url=self._url,
                )
            inside.add(path)
            # Offset, length and the added facts (see format/blocks.py) must be possible.
            get = info.__dict__.get if self._is(info, StorageInfo) else {}.get
            offset, length, descriptors = get("offset"), get("length"), get("transform_descriptors")
            raw_offset, crc, block = get("raw_offset", 0), get("crc64nvme", 0), get("crc64nvme_block", 0)
            if not (
                type(offset) is type(length) is type(raw_offset) is type(crc) is type(block) is int
                and 0 <= offset < _MAX_INT
                and 0 <= raw_offset <= length <= _MAX_ITEM_BYTES
                and 0 <= crc < 2**64
                and 0 <= block < _MAX_INT
                and type(get("crc64nvme_blocks", b"")) is bytes
                and (
                    descriptors is None
                    or (type(descriptors) in (list, tuple) and {str}.issuperset(map(type, descriptors)))
                )
            ):
                _fail(index, "lies at no possible range of bytes")
        return dict(storage_data.items())


def _fail(index: object, what: str) -> NoReturn:
    raise MalformedPickleError(f"{_name(index)} {what}")


def _name(index: object) -> str:
    fqn = getattr(index, "fqn", index)
    return reprlib.repr(fqn) if isinstance(fqn, str) else f"a {type(index).__name__}"


def _is_shape(value: Any) -> TypeGuard[torch.Size]:
    return type(value) is torch.Size and len(value) <= _MAX_DIMS and (not value or min(value) >= 0)


def _fits(offsets: torch.Size, sizes: torch.Size, size: torch.Size) -> bool:
    """Whether a chunk lies inside a tensor of shape ``size``."""
    if not _is_shape(offsets) or not _is_shape(sizes) or not len(offsets) == len(sizes) == len(size):
        return False
    return not any(map(operator.gt, map(operator.add, offsets, sizes), size))
