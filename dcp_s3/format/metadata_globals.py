"""What DCP's metadata may be made of: a constructor for each global that its pickles name."""

from __future__ import annotations

import pathlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from enum import Enum
from typing import Any

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

from dcp_s3.format._torch import MEMORY_FORMAT_ENCODING, StorageInfo, StoragePrefix
from dcp_s3.format.unpickle import Constructor, Limits, MalformedPickleError, UnsafeGlobalError

_DCP = "torch.distributed.checkpoint."
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
# Where torch 2.1 and 2.2 had the properties of a tensor; the classes of this name that later releases have are others.
_TORCH_2_1 = "torch.distributed._shard.sharded_tensor.metadata"
# S3's keys have 1024 bytes, local paths 4096.
_MAX_PATH = 4096
_MAX_SLICE_INT = 2**63

_CLASSES: dict[tuple[str, str], type] = {
    **{(_DCP + "metadata", cls.__name__): cls for cls in (
        BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties,
        TensorStorageMetadata,
    )},
    (_TORCH_2_1, "TensorProperties"): TensorProperties,
    (_DCP + "filesystem", "_StorageInfo"): StorageInfo,
    (_DCP + "filesystem", "_StoragePrefix"): StoragePrefix,
    # The plans of all ranks, which Megatron-Core keeps in ``Metadata.all_local_plans``.
    **{(_DCP + "planner", cls.__name__): cls for cls in (BytesIOWriteData, SavePlan, TensorWriteData, WriteItem)},
    # What it called its own subclasses of torch's, up to 0.15; it has empty classes of these names now.
    (_MEGATRON, "MCoreSavePlan"): SavePlan,
    (_MEGATRON, "MCoreMetadata"): Metadata,
}  # fmt: skip
_ENUMS: dict[str, type[Enum]] = {
    f"{_DCP}metadata._MEM_FORMAT_ENCODING": MEMORY_FORMAT_ENCODING,
    f"{_TORCH_2_1}.MEM_FORMAT_ENCODING": MEMORY_FORMAT_ENCODING,
    f"{_DCP}planner.WriteItemType": WriteItemType,
}
# As the factory of a defaultdict; called without arguments by some picklers.
_FACTORIES: dict[str, type] = {
    f"builtins.{cls.__name__}": cls for cls in (bool, dict, float, int, list, str, tuple)
}  # fmt: skip
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_MEMORY_FORMATS = {
    str(value): value
    for value in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
}


def find_global(module: str, name: str) -> Any:
    """What stands for a global in a pickle of metadata.

    Raises:
        UnsafeGlobalError: metadata never needs it.
    """
    found = CONSTRUCTORS.get((module, name)) or CONSTRUCTORS.get(_RENAMED.get((module, name), ("", "")))
    if found is not None:
        return found
    if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
        return vars(torch)[name]
    full_name = f"{module}.{name}"
    # torch gives them no module of their own; pickle finds the first that has them.
    if module.partition(".")[0] == "torch" and "torch." + name.rpartition(".")[2] in _MEMORY_FORMATS:
        return _MEMORY_FORMATS["torch." + name.rpartition(".")[2]]
    raise UnsafeGlobalError(full_name if len(full_name) <= 200 else full_name[:200] + "...")


def build_of(cls: type) -> Callable[[Any, Any], None] | None:
    """How the state of an instance of ``cls`` is set; None if it has none."""
    return _BUILDS.get(cls)


# --- state ----------------------------------------------------------------------------------------


def _set_attributes(instance: Any, state: Any) -> None:
    if type(state) is not dict or not all(type(key) is str for key in state):
        raise MalformedPickleError(f"the state of a {type(instance).__name__} is a {type(state).__name__}")
    vars(instance).update(state)


def _set_properties(instance: TensorProperties, state: Any) -> None:
    kinds = (torch.dtype, torch.layout, bool, MEMORY_FORMAT_ENCODING, bool)
    if type(state) is not tuple or len(state) != len(kinds) or not all(map(isinstance, state, kinds)):
        raise MalformedPickleError("the properties of a tensor are not dtype, layout, flags and memory format")
    instance.__setstate__(state)  # type: ignore[no-untyped-call]


