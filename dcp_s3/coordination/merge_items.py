"""Merges the items of many parts, as columns. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import StorageMeta, TensorProperties

from dcp_s3.errors import SaveProtocolError, ShardingError
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.cover import Shape, box_text, find_overlap
from dcp_s3.format.metadata_columns import StoredItems, dump_items, group_starts, stable_order
from dcp_s3.format.part import (
    CRCS,
    DESCRIPTORS,
    FLAGS,
    IS_SHARD,
    NAME,
    OBJECT,
    OFFSETS,
    PLACE,
    PROPERTIES,
    SIZES,
    WHOLE,
    Columns,
    Table,
    make_properties,
    path_from,
)

Ints: TypeAlias = npt.NDArray[np.integer[Any]]
_Key = TypeVar("_Key", bound=Hashable)
_Ordered = TypeVar("_Ordered", bound=tuple[Any, ...])
_Scalar = TypeVar("_Scalar", bound=np.generic)


class _Table(Table[_Key]):
    def numbers(self, keys: Sequence[_Key]) -> npt.NDArray[np.int32]:
        return np.fromiter(map(self.__getitem__, keys), np.int32, len(keys))


@dataclass(eq=False)
class AddedPart:
    """What is kept of a part. Its arrays are emptied as they are merged: together they have gigabytes."""

    rank: int
    numbers: npt.NDArray[np.int32]
    """As in `Columns`, but names, shapes, properties and descriptors are those of `Tables`."""
    ranges: npt.NDArray[np.int64]
    crcs: npt.NDArray[np.uint8]
    objects: tuple[ObjectEntry, ...]
    facts: Mapping[str, object]


class _Spool:
    """Keeps copies of arrays in pieces of memory so large that the system has them back when the last array in them is
    dropped (glibc: 32 MiB)."""

    def __init__(self) -> None:
        self._piece = _NO_BYTES

    def keep(self, values: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
        size = values.nbytes
        if size > len(self._piece):
            self._piece = np.empty(max(2**25, size), np.uint8)
        kept, self._piece = self._piece[:size].view(values.dtype).reshape(values.shape), self._piece[size:]
        kept[...] = values
        return kept


class Tables:
    """What the items of all parts refer to, each value once. The order is that in which parts came."""

    def __init__(self) -> None:
        self.names, self.shapes = _Table[str](), _Table[tuple[int, ...]]()
        self.properties, self.descriptors = _Table[tuple[Any, ...]](), _Table[tuple[str, ...]]()
        self.made: list[TensorProperties] = []
        """Properties by number."""
        self.paths: dict[int, tuple[str | int, ...]] = {}
        """By number of a name: what the lowest rank says that has it."""
        self._said_by = np.zeros(0, np.int64)
        self._columns, self._crcs = _Spool(), _Spool()  # apart, as they are dropped at different times
        self.flattened = False
        """Whether any rank's planner flattens."""

    def add(self, part: Columns) -> AddedPart:
        """Keep what a part says; ValueError if its properties or paths are none."""
        for each in part.properties:
            if each not in self.properties:
                self.made.append(make_properties(each))
                self.properties[each]
        names = self.names.numbers(part.names)
        if part.paths is not None:
            self._add_paths(part, part.paths, names)
        numbers = part.numbers.astype(np.int32)
        numbers[NAME] = names[part.numbers[NAME]]
        for row, table in (
            (PROPERTIES, self.properties.numbers(part.properties)),
            (slice(PLACE, WHOLE + 1), self.shapes.numbers(part.shapes)),
            (DESCRIPTORS, self.descriptors.numbers(part.descriptors)),
        ):
            numbers[row] = np.concatenate((_NONE, table + 1))[part.numbers[row]]
        kept = self._columns.keep(numbers), self._columns.keep(part.ranges)
        crcs = self._crcs.keep(np.frombuffer(part.crcs, np.uint8))
        return AddedPart(part.rank, *kept, crcs, part.objects, dict(part.facts))

    def _add_paths(self, part: Columns, codes: Sequence[str | None], names: npt.NDArray[np.int32]) -> None:
        new = np.full(len(self.names) - len(self._said_by), _NOBODY)
        self._said_by = np.concatenate((self._said_by, new)) if len(new) else self._said_by
        said = [
            (int(names[each]), path_from(part.names[each], code))
            for each in np.flatnonzero(self._said_by[names] > part.rank).tolist()
            if (code := codes[each]) is not None
        ]
        for number, path in said:
            self.paths[number], self._said_by[number] = path, part.rank
        self.flattened = True


