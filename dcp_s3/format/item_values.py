"""Values of Python's standard library and of numpy, which torch's weights-only unpickler does not know.

Trainers keep them in every run: the state of numpy's random numbers, dates, counts, paths. Making one runs no code that
a pickle chooses, so a load accepts them. This module goes through an item's pickle with stand-ins for these, plain
values, ordinary tensors, and what the user allowed. Each stand-in checks the arguments that it is made from.

Not accepted: arrays of objects or records, subclasses of arrays, and numpy's generators (their pickles name functions
that change with numpy, and trust their arguments; ``generator.bit_generator.state`` is a dict of plain values).
"""

from __future__ import annotations

import io
import re
import sys
from collections import Counter, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
from torch.serialization import get_safe_globals

from dcp_s3.format.item_pickles import Opaque, unpickle_archive
from dcp_s3.format.pickled_tensors import STORAGE_TYPES, TENSORS
from dcp_s3.format.plain_values import PLAIN, expect, find_plain
from dcp_s3.format.unpickling import Allowed, Deferred, MalformedPickleError, Sealed, UnsafeGlobalError

# Integers and texts of numbers that anybody keeps have fewer digits.
_MAX_DIGITS = 1000
_FRACTION = re.compile(r"-?[0-9]+(/[0-9]+)?")
_DTYPE = re.compile(r"b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SU][0-9]{1,9}|[Mm]8")
_UNIT = re.compile(rb"[A-Za-z]{1,7}")
# The limit of numpy 1; later versions allow 64.
_MAX_DIMENSIONS = 32
_MAX_BYTES = 2**62


def check_values(stream: io.BytesIO) -> None:
    """Check that an item consists of values that are known here, without loading it.

    Args:
        stream: the archive that torch.save wrote; its position moves.

    Raises:
        UnsafeGlobalError: the item names something else.
        BadArchiveError, MalformedPickleError: it is damaged, or its values are not made as picklers make them.
    """
    allowed = _allowed_by_user()

    def find_global(module: str, name: str) -> Any:
        found = _GLOBALS.get((module, name)) or find_plain(module, name) or allowed.get(f"{module}.{name}")
        if found is None:
            raise UnsafeGlobalError(module, name)
        return found

    unpickle_archive(stream, find_global)


