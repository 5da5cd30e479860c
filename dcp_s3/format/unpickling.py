"""Python's own unpickler, held to an allow-list, for pickles that anybody may have written.

Looking up globals in a list is not enough: a pickle may also set attributes of a class or function that it named, and
so change it for the whole process. So each global has a stand-in without attributes to set: an `Allowed`, a class of
the kind `Sealed`, or a class or constant of C. Only their code runs. Instances of torch's classes are `Mirror`s, with
whatever attributes a pickle gives them, compared by identity. Once all is checked, a `Settler` makes of them, and of
what is `Deferred`, what they stand for: harmless to look at, copy or send on.

A hostile pickle may still take much time and memory. A very deeply nested tuple as a key even ends the process, but
whoever can write that can also delete the checkpoint.
"""

from __future__ import annotations

import copyreg
import io
import operator
import pickle
import pickletools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from typing import Any, ClassVar, NamedTuple

import torch

_MAX_DEPTH = 50  # a plan of a nested state is flat
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
    """Stands for an instance of ``stands_for``, as a pickle describes it."""

    stands_for: ClassVar[type]
    required: ClassVar[frozenset[str]]
    """Names of the attributes that an instance itself must have."""

    @staticmethod
    def of(cls: Any, **methods: Any) -> Any:
        """A class whose instances stand for those of a dataclass."""
        required = frozenset(field.name for field in fields(cls) if field.default is MISSING)
        _STOOD_FOR.add(cls)
        return Sealed(cls.__name__, (Mirror,), {"stands_for": cls, "required": required, **methods})

    def __setattr__(self, name: str, value: Any) -> None:
        # Called by Python's unpickler for slots. It puts other attributes into ``__dict__``.
        raise MalformedPickleError(f"the slots of a {type(self).__name__} are set")


_STOOD_FOR: set[type] = set()


class Opaque(metaclass=Sealed):
    """Stands for an instance of any class, made from any arguments, with any state."""

    __slots__ = ()

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


class PlainDefaultDict(dict[Any, Any]):
    """Stands for a defaultdict, whose factory could be set to anything."""

    __slots__ = ("factory",)

    factory: type | None

    def __setstate__(self, state: Any) -> None:
        raise MalformedPickleError("the state of a defaultdict is set")


class Deferred(NamedTuple):
    """Stands for a value that is made after the pickle has been read, so that no pickle can set its attributes."""

    make: Callable[..., Any]
    arguments: tuple[Any, ...]


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


# --- what stand-ins become ------------------------------------------------------------------------

LEAVES = frozenset((
    str, int, float, bool, type(None), bytes, complex, bytearray, range, slice, torch.Size, torch.dtype, torch.layout,
    torch.device, torch.memory_format,
))  # fmt: skip
"""Types of values that stand for themselves."""


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
            return self._settle(value)[0]
        except (MalformedPickleError, UnsafeGlobalError):
            raise
        except RecursionError:
            raise MalformedPickleError(_TOO_DEEP) from None
        except Exception as error:  # an enumeration has no such member, or a hash fails
            raise MalformedPickleError(f"{type(error).__name__}: {str(error)[:200]}") from error

    def settle_others(self, mirror: Mirror, known: frozenset[str]) -> None:
        """Settle the attributes of ``mirror`` that are not ``known``."""
        attributes = vars(mirror)
        for name in attributes.keys() - known:
            _check_name(mirror, name)
            attributes[name] = self.settle(attributes[name])

    def _settle(self, value: Any) -> tuple[Any, int]:
        """What a value has become, and how deeply it is nested."""
        kind = type(value)
        if kind in LEAVES:
            return value, 0
        found = self._known.get(id(value))
        if found is not None:
            return found[1:]
        settled, height = value, 1
        if kind in (tuple, list, set, frozenset):
            items, height = self._settle_all(value)
            if kind is list:
                value[:] = items
            elif kind is not tuple or not all(map(operator.is_, items, value)):
                settled = kind(items)
        elif kind in (dict, OrderedDict, PlainDefaultDict):
            settled, height = self._settle_dict(value, kind)
        elif kind is Deferred:
            settled, height = value.make(*value.arguments), 0
        elif isinstance(value, Mirror):
            height = self._settle_attributes(value)
            if missing := kind.required - vars(value).keys():
                raise MalformedPickleError(f"a {kind.__name__} has no {min(missing)}")
            object.__setattr__(value, "__class__", kind.stands_for)
        elif kind not in _STOOD_FOR:  # a mirror that was settled before
            raise MalformedPickleError(f"it has a {kind.__name__} where a value belongs")
        if height > _MAX_DEPTH:
            raise MalformedPickleError(_TOO_DEEP)
        self._known[id(value)] = value, settled, height
        return settled, height

    def _settle_all(self, values: Iterable[Any]) -> tuple[list[Any], int]:
        settled, height = [], 0
        for value in values:
            kind = type(value)
            if kind in LEAVES:
                item, below = value, 0
            elif kind is tuple and LEAVES.issuperset(map(type, value)):  # a path; plans have many
                item, below = value, 1
            else:
                item, below = self._settle(value)
            settled.append(item)
            height = max(height, below)
        return settled, height + 1

    def _settle_dict(self, value: Any, kind: type) -> tuple[Any, int]:
        items, height = self._settle_all(value.values())
        keys: Any = value
        if not LEAVES.issuperset(map(type, value)):
            keys, below = self._settle_all(list(value))
            height = max(height, below)
        if kind is OrderedDict:
            height = max(height, self._settle_attributes(value))
        pairs = list(zip(keys, items, strict=True))
        if kind is PlainDefaultDict:
            return defaultdict(value.factory, pairs), height
        if keys is not value:
            value.clear()
        value.update(pairs)
        return value, height

    def _settle_attributes(self, owner: Any) -> int:
        attributes = vars(owner)
        for name in attributes:
            _check_name(owner, name)
        items, height = self._settle_all(attributes.values())
        attributes.update(zip(list(attributes), items, strict=True))
        return height


def _check_name(owner: object, name: Any) -> None:
    if type(name) is not str or name.startswith("__"):
        raise MalformedPickleError(f"a {type(owner).__name__} has an attribute {str(name)[:50]!r}")