_NOBODY = 2**63 - 1
_NO_BYTES = np.zeros(0, np.uint8)
_NONE = np.zeros(1, np.int32)


def merge_items(
    parts: Sequence[AddedPart],
    tables: Tables,
    *,
    save_id: str,
    checkpoint_id: str,
    filled: bool,
    number: Callable[[int], int] = int,
) -> tuple[bytes, int]:
    """``.metadata`` of all parts, by rank, and its number of items."""
    counts = [part.numbers.shape[1] for part in parts]
    numbers = np.concatenate([_NO_ITEMS, *(part.numbers for part in parts)], axis=1)
    ranges = np.concatenate([_NO_RANGES, *(part.ranges for part in parts)], axis=1)
    for part in parts:
        part.numbers, part.ranges = _NO_ITEMS, _NO_RANGES
    numbers[OBJECT] += np.repeat(_sums([len(part.objects) for part in parts]), counts).astype(np.int32)
    which = np.repeat(np.arange(len(parts)), counts)
    ranks = np.array([number(part.rank) for part in parts], np.int64)[which]  # for messages
    names, shapes = list(tables.names), list(tables.shapes)
    kept = _first_of_each(numbers[NAME].astype(np.int64) * (len(shapes) + 1) + numbers[PLACE])
    _check_wholes(numbers, kept, ranks, names, shapes, tables.made)
    chosen = np.flatnonzero(kept)
    blocks = _Blocks(parts, counts, numbers[CRCS], which, chosen)
    if len(chosen) < len(kept):
        numbers, ranges, ranks = numbers[:, chosen], ranges[:, chosen], ranks[chosen]
    _check_chunks(numbers, ranks, names, shapes, filled=filled)
    order = _first_seen(numbers[NAME], len(names))
    numbers[NAME] = _inverse(order, len(names))[numbers[NAME]]
    properties = dict(zip(tables.properties, tables.made, strict=True))
    items = StoredItems(
        names=[names[each] for each in order.tolist()],
        shapes=_in_order(numbers[PLACE : WHOLE + 1], tables.shapes),
        properties=[properties[each] for each in _in_order(numbers[PROPERTIES], tables.properties)],
        descriptors=[list(each) for each in _in_order(numbers[DESCRIPTORS], tables.descriptors)],
        paths=[entry.path for part in parts for entry in part.objects],
        numbers=numbers,
        ranges=ranges,
        copy_crcs=blocks.copy,
        release_crcs=blocks.release,
    )
    meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)
    return dump_items(items, planner_data=_planner_data(tables, names, order), storage_meta=meta), len(chosen)


_NO_ITEMS, _NO_RANGES = np.zeros((10, 0), np.int32), np.zeros((5, 0), np.int64)


def _in_order(numbers: npt.NDArray[np.int32], table: Collection[_Ordered]) -> list[_Ordered]:
    """What numbers from 1 on refer to, in an order that does not depend on the table's; the numbers become its."""
    values = list(table)
    used = np.sort(numbers, axis=None)
    used = used[group_starts(used)]
    found = sorted((used[used > 0] - 1).tolist(), key=values.__getitem__)
    numbers[...] = np.concatenate((_NONE, _inverse(np.array(found, np.int64), len(values)) + 1))[numbers]
    return [values[each] for each in found]


def _planner_data(
    tables: Tables, names: Sequence[str], order: npt.NDArray[np.int64]
) -> dict[str, tuple[str | int, ...]] | None:
    """Paths by name, those of items in their order; None if no rank's planner flattens."""
    if not tables.flattened:
        return None
    others = sorted(tables.paths.keys() - set(order.tolist()), key=names.__getitem__)
    return {names[each]: tables.paths[each] for each in (*order.tolist(), *others) if each in tables.paths}


