"""Compares names, shapes and dtypes of a state with those of a checkpoint, and says how to make them agree. Pure."""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_s3.errors import MissingKeysError, TensorMismatchError
from dcp_s3.torch_private import ShardedTensor
from dcp_s3.units import plural

logger = logging.getLogger(__name__)

_NAMED = 5  # names in a message
_SAMPLES = 3  # missing names from which a prefix is guessed
_ENOUGH = 0.9  # part of the missing names that a guess must explain
_MOST_COMPARED = 500  # names that difflib compares one with: 100 us each
_WRAPPERS = {
    "_orig_mod.": "torch.compile",
    "module.": "DistributedDataParallel",
    "_fsdp_wrapped_module.": "FSDP",
    "_checkpoint_wrapped_module.": "activation checkpointing",
}
_ADVICE = "Remedy: build the model with the configuration that was saved, or leave these entries out of the state"
_PARTIAL = "or pass planner=DefaultLoadPlanner(allow_partial_load=True) to leave them as they are"


def find_mismatch(
    state: Mapping[str, Any], metadata: Metadata, url: str = "", *, strict: bool = True
) -> MissingKeysError | TensorMismatchError | None:
    """The error of a load of ``state``, with every missing name and every other shape; None if all fits.

    If all is there with its shape, but a saved tensor is to be loaded into something else, a TensorMismatchError.
    """
    saved = metadata.state_dict_metadata
    missing: list[str] = []
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    kinds: dict[str, str] = {}
    for fqn, entry in state.items():
        found = saved.get(fqn)
        if found is None:
            missing += [fqn] if strict else []
        elif is_other_kind(found, entry):
            kinds[fqn] = type(entry).__name__
        elif isinstance(found, TensorStorageMetadata) and (size := _size(entry)) is not None and found.size != size:
            shapes[fqn] = tuple(found.size), tuple(size)
    if not missing and not shapes:
        return _other_kinds(kinds, url) if kinds else None
    if shapes and (not missing or next(fqn for fqn in state if fqn in shapes or fqn not in saved) in shapes):
        return _other_shapes(shapes, missing, url)
    return _missing_keys(missing, [fqn for fqn in saved if fqn not in state], shapes, url)


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


def _which(url: str) -> str:
    return f"; the checkpoint is {url}" if url else ""


def _other_kinds(kinds: dict[str, str], url: str) -> TensorMismatchError:
    named = _some(f"{fqn} ({kind})" for fqn, kind in kinds.items())
    return TensorMismatchError(
        f"Saved tensors are no tensors in the state to load into: {named}{_which(url)}. Remedy: build the state as it "
        "was saved, or leave these entries out of it",
        url=url,
        fqn=next(iter(kinds)),
    )


def _other_shapes(
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]], missing: Collection[str], url: str
) -> TensorMismatchError:
    (fqn, (saved, current)), *more = shapes.items()
    text = f"Size mismatch between saved {saved} and current {current} for {fqn}"  # as torch begins
    if more:
        named = ", ".join(f"{name} (saved {one}, current {other})" for name, (one, other) in more[: _NAMED - 1])
        text += f", and for {len(more)} more: {named}{', ...' if len(more) >= _NAMED else ''}"
    if missing:
        text += f"; also not saved: {plural(len(missing), 'name')} of the state ({_some(missing)})"
    return TensorMismatchError(f"{text}{_which(url)}. {_ADVICE}", url=url, fqn=fqn, shapes=shapes)


def _missing_keys(missing: list[str], unexpected: list[str], shapes: Collection[str], url: str) -> MissingKeysError:
    more = f" and {len(missing) - 1} more ({_some(missing[1:])})" if len(missing) > 1 else ""
    text = f"Missing key in checkpoint state_dict: {missing[0]}{more}{_which(url)}."  # as torch begins
    if unexpected:
        text += f" Saved but not in the state: {plural(len(unexpected), 'name')} ({_some(unexpected)})."
    if shapes:
        text += f" Of other shapes: {_some(shapes)}."
    advice = find_renaming(missing, unexpected)
    if not advice:
        pairs = [(name, closest(name, unexpected)) for name in missing[:_NAMED]]
        close = ", ".join(f"{name}: {found}" for name, found in pairs if found)
        text += f" Closest saved names: {close}." if close else ""
        advice = f"{_ADVICE}, {_PARTIAL}"
    return MissingKeysError(f"{text} {advice}", url=url, missing=missing, unexpected=unexpected)


def _some(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:_NAMED]) + (", ..." if len(found) > _NAMED else "")


