"""The allow-list: each global that a pickle of metadata or of an item may name, and what is made of which arguments.

`PLAIN` are plain values, which both may hold; `METADATA` are DCP's classes; `VALUES` are what items may hold besides:
values of Python's standard library and of numpy. Tensors are in `archive`.

Trainers keep such values in every run: the state of numpy's random numbers, dates, counts, paths. torch's weights-only
unpickler does not know them, but making one runs no code that a pickle chooses. Not accepted: arrays of objects or
records, subclasses of arrays, and numpy's generators (their pickles name functions that change with numpy, and trust
their arguments; ``generator.bit_generator.state`` is a dict of plain values).
"""

from __future__ import annotations

import functools
import math
import pathlib
import re
import sys
from collections import Counter, OrderedDict, deque
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_s3.format.unpickling import (
    LEAVES,
    Allowed,
    MalformedPickleError,
    Mirror,
    Opaque,
    Sealed,
    UnsafeGlobalError,
    expect,
)
from dcp_s3.torch_private import StorageInfo

Names: TypeAlias = tuple[str, str]

# S3's keys have at most 1024 bytes, local paths 4096.
_MAX_PATH = 4096


def table(*rules: tuple[Any, ...], module: str = "") -> dict[Names, Allowed]:
    """Stand-ins by module and name, from names, calls and signatures (see `Allowed`)."""
    found = {}
    for name, *rule in rules:
        of, _, last = f"{module}.{name}".lstrip(".").rpartition(".")
        found[of, last] = Allowed(f"{of}.{last}", *rule)
    return found


# --- plain values ---------------------------------------------------------------------------------


class Value(metaclass=Sealed):
    """Stands for a value without state. It cannot be a key, unless a subclass says so."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __setstate__(self, state: Any) -> None:
        raise MalformedPickleError(f"the state of a {type(self).__name__} is set")


class _Interval(Value):
    """A range or a slice itself could double a list again and again."""

    __slots__ = ()

    def __init__(self, *bounds: Any) -> None:
        expect(len(bounds) == 3 and all(bound is None or type(bound) is int for bound in bounds), "a range or slice")


# What a defaultdict may call. Some picklers also call them without arguments.
_FACTORIES = {f"builtins.{cls.__name__}": cls for cls in (bool, dict, float, int, list, set, str, tuple)}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def _make_default_dict(factory: Allowed | None = None) -> dict[Any, Any]:
    # Without its factory: whoever has it in a pickle could set it to anything.
    expect(factory is None or factory.name in _FACTORIES, "collections.defaultdict")
    return {}


def _make_layout(name: str) -> torch.layout:
    if name not in _LAYOUTS:
        raise UnsafeGlobalError("", name)
    return _LAYOUTS[name]


def _encode(characters: str, encoding: str) -> bytes:
    # Protocol 2 has no opcode for bytes: they are a text in Latin-1.
    expect(encoding in ("latin1", "latin-1"), "_codecs.encode")
    return characters.encode("latin-1")


def _make_bytearray(data: Any = b"", *encoding: str) -> bytearray:
    return bytearray(_encode(data, *encoding) if encoding else data)


def _make_path(kind: type[pathlib.PurePath], *parts: Any) -> str:
    # A path has attributes to set.
    expect(all(type(part) is str for part in parts) and sum(len(part) + 1 for part in parts) <= _MAX_PATH, "a path")
    return str(kind(*parts))


PLAIN: dict[Names, Any] = {
    ("torch", "Size"): torch.Size,  # checks its arguments, and has no attributes to set
    **table(
        ("torch.device", torch.device, (str,), (str, int)),
        ("torch.serialization._get_layout", _make_layout, (str,)),
        ("collections.OrderedDict", OrderedDict, ()),
        ("collections.defaultdict", _make_default_dict, (), (type(None),), (Allowed,)),
        ("_codecs.encode", _encode, (str, str)),
        ("builtins.bytes", bytes, ()),
        ("builtins.bytearray", _make_bytearray, (), (bytes,), (str, str)),
        ("builtins.complex", complex, (float, float)),
        ("builtins.range", _Interval),
        ("builtins.slice", _Interval),
        ("builtins.frozenset", frozenset, (), (list,)),
        *((name, cls, ()) for name, cls in _FACTORIES.items()),
        ("builtins.set", set, (), (list,)),
    ),
    # StorageMeta.checkpoint_id of torch's FileSystemWriter.
    **{names: made for module in ("pathlib", "pathlib._local") for names, made in table(
        ("PosixPath", functools.partial(_make_path, pathlib.PurePosixPath)),
        ("WindowsPath", functools.partial(_make_path, pathlib.PureWindowsPath)),
        ("PurePosixPath", functools.partial(_make_path, pathlib.PurePosixPath)),
        ("PureWindowsPath", functools.partial(_make_path, pathlib.PureWindowsPath)),
        module=module,
    ).items()},
}  # fmt: skip
_RENAMED = {"unicode": "str", "xrange": "range", "long": "int"}


def find_plain(module: str, name: str) -> Any:
    """The stand-in for a plain value's global; None for other globals. Protocol 2 has Python 2's names."""
    if module == "__builtin__":
        module, name = "builtins", _RENAMED.get(name, name)
    found = PLAIN.get((module, name))
    if found is None and module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
        return vars(torch)[name]
    return found


# --- metadata: DCP's classes ----------------------------------------------------------------------

_FIELDS = 5  # of the state of a TensorProperties, in all versions of torch; 2.15 adds strides
_STATE = cast(Any, TensorProperties()).__getstate__()
_MEMORY_FORMAT = type(_STATE[3])
"""torch's enumeration in the place of a memory format."""


