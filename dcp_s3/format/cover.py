"""Whether metadata agrees with itself: what tells damage where there is no checksum. Pure."""

from __future__ import annotations

import functools
import itertools
import math
import reprlib
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias, TypeGuard

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_s3.format.blocks import get_raw_offset

Shape: TypeAlias = tuple[int, ...]

_MAX_FRAMING = 64 * 2**10  # bytes before the raw bytes of a tensor, and after them


def find_contradiction(metadata: Metadata, *, filled: bool = True) -> str | None:
    """Where metadata contradicts itself; None: nowhere.

    The chunks of each tensor must fill it, each element once; each chunk and each object must lie somewhere, each
    somewhere else, and raw bytes must be as many as the chunk has. The fields have been checked one by one. Chunks need
    not fill their tensor if not ``filled``.
    """
    storage = metadata.storage_data
    if not isinstance(storage, dict):
        return None  # without places of items: others say so
    for fqn, what in find_flaws(metadata, filled=filled):
        return f"{reprlib.repr(fqn)} {what}"
    entries = metadata.state_dict_metadata.values()
    count = sum(len({each.offsets for each in saved.chunks}) if _is_tensor(saved) else 1 for saved in entries)
    if count != len(storage):
        return f"it places {len(storage)} items, and describes {count}"
    return _find_overlap(storage.items())


def find_flaws(metadata: Metadata, *, filled: bool = True) -> Iterable[tuple[str, str]]:
    """The entries that do not lie anywhere, and the tensors whose chunks overlap, do not fill them, or do not have the
    bytes that are stored; each with what is wrong. The metadata says where its items lie."""
    check = functools.cache(functools.partial(find_flaw, filled=filled))  # tensors are cut alike
    storage: dict[Any, Any] = metadata.storage_data
    for fqn, saved in metadata.state_dict_metadata.items():
        if not _is_tensor(saved):
            if MetadataIndex(fqn) not in storage:
                yield fqn, "lies in no object"
            continue
        flaw = check(saved.size, tuple((chunk.offsets, chunk.sizes) for chunk in saved.chunks))
        if flaw is not None:
            yield fqn, flaw
        for chunk in saved.chunks:
            info = storage.get(MetadataIndex(fqn, chunk.offsets))
            if info is None:
                yield fqn, f"has a chunk at {tuple(chunk.offsets)} that lies in no object"
                break
            raw_offset, size = get_raw_offset(info), math.prod(chunk.sizes) * saved.properties.dtype.itemsize
            if flaw is None and raw_offset is not None and not 0 <= info.length - raw_offset - size <= _MAX_FRAMING:
                stored = info.length - raw_offset
                yield fqn, f"has a chunk of {size} bytes, stored are {stored} with their framing"
                break


def _is_tensor(saved: object) -> TypeGuard[TensorStorageMetadata]:
    return isinstance(saved, TensorStorageMetadata)


def _find_overlap(items: Iterable[tuple[Any, Any]]) -> str | None:
    places = sorted((info.relative_path, info.offset, info.length, index.fqn) for index, info in items if info.length)
    for (path, start, length, fqn), (other, begin, _, name) in itertools.pairwise(places):
        if path == other and begin < start + length:
            return f"{reprlib.repr(fqn)} and {reprlib.repr(name)} lie at the same bytes of {path}"
    return None


# --- boxes of a tensor ----------------------------------------------------------------------------


def find_flaw(shape: Shape, boxes: Sequence[tuple[Shape, Shape]], *, filled: bool = True) -> str | None:
    """What is wrong with the chunks (offsets and sizes, all inside) of a tensor; None if each element is in one."""
    boxes = [box for box in boxes if 0 not in box[1]]
    volume, expected = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if volume > expected or (filled and volume < expected):
        return f"has {expected} elements, its chunks have {volume}"
    pair = find_overlap(boxes) if len(boxes) > 1 else None
    return (
        None if pair is None else "has chunks that overlap: " + " and ".join(box_text(*boxes[n]) for n in sorted(pair))
    )


def find_overlap(boxes: Sequence[tuple[Shape, Shape]]) -> tuple[int, int] | None:
    """Positions of two boxes (offsets, sizes) that overlap, by a sweep along the dimension with the most offsets."""
    dims = len(boxes[0][0])
    dim = max(range(dims), key=lambda each: len({offsets[each] for offsets, _ in boxes}))
    active: list[tuple[int, int]] = []
    for number in sorted(range(len(boxes)), key=lambda each: (boxes[each][0][dim], *boxes[each][0])):
        offsets, sizes = boxes[number]
        del active[: bisect_right(active, (offsets[dim], len(boxes)))]
        for _, other in active:
            if _overlap(boxes[number], boxes[other]):
                return number, other
        insort(active, (offsets[dim] + sizes[dim], number))
    return None


def _overlap(one: tuple[Shape, Shape], other: tuple[Shape, Shape]) -> bool:
    return all(
        start < other_start + other_size and other_start < start + size
        for start, size, other_start, other_size in zip(*one, *other, strict=True)
    )


def box_text(offsets: Shape, sizes: Shape) -> str:
    """A chunk, for messages."""
    return f"the one of shape {tuple(sizes)} at {tuple(offsets)}"
