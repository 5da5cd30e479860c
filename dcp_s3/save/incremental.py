"""Incremental saves: decides which objects and ranges S3 copies from the save before, and which are sent.

A tensor chunk has not changed if its checksum, dtype and shape are those that this process remembers. S3 then copies
whole objects of which nothing has changed, and runs of unchanged items of at least 5 MiB (S3's smallest part) of the
others. What is sent goes into objects of its own, the unchanged apart from the changed, so that the next save copies
whole objects. Nothing depends on an earlier checkpoint: what is gone, or is another object by now, is sent.
"""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3.format.archive import compute_frame
from dcp_s3.format.blocks import cuts_between, get_blocks, get_facts
from dcp_s3.memory import combine_crc64nvme, crc64nvme, iterate_bytes
from dcp_s3.save.objects import PINNED_BLOCK, ItemWriteResult, ObjectPieces, synchronized_device
from dcp_s3.save.plan import CopiedItems, WriteBucket, plan_buckets
from dcp_s3.save.split import stored_index
from dcp_s3.settings import MIN_PART_SIZE
from dcp_s3.store import CopyRange
from dcp_s3.torch_private import StorageInfo
from dcp_s3.url import CheckpointURL
from dcp_s3.workers import Workers

MOST_COPIES = 32
"""Most objects of a rank that S3 makes in one save. Of more it makes half as many."""
_MOST_RANGES = 4000  # of one object, whose parts S3 limits to 10,000
_KINDS = 4  # of checkpoints that a rank writes by turns, say the model and the optimizer: all are remembered
_THREADS = 4


@dataclass(frozen=True)
class SavedObject:
    """A data object of the save before."""

    key: str
    size: int
    crc: int
    """CRC-64/NVME of its bytes."""


@dataclass(frozen=True)
class SavedItem:
    """A tensor chunk of the save before."""

    source: SavedObject
    info: StorageInfo
    """Its record in ``.metadata``: where it lies in the object, and its checksums."""
    dtype: torch.dtype
    shape: torch.Size


SavedItems = Mapping[MetadataIndex, SavedItem]


# --- what the process remembers ---------------------------------------------------------------------------

_memories: dict[tuple[str, int], collections.OrderedDict[str, SavedItems]] = {}
"""Of each bucket and rank: the last items of each kind of checkpoint, the newest last."""


def _kind_of(url: CheckpointURL) -> str:
    return re.sub(r"\d+", "#", url.key("")).rstrip("/")


def recall(url: CheckpointURL, rank: int) -> SavedItems:
    """The items of the rank's last save whose URL differs in its numbers only, or otherwise of the last one beside
    it."""
    found: Mapping[str, SavedItems] = _memories.get((url.bucket, rank), {})
    kind = _kind_of(url)
    beside = [each for each in reversed(list(found)) if each.rpartition("/")[0] == kind.rpartition("/")[0]]
    return next((found[each] for each in (kind, *beside) if each in found), {})


def remember(
    url: CheckpointURL, rank: int, items: Sequence[WriteItem], results: Sequence[WriteResult], *, more: bool = False
) -> None:
    """Remember the framed tensors that a rank has written, with their places on S3, but not those that wait on a disk.
    ``more`` of the save that was remembered last."""
    found, kind = _memories.setdefault((url.bucket, rank), collections.OrderedDict()), _kind_of(url)
    saved = dict(found.get(kind, {})) if more else {}
    planned = {stored_index(item): item.tensor_data for item in items}
    source: SavedObject | None = None
    for each in results:
        if isinstance(each, ItemWriteResult) and (entry := each.object_entry) is not None:  # the first of its object
            crc = None if each.spilled else entry.crc64nvme
            source = None if crc is None else SavedObject(url.key(entry.path), entry.size, int(crc, 16))
        info, data = each.storage_data, planned.get(each.index)
        if source and data and None not in get_facts(info):
            saved[each.index] = SavedItem(source, info, data.properties.dtype, data.chunk.sizes)
    found[kind] = saved
    found.move_to_end(kind)
    while len(found) > _KINDS:
        found.popitem(last=False)


# --- what has not changed -----------------------------------------------------------------------------------


def find_unchanged(items: Sequence[WriteItem], saved: SavedItems, planner: SavePlanner) -> set[MetadataIndex]:
    """The indices of the items that have not changed since they were saved, by their checksums."""
    # The largest first, so that no thread has much to do when the others are done.
    known = [item for item in items if stored_index(item) in saved]
    todo = collections.deque(sorted(known, key=lambda item: -saved[stored_index(item)].info.length))
    device, found = synchronized_device(), set[MetadataIndex]()

    def work() -> None:
        if device is not None:
            torch.accelerator.set_device_index(device)
        memory = ObjectPieces(WriteBucket((), 0), planner, PINNED_BLOCK)
        while todo:
            try:
                item = todo.popleft()
            except IndexError:
                return
            if _is_unchanged(item, saved[stored_index(item)], memory):
                found.add(stored_index(item))

    threads = Workers(min(_THREADS, os.cpu_count() or 1), "dcp_s3-compare")
    try:
        for future in [threads.submit(work) for _ in range(_THREADS)]:
            future.result()
    finally:
        todo.clear()
        threads.close()
    return found