_BUILDS: dict[type, Callable[[Any, Any], None]] = {
    **dict.fromkeys(_CLASSES.values(), _set_attributes),
    OrderedDict: _set_attributes,
    TensorProperties: _set_properties,
}


# --- calls ----------------------------------------------------------------------------------------


def _expect(condition: bool, what: str) -> None:
    if not condition:
        raise MalformedPickleError(f"{what} is made from other arguments than pickles have")


def _make_size(arguments: tuple[Any, ...], limits: Limits) -> torch.Size:
    _expect(len(arguments) == 1 and type(arguments[0]) in (tuple, list), "torch.Size")
    limits.spend(len(arguments[0]))
    _expect(all(type(item) is int for item in arguments[0]), "torch.Size")
    return torch.Size(arguments[0])


def _make_device(arguments: tuple[Any, ...], limits: Limits) -> torch.device:
    _expect(1 <= len(arguments) <= 2 and type(arguments[0]) is str and len(arguments[0]) < 100, "torch.device")
    _expect(all(type(index) is int for index in arguments[1:]), "torch.device")
    return torch.device(*arguments)


def _make_layout(arguments: tuple[Any, ...], limits: Limits) -> torch.layout:
    _expect(len(arguments) == 1 and type(arguments[0]) is str, "torch.layout")
    return _LAYOUTS[arguments[0]]


def _make_path(cls: type[pathlib.PurePath]) -> Callable[[tuple[Any, ...], Limits], pathlib.PurePath]:
    def make(arguments: tuple[Any, ...], limits: Limits) -> pathlib.PurePath:
        _expect(all(type(part) is str for part in arguments), "a path")
        _expect(sum(len(part) + 1 for part in arguments) <= _MAX_PATH, "a path")
        return cls(*arguments)

    return make


def _make_ordered_dict(arguments: tuple[Any, ...], limits: Limits) -> OrderedDict[Any, Any]:
    _expect(arguments == (), "OrderedDict")
    return OrderedDict()


def _make_default_dict(arguments: tuple[Any, ...], limits: Limits) -> defaultdict[Any, Any]:
    _expect(len(arguments) <= 1, "defaultdict")
    factory = arguments[0] if arguments else None
    if factory is None:
        return defaultdict(None)
    _expect(isinstance(factory, Constructor) and factory.name in (*_FACTORIES, "builtins.set"), "defaultdict")
    return defaultdict(_FACTORIES.get(factory.name, set))


def _make_set(cls: type) -> Callable[[tuple[Any, ...], Limits], Any]:
    def make(arguments: tuple[Any, ...], limits: Limits) -> Any:
        _expect(len(arguments) <= 1 and all(type(items) is list for items in arguments), cls.__name__)
        for items in arguments:
            limits.spend(len(items))
            for item in items:
                limits.check_key(item)
        return cls(*arguments)

    return make


def _make_empty(cls: type) -> Callable[[tuple[Any, ...], Limits], Any]:
    def make(arguments: tuple[Any, ...], limits: Limits) -> Any:
        _expect(arguments == (), cls.__name__)
        return cls()

    return make


def _make_bytes(arguments: tuple[Any, ...], limits: Limits) -> bytes:
    """Protocol 2 has no opcode for bytes: they are a text in Latin-1."""
    _expect(len(arguments) == 2 and type(arguments[0]) is str and arguments[1] in ("latin1", "latin-1"), "bytes")
    limits.spend(len(arguments[0]))
    return str(arguments[0]).encode("latin-1")


def _make_bytearray(arguments: tuple[Any, ...], limits: Limits) -> bytearray:
    if len(arguments) == 2:
        return bytearray(_make_bytes(arguments, limits))
    _expect(len(arguments) == 0 or (len(arguments) == 1 and type(arguments[0]) is bytes), "bytearray")
    limits.spend(sum(map(len, arguments)))
    return bytearray(*arguments)


