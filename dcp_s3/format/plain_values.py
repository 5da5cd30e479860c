"""Plain values of Python and torch: the stand-ins for the globals by which pickles name them.

Each stand-in makes its value from checked arguments, and runs no code that a pickle chooses.
"""

from __future__ import annotations

import pathlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from dcp_s3.format.unpickling import Allowed, Deferred, MalformedPickleError, UnknownToTorchError

# S3's keys have at most 1024 bytes, local paths 4096.
_MAX_PATH = 4096
_MAX_SLICE_INT = 2**63

# What a defaultdict may call. Some picklers also call them without arguments.
_FACTORIES: dict[str, type] = {
    f"builtins.{cls.__name__}": cls for cls in (bool, dict, float, int, list, str, tuple)
}  # fmt: skip
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def expect(condition: bool, what: str) -> None:
    """Raises `MalformedPickleError` unless the arguments of ``what`` are as picklers write them."""
    if not condition:
        raise MalformedPickleError(f"{what} is made from other arguments than pickles have")


class PlainDefaultDict(dict[Any, Any]):
    """Stands for a defaultdict, whose factory could be set to anything."""

    __slots__ = ("factory",)

    factory: type | None

    def __setstate__(self, state: Any) -> None:
        raise MalformedPickleError("the state of a defaultdict is set")


def _make_device(*arguments: Any) -> torch.device:
    expect(1 <= len(arguments) <= 2 and type(arguments[0]) is str and len(arguments[0]) < 100, "torch.device")
    expect(all(type(index) is int for index in arguments[1:]), "torch.device")
    return torch.device(*arguments)


def _make_layout(*arguments: Any) -> torch.layout:
    expect(len(arguments) == 1 and type(arguments[0]) is str, "torch.layout")
    if arguments[0] not in _LAYOUTS:
        raise UnknownToTorchError(arguments[0])
    return _LAYOUTS[arguments[0]]


def _make_path(cls: type[pathlib.PurePath]) -> Callable[..., Deferred]:
    def make(*arguments: Any) -> Deferred:
        expect(all(type(part) is str for part in arguments), "a path")
        expect(sum(len(part) + 1 for part in arguments) <= _MAX_PATH, "a path")
        return Deferred(cls, arguments)

    return make


def _make_ordered_dict(*arguments: Any) -> OrderedDict[Any, Any]:
    expect(arguments == (), "OrderedDict")
    return OrderedDict()


def _make_default_dict(*arguments: Any) -> PlainDefaultDict:
    expect(len(arguments) <= 1, "defaultdict")
    factory = arguments[0] if arguments else None
    made = PlainDefaultDict()
    made.factory = None
    if factory is not None:
        expect(isinstance(factory, Allowed) and factory.name in (*_FACTORIES, "builtins.set"), "defaultdict")
        made.factory = _FACTORIES.get(factory.name, set)
    return made


def _make_set(cls: type) -> Callable[..., Any]:
    def make(*arguments: Any) -> Any:
        expect(len(arguments) <= 1 and all(type(items) is list for items in arguments), cls.__name__)
        return cls(*arguments)

    return make


def _make_empty(cls: type) -> Callable[..., Any]:
    def make(*arguments: Any) -> Any:
        expect(arguments == (), cls.__name__)
        return cls()

    return make


def _make_bytes(*arguments: Any) -> bytes:
    """Make bytes. Protocol 2 has no opcode for them: they are a text in Latin-1."""
    expect(len(arguments) == 2 and type(arguments[0]) is str and arguments[1] in ("latin1", "latin-1"), "bytes")
    return str(arguments[0]).encode("latin-1")


def _make_bytearray(*arguments: Any) -> bytearray:
    if len(arguments) == 2:
        return bytearray(_make_bytes(*arguments))
    expect(len(arguments) == 0 or (len(arguments) == 1 and type(arguments[0]) is bytes), "bytearray")
    return bytearray(*arguments)


def _make_complex(*arguments: Any) -> complex:
    expect(len(arguments) == 2 and all(type(part) is float for part in arguments), "complex")
    return complex(*arguments)


def _make_interval(cls: type) -> Callable[..., Deferred]:
    """A range or a slice: with one, a pickle could double a list again and again."""

    def make(*arguments: Any) -> Deferred:
        expect(len(arguments) == 3, cls.__name__)
        for bound in arguments:
            expect(bound is None or (type(bound) is int and abs(bound) < _MAX_SLICE_INT), cls.__name__)
        return Deferred(cls, arguments)

    return make


_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
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
    # StorageMeta.checkpoint_id of torch's FileSystemWriter. Paths of another system stay what they are.
    **{(module, name): _make_path(cls) for module in ("pathlib", "pathlib._local") for name, cls in (
        ("PosixPath", pathlib.Path if isinstance(pathlib.Path(), pathlib.PosixPath) else pathlib.PurePosixPath),
        ("WindowsPath", pathlib.PureWindowsPath),
        ("PurePosixPath", pathlib.PurePosixPath),
        ("PureWindowsPath", pathlib.PureWindowsPath),
    )},
    **{("builtins", cls.__name__): _make_empty(cls) for cls in _FACTORIES.values()},
}  # fmt: skip

PLAIN: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,  # checks its arguments, and has no attributes to set
    **{(module, name): Allowed(f"{module}.{name}", call) for (module, name), call in _CALLS.items()},
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
