"""Python's own unpickler, held to an allow-list, for pickles that anybody may have written.

Looking up globals in a list is not enough: a pickle may also set attributes of a class or function that it named, and
so change it for the whole process. So the stand-in for a global is an `Allowed`, a class of the kind `Sealed`, or a
class or constant of C that has no attributes to set. Only their code runs. A hostile pickle may still take much time
and memory. A very deeply nested tuple as a key even ends the process, but whoever can write that can also delete the
checkpoint.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple


class MalformedPickleError(Exception):
    """A pickle is truncated, damaged, not a pickle at all, or not as picklers write it."""


class UnsafeGlobalError(Exception):
    """A pickle names a global that is not allowed. ``args[0]`` is its name."""

    def __init__(self, module: str, name: str) -> None:
        full_name = f"{module}.{name}" if module else name
        super().__init__(full_name if len(full_name) <= 200 else full_name[:200] + "...")


class UnknownToTorchError(UnsafeGlobalError):
    """A pickle has something of torch that the installed torch does not have. ``args[0]`` says what."""

    def __init__(self, what: str) -> None:
        super().__init__(*what.rpartition(".")[::2])


class Allowed:
    """Stands for a function, or for a class that is called; without ``call``, for one that is only named.

    Args:
        fits: whether arguments are as picklers write them. What ``call`` gets is checked, so it need not check.
    """

    __slots__ = ("_call", "_fits", "name")

    def __init__(
        self, name: str, call: Callable[..., Any] | None = None, fits: Callable[..., bool] | None = None
    ) -> None:
        self.name = name
        self._call = call
        self._fits = fits

    def __call__(self, *arguments: Any) -> Any:
        if self._call is None:
            raise MalformedPickleError(f"{self.name} is called")
        if self._fits is not None:
            try:
                fits = self._fits(*arguments)
            except TypeError:  # another number of arguments
                fits = False
            expect(fits, self.name)
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


class Deferred(NamedTuple):
    """Stands for a value that is made after the pickle has been read, so that no pickle can set its attributes."""

    make: Callable[..., Any]
    arguments: tuple[Any, ...]


def deferred(make: Callable[..., Any]) -> Callable[..., Deferred]:
    """What makes a `Deferred` of its arguments."""
    return lambda *arguments: Deferred(make, arguments)


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


def check_opcodes(data: bytes) -> None:
    """Refuse a pickle that makes Python's unpickler ask for more memory than fits its size, as damaged ones do.

    Reads it without running it: about 60 ns for each opcode.

    Raises:
        MalformedPickleError: a length reaches beyond the end, or a number for the memo is larger than the pickle;
            picklers count from 0.
    """
    position, end = 0, len(data)
    while position < end:
        opcode = data[position]
        position += 1
        length = _ARGUMENTS[opcode]
        if length >= 0:
            if opcode == _LONG_BINPUT and int.from_bytes(data[position : position + 4], "little") > end:
                raise MalformedPickleError("it numbers what it remembers beyond its size")
            if opcode == _STOP:
                return
            position += length
        elif length in (_LINE, _TWO_LINES):
            start, position = position, data.find(b"\n", position) + 1 or end
            if opcode == _PUT and len(data[start:position].strip()) > len(str(end)):
                raise MalformedPickleError("it numbers what it remembers beyond its size")
            if length == _TWO_LINES:
                position = data.find(b"\n", position) + 1 or end
        else:
            count = int.from_bytes(data[position : position - length], "little")
            position -= length
            if position + count > end:
                raise MalformedPickleError(f"a length of {count} bytes reaches beyond its end")
            if opcode != _FRAME:
                position += count


_FRAME, _LONG_BINPUT, _PUT, _STOP = b"\x95rp."
_LINE, _TWO_LINES = -100, -101
# What follows an opcode: so many bytes; if negative, a length of so many bytes and then as many bytes as it says.
_ARGUMENTS = [0] * 256
for _opcode in pickletools.opcodes:
    _argument = _opcode.arg
    if _argument is not None and _argument.n >= 0:
        _ARGUMENTS[ord(_opcode.code)] = _argument.n
    elif _argument is not None and _argument.n == pickletools.UP_TO_NEWLINE:
        _ARGUMENTS[ord(_opcode.code)] = _TWO_LINES if _opcode.code in "ci" else _LINE
    elif _argument is not None:
        _ARGUMENTS[ord(_opcode.code)] = -int(_argument.name[-1])  # its name ends with the bytes of its length
_ARGUMENTS[_FRAME] = -8


def _check_extensions(stream: io.BytesIO) -> None:
    """Refuse extension opcodes: the registry's cache bypasses `find_class`, and would keep what it finds."""
    if not vars(copyreg)["_inverted_registry"]:
        return  # nearly always; extension opcodes then fail
    start = stream.tell()
    if any(opcode.name.startswith("EXT") for opcode, _, _ in pickletools.genops(stream)):
        raise MalformedPickleError("it refers to Python's extension registry")
    stream.seek(start)
