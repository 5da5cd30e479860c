"""How torch.save writes items: what their pickles describe, without making it, and the archive around.

A tensor is a call of a function of ``torch._utils`` on a storage, which is a persistent id. Storages must be as large
as they say, and tensors lie within them: torch believes a pickle, and would read beyond what is stored.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from dcp_s3.format.allow_list import find_plain
from dcp_s3.format.unpickling import Allowed, MalformedPickleError, Sealed, unpickle
from dcp_s3.torch_private import FileReader, record_size

# Pickles before the bytes of the storages: magic number, protocol, system, value, keys of the storages.
_OLD_FORMAT_PICKLES = 5
# The later protocols that exist; a pickle of numbers may have these bytes by chance.
_LATER_PROTOCOL = re.compile(rb"\x80[\x03-\x05]")
# An archive with this entry goes to torch.jit.load, whatever torch.load is asked for.
_TORCHSCRIPT = "constants.pkl"


# --- tensors --------------------------------------------------------------------------------------

_MAX_COUNT = 2**62  # elements


class _StorageType(NamedTuple):
    """The type of a storage, like ``torch.FloatStorage``: its dtype, or None if it holds mere bytes."""

    dtype: torch.dtype | None


class PickledStorage(NamedTuple):
    """A storage, whose bytes are elsewhere."""

    key: str
    """Name of the storage in its archive."""
    nbytes: int
    """Size in bytes."""
    dtype: torch.dtype | None
    """Dtype of its elements; None if it consists of mere bytes."""


class PickledTensor(NamedTuple):
    """A tensor, or a parameter. It lies within its storage."""

    storage: PickledStorage
    dtype: torch.dtype
    offset: int
    """Offset of the first element, in elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements."""
    is_unusual: bool
    """Whether something must still be done with it: it is a conjugate, for example."""


def load_storage(found: Any) -> PickledStorage:
    """The storage that a persistent id describes.

    Raises:
        MalformedPickleError: it does not describe a storage.
    """
    # ("storage", type, key, location, number of elements), and a view's place in the format before archives.
    if type(found) is not tuple or len(found) not in (5, 6) or found[0] != "storage":
        raise MalformedPickleError("a storage is not described as torch does")
    _, kind, key, location, numel = found[:5]
    if type(kind) is not _StorageType or type(key) is not str or type(location) is not str or not _is_count(numel):
        raise MalformedPickleError("a storage is not described as torch does")
    return PickledStorage(key, numel * (kind.dtype.itemsize if kind.dtype else 1), kind.dtype)


def _describe(arguments: Sequence[Any], dtype: torch.dtype, *, is_unusual: bool = False) -> PickledTensor:
    """The tensor of a storage, offset, shape, strides, requires_grad and hooks."""
    storage, offset, shape, strides, requires_grad, hooks = arguments
    if not _is_count(offset) or not _are_counts(shape) or not _are_counts(strides) or len(shape) != len(strides):
        raise MalformedPickleError("a tensor without a shape")
    if type(requires_grad) is not bool or type(hooks) is not OrderedDict:
        raise MalformedPickleError("a tensor that is not an ordinary one")
    last = sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    end = offset if 0 in shape else offset + last + 1
    if end * dtype.itemsize > storage.nbytes:
        raise MalformedPickleError("a tensor that is larger than its storage")
    return PickledTensor(storage, dtype, offset, tuple(shape), tuple(strides), is_unusual)


def _fits(*lengths: int) -> Callable[..., bool]:
    """Whether so many arguments begin with a storage of elements."""
    return lambda storage, *rest: (
        len(rest) + 1 in lengths and type(storage) is PickledStorage and storage.dtype is not None
    )


def _fits_bytes(storage: Any, *rest: Any) -> bool:
    is_bytes = type(storage) is PickledStorage and storage.dtype is None
    return is_bytes and len(rest) in (6, 7) and isinstance(rest[5], torch.dtype)


def _fits_parameter(tensor: Any, requires_grad: Any, hooks: Any) -> bool:
    return type(tensor) is PickledTensor and type(requires_grad) is bool and type(hooks) is OrderedDict


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _are_counts(values: object) -> bool:
    return type(values) in (tuple, torch.Size) and all(map(_is_count, values))  # type: ignore[call-overload]


_STORAGES = {
    "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
    "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
    "Bool": torch.bool, "ComplexDouble": torch.complex128, "ComplexFloat": torch.complex64,
    "QUInt8": torch.quint8, "QInt8": torch.qint8, "QInt32": torch.qint32, "QUInt4x2": torch.quint4x2,
    "QUInt2x4": torch.quint2x4,
}  # fmt: skip
STORAGE_TYPES: dict[tuple[str, str], Any] = {
    **{
        (module, f"{name}Storage"): _StorageType(dtype)
        for module in ("torch", "torch.cuda")
        for name, dtype in _STORAGES.items()
    },
    ("torch.storage", "UntypedStorage"): _StorageType(None),
}
"""Stand-ins for the types of storages."""


def _allow(**rules: tuple[Callable[..., Any], Callable[..., bool]]) -> dict[tuple[str, str], Any]:
    return {("torch._utils", name): Allowed(f"torch._utils.{name}", *rule) for name, rule in rules.items()}


TENSORS = _allow(
    # After the hooks may come something unusual; in v3, whose storage holds bytes, a dtype before that.
    _rebuild_tensor_v2=(lambda *a: _describe(a[:6], a[0].dtype, is_unusual=len(a) > 6), _fits(6, 7)),
    _rebuild_tensor_v3=(lambda *a: _describe(a[:6], a[6], is_unusual=len(a) > 7), _fits_bytes),
    _rebuild_parameter=(lambda tensor, *_: tensor, _fits_parameter),
)
"""Stand-ins for the functions that make ordinary tensors."""

UNUSUAL_TENSORS = _allow(
    # Without requires_grad and hooks; with a quantizer's parameters before them.
    _rebuild_tensor=(lambda *a: _describe((*a, False, OrderedDict()), a[0].dtype, is_unusual=True), _fits(4)),
    _rebuild_qtensor=(lambda *a: _describe((*a[:4], *a[5:]), a[0].dtype, is_unusual=True), _fits(7)),
)
"""Stand-ins for further functions, which only torch itself may judge."""


# --- items ----------------------------------------------------------------------------------------


class BadArchiveError(MalformedPickleError):
    """An item's archive that nobody should read: damaged, compressed, or with overlapping entries."""


