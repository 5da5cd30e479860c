"""Makes one checkpoint's metadata of the parts that its ranks wrote. Pure.

What DCP's coordinator makes of plans and write results, from parts alone: the same entries, duplicates dropped, and
the same checks. All of it works on columns: thousands of ranks have millions of items.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcp_s3.coordination.merge_items import AddedPart, Tables, merge_items, some
from dcp_s3.errors import SaveProtocolError
from dcp_s3.format.control_files import ObjectEntry, attachments_of
from dcp_s3.format.part import digest_of_bytes
from dcp_s3.format.part_columns import HELD, unpack
from dcp_s3.process import collector_paused


@dataclass(frozen=True)
class MergedSave:
    metadata: bytes
    """``.metadata``, pickled as torch's FileSystemReader reads it."""
    items: int
    """Number of stored items."""
    objects: tuple[ObjectEntry, ...]


class Merging:
    """The parts of one save, as far as they are known; ``number`` of a rank in the whole job is for messages."""

    def __init__(self, save: str, world_size: int, number: Callable[[int], int] = int) -> None:
        self._save, self._world_size, self._number = save, world_size, number
        self._tables = Tables()
        self._parts: dict[tuple[int, int], AddedPart] = {}

    def add(self, data: bytes) -> tuple[int, int]:
        """Add a part as it was read; returns its rank and number. The same part twice is harmless.

        Raises:
            ValueError: no part, damaged, of another save, or another part of the same rank and number is there; nothing
                was added.
        """
        columns = unpack(data)
        key = columns.rank, columns.number
        if (columns.save, columns.world_size) != (self._save, self._world_size):
            raise ValueError(
                f"part of rank {self._number(columns.rank)} belongs to save {columns.save} of {columns.world_size} "
                f"ranks, expected {self._save} of {self._world_size}"
            )
        if key not in self._parts:
            self._parts[key] = self._tables.add(columns, data[-8:])
        elif self._parts[key].crc != data[-8:]:
            raise ValueError(
                f"rank {self._number(columns.rank)} wrote two different parts with number {columns.number}"
            )
        return key

    @property
    def parts(self) -> frozenset[tuple[int, int]]:
        return frozenset(self._parts)

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks whose part number 0 is there."""
        return frozenset(rank for rank, number in self._parts if number == 0)

    @property
    def digests(self) -> dict[int, str]:
        """Digest (`digest_of`) of what each of these ranks holds."""
        return {
            rank: digest_of_bytes(part.held.tobytes(), attachments_of(part.objects))
            for (rank, number), part in sorted(self._parts.items())
            if number == 0
        }

    @property
    def facts(self) -> list[Mapping[str, Any]]:
        """What each part says of the save as a whole, by rank and number of the part."""
        return [self._parts[key].facts for key in sorted(self._parts)]

    def unwritten(self, excluded: Collection[int] = ()) -> dict[int, list[int]]:
        """Hashes of items that a rank holds and none has written, by the rank that is to write them: none of those
        ``excluded``, which do not answer any more.

        Each goes to a holder that has the fewest so far. The same parts and ``excluded`` always give the same answer.

        Raises:
            SaveProtocolError: an item is held by ``excluded`` ranks alone.
        """
        holders = [(rank, _held_not_written(self._parts[rank, 0])) for rank in sorted(self.ranks)]
        written = [part.held[part.numbers[HELD]] for part in self._parts.values()]
        hashes = np.concatenate([_NO_HASHES, *written], dtype=np.uint64)
        return assign(holders, np.sort(hashes), frozenset(excluded), self._number)

    def merged(self, *, save_id: str, checkpoint_id: str) -> MergedSave:
        """Metadata of the whole save. The same parts always give the same bytes. Of several items with the same index,
        that of the lowest rank counts.

        Raises:
            ShardingError: the chunks of a tensor are of different wholes, outside of it, overlap, or do not fill it.
            SaveProtocolError: an item that a rank holds was not written, or a name is a tensor on one rank only.
        """
        if waiting := self.unwritten():
            ranks = some(map(self._number, waiting))
            raise SaveProtocolError(
                f"{sum(map(len, waiting.values()))} items that ranks {ranks} hold were written by no rank, so nothing "
                "was committed"
            )
        with collector_paused():
            parts = [self._parts[key] for key in sorted(self._parts)]
            metadata, items = merge_items(
                parts, self._tables, save_id=save_id, checkpoint_id=checkpoint_id, filled=self._world_size > 1,
                number=self._number,
            )  # fmt: skip
        return MergedSave(metadata, items, tuple(entry for part in parts for entry in part.objects))


_NO_HASHES = np.zeros(0, np.uint64)


def _held_not_written(part: AddedPart) -> npt.NDArray[np.uint64]:
    left = np.ones(len(part.held), bool)
    left[part.numbers[HELD]] = False
    return part.held[left]


def assign(
    holders: Sequence[tuple[int, npt.NDArray[np.uint64]]],
    written: npt.NDArray[np.uint64],
    excluded: frozenset[int],
    number: Callable[[int], int] = int,
) -> dict[int, list[int]]:
    """Give each hash that was not written to one of its holders: to one with the fewest so far, and none ``excluded``.
    Ranks, and what was written, are ascending.

    Raises:
        SaveProtocolError: all holders of a hash are ``excluded``.
    """
    hashes = np.concatenate([_NO_HASHES, *(each for _, each in holders)], dtype=np.uint64)
    ranks = np.repeat(np.array([rank for rank, _ in holders], np.int64), [len(each) for _, each in holders])
    missing = np.searchsorted(written, hashes) == np.searchsorted(written, hashes, side="right")
    by_hash: dict[int, list[int]] = {}
    for each, rank in zip(hashes[missing].tolist(), ranks[missing].tolist(), strict=True):
        by_hash.setdefault(each, []).append(rank)
    found: dict[int, list[int]] = {}
    for each in sorted(by_hash):
        live = [rank for rank in by_hash[each] if rank not in excluded]
        if not live:
            raise SaveProtocolError(
                f"items that only ranks {some(map(number, by_hash[each]))} hold were written by no rank, and these "
                "ranks no longer answer. Remedy: see what happened there, and save again; what was there before is "
                "untouched"
            )
        found.setdefault(min(live, key=lambda rank: (len(found.get(rank, ())), rank)), []).append(each)
    return dict(sorted(found.items()))
