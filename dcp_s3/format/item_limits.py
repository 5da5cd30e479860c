"""What a pickled item would allocate and hash, found without loading it.

torch's weights-only unpickler runs no code, but a few bytes can make it fill the memory (``bytearray(10**12)``,
archives whose entries overlap) or hash a tuple of tuples until the end of time. Here the item's pickle is gone through
with placeholders in the place of whatever it makes.
"""

from __future__ import annotations

import io
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from dcp_s3.format.unpickle import Constructor, Limits, MalformedPickleError, unpickle
from dcp_s3.torch_private import FileReader

# Pickles before the bytes of the storages: magic number, protocol, system, value, keys of the storages.
_OLD_FORMAT_PICKLES = 5
# That of torch.save. From 3 on, Python's unpickler takes Python 2's names of modules as they are, where torch's
# weights-only unpickler goes on translating them: what it checks would not be what is imported.
PROTOCOL = 2


class BadArchiveError(MalformedPickleError):
    """An item's archive should not be read by anybody: damaged, compressed, or with entries that overlap."""


class Placeholder:
    """Something that the pickle makes."""


class _Storage:
    """A storage of ``numel`` elements."""

    def __init__(self, numel: int) -> None:
        self.numel = numel


def check_limits(stream: io.BytesIO) -> None:
    """Check that loading what torch.save wrote takes time and memory in proportion to its length.

    Args:
        stream: from its beginning; its position moves.

    Raises:
        BadArchiveError: of the archive around the pickle.
        MalformedPickleError: it would take more, is damaged, or is not what torch.save writes.
    """
    if not is_archive(stream):
        _check_old_format(stream, stream.getbuffer().nbytes)
        return
    pickled, load_storage = open_pickle(stream)
    unpickle(pickled, _find_global, _build_of, load_storage, max_protocol=PROTOCOL)


def open_pickle(stream: io.BytesIO) -> tuple[bytes, Callable[[Any], Any]]:
    """The pickle in the archive that torch.save wrote, and what loads its persistent ids: placeholders of storages.

    Args:
        stream: its position moves.

    Raises:
        BadArchiveError: it is damaged, or should not be read.
    """
    size = stream.getbuffer().nbytes
    stream.seek(0)
    try:
        with zipfile.ZipFile(stream) as archive:
            entries = archive.infolist()
            sizes = {entry.filename.partition("/")[2]: entry.file_size for entry in entries}
        if any(entry.compress_type for entry in entries) or sum(entry.file_size for entry in entries) > size:
            raise BadArchiveError("its archive is compressed, or its entries overlap")
        stream.seek(0)
        pickled = FileReader(stream).get_record("data.pkl")
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, ValueError) as error:
        raise BadArchiveError(f"its archive is damaged ({type(error).__name__}: {error})") from error
    return pickled, _storage_loader(size, sizes)


def is_archive(stream: io.BytesIO) -> bool:
    """Whether torch.load takes it for an archive rather than for the old format."""
    with stream.getbuffer() as data:
        return bytes(data[:4]) == b"PK\x03\x04"


def _check_old_format(stream: io.BytesIO, size: int) -> None:
    data, position = stream.getvalue(), 0
    for _ in range(_OLD_FORMAT_PICKLES):
        _, position = unpickle(
            data, _find_global, _build_of, _storage_loader(size, None), start=position, max_protocol=PROTOCOL
        )


def _storage_loader(size: int, sizes: dict[str, int] | None) -> Callable[[Any], _Storage]:
    def load(found: Any) -> _Storage:
        # ("storage", type, key, location, number of elements), and a view's place in the old format.
        if type(found) is not tuple or len(found) not in (5, 6) or found[0] != "storage":
            raise MalformedPickleError("a storage is not described as torch does")
        key, numel = found[2], found[4]
        limit = size if sizes is None else sizes.get(f"data/{key}", -1) if type(key) is str else -1
        if type(key) is not str or type(numel) is not int or not 0 <= numel <= limit:
            raise MalformedPickleError("a storage is larger than what is stored")
        return _Storage(numel)

    return load


