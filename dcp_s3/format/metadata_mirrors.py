"""Mirrors: stand-ins for DCP's classes while its metadata is unpickled. They become torch's afterwards.

A pickle may set attributes of the classes that it names, and call what they define. A `Mirror` has nothing to call and
cannot be changed. Its instances have whatever attributes a pickle gives them, and are compared by identity. Once they
have been checked, `become_torch_s` turns each into an instance of torch's class, in place.
"""

from __future__ import annotations

import functools
import sys
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

from dcp_s3.format.plain_values import find_plain
from dcp_s3.format.unpickling import (
    Allowed,
    Deferred,
    MalformedPickleError,
    Sealed,
    UnknownToTorchError,
    UnsafeGlobalError,
)
from dcp_s3.torch_private import MEMORY_FORMAT_ENCODING, StorageInfo, StoragePrefix

_DCP = "torch.distributed.checkpoint."
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
# Where torch 2.1 and 2.2 had the properties of a tensor. Later releases have other classes of this name.
_TORCH_2_1 = "torch.distributed._shard.sharded_tensor.metadata"


class Mirror(metaclass=Sealed):
    """An instance of a class of DCP, as a pickle describes it."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Called by Python's unpickler for slots. It puts other attributes into ``__dict__``."""
        raise MalformedPickleError(f"the slots of a {type(self).__name__} are set")

    def settled(self) -> None:
        """Called when its attributes have become what they stand for."""


class PropertiesMirror(Mirror):
    """The mirror of `TensorProperties`, whose state is a tuple."""

    def __setstate__(self, state: Any) -> None:
        if type(state) is not tuple or len(state) < _FIELDS or type(state[3]) is not Deferred:
            raise MalformedPickleError("the state of a TensorProperties is no tuple of properties")
        if all(
            type(value) is tuple and {int}.issuperset(map(type, value))
            for value in state[_FIELDS:]
            if value is not None
        ):
            self.__dict__.update(_read_properties(state))
        else:
            self.__dict__["state"] = state

    def settled(self) -> None:
        """See `Mirror`."""
        if "state" in self.__dict__:
            self.__dict__.update(_read_properties.__wrapped__(self.__dict__.pop("state")))


_FIELDS = 5  # what all versions of torch write; 2.15 adds strides
_KNOWN_FIELDS = len(cast(Any, TensorProperties()).__getstate__())


@functools.lru_cache(maxsize=256)
def _read_properties(state: Any) -> dict[str, Any]:
    """The attributes that torch itself makes of a state, of which it gets what it knows. Nobody changes them."""
    dtype, layout, requires_grad, encoding, pin_memory, *added = state
    memory_format = encoding.make(*encoding.arguments) if type(encoding) is Deferred else encoding
    right = isinstance(dtype, torch.dtype) and isinstance(layout, torch.layout)
    right = right and isinstance(memory_format, MEMORY_FORMAT_ENCODING)
    if not right or type(requires_grad) is not bool or type(pin_memory) is not bool:
        raise MalformedPickleError("the properties of a tensor are not dtype, layout, flags and memory format")
    properties: Any = TensorProperties.__new__(TensorProperties)
    known = (dtype, layout, requires_grad, memory_format, pin_memory, *added)[:_KNOWN_FIELDS]
    try:
        properties.__setstate__(known)
    except Exception:  # noqa: BLE001 - whatever a later torch raises
        raise UnknownToTorchError(f"a TensorProperties of {len(state)} values") from None
    return dict(vars(properties))


def _mirror(cls: type) -> type[Mirror]:
    made: Any = Sealed(cls.__name__, (PropertiesMirror if cls is TensorProperties else Mirror,), {})
    mirror: type[Mirror] = made
    return mirror


_CLASSES = (
    BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta, TensorProperties,
    TensorStorageMetadata, StorageInfo, StoragePrefix,
    # The plans of all ranks, which Megatron-Core keeps in ``Metadata.all_local_plans``.
    BytesIOWriteData, SavePlan, TensorWriteData, WriteItem,
)  # fmt: skip
MIRRORS: dict[type, type[Mirror]] = {cls: _mirror(cls) for cls in _CLASSES}
_MIRRORED: dict[type, type] = {mirror: cls for cls, mirror in MIRRORS.items()}


def become_torch_s(mirror: Mirror) -> None:
    """Make ``mirror`` an instance of torch's class.

    Raises:
        MalformedPickleError: it lacks an attribute of that class.
    """
    cls = _MIRRORED[type(mirror)]
    missing = _required(cls) - vars(mirror).keys()
    if missing:
        raise MalformedPickleError(f"a {cls.__name__} has no {min(missing)}")
    object.__setattr__(mirror, "__class__", cls)


@functools.cache
def _required(cls: type) -> frozenset[str]:
    """Names of the attributes that an instance itself must have."""
    return frozenset(field.name for field in fields(cls) if field.default is MISSING)


# --- globals --------------------------------------------------------------------------------------

_ENUMS: dict[str, type[Enum]] = {
    f"{_DCP}metadata._MEM_FORMAT_ENCODING": MEMORY_FORMAT_ENCODING,
    f"{_TORCH_2_1}.MEM_FORMAT_ENCODING": MEMORY_FORMAT_ENCODING,
    f"{_DCP}planner.WriteItemType": WriteItemType,
}
_MEMORY_FORMATS = {
    str(value): value
    for value in (torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format)
}


def _make_member(name: str) -> Allowed:
    """A stand-in for a member of an enumeration. It must not be a member itself: those have attributes."""

    def make(*arguments: Any) -> Deferred:
        if len(arguments) != 1 or type(arguments[0]) is not int:
            raise MalformedPickleError(f"{name} is made from other arguments than pickles have")
        if arguments[0] not in _ENUMS[name]._value2member_map_:
            raise UnknownToTorchError(f"{name}({arguments[0]})")
        return Deferred(_ENUMS[name], arguments)

    return Allowed(name, make)


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
    **{(name.rpartition(".")[0], name.rpartition(".")[2]): _make_member(name) for name in _ENUMS},
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
