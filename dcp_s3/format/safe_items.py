"""Finds items that could run code before they are loaded: items other than tensors are pickles.

Accepts what torch's weights-only unpickler accepts, and also items that consist of `item_values`.
"""

from __future__ import annotations

import io
import logging
import pickle
import re
import threading
from typing import NamedTuple

import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint

from dcp_s3.errors import CheckpointError, CorruptCheckpointError, UnsafeItemError
from dcp_s3.format.item_pickles import BadArchiveError, check_storages, is_archive
from dcp_s3.format.item_values import KNOWN, check_values
from dcp_s3.format.unpickling import MalformedPickleError, UnsafeGlobalError

logger = logging.getLogger(__name__)

# Finding the globals takes 0.1 us for each byte of the pickle.
MAX_INSPECTED = 32 * 2**10
_MAX_REASON = 300
_NOT_KNOWN = "is neither in torch's list of what is safe to load nor a type that dcp_s3 knows"


def check_item(stream: io.BytesIO, *, fqn: str, url: str, verified: bool) -> None:
    """Check that the item may be unpickled without restriction, and that it is what it seems.

    An item that consists of `item_values` is gone through, and not loaded. Other items are loaded by
    ``torch.load(stream, weights_only=True)`` with tensors on the meta device: their bytes are neither read nor copied.
    An item whose tensors cannot be there (quantized ones, for example) is loaded once more, on the CPU.

    Args:
        stream: output of torch.save; at its beginning afterwards.
        verified: whether a checksum says that these are the bytes that were saved.

    Raises:
        UnsafeItemError: it is refused.
        CorruptCheckpointError: it is damaged.
    """
    try:
        refused = _find_refusal(stream)
        if refused is not None and refused.is_for_torch:
            refused = _ask_torch(stream)
        if refused is not None:
            raise _explain(refused, fqn, url, verified) from None
    finally:
        stream.seek(0)


class _UnpicklingRefusal(NamedTuple):
    """Why an item should not be unpickled."""

    names: list[str]
    """Names of globals that nobody has allowed."""
    error: Exception
    """The error that says what is wrong."""
    is_for_torch: bool = False
    """Whether torch might still accept it."""


def _find_refusal(stream: io.BytesIO) -> _UnpicklingRefusal | None:
    """Why an item is refused, unless torch accepts it; None if it consists of `item_values`. The position moves."""
    error: Exception = MalformedPickleError("it is no archive")
    if is_archive(stream):
        try:
            check_values(stream)
        except BadArchiveError as found:
            return _UnpicklingRefusal([], found)
        except (UnsafeGlobalError, MalformedPickleError) as found:
            error = found
        else:
            return None
    unknown = find_unsafe_globals(stream)
    names = [name for name in unknown if name not in KNOWN]
    if names or not unknown:
        return _UnpicklingRefusal(names, error, is_for_torch=not unknown)
    if isinstance(error, UnsafeGlobalError):
        error = MalformedPickleError(f"it has {error} beside {', '.join(unknown)}")
    return _UnpicklingRefusal([], error)


def _ask_torch(stream: io.BytesIO) -> _UnpicklingRefusal | None:
    """Why torch refuses an item in the old format, or one whose globals it all allows. None if it does not."""
    try:
        check_storages(stream)
        _load(stream, "meta" if is_archive(stream) else "cpu")  # for the old format, meta hides errors
    except (MalformedPickleError, pickle.UnpicklingError) as error:
        return _UnpicklingRefusal([], error)
    except Exception:  # noqa: BLE001 - whatever kernels and constructors raise
        try:
            _load(stream, "cpu")
        except Exception as error:  # noqa: BLE001 - likewise
            return _UnpicklingRefusal([], error)
    return None


def _load(stream: io.BytesIO, device: str) -> None:
    stream.seek(0)
    torch.load(stream, map_location=device, weights_only=True)


def _explain(refused: _UnpicklingRefusal, fqn: str, url: str, verified: bool) -> CheckpointError:
    names, error, _ = refused
    if not names and not verified:
        return CorruptCheckpointError(
            f"{fqn!r} in {url} cannot be unpickled: {_reason(error)}. It was saved without a checksum: it is damaged, "
            "or not what torch.save writes; S3StorageReader(weights_only=False) hands it to the planner as it is",
            url=url,
        )
    if names:
        what = f"names {', '.join(names)}, which {_NOT_KNOWN}: it could run code"
    else:
        what = f"is not what torch's weights-only unpickler loads ({_reason(error)})"
    return UnsafeItemError(
        f"{fqn!r} in {url} {what}. It was not unpickled. Remedy, if you trust whoever wrote the checkpoint: "
        f"torch.serialization.add_safe_globals([{', '.join(names) or 'Class'}]) before the load, or "
        "S3StorageReader(weights_only=False)",
        url=url,
        fqn=fqn,
    )


def _reason(error: Exception) -> str:
    """The reason for an error, without torch's paragraphs around it."""
    text = re.sub(r"(?s)^.*WeightsUnpickler error: |^Weights only load failed\..*?\n\n|\n\nCheck the documentation.*$",
                  "", str(error)).strip()  # fmt: skip
    return f"{type(error).__name__}: {text[:_MAX_REASON]}"


def find_unsafe_globals(stream: io.BytesIO) -> list[str]:
    """Names of the globals in a torch.save stream that are not in torch's list; [] if it cannot tell."""
    position = stream.tell()
    stream.seek(0)
    try:
        return sorted(get_unsafe_globals_in_checkpoint(stream))
    except Exception:  # noqa: BLE001 - an old format, or no such stream at all
        return []
    finally:
        stream.seek(position)


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
        refused = _find_refusal(stream)
    finally:
        stream.seek(position)
    if refused is None or refused.is_for_torch or isinstance(refused.error, BadArchiveError):
        return
    names, error, _ = refused
    if names:
        logger.warning(
            "%r holds %s, which %s: loading it will need torch.serialization.add_safe_globals([%s]) or "
            "S3StorageReader(weights_only=False)",
            fqn, ", ".join(names), _NOT_KNOWN, ", ".join(names),
        )  # fmt: skip
    else:
        logger.warning("%r: loading it will need S3StorageReader(weights_only=False): %s", fqn, error)
