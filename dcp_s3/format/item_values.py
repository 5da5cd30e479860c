"""Values of Python's standard library and of numpy, which torch's weights-only unpickler does not know.

Trainers keep them in every run: the state of numpy's random numbers, dates, counts, paths. Making one runs no code that
a pickle chooses, so a load takes them. Here an item's pickle is gone through by an unpickler that knows these, plain
values, ordinary tensors, and what the user allowed; each is made from checked arguments.

Not among them: arrays of objects or records, subclasses of arrays, and numpy's generators (their pickles name functions
that change with numpy, and trust their arguments; ``generator.bit_generator.state`` is a dict of plain values).
"""

from __future__ import annotations

import io
import re
import sys
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.serialization import get_safe_globals

from dcp_s3.format.item_limits import PROTOCOL, TENSORS, Placeholder, open_pickle
from dcp_s3.format.plain_globals import PLAIN, as_named_today, expect
from dcp_s3.format.unpickle import Constructor, Limits, MalformedPickleError, UnsafeGlobalError, unpickle

# Integers, and texts of numbers, that somebody keeps have fewer digits.
_MAX_DIGITS = 1000
_FRACTION = re.compile(r"-?[0-9]+(/[0-9]+)?")
_DTYPE = re.compile(r"b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SU][0-9]{1,9}|[Mm]8")
_UNIT = re.compile(rb"[A-Za-z]{1,7}")
# Of numpy 1; later ones have 64.
_MAX_DIMENSIONS = 32
_MAX_BYTES = 2**62

_Call = Callable[[tuple[Any, ...], Limits], Any]


def check_values(stream: io.BytesIO) -> None:
    """Check that an item consists of values that are known here; nothing of it is loaded.

    Args:
        stream: what torch.save wrote; its position moves.

    Raises:
        UnsafeGlobalError: it names something else.
        MalformedPickleError: the values are not made as picklers make them, or it is damaged.
    """
    pickled, load_storage = open_pickle(stream)
    allowed = _allowed_by_user()

    def find_global(module: str, name: str) -> Any:
        module, name = as_named_today(module, name)
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if module.partition(".")[0] == "torch" and name.endswith("Storage"):
            return Constructor(f"{module}.{name}")
        found = _CONSTRUCTORS.get((module, name)) or allowed.get(f"{module}.{name}")
        if found is None:
            raise UnsafeGlobalError(f"{module}.{name}")
        return found

    # Bytes are a text in the pickle: copied once as bytes, and once into an array.
    limits = Limits(2 * len(pickled))
    builds: dict[type, Callable[[Any, Any], None]] = {**_BUILDS, _Array: partial(_fill_array, limits)}
    unpickle(pickled, find_global, builds.get, load_storage, max_protocol=PROTOCOL, limits=limits)


class _Unhashable:
    """Stands for a value that is never a key."""

    __hash__ = None  # type: ignore[assignment]


class _OfUser(_Unhashable):
    """An instance of a class that the user has allowed, which may have any state."""


def _allowed_by_user() -> dict[str, Constructor]:
    """``torch.serialization.add_safe_globals``, by the names in pickles."""
    found = {}
    for each in get_safe_globals():
        value, name = each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
        make: Any = _make_of_user if isinstance(value, type) else _make_by_user
        found[name] = Constructor(name, call=make, new=_make_of_user if isinstance(value, type) else None)
    return found


def _make_of_user(arguments: tuple[Any, ...], limits: Limits | None = None) -> _OfUser:
    return _OfUser()


def _make_by_user(arguments: tuple[Any, ...], limits: Limits | None = None) -> _Unhashable:
    return _Unhashable()


# --- numpy ----------------------------------------------------------------------------------------


class _Dtype(_Unhashable):
    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self.described = False


class _Array(_Unhashable):
    def __init__(self) -> None:
        self.filled = False


def _make_dtype(arguments: tuple[Any, ...], limits: Limits) -> _Dtype:
    name = arguments[0] if arguments else None
    expect(len(arguments) == 3 and type(name) is str and arguments[1:] == (False, True), "numpy.dtype")
    if not _DTYPE.fullmatch(str(name)):
        raise MalformedPickleError(f"a numpy.dtype of {str(name)[:20]!r}, which is neither numbers nor texts")
    return _Dtype(np.dtype(str(name)))


