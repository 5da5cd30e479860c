"""What DCP's metadata may be made of: a constructor for each global that its pickles name, beyond plain values."""

from __future__ import annotations

from collections import OrderedDict
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

from dcp_s3.format.plain_globals import PLAIN, as_named_today, expect
from dcp_s3.format.unpickle import Constructor, Limits, MalformedPickleError, UnsafeGlobalError
from dcp_s3.torch_private import MEMORY_FORMAT_ENCODING, StorageInfo, StoragePrefix

_DCP = "torch.distributed.checkpoint."
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
# Where torch 2.1 and 2.2 had the properties of a tensor; the classes of this name that later releases have are others.
_TORCH_2_1 = "torch.distributed._shard.sharded_tensor.metadata"

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
_MEMORY_FORMATS = {
    str(value): value
    for value in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
}


def find_global(module: str, name: str) -> Any:
    """What stands for a global in a pickle of metadata.

    Raises:
        UnsafeGlobalError: metadata never needs it.
    """
    found = CONSTRUCTORS.get(as_named_today(module, name))
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


def _make_instance(cls: type) -> Callable[[tuple[Any, ...]], Any]:
    def make(arguments: tuple[Any, ...]) -> Any:
        expect(arguments == (), cls.__name__)
        return object.__new__(cls)

    return make


def _make_member(cls: type[Enum]) -> Callable[[tuple[Any, ...], Limits], Enum]:
    def make(arguments: tuple[Any, ...], limits: Limits) -> Enum:
        expect(len(arguments) == 1 and type(arguments[0]) is int, cls.__name__)
        return cls(arguments[0])

    return make


def _get_member(arguments: tuple[Any, ...], limits: Limits) -> Enum:
    """The first releases of Python 3.11 pickle a member of an enumeration as ``getattr`` of its class."""
    of = arguments[0].name if arguments and isinstance(arguments[0], Constructor) else ""
    if len(arguments) != 2 or of not in _ENUMS or type(arguments[1]) is not str:
        raise UnsafeGlobalError("builtins.getattr")
    return _ENUMS[of][arguments[1]]


_CALLS: dict[tuple[str, str], Callable[[tuple[Any, ...], Limits], Any]] = {
    ("builtins", "getattr"): _get_member,
    **{(full.rpartition(".")[0], full.rpartition(".")[2]): _make_member(cls) for full, cls in _ENUMS.items()},
}

CONSTRUCTORS: dict[tuple[str, str], Constructor] = {
    **PLAIN,
    **{(module, name): Constructor(f"{module}.{name}", call=call) for (module, name), call in _CALLS.items()},
    **{
        (module, name): Constructor(f"{module}.{name}", new=_make_instance(cls))
        for (module, name), cls in _CLASSES.items()
    },
}
