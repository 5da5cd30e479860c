"""Finds items that could run code before they are loaded: items other than tensors are pickles.

Accepts what torch's weights-only unpickler accepts, and also items of the allow-list. Storages must be as large as they
say, and tensors lie within them: torch believes a pickle, and would read beyond what is stored.
"""

from __future__ import annotations

import functools
import io
import logging
import pickletools
import re
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint

from dcp_s3.errors import CorruptCheckpointError, UnsafeItemError
from dcp_s3.format.allow_list import PLAIN, VALUES, Value, find_plain
from dcp_s3.format.archive import TENSORS, UNUSUAL_TENSORS, PickledStorage, load_storage
from dcp_s3.format.unpickling import Allowed, MalformedPickleError, Opaque, UnsafeGlobalError, unpickle
from dcp_s3.torch_private import FileReader, record_size

logger = logging.getLogger(__name__)

ITEMS = {**TENSORS, **VALUES}
"""Stand-ins for the globals of items, beyond those of plain values."""
_KNOWN = frozenset(f"{module}.{name}" for module, name in (*ITEMS, *PLAIN))
# Finding the globals takes 0.1 us for each byte of the pickle.
MAX_INSPECTED = 32 * 2**10
_MAX_REASON = 300
_NOT_KNOWN = "is neither in torch's list of what is safe to load nor a type that dcp_s3 knows"
# The later protocols that exist; a pickle of numbers may have these bytes by chance.
_LATER_PROTOCOL = re.compile(rb"\x80[\x03-\x05]")
# An archive with this entry goes to torch.jit.load, whatever torch.load is asked for.
_TORCHSCRIPT = "constants.pkl"
_ARCHIVE = b"PK\x03\x04"


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
    if not names and not verified:
        raise CorruptCheckpointError(
            f"{fqn!r} in {url} {_describe(names, error)}. It was saved without a checksum: it is damaged, or not what "
            "torch.save writes; S3StorageReader(weights_only=False) hands it to the planner as it is",
            url=url,
        )
    raise UnsafeItemError(
        f"{fqn!r} in {url} {_describe(names, error)}. It was not unpickled. Remedy, if you trust whoever wrote the "
        f"checkpoint: {_remedy(names)}",
        url=url,
        fqn=fqn,
    )


def _find_refusal(stream: io.BytesIO, *, ask_torch: bool) -> tuple[list[str], Exception | None]:
    """Names of globals that nobody has allowed, and what is wrong; None if nothing is, as far as was asked.

    The position moves.
    """
    try:
        _unpickle_archive(stream, functools.partial(_find_in_item, allowed_by_user()))
    except BadArchiveError as error:
        return [], error
    except (UnsafeGlobalError, MalformedPickleError) as error:
        stream.seek(0)
        try:
            unknown = sorted(get_unsafe_globals_in_checkpoint(stream))
        except Exception:  # noqa: BLE001 - whatever a damaged pickle makes torch raise
            unknown = []
        if unknown:
            return [name for name in unknown if name not in _KNOWN], error
        return [], _ask_torch(stream) if ask_torch else None
    return [], None


def _describe(names: Sequence[str], error: Exception) -> str:
    if names:
        return f"names {', '.join(names)}, which {_NOT_KNOWN}: it could run code"
    # Without torch's paragraphs around it.
    text = re.sub(r"(?s)^.*WeightsUnpickler error: |^Weights only load failed\..*?\n\n|\n\nCheck the documentation.*$",
                  "", str(error)).strip()  # fmt: skip
    return f"is not what torch's weights-only unpickler loads ({type(error).__name__}: {text[:_MAX_REASON]})"


def _remedy(names: Sequence[str]) -> str:
    return (
        f"torch.serialization.add_safe_globals([{', '.join(names) or 'Class'}]) before the load, or "
        "S3StorageReader(weights_only=False)"
    )


