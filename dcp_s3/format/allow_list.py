"""The allow-list: what pickles of metadata may name, what stands for it while they are read, and what that becomes.

A pickle may set attributes of the classes that it names, and call what they define. So for each global there is a
stand-in with neither: plain values are made from checked arguments, and instances of DCP's classes are mirrors, with
whatever attributes a pickle gives them, compared by identity. Once all is checked, a `Settler` makes torch's instances
of mirrors, in place, and values of what is deferred: harmless to look at, copy or send on.
"""

from __future__ import annotations

import functools
import operator
import pathlib
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any, cast

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
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from dcp_s3.format.unpickling import (
    Allowed,
    Deferred,
    MalformedPickleError,
    Sealed,
    UnknownToTorchError,
    UnsafeGlobalError,
    deferred,
)
from dcp_s3.torch_private import StorageInfo, StoragePrefix

# S3's keys have at most 1024 bytes, local paths 4096.
_MAX_PATH = 4096
_MAX_SLICE_INT = 2**63
_MAX_DEPTH = 50  # a plan of a nested state is flat

# --- plain values ---------------------------------------------------------------------------------

# What a defaultdict may call. Some picklers also call them without arguments.
_FACTORIES = {f"builtins.{cls.__name__}": cls for cls in (bool, dict, float, int, list, set, str, tuple)}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


class PlainDefaultDict(dict[Any, Any]):
    """Stands for a defaultdict, whose factory could be set to anything."""

    __slots__ = ("factory",)

    factory: type | None

    def __setstate__(self, state: Any) -> None:
        raise MalformedPickleError("the state of a defaultdict is set")


def _make_default_dict(factory: Allowed | None = None) -> PlainDefaultDict:
    made = PlainDefaultDict()
    made.factory = None if factory is None else _FACTORIES[factory.name]
    return made


def _make_layout(name: str) -> torch.layout:
    if name not in _LAYOUTS:
        raise UnknownToTorchError(name)
    return _LAYOUTS[name]


def _fits_default_dict(factory: Any = None) -> bool:
    return factory is None or (isinstance(factory, Allowed) and factory.name in _FACTORIES)


def _fits_device(kind: Any, *index: Any) -> bool:
    return type(kind) is str and len(kind) < 100 and len(index) <= 1 and all(type(each) is int for each in index)


def _fits_bytearray(data: Any = b"", *encoding: Any) -> bool:
    return _fits_encode(data, *encoding) if encoding else type(data) is bytes


def _fits_encode(characters: Any, encoding: Any) -> bool:
    return type(characters) is str and encoding in ("latin1", "latin-1")


def _fits_interval(*bounds: Any) -> bool:
    return len(bounds) == 3 and all(
        bound is None or (type(bound) is int and abs(bound) < _MAX_SLICE_INT) for bound in bounds
    )


def _fits_path(*parts: Any) -> bool:
    return all(type(part) is str for part in parts) and sum(len(part) + 1 for part in parts) <= _MAX_PATH


def _fits_set(*items: Any) -> bool:
    return len(items) <= 1 and all(type(each) is list for each in items)


def _nothing(*arguments: Any) -> bool:
    return not arguments


_RULES: dict[tuple[str, str], tuple[Callable[..., Any], Callable[..., bool]]] = {
    ("torch", "device"): (torch.device, _fits_device),
    ("torch.serialization", "_get_layout"): (_make_layout, lambda name: type(name) is str),
    ("collections", "OrderedDict"): (OrderedDict, _nothing),
    ("collections", "defaultdict"): (_make_default_dict, _fits_default_dict),
    # Protocol 2 has no opcode for bytes: they are a text in Latin-1.
    ("_codecs", "encode"): (lambda characters, _: characters.encode("latin-1"), _fits_encode),
    ("builtins", "bytes"): (bytes, _nothing),
    ("builtins", "bytearray"): (bytearray, _fits_bytearray),
    ("builtins", "complex"): (complex, lambda real, imag: type(real) is type(imag) is float),
    ("builtins", "frozenset"): (frozenset, _fits_set),
    # With a range or a slice, a pickle could double a list again and again.
    ("builtins", "range"): (deferred(range), _fits_interval),
    ("builtins", "slice"): (deferred(slice), _fits_interval),
    **{("builtins", cls.__name__): (cls, _nothing) for cls in _FACTORIES.values()},
    ("builtins", "set"): (set, _fits_set),
    # StorageMeta.checkpoint_id of torch's FileSystemWriter. Paths of another system stay what they are.
    **{(module, name): (deferred(cls), _fits_path) for module in ("pathlib", "pathlib._local") for name, cls in (
        ("PosixPath", pathlib.Path if isinstance(pathlib.Path(), pathlib.PosixPath) else pathlib.PurePosixPath),
        ("WindowsPath", pathlib.PureWindowsPath),
        ("PurePosixPath", pathlib.PurePosixPath),
        ("PureWindowsPath", pathlib.PureWindowsPath),
    )},
}  # fmt: skip
"""What makes a value of each global, and whether it is made of these arguments."""

PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,  # checks its arguments, and has no attributes to set
    **{(module, name): Allowed(f"{module}.{name}", *rule) for (module, name), rule in _RULES.items()},
}
_RENAMED = {"unicode": "str", "xrange": "range", "long": "int"}


def find_plain(module: str, name: str) -> Any:
    """The stand-in for a plain value's global; None for other globals. Protocol 2 has Python 2's names."""
    if module == "__builtin__":
        module, name = "builtins", _RENAMED.get(name, name)
    found = PLAIN.get((module, name))
    if found is None and module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
        return vars(torch)[name]
    return found


# --- DCP's classes --------------------------------------------------------------------------------

_DCP = "torch.distributed.checkpoint."
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
# Where torch 2.1 and 2.2 had the properties of a tensor. Later releases have other classes of this name.
_TORCH_2_1 = "torch.distributed._shard.sharded_tensor.metadata"


class Mirror(metaclass=Sealed):
    """Stands for an instance of a class of DCP, as a pickle describes it."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Called by Python's unpickler for slots. It puts other attributes into ``__dict__``.
        raise MalformedPickleError(f"the slots of a {type(self).__name__} are set")

    def settled(self) -> None:
        """Called when its attributes have become what they stand for."""


class PropertiesMirror(Mirror):
    """Of `TensorProperties`, whose state is a tuple; what torch adds to it waits until it is known to be harmless."""

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) < _FIELDS or type(state[3]) is not Deferred:
            raise MalformedPickleError("the state of a TensorProperties is no tuple of properties")
        added = [value for value in state[_FIELDS:] if value is not None]
        if all(type(value) is tuple and {int}.issuperset(map(type, value)) for value in added):
            self.__dict__.update(_read_properties(state))
        else:
            self.__dict__["state"] = state

    def settled(self) -> None:
        """See `Mirror`."""
        if "state" in self.__dict__:
            self.__dict__.update(_read_properties.__wrapped__(self.__dict__.pop("state")))


_FIELDS = 5  # what all versions of torch write; 2.15 adds strides
_STATE = cast(Any, TensorProperties()).__getstate__()
_KNOWN_FIELDS = len(_STATE)
_MEMORY_FORMAT = type(_STATE[3])
"""torch's enumeration in the place of a memory format."""


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
    known = (dtype, layout, requires_grad, memory_format, pin_memory, *added)[:_KNOWN_FIELDS]
    try:
        properties.__setstate__(known)
    except Exception:  # noqa: BLE001 - whatever a later torch raises
        raise UnknownToTorchError(f"a TensorProperties of {len(state)} values") from None
    return dict(vars(properties))


_CLASSES = (
    BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties,
    TensorStorageMetadata, StorageInfo, StoragePrefix,
    # The plans of all ranks, which Megatron-Core keeps in ``Metadata.all_local_plans``.
    BytesIOWriteData, SavePlan, TensorWriteData, WriteItem,
)  # fmt: skip
MIRRORS: dict[type, Any] = {
    cls: Sealed(cls.__name__, (PropertiesMirror if cls is TensorProperties else Mirror,), {}) for cls in _CLASSES
}
_MIRRORED: dict[type, type] = {mirror: cls for cls, mirror in MIRRORS.items()}