class _Encoding(NamedTuple):
    """Stands for a member of the enumeration. Members have attributes to set."""

    member: Enum


def _set_properties(mirror: Mirror, state: Any) -> None:
    if type(state) is not tuple or len(state) < _FIELDS or type(state[3]) is not _Encoding:
        raise MalformedPickleError("the state of a TensorProperties is no tuple of properties")
    added = [each for value in state[_FIELDS:] for each in (value if type(value) is tuple else [value])]
    if not LEAVES.issuperset(map(type, added)):
        raise _unknown_properties(state)
    vars(mirror).update(_read_properties(state))


@functools.lru_cache(maxsize=256)
def _read_properties(state: Any) -> dict[str, Any]:
    """The attributes that torch's own ``__setstate__`` makes of a state, of which it gets what it knows. Nobody changes
    them."""
    dtype, layout, requires_grad, encoding, pin_memory, *added = state
    right = isinstance(dtype, torch.dtype) and isinstance(layout, torch.layout)
    if not right or type(requires_grad) is not bool or type(pin_memory) is not bool:
        raise MalformedPickleError("the properties of a tensor are not dtype, layout, flags and memory format")
    properties: Any = TensorProperties.__new__(TensorProperties)
    try:
        properties.__setstate__((dtype, layout, requires_grad, encoding.member, pin_memory, *added)[: len(_STATE)])
    except Exception:  # noqa: BLE001 - whatever a later torch raises
        raise _unknown_properties(state) from None
    return dict(vars(properties))


def _unknown_properties(state: tuple[Any, ...]) -> UnsafeGlobalError:
    return UnsafeGlobalError("", f"a TensorProperties of {len(state)} values")


_DCP = "torch.distributed.checkpoint."
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
# Where torch 2.1 and 2.2 had the properties of a tensor. Later releases have other classes of this name.
_TORCH_2_1 = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES = {
    "metadata": (
        dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata, dcp.Metadata, dcp.MetadataIndex, dcp.StorageMeta,
        dcp.TensorStorageMetadata,
    ),
    "filesystem": (StorageInfo,),
}  # fmt: skip
MIRRORS: dict[type, Any] = {cls: Mirror.of(cls) for classes in _CLASSES.values() for cls in classes} | {
    TensorProperties: Mirror.of(TensorProperties, __setstate__=_set_properties)
}
# The plans of all ranks, which Megatron-Core keeps in ``Metadata.all_local_plans``, to plan its next save faster. They
# are not kept.
_PLANS = {
    **{(_DCP + "planner", name): Opaque
       for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")},
    (_DCP + "filesystem", "_StoragePrefix"): Opaque,
    (_MEGATRON, "MCoreSavePlan"): Opaque,
}  # fmt: skip
_ENCODINGS = (f"{_DCP}metadata._MEM_FORMAT_ENCODING", f"{_TORCH_2_1}.MEM_FORMAT_ENCODING")
_MEMORY_FORMATS = {
    str(value): value
    for value in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
}


def _make_encoding(value: int) -> _Encoding:
    if value not in _MEMORY_FORMAT._value2member_map_:
        raise UnsafeGlobalError("", f"{_ENCODINGS[0]}({value})")
    return _Encoding(_MEMORY_FORMAT(value))


def _get_member(*arguments: Any) -> Any:
    """The first releases of Python 3.11 pickle a member of an enumeration as ``getattr`` of its class."""
    expect(len(arguments) == 2 and type(arguments[1]) is str, "builtins.getattr")
    of, name = arguments
    if of is Opaque:
        return Opaque()
    if not isinstance(of, Allowed) or of.name not in _ENCODINGS or name not in _MEMORY_FORMAT.__members__:
        raise UnsafeGlobalError("builtins", "getattr")
    return _Encoding(_MEMORY_FORMAT[name])


METADATA: dict[Names, Any] = {
    **{(_DCP + name, cls.__name__): MIRRORS[cls] for name, classes in _CLASSES.items() for cls in classes},
    (_DCP + "metadata", "TensorProperties"): MIRRORS[TensorProperties],
    (_TORCH_2_1, "TensorProperties"): MIRRORS[TensorProperties],
    # Up to 0.15, Megatron's name of its subclass of torch's; now its class of this name is empty.
    (_MEGATRON, "MCoreMetadata"): MIRRORS[dcp.Metadata],
    **_PLANS,
    **table(*((enum, _make_encoding, (int,)) for enum in _ENCODINGS), ("builtins.getattr", _get_member)),
}


def find_in_metadata(module: str, name: str) -> Any:
    """The stand-in for a global in a pickle of metadata.

    Raises:
        UnsafeGlobalError: metadata never needs it.
    """
    found = METADATA.get((module if module != "__builtin__" else "builtins", name)) or find_plain(module, name)
    if found is not None:
        return found
    # torch gives memory formats no module; pickle names the first one that has them.
    if module.partition(".")[0] == "torch" and "torch." + name.rpartition(".")[2] in _MEMORY_FORMATS:
        return _MEMORY_FORMATS["torch." + name.rpartition(".")[2]]
    raise UnsafeGlobalError(module, name)


# --- items: numpy ---------------------------------------------------------------------------------

_DTYPE = re.compile(r"b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SU][0-9]{1,9}")
# The limit of numpy 1; later versions allow 64.
_MAX_DIMENSIONS = 32
_MAX_BYTES = 2**62


class _Dtype(Value):
    __slots__ = ("described", "dtype")

    def __init__(self, *arguments: Any) -> None:
        expect(len(arguments) == 3 and type(arguments[0]) is str and arguments[1:] == (False, True), "numpy.dtype")
        if not _DTYPE.fullmatch(arguments[0]):
            raise MalformedPickleError(f"a numpy.dtype of {arguments[0][:20]!r}, which is neither numbers nor texts")
        self.dtype = np.dtype(arguments[0])
        self.described = False

    def __setstate__(self, state: Any) -> None:
        """Take the byte order. A state that numpy would not write could make it read beyond its memory."""
        expect(not self.described and type(state) is tuple and len(state) == 8, "numpy.dtype")
        self.described = True
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])
        written: Any = self.dtype.__reduce__()[2]
        expect(state == written, "numpy.dtype")


