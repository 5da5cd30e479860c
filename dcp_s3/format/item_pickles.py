"""Goes through torch.save output without loading it: archives, and the format before them.

It describes what an item's pickle would make, without making it. Storages must be as large as they say: torch believes
a pickle, and would read beyond what is stored.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from collections.abc import Callable
from typing import Any

from dcp_s3.format.pickled_tensors import STORAGE_TYPES, TENSORS, UNUSUAL_TENSORS, PickledStorage, load_storage
from dcp_s3.format.plain_values import find_plain
from dcp_s3.format.unpickling import MalformedPickleError, Sealed, unpickle
from dcp_s3.torch_private import FileReader, record_size

# Pickles before the bytes of the storages: magic number, protocol, system, value, keys of the storages.
_OLD_FORMAT_PICKLES = 5
# The later protocols that exist; a pickle of numbers may have these bytes by chance.
_LATER_PROTOCOL = re.compile(rb"\x80[\x03-\x05]")


# An archive with this entry goes to torch.jit.load, whatever torch.load is asked for.
_TORCHSCRIPT = "constants.pkl"


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
    """Check that the storages and tensors of an item lie within what is stored. Any globals are allowed.

    Args:
        stream: output of torch.save; its position moves.

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
    """Unpickle the stand-in for the value in a torch.save archive.

    Args:
        stream: the archive; its position moves.
        find_global: returns the stand-in for a global.

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
