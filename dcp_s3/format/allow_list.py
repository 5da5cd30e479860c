"""The allow-list: each global that a pickle of metadata or of an item may name, and what is made of which arguments.

Metadata has DCP's classes and plain values. Items have plain values, ordinary tensors, and what `item_values` adds.
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint import planner
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_s3.format.unpickling import (
    Allowed,
    Deferred,
    MalformedPickleError,
    Mirror,
    PlainDefaultDict,
    UnknownToTorchError,
    UnsafeGlobalError,
    expect,
)
from dcp_s3.torch_private import StorageInfo, StoragePrefix

# S3's keys have at most 1024 bytes, local paths 4096.
_MAX_PATH = 4096
_MAX_INT = 2**63
Names: TypeAlias = tuple[str, str]


def table(*rules: tuple[Any, ...], module: str = "") -> dict[Names, Allowed]:
    """Stand-ins by module and name, from names, calls and signatures (see `Allowed`)."""
    found = {}
    for name, *rule in rules:
        of, _, last = f"{module}.{name}".lstrip(".").rpartition(".")
        found[of, last] = Allowed(f"{of}.{last}", *rule)
    return found


# --- plain values ---------------------------------------------------------------------------------

# What a defaultdict may call. Some picklers also call them without arguments.
_FACTORIES = {f"builtins.{cls.__name__}": cls for cls in (bool, dict, float, int, list, set, str, tuple)}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def _make_default_dict(factory: Allowed | None = None) -> PlainDefaultDict:
    expect(factory is None or factory.name in _FACTORIES, "collections.defaultdict")
    made = PlainDefaultDict()
    made.factory = None if factory is None else _FACTORIES[factory.name]
    return made


def _make_layout(name: str) -> torch.layout:
    if name not in _LAYOUTS:
        raise UnknownToTorchError(name)
    return _LAYOUTS[name]


def _encode(characters: str, encoding: str) -> bytes:
    # Protocol 2 has no opcode for bytes: they are a text in Latin-1.
    expect(encoding in ("latin1", "latin-1"), "_codecs.encode")
    return characters.encode("latin-1")


def _make_bytearray(data: Any = b"", *encoding: str) -> bytearray:
    return bytearray(_encode(data, *encoding) if encoding else data)


def _defer_interval(kind: type, *bounds: Any) -> Deferred:
    # With a range or a slice itself, a pickle could double a list again and again.
    small = all(bound is None or (type(bound) is int and abs(bound) < _MAX_INT) for bound in bounds)
    expect(len(bounds) == 3 and small, f"builtins.{kind.__name__}")
    return Deferred(kind, bounds)


def _defer_path(kind: type, *parts: Any) -> Deferred:
    expect(all(type(part) is str for part in parts) and sum(len(part) + 1 for part in parts) <= _MAX_PATH, "a path")
    return Deferred(kind, parts)


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
        ("builtins.frozenset", frozenset, (), (list,)),
        ("builtins.range", functools.partial(_defer_interval, range)),
        ("builtins.slice", functools.partial(_defer_interval, slice)),
        *((name, cls, ()) for name, cls in _FACTORIES.items()),
        ("builtins.set", set, (), (list,)),
    ),
    # StorageMeta.checkpoint_id of torch's FileSystemWriter. Paths of another system stay what they are.
    **{names: made for module in ("pathlib", "pathlib._local") for names, made in table(
        ("PosixPath", functools.partial(
            _defer_path, pathlib.Path if isinstance(pathlib.Path(), pathlib.PosixPath) else pathlib.PurePosixPath
        )),
        ("WindowsPath", functools.partial(_defer_path, pathlib.PureWindowsPath)),
        ("PurePosixPath", functools.partial(_defer_path, pathlib.PurePosixPath)),
        ("PureWindowsPath", functools.partial(_defer_path, pathlib.PureWindowsPath)),
        module=module,
    ).items()},
}  # fmt: skip
"""Stand-ins for the globals of plain values."""
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


def _set_properties(mirror: Mirror, state: Any) -> None:
    """The state is a tuple. What torch adds to it waits until it is known to be harmless."""
    if type(state) is not tuple or len(state) < _FIELDS or type(state[3]) is not Deferred:
        raise MalformedPickleError("the state of a TensorProperties is no tuple of properties")
    added = [value for value in state[_FIELDS:] if value is not None]
    if all(type(value) is tuple and {int}.issuperset(map(type, value)) for value in added):
        vars(mirror).update(_read_properties(state))
    else:
        vars(mirror)["state"] = state


def _complete_properties(attributes: dict[str, Any]) -> None:
    if "state" in attributes:
        attributes.update(_read_properties.__wrapped__(attributes.pop("state")))


@functools.lru_cache(maxsize=256)
def _read_properties(state: Any) -> dict[str, Any]:
    """The attributes that torch's own ``__setstate__`` makes of a state, of which it gets what it knows. Nobody changes
    them."""
    dtype, layout, requires_grad, encoding, pin_memory, *added = state
    memory_format = encoding.make(*encoding.arguments) if type(encoding) is Deferred else encoding
    right = isinstance(dtype, torch.dtype) and isinstance(layout, torch.layout)
    right = right and isinstance(memory_format, _MEMORY_FORMAT)
    if not right or type(requires_grad) is not bool or type(pin_memory) is not bool:
        raise MalformedPickleError("the properties of a tensor are not dtype, layout, flags and memory format")
    properties: Any = TensorProperties.__new__(TensorProperties)
    try:
        properties.__setstate__((dtype, layout, requires_grad, memory_format, pin_memory, *added)[: len(_STATE)])
    except Exception:  # noqa: BLE001 - whatever a later torch raises
        raise UnknownToTorchError(f"a TensorProperties of {len(state)} values") from None
    return dict(vars(properties))


_DCP = "torch.distributed.checkpoint."
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
# Where torch 2.1 and 2.2 had the properties of a tensor. Later releases have other classes of this name.
_TORCH_2_1 = "torch.distributed._shard.sharded_tensor.metadata"
_CLASSES = {
    "metadata": (
        dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata, dcp.Metadata, dcp.MetadataIndex, dcp.StorageMeta,
        dcp.TensorStorageMetadata,
    ),
    "filesystem": (StorageInfo, StoragePrefix),
    # The plans of all ranks, which Megatron-Core keeps in ``Metadata.all_local_plans``.
    "planner": (planner.BytesIOWriteData, planner.SavePlan, planner.TensorWriteData, planner.WriteItem),
}  # fmt: skip
MIRRORS: dict[type, Any] = {cls: Mirror.of(cls) for classes in _CLASSES.values() for cls in classes} | {
    TensorProperties: Mirror.of(
        TensorProperties, __setstate__=_set_properties, complete=staticmethod(_complete_properties)
    )
}
_ENUMS: dict[str, type[Enum]] = {
    f"{_DCP}metadata._MEM_FORMAT_ENCODING": _MEMORY_FORMAT,
    f"{_TORCH_2_1}.MEM_FORMAT_ENCODING": _MEMORY_FORMAT,
    f"{_DCP}planner.WriteItemType": planner.WriteItemType,
}
_MEMORY_FORMATS = {
    str(value): value
    for value in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
}


def _defer_member(enum: str, value: int) -> Deferred:
    """Members of an enumeration have attributes."""
    if value not in _ENUMS[enum]._value2member_map_:
        raise UnknownToTorchError(f"{enum}({value})")
    return Deferred(_ENUMS[enum], (value,))


def _get_member(*arguments: Any) -> Deferred:
    """The first releases of Python 3.11 pickle a member of an enumeration as ``getattr`` of its class."""
    of = arguments[0].name if arguments and isinstance(arguments[0], Allowed) else ""
    if len(arguments) != 2 or of not in _ENUMS or type(arguments[1]) is not str:
        raise UnsafeGlobalError("builtins", "getattr")
    if arguments[1] not in _ENUMS[of].__members__:
        raise UnknownToTorchError(f"{of}.{arguments[1][:100]}")
    return Deferred(_ENUMS[of].__getitem__, arguments[1:])


METADATA: dict[Names, Any] = {
    **{(_DCP + name, cls.__name__): MIRRORS[cls] for name, classes in _CLASSES.items() for cls in classes},
    (_DCP + "metadata", "TensorProperties"): MIRRORS[TensorProperties],
    (_TORCH_2_1, "TensorProperties"): MIRRORS[TensorProperties],
    # Up to 0.15, Megatron's names of its subclasses of torch's classes; now its classes of these names are empty.
    (_MEGATRON, "MCoreSavePlan"): MIRRORS[planner.SavePlan],
    (_MEGATRON, "MCoreMetadata"): MIRRORS[dcp.Metadata],
    **table(*((enum, functools.partial(_defer_member, enum), (int,)) for enum in _ENUMS)),
    **table(("builtins.getattr", _get_member)),
}
"""Stand-ins for the globals of metadata, beyond those of plain values."""


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
    if module.partition(".")[0] == "torch" and not hasattr(sys.modules.get(module), name):
        raise UnknownToTorchError(f"{module}.{name}")
    raise UnsafeGlobalError(module, name)


# --- items: tensors -------------------------------------------------------------------------------

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
    # ("storage", type, key, location, number of elements), and a view's place in the format before archives.
    right = type(found) is tuple and len(found) in (5, 6) and found[0] == "storage" and type(found[1]) is _StorageType
    if not right or not (type(found[2]) is type(found[3]) is str) or not _is_count(found[4]):
        raise MalformedPickleError("a storage is not described as torch does")
    _, kind, key, _, numel = found[:5]
    return PickledStorage(key, numel * (kind.dtype.itemsize if kind.dtype else 1), kind.dtype)


def _describe(arguments: Sequence[Any], dtype: Any, *, is_unusual: bool) -> PickledTensor:
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
        _rebuild("_rebuild_tensor_v2", lambda *a: _describe(a[:6], a[0].dtype, is_unusual=len(a) > 6), 6, 7),
        _rebuild("_rebuild_tensor_v3", lambda *a: _describe(a[:6], a[6], is_unusual=len(a) > 7), 7, 8, in_bytes=True),
        ("_rebuild_parameter", lambda tensor, *_: tensor, (PickledTensor, bool, OrderedDict)),
        module="torch._utils",
    ),
}  # fmt: skip
"""Stand-ins for what makes ordinary tensors: types of storages, and functions."""

UNUSUAL_TENSORS = table(
    # Without requires_grad and hooks; with a quantizer's parameters before them.
    _rebuild("_rebuild_tensor", lambda *a: _describe((*a, False, OrderedDict()), a[0].dtype, is_unusual=True), 4),
    _rebuild("_rebuild_qtensor", lambda *a: _describe((*a[:4], *a[5:]), a[0].dtype, is_unusual=True), 7),
    module="torch._utils",
)
"""Stand-ins for further functions, which only torch itself may judge."""