class _Array(Value):
    __slots__ = ("filled",)

    def __init__(self, *arguments: Any) -> None:
        expect(len(arguments) == 3 and arguments[0] is _NDARRAY and arguments[1:] == ((0,), b"b"), "numpy.ndarray")
        self.filled = False

    def __setstate__(self, state: Any) -> None:
        expect(not self.filled and type(state) is tuple and len(state) == 5 and state[0] == 1, "numpy.ndarray")
        self.filled = True
        _, shape, made, in_columns, data = state
        expect(type(shape) is tuple and len(shape) <= _MAX_DIMENSIONS and type(made) is _Dtype, "numpy.ndarray")
        expect(all(type(size) is int and size >= 0 for size in shape), "numpy.ndarray")
        expect(type(in_columns) is bool and type(data) is bytes, "numpy.ndarray")
        nbytes = made.dtype.itemsize * math.prod(shape)
        if nbytes != len(data) or made.dtype.itemsize * math.prod(size or 1 for size in shape) > _MAX_BYTES:
            raise MalformedPickleError(f"a numpy.ndarray of {nbytes} bytes is made from {len(data)}")
        if made.dtype.kind == "U" and data:
            points = np.frombuffer(data, np.dtype("u4").newbyteorder(made.dtype.byteorder))
            if points.max() > sys.maxunicode:
                raise MalformedPickleError("texts in a numpy.ndarray that are no Unicode")


def _make_scalar(made: _Dtype, data: bytes) -> Any:
    expect(len(data) == made.dtype.itemsize, "a scalar of numpy")
    return np.frombuffer(data, made.dtype)[0] if data else made.dtype.type()


_NDARRAY = Allowed("numpy.ndarray")


# --- items: the standard library ------------------------------------------------------------------


def _make_date(data: bytes) -> date:
    expect(len(data) == 4, "datetime.date")
    return date(int.from_bytes(data[:2], "big"), data[2], data[3])


def _make_datetime(data: bytes, zone: timezone | None = None) -> datetime:
    expect(len(data) == 10, "datetime.datetime")
    return datetime.combine(_make_date(data[:4]), _make_time(data[4:], zone))


def _make_time(data: bytes, zone: timezone | None = None) -> time:
    expect(len(data) == 6, "datetime.time")
    return time(data[0], data[1], data[2], int.from_bytes(data[3:], "big"), zone)


def _make_deque(items: Any = (), length: int | None = None) -> deque[Any]:
    expect(not items, "collections.deque")
    return deque(maxlen=length)


VALUES: dict[Names, Any] = {
    **table(
        ("numpy.dtype", _Dtype),
        *((f"numpy.{core}.multiarray._reconstruct", _Array) for core in ("core", "_core")),  # numpy 1, numpy 2
        *((f"numpy.{core}.multiarray.scalar", _make_scalar, (_Dtype, bytes)) for core in ("core", "_core")),
        ("collections.Counter", Counter, (), (dict,)),
        ("collections.deque", _make_deque),
        ("datetime.date", _make_date, (bytes,)),
        ("datetime.datetime", _make_datetime, (bytes,), (bytes, timezone)),
        ("datetime.time", _make_time, (bytes,), (bytes, timezone)),
        ("datetime.timedelta", timedelta, (int, int, int)),
        ("datetime.timezone", timezone, (timedelta,), (timedelta, str)),
    ),
    ("numpy", "ndarray"): _NDARRAY,
}
