"""The allow-list: each global that a pickle of metadata or of an item may name, and Python's unpickler held to it.

Looking up globals in a list is not enough: a pickle may also set attributes of a class or function that it named, and
so change it for the whole process. So each global has a stand-in without attributes to set: an `Allowed`, a class of
the kind `Sealed`, or a class or constant of C. Only their code runs. Instances of torch's classes are `Mirror`s, with
whatever attributes a pickle gives them, compared by identity. They become what they stand for once all is checked.

`PLAIN` are plain values, which metadata and items may hold; `METADATA` has DCP's classes, too. Tensors are in
`archive`, and what else items may hold is in `safe_items`.

A hostile pickle may still take much time and memory. A very deeply nested tuple as a key even ends the process, but
whoever can write that can also delete the checkpoint.
"""

from __future__ import annotations

import copyreg
import functools
import io
import pathlib
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_s3.torch_private import StorageInfo


class MalformedPickleError(Exception):
    """A pickle is truncated, damaged, not a pickle at all, or not as picklers write it."""


class UnsafeGlobalError(Exception):
    """A pickle names a global that is not allowed, or that this torch does not have. ``args[0]`` is its name."""

    def __init__(self, name: str) -> None:
        super().__init__(name if len(name) <= 200 else name[:200] + "...")


def expect(condition: bool, what: str) -> None:
    """Raises `MalformedPickleError` unless the arguments of ``what`` are as picklers write them."""
    if not condition:
        raise MalformedPickleError(f"{what} is made from other arguments than pickles have")


# --- stand-ins ------------------------------------------------------------------------------------


class Sealed(type):
    """Metaclass of classes that a pickle may make instances of, but not change."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise MalformedPickleError(f"an attribute of {cls.__name__} itself is set")


class Value(metaclass=Sealed):
    """Stands for a value without state. It cannot be a key."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __setstate__(self, state: Any) -> None:
        # Called by Python's unpickler to set attributes.
        raise MalformedPickleError(f"the state of {getattr(self, 'name', type(self).__name__)} is set")


class Allowed(Value):
    """Stands for a function, or for a class that is called; without ``call``, for one that is only named.

    Args:
        signatures: the types of arguments that picklers write, if ``call`` does not check them itself.
    """

    __slots__ = ("_call", "_signatures", "name")

    def __init__(self, name: str, call: Callable[..., Any] | None = None, *signatures: tuple[type, ...]) -> None:
        self.name, self._call, self._signatures = name, call, frozenset(signatures)

    def __call__(self, *arguments: Any) -> Any:
        if self._call is None:
            raise MalformedPickleError(f"{self.name} is called")
        expect(not self._signatures or tuple(map(type, arguments)) in self._signatures, self.name)
        return self._call(*arguments)


