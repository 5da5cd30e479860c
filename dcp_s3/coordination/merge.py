"""Makes one checkpoint's metadata of the parts that its ranks wrote, and finds what none of them would write. Pure.

What DCP's coordinator makes of plans and write results, from parts alone: the same entries, duplicates dropped, and
the same checks. All of it works on columns: thousands of ranks have millions of items.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import StorageMeta, TensorProperties

from dcp_s3.errors import SaveProtocolError, ShardingError
from dcp_s3.failures import name_ranks
from dcp_s3.format import part as parts
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.metadata_columns import Ints, StoredItems, dump_items, group_starts, stable_order
from dcp_s3.format.part import BLOCK, CRCS, FLAGS, IS_SHARD, NAME, OBJECT, OFFSETS, PLACE, PROPERTIES, SIZES, WHOLE
from dcp_s3.format.saved_entries import Shape, box_text, find_flaw
from dcp_s3.process import collector_paused

_MAX_CRC_BYTES = 2**27
"""Checksums of blocks in ``.metadata``, about. What takes a large share of it would be read by every rank at a load."""

_Key = TypeVar("_Key", bound=Hashable)
_Ordered = TypeVar("_Ordered", bound=tuple[Any, ...])


@dataclass(frozen=True)
class MergedSave:
    metadata: bytes
    """``.metadata``, pickled as torch's FileSystemReader reads it."""
    items: int
    """Number of stored items."""
    objects: tuple[ObjectEntry, ...]


