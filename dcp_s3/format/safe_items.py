"""Items that are no tensors are pickles: one that could run code is found before it is loaded.

Taken is what torch's weights-only unpickler takes, and what consists of `item_values` besides.
"""

from __future__ import annotations

import io
import logging
import pickle
import re
import threading

import torch
from torch.serialization import get_safe_globals, get_unsafe_globals_in_checkpoint

from dcp_s3.errors import CheckpointError, CorruptCheckpointError, UnsafeItemError
from dcp_s3.format.item_limits import BadArchiveError, check_limits, is_archive
from dcp_s3.format.item_values import KNOWN, check_values
from dcp_s3.format.unpickle import MalformedPickleError, UnsafeGlobalError

logger = logging.getLogger(__name__)

# Finding the globals takes 0.1 us for each byte of the pickle.
MAX_INSPECTED = 32 * 2**10
_MAX_REASON = 300
_NOT_KNOWN = "is neither in torch's list of what is safe to load nor a type that dcp_s3 knows"


def check_item(stream: io.BytesIO, *, fqn: str, url: str, verified: bool) -> None:
    """Check that the item may be unpickled without restriction, and that it is what it seems.

    It is loaded by ``torch.load(stream, weights_only=True)`` with tensors on the meta device: their bytes are neither
    read nor copied. A tensor that can not be there (a quantized one, for example) is loaded once more as what it is.
    What names values of `item_values` is not loaded, but gone through.

    Args:
        stream: what torch.save wrote; at its beginning afterwards.
        fqn: of the item.
        url: of the checkpoint.
        verified: whether a checksum says that these are the bytes that were saved.

    Raises:
        UnsafeItemError: it is refused.
        CorruptCheckpointError: it is damaged.
    """
    try:
        check_limits(stream)
        _load(stream, "meta" if is_archive(stream) else "cpu")  # in the old format, meta hides errors
    except (MalformedPickleError, pickle.UnpicklingError) as error:
        unknown = [] if isinstance(error, BadArchiveError) else find_unsafe_globals(stream)
        refused = _refused(stream, unknown, error)
        if refused is not None:
            raise _explain(*refused, fqn, url, verified) from None
    except Exception:  # noqa: BLE001 - whatever kernels and constructors raise
        try:
            _load(stream, "cpu")
        except Exception as error:
            raise _explain([], error, fqn, url, verified) from error
    finally:
        stream.seek(0)


def _load(stream: io.BytesIO, device: str) -> None:
    stream.seek(0)
    torch.load(stream, map_location=device, weights_only=True)


def _refused(stream: io.BytesIO, unknown: list[str], error: Exception) -> tuple[list[str], Exception] | None:
    """Why an item is refused: globals that may be unsafe, or what else is wrong with it. None if it is not refused.

    Args:
        stream: its position moves.
        unknown: the item's globals that are not in torch's list.
        error: why torch refuses it.
    """
    unsafe = [name for name in unknown if name not in KNOWN]
    if unsafe or not unknown:
        return unsafe, error
    try:
        check_values(stream)
    except UnsafeGlobalError as found:
        return [], MalformedPickleError(f"it has {found} beside {', '.join(unknown)}")
    except MalformedPickleError as found:
        return [], found
    return None


def _explain(names: list[str], error: Exception, fqn: str, url: str, verified: bool) -> CheckpointError:
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
    """What went wrong, without torch's paragraphs around it."""
    text = re.sub(r"(?s)^.*WeightsUnpickler error: |^Weights only load failed\..*?\n\n|\n\nCheck the documentation.*$",
                  "", str(error)).strip()  # fmt: skip
    return f"{type(error).__name__}: {text[:_MAX_REASON]}"


def find_unsafe_globals(stream: io.BytesIO) -> list[str]:
    """Names of the globals in a torch.save stream that are not in torch's list; [] where that can not be told."""
    position = stream.tell()
    stream.seek(0)
    try:
        return sorted(get_unsafe_globals_in_checkpoint(stream))
    except Exception:  # noqa: BLE001 - of an old format, or no such stream at all
        return []
    finally:
        stream.seek(position)


# --- when saving ----------------------------------------------------------------------------------

_inspected: dict[str, int] = {}
_lock = threading.Lock()


def warn_of_unsafe_item(fqn: str, stream: io.BytesIO) -> None:
    """Log a warning if a load of this item will need ``weights_only=False`` or a safe global.

    An item is inspected once per process, and again when torch's list of safe globals has changed; never one of more
    than `MAX_INSPECTED` bytes. About 0.1 ms.

    Args:
        fqn: of the item.
        stream: what the planner resolved it to; its position stays.
    """
    safe = hash(frozenset(get_safe_globals()))
    with _lock:
        if _inspected.get(fqn) == safe or stream.getbuffer().nbytes > MAX_INSPECTED:
            return
        _inspected[fqn] = safe
    position = stream.tell()
    try:
        unknown = find_unsafe_globals(stream)
        refused = _refused(stream, unknown, MalformedPickleError()) if unknown else None
    finally:
        stream.seek(position)
    if refused is None:
        return
    names, error = refused
    if names:
        logger.warning(
            "%r holds %s, which %s: loading it will need torch.serialization.add_safe_globals([%s]) or "
            "S3StorageReader(weights_only=False)",
            fqn, ", ".join(names), _NOT_KNOWN, ", ".join(names),
        )  # fmt: skip
    else:
        logger.warning("%r: loading it will need S3StorageReader(weights_only=False): %s", fqn, error)