class _Blocks:
    """CRCs of blocks of the chosen items."""

    def __init__(
        self, parts: Sequence[AddedPart], counts: Sequence[int], lengths: Ints, which: Ints, chosen: Ints
    ) -> None:
        self._parts, self._released = parts, 0
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        self._starts = (starts - np.repeat(_sums([len(part.crcs) for part in parts]), counts))[chosen]
        self._which = which[chosen]

    def copy(self, items: Ints, rows: npt.NDArray[np.uint8]) -> None:
        """Copy those of items (ascending) into rows, all of the same length."""
        length = rows.shape[1]
        if not length:
            return
        starts, which = self._starts[items], self._which[items]
        runs = [*group_starts(which).tolist(), len(items)]
        for first, last in itertools.pairwise(runs):
            crcs = self._parts[int(which[first])].crcs
            windows = np.ndarray((len(crcs) - length + 1, length), np.uint8, crcs, 0, (1, 1))
            rows[first:last] = windows[starts[first:last]]

    def release(self, item: int) -> None:
        """Forget the CRCs of the parts all of whose items are before this one."""
        stop = int(self._which[item]) if item < len(self._which) else len(self._parts)
        for part in self._parts[self._released : stop]:
            part.crcs = _NO_BYTES
        self._released = stop


def _sums(counts: Sequence[int]) -> npt.NDArray[np.int64]:
    """Sum of all counts before each."""
    return np.cumsum([0, *counts], dtype=np.int64)[:-1]


def _first_of_each(keys: Ints) -> npt.NDArray[np.bool_]:
    """Whether each key is the first of its value."""
    order = stable_order(keys)
    first = np.zeros(len(keys), bool)
    first[order[group_starts(keys[order])]] = True
    return first


def _first_seen(values: Ints, count: int) -> npt.NDArray[np.int64]:
    """Values in the order in which they first occur."""
    first = np.full(count, len(values), np.int64)
    np.minimum.at(first, values, np.arange(len(values)))
    return np.argsort(first, kind="stable")[: int((first < len(values)).sum())]


def _inverse(order: Ints, count: int) -> npt.NDArray[np.int32]:
    found = np.zeros(count, np.int32)
    found[order] = np.arange(len(order))
    return found


# --- checks ---------------------------------------------------------------------------------------


def _check_wholes(
    numbers: Ints,
    kept: npt.NDArray[np.bool_],
    ranks: Ints,
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    properties: Sequence[TensorProperties],
) -> None:
    """A name is the same on all ranks: a tensor of one shape and dtype, or something else. Duplicates of a whole tensor
    may differ, as in DCP (the first one counts), but not those of shards."""
    dtypes = [each.dtype for each in properties]
    kinds = np.array([0, *(1 + dtypes.index(each) for each in dtypes)], np.int32)[numbers[PROPERTIES]]
    wholes = numbers[WHOLE]
    first = np.full(len(names), len(ranks), np.int64)
    np.minimum.at(first, numbers[NAME], np.arange(len(ranks)))
    firsts = first[numbers[NAME]]
    counts = kept | (numbers[FLAGS] & IS_SHARD > 0)
    wrong = np.flatnonzero(counts & ((kinds != kinds[firsts]) | (wholes != wholes[firsts])))
    if not len(wrong):
        return
    pair = (int(firsts[wrong[0]]), int(wrong[0]))
    name = names[numbers[NAME][pair[0]]]
    one, other = (
        f"{dtypes[kinds[each] - 1]} of shape {shapes[wholes[each] - 1]}" if kinds[each] else "no tensor"
        for each in pair
    )
    text = f"{name!r} is {one} on rank {ranks[pair[0]]}, but {other} on rank {ranks[pair[1]]}. Remedy: "
    if kinds[pair[0]] and kinds[pair[1]]:
        raise ShardingError(f"{text}give it one shape and dtype on all ranks", fqn=name)
    raise SaveProtocolError(f"{text}give them different names")


def _check_chunks(
    numbers: Ints, ranks: Ints, names: Sequence[str], shapes: Sequence[tuple[int, ...]], *, filled: bool
) -> None:
    tensors = np.flatnonzero(numbers[PROPERTIES] > 0)
    tensors = tensors[stable_order(numbers[NAME][tensors])]
    name_of, ranks = numbers[NAME][tensors], ranks[tensors]
    offsets, sizes, wholes = (numbers[row][tensors] - 1 for row in (OFFSETS, SIZES, WHOLE))
    checks = ChunkChecks(shapes, filled=filled)
    outside = checks.find_outside(offsets, sizes, wholes)
    if outside is not None:
        name, whole = names[name_of[outside]], shapes[wholes[outside]]
        box = box_text(shapes[offsets[outside]], shapes[sizes[outside]])
        raise ShardingError(
            f"{name!r} has shape {whole}, but a chunk outside of it: {box} of rank {ranks[outside]}", fqn=name
        )
    bounds = [*group_starts(name_of).tolist(), len(tensors)]
    for start, stop in itertools.pairwise(bounds):
        inside = slice(start, stop)
        checks.check(names[name_of[start]], int(wholes[start]), offsets[inside], sizes[inside], ranks[inside])


