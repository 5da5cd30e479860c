"""Finds items that could run code before they are loaded: items other than tensors are pickles.

Accepts what torch's weights-only unpickler accepts, and also items of the allow-list, and `VALUES`: values of Python's
standard library and of numpy, which trainers keep in every run (states of random numbers, dates, counts, paths). Making
one runs no code that a pickle chooses. Not accepted: arrays of objects or records, subclasses of arrays, and numpy's
generators (their pickles name functions that change with numpy, and trust their arguments;
``generator.bit_generator.state`` is a dict of plain values).

Storages must be as large as they say, and tensors lie within them: torch believes a pickle, and would read beyond what
is stored.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint

from dcp_s3.errors import CorruptCheckpointError, UnsafeItemError
from dcp_s3.format.allow_list import (
    Allowed,
    MalformedPickleError,
    Opaque,
    UnsafeGlobalError,
    Value,
    expect,
    table,
    unpickle,
)
from dcp_s3.format.archive import PROTOCOL, SIGNATURE, TENSORS, UNUSUAL_TENSORS, PickledStorage, load_storage
from dcp_s3.torch_private import FileReader, record_sizes

logger = logging.getLogger(__name__)

# --- values of numpy and the standard library -----------------------------------------------------

_DTYPE = re.compile(r"b1|[iu][1248]|f(2|4|8|16)|c(8|16|32)|[SU][0-9]{1,9}")
_MAX_DIMENSIONS = 32  # the limit of numpy 1; later versions allow 64
_MAX_BYTES = 2**62


class _Interval(Value):
    """A range or a slice itself could double a list again and again."""

    __slots__ = ()

    def __init__(self, *bounds: Any) -> None:
        expect(len(bounds) == 3 and all(bound is None or type(bound) is int for bound in bounds), "a range or slice")


class _Dtype(Value):
    __slots__ = ("described", "dtype")

    def __init__(self, *arguments: Any) -> None:
        expect(len(arguments) == 3 and type(arguments[0]) is str and arguments[1:] == (False, True), "numpy.dtype")
        if not _DTYPE.fullmatch(arguments[0]):
            raise MalformedPickleError(f"a numpy.dtype of {arguments[0][:20]!r}, which is neither numbers nor texts")
        self.dtype, self.described = np.dtype(arguments[0]), False

    def __setstate__(self, state: Any) -> None:
        """Take the byte order. A state that numpy would not write could make it read beyond its memory."""
        expect(not self.described and type(state) is tuple and len(state) == 8, "numpy.dtype")
        self.described = True
        if state[1] in ("<", ">"):
            self.dtype = self.dtype.newbyteorder(state[1])
        written: Any = self.dtype.__reduce__()[2]
        expect(state == written, "numpy.dtype")


class _Array(Value):
    __slots__ = ("filled",)

    def __init__(self, *arguments: Any) -> None:
        expect(len(arguments) == 3 and arguments[0] is _NDARRAY and arguments[1:] == ((0,), b"b"), "numpy.ndarray")
        self.filled = False

    def __setstate__(self, state: Any) -> None:
        expect(not self.filled and type(state) is tuple and len(state) == 5, "numpy.ndarray")
        self.filled = True
        version, shape, made, _, data = state
        kinds = (int, tuple, _Dtype, bool, bytes)
        expect(tuple(map(type, state)) == kinds and version == 1 and len(shape) <= _MAX_DIMENSIONS, "numpy.ndarray")
        expect(all(type(size) is int and size >= 0 for size in shape), "numpy.ndarray")
        nbytes = made.dtype.itemsize * math.prod(shape)
        if nbytes != len(data) or made.dtype.itemsize * math.prod(size or 1 for size in shape) > _MAX_BYTES:
            raise MalformedPickleError(f"a numpy.ndarray of {nbytes} bytes is made from {len(data)}")
        if made.dtype.kind == "U" and data:
            points = np.frombuffer(data, np.dtype("u4").newbyteorder(made.dtype.byteorder))
            expect(points.max() <= sys.maxunicode, "a text of numpy")


def _make_scalar(made: _Dtype, data: bytes) -> Any:
    expect(len(data) == made.dtype.itemsize, "a scalar of numpy")
    return np.frombuffer(data, made.dtype)[0] if data else made.dtype.type()


def _make_moment(kind: Any, fields: str, *arguments: Any) -> Any:
    """A date or time. Its class believes the bytes that it is made from: they must be those of its fields."""
    made = kind(*arguments)
    made.replace(**{field: getattr(made, field) for field in fields.split()})  # checks them
    return made


def _make_deque(items: Any = (), length: int | None = None) -> deque[Any]:
    expect(not items, "collections.deque")
    return deque(maxlen=length)


_CORES = ("numpy.core.multiarray", "numpy._core.multiarray")  # of numpy 1, of numpy 2
_DAY, _CLOCK = "year month day", "hour minute second microsecond"
_NDARRAY = Allowed("numpy.ndarray")
ITEMS: dict[str, Any] = {
    **TENSORS,
    "numpy.ndarray": _NDARRAY,
    **table(
        ("numpy.dtype", _Dtype),
        *((f"{core}._reconstruct", _Array) for core in _CORES),
        *((f"{core}.scalar", _make_scalar, (_Dtype, bytes)) for core in _CORES),
        ("builtins.range", _Interval),
        ("builtins.slice", _Interval),
        ("collections.Counter", Counter, (), (dict,)),
        ("collections.deque", _make_deque),
        ("datetime.date", functools.partial(_make_moment, date, _DAY), (bytes,)),
        *((f"datetime.{kind.__name__}", functools.partial(_make_moment, kind, fields), (bytes,), (bytes, timezone))
          for kind, fields in ((datetime, f"{_DAY} {_CLOCK}"), (time, _CLOCK))),
        ("datetime.timedelta", timedelta, (int, int, int)),
        ("datetime.timezone", timezone, (timedelta,), (timedelta, str)),
    ),
}  # fmt: skip
"""Stand-ins for the globals of items."""


# --- whole items ----------------------------------------------------------------------------------

_MAX_REASON = 300


class BadArchiveError(MalformedPickleError):
    """An item's archive that nobody should read: damaged, compressed, or with overlapping entries."""


