"""The contents of a checkpoint according to its metadata, and whether it agrees with itself, which tells damage where
there is no checksum. Pure, and imported without torch."""

from __future__ import annotations

import functools
import itertools
import math
import reprlib
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
    )

Shape: TypeAlias = tuple[int, ...]

_MAX_FRAMING = 64 * 2**10  # bytes before the raw bytes of a tensor, and after them


@dataclass(frozen=True)
class SavedEntry:
    """One entry of a saved state dict."""

    fqn: str
    """Fully qualified name."""
    kind: str
    """``tensor``, or ``bytes`` for any other object."""
    dtype: str | None
    """Dtype of a tensor, without ``torch.``; None otherwise."""
    shape: Shape | None
    """Global shape of a tensor; None otherwise."""
    chunks: int
    """Number of stored chunks."""
    size: int
    """Stored bytes, framing included."""
    checksum: str | None
    """CRC-64/NVME of its bytes, 16 hex digits; None if one of its chunks has none recorded. Of one shape and dtype,
    entries with the same are equal; equal ones differ in it if they are not cut alike, or into whole rows."""

    @property
    def parameters(self) -> int:
        """Elements of a tensor; 0 otherwise."""
        return 0 if self.shape is None else math.prod(self.shape)


def saved_entries(metadata: Metadata) -> list[SavedEntry]:
    """The entries that the metadata describes, in their saved order."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    sizes, counts = Counter[str](), Counter[str]()
    for index, info in (metadata.storage_data or {}).items():
        sizes[index.fqn] += info.length
        counts[index.fqn] += 1
    found = []
    for fqn, saved in metadata.state_dict_metadata.items():
        kind, dtype, shape = "bytes", None, None
        tensor = saved if isinstance(saved, TensorStorageMetadata) else None
        if tensor is not None:
            kind, dtype, shape = "tensor", str(tensor.properties.dtype).removeprefix("torch."), tuple(tensor.size)
        checksum = _checksum(fqn, tensor, metadata.storage_data or {})
        found.append(SavedEntry(fqn, kind, dtype, shape, counts[fqn], sizes[fqn], checksum))
    return found


def _checksum(fqn: str, tensor: TensorStorageMetadata | None, storage: dict[MetadataIndex, Any]) -> str | None:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    from dcp_s3.format.blocks import get_facts
    from dcp_s3.memory import combine_crc64nvme, crc64nvme, crc_hex

    boxes: list[Any] = [(None, ())]
    shape: Shape = ()
    itemsize = 0
    if tensor is not None:
        boxes = sorted((tuple(each.offsets), tuple(each.sizes)) for each in tensor.chunks if 0 not in each.sizes)
        shape, itemsize = tuple(tensor.size), tensor.properties.dtype.itemsize
    parts = []
    for offsets, sizes in boxes:
        info = storage.get(MetadataIndex(fqn, offsets))
        raw_offset, crc = get_facts(info)
        if info is None or crc is None:
            return None
        is_raw = raw_offset is not None and not getattr(info, "transform_descriptors", None)
        parts.append((crc, math.prod(sizes) * itemsize if is_raw else info.length))
    if any(sizes[1:] != shape[1:] for _, sizes in boxes):  # their bytes in a row may be those of another tensor
        text = repr(boxes).encode()
        parts.append((crc64nvme(text), len(text)))
    return crc_hex(combine_crc64nvme(parts))


def needed_objects(metadata: Metadata) -> dict[str, int]:
    """Relative path of every data object that the metadata refers to, and the minimum bytes that it needs to hold its
    items."""
    needed: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        needed[info.relative_path] = max(info.offset + info.length, needed.get(info.relative_path, 0))
    return needed


def find_chunk(saved: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata | None:
    """The saved chunk of a tensor that belongs to the stored item at ``index``; None if there is none."""
    offset = index.offset if index.offset is not None else (0,) * len(saved.size)
    hint = index.index
    if isinstance(hint, int) and 0 <= hint < len(saved.chunks) and saved.chunks[hint].offsets == offset:
        return saved.chunks[hint]
    return next((chunk for chunk in saved.chunks if chunk.offsets == offset), None)


# --- contradictions -------------------------------------------------------------------------------


def find_contradiction(metadata: Metadata, *, filled: bool = True) -> str | None:
    """Where metadata, whose fields are possible, contradicts itself (see `find_flaws`), or has items at the same bytes;
    None: nowhere. Chunks need not fill their tensor if not ``filled``."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    storage = metadata.storage_data
    if storage is None:
        return None  # without places of items: others say so
    for fqn, what in find_flaws(metadata, filled=filled):
        return f"{reprlib.repr(fqn)} {what}"
    count = sum(
        len({each.offsets for each in saved.chunks}) if isinstance(saved, TensorStorageMetadata) else 1
        for saved in metadata.state_dict_metadata.values()
    )
    if count != len(storage):
        return f"it places {len(storage)} items, and describes {count}"
    places = sorted((each.relative_path, each.offset, each.length, index.fqn) for index, each in storage.items())
    for (path, start, length, fqn), (other, begin, _, name) in itertools.pairwise(each for each in places if each[2]):
        if path == other and begin < start + length:
            return f"{reprlib.repr(fqn)} and {reprlib.repr(name)} lie at the same bytes of {path}"
    return None


def find_flaws(metadata: Metadata, *, filled: bool = True) -> Iterable[tuple[str, str]]:
    """The entries that do not lie anywhere, and the tensors whose chunks overlap, do not fill them, or do not have the
    bytes that are stored; each with what is wrong. The metadata says where its items lie."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    check = functools.cache(functools.partial(find_flaw, filled=filled))  # tensors are cut alike
    storage: dict[Any, Any] = metadata.storage_data
    for fqn, saved in metadata.state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):
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
            size = math.prod(chunk.sizes) * saved.properties.dtype.itemsize
            stored = info.length - getattr(info, "raw_offset", info.length - size)  # see `blocks`
            if flaw is None and not 0 <= stored - size <= _MAX_FRAMING:
                yield fqn, f"has a chunk of {size} bytes, stored are {stored} with their framing"
                break


def find_flaw(shape: Shape, boxes: Sequence[tuple[Shape, Shape]], *, filled: bool = True) -> str | None:
    """What is wrong with the chunks (offsets and sizes, all inside) of a tensor; None if each element is in one."""
    boxes = [box for box in boxes if 0 not in box[1]]
    volume, expected = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    if volume > expected or (filled and volume < expected):
        return f"has {expected} elements, its chunks have {volume}"
    if len(boxes) < 2:
        return None
    # Boxes that overlap, by a sweep along the dimension with the most offsets.
    dim = max(range(len(shape)), key=lambda each: len({offsets[each] for offsets, _ in boxes}))
    active: list[tuple[int, int]] = []
    for number in sorted(range(len(boxes)), key=lambda each: (boxes[each][0][dim], *boxes[each][0])):
        offsets, sizes = boxes[number]
        del active[: bisect_right(active, (offsets[dim], len(boxes)))]
        for _, other in active:
            places = zip(offsets, sizes, *boxes[other], strict=True)
            if all(at < begin + count and begin < at + size for at, size, begin, count in places):
                pair = sorted((number, other))
                return "has chunks that overlap: " + " and ".join(box_text(*boxes[each]) for each in pair)
        insort(active, (offsets[dim] + sizes[dim], number))
    return None


def box_text(offsets: Shape, sizes: Shape) -> str:
    """A chunk, for messages."""
    return f"the one of shape {tuple(sizes)} at {tuple(offsets)}"