# --- whether chunks fit ---------------------------------------------------------------------------------


class ChunkChecks:
    """Whether the chunks of tensors fit these and each other: what DCP's `_validate_global_plan` checks.

    The chunks of a tensor that is cut along its dimensions form a grid, and numpy sees at once that a grid has no
    overlaps. Others are compared one by one. Tensors that are cut alike are checked once. What is checked refers to
    ``shapes`` by number.
    """

    def __init__(self, shapes: Sequence[Shape], *, filled: bool) -> None:
        self._shapes, self._filled = shapes, filled
        dims = max(map(len, shapes), default=0)
        padded = [(*each, *[0] * (dims - len(each))) for each in shapes]
        self._padded = np.array(padded, np.int64).reshape(len(shapes), dims)
        self._dims = np.array([len(each) for each in shapes], np.int64)
        self._volumes = np.array([math.prod(each) for each in shapes], np.int64)
        self._right: set[bytes] = set()

    def find_outside(self, offsets: Ints, sizes: Ints, wholes: Ints) -> int | None:
        """Position of the first chunk that is not inside its tensor; None if all are."""
        wrong = (self._dims[offsets] != self._dims[wholes]) | (self._dims[sizes] != self._dims[wholes])
        for dim in range(self._padded.shape[1]):
            column = self._padded[:, dim]
            wrong |= column[offsets] + column[sizes] > column[wholes]
        return int(wrong.argmax()) if wrong.any() else None

    def check(self, fqn: str, whole: int, offsets: Ints, sizes: Ints, ranks: Ints) -> None:
        """Check the chunks of one tensor, all inside of it, and no offsets twice."""
        key = whole.to_bytes(8, "big") + offsets.tobytes() + sizes.tobytes()
        if key in self._right or not self._shapes[whole]:
            return
        if len(offsets) > 1 and not self._is_grid(len(self._shapes[whole]), offsets, sizes):
            boxes = [(self._shapes[a], self._shapes[b]) for a, b in zip(offsets.tolist(), sizes.tolist(), strict=True)]
            if pair := find_overlap(boxes):
                one, other = sorted(pair)
                raise ShardingError(
                    f"{fqn!r} has chunks that overlap: {box_text(*boxes[one])} of rank {ranks[one]}, and "
                    f"{box_text(*boxes[other])} of rank {ranks[other]}",
                    fqn=fqn,
                )
        volume, expected = int(self._volumes[sizes].sum()), int(self._volumes[whole])
        if self._filled and volume != expected:
            raise ShardingError(
                f"{fqn!r} has {expected} elements, but the chunks of ranks {some(ranks.tolist())} have {volume}: some "
                "are missing, or a rank saved another state",
                fqn=fqn,
            )
        self._right.add(key)

    def _is_grid(self, dims: int, offsets: Ints, sizes: Ints) -> bool:
        """Whether the intervals of any two boxes are the same or disjoint in each dimension. As no offsets occur twice,
        the boxes are disjoint then."""
        ordered = np.sort(offsets)
        if (ordered[1:] == ordered[:-1]).any():
            return False
        starts, ends = self._padded[offsets, :dims], self._padded[offsets, :dims] + self._padded[sizes, :dims]
        for dim in range(dims):
            order = np.lexsort((ends[:, dim], starts[:, dim]))
            start, end = starts[order, dim], ends[order, dim]
            same = (start[1:] == start[:-1]) & (end[1:] == end[:-1])
            if not (same | (end[:-1] <= start[1:])).all():
                return False
        return True


def some(ranks: Iterable[int]) -> str:
    """Ranks, for messages: not more than a few."""
    found = sorted(set(ranks))
    return ", ".join(map(str, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