def _find_in_item(allowed: Mapping[str, Any], module: str, name: str) -> Any:
    found = ITEMS.get((module, name)) or find_plain(module, name) or allowed.get(f"{module}.{name}")
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
        found[name] = Opaque if is_new else Allowed(name, lambda *_: Value())
    return found


def _ask_torch(stream: io.BytesIO) -> Exception | None:
    """Why torch refuses an item whose globals it all allows; None if it does not."""
    try:
        check_storages(stream)
        stream.seek(0)
        torch.load(stream, map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - whatever kernels and constructors raise
        return error
    return None


# --- archives -------------------------------------------------------------------------------------


class BadArchiveError(MalformedPickleError):
    """An item's archive that nobody should read: damaged, compressed, or with overlapping entries."""


class _WithData(Opaque):
    """Stands for a tensor or storage, which must not be made with a size and no data."""

    __slots__ = ()

    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        if any(isinstance(argument, int) for argument in arguments):
            raise MalformedPickleError("a tensor of a given size without data")
        return super().__new__(cls)


def check_storages(stream: io.BytesIO) -> None:
    """Check that storages and tensors of torch.save's output lie within what is stored. Any globals are allowed.

    Raises:
        BadArchiveError: the archive around the pickle is bad.
        MalformedPickleError: they do not, or the pickle is damaged or not what torch.save writes.
    """
    _unpickle_archive(stream, _find_any)


def _find_any(module: str, name: str) -> Any:
    names = module, name
    found = UNUSUAL_TENSORS.get(names) or find_plain(*names)
    if found is None and name != "_rebuild_parameter":  # it may wrap any tensor
        found = TENSORS.get(names)
    if found is not None:
        return found
    sized = module.partition(".")[0] == "torch" and name.endswith(("Tensor", "Storage"))
    return _WithData if sized else Opaque


def _unpickle_archive(stream: io.BytesIO, find_global: Callable[[str, str], Any]) -> Any:
    """Unpickle the stand-in for the value in a torch.save archive. The stream's position moves.

    Raises:
        BadArchiveError: it is damaged, or should not be read.
        MalformedPickleError: a storage is larger than what is stored, or the pickle is not what torch.save writes.
        UnsafeGlobalError: raised by ``find_global``.
    """
    with stream.getbuffer() as data:
        size, signature = data.nbytes, bytes(data[:4])
    if signature != _ARCHIVE:  # or torch.load would take it for the format before archives
        raise BadArchiveError("it is no archive")
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
    return _unpickle_item(pickled, find_global, lambda key: sizes.get(f"data/{key}", -1))


def _unpickle_item(stream: io.BytesIO, find_global: Callable[[str, str], Any], size_of: Callable[[str], int]) -> Any:
    """Unpickle what torch.save wrote, whose storages have at most these sizes by key. The protocol must be torch's, 2,
    to its end.

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

    def load(found: Any) -> PickledStorage:
        storage = load_storage(found)
        if storage.nbytes > size_of(storage.key):
            raise MalformedPickleError("a storage is larger than what is stored")
        return storage

    return unpickle(stream, find_global, load)


# --- when saving ----------------------------------------------------------------------------------

_inspected: dict[str, int] = {}
_lock = threading.Lock()


def warn_of_unsafe_item(fqn: str, stream: io.BytesIO) -> None:
    """Log a warning if a load of this item will need ``weights_only=False`` or a safe global. The position stays.

    Inspects an item once per process, and again when torch's list of safe globals has changed. Skips items of more
    than `MAX_INSPECTED` bytes. Takes about 0.1 ms.
    """
    safe = hash(frozenset(get_safe_globals()))
    with _lock:
        if _inspected.get(fqn) == safe or stream.getbuffer().nbytes > MAX_INSPECTED:
            return
        _inspected[fqn] = safe
    position = stream.tell()
    try:
        names, error = _find_refusal(stream, ask_torch=False)
    finally:
        stream.seek(position)
    if error is not None and not isinstance(error, BadArchiveError):
        logger.warning("%r %s. Loading it will need %s", fqn, _describe(names, error), _remedy(names))
