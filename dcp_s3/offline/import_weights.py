"""`import_weights`: files of Hugging Face or torch as a checkpoint, in bounded memory."""

from __future__ import annotations

import io
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_s3.errors import WeightsError
from dcp_s3.format.archive import find_order
from dcp_s3.load.boxes import Box
from dcp_s3.offline.boxes import cut, in_batches
from dcp_s3.offline.names import new_names
from dcp_s3.offline.weight_files import FoundTensor, FoundWeights, find_weights
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.tensor_memory import view_bytes
from dcp_s3.units import format_size, one_line, plural

PIECE = 8 * 2**20
"""Most bytes of a chunk: larger tensors become several, as if they had been sharded."""

_PART = 8 * 2**20
_MAPPED = 2**20  # bytes of a piece that has memory of its own
_OBJECTS = 6  # each has a thread that reads
# A thread holds a piece that it reads, one of which the end waits for its part to be full, and that part.
_MEMORY = _OBJECTS * (2 * PIECE + _PART) + 2 * PIECE
# Bytes that are written together: an object of S3 has 10,000 parts.
_WRITTEN_TOGETHER = _OBJECTS * 8_000 * _PART


@dataclass(frozen=True)
class ImportResult:
    """What an import wrote.

    >>> torch.save(state, "model.pt")
    >>> import_weights("model.pt", "s3://bucket/imported/step-0").tensors
    1
    """

    tensors: int
    """Number of tensors."""
    objects: int
    """Number of other entries, from torch files."""
    size: int
    """Bytes of the tensors."""

    def __repr__(self) -> str:
        return one_line(
            "ImportResult", f"{plural(self.tensors, 'tensor')}", format_size(self.size), objects=self.objects or None
        )


