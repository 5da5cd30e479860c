"""The allow-list of items goes on: values of Python's standard library and of numpy.

torch's weights-only unpickler does not know them, but trainers keep them in every run: the state of numpy's random
numbers, dates, counts, paths. Making one runs no code that a pickle chooses, so a load accepts them.

Not accepted: arrays of objects or records, subclasses of arrays, and numpy's generators (their pickles name functions
that change with numpy, and trust their arguments; ``generator.bit_generator.state`` is a dict of plain values).
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter, deque
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
from torch.serialization import get_safe_globals

from dcp_s3.format.allow_list import PLAIN, TENSORS, Names, find_plain, table
from dcp_s3.format.unpickling import (
    Allowed,
    Deferred,
    MalformedPickleError,
    Opaque,
    Sealed,
    UnsafeGlobalError,
    expect,
)

# Integers and texts of numbers that anybody keeps have fewer digits.
_MAX_DIGITS = 1000
_FRACTION = re.compile(r"-?[0-9]+(/[0-9]+)?")
_DTYPE = re.compile(r"b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SU][0-9]{1,9}|[Mm]8")
_UNIT = re.compile(rb"[A-Za-z]{1,7}")
# The limit of numpy 1; later versions allow 64.
_MAX_DIMENSIONS = 32
_MAX_BYTES = 2**62


class _Value(metaclass=Sealed):
    """Stands for a value without state. It cannot be a key, unless a subclass says so."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __setstate__(self, state: Any) -> None:
        raise MalformedPickleError(f"the state of a {type(self).__name__} is set")


# --- numpy ----------------------------------------------------------------------------------------


class _Dtype(_Value):
    __slots__ = ("described", "dtype")

    def __init__(self, *arguments: Any) -> None:
        expect(len(arguments) == 3 and type(arguments[0]) is str and arguments[1:] == (False, True), "numpy.dtype")
        if not _DTYPE.fullmatch(arguments[0]):
            raise MalformedPickleError(f"a numpy.dtype of {arguments[0][:20]!r}, which is neither numbers nor texts")
        self.dtype = np.dtype(arguments[0])
        self.described = False

    def __setstate__(self, state: Any) -> None:
        """Take byte order and unit. A state that numpy would not write could make it read beyond its memory."""
        expect(not self.described and type(state) is tuple and len(state) in (8, 9), "numpy.dtype")
        self.described = True
        if self.dtype.kind in "Mm":
            expect(len(state) == 9 and type(state[8]) is tuple and len(state[8]) == 2, "numpy.dtype")
            metadata, unit = state[8]
            expect(not metadata and type(unit) is tuple and len(unit) == 4, "numpy.dtype")
            expect(type(unit[0]) is bytes and _UNIT.fullmatch(unit[0]) is not None, "numpy.dtype")
            expect(type(unit[1]) is int and 0 < unit[1] < 2**31, "numpy.dtype")
            if unit[0] != b"generic":
                self.dtype = np.dtype(f"{self.dtype.kind}8[{unit[1]}{unit[0].decode()}]")
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])
        written: Any = self.dtype.__reduce__()[2]
        expect(state[:8] == written[:8] and [part[1] for part in state[8:]] == [part[1] for part in written[8:]],
               "numpy.dtype")  # fmt: skip


class _Array(_Value):
    __slots__ = ("filled",)

    def __init__(self, *arguments: Any) -> None:
        expect(len(arguments) == 3 and arguments[0] is _NDARRAY and arguments[1:] == ((0,), b"b"), "numpy.ndarray")
        self.filled = False

    def __setstate__(self, state: Any) -> None:
        expect(not self.filled and type(state) is tuple and len(state) == 5 and state[0] == 1, "numpy.ndarray")
        self.filled = True
        _, shape, made, in_columns, data = state
        expect(type(shape) is tuple and len(shape) <= _MAX_DIMENSIONS and type(made) is _Dtype, "numpy.ndarray")
        expect(all(type(size) is int and size >= 0 for size in shape), "numpy.ndarray")
        expect(type(in_columns) is bool and type(data) is bytes, "numpy.ndarray")
        nbytes = made.dtype.itemsize * math.prod(shape)
        if nbytes != len(data) or made.dtype.itemsize * math.prod(size or 1 for size in shape) > _MAX_BYTES:
            raise MalformedPickleError(f"a numpy.ndarray of {nbytes} bytes is made from {len(data)}")
        if made.dtype.kind == "U" and data:
            points = np.frombuffer(data, np.dtype("u4").newbyteorder(made.dtype.byteorder))
            if points.max() > sys.maxunicode:
                raise MalformedPickleError("texts in a numpy.ndarray that are no Unicode")


