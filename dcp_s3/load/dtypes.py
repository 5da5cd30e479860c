"""Loads into dtypes other than the saved ones: which conversions may change values."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

logger = logging.getLogger(__name__)

_NAMED = 5  # names in a warning, for each conversion

Conversion = tuple[torch.dtype, torch.dtype]
"""The saved dtype, and the dtype of the tensor to load into."""


def keeps_values(saved: torch.dtype, target: torch.dtype) -> bool:
    """Whether ``target`` holds every value of ``saved`` exactly."""
    if saved == target or saved == torch.bool:
        return True
    if target == torch.bool or (saved.is_complex and not target.is_complex):
        return False
    if saved.is_floating_point or saved.is_complex:
        return (target.is_floating_point or target.is_complex) and _contains(target, saved)
    try:
        integer = torch.iinfo(saved)
        if not (target.is_floating_point or target.is_complex):
            other = torch.iinfo(target)
            return bool(other.min <= integer.min and integer.max <= other.max)
    except TypeError:  # quantized, or bare bits
        return False
    found = torch.finfo(target)
    return bool(integer.max <= 2 / found.eps and integer.max <= found.max)


def _contains(target: torch.dtype, saved: torch.dtype) -> bool:
    """Whether a floating-point ``target`` has the precision and range of ``saved``, subnormal numbers included."""
    large, small = torch.finfo(target), torch.finfo(saved)
    return bool(
        large.eps <= small.eps
        and large.max >= small.max
        and large.smallest_normal * large.eps <= small.smallest_normal * small.eps
    )


def warn_of_narrowing(narrowed: Mapping[str, Conversion], url: str) -> None:
    """Log one warning for all tensors that a load converts to a dtype that does not hold their values.

    Args:
        narrowed: narrowing conversions by name of the tensor.
        url: URL of the checkpoint.
    """
    if not narrowed:
        return
    kinds: dict[Conversion, list[str]] = {}
    for name, conversion in narrowed.items():
        kinds.setdefault(conversion, []).append(name)
    parts = []
    for (saved, target), names in kinds.items():
        more = ", ..." if len(names) > _NAMED else ""
        parts.append(f"{len(names)} from {saved} to {target} ({', '.join(names[:_NAMED])}{more})")
    logger.warning(
        "%s: %d tensors are loaded into dtypes that do not hold all their values: %s. If that is not meant: build the "
        "state with the saved dtypes; S3StorageReader(allow_dtype_cast=False) makes it an error",
        url,
        len(narrowed),
        "; ".join(parts),
    )
