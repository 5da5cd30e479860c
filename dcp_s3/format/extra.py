"""What a user stores with a checkpoint beyond metrics (``extra=``): nested values that JSON has. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from dcp_s3.errors import MetricsError

MAX_EXTRA_BYTES = 2**16
"""Most bytes of it, as JSON. It is in the manifest, which every listing and every prune reads for each checkpoint."""

_MAX_DEPTH = 32
_MAX_INT = 2**63  # what other programs that read JSON can hold


def check_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """A copy of what is to be stored. What is read back equals what was given.

    Args:
        extra: text, whole numbers of 64 bits, finite floats, bools and None by name; lists of these; and such mappings
            again, at most 32 levels deep. None: nothing.

    Raises:
        MetricsError: it holds something else, or is larger than `MAX_EXTRA_BYTES`.
    """
    if extra is None:
        return {}
    if not isinstance(extra, Mapping):
        raise MetricsError(f"extra is a {type(extra).__name__}, expected a dict like {{'tokens': 1000}}")
    copied: dict[str, Any] = _copy(extra, "extra", 0)
    size = len(json.dumps(copied, allow_nan=False).encode())
    if size > MAX_EXTRA_BYTES:
        largest = max(copied, key=lambda name: len(json.dumps(copied[name])))
        raise MetricsError(
            f"extra has {size} bytes as JSON, and at most {MAX_EXTRA_BYTES} are stored with a checkpoint, because "
            f"every listing reads them; most are in extra[{largest!r}]. Remedy: save it in the state, or attach it "
            "(S3StorageWriter.attach)"
        )
    return copied


def _copy(value: Any, path: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise MetricsError(f"extra is nested more than {_MAX_DEPTH} levels deep, at {path[:80]}...")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, path)
    if isinstance(value, int):
        if not -_MAX_INT <= value < _MAX_INT:
            raise _refuse(path, "a whole number of more than 64 bits", "store it as text")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refuse(path, repr(float(value)), "JSON has no such number: store it as text, or leave it out")
        return float(value)
    if isinstance(value, list):
        return [_copy(each, f"{path}[{index}]", depth + 1) for index, each in enumerate(value)]
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise _refuse(path, f"a mapping with the key {_short(name)}", "keys are text")
        return {_text(name, path): _copy(each, f"{path}[{name!r}]", depth + 1) for name, each in value.items()}
    if isinstance(value, (tuple, set, frozenset)):
        raise _refuse(path, f"a {type(value).__name__}", "JSON has only lists: list(...)")
    raise _refuse(
        path,
        f"a {type(value).__name__}",
        "values are text, numbers, bools, None, lists and dicts of these (a tensor: tensor.item() or tensor.tolist())",
    )


def _text(value: str, path: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refuse(path, f"text that is not Unicode, {_short(value)}", "decode it as it was encoded") from None
    return str(value)


def _refuse(path: str, found: str, remedy: str) -> MetricsError:
    return MetricsError(f"{path} is {found} and cannot be stored with a checkpoint. Remedy: {remedy}")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}..."