def import_weights(
    source: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    prefix: str = "",
    rename: Mapping[str, str] | None = None,
    overwrite: bool = False,
    settings: SettingsLike = None,
    on_total: Callable[[int], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ImportResult:
    """Make a checkpoint of safetensors or torch files, as Hugging Face's libraries and torch write them.

    Needs no process group. Takes at most 512 MiB of host memory, whatever the size of tensors and files. Pickles are
    read with ``weights_only``. Nested dicts of a torch file become names with dots, as in DCP.

    >>> torch.save(state, "model.pt")
    >>> import_weights("model.pt", "s3://bucket/imported/step-0")
    ImportResult(1 tensor, 32 B, objects=1)

    Args:
        source: directory or ``s3://bucket/prefix`` with ``*.safetensors`` or torch files, with an index or without; or
            one such file.
        prefix: put before every name, for example ``model.``.
        rename: regular expressions, and what replaces their matches in the names, in this order, before the prefix.
        overwrite: replace a checkpoint at ``url``, which stays whole until the new one is committed.
        on_progress: called with the number of bytes that were read, from several threads.

    Raises:
        WeightsError: there are no weights; they are damaged, or cannot be read in pieces; names do not fit.
            Nothing was written.
        CheckpointExistsError: a checkpoint is at ``url``.
        InvalidURLError, SettingsError, StorageError, OSError
    """
    given = resolve_settings(settings)
    found = find_weights(source, given)
    names = _names(found, source, prefix, rename or {})
    writes = given.model_copy(update={"part_size": _PART})
    writer = S3StorageWriter(url, overwrite=overwrite, max_objects=_OBJECTS, settings=writes)
    planner = _Planner(found, names, on_progress or (lambda _: None))
    size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in found.tensors.values())
    if on_total is not None:
        on_total(size)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    plan = writer.prepare_local_plan(SavePlan(planner.items()))
    plans, metadata = create_default_global_save_plan([plan])
    metadata.planner_data = _paths(found, names, prefix)
    (plan,) = writer.prepare_global_plan(plans)
    results = []
    for items in in_batches(plan.items, _nbytes, most=_WRITTEN_TOGETHER, count=len(plan.items)):
        results += writer.write_data(SavePlan(items), planner).wait()
    writer.finish(metadata, [results])
    return ImportResult(len(found.tensors), len(found.objects), size)


def _names(
    found: FoundWeights, source: str | os.PathLike[str], prefix: str, rules: Mapping[str, str]
) -> dict[str, str]:
    if not found.paths:
        raise WeightsError(f"{source} has no entries")
    try:
        return {old: prefix + new for old, new in new_names(found.paths, rules).items()}
    except ValueError as error:
        raise WeightsError(f"the entries of {source} cannot be renamed: {error}") from None


def _paths(found: FoundWeights, names: Mapping[str, str], prefix: str) -> dict[str, tuple[Any, ...]]:
    """Where each entry is in the nested state: what torch's tools need to turn a checkpoint into a state again."""
    outer = tuple(prefix[:-1].split(".")) if prefix.endswith(".") else ()
    paths = {}
    for old, new in names.items():
        inner = found.paths[old] if new == prefix + old else (new[len(prefix) :],)
        paths[new] = (*outer, *inner) if outer or not prefix else (new,)
    return paths


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


class _Memory:
    """Counts the bytes of tensors that are alive, and makes new ones wait; one that is larger is made when alone."""

    def __init__(self, size: int) -> None:
        self._size, self._used = size, 0
        self._changed = threading.Condition(threading.RLock())  # a finalizer may run in a thread that holds it

    def take(self, size: int) -> torch.Tensor:
        with self._changed:
            while self._used and self._used + size > self._size:
                self._changed.wait(0.5)
            self._used += size
        # Not a tensor's own memory, which cannot be watched; and malloc keeps what its threads free.
        made = mmap.mmap(-1, size) if size >= _MAPPED else bytearray(size)
        memory = np.frombuffer(made, dtype=np.uint8)
        weakref.finalize(memory, self._give_back, size)
        return torch.from_numpy(memory)

    def _give_back(self, size: int) -> None:
        with self._changed:
            self._used -= size
            self._changed.notify_all()


class _Planner(DefaultSavePlanner):
    """Reads pieces of tensors from their files when they are about to be written. Thread-safe."""

    def __init__(self, found: FoundWeights, names: Mapping[str, str], moved: Callable[[int], None]) -> None:
        super().__init__()
        self._tensors = {new: found.tensors[old] for old, new in names.items() if old in found.tensors}
        self._objects = {new: found.objects[old] for old, new in names.items() if old in found.objects}
        self._moved = moved
        self._memory = _Memory(_MEMORY)

    def items(self) -> list[WriteItem]:
        items = []
        for name, tensor in self._tensors.items():
            boxes = _boxes(name, tensor)
            for box in boxes:
                index = MetadataIndex(name, torch.Size(box.offsets))
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
                data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape))
                kind = WriteItemType.TENSOR if len(boxes) == 1 else WriteItemType.SHARD
                items.append(WriteItem(index, kind, tensor_data=data))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._objects]
        return items

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name, data = write_item.index.fqn, write_item.tensor_data
        if data is None:
            stream = io.BytesIO()
            torch.save(self._objects[name], stream)
            return stream
        return self._read(self._tensors[name], Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes)))

    def _read(self, tensor: FoundTensor, box: Box) -> torch.Tensor:
        if 0 in box.lengths:
            return torch.empty(box.lengths, dtype=tensor.dtype)
        itemsize = tensor.dtype.itemsize
        start = tensor.start + itemsize * sum(o * s for o, s in zip(box.offsets, tensor.strides, strict=True))
        size = itemsize * _span(box.lengths, tensor.strides)
        memory = self._memory.take(size)
        tensor.file.read(start, view_bytes(memory))
        self._moved(math.prod(box.lengths) * itemsize)
        return memory.view(tensor.dtype).as_strided(box.lengths, tensor.strides)


def _span(lengths: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True))


def _boxes(name: str, tensor: FoundTensor) -> list[Box]:
    """The pieces of a tensor, each of which is one run of bytes in its file (or few enough bytes in all)."""
    shape, most = tensor.shape, PIECE // tensor.dtype.itemsize
    whole = [Box((0,) * len(shape), shape)]
    if 0 in shape:
        return whole
    order = find_order(shape, tensor.strides)
    if order is None:
        if max(math.prod(shape), _span(shape, tensor.strides)) > most:
            raise WeightsError(
                f"{name!r} in {tensor.file.name} is a view of shape {shape} with strides {tensor.strides}, which "
                "cannot be read in pieces. Remedy: save it again with .contiguous()"
            )
        return whole
    boxes = []
    for box in cut([shape[dim] for dim in order], most):
        offsets, lengths = [0] * len(shape), [0] * len(shape)
        for position, dim in enumerate(order):
            offsets[dim], lengths[dim] = box.offsets[position], box.lengths[position]
        boxes.append(Box(tuple(offsets), tuple(lengths)))
    return boxes