@functools.cache
def _required(cls: type) -> frozenset[str]:
    """Names of the attributes that an instance itself must have."""
    return frozenset(field.name for field in fields(cls) if field.default is MISSING)


_ENUMS: dict[str, type[Enum]] = {
    f"{_DCP}metadata._MEM_FORMAT_ENCODING": _MEMORY_FORMAT,
    f"{_TORCH_2_1}.MEM_FORMAT_ENCODING": _MEMORY_FORMAT,
    f"{_DCP}planner.WriteItemType": WriteItemType,
}
_MEMORY_FORMATS = {
    str(value): value
    for value in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
}


def _enum(name: str) -> Allowed:
    """A stand-in for an enumeration. Its members are deferred: they have attributes."""

    def make(value: int) -> Deferred:
        if value not in _ENUMS[name]._value2member_map_:
            raise UnknownToTorchError(f"{name}({value})")
        return Deferred(_ENUMS[name], (value,))

    return Allowed(name, make, lambda value: type(value) is int)


def _get_member(*arguments: Any) -> Deferred:
    """The first releases of Python 3.11 pickle a member of an enumeration as ``getattr`` of its class."""
    of = arguments[0].name if arguments and isinstance(arguments[0], Allowed) else ""
    if len(arguments) != 2 or of not in _ENUMS or type(arguments[1]) is not str:
        raise UnsafeGlobalError("builtins", "getattr")
    if arguments[1] not in _ENUMS[of].__members__:
        raise UnknownToTorchError(f"{of}.{arguments[1][:100]}")
    return Deferred(_ENUMS[of].__getitem__, arguments[1:])


GLOBALS: dict[tuple[str, str], Any] = {
    **{(_DCP + module, cls.__name__): MIRRORS[cls] for module, classes in {
        "metadata": _CLASSES[:7], "filesystem": _CLASSES[7:9], "planner": _CLASSES[9:],
    }.items() for cls in classes},
    (_TORCH_2_1, "TensorProperties"): MIRRORS[TensorProperties],
    # Up to 0.15, Megatron's names of its subclasses of torch's classes; now its classes of these names are empty.
    (_MEGATRON, "MCoreSavePlan"): MIRRORS[SavePlan],
    (_MEGATRON, "MCoreMetadata"): MIRRORS[Metadata],
    **{(name.rpartition(".")[0], name.rpartition(".")[2]): _enum(name) for name in _ENUMS},
    ("builtins", "getattr"): Allowed("builtins.getattr", _get_member),
}  # fmt: skip
"""Stand-ins for the globals of metadata, beyond those of plain values."""


def find_global(module: str, name: str) -> Any:
    """The stand-in for a global in a pickle of metadata.

    Raises:
        UnsafeGlobalError: metadata never needs it.
    """
    found = GLOBALS.get((module if module != "__builtin__" else "builtins", name))
    if found is None:
        found = find_plain(module, name)
    if found is not None:
        return found
    # torch gives memory formats no module; pickle names the first one that has them.
    if module.partition(".")[0] == "torch" and "torch." + name.rpartition(".")[2] in _MEMORY_FORMATS:
        return _MEMORY_FORMATS["torch." + name.rpartition(".")[2]]
    if module.partition(".")[0] == "torch" and not hasattr(sys.modules.get(module), name):
        raise UnknownToTorchError(f"{module}.{name}")
    raise UnsafeGlobalError(module, name)


# --- what they become -----------------------------------------------------------------------------

_LEAVES = frozenset((
    str, int, float, bool, type(None), bytes, complex, bytearray, range, slice, torch.Size, torch.dtype, torch.layout,
    torch.device, torch.memory_format,
))  # fmt: skip