class Mirror(metaclass=Sealed):
    """Stands for an instance of a class, as a pickle describes it."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Called by Python's unpickler for slots. It puts other attributes into ``__dict__``.
        raise MalformedPickleError(f"the slots of a {type(self).__name__} are set")


class Opaque(metaclass=Sealed):
    """Stands for an instance of any class, made from any arguments, with any state."""

    __slots__ = ()

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


def table(*rules: tuple[Any, ...], prefix: str = "") -> dict[str, Any]:
    """Stand-ins by name, from names, calls and signatures (see `Allowed`)."""
    return {prefix + name: Allowed(prefix + name, *rule) for name, *rule in rules}


# --- the unpickler --------------------------------------------------------------------------------


class _Unpickler(pickle.Unpickler):
    table: Mapping[str, Any]
    find_other: Callable[[str, str], Any] | None
    find_outside: Callable[[Any], Any] | None

    def find_class(self, module: str, name: str) -> Any:
        if module == "__builtin__":  # protocol 2 has Python 2's names
            module, name = "builtins", _PYTHON_2.get(name, name)
        # No name has a dot: it would be one of another module.
        found = self.table.get(f"{module}.{name}") if "." not in name else None
        if found is None and self.find_other is not None:
            found = self.find_other(module, name)
        if found is None:
            raise UnsafeGlobalError(f"{module}.{name}")
        return found

    def persistent_load(self, found: Any) -> Any:
        if self.find_outside is None:
            raise MalformedPickleError("it refers to something outside of it")
        return self.find_outside(found)


_PYTHON_2 = {"unicode": "str", "xrange": "range", "long": "int"}


def unpickle(
    stream: io.BytesIO,
    table: Mapping[str, Any],
    *,
    find_other: Callable[[str, str], Any] | None = None,
    find_outside: Callable[[Any], Any] | None = None,
    protocol: int | None = None,
    proven: bool = False,
) -> Any:
    """The value of the pickle at the stream's position, which is after the pickle afterwards.

    Args:
        table: stand-ins for globals, by name.
        find_other: the stand-in for a global by its module and name that is not in the table; None for none.
        find_outside: what makes values of persistent ids.
        protocol: the only one that it may have; None: any.
        proven: whether a checksum says that it is not damaged.

    Raises:
        MalformedPickleError: it cannot be read.
        UnsafeGlobalError: it names another global.
    """
    # Without `peek`, Python reads a pickle without frames opcode by opcode, at a microsecond each.
    reader = io.BufferedReader(stream)
    try:
        # The extension registry's cache bypasses `find_class`, and would keep what it finds. It is nearly always empty.
        if not proven or protocol is not None or vars(copyreg)["_inverted_registry"]:
            _check_opcodes(stream.getvalue(), stream.tell(), protocol)
        unpickler = _Unpickler(reader, encoding="utf-8")  # for texts of protocol 1, as torch.load does
        unpickler.table, unpickler.find_other, unpickler.find_outside = table, find_other, find_outside
        value = unpickler.load()
        end = reader.tell()
    except (MalformedPickleError, UnsafeGlobalError):
        raise
    except Exception as error:  # whatever constructors and hashes raise, and MemoryError
        raise MalformedPickleError(f"{type(error).__name__}: {str(error)[:200]}") from error
    finally:
        reader.detach()  # or it would close the stream when it is freed
    stream.seek(end)
    return value


# Bytes of an opcode's argument, and of the lengths before arguments that have one.
_ARGUMENTS = [0] * 256
for _opcode in pickletools.opcodes:
    _ARGUMENTS[ord(_opcode.code)] = 0 if _opcode.arg is None else _opcode.arg.n
_WIDTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4, pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}  # fmt: skip
_PUT, _LONG_BINPUT, _STOP, _PROTO = b"pr.\x80"
_EXTENSIONS = b"\x82\x83\x84"
_LOOKED_AT = bytes((_PUT, _LONG_BINPUT, _PROTO)) + _EXTENSIONS


def _check_opcodes(data: bytes, position: int, protocol: int | None) -> None:
    """Refuse extension opcodes, another protocol, and a damaged pickle that numbers what it remembers beyond its size:
    Python would make room for all of them. Reads it without running it: about 60 ns for each opcode."""
    end = len(data)
    while position < end and (opcode := data[position]) != _STOP:
        position += 1
        start, length = position, _ARGUMENTS[opcode]
        if length >= 0:
            position += length
        elif length == pickletools.UP_TO_NEWLINE:
            for _ in range(2 if opcode in b"ci" else 1):
                position = data.find(b"\n", position) + 1 or end
        else:
            position += _WIDTHS[length]
            position += int.from_bytes(data[start:position], "little")
        if opcode not in _LOOKED_AT:
            continue
        argument = data[start:position]
        if opcode in _EXTENSIONS:
            raise MalformedPickleError("it refers to Python's extension registry")
        if opcode == _PROTO and protocol is not None and argument != bytes((protocol,)):
            raise MalformedPickleError(f"its protocol is not {protocol}")
        if (opcode == _LONG_BINPUT and int.from_bytes(argument, "little") > end) or (
            opcode == _PUT and len(argument.strip()) > len(str(end))
        ):
            raise MalformedPickleError("it numbers what it remembers beyond its size")


# --- plain values ---------------------------------------------------------------------------------

LEAVES = frozenset((
    str, int, float, bool, type(None), bytes, complex, bytearray, torch.Size, torch.dtype, torch.layout, torch.device,
    torch.memory_format,
))  # fmt: skip
"""Types of values that have no others in them."""

_MAX_PATH = 4096  # S3's keys have at most 1024 bytes, local paths 4096
# What a defaultdict may call. Some picklers also call them without arguments.
_FACTORIES = {f"builtins.{cls.__name__}": cls for cls in (bool, dict, float, int, list, set, str, tuple)}


def _make_default_dict(factory: Allowed | None = None) -> dict[Any, Any]:
    # Without its factory: whoever has it in a pickle could set it to anything.
    expect(factory is None or factory.name in _FACTORIES, "collections.defaultdict")
    return {}


def _known(values: Mapping[Any, Any], value: Any, name: str = "{}") -> Any:
    if value not in values:  # of a later torch
        raise UnsafeGlobalError(name.format(value))
    return values[value]


def _encode(characters: str, encoding: str) -> bytes:
    # Protocol 2 has no opcode for bytes: they are a text in Latin-1.
    expect(encoding in ("latin1", "latin-1"), "_codecs.encode")
    return characters.encode("latin-1")


def _make_path(kind: type[pathlib.PurePath], *parts: Any) -> str:
    # A path has attributes to set.
    expect(all(type(part) is str for part in parts) and sum(len(part) + 1 for part in parts) <= _MAX_PATH, "a path")
    return str(kind(*parts))


_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_PATHS = {
    "PosixPath": pathlib.PurePosixPath, "PurePosixPath": pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath, "PureWindowsPath": pathlib.PureWindowsPath,
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "torch.Size": torch.Size,  # checks its arguments, and has no attributes to set
    **{f"torch.{name}": value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **table(
        ("torch.device", torch.device, (str,), (str, int)),
        ("torch.serialization._get_layout", functools.partial(_known, _LAYOUTS), (str,)),
        ("collections.OrderedDict", OrderedDict, ()),
        ("collections.defaultdict", _make_default_dict, (), (type(None),), (Allowed,)),
        ("_codecs.encode", _encode, (str, str)),
        ("builtins.bytes", bytes, ()),
        ("builtins.bytearray", lambda *data: bytearray(_encode(*data) if len(data) > 1 else b"".join(data)),
         (), (bytes,), (str, str)),
        ("builtins.complex", complex, (float, float)),
        ("builtins.frozenset", frozenset, (), (list,)),
        *((name, cls, ()) for name, cls in _FACTORIES.items()),
        ("builtins.set", set, (), (list,)),
        # StorageMeta.checkpoint_id of torch's FileSystemWriter is one.
        *((f"{module}.{name}", functools.partial(_make_path, kind))
          for module in ("pathlib", "pathlib._local") for name, kind in _PATHS.items()),
    ),
}  # fmt: skip
"""Stand-ins for the globals of plain values."""


# --- metadata: DCP's classes ----------------------------------------------------------------------

_FIELDS = 5  # of the state of a TensorProperties, in all versions of torch; 2.15 adds strides
_STATE = cast(Any, TensorProperties()).__getstate__()
_MEMORY_FORMAT: Any = type(_STATE[3])
"""torch's enumeration in the place of a memory format. A pickle gets the values of its members, which have attributes
to set."""


@functools.lru_cache(maxsize=256)
def make_properties(state: tuple[Any, ...]) -> TensorProperties:
    """The properties of a tensor, by torch's own ``__setstate__``, which gets what it knows. Nobody may change them.

    Args:
        state: dtype, layout, requires_grad, value of torch's enumeration of memory formats, pin_memory, and what later
            versions of torch add: plain values and tuples of them.

    Raises:
        MalformedPickleError: it is no such state.
        UnsafeGlobalError: it has values that this torch does not know.
    """
    kinds = tuple(map(type, state[:_FIELDS]))
    expect(kinds == (torch.dtype, torch.layout, bool, int, bool), "a TensorProperties")
    dtype, layout, requires_grad, memory_format, pin_memory, *added = state
    properties: Any = TensorProperties.__new__(TensorProperties)
    try:
        for value in added:
            if not LEAVES.issuperset(map(type, value if type(value) is tuple else (value,))):
                raise TypeError("values that are not plain")
        known = dtype, layout, requires_grad, _MEMORY_FORMAT(memory_format), pin_memory, *added
        properties.__setstate__(known[: len(_STATE)])
    except Exception:  # noqa: BLE001 - whatever a later torch raises
        raise UnsafeGlobalError(f"a TensorProperties of {len(state)} values") from None
    return cast(TensorProperties, properties)


def _set_properties(mirror: Mirror, state: Any) -> None:
    expect(type(state) is tuple, "a TensorProperties")
    vars(mirror).update(vars(make_properties(state)))


def _get_member(*arguments: Any) -> Any:
    """The first releases of Python 3.11 pickle a member of an enumeration as ``getattr`` of its class."""
    expect(len(arguments) == 2 and type(arguments[1]) is str, "builtins.getattr")
    of, name = arguments
    if of is Opaque:
        return Opaque()
    if not isinstance(of, Allowed) or of.name not in _ENCODINGS or name not in _MEMORY_FORMAT.__members__:
        raise UnsafeGlobalError("builtins.getattr")
    return _MEMORY_FORMAT[name].value


_DCP = "torch.distributed.checkpoint."
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch."
# Where torch 2.1 and 2.2 had the properties of a tensor. Later releases have other classes of this name.
_TORCH_2_1 = "torch.distributed._shard.sharded_tensor.metadata."
_ENCODINGS = (f"{_DCP}metadata._MEM_FORMAT_ENCODING", f"{_TORCH_2_1}MEM_FORMAT_ENCODING")
CHECKED: dict[type, frozenset[str]] = {
    dcp.Metadata: frozenset({"state_dict_metadata", "storage_data", "storage_meta"}),
    dcp.TensorStorageMetadata: frozenset({"properties", "size", "chunks"}),
    dcp.ChunkStorageMetadata: frozenset({"offsets", "sizes"}),
    dcp.MetadataIndex: frozenset({"fqn", "offset", "index"}),
    TensorProperties: frozenset({"dtype", "layout", "requires_grad", "memory_format", "pin_memory", "strides"}),
    dcp.BytesStorageMetadata: frozenset(),
    dcp.StorageMeta: frozenset(),
    StorageInfo: frozenset({
        "relative_path", "offset", "length", "transform_descriptors",
        "raw_offset", "crc64nvme", "crc64nvme_block", "crc64nvme_blocks",  # see format/blocks.py
    }),
}  # fmt: skip
"""DCP's classes, and their attributes that `metadata` checks, all of plain types. Others must be plain values."""
MIRRORS: dict[type, Any] = {
    cls: Sealed(cls.__name__, (Mirror,), {"__setstate__": _set_properties} if cls is TensorProperties else {})
    for cls in CHECKED
}
METADATA: dict[str, Any] = {
    **PLAIN,
    **{f"{cls.__module__}.{cls.__name__}": mirror for cls, mirror in MIRRORS.items()},
    _TORCH_2_1 + "TensorProperties": MIRRORS[TensorProperties],
    # Up to 0.15, Megatron's name of its subclass of torch's; now its class of this name is empty.
    _MEGATRON + "MCoreMetadata": MIRRORS[dcp.Metadata],
    # The plans of all ranks, which Megatron-Core keeps in ``Metadata.all_local_plans``, to plan its next save faster.
    # They are not kept.
    **{f"{_DCP}planner.{name}": Opaque
       for name in ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")},
    _DCP + "filesystem._StoragePrefix": Opaque,
    _MEGATRON + "MCoreSavePlan": Opaque,
    **table(
        *((enum, functools.partial(_known, {each.value: each.value for each in _MEMORY_FORMAT}, name=f"{enum}({{}})"),
           (int,)) for enum in _ENCODINGS),
        ("builtins.getattr", _get_member),
    ),
}  # fmt: skip
"""Stand-ins for the globals of metadata."""
_MEMORY_FORMATS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.memory_format)}


def find_memory_format(module: str, name: str) -> torch.memory_format | None:
    """The memory format of this name. torch gives them no module; pickle names the first one that has ``torch``."""
    return _MEMORY_FORMATS.get(f"torch.{name.rpartition('.')[2]}") if module.partition(".")[0] == "torch" else None