def _is_unchanged(item: WriteItem, saved: SavedItem, memory: ObjectPieces) -> bool:
    """Compare block by block: of what has changed, mostly the first block is read, and no more."""
    kind, planned = (saved.dtype, saved.shape), item.tensor_data
    if planned is None or (planned.properties.dtype, planned.chunk.sizes) != kind:
        return False
    tensor = memory.resolve(item)
    if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tensor.shape) != kind:
        return False
    size = tensor.nbytes
    blocks = get_blocks(saved.info, size) if size else None
    if blocks is None:
        return not size
    crc = done = 0
    for view in iterate_bytes(tensor, memory.chunk_size, memory.copy):
        start = 0
        for stop in (*cuts_between(done, done + view.nbytes, blocks.size), view.nbytes):
            crc = crc64nvme(view[start:stop], crc)
            done, start = done + stop - start, stop
            if (done == size or done % blocks.size == 0) and crc != blocks.crc_between(0, done, size):
                return False
    return done == size


# --- what is copied: pure -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Run:
    """Items that lie end to end in an object, and have not changed: bytes ``start`` to ``stop`` of it."""

    source: SavedObject
    start: int
    stop: int
    items: list[tuple[WriteItem, SavedItem]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.stop - self.start


def plan_changes(
    items: Sequence[WriteItem],
    unchanged: Collection[MetadataIndex],
    saved: SavedItems,
    *,
    max_buckets: int,
    min_bucket_size: int,
) -> list[WriteBucket]:
    """Distribute a rank's items over objects: those that S3 makes of the ``unchanged`` ones, which are in ``saved`` as
    they are, and those that are sent, see `plan_buckets`."""
    same = [item for item in items if stored_index(item) in unchanged]
    copied = _plan_copies(same, saved)
    done = {stored_index(item) for bucket in copied for item in bucket.items}
    left = [item for item in same if stored_index(item) not in done]
    changed = [item for item in items if stored_index(item) not in unchanged]
    sent = [
        bucket
        for each in (left, changed)
        for bucket in plan_buckets(each, max_buckets=max_buckets, min_bucket_size=min_bucket_size)
    ]
    return [*copied, *sorted(sent, key=lambda bucket: -bucket.size)]


def _plan_copies(items: Sequence[WriteItem], saved: SavedItems) -> list[WriteBucket]:
    by_object: dict[SavedObject, list[tuple[WriteItem, SavedItem]]] = {}
    for item in items:
        place = saved[stored_index(item)]
        by_object.setdefault(place.source, []).append((item, place))
    objects: list[list[_Run]] = []  # the runs of each new object
    for source, members in by_object.items():
        runs: list[_Run] = []  # the longest
        for item, place in sorted(members, key=lambda each: each[1].info.offset):
            start = place.info.offset
            if not runs or runs[-1].stop != start:
                runs.append(_Run(source, start, start))
            runs[-1].items.append((item, place))
            runs[-1].stop = start + place.info.length
        if runs[0].size != source.size:
            runs = [run for run in runs if run.size >= MIN_PART_SIZE]
        objects += [runs[start : start + _MOST_RANGES] for start in range(0, len(runs), _MOST_RANGES)]
    objects.sort(key=lambda runs: -sum(run.size for run in runs))
    if len(objects) > MOST_COPIES:
        kept = MOST_COPIES // 2 - 1
        rest = [run for runs in objects[kept:] for run in runs if run.size >= MIN_PART_SIZE]
        objects = [*objects[:kept], *([rest[:_MOST_RANGES]] if rest else [])]
    return [_make_bucket(runs) for runs in objects]


def _make_bucket(runs: Sequence[_Run]) -> WriteBucket:
    """The object that is made of these runs, end to end."""
    crcs: list[tuple[int, int]] = []
    ranges, places, size = [], [], 0
    for run in runs:
        source = run.source
        ranges.append(CopyRange(source.key, run.start, run.stop, source.size, source.crc))
        places += [(saved.info, size + saved.info.offset - run.start) for _, saved in run.items]
        size += run.size
        if run.size == source.size:
            crcs.append((source.crc, run.size))
            continue
        for _, saved in run.items:
            frame = compute_frame(saved.dtype, saved.shape)
            before, after = ((crc64nvme(each), len(each)) for each in (frame.header, frame.trailer))
            crcs += [before, (get_facts(saved.info)[1] or 0, frame.nbytes), after]
    copied = CopiedItems(tuple(ranges), combine_crc64nvme(crcs), tuple(places))
    return WriteBucket(tuple(item for run in runs for item, _ in run.items), size, copied=copied)
