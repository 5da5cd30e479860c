"""Incremental saves: decides which objects and ranges S3 copies from the save before, and which are sent.

A tensor chunk has not changed if its checksum, dtype and shape are those of the save before, which this process
remembers. S3 then makes objects of the old ones: whole objects of which nothing has changed, and runs of unchanged
items of at least 5 MiB (S3's smallest part) of the others. What is sent goes into objects of its own, the unchanged
apart from the changed, so that the next save copies whole objects.

Nothing depends on an earlier checkpoint: what is gone, or is another object by now, is sent.
"""

from __future__ import annotations

import collections
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from dcp_s3.format.archive import compute_frame
from dcp_s3.format.blocks import cuts_between, get_blocks, get_crc, get_raw_offset
from dcp_s3.memory import combine_crc64nvme, crc64nvme
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


class LastSaves:
    """What a rank saved last to checkpoints with a name like that of ``url``. Kept by the process, not by this."""

    def __init__(self, url: CheckpointURL, rank: int) -> None:
        self._url, self._key = url, (url.bucket, rank)
        self._kind = re.sub(r"\d+", "#", url.key(""))
        self._parent = self._kind.rstrip("/").rpartition("/")[0]

    def find(self) -> SavedItems:
        """The items of the last save whose URL differs in its numbers only, or otherwise of the last one beside it."""
        found: Mapping[str, SavedItems] = _memories.get(self._key, {})
        newest_first = reversed(list(found))
        beside = [kind for kind in newest_first if kind.rstrip("/").rpartition("/")[0] == self._parent]
        return next((found[kind] for kind in (self._kind, *beside) if kind in found), {})

    def remember(self, items: Sequence[WriteItem], results: Sequence[WriteResult], *, more: bool) -> None:
        """Remember what this rank has written of a save; ``more`` of the one that it has remembered last."""
        found = _memories.setdefault(self._key, collections.OrderedDict())
        before = found.get(self._kind, {}) if more else {}
        found[self._kind] = {**before, **saved_items(self._url, items, results)}
        found.move_to_end(self._kind)
        while len(found) > _KINDS:
            found.popitem(last=False)


def saved_items(url: CheckpointURL, items: Sequence[WriteItem], results: Sequence[WriteResult]) -> SavedItems:
    """The framed tensors among the items, with their places on S3. Without those that wait on a disk."""
    planned = {stored_index(item): item.tensor_data for item in items}
    found: dict[MetadataIndex, SavedItem] = {}
    source: SavedObject | None = None
    for each in results:
        if isinstance(each, ItemWriteResult) and (entry := each.object_entry) is not None:  # the first of its object
            crc = None if each.spilled else entry.crc64nvme
            source = None if crc is None else SavedObject(url.key(entry.path), entry.size, int(crc, 16))
        info, data = each.storage_data, planned.get(each.index)
        if source and data and get_raw_offset(info) is not None and get_crc(info) is not None:
            found[each.index] = SavedItem(source, info, data.properties.dtype, data.chunk.sizes)
    return found


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
    for view in memory.views(tensor):
        start = 0
        for stop in (*cuts_between(done, done + view.nbytes, blocks.size), view.nbytes):
            crc = crc64nvme(view[start:stop], crc)
            done, start = done + stop - start, stop
            if (done == size or done % blocks.size == 0) and crc != blocks.crc_between(0, done, size):
                return False
    return done == size


# --- what is copied: pure -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """Items that lie end to end in an object, and have not changed."""

    items: tuple[WriteItem, ...]
    saved: tuple[SavedItem, ...]

    @property
    def source(self) -> SavedObject:
        return self.saved[0].source

    @property
    def start(self) -> int:
        return self.saved[0].info.offset

    @property
    def size(self) -> int:
        return self.saved[-1].info.offset + self.saved[-1].info.length - self.start

    @property
    def is_whole(self) -> bool:
        return self.size == self.source.size


def plan_changes(
    items: Sequence[WriteItem],
    unchanged: Collection[MetadataIndex],
    saved: SavedItems,
    *,
    max_buckets: int,
    min_bucket_size: int,
) -> list[WriteBucket]:
    """Distribute a rank's items over objects: those that S3 makes of the unchanged ones, and those that are sent.

    Args:
        unchanged: indices of items that are in ``saved``, as they are.
        max_buckets, min_bucket_size: see `plan_buckets`.
    """
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
    by_object: dict[SavedObject, list[WriteItem]] = {}
    for item in items:
        by_object.setdefault(saved[stored_index(item)].source, []).append(item)
    objects: list[list[_Run]] = []  # the runs of each new object
    for members in by_object.values():
        runs = _find_runs(members, saved)
        if not runs[0].is_whole:
            runs = [run for run in runs if run.size >= MIN_PART_SIZE]
        objects += [runs[start : start + _MOST_RANGES] for start in range(0, len(runs), _MOST_RANGES)]
    objects.sort(key=lambda runs: -sum(run.size for run in runs))
    if len(objects) > MOST_COPIES:
        kept = MOST_COPIES // 2 - 1
        rest = [run for runs in objects[kept:] for run in runs if run.size >= MIN_PART_SIZE]
        objects = [*objects[:kept], *([rest[:_MOST_RANGES]] if rest else [])]
    return [_make_bucket(runs) for runs in objects]


def _find_runs(items: Sequence[WriteItem], saved: SavedItems) -> list[_Run]:
    """The longest runs of these items of one object."""
    runs: list[list[tuple[WriteItem, SavedItem]]] = []
    end = -1
    places = sorted(((item, saved[stored_index(item)]) for item in items), key=lambda each: each[1].info.offset)
    for item, place in places:
        if place.info.offset != end:
            runs.append([])
        runs[-1].append((item, place))
        end = place.info.offset + place.info.length
    return [_Run(*map(tuple, zip(*run, strict=True))) for run in runs]


def _make_bucket(runs: Sequence[_Run]) -> WriteBucket:
    """The object that is made of these runs, end to end."""
    ranges, crcs, places, size = [], [], [], 0
    for run in runs:
        source = run.source
        ranges.append(CopyRange(source.key, run.start, run.start + run.size, source.size, source.crc))
        places += [(each.info, size + each.info.offset - run.start) for each in run.saved]
        framed = [(source.crc, source.size)] if run.is_whole else [_framed_crc(each) for each in run.saved]
        crcs += framed
        size += run.size
    copied = CopiedItems(tuple(ranges), combine_crc64nvme(crcs), tuple(places))
    return WriteBucket(tuple(item for run in runs for item in run.items), size, copied=copied)


def _framed_crc(saved: SavedItem) -> tuple[int, int]:
    """CRC-64 and bytes of an item with its frame."""
    frame = compute_frame(saved.dtype, saved.shape)
    parts = ((crc64nvme(frame.header), len(frame.header)), (get_crc(saved.info) or 0, frame.nbytes))
    return combine_crc64nvme([*parts, (crc64nvme(frame.trailer), len(frame.trailer))]), saved.info.length