def check_item(stream: io.BytesIO, *, fqn: str, url: str, verified: bool) -> None:
    """Check that the item may be unpickled without restriction, and that it is what it seems.

    An item of the allow-list is gone through, and not loaded. Other items are loaded by
    ``torch.load(stream, weights_only=True)``, if torch allows all that they name.

    Args:
        stream: output of torch.save; at its beginning afterwards.
        verified: whether a checksum says that these are the bytes that were saved.

    Raises:
        UnsafeItemError: it is refused.
        CorruptCheckpointError: it is damaged.
    """
    try:
        names, error = _find_refusal(stream, ask_torch=True)
    finally:
        stream.seek(0)
    if error is None:
        return
    what, remedy = _explain(names, error)
    text = f"{fqn!r} in {url} {what}. It was not unpickled. "
    remedy = f"Remedy, if you trust whoever wrote the checkpoint: {remedy}"
    if not names and not verified:
        text += "It was saved without a checksum, and may be damaged: then load an earlier checkpoint. "
        raise CorruptCheckpointError(text + remedy, url=url)
    raise UnsafeItemError(text + remedy, url=url, fqn=fqn)


MAX_INSPECTED = 32 * 2**10
"""Most bytes of an item that a save looks into: it takes 0.1 us for each."""
_inspected: set[str] = set()


def warn_of_unsafe_item(fqn: str, stream: io.BytesIO) -> None:
    """Log a warning if a load of this item will need ``weights_only=False`` or a safe global. The position stays.

    Inspects an item once per process, which takes about 0.1 ms, and none of more than `MAX_INSPECTED` bytes.
    """
    if fqn in _inspected or stream.getbuffer().nbytes > MAX_INSPECTED:
        return
    _inspected.add(fqn)
    position = stream.tell()
    names, error = _find_refusal(stream, ask_torch=False)
    stream.seek(position)
    if error is not None and not isinstance(error, BadArchiveError):
        logger.warning("%r %s. Loading it will need %s", fqn, *_explain(names, error))


def _find_refusal(stream: io.BytesIO, *, ask_torch: bool) -> tuple[list[str], Exception | None]:
    """Names of globals that nobody has allowed, and what is wrong; None if nothing is, as far as was asked. The
    position moves."""
    try:
        _unpickle_archive(stream, ITEMS, _find_allowed)
    except BadArchiveError as error:
        return [], error
    except (UnsafeGlobalError, MalformedPickleError) as error:
        stream.seek(0)
        try:
            unknown = sorted(get_unsafe_globals_in_checkpoint(stream))
        except Exception:  # noqa: BLE001 - whatever a damaged pickle makes torch raise
            unknown = []
        if unknown:
            return [name for name in unknown if name not in ITEMS], error
        if ask_torch:  # it allows all of them
            try:
                check_storages(stream)
                stream.seek(0)
                torch.load(stream, map_location="cpu", weights_only=True)
            except Exception as refusal:  # noqa: BLE001 - whatever kernels and constructors raise
                return [], refusal
    return [], None