class Merging:
    """The parts of one save (its nonce)."""

    def __init__(self, save: str, world_size: int) -> None:
        self._save, self._world_size = save, world_size
        self._facts: dict[int, Mapping[str, Any]] = {}
        self._objects: dict[int, tuple[ObjectEntry, ...]] = {}
        # Columns of each part, as in `Columns`; but names, shapes and properties are those of the whole save.
        self._columns: dict[int, tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.uint64]]] = {}
        # What the items of all parts refer to, each value once. The order is that in which parts came.
        self._names, self._shapes = parts.Table[str](), parts.Table[tuple[int, ...]]()
        self._properties = parts.Table[tuple[Any, ...]]()
        self._made: list[TensorProperties] = []
        """Properties by number."""
        self._paths: dict[int, tuple[int, tuple[str | int, ...]]] = {}
        """By number of a name: the lowest rank that has it, and what that says."""
        self._flattened = False
        """Whether any rank's planner flattens."""

    def add(self, data: bytes) -> bool:
        """Add the part of another rank, as it was read. Returns whether its tensors have other properties (dtypes and
        so on) than those of all parts before. A ValueError if it is none, damaged, or of another save; then nothing was
        added."""
        part = parts.unpack(data)
        if (part.save, part.world_size) != (self._save, self._world_size) or part.rank in self._facts:
            raise ValueError(
                f"part of rank {part.rank} belongs to save {part.save} of {part.world_size} ranks, expected "
                f"{self._save} of {self._world_size}; or it is there twice"
            )
        known = len(self._made)
        for each in part.properties:
            if each not in self._properties:
                self._made.append(parts.make_properties(each))
                self._properties[each]
        names = _numbers(self._names, part.names)
        if part.paths is not None:
            self._flattened = True
            for number, name, code in zip(names.tolist(), part.names, part.paths, strict=True):
                if code is not None and (number not in self._paths or self._paths[number][0] > part.rank):
                    self._paths[number] = part.rank, parts.path_from(name, code)
        numbers, ranges = part.numbers.astype(np.int32), part.ranges.copy()
        numbers[NAME] = names[part.numbers[NAME]]
        for row, table in (
            (PROPERTIES, _numbers(self._properties, part.properties)),
            (slice(PLACE, WHOLE + 1), _numbers(self._shapes, part.shapes)),
        ):
            numbers[row] = np.concatenate((_NONE, table + 1))[part.numbers[row]]
        crcs = _thin(numbers, ranges, np.frombuffer(part.crcs, np.uint64), self._world_size)
        self._columns[part.rank] = numbers, ranges, crcs
        self._facts[part.rank], self._objects[part.rank] = part.facts, part.objects
        return len(self._made) > known

    @property
    def facts(self) -> list[Mapping[str, Any]]:
        """What each part says of the save as a whole, by rank."""
        return [self._facts[rank] for rank in sorted(self._facts)]

    def merged(self, *, save_id: str, checkpoint_id: str, is_whole: bool = True) -> MergedSave:
        """Metadata of the whole save, or (``is_whole``) of some of its parts. The same parts always give the same
        bytes. Of several items with the same index, that of the lowest rank counts. To be called once.

        Raises:
            ShardingError: the chunks of a tensor are of different wholes, outside of it, overlap, or do not fill it.
            SaveProtocolError: a name is a tensor on one rank only.
        """
        with collector_paused():
            objects = [self._objects[rank] for rank in sorted(self._objects)]
            entries = tuple(itertools.chain.from_iterable(objects))
            items, paths = self._merge(objects, entries, filled=is_whole and self._world_size > 1)
            meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)
            return MergedSave(dump_items(items, planner_data=paths, storage_meta=meta), items.numbers.shape[1], entries)

    def _merge(
        self, objects: Sequence[Sequence[ObjectEntry]], entries: Sequence[ObjectEntry], *, filled: bool
    ) -> tuple[StoredItems, dict[str, tuple[str | int, ...]] | None]:
        """All items of the checkpoint, and the paths of their names."""
        order = sorted(self._columns)
        # Each array of a part is freed once it is copied, before the next ones are.
        columns = [list(self._columns.pop(rank)) for rank in order]
        counts = [each[0].shape[1] for each in columns]
        numbers, ranges, crcs = (
            np.concatenate([empty, *(each.pop(0) for each in columns)], axis=-1)
            for empty in (np.zeros((9, 0), np.int32), np.zeros((5, 0), np.int64), np.zeros(0, np.uint64))
        )
        numbers[OBJECT] += np.repeat(np.cumsum([0, *map(len, objects)])[:-1], counts).astype(np.int32)
        ranks = np.repeat(np.array(order, np.int64), counts)
        crc_starts = np.cumsum(numbers[CRCS] // 8, dtype=np.int64) - numbers[CRCS] // 8
        names, shapes = list(self._names), list(self._shapes)
        keys = numbers[NAME].astype(np.int64) * (len(shapes) + 1) + numbers[PLACE]
        by_key, kept = stable_order(keys), np.zeros(len(keys), bool)
        kept[by_key[group_starts(keys[by_key])]] = True  # the first of each index
        _check_wholes(numbers, kept, ranks, names, shapes, self._made)
        if not kept.all():
            numbers, ranges, ranks, crc_starts = numbers[:, kept], ranges[:, kept], ranks[kept], crc_starts[kept]
        _check_chunks(numbers, ranks, names, shapes, filled=filled)
        # Names in the order in which they first occur.
        first = _first_places(numbers[NAME], len(names))
        seen = np.argsort(first, kind="stable")[: int((first < len(ranks)).sum())]
        numbers[NAME] = _inverse(seen, len(names))[numbers[NAME]]
        made = dict(zip(self._properties, self._made, strict=True))
        items = StoredItems(
            names=[names[each] for each in seen.tolist()],
            shapes=_in_order(numbers[PLACE : WHOLE + 1], self._shapes),
            properties=[made[each] for each in _in_order(numbers[PROPERTIES], self._properties)],
            paths=[entry.path for entry in entries],
            numbers=numbers,
            ranges=ranges,
            crcs=crcs,
            crc_starts=crc_starts,
        )
        if not self._flattened:
            return items, None
        others = sorted(self._paths.keys() - set(seen.tolist()), key=names.__getitem__)
        return items, {names[n]: self._paths[n][1] for n in (*seen.tolist(), *others) if n in self._paths}


_NONE = np.zeros(1, np.int32)


def _numbers(table: parts.Table[_Key], keys: Sequence[_Key]) -> npt.NDArray[np.int32]:
    return np.fromiter(map(table.__getitem__, keys), np.int32, len(keys))


def _thin(
    numbers: npt.NDArray[np.int32], ranges: npt.NDArray[np.int64], crcs: npt.NDArray[np.uint64], world_size: int
) -> npt.NDArray[np.uint64]:
    """CRCs of blocks of a part's items: of larger blocks, if so many parts like it would have too many. Each is that of
    a beginning of its item, so every second one, say, is a record of blocks of twice the size."""
    every = -(-crcs.nbytes * world_size // _MAX_CRC_BYTES)
    if every <= 1:
        return crcs.copy()
    counts, kept = numbers[CRCS] // 8, numbers[CRCS] // (8 * every)
    starts, firsts = np.cumsum(counts) - counts, np.cumsum(kept) - kept
    places = np.repeat(starts + every - 1 - every * firsts, kept) + every * np.arange(kept.sum())
    numbers[CRCS] = 8 * kept
    ranges[BLOCK] *= every
    return crcs[places]


def _in_order(numbers: npt.NDArray[np.int32], table: Collection[_Ordered]) -> list[_Ordered]:
    """What numbers from 1 on refer to, in an order that does not depend on the table's; the numbers become its."""
    values = list(table)
    used = np.unique(numbers)
    found = sorted((used[used > 0] - 1).tolist(), key=values.__getitem__)
    numbers[...] = np.concatenate((_NONE, _inverse(np.array(found, np.int64), len(values)) + 1))[numbers]
    return [values[each] for each in found]


def _first_places(values: Ints, count: int) -> npt.NDArray[np.int64]:
    """Where each value first occurs; their number, of one that does not."""
    first = np.full(count, len(values), np.int64)
    np.minimum.at(first, values, np.arange(len(values)))
    return first


def _inverse(order: Ints, count: int) -> npt.NDArray[np.int32]:
    found = np.zeros(count, np.int32)
    found[order] = np.arange(len(order))
    return found


# --- whether the items of all parts fit together: what DCP's `_validate_global_plan` checks ---------------


def _check_wholes(
    numbers: Ints, kept: npt.NDArray[np.bool_], ranks: Ints, names: Sequence[str], shapes: Sequence[Shape],
    properties: Sequence[TensorProperties],
) -> None:  # fmt: skip
    """A name is the same on all ranks: a tensor of one shape and dtype, or something else. Duplicates of a whole tensor
    may differ, as in DCP (the first one counts), but not those of shards."""
    dtypes = [each.dtype for each in properties]
    kinds = np.array([0, *(1 + dtypes.index(each) for each in dtypes)], np.int32)[numbers[PROPERTIES]]
    wholes = numbers[WHOLE]
    firsts = _first_places(numbers[NAME], len(names))[numbers[NAME]]
    counts = kept | (numbers[FLAGS] & IS_SHARD > 0)
    wrong = np.flatnonzero(counts & ((kinds != kinds[firsts]) | (wholes != wholes[firsts])))
    if not len(wrong):
        return
    pair = [int(firsts[wrong[0]]), int(wrong[0])]
    name = names[numbers[NAME][pair[0]]]
    one, other = (
        (f"{dtypes[kinds[at] - 1]} of shape {shapes[wholes[at] - 1]}" if kinds[at] else "no tensor")
        + f" on rank {ranks[at]}"
        for at in pair
    )
    text = f"{name!r} is {one}, but {other}. Remedy: "
    if kinds[pair].all():
        raise ShardingError(f"{text}give it one shape and dtype on all ranks", fqn=name)
    raise SaveProtocolError(f"{text}give them different names")


def _check_chunks(numbers: Ints, ranks: Ints, names: Sequence[str], shapes: Sequence[Shape], *, filled: bool) -> None:
    """The chunks of each tensor, no offsets twice, are inside of it and do not overlap; and fill it, if ``filled``.
    Tensors that are cut alike are checked once."""
    tensors = np.flatnonzero(numbers[PROPERTIES] > 0)
    tensors = tensors[stable_order(numbers[NAME][tensors])]
    name_of, ranks = numbers[NAME][tensors], ranks[tensors]
    columns = numbers[[WHOLE, OFFSETS, SIZES]][:, tensors] - 1
    right: set[bytes] = set()
    for start, stop in itertools.pairwise([*group_starts(name_of).tolist(), len(tensors)]):
        layout = columns[:, start:stop].tobytes()
        if layout not in right:
            fqn, found = names[name_of[start]], ranks[start:stop].tolist()
            (number, *_), offsets, sizes = columns[:, start:stop].tolist()
            whole = shapes[number]
            boxes = [(shapes[a], shapes[b]) for a, b in zip(offsets, sizes, strict=True)]
            for box, rank in zip(boxes, found, strict=True):
                ends = [at + size for at, size in zip(*box, strict=False)]
                if {len(ends), *map(len, box)} != {len(whole)} or any(map(operator.gt, ends, whole)):
                    what = f"but a chunk outside of it: {box_text(*box)} of rank {rank}"
                    raise ShardingError(f"{fqn!r} has shape {whole}, {what}", fqn=fqn)
            if flaw := find_flaw(whole, boxes, filled=filled):
                who = f"Remedy: see that {name_ranks(set(found))}, who wrote them, save the same state"
                raise ShardingError(f"{fqn!r} {flaw}. {who}", fqn=fqn)
            right.add(layout)


# --- what no rank would write -----------------------------------------------------------------------------


def assign(leaves: Sequence[npt.NDArray[np.uint64]], writes: Sequence[npt.NDArray[np.uint64]]) -> dict[int, list[int]]:
    """What no rank would write: hashes that a rank ``leaves`` to others, none of which ``writes`` them, by the rank
    that is to write them. Each goes to one that holds it, with the fewest so far. Both are by rank."""
    none = np.zeros(0, np.uint64)
    hashes = np.concatenate([none, *leaves], dtype=np.uint64)
    ranks = np.repeat(np.arange(len(leaves)), [len(each) for each in leaves])
    missing = ~np.isin(hashes, np.concatenate([none, *writes], dtype=np.uint64))
    holders: dict[int, list[int]] = {}
    for each, rank in zip(hashes[missing].tolist(), ranks[missing].tolist(), strict=True):
        holders.setdefault(each, []).append(rank)
    found: dict[int, list[int]] = {}
    for each in sorted(holders):
        found.setdefault(min(holders[each], key=lambda rank: (len(found.get(rank, ())), rank)), []).append(each)
    return found
