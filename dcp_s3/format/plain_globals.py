"""Values of Python's and torch's own: a constructor for each global by which pickles name them.

Each makes its value from checked arguments, runs no code that a pickle chooses, and copies no more than a pickle has
bytes.
"""

from __future__ import annotations

import pathlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from dcp_s3.format.unpickle import Constructor, Limits, MalformedPickleError

# S3's keys have 1024 bytes, local paths 4096.
_MAX_PATH = 4096
_MAX_SLICE_INT = 2**63

# As the factory of a defaultdict; called without arguments by some picklers.
_FACTORIES: dict[str, type] = {
    f"builtins.{cls.__name__}": cls for cls in (bool, dict, float, int, list, str, tuple)
}  # fmt: skip
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def expect(condition: bool, what: str) -> None:
    """Raises `MalformedPickleError` unless the arguments of ``what`` are such as picklers write."""
    if not condition:
        raise MalformedPickleError(f"{what} is made from other arguments than pickles have")


def _make_size(arguments: tuple[Any, ...], limits: Limits) -> torch.Size:
    expect(len(arguments) == 1 and type(arguments[0]) in (tuple, list), "torch.Size")
    limits.spend(len(arguments[0]))
    expect(all(type(item) is int for item in arguments[0]), "torch.Size")
    return torch.Size(arguments[0])


def _make_device(arguments: tuple[Any, ...], limits: Limits) -> torch.device:
    expect(1 <= len(arguments) <= 2 and type(arguments[0]) is str and len(arguments[0]) < 100, "torch.device")
    expect(all(type(index) is int for index in arguments[1:]), "torch.device")
    return torch.device(*arguments)


def _make_layout(arguments: tuple[Any, ...], limits: Limits) -> torch.layout:
    expect(len(arguments) == 1 and type(arguments[0]) is str, "torch.layout")
    return _LAYOUTS[arguments[0]]


def _make_path(cls: type[pathlib.PurePath]) -> Callable[[tuple[Any, ...], Limits], pathlib.PurePath]:
    def make(arguments: tuple[Any, ...], limits: Limits) -> pathlib.PurePath:
        expect(all(type(part) is str for part in arguments), "a path")
        expect(sum(len(part) + 1 for part in arguments) <= _MAX_PATH, "a path")
        return cls(*arguments)

    return make


def _make_ordered_dict(arguments: tuple[Any, ...], limits: Limits) -> OrderedDict[Any, Any]:
    expect(arguments == (), "OrderedDict")
    return OrderedDict()


def _make_default_dict(arguments: tuple[Any, ...], limits: Limits) -> defaultdict[Any, Any]:
    expect(len(arguments) <= 1, "defaultdict")
    factory = arguments[0] if arguments else None
    if factory is None:
        return defaultdict(None)
    expect(isinstance(factory, Constructor) and factory.name in (*_FACTORIES, "builtins.set"), "defaultdict")
    return defaultdict(_FACTORIES.get(factory.name, set))


def _make_set(cls: type) -> Callable[[tuple[Any, ...], Limits], Any]:
    def make(arguments: tuple[Any, ...], limits: Limits) -> Any:
        expect(len(arguments) <= 1 and all(type(items) is list for items in arguments), cls.__name__)
        for items in arguments:
            limits.spend(len(items))
            for item in items:
                limits.check_key(item)
        return cls(*arguments)

    return make


def _make_empty(cls: type) -> Callable[[tuple[Any, ...], Limits], Any]:
    def make(arguments: tuple[Any, ...], limits: Limits) -> Any:
        expect(arguments == (), cls.__name__)
        return cls()

    return make


def _make_bytes(arguments: tuple[Any, ...], limits: Limits) -> bytes:
    """Protocol 2 has no opcode for bytes: they are a text in Latin-1."""
    expect(len(arguments) == 2 and type(arguments[0]) is str and arguments[1] in ("latin1", "latin-1"), "bytes")
    limits.spend(len(arguments[0]))
    return str(arguments[0]).encode("latin-1")


def _make_bytearray(arguments: tuple[Any, ...], limits: Limits) -> bytearray:
    if len(arguments) == 2:
        return bytearray(_make_bytes(arguments, limits))
    expect(len(arguments) == 0 or (len(arguments) == 1 and type(arguments[0]) is bytes), "bytearray")
    limits.spend(sum(map(len, arguments)))
    return bytearray(*arguments)


def _make_complex(arguments: tuple[Any, ...], limits: Limits) -> complex:
    expect(len(arguments) == 2 and all(type(part) is float for part in arguments), "complex")
    return complex(*arguments)


def _make_interval(cls: type) -> Callable[[tuple[Any, ...], Limits], Any]:
    """A range or a slice."""

    def make(arguments: tuple[Any, ...], limits: Limits) -> Any:
        expect(len(arguments) == 3, cls.__name__)
        for bound in arguments:
            expect(bound is None or (type(bound) is int and abs(bound) < _MAX_SLICE_INT), cls.__name__)
        return cls(*arguments)

    return make


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
    # StorageMeta.checkpoint_id of torch's FileSystemWriter. Paths of another system stay what they are.
    **{(module, name): _make_path(cls) for module in ("pathlib", "pathlib._local") for name, cls in (
        ("PosixPath", pathlib.Path if isinstance(pathlib.Path(), pathlib.PosixPath) else pathlib.PurePosixPath),
        ("WindowsPath", pathlib.PureWindowsPath),
        ("PurePosixPath", pathlib.PurePosixPath),
        ("PureWindowsPath", pathlib.PureWindowsPath),
    )},
    **{("builtins", cls.__name__): _make_empty(cls) for cls in _FACTORIES.values()},
}  # fmt: skip

PLAIN: dict[tuple[str, str], Constructor] = {
    (module, name): Constructor(f"{module}.{name}", call=call) for (module, name), call in _CALLS.items()
}
_RENAMED = {"unicode": "str", "xrange": "range", "long": "int"}


def as_named_today(module: str, name: str) -> tuple[str, str]:
    """The module and name for which protocol 2 has those of Python 2."""
    return ("builtins", _RENAMED.get(name, name)) if module == "__builtin__" else (module, name)
