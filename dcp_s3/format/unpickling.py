"""Python's own unpickler, held to an allow-list, for pickles that anybody may have written.

Looking up globals in a list is not enough: a pickle may also set attributes of a class or function that it named, and
so change it for the whole process. So each global has a stand-in without attributes to set: an `Allowed`, a class of
the kind `Sealed`, or a class or constant of C. Only their code runs. Instances of torch's classes are `Mirror`s, with
whatever attributes a pickle gives them, compared by identity. They become what they stand for once all is checked.

A hostile pickle may still take much time and memory. A very deeply nested tuple as a key even ends the process, but
whoever can write that can also delete the checkpoint.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import pickletools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch

_MAX_DEPTH = 50  # the paths in a nested state are flat
_TOO_DEEP = f"it is nested more than {_MAX_DEPTH} levels deep, or contains itself"


class MalformedPickleError(Exception):
    """A pickle is truncated, damaged, not a pickle at all, or not as picklers write it."""


class UnsafeGlobalError(Exception):
    """A pickle names a global that is not allowed, or that this torch does not have. ``args[0]`` is its name."""

    def __init__(self, module: str, name: str) -> None:
        full_name = f"{module}.{name}" if module else name
        super().__init__(full_name if len(full_name) <= 200 else full_name[:200] + "...")


# --- stand-ins ------------------------------------------------------------------------------------


class Allowed:
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

    def __setstate__(self, state: Any) -> None:
        # Called by Python's unpickler to set attributes.
        raise MalformedPickleError(f"the state of {self.name} is set")


def expect(condition: bool, what: str) -> None:
    """Raises `MalformedPickleError` unless the arguments of ``what`` are as picklers write them."""
    if not condition:
        raise MalformedPickleError(f"{what} is made from other arguments than pickles have")


class Sealed(type):
    """Metaclass of classes that a pickle may make instances of, but not change."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise MalformedPickleError(f"an attribute of {cls.__name__} itself is set")


class Mirror(metaclass=Sealed):
    """Stands for an instance of a class, as a pickle describes it."""

    @staticmethod
    def of(cls: type, **methods: Any) -> Any:
        """A class whose instances stand for those of ``cls``."""
        return Sealed(cls.__name__, (Mirror,), methods)

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


# --- reading --------------------------------------------------------------------------------------


def unpickle(
    stream: io.BytesIO,
    find_global: Callable[[str, str], Any],
    load_persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The value of the pickle at the stream's position, which is after the pickle afterwards.

    Raises:
        MalformedPickleError: it cannot be read.
        UnsafeGlobalError: raised by ``find_global``, or by what it returned.
    """
    # Without `peek`, Python reads a pickle without frames opcode by opcode, at a microsecond each.
    reader = io.BufferedReader(stream)
    try:
        _check_extensions(stream)
        if load_persistent is not None:  # an item: of metadata only some needs it, and it is large
            check_memo(stream.getvalue(), stream.tell())
        value = _RestrictedUnpickler(reader, find_global, load_persistent).load()
        end = reader.tell()
    except (MalformedPickleError, UnsafeGlobalError):
        raise
    except Exception as error:  # whatever constructors and hashes raise, and MemoryError
        raise MalformedPickleError(f"{type(error).__name__}: {str(error)[:200]}") from error
    finally:
        reader.detach()  # or it would close the stream when it is freed
    stream.seek(end)
    return value


class _RestrictedUnpickler(pickle.Unpickler):
    def __init__(
        self,
        stream: io.BufferedReader[Any],
        find_global: Callable[[str, str], Any],
        load_persistent: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(stream, encoding="utf-8")  # for texts of protocol 1, as torch.load does
        self._find_global = find_global
        self._load_persistent = load_persistent

    def find_class(self, module: str, name: str) -> Any:
        return self._find_global(module, name)

    def persistent_load(self, found: Any) -> Any:
        if self._load_persistent is None:
            raise MalformedPickleError("it refers to something outside of it")
        return self._load_persistent(found)


def _check_extensions(stream: io.BytesIO) -> None:
    """Refuse extension opcodes: the registry's cache bypasses `find_class`, and would keep what it finds."""
    if not vars(copyreg)["_inverted_registry"]:
        return  # nearly always; extension opcodes then fail
    start = stream.tell()
    if any(opcode.name.startswith("EXT") for opcode, _, _ in pickletools.genops(stream)):
        raise MalformedPickleError("it refers to Python's extension registry")
    stream.seek(start)


def check_memo(data: bytes, position: int = 0) -> None:
    """Refuse a damaged pickle that numbers what it remembers beyond its size: Python would make room for all of them.

    Reads it without running it: about 60 ns for each opcode.
    """
    end = len(data)
    while position < end and (opcode := data[position]) != _STOP:
        position += 1
        length = _ARGUMENTS[opcode]
        start = position
        if length >= 0:
            position += length
        elif length == pickletools.UP_TO_NEWLINE:
            for _ in range(2 if opcode in _TWO_LINES else 1):
                position = data.find(b"\n", position) + 1 or end
        else:
            position += _WIDTHS[length]
            position += int.from_bytes(data[start:position], "little")
        number = data[start:position]
        if (opcode == _LONG_BINPUT and int.from_bytes(number, "little") > end) or (
            opcode == _PUT and len(number.strip()) > len(str(end))
        ):
            raise MalformedPickleError("it numbers what it remembers beyond its size")


_LONG_BINPUT, _PUT, _STOP, _TWO_LINES = *b"rp.", b"ci"
# Bytes of an opcode's argument, and of the lengths before arguments that have one.
_ARGUMENTS = [0] * 256
for _opcode in pickletools.opcodes:
    _ARGUMENTS[ord(_opcode.code)] = 0 if _opcode.arg is None else _opcode.arg.n
_WIDTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1, pickletools.TAKEN_FROM_ARGUMENT4: 4, pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}  # fmt: skip


