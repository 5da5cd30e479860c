"""Python's own unpickler, held to an allow-list, for pickles that anybody may have written.

To look up globals in a list is not enough: a pickle may also set attributes of what it named, class or function, and
so change it for the whole process. So what stands for a global here is an `Allowed`, a class of the kind `Sealed`, or a
class or constant of C that has no attributes to set. No code runs but theirs. A hostile pickle may still take much time
and memory, and as a key a tuple of very many levels even ends the process: who can write one can delete the checkpoint.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any, NamedTuple


class MalformedPickleError(Exception):
    """Truncated, damaged, not a pickle, or made as nothing is that picklers write."""


class UnsafeGlobalError(Exception):
    """A pickle names a global that is not allowed. ``args[0]`` is its name."""

    def __init__(self, module: str, name: str) -> None:
        full_name = f"{module}.{name}"
        super().__init__(full_name if len(full_name) <= 200 else full_name[:200] + "...")


class Allowed:
    """Stands for a function, or for a class that is called; with no ``call``, for one that is only named."""

    __slots__ = ("_call", "name")

    def __init__(self, name: str, call: Callable[..., Any] | None = None) -> None:
        self.name = name
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        if self._call is None:
            raise MalformedPickleError(f"{self.name} is called")
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        """What Python's unpickler calls to set attributes."""
        raise MalformedPickleError(f"the state of {self.name} is set")


class Sealed(type):
    """The class of classes that a pickle may make instances of, and not change."""

    def __setattr__(cls, name: str, value: Any) -> None:
        raise MalformedPickleError(f"an attribute of {cls.__name__} itself is set")


class Deferred(NamedTuple):
    """Stands for a value that is made when the pickle has been read, and so has no attributes to set before."""

    make: Callable[..., Any]
    arguments: tuple[Any, ...]


def unpickle(
    stream: io.BytesIO,
    find_global: Callable[[str, str], Any],
    load_persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """The value of the pickle that begins at the stream's position; the position is behind it afterwards.

    Args:
        stream: holds the pickle.
        find_global: what stands for a global, given its module and name as they are in the pickle.
        load_persistent: what stands for a persistent id; without it there must be none.

    Raises:
        MalformedPickleError: it cannot be read.
        UnsafeGlobalError: from ``find_global``.
    """
    # Without `peek`, Python reads a pickle without frames opcode by opcode, at a microsecond each.
    reader = io.BufferedReader(stream)
    try:
        _check_extensions(stream)
        value = _Unpickler(reader, find_global, load_persistent).load()
        end = reader.tell()
    except (MalformedPickleError, UnsafeGlobalError):
        raise
    except Exception as error:  # whatever constructors and hashes raise, and the memory's end
        raise MalformedPickleError(f"{type(error).__name__}: {str(error)[:200]}") from error
    finally:
        reader.detach()  # or its end would close the stream
    stream.seek(end)
    return value


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        stream: io.BufferedReader[Any],
        find_global: Callable[[str, str], Any],
        load_persistent: Callable[[Any], Any] | None,
    ) -> None:
        super().__init__(stream, encoding="utf-8")  # of protocol 1, as torch.load
        self._find_global = find_global
        self._load_persistent = load_persistent

    def find_class(self, module: str, name: str) -> Any:
        return self._find_global(module, name)

    def persistent_load(self, found: Any) -> Any:
        if self._load_persistent is None:
            raise MalformedPickleError("it refers to something outside of it")
        return self._load_persistent(found)


def _check_extensions(stream: io.BytesIO) -> None:
    """The extension registry has a cache, which `find_class` is not asked about, and which would keep what it finds."""
    if not vars(copyreg)["_inverted_registry"]:
        return  # nearly always: then such opcodes fail
    start = stream.tell()
    if any(opcode.name.startswith("EXT") for opcode, _, _ in pickletools.genops(stream)):
        raise MalformedPickleError("it refers to Python's extension registry")
    stream.seek(start)
