"""Whether the items of all parts fit together: what DCP's `_validate_global_plan` checks, by columns. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.metadata import TensorProperties

from dcp_s3.errors import SaveProtocolError, ShardingError
from dcp_s3.format.cover import Shape, box_text, find_overlap
from dcp_s3.format.metadata_columns import Ints, group_starts, stable_order
from dcp_s3.format.part import FLAGS, IS_SHARD, NAME, OFFSETS, PROPERTIES, SIZES, WHOLE


def check_wholes(
    numbers: Ints,
    kept: npt.NDArray[np.bool_],
    ranks: Ints,
    names: Sequence[str],
    shapes: Sequence[Shape],
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


def check_chunks(numbers: Ints, ranks: Ints, names: Sequence[str], shapes: Sequence[Shape], *, filled: bool) -> None:
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
            (whole, *_), offsets, sizes = columns[:, start:stop].tolist()
            boxes = [(shapes[a], shapes[b]) for a, b in zip(offsets, sizes, strict=True)]
            _check_boxes(names[name_of[start]], shapes[whole], boxes, ranks[start:stop], filled)
            right.add(layout)


def _check_boxes(
    fqn: str, whole: Shape, boxes: Sequence[tuple[Shape, Shape]], ranks: npt.NDArray[np.int64], filled: bool
) -> None:
    dims = len(whole)
    same = [len(offsets) == len(sizes) == dims for offsets, sizes in boxes]
    corners = np.array([box if fits else ((0,) * dims,) * 2 for box, fits in zip(boxes, same, strict=True)], np.int64)
    starts, sizes = corners[:, 0], corners[:, 1]
    outside = np.flatnonzero(~np.array(same) | (starts + sizes > np.array(whole, np.int64)).any(axis=1))
    if len(outside):
        box = f"{box_text(*boxes[outside[0]])} of rank {ranks[outside[0]]}"
        raise ShardingError(f"{fqn!r} has shape {whole}, but a chunk outside of it: {box}", fqn=fqn)
    if not dims:
        return
    are_distinct = len({offsets for offsets, _ in boxes}) == len(boxes)
    if not (are_distinct and _is_grid(starts, starts + sizes)) and (pair := find_overlap(boxes)):
        one, other = (f"{box_text(*boxes[each])} of rank {ranks[each]}" for each in sorted(pair))
        raise ShardingError(f"{fqn!r} has chunks that overlap: {one}, and {other}", fqn=fqn)
    volume, expected = int(sizes.prod(axis=1).sum()), math.prod(whole)
    if filled and volume != expected:
        found = sorted(set(ranks.tolist()))
        more = f" and {len(found) - 8} more" if len(found) > 8 else ""
        raise ShardingError(
            f"{fqn!r} has {expected} elements, but the chunks of ranks {', '.join(map(str, found[:8]))}{more} have "
            f"{volume}: some are missing, or a rank saved another state",
            fqn=fqn,
        )


def _is_grid(starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> bool:
    """Whether the intervals of any two boxes are the same or disjoint in each dimension. As no offsets occur twice, the
    boxes are disjoint then. Tensors are mostly cut so, and numpy sees it at once; others are compared one by one."""
    for dim in range(starts.shape[1]):
        order = np.lexsort((ends[:, dim], starts[:, dim]))
        start, end = starts[order, dim], ends[order, dim]
        same = (start[1:] == start[:-1]) & (end[1:] == end[:-1])
        if not (same | (end[:-1] <= start[1:])).all():
            return False
    return True