# --- what stands for the globals ------------------------------------------------------------------


def _find_global(module: str, name: str) -> Any:
    constant = vars(torch).get(name) if module == "torch" else None
    if isinstance(constant, torch.dtype):
        return constant
    full_name = f"{_RENAMED.get(module, module)}.{name}"
    if module.partition(".")[0] == "torch" and name.endswith(("Tensor", "Storage")):
        return Constructor(full_name, call=_make_from_no_sizes, new=_make_from_no_sizes)
    return Constructor(full_name, call=_CALLS.get(full_name, _make_any), new=_make_any)


def _make_any(arguments: tuple[Any, ...], limits: Limits | None = None) -> Any:
    return Placeholder()


def _make_from_no_sizes(arguments: tuple[Any, ...], limits: Limits | None = None) -> Any:
    if any(isinstance(argument, int) for argument in arguments):
        raise MalformedPickleError("a tensor of a given size without data")
    return Placeholder()


def _make_tensor(arguments: tuple[Any, ...], limits: Limits) -> Any:
    _check_bounds(arguments, 1)
    return Placeholder()


def _make_typed_tensor(arguments: tuple[Any, ...], limits: Limits) -> Any:
    dtype = arguments[6] if len(arguments) > 6 else None
    if not isinstance(dtype, torch.dtype):
        raise MalformedPickleError("a tensor without a dtype")
    _check_bounds(arguments, dtype.itemsize)
    return Placeholder()


def _check_bounds(arguments: tuple[Any, ...], element_size: int) -> None:
    """Arguments are storage, offset, shape and strides; torch would make the storage larger."""
    storage, offset, shape, strides = arguments[:4]
    if not isinstance(storage, _Storage) or len(shape) != len(strides):
        raise MalformedPickleError("a tensor without a storage")
    end = offset + 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
    if offset < 0 or any(extent < 0 for extent in shape) or (0 not in shape and end * element_size > storage.numel):
        raise MalformedPickleError("a tensor that is larger than its storage")


def _make_size(arguments: tuple[Any, ...], limits: Limits) -> Any:
    (shape,) = arguments
    limits.spend(len(shape))
    return tuple(shape)


def _make_bytes(arguments: tuple[Any, ...], limits: Limits) -> Any:
    """`bytes` of protocol 2, and `bytearray`."""
    if arguments and (
        not isinstance(arguments[0], (str, bytes)) or arguments[1:] not in ((), ("latin1",), ("latin-1",))
    ):
        raise MalformedPickleError("bytes that are made from something else than bytes")
    limits.spend(sum(map(len, arguments[:1])))
    return b""


def _make_set(arguments: tuple[Any, ...], limits: Limits) -> Any:
    for items in arguments:
        if not isinstance(items, (list, tuple)):
            raise MalformedPickleError("a set that is made from something else than a list")
        limits.spend(len(items))
        for item in items:
            limits.check_key(item)
    return Placeholder()


_RENAMED = {"__builtin__": "builtins"}  # by protocol 2
TENSORS: dict[str, Callable[[tuple[Any, ...], Limits], Any]] = {
    "_rebuild_tensor_v2": _make_tensor,
    "_rebuild_tensor_v3": _make_typed_tensor,
}
"""Functions of ``torch._utils`` that make ordinary tensors."""
_CALLS: dict[str, Callable[[tuple[Any, ...], Limits], Any]] = {
    "_codecs.encode": _make_bytes,
    "builtins.bytearray": _make_bytes,
    "builtins.frozenset": _make_set,
    "builtins.set": _make_set,
    "collections.Counter": lambda arguments, limits: Counter(),
    "collections.OrderedDict": lambda arguments, limits: OrderedDict(),
    "torch.Size": _make_size,
    "torch._utils._rebuild_qtensor": _make_tensor,
    "torch._utils._rebuild_tensor": _make_tensor,
    **{f"torch._utils.{name}": make for name, make in TENSORS.items()},
}


def _build_of(cls: type) -> Callable[[Any, Any], None]:
    return lambda instance, state: None