def _describe_dtype(made: _Dtype, state: Any) -> None:
    """Byte order and unit. A state that numpy itself would not write could make it read beyond its memory."""
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


def _make_array(arguments: tuple[Any, ...], limits: Limits) -> _Array:
    expect(len(arguments) == 3 and arguments[0] is _NDARRAY and arguments[1:] == ((0,), b"b"), "numpy.ndarray")
    return _Array()


def _fill_array(limits: Limits, array: _Array, state: Any) -> None:
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
    limits.spend(len(data))
    if made.dtype.kind == "U" and data:
        points = np.frombuffer(data, np.dtype("u4").newbyteorder(made.dtype.byteorder))
        if points.max() > sys.maxunicode:
            raise MalformedPickleError("texts in a numpy.ndarray that are no Unicode")


def _make_scalar(arguments: tuple[Any, ...], limits: Limits) -> Any:
    expect(len(arguments) == 2 and type(arguments[0]) is _Dtype and type(arguments[1]) is bytes, "a scalar of numpy")
    dtype, data = arguments[0].dtype, arguments[1]
    expect(len(data) == dtype.itemsize, "a scalar of numpy")
    limits.spend(len(data))
    return np.frombuffer(data, dtype)[0] if data else dtype.type()


_NDARRAY = Constructor("numpy.ndarray")
_NUMPY = {
    ("numpy", "ndarray"): _NDARRAY,
    ("numpy", "dtype"): Constructor("numpy.dtype", call=_make_dtype),
    **{  # of numpy 1, and since 2
        (module, name): Constructor(f"{module}.{name}", call=call)
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


def _make_date(arguments: tuple[Any, ...], limits: Limits) -> date:
    data, zone = _fields(arguments, 4, "datetime.date")
    expect(zone is None, "datetime.date")
    return date(int.from_bytes(data[:2], "big"), data[2], data[3])


def _make_datetime(arguments: tuple[Any, ...], limits: Limits) -> datetime:
    data, zone = _fields(arguments, 10, "datetime.datetime")
    day = datetime(int.from_bytes(data[:2], "big"), data[2], data[3], tzinfo=zone)
    return day.replace(hour=data[4], minute=data[5], second=data[6], microsecond=int.from_bytes(data[7:], "big"))


def _make_time(arguments: tuple[Any, ...], limits: Limits) -> time:
    data, zone = _fields(arguments, 6, "datetime.time")
    return time(data[0], data[1], data[2], int.from_bytes(data[3:], "big"), zone)


def _make_timedelta(arguments: tuple[Any, ...], limits: Limits) -> timedelta:
    expect(len(arguments) == 3 and all(type(part) is int for part in arguments), "datetime.timedelta")
    return timedelta(*arguments)


def _make_timezone(arguments: tuple[Any, ...], limits: Limits) -> timezone:
    expect(1 <= len(arguments) <= 2 and type(arguments[0]) is timedelta, "datetime.timezone")
    expect(all(type(name) is str for name in arguments[1:]), "datetime.timezone")
    return timezone(*arguments)


def _make_deque(arguments: tuple[Any, ...], limits: Limits) -> deque[Any]:
    expect(len(arguments) <= 2 and arguments[:1] in ((), ((),), ([],)), "collections.deque")
    expect(all(length is None or type(length) is int for length in arguments[1:]), "collections.deque")
    return deque(*arguments)


def _make_counter(arguments: tuple[Any, ...], limits: Limits) -> Counter[Any]:
    expect(len(arguments) <= 1 and all(type(counts) is dict for counts in arguments), "collections.Counter")
    limits.spend(sum(map(len, arguments)))
    return Counter(*arguments)


def _make_decimal(arguments: tuple[Any, ...], limits: Limits) -> Decimal:
    expect(len(arguments) == 1 and type(arguments[0]) is str and len(arguments[0]) <= _MAX_DIGITS, "decimal.Decimal")
    return Decimal(arguments[0])


def _make_fraction(arguments: tuple[Any, ...], limits: Limits) -> Fraction:
    if len(arguments) == 1:
        (text,) = arguments
        # Never "1e999999999".
        expect(type(text) is str and len(text) <= _MAX_DIGITS and bool(_FRACTION.fullmatch(text)), "fractions.Fraction")
    else:
        expect(len(arguments) == 2 and all(type(part) is int for part in arguments), "fractions.Fraction")
    return Fraction(*arguments)


def _set_uuid(instance: uuid.UUID, state: Any) -> None:
    expect(type(state) is dict and state.keys() <= {"int", "is_safe"} and type(state.get("int")) is int, "uuid.UUID")
    expect(0 <= state["int"] < 2**128 and state.get("is_safe", 0) in (0, -1), "uuid.UUID")
    instance.__setstate__(state)  # type: ignore[attr-defined]


def _set_stream(instance: io.BytesIO, state: Any) -> None:
    expect(type(state) is tuple and len(state) == 3 and type(state[0]) is bytes and not state[2], "io.BytesIO")
    expect(type(state[1]) is int and 0 <= state[1] <= len(state[0]), "io.BytesIO")


def _set_ordered_dict(instance: OrderedDict[Any, Any], state: Any) -> None:
    """Attributes such as the ``_metadata`` of a module's state."""
    expect(type(state) is dict and all(type(key) is str for key in state), "collections.OrderedDict")


def _new(cls: Any) -> Callable[[tuple[Any, ...]], Any]:
    def make(arguments: tuple[Any, ...]) -> Any:
        expect(arguments == (), cls.__name__)
        return cls.__new__(cls)

    return make


_CALLS: dict[tuple[str, str], _Call] = {
    ("collections", "deque"): _make_deque,
    ("datetime", "date"): _make_date,
    ("datetime", "datetime"): _make_datetime,
    ("datetime", "time"): _make_time,
    ("datetime", "timedelta"): _make_timedelta,
    ("datetime", "timezone"): _make_timezone,
    ("decimal", "Decimal"): _make_decimal,
    ("fractions", "Fraction"): _make_fraction,
}
_BUILDS: dict[type, Callable[[Any, Any], None]] = {
    OrderedDict: _set_ordered_dict,
    io.BytesIO: _set_stream,
    uuid.UUID: _set_uuid,
    _Dtype: _describe_dtype,
    _OfUser: lambda instance, state: None,
}


# --- of torch, beside them ------------------------------------------------------------------------


def _checked(make: _Call) -> _Call:
    def make_tensor(arguments: tuple[Any, ...], limits: Limits) -> Any:
        # storage, offset, shape, strides, requires_grad, hooks, and what is unusual
        expect(len(arguments) >= 6 and type(arguments[1]) is int, "a tensor")
        expect(all(type(sizes) in (tuple, torch.Size) for sizes in arguments[2:4]), "a tensor")
        expect(all(type(size) is int for sizes in arguments[2:4] for size in sizes), "a tensor")
        expect(type(arguments[4]) is bool and type(arguments[5]) is OrderedDict, "a tensor")
        return make(arguments, limits)

    return make_tensor


def _make_parameter(arguments: tuple[Any, ...], limits: Limits) -> Placeholder:
    expect(len(arguments) == 3 and type(arguments[0]) is Placeholder, "a parameter")
    expect(type(arguments[1]) is bool and type(arguments[2]) is OrderedDict, "a parameter")
    return Placeholder()


_CONSTRUCTORS: dict[tuple[str, str], Constructor] = {
    **PLAIN,
    **_NUMPY,
    **{(module, name): Constructor(f"{module}.{name}", call=call) for (module, name), call in _CALLS.items()},
    ("_io", "BytesIO"): Constructor("io.BytesIO", new=_new(io.BytesIO)),
    ("uuid", "UUID"): Constructor("uuid.UUID", new=_new(uuid.UUID)),
    ("collections", "Counter"): Constructor("collections.Counter", call=_make_counter),
    ("torch._utils", "_rebuild_parameter"): Constructor("a parameter", call=_make_parameter),
    **{("torch._utils", name): Constructor("a tensor", call=_checked(call)) for name, call in TENSORS.items()},
}

KNOWN = frozenset(f"{module}.{name}" for module, name in _CONSTRUCTORS)
"""Qualified names of what an item may name."""