def _make_complex(arguments: tuple[Any, ...], limits: Limits) -> complex:
    _expect(len(arguments) == 2 and all(type(part) is float for part in arguments), "complex")
    return complex(*arguments)


def _make_interval(cls: type) -> Callable[[tuple[Any, ...], Limits], Any]:
    """A range or a slice."""

    def make(arguments: tuple[Any, ...], limits: Limits) -> Any:
        _expect(len(arguments) == 3, cls.__name__)
        for bound in arguments:
            _expect(bound is None or (type(bound) is int and abs(bound) < _MAX_SLICE_INT), cls.__name__)
        return cls(*arguments)

    return make


def _make_instance(cls: type) -> Callable[[tuple[Any, ...]], Any]:
    def make(arguments: tuple[Any, ...]) -> Any:
        _expect(arguments == (), cls.__name__)
        return object.__new__(cls)

    return make


def _make_member(cls: type[Enum]) -> Callable[[tuple[Any, ...], Limits], Enum]:
    def make(arguments: tuple[Any, ...], limits: Limits) -> Enum:
        _expect(len(arguments) == 1 and type(arguments[0]) is int, cls.__name__)
        return cls(arguments[0])

    return make


def _get_member(arguments: tuple[Any, ...], limits: Limits) -> Enum:
    """The first releases of Python 3.11 pickle a member of an enumeration as ``getattr`` of its class."""
    of = arguments[0].name if arguments and isinstance(arguments[0], Constructor) else ""
    if len(arguments) != 2 or of not in _ENUMS or type(arguments[1]) is not str:
        raise UnsafeGlobalError("builtins.getattr")
    return _ENUMS[of][arguments[1]]


_CALLS: dict[tuple[str, str], Callable[[tuple[Any, ...], Limits], Any]] = {
    ("torch", "Size"): _make_size,
    ("torch", "device"): _make_device,
    ("torch.serialization", "_get_layout"): _make_layout,
    ("collections", "OrderedDict"): _make_ordered_dict,
    ("collections", "defaultdict"): _make_default_dict,
    ("_codecs", "encode"): _make_bytes,
    ("builtins", "bytes"): _make_empty(bytes),
    ("builtins", "bytearray"): _make_bytearray,
    ("builtins", "complex"): _make_complex,
    ("builtins", "frozenset"): _make_set(frozenset),
    ("builtins", "set"): _make_set(set),
    ("builtins", "range"): _make_interval(range),
    ("builtins", "slice"): _make_interval(slice),
    ("builtins", "getattr"): _get_member,
    # StorageMeta.checkpoint_id of torch's FileSystemWriter. Paths of another system stay what they are.
    **{(module, name): _make_path(cls) for module in ("pathlib", "pathlib._local") for name, cls in (
        ("PosixPath", pathlib.Path if isinstance(pathlib.Path(), pathlib.PosixPath) else pathlib.PurePosixPath),
        ("WindowsPath", pathlib.PureWindowsPath),
        ("PurePosixPath", pathlib.PurePosixPath),
        ("PureWindowsPath", pathlib.PureWindowsPath),
    )},
    **{("builtins", cls.__name__): _make_empty(cls) for cls in _FACTORIES.values()},
    **{(full.rpartition(".")[0], full.rpartition(".")[2]): _make_member(cls) for full, cls in _ENUMS.items()},
}  # fmt: skip

CONSTRUCTORS: dict[tuple[str, str], Constructor] = {
    **{(module, name): Constructor(f"{module}.{name}", call=call) for (module, name), call in _CALLS.items()},
    **{
        (module, name): Constructor(f"{module}.{name}", new=_make_instance(cls))
        for (module, name), cls in _CLASSES.items()
    },
}
_RENAMED = {  # by protocol 2
    **{("__builtin__", name): (module, name) for module, name in CONSTRUCTORS if module == "builtins"},
    ("__builtin__", "unicode"): ("builtins", "str"),
    ("__builtin__", "xrange"): ("builtins", "range"),
}