# --- plain values ---------------------------------------------------------------------------------

LEAVES = frozenset((
    str, int, float, bool, type(None), bytes, complex, bytearray, torch.Size, torch.dtype, torch.layout, torch.device,
    torch.memory_format,
))  # fmt: skip
"""Types of values that have no others in them."""


class PlainCheck:
    """Checks values of one pickle that planners add and nothing here relies on; they may share parts.

    They must be harmless to look at, copy or send on: without a class or function in them, not containing themselves,
    and not nested deeply.
    """

    def __init__(self) -> None:
        # id -> the value (kept so that its id is not reused), and how deeply it is nested.
        self._known: dict[int, tuple[Any, int]] = {}

    def check_attributes(self, owner: Any, known: frozenset[str] = frozenset()) -> None:
        """Check the attributes of ``owner`` that are not ``known``.

        Raises:
            MalformedPickleError: one is no plain value, or no picklers write its name.
        """
        for name in vars(owner).keys() - known:
            _check_name(owner, name)
            self.check(vars(owner)[name])

    def check(self, value: Any) -> None:
        """Raises `MalformedPickleError` unless ``value`` is plain."""
        try:
            self._height(value)
        except RecursionError:
            raise MalformedPickleError(_TOO_DEEP) from None

    def _height(self, value: Any) -> int:
        """How deeply a value is nested."""
        kind = type(value)
        if kind in LEAVES:
            return 0
        if kind is tuple and LEAVES.issuperset(map(type, value)):  # a path; there are many
            return 1
        if id(value) not in self._known:
            parts = [*value, *value.values()] if kind in (dict, OrderedDict) else value
            if kind not in (dict, OrderedDict, tuple, list, set, frozenset):
                raise MalformedPickleError(f"it has a {kind.__name__} where a value belongs")
            if kind is OrderedDict:
                for name, part in vars(value).items():
                    _check_name(value, name)
                    parts.append(part)
            self._known[id(value)] = value, _MAX_DEPTH  # as long as it is under way: it may contain itself
            height = 1 + max(map(self._height, parts), default=0)
            if height > _MAX_DEPTH:
                raise MalformedPickleError(_TOO_DEEP)
            self._known[id(value)] = value, height
        return self._known[id(value)][1]


def _check_name(owner: object, name: Any) -> None:
    if type(name) is not str or name.startswith("__"):
        raise MalformedPickleError(f"a {type(owner).__name__} has an attribute {str(name)[:50]!r}")
