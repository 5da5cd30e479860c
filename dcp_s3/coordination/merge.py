"""Makes one checkpoint's metadata of the parts that its ranks wrote, and finds what none of them would write. Pure.

What DCP's coordinator makes of plans and write results, from parts alone: the same entries, duplicates dropped, and
the same checks. All of it works on columns: thousands of ranks have millions of items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_s3.coordination.merge_items import AddedPart, Tables, merge_items
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.part import unpack
from dcp_s3.process import collector_paused


@dataclass(frozen=True)
class MergedSave:
    metadata: bytes
    """``.metadata``, pickled as torch's FileSystemReader reads it."""
    items: int
    """Number of stored items."""
    objects: tuple[ObjectEntry, ...]


class Merging:
    """The parts of one save (its nonce); ``number`` of a rank in the whole job is for messages."""

    def __init__(self, save: str, world_size: int, number: Callable[[int], int] = int) -> None:
        self._save, self._world_size, self._number = save, world_size, number
        self._tables = Tables()
        self._parts: dict[int, AddedPart] = {}

    def add(self, data: bytes) -> bool:
        """Add the part of another rank, as it was read. Returns whether its tensors have other properties (dtypes and
        so on) than those of all parts before. A ValueError if it is none, damaged, or of another save; then nothing was
        added."""
        columns = unpack(data)
        if (columns.save, columns.world_size) != (self._save, self._world_size) or columns.rank in self._parts:
            raise ValueError(
                f"part of rank {self._number(columns.rank)} belongs to save {columns.save} of {columns.world_size} "
                f"ranks, expected {self._save} of {self._world_size}; or it is there twice"
            )
        known = len(self._tables.made)
        self._parts[columns.rank] = self._tables.add(columns)
        return len(self._tables.made) > known

    @property
    def facts(self) -> list[Mapping[str, Any]]:
        """What each part says of the save as a whole, by rank."""
        return [self._parts[rank].facts for rank in sorted(self._parts)]

    def merged(self, *, save_id: str, checkpoint_id: str, is_whole: bool = True) -> MergedSave:
        """Metadata of the whole save, or (``is_whole``) of some of its parts. The same parts always give the same
        bytes. Of several items with the same index, that of the lowest rank counts. To be called once.

        Raises:
            ShardingError: the chunks of a tensor are of different wholes, outside of it, overlap, or do not fill it.
            SaveProtocolError: a name is a tensor on one rank only.
        """
        with collector_paused():
            parts = [self._parts[rank] for rank in sorted(self._parts)]
            filled = is_whole and self._world_size > 1
            metadata, items = merge_items(
                parts, self._tables, save_id=save_id, checkpoint_id=checkpoint_id, filled=filled, number=self._number
            )
        return MergedSave(metadata, items, tuple(entry for part in parts for entry in part.objects))


def assign(leaves: Sequence[npt.NDArray[np.uint64]], writes: Sequence[npt.NDArray[np.uint64]]) -> dict[int, list[int]]:
    """What no rank would write: hashes that a rank ``leaves`` to others, none of which ``writes`` them, by the rank
    that is to write them. Each goes to one that holds it, with the fewest so far. Both are by rank."""
    hashes = np.concatenate([_NO_HASHES, *leaves], dtype=np.uint64)
    ranks = np.repeat(np.arange(len(leaves)), [len(each) for each in leaves])
    missing = ~np.isin(hashes, np.concatenate([_NO_HASHES, *writes], dtype=np.uint64))
    holders: dict[int, list[int]] = {}
    for each, rank in zip(hashes[missing].tolist(), ranks[missing].tolist(), strict=True):
        holders.setdefault(each, []).append(rank)
    found: dict[int, list[int]] = {}
    for each in sorted(holders):
        found.setdefault(min(holders[each], key=lambda rank: (len(found.get(rank, ())), rank)), []).append(each)
    return found


_NO_HASHES = np.zeros(0, np.uint64)
