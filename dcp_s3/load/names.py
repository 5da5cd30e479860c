"""Compares names, shapes and dtypes of a state with those of a checkpoint, and says how to make them agree. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_s3.errors import MissingKeysError, TensorMismatchError
from dcp_s3.torch_private import ShardedTensor
from dcp_s3.units import plural

logger = logging.getLogger(__name__)

_NAMED = 5  # names in a message
_ADVICE = (
    "Remedy: build the model with the configuration that was saved. If the names differ by what they begin with or by "
    "a wrapper's part (module., _orig_mod.): load into a state with the saved names, for example {'model': state}"
)
_PARTIAL = "DefaultLoadPlanner(allow_partial_load=True) leaves what is missing as it is"


def find_mismatch(
    state: Mapping[str, Any], metadata: Metadata, url: str = "", *, strict: bool = True
) -> MissingKeysError | TensorMismatchError | None:
    """The error of a load of ``state``, with every missing name and every other shape; None if all fits.

    If all is there with its shape, but a saved tensor is to be loaded into something else, a TensorMismatchError.
    """
    saved = metadata.state_dict_metadata
    missing: list[str] = []
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    kinds: list[str] = []
    for fqn, entry in state.items():
        found = saved.get(fqn)
        if found is None:
            missing += [fqn] if strict else []
        elif is_other_kind(found, entry):
            kinds.append(fqn)
        elif isinstance(found, TensorStorageMetadata) and (size := _size(entry)) is not None and found.size != size:
            shapes[fqn] = tuple(found.size), tuple(size)
    which = f"; the checkpoint is {url}" if url else ""
    if shapes and (not missing or next(fqn for fqn in state if fqn in shapes or fqn not in saved) in shapes):
        (fqn, (one, other)), *more = shapes.items()
        text = f"Size mismatch between saved {one} and current {other} for {fqn}"  # as torch begins
        named = some(f"{name} (saved {one}, current {other})" for name, (one, other) in more)
        text += f", and for {len(more)} more: {named}" if more else ""
        text += f"; also not saved: {plural(len(missing), 'name')} of the state ({some(missing)})" if missing else ""
        return TensorMismatchError(f"{text}{which}. {_ADVICE}", url=url, fqn=fqn, shapes=shapes)
    if missing:
        unexpected = [fqn for fqn in saved if fqn not in state]
        others = f" and {len(missing) - 1} more ({some(missing[1:])})" if len(missing) > 1 else ""
        text = f"Missing key in checkpoint state_dict: {missing[0]}{others}{which}."  # as torch begins
        if unexpected:
            text += f" Saved but not in the state: {plural(len(unexpected), 'name')} ({some(unexpected)})."
        text += f" Of other shapes: {some(shapes)}." if shapes else ""
        return MissingKeysError(f"{text} {_ADVICE}. {_PARTIAL}", url=url, missing=missing, unexpected=unexpected)
    if kinds:
        return TensorMismatchError(
            f"Saved tensors are no tensors in the state to load into: {some(kinds)}{which}. {_ADVICE}",
            url=url,
            fqn=kinds[0],
        )
    return None


def is_other_kind(saved: object, entry: object) -> bool:
    """Whether a saved tensor is to be loaded into something that is none, which torch refuses."""
    tensor_like = isinstance(entry, torch.Tensor) or hasattr(entry, "__create_chunk_list__")
    return isinstance(saved, TensorStorageMetadata) and not tensor_like


def _size(entry: Any) -> Sequence[int] | None:
    # size() of a ShardedTensor goes through torch's dispatch: 50 us.
    if type(entry) is ShardedTensor:
        size: Sequence[int] = entry.metadata().size
        return size
    return entry.size() if isinstance(entry, torch.Tensor) else None


def some(names: Iterable[str]) -> str:
    """The first few names."""
    found = list(names)
    return ", ".join(found[:_NAMED]) + (", ..." if len(found) > _NAMED else "")


# --- dtypes -----------------------------------------------------------------------------------------

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
    """Log one warning for all tensors that a load converts to a dtype that does not hold their values."""
    if not narrowed:
        return
    kinds: dict[Conversion, list[str]] = {}
    for name, conversion in narrowed.items():
        kinds.setdefault(conversion, []).append(name)
    parts = []
    for (saved, target), names in kinds.items():
        parts.append(f"{len(names)} from {saved} to {target} ({some(names)})")
    logger.warning(
        "%s: %d tensors are loaded into dtypes that do not hold all their values: %s. If that is not meant: build the "
        "state with the saved dtypes; S3StorageReader(allow_dtype_cast=False) makes it an error",
        url,
        len(narrowed),
        "; ".join(parts),
    )
