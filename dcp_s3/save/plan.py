"""Which item goes into which object, and whether the ranks' items fit each other. Pure."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from dcp_s3.checkpoint.attachments import Attachment
from dcp_s3.errors import ShardingError
from dcp_s3.store import CopyRange
from dcp_s3.torch_private import StorageInfo

OBJECTS_PER_RANK = 4
"""Most objects of a rank and save, besides attachments: as many are pickled and framed at a time. More would not be
faster, and each costs a request to begin and one to complete."""

# Framing of one item by torch.save, and a guess for an item whose size is unknown until it is pickled.
_FRAMING_BYTES = 2048
_UNKNOWN_BYTES = 1024


@dataclass(frozen=True)
class CopiedItems:
    """Items whose bytes lie on S3 already, from where they are copied."""

    ranges: tuple[CopyRange, ...]
    """What the object is made of."""
    crc: int
    """CRC-64/NVME of the object."""
    places: tuple[tuple[StorageInfo, int], ...]
    """The record of each item in the object that has it, and its first byte in the new one."""


@dataclass(frozen=True)
class WriteBucket:
    """What goes into one object: items, or one attachment."""

    items: tuple[WriteItem, ...]
    """The items, in the order in which they are written."""
    size: int
    """Estimated size in bytes."""
    attachment: Attachment | None = None
    copied: CopiedItems | None = None
    """How S3 makes the object, if it can. Otherwise its items are sent."""


def item_size(item: WriteItem) -> int:
    """Estimated bytes of ``item`` in its object: its chunk (not its whole tensor) plus framing."""
    if item.tensor_data is None:
        size = item.bytes_io_data.nbytes if item.bytes_io_data is not None else _UNKNOWN_BYTES
        return size + _FRAMING_BYTES
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize + _FRAMING_BYTES


def plan_buckets(items: Sequence[WriteItem], *, max_buckets: int, min_bucket_size: int) -> list[WriteBucket]:
    """Distribute a rank's items over at most ``max_buckets`` objects, fewer rather than smaller than
    ``min_bucket_size`` bytes. None is empty, and the largest comes first. The result depends on the arguments alone.

    Tensors go largest first into the bucket that is smallest so far (at most 4/3 of the best possible maximum,
    Graham 1969); other items are spread round-robin. Unlike torch's, by the size of the chunk, not of the whole tensor.
    """
    sizes = [item_size(item) for item in items]
    count = max(1, min(max_buckets, len(items), sum(sizes) // max(1, min_bucket_size)))
    numbers: list[list[int]] = [[] for _ in range(count)]
    totals = [0] * count

    others = [i for i, item in enumerate(items) if item.type == WriteItemType.BYTE_IO]
    for turn, i in enumerate(others):
        numbers[turn % count].append(i)
        totals[turn % count] += sizes[i]

    tensors = [i for i, item in enumerate(items) if item.type != WriteItemType.BYTE_IO]
    tensors.sort(key=lambda i: -sizes[i])
    heap = [(total, number) for number, total in enumerate(totals)]
    heapq.heapify(heap)
    for i in tensors:
        total, number = heapq.heappop(heap)
        numbers[number].append(i)
        totals[number] = total + sizes[i]
        heapq.heappush(heap, (totals[number], number))

    buckets = [
        # Plan order within a bucket: neighbours in the state stay neighbours on S3, and their reads coalesce.
        WriteBucket(tuple(items[i] for i in sorted(inside)), total)
        for inside, total in zip(numbers, totals, strict=True)
        if inside
    ]
    return sorted(buckets, key=lambda bucket: -bucket.size)


def check_shards(plans: Sequence[SavePlan], *, filled: bool) -> None:
    """Check that the shards of a tensor in all ranks' plans are of one whole, and with ``filled`` that they fill it.

    torch's planner takes the shape of the first shard for that of the tensor. It finds boxes outside of that, overlaps
    and holes, but not shards of another shape that fill the first one's; of one rank alone it asks nothing.
    """
    known: dict[str, tuple[torch.Size, int]] = {}
    saved: Counter[str] = Counter()
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data, fqn = item.tensor_data, item.index.fqn
            if data is None or item.type != WriteItemType.SHARD:
                continue
            size, first = known.setdefault(fqn, (data.size, rank))
            if size != data.size:
                raise ShardingError(
                    f"{fqn!r} has shape {tuple(size)} on rank {first}, but {tuple(data.size)} on rank {rank}. "
                    "Remedy: pass the same global_shape on all ranks",
                    fqn=fqn,
                )
            if filled:
                saved[fqn] += math.prod(data.chunk.sizes)
    for fqn, (size, _) in known.items() if filled else ():
        if saved[fqn] != math.prod(size):
            raise ShardingError(
                f"{fqn!r}: the shards to save hold {saved[fqn]} of its {math.prod(size)} elements, and this process "
                "saves without the others. Remedy: save on all ranks that hold a part of it, with torch.distributed "
                "initialized or with use_collectives=False",
                fqn=fqn,
            )