def _make_scalar(made: _Dtype, data: bytes) -> Any:
    expect(len(data) == made.dtype.itemsize, "a scalar of numpy")
    return np.frombuffer(data, made.dtype)[0] if data else made.dtype.type()


_NDARRAY = Allowed("numpy.ndarray")


# --- the standard library -------------------------------------------------------------------------


def _make_date(data: bytes) -> date:
    expect(len(data) == 4, "datetime.date")
    return date(int.from_bytes(data[:2], "big"), data[2], data[3])


def _make_datetime(data: bytes, zone: timezone | None = None) -> datetime:
    expect(len(data) == 10, "datetime.datetime")
    day = datetime(int.from_bytes(data[:2], "big"), data[2], data[3], tzinfo=zone)
    return day.replace(hour=data[4], minute=data[5], second=data[6], microsecond=int.from_bytes(data[7:], "big"))


def _make_time(data: bytes, zone: timezone | None = None) -> time:
    expect(len(data) == 6, "datetime.time")
    return time(data[0], data[1], data[2], int.from_bytes(data[3:], "big"), zone)


def _make_deque(items: Any = (), length: int | None = None) -> deque[Any]:
    expect(not items, "collections.deque")
    return deque(maxlen=length)


def _make_decimal(text: str) -> Decimal:
    expect(len(text) <= _MAX_DIGITS, "decimal.Decimal")
    return Decimal(text)


def _defer_fraction(*parts: Any) -> Deferred:
    if len(parts) == 1:  # not "1e999999999"
        expect(len(parts[0]) <= _MAX_DIGITS and _FRACTION.fullmatch(parts[0]) is not None, "fractions.Fraction")
    Fraction(*parts)
    return Deferred(Fraction, parts)


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


# --- all of it ------------------------------------------------------------------------------------

VALUES: dict[Names, Any] = {
    **TENSORS,
    **table(
        ("numpy.dtype", _Dtype),
        *((f"numpy.{core}.multiarray._reconstruct", _Array) for core in ("core", "_core")),  # numpy 1, numpy 2
        *((f"numpy.{core}.multiarray.scalar", _make_scalar, (_Dtype, bytes)) for core in ("core", "_core")),
        ("collections.Counter", Counter, (), (dict,)),
        ("collections.deque", _make_deque),
        ("datetime.date", _make_date, (bytes,)),
        ("datetime.datetime", _make_datetime, (bytes,), (bytes, timezone)),
        ("datetime.time", _make_time, (bytes,), (bytes, timezone)),
        ("datetime.timedelta", timedelta, (int, int, int)),
        ("datetime.timezone", timezone, (timedelta,), (timedelta, str)),
        ("decimal.Decimal", _make_decimal, (str,)),
        ("fractions.Fraction", _defer_fraction, (str,), (int, int)),
    ),
    ("numpy", "ndarray"): _NDARRAY,
    ("_io", "BytesIO"): _Stream,
    ("uuid", "UUID"): _UUID,
}  # fmt: skip
"""Stand-ins for the globals of items, beyond those of plain values."""

KNOWN = frozenset(f"{module}.{name}" for module, name in (*VALUES, *PLAIN))
"""Qualified names of the globals that an item may name."""


def find_in_item(module: str, name: str, *, allowed: dict[str, Any]) -> Any:
    """The stand-in for a global in an item's pickle, or UnsafeGlobalError. ``allowed``: `allowed_by_user`."""
    found = VALUES.get((module, name)) or find_plain(module, name) or allowed.get(f"{module}.{name}")
    if found is None:
        raise UnsafeGlobalError(module, name)
    return found


def allowed_by_user() -> dict[str, Any]:
    """Stand-ins for globals of ``torch.serialization.add_safe_globals``, by their names in pickles."""
    found: dict[str, Any] = {}
    for each in get_safe_globals():
        value, name = each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
        # A function's result, or a member of an enumeration, may not be a new value: it has no state to set.
        is_new = isinstance(value, type) and not issubclass(value, Enum)
        found[name] = Opaque if is_new else Allowed(name, lambda *_: _Value())
    return found
