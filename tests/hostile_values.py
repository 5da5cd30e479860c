"""Items of numpy's and the standard library's values that nobody should load."""

from __future__ import annotations

from typing import Any

from tests import hostile
from tests.hostile import call, name, number, plain, text


def dtype(kind: str, state: Any = (3, "<", None, None, None, -1, -1, 0)) -> bytes:
    """Opcodes of a dtype, with ``state``."""
    return call("numpy", "dtype", text(kind), b"\x89", b"\x88") + (plain(state) + b"b" if state is not None else b"")


U1 = dtype("u1", (3, "|", None, None, None, -1, -1, 0))


def array(shape: Any, data: bytes, *, kind: bytes | None = None, start: Any = (0,), version: int = 1) -> bytes:
    """Opcodes of an array."""
    made = call("numpy._core.multiarray", "_reconstruct", name("numpy", "ndarray"), plain(start), latin(b"b"))
    return made + b"(" + number(version) + plain(shape) + (kind or U1) + b"\x89" + latin(data) + b"tb"


def latin(data: bytes) -> bytes:
    """Opcodes of bytes."""
    return call("_codecs", "encode", text(data.decode("latin-1")), text("latin1"))


def scalar(kind: bytes, data: bytes) -> bytes:
    """Opcodes of a scalar of numpy."""
    return call("numpy._core.multiarray", "scalar", kind, latin(data))


_RANGE = call("builtins", "range", b"K\x00", number(10**12), b"K\x01")
"""One of 10**12."""
TEXT = (3, "<", None, None, None, 12, 4, 8)
HOSTILE: dict[str, bytes] = {
    "an array larger than its bytes": array((10**12,), b"x"),
    "an array smaller than its bytes": array((1,), b"xyz"),
    "an array of negative size": array((-1, -3), b"xyz"),
    "an array that begins large": array((1,), b"x", start=(10**12,)),
    "an array without end": array((2**40, 0, 2**40), b""),
    "an array of many dimensions": array((1,) * 65, b"x"),
    "an array of a later version": array((1,), b"x", version=2),
    "an array of sizes that are no numbers": array((True, 1.0), b"x"),
    "an array of objects": array((1,), bytes(8), kind=dtype("O8", (3, "|", None, None, None, -1, -1, 63))),
    "an array of pointers": array((1,), bytes(8), kind=dtype("O8", None)),
    "an array of records": array((1,), bytes(4), kind=dtype("V4", (3, "|", None, ("a",), {"a": 1}, 4, 1, 0))),
    "an array that is filled twice": array((1,), b"x") + b"(K\x01" + plain((1,)) + U1 + b"\x89" + latin(b"y") + b"tb",
    "an array of something else": call(
        "numpy._core.multiarray", "_reconstruct", name("collections", "deque"), plain((0,)), latin(b"b")
    ),
    "an array of texts that are none": array((1,), b"\xff" * 12, kind=dtype("U3", TEXT)),
    "an array by its class": call("numpy", "ndarray", plain((10**12,))),
    "an array by its class's new": name("numpy", "ndarray") + plain(((10**12,),)) + b"\x81",
    "a dtype of huge texts": dtype("U3", (3, "<", None, None, None, 10**9, 4, 8)),
    "a dtype of negative texts": dtype("U3", (3, "<", None, None, None, -12, 4, 8)),
    "a dtype with fields": dtype("u1", (3, "|", None, ("a",), {"a": (1, 2)}, -1, -1, 0)),
    "a dtype with a subarray": dtype("u1", (3, "|", (1, (2,)), None, None, -1, -1, 0)),
    "a dtype of another byte order": dtype("u4", (3, "x", None, None, None, -1, -1, 0)),
    "a dtype that is numpy's own": call("numpy", "dtype", text("f4"), b"\x89", b"\x89"),
    "a dtype that is aligned": call("numpy", "dtype", text("f4"), b"\x88", b"\x88"),
    "a dtype of a list": call("numpy", "dtype", plain([("a", "f4")]), b"\x89", b"\x88"),
    "a dtype of fields": call("numpy", "dtype", text("f4,f4"), b"\x89", b"\x88"),
    "a dtype that changes": dtype("U3", TEXT) + plain(TEXT) + b"b",
    "a dtype of dates without a unit": dtype("M8"),
    "a dtype of dates of a strange unit": dtype("M8", (4, "<", None, None, None, -1, -1, 0, (None, (b"ns]", 1, 1, 1)))),
    "a scalar of few bytes": scalar(dtype("u8"), b"xyz"),
    "a scalar of an object": scalar(dtype("O8", (3, "|", None, None, None, -1, -1, 63)), bytes(8)),
    "a deque of 10**12": call("collections", "deque", _RANGE),
    "a counter of 10**12": call("collections", "Counter", _RANGE),
    "a fraction of huge numbers": call("fractions", "Fraction", text("1e999999999")),
    "a fraction of many digits": call("fractions", "Fraction", text("1" * 100_000)),
    "a fraction of nothing": call("fractions", "Fraction", b"K\x01", b"K\x00"),
    "a decimal of many digits": call("decimal", "Decimal", text("1" * 10_000_000)),
    "a decimal of a tuple": call("decimal", "Decimal", plain((0, (1,) * 5, 10**18))),
    "a date of no calendar": call("datetime", "date", latin(b"\x07\xe4\x02\x1f")),
    "a date of numbers": call("datetime", "date", number(2020), b"K\x01", b"K\x01"),
    "a date with a zone of its own": call(
        "datetime", "datetime", latin(b"\x07\xe4\x02\x01" + bytes(6)), call("tests.hostile", "trip")
    ),
    "a time of no clock": call("datetime", "time", latin(b"\x19" + bytes(5))),
    "a huge timedelta": call("datetime", "timedelta", number(10**20), b"K\x00", b"K\x00"),
    "a zone of two days": call("datetime", "timezone", call("datetime", "timedelta", b"K\x02", b"K\x00", b"K\x00")),
    "a huge path": call("pathlib", "PosixPath", *[text("a" * 1000)] * 100),
    "a uuid of many bits": name("uuid", "UUID") + b")\x81}" + text("int") + number(2**200) + b"sb",
    "a uuid with more": name("uuid", "UUID") + b")\x81" + plain({"int": 5, "hex": 1}) + b"b",
    "a uuid by its class": call("uuid", "UUID", text("x")),
    "a stream beyond its end": name("_io", "BytesIO") + b")\x81(" + latin(b"x") + number(2**62) + b"Ntb",
    "a stream with attributes": name("_io", "BytesIO")
    + b")\x81("
    + latin(b"x")
    + b"K\x00"
    + plain({"read": 1})
    + b"tb",
    "a stream of a file": call("_io", "FileIO", text("/etc/passwd")),
    "attributes of a class": name("collections", "deque") + plain({"append": 1}) + b"b",
    "attributes of an array's class": name("numpy", "ndarray") + plain((None, {"x": 1})) + b"b",
    "attributes of a date": call("datetime", "timedelta", b"K\x01", b"K\x02", b"K\x03") + plain({"x": 1}) + b"b",
    "a tensor of a huge range": call(
        "torch._utils",
        "_rebuild_tensor_v2",
        hostile.storage(4),
        b"K\x00",
        *[_RANGE] * 2,
        b"\x89",
        call("collections", "OrderedDict"),
    ),
}
"""Name -> opcodes."""