class Opaque(metaclass=Sealed):
    """Stands for an instance of any class, made from any arguments, with any state."""

    __slots__ = ()

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        pass


class _WithData(Opaque):
    """Stands for a tensor or storage, which must not be made with a size and no data."""

    __slots__ = ()

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        if any(isinstance(argument, int) for argument in arguments):
            raise MalformedPickleError("a tensor of a given size without data")
        return super().__new__(cls)


def is_archive(stream: io.BytesIO) -> bool:
    """Whether torch.load takes the stream for an archive rather than the old format."""
    with stream.getbuffer() as data:
        return bytes(data[:4]) == b"PK\x03\x04"


def check_storages(stream: io.BytesIO) -> None:
    """Check that storages and tensors of torch.save's output lie within what is stored. Any globals are allowed.

    Raises:
        BadArchiveError: the archive around the pickle is bad.
        MalformedPickleError: they do not, or the pickle is damaged or not what torch.save writes.
    """
    if is_archive(stream):
        unpickle_archive(stream, _find_any)
        return
    size = stream.getbuffer().nbytes
    stream.seek(0)
    for _ in range(_OLD_FORMAT_PICKLES):
        _check_protocol(stream)
        unpickle(stream, _find_any, _storage_loader(lambda key: size))


def unpickle_archive(stream: io.BytesIO, find_global: Callable[[str, str], Any]) -> Any:
    """Unpickle the stand-in for the value in a torch.save archive. The stream's position moves.

    Raises:
        BadArchiveError: it is damaged, or should not be read.
        MalformedPickleError: a storage is larger than what is stored, or the pickle is not what torch.save writes.
        UnsafeGlobalError: raised by ``find_global``.
    """
    size = stream.getbuffer().nbytes
    stream.seek(0)
    try:
        with zipfile.ZipFile(stream) as archive:
            entries = archive.infolist()
            names = {entry.filename.partition("/")[2] for entry in entries}
        if any(entry.compress_type for entry in entries) or sum(entry.file_size for entry in entries) > size:
            raise BadArchiveError("its archive is compressed, or its entries overlap")
        if len({name.lower() for name in names}) < len(entries):  # torch's reader ignores case
            raise BadArchiveError("its archive has two entries of one name")
        stream.seek(0)
        reader = FileReader(stream)
        if set(reader.get_all_records()) != names:  # torch and zipfile find the directory in different ways
            raise BadArchiveError("its archive has two directories")
        if _TORCHSCRIPT in names:
            raise BadArchiveError("it is a TorchScript archive, whose code torch.load would run")
        sizes = {name: record_size(reader, name) for name in names}
        if sum(sizes.values()) > size:
            raise BadArchiveError("its entries overlap")
        pickled = io.BytesIO(reader.get_record("data.pkl"))
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, ValueError) as error:
        raise BadArchiveError(f"its archive is damaged ({type(error).__name__}: {error})") from error
    _check_protocol(pickled)
    return unpickle(pickled, find_global, _storage_loader(lambda key: sizes.get(f"data/{key}", -1)))


def _check_protocol(stream: io.BytesIO) -> None:
    """Check that the pickle's protocol is torch.save's, 2, to its end.

    From 3 on, Python's unpickler takes Python 2's module names as they are, but torch's weights-only unpickler still
    translates them: it would not check what is imported.
    """
    start = stream.tell()
    with stream.getbuffer() as data:
        right = bytes(data[start : start + 2]) == b"\x80\x02"
        later = _LATER_PROTOCOL.search(data, start) is not None
    if later:
        try:
            later = any(opcode.name == "PROTO" and argument != 2 for opcode, argument, _ in pickletools.genops(stream))
        except Exception as error:
            raise MalformedPickleError(f"{type(error).__name__}: {error}") from error
        stream.seek(start)
    if later or not right:
        raise MalformedPickleError("it is no pickle, or its protocol is not 2")


def _storage_loader(size_of: Callable[[str], int]) -> Callable[[Any], PickledStorage]:
    def load(found: Any) -> PickledStorage:
        storage = load_storage(found)
        if storage.nbytes > size_of(storage.key):
            raise MalformedPickleError("a storage is larger than what is stored")
        return storage

    return load


def _find_any(module: str, name: str) -> Any:
    found = STORAGE_TYPES.get((module, name)) or UNUSUAL_TENSORS.get((module, name)) or find_plain(module, name)
    if found is None and module == "torch._utils" and name != "_rebuild_parameter":  # it may wrap any tensor
        found = TENSORS.get((module, name))
    if found is not None:
        return found
    sized = module.partition(".")[0] == "torch" and name.endswith(("Tensor", "Storage"))
    return _WithData if sized else Opaque