class Settler:
    """Turns the values of one pickle into what they stand for; they may share parts.

    It is for values that planners add and nothing here relies on: they must have no class or function in them, not
    contain themselves, and not be nested deeply.
    """

    def __init__(self) -> None:
        # id -> the value (kept so that its id is not reused), what it has become, and how deeply that is nested.
        self._known: dict[int, tuple[Any, Any, int]] = {}

    def settle(self, value: Any) -> Any:
        """Turn ``value`` into what it stands for. Mirrors, lists and dicts are changed in place.

        Raises:
            MalformedPickleError: it has a class or a function in it, is nested too deeply, contains itself, or stands
                for something that cannot be made.
        """
        try:
            return self._settle(value, 1)[0]
        except (MalformedPickleError, UnsafeGlobalError):
            raise
        except Exception as error:  # an enumeration has no such member, or a hash fails
            raise MalformedPickleError(f"{type(error).__name__}: {str(error)[:200]}") from error

    def settle_others(self, mirror: Mirror, known: frozenset[str]) -> None:
        """Settle the attributes of ``mirror`` that are not ``known``."""
        attributes = vars(mirror)
        for name in attributes.keys() - known:
            _check_name(mirror, name)
            attributes[name] = self.settle(attributes[name])
        mirror.settled()

    def _settle(self, value: Any, depth: int) -> tuple[Any, int]:
        kind = type(value)
        if kind in _LEAVES:
            return value, 0
        found = self._known.get(id(value))
        if found is not None:
            _check_depth(depth + found[2] - 1)
            return found[1], found[2]
        _check_depth(depth)
        if kind is tuple:
            items, height = self._settle_all(value, depth)
            settled = value if all(map(operator.is_, items, value)) else tuple(items)
        else:
            settled, height = self._settle_other(value, kind, depth)
        self._known[id(value)] = value, settled, height
        return settled, height

    def _settle_all(self, values: Any, depth: int) -> tuple[list[Any], int]:
        settled, height = [], 0
        for value in values:
            kind = type(value)
            if kind in _LEAVES:
                settled.append(value)
            elif kind is tuple and _LEAVES.issuperset(map(type, value)):  # a path; plans have many
                settled.append(value)
                height = max(height, 1)
            else:
                item, below = self._settle(value, depth + 1)
                settled.append(item)
                height = max(height, below)
        _check_depth(depth + height)
        return settled, height + 1

    def _settle_other(self, value: Any, kind: type, depth: int) -> tuple[Any, int]:
        if kind in (dict, OrderedDict, PlainDefaultDict):
            return self._settle_dict(value, kind, depth)
        if kind in (list, set, frozenset):
            items, height = self._settle_all(value, depth)
            if kind is not list:
                return kind(items), height
            value[:] = items
            return value, height
        if kind is Deferred:
            return value.make(*value.arguments), 0
        if isinstance(value, Mirror):
            height = self._settle_attributes(value, depth)
            value.settled()
            cls = _MIRRORED[type(value)]
            missing = _required(cls) - vars(value).keys()
            if missing:
                raise MalformedPickleError(f"a {cls.__name__} has no {min(missing)}")
            object.__setattr__(value, "__class__", cls)
            return value, height
        if kind in MIRRORS:  # settled before
            return value, 1
        raise MalformedPickleError(f"it has a {kind.__name__} where a value belongs")

    def _settle_dict(self, value: Any, kind: type, depth: int) -> tuple[Any, int]:
        items, height = self._settle_all(value.values(), depth)
        keys: Any = value
        if not _LEAVES.issuperset(map(type, value)):
            keys, below = self._settle_all(list(value), depth)
            height = max(height, below)
        if kind is OrderedDict:
            height = max(height, self._settle_attributes(value, depth))
        pairs = list(zip(keys, items, strict=True))
        if kind is PlainDefaultDict:
            return defaultdict(value.factory, pairs), height
        if keys is not value:
            value.clear()
        value.update(pairs)
        return value, height

    def _settle_attributes(self, owner: Any, depth: int) -> int:
        attributes = vars(owner)
        for name in attributes:
            _check_name(owner, name)
        items, height = self._settle_all(attributes.values(), depth)
        attributes.update(zip(list(attributes), items, strict=True))
        return height


def _check_depth(depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise MalformedPickleError(f"it is nested more than {_MAX_DEPTH} levels deep, or contains itself")


def _check_name(owner: object, name: Any) -> None:
    if type(name) is not str or name.startswith("__"):
        raise MalformedPickleError(f"a {type(owner).__name__} has an attribute {str(name)[:50]!r}")
