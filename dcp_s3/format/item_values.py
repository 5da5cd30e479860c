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

from dcp_s3.format.allow_list import PLAIN, find_plain
from dcp_s3.format.item_pickles import STORAGE_TYPES, TENSORS, Opaque, unpickle_archive
from dcp_s3.format.unpickling import Allowed, Deferred, MalformedPickleError, Sealed, UnsafeGlobalError, expect

# Integers and texts of numbers that anybody keeps have fewer digits.
_MAX_DIGITS = 1000
_FRACTION = re.compile(r"-?[0-9]+(/[0-9]+)?")
_DTYPE = re.compile(r"b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SU][0-9]{1,9}|[Mm]8")
_UNIT = re.compile(rb"[A-Za-z]{1,7}")
# The limit of numpy 1; later versions allow 64.
_MAX_DIMENSIONS = 32
_MAX_BYTES = 2**62


def check_values(stream: io.BytesIO) -> None:
    """Check that an archive of torch.save consists of values that are known here, without loading it.

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


def _is_packed(length: int, *, zoned: bool = True) -> Callable[..., bool]:
    """Whether arguments are the bytes in which a date or time is pickled, and its timezone."""

    def fits(data: Any, *zone: Any) -> bool:
        right = type(data) is bytes and len(data) == length and len(zone) <= zoned
        return right and all(type(each) is timezone for each in zone)

    return fits


def _make_date(data: bytes) -> date:
    return date(int.from_bytes(data[:2], "big"), data[2], data[3])


def _make_datetime(data: bytes, zone: timezone | None = None) -> datetime:
    day = datetime(int.from_bytes(data[:2], "big"), data[2], data[3], tzinfo=zone)
    return day.replace(hour=data[4], minute=data[5], second=data[6], microsecond=int.from_bytes(data[7:], "big"))


def _make_time(data: bytes, zone: timezone | None = None) -> time:
    return time(data[0], data[1], data[2], int.from_bytes(data[3:], "big"), zone)


def _make_fraction(*arguments: Any) -> Deferred:
    Fraction(*arguments)
    return Deferred(Fraction, arguments)


def _fits_timezone(offset: Any, *names: Any) -> bool:
    return type(offset) is timedelta and len(names) <= 1 and all(type(name) is str for name in names)


def _fits_deque(*arguments: Any) -> bool:
    lengths = arguments[1:]
    right = arguments[:1] in ((), ((),), ([],)) and len(lengths) <= 1
    return right and all(length is None or type(length) is int for length in lengths)


def _fits_counter(*counts: Any) -> bool:
    return len(counts) <= 1 and all(type(each) is dict for each in counts)


def _fits_decimal(text: Any) -> bool:
    return type(text) is str and len(text) <= _MAX_DIGITS


def _fits_fraction(*arguments: Any) -> bool:
    if len(arguments) == 1:  # not "1e999999999"
        return _fits_decimal(*arguments) and _FRACTION.fullmatch(arguments[0]) is not None
    return len(arguments) == 2 and all(type(part) is int for part in arguments)


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


_RULES: dict[tuple[str, str], tuple[Callable[..., Any], Callable[..., bool]]] = {
    ("collections", "Counter"): (Counter, _fits_counter),
    ("collections", "deque"): (deque, _fits_deque),
    ("datetime", "date"): (_make_date, _is_packed(4, zoned=False)),
    ("datetime", "datetime"): (_make_datetime, _is_packed(10)),
    ("datetime", "time"): (_make_time, _is_packed(6)),
    ("datetime", "timedelta"): (timedelta, lambda *parts: len(parts) == 3 and all(type(part) is int for part in parts)),
    ("datetime", "timezone"): (timezone, _fits_timezone),
    ("decimal", "Decimal"): (Decimal, _fits_decimal),
    ("fractions", "Fraction"): (_make_fraction, _fits_fraction),
}
_GLOBALS: dict[tuple[str, str], Any] = {
    **TENSORS,
    **STORAGE_TYPES,
    **_NUMPY,
    **{(module, name): Allowed(f"{module}.{name}", *rule) for (module, name), rule in _RULES.items()},
    ("_io", "BytesIO"): _Stream,
    ("uuid", "UUID"): _UUID,
}

KNOWN = frozenset(f"{module}.{name}" for module, name in (*_GLOBALS, *PLAIN))
"""Qualified names of the globals that an item may name."""