def _find_allowed(module: str, name: str) -> Any:
    """The stand-in for what the user allows by ``torch.serialization.add_safe_globals``; None for anything else."""
    for each in () if "." in name else get_safe_globals():
        value, known_as = each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
        if known_as == f"{module}.{name}":
            # A function's result, or a member of an enumeration, may not be a new value: it has no state to set.
            is_new = isinstance(value, type) and not issubclass(value, Enum)
            return Opaque if is_new else Allowed(known_as, lambda *_: Value())
    return None


def _explain(names: Sequence[str], error: Exception) -> tuple[str, str]:
    """What is wrong, and the remedy."""
    if names:
        what = (
            f"names {', '.join(names)}, which is neither in torch's list of what is safe to load nor a type that "
            "dcp_s3 knows: it could run code"
        )
    else:
        # Without torch's paragraphs around it.
        text = re.sub(
            r"(?s)^.*WeightsUnpickler error: |^Weights only load failed\..*?\n\n|\n\nCheck the documentation.*$",
            "",
            str(error),
        ).strip()
        what = f"is not what torch's weights-only unpickler loads ({type(error).__name__}: {text[:_MAX_REASON]})"
    return what, (
        f"torch.serialization.add_safe_globals([{', '.join(names) or 'Class'}]) before the load, or "
        "S3StorageReader(weights_only=False)"
    )


def check_storages(stream: io.BytesIO) -> None:
    """Check that storages and tensors of torch.save's output lie within what is stored. Any globals are allowed.

    Raises:
        BadArchiveError: the archive around the pickle is bad.
        MalformedPickleError: they do not, or the pickle is damaged or not what torch.save writes.
    """
    _unpickle_archive(stream, _ANY, _find_any)


# A parameter may wrap any tensor.
_ANY = TENSORS | UNUSUAL_TENSORS | {"torch._utils._rebuild_parameter": Opaque}


class _WithData(Opaque):
    """Stands for a tensor or storage, which must not be made with a size and no data."""

    __slots__ = ()

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        if any(isinstance(argument, int) for argument in arguments):
            raise MalformedPickleError("a tensor of a given size without data")
        return super().__new__(cls)


def _find_any(module: str, name: str) -> Any:
    sized = module.partition(".")[0] == "torch" and name.endswith(("Tensor", "Storage"))
    return _WithData if sized else Opaque


def _unpickle_archive(
    stream: io.BytesIO, table: Mapping[str, Any], find_other: Callable[[str, str], Any] | None = None
) -> Any:
    """Unpickle the stand-in for the value in a torch.save archive (see `unpickle`). The stream's position moves."""
    with stream.getbuffer() as data:
        size, signature = data.nbytes, bytes(data[:4])
    if signature != SIGNATURE:  # or torch.load would take it for the format before archives
        raise BadArchiveError("it is no archive")
    stream.seek(0)
    try:
        reader = FileReader(stream)  # that of torch.load: what it does not see does no harm
        sizes = record_sizes(reader)
        if "constants.pkl" in sizes:
            raise BadArchiveError("it is a TorchScript archive, whose code torch.load would run")
        if sum(sizes.values()) > size:
            raise BadArchiveError("its archive is compressed, or its entries overlap")
        pickled = reader.get_record("data.pkl")
    except (RuntimeError, OSError, ValueError, MemoryError) as error:
        raise BadArchiveError(f"its archive is damaged ({type(error).__name__}: {error})") from error
    # From protocol 3 on, Python's unpickler takes Python 2's module names as they are, but torch's weights-only
    # unpickler still translates them: it would not check what is imported.
    if pickled[:2] != bytes((0x80, PROTOCOL)):
        raise MalformedPickleError("it is no pickle, or its protocol is not 2")

    def find_storage(found: Any) -> PickledStorage:
        storage = load_storage(found)
        if storage.nbytes > sizes.get(f"data/{storage.key}", -1):
            raise MalformedPickleError("a storage is larger than what is stored")
        return storage

    return unpickle(io.BytesIO(pickled), table, find_other=find_other, find_outside=find_storage, protocol=PROTOCOL)