class _Value(metaclass=Sealed):
    """Stands for a value without state. It cannot be a key, unless a subclass says so."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __setstate__(self, state: Any) -> None:
        raise MalformedPickleError(f"the state of a {type(self).__name__} is set")


def _allowed_by_user() -> dict[str, Any]:
    """Globals of ``torch.serialization.add_safe_globals``, by their names in pickles."""
    found: dict[str, Any] = {}
    for each in get_safe_globals():
        value, name = each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
        # A function's result, or a member of an enumeration, may not be a new value: it has no state to set.
        is_new = isinstance(value, type) and not issubclass(value, Enum)
        found[name] = Opaque if is_new else Allowed(name, _make_by_user)
    return found


def _make_by_user(*arguments: Any) -> _Value:
    return _Value()


# --- numpy ----------------------------------------------------------------------------------------


class _Dtype(_Value):
    __slots__ = ("described", "dtype")

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.described = False

    def __setstate__(self, state: Any) -> None:
        _describe_dtype(self, state)


class _Array(_Value):
    __slots__ = ("filled",)

    def __init__(self) -> None:
        self.filled = False

    def __setstate__(self, state: Any) -> None:
        _fill_array(self, state)


def _make_dtype(*arguments: Any) -> _Dtype:
    name = arguments[0] if arguments else None
    expect(len(arguments) == 3 and type(name) is str and arguments[1:] == (False, True), "numpy.dtype")
    if not _DTYPE.fullmatch(str(name)):
        raise MalformedPickleError(f"a numpy.dtype of {str(name)[:20]!r}, which is neither numbers nor texts")
    return _Dtype(np.dtype(str(name)))


def _describe_dtype(made: _Dtype, state: Any) -> None:
    """Take byte order and unit from a state. One that numpy would not write could make it read beyond its memory."""
    expect(not made.described and type(state) is tuple and len(state) in (8, 9), "numpy.dtype")
    made.described = True
    if made.dtype.kind in "Mm":
        expect(len(state) == 9 and type(state[8]) is tuple and len(state[8]) == 2, "numpy.dtype")
        metadata, unit = state[8]
        expect(not metadata and type(unit) is tuple and len(unit) == 4, "numpy.dtype")
        expect(type(unit[0]) is bytes and _UNIT.fullmatch(unit[0]) is not None, "numpy.dtype")
        expect(type(unit[1]) is int and 0 < unit[1] < 2**31, "numpy.dtype")
        if unit[0] != b"generic":
            made.dtype = np.dtype(f"{made.dtype.kind}8[{unit[1]}{unit[0].decode()}]")
    if state[1] in ("<", ">"):
        made.dtype = made.dtype.newbyteorder(state[1])
    written = made.dtype.__reduce__()[2]
    expect(state[:8] == written[:8] and [part[1] for part in state[8:]] == [part[1] for part in written[8:]],
           "numpy.dtype")  # fmt: skip


def _make_array(*arguments: Any) -> _Array:
    expect(len(arguments) == 3 and arguments[0] is _NDARRAY and arguments[1:] == ((0,), b"b"), "numpy.ndarray")
    return _Array()


def _fill_array(array: _Array, state: Any) -> None:
    expect(not array.filled and type(state) is tuple and len(state) == 5 and state[0] == 1, "numpy.ndarray")
    array.filled = True
    _, shape, made, in_columns, data = state
    expect(type(shape) is tuple and len(shape) <= _MAX_DIMENSIONS and type(made) is _Dtype, "numpy.ndarray")
    expect(all(type(size) is int and size >= 0 for size in shape), "numpy.ndarray")
    expect(type(in_columns) is bool and type(data) is bytes, "numpy.ndarray")
    nbytes, room = made.dtype.itemsize, made.dtype.itemsize
    for size in shape:
        nbytes, room = nbytes * size, room * (size or 1)
    if nbytes != len(data) or room > _MAX_BYTES:
        raise MalformedPickleError(f"a numpy.ndarray of {nbytes} bytes is made from {len(data)}")
    if made.dtype.kind == "U" and data:
        points = np.frombuffer(data, np.dtype("u4").newbyteorder(made.dtype.byteorder))
        if points.max() > sys.maxunicode:
            raise MalformedPickleError("texts in a numpy.ndarray that are no Unicode")


def _make_scalar(*arguments: Any) -> Any:
    expect(len(arguments) == 2 and type(arguments[0]) is _Dtype and type(arguments[1]) is bytes, "a scalar of numpy")
    dtype, data = arguments[0].dtype, arguments[1]
    expect(len(data) == dtype.itemsize, "a scalar of numpy")
    return np.frombuffer(data, dtype)[0] if data else dtype.type()


_NDARRAY = Allowed("numpy.ndarray")
_NUMPY = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): Allowed("numpy.dtype", _make_dtype),
    **{  # names in numpy 1, and since numpy 2
        (module, name): Allowed(f"{module}.{name}", call)
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
        for name, call in (("_reconstruct", _make_array), ("scalar", _make_scalar))
    },
}


# --- the standard library -------------------------------------------------------------------------


def _fields(arguments: tuple[Any, ...], length: int, name: str) -> tuple[bytes, Any]:
    """The bytes in which a date or time is pickled, and its timezone."""
    expect(1 <= len(arguments) <= 2 and type(arguments[0]) is bytes and len(arguments[0]) == length, name)
    expect(all(type(zone) is timezone for zone in arguments[1:]), name)
    return arguments[0], arguments[1] if len(arguments) == 2 else None


def _make_date(*arguments: Any) -> date:
    data, zone = _fields(arguments, 4, "datetime.date")
    expect(zone is None, "datetime.date")
    return date(int.from_bytes(data[:2], "big"), data[2], data[3])


def _make_datetime(*arguments: Any) -> datetime:
    data, zone = _fields(arguments, 10, "datetime.datetime")
    day = datetime(int.from_bytes(data[:2], "big"), data[2], data[3], tzinfo=zone)
    return day.replace(hour=data[4], minute=data[5], second=data[6], microsecond=int.from_bytes(data[7:], "big"))


def _make_time(*arguments: Any) -> time:
    data, zone = _fields(arguments, 6, "datetime.time")
    return time(data[0], data[1], data[2], int.from_bytes(data[3:], "big"), zone)


def _make_timedelta(*arguments: Any) -> timedelta:
    expect(len(arguments) == 3 and all(type(part) is int for part in arguments), "datetime.timedelta")
    return timedelta(*arguments)


def _make_timezone(*arguments: Any) -> timezone:
    expect(1 <= len(arguments) <= 2 and type(arguments[0]) is timedelta, "datetime.timezone")
    expect(all(type(name) is str for name in arguments[1:]), "datetime.timezone")
    return timezone(*arguments)


def _make_deque(*arguments: Any) -> deque[Any]:
    expect(len(arguments) <= 2 and arguments[:1] in ((), ((),), ([],)), "collections.deque")
    expect(all(length is None or type(length) is int for length in arguments[1:]), "collections.deque")
    return deque(*arguments)


def _make_counter(*arguments: Any) -> Counter[Any]:
    expect(len(arguments) <= 1 and all(type(counts) is dict for counts in arguments), "collections.Counter")
    return Counter(*arguments)


def _make_decimal(*arguments: Any) -> Decimal:
    expect(len(arguments) == 1 and type(arguments[0]) is str and len(arguments[0]) <= _MAX_DIGITS, "decimal.Decimal")
    return Decimal(arguments[0])


def _make_fraction(*arguments: Any) -> Deferred:
    if len(arguments) == 1:
        (text,) = arguments
        # Rejects "1e999999999".
        expect(type(text) is str and len(text) <= _MAX_DIGITS and bool(_FRACTION.fullmatch(text)), "fractions.Fraction")
    else:
        expect(len(arguments) == 2 and all(type(part) is int for part in arguments), "fractions.Fraction")
    Fraction(*arguments)
    return Deferred(Fraction, arguments)


class _UUID(_Value):
    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __setstate__(self, state: Any) -> None:
        expect(type(state) is dict and state.keys() <= {"int", "is_safe"}, "uuid.UUID")
        expect(type(state.get("int")) is int and 0 <= state["int"] < 2**128, "uuid.UUID")
        expect(state.get("is_safe", 0) in (0, -1), "uuid.UUID")


class _Stream(_Value):
    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __setstate__(self, state: Any) -> None:
        expect(type(state) is tuple and len(state) == 3 and type(state[0]) is bytes and not state[2], "io.BytesIO")
        expect(type(state[1]) is int and 0 <= state[1] <= len(state[0]), "io.BytesIO")


_CALLS: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "Counter"): _make_counter,
    ("collections", "deque"): _make_deque,
    ("datetime", "date"): _make_date,
    ("datetime", "datetime"): _make_datetime,
    ("datetime", "time"): _make_time,
    ("datetime", "timedelta"): _make_timedelta,
    ("datetime", "timezone"): _make_timezone,
    ("decimal", "Decimal"): _make_decimal,
    ("fractions", "Fraction"): _make_fraction,
}
_GLOBALS: dict[tuple[str, str], Any] = {
    **TENSORS,
    **STORAGE_TYPES,
    **_NUMPY,
    **{(module, name): Allowed(f"{module}.{name}", call) for (module, name), call in _CALLS.items()},
    ("_io", "BytesIO"): _Stream,
    ("uuid", "UUID"): _UUID,
}

KNOWN = frozenset(f"{module}.{name}" for module, name in (*_GLOBALS, *PLAIN))
"""Qualified names of the globals that an item may name."""