def find_renaming(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """How the names of a state differ from the saved ones as a whole, and the remedy; empty if they do not."""
    return _find_wrapper(missing, unexpected) or _find_prefix(missing, unexpected)


def _find_wrapper(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    mine, saved = set(missing), set(unexpected)
    for part, wrapper in _WRAPPERS.items():
        if _explains(sum(part in name and name.replace(part, "") in saved for name in missing), missing):
            return (
                f"The names of the state have {part!r} where the saved ones have not: this model is wrapped "
                f"({wrapper}), the saved one was not. Remedy: load into the state of the module inside, or take both "
                "states with torch.distributed.checkpoint.state_dict.get_state_dict, which leaves such parts out"
            )
        if _explains(sum(part in name and name.replace(part, "") in mine for name in unexpected), missing):
            return (
                f"The saved names have {part!r} where those of the state have not: the saved model was wrapped "
                f"({wrapper}), this one is not. Remedy: wrap the model in the same way before the load, or load into "
                f"a state with the saved names: {{name.replace(...): tensor}}"
            )
    return ""


def _explains(count: int, missing: Sequence[str]) -> bool:
    return bool(missing) and count >= _ENOUGH * len(missing)


def _find_prefix(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    saved = set(unexpected)
    for sample in missing[:_SAMPLES]:
        parts = sample.split(".")
        for cut in range(len(parts)):
            mine, rest = "".join(f"{part}." for part in parts[:cut]), ".".join(parts[cut:])
            ends = {name[: -len(rest)] for name in unexpected if name == rest or name.endswith(f".{rest}")}
            for theirs in sorted(ends, key=len)[:_SAMPLES]:
                found = sum(name.startswith(mine) and theirs + name[len(mine) :] in saved for name in missing)
                if theirs != mine and _explains(found, missing):
                    count = "All" if found == len(missing) else f"{found} of the {len(missing)}"
                    shared = {
                        "".join(name[len(mine) :].partition(".")[:2]) for name in missing if name.startswith(mine)
                    }
                    common = "".join(shared) if len(shared) == 1 and all(each.endswith(".") for each in shared) else ""
                    return f"{count} {_shifted(mine, theirs, common)}"
    return ""


def _shifted(mine: str, theirs: str, common: str) -> str:
    """How to load where the state has the prefix ``mine`` and the checkpoint ``theirs``, both before ``common``."""
    where = f"where the state has {mine + common!r}" if mine + common else "where the state has none"
    saved = f"saved names begin with {theirs + common!r}" if theirs + common else "saved names lack a prefix"
    if theirs.endswith(mine):
        outer = theirs[: len(theirs) - len(mine)].rstrip(".").split(".")
        wrapped = "".join(f"{{{name!r}: " for name in outer) + "state" + "}" * len(outer)
        remedy = f"wrap the state: {wrapped}"
    elif mine.endswith(theirs):
        outer = mine[: len(mine) - len(theirs)].rstrip(".").split(".")
        remedy = "load into what is inside: state" + "".join(f"[{name!r}]" for name in outer)
    else:
        inner = "state" + "".join(f"[{name!r}]" for name in mine.rstrip(".").split("."))
        outer = theirs.rstrip(".").split(".")
        remedy = "rename it: " + "".join(f"{{{name!r}: " for name in outer) + inner + "}" * len(outer)
    return f"{saved} {where}. Remedy: {remedy}"


def closest(name: str, names: Sequence[str]) -> str:
    """The most similar of ``names``; empty if none is similar. Compares at most some hundred of them."""
    last = name.rpartition(".")[2]
    alike = [each for each in names if each.rpartition(".")[2] == last] or [
        each for each in names if abs(len(each) - len(name)) <= len(name) // 4
    ]
    found = difflib.get_close_matches(name, alike[:_MOST_COMPARED], 1)
    return found[0] if found else ""


def count_by_prefix(names: Iterable[str]) -> str:
    """``optimizer (10), rng (2)``: names by what stands before their first dot."""
    counts = Counter(name.partition(".")[0] for name in names)
    told = ", ".join(f"{prefix} ({count})" for prefix, count in counts.most_common(_NAMED))
    return told + (", ..." if len(counts) > _NAMED else "")


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
        more = ", ..." if len(names) > _NAMED else ""
        parts.append(f"{len(names)} from {saved} to {target} ({', '.join(names[:_NAMED])}{more})")
    logger.warning(
        "%s: %d tensors are loaded into dtypes that do not hold all their values: %s. If that is not meant: build the "
        "state with the saved dtypes; S3StorageReader(allow_dtype_cast=False) makes it an error",
        url,
        len(narrowed),
        "; ".join(parts),
    )
