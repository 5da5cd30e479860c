"""torch's `ReadItem` and `MetadataIndex`, made in a third of the time that their constructors take.

Both are frozen dataclasses: their constructors call `object.__setattr__` for each field. Here a plain class's object
has its fields set first, and is then given the real class.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

_TENSOR = LoadItemType.TENSOR


class _PlainMetadataIndex:
    def __init__(self, fqn: str, offset: torch.Size, index: int) -> None:
        self.fqn = fqn
        self.index = index
        self.offset = offset


class _PlainReadItem:
    def __init__(
        self,
        dest_index: MetadataIndex,
        dest_offsets: torch.Size,
        storage_index: MetadataIndex,
        storage_offsets: torch.Size,
        lengths: torch.Size,
    ) -> None:
        self.type = _TENSOR
        self.dest_index = dest_index
        self.dest_offsets = dest_offsets
        self.storage_index = storage_index
        self.storage_offsets = storage_offsets
        self.lengths = lengths


def make_indices(fqn: str, places: Iterable[tuple[torch.Size, int]]) -> list[MetadataIndex]:
    """Make the index of each chunk of a tensor.

    Args:
        fqn: FQN of the tensor.
        places: offsets and number of each chunk.
    """
    if not _FAST:
        return [MetadataIndex(fqn, offset, index) for offset, index in places]
    made = [_PlainMetadataIndex(fqn, offset, index) for offset, index in places]
    for each in made:
        each.__class__ = MetadataIndex  # type: ignore[assignment]
    return made  # type: ignore[return-value]


def make_tensor_items(
    dest_indices: Iterable[MetadataIndex],
    dest_offsets: Iterable[torch.Size],
    storage_indices: Iterable[MetadataIndex],
    storage_offsets: Iterable[torch.Size],
    lengths: Iterable[torch.Size],
) -> list[ReadItem]:
    """Make the items of a tensor from their columns."""
    columns = (dest_indices, dest_offsets, storage_indices, storage_offsets, lengths)
    if not _FAST:
        return [ReadItem(_TENSOR, *row) for row in zip(*columns, strict=True)]
    made = list(map(_PlainReadItem, *columns))
    for each in made:
        each.__class__ = ReadItem  # type: ignore[assignment]
    return made  # type: ignore[return-value]


_FAST = True


def _is_exact() -> bool:
    """Whether this makes exactly what torch's constructors make."""
    size = torch.Size((1, 2))
    expected = MetadataIndex("x", size, 3)
    try:
        (index,) = make_indices("x", [(size, 3)])
        (item,) = make_tensor_items([index], [size], [index], [size], [size])
    except TypeError:  # another layout, for example __slots__
        return False
    return vars(index) == vars(expected) and vars(item) == vars(ReadItem(_TENSOR, expected, size, expected, size, size))


_FAST = _is_exact()
