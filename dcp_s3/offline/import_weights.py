"""`import_weights`: safetensors files as a checkpoint, in bounded memory."""

from __future__ import annotations

import mmap
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_s3.errors import WeightsError
from dcp_s3.load.boxes import row_major_strides
from dcp_s3.load.weights import SUFFIX, FoundTensor, find_weights
from dcp_s3.memory import view_bytes
from dcp_s3.offline.boxes import cut
from dcp_s3.offline.names import new_names
from dcp_s3.offline.place import Place
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.units import format_size, one_line, plural

PIECE = 8 * 2**20
"""Most bytes of a chunk: larger tensors become several, as if they had been sharded."""

# Each object has a thread that reads pieces, and each connection a part that it sends: that bounds the memory.
_OBJECTS, _CONNECTIONS = 6, 12
_MAPPED = 2**20  # bytes of a piece that has memory of its own: malloc keeps what its threads free


@dataclass(frozen=True)
class ImportResult:
    """What an import wrote.

    >>> exported = export("s3://bucket/run/step-00002000", "weights")
    >>> import_weights("weights", "s3://bucket/imported/step-0").tensors
    1
    """

    tensors: int
    """Number of tensors."""
    size: int
    """Bytes of the tensors."""

    def __repr__(self) -> str:
        return one_line("ImportResult", plural(self.tensors, "tensor"), format_size(self.size))


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
    """Make a checkpoint of safetensors files, as Hugging Face's libraries write them.

    Needs no process group. Takes at most 512 MiB of host memory, whatever the size of tensors and files.

    >>> exported = export("s3://bucket/run/step-00002000", "weights")
    >>> import_weights("weights", "s3://bucket/imported/step-0")
    ImportResult(1 tensor, 32 B)

    Args:
        source: directory or ``s3://bucket/prefix`` with ``*.safetensors``, with an index or without; or one such file.
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
    place, files = _locate(source, given)
    found = find_weights(place.store, place.prefix, files, str(source))
    names = _names(list(found), source, prefix, rename or {})
    few = min(given.max_connections, _CONNECTIONS)
    writes = given.model_copy(update={"part_size": PIECE, "concurrency": few})
    writer = S3StorageWriter(url, overwrite=overwrite, max_objects=_OBJECTS, settings=writes)
    planner = _Planner(place, {names[old]: tensor for old, tensor in found.items()}, on_progress or (lambda _: None))
    size = sum(tensor.nbytes for tensor in found.values())
    if on_total is not None:
        on_total(size)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    plans, metadata = create_default_global_save_plan([writer.prepare_local_plan(SavePlan(planner.items()))])
    outer = prefix[:-1].split(".") if prefix.endswith(".") else []
    # Where each entry is in a nested state: what torch's tools need to turn a checkpoint into a state again.
    metadata.planner_data = {new: (*outer, new[len(prefix) :]) if outer else (new,) for new in names.values()}
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    return ImportResult(len(found), size)


def _locate(source: str | os.PathLike[str], settings: Settings) -> tuple[Place, list[str]]:
    """Where the files are, and the names there: of one file, or of all."""
    place = Place.of(source, settings)
    if place.url is not None:
        name = place.url.name
        if name.endswith(SUFFIX) and place.store.exists(place.url.prefix):
            return replace(place, prefix=place.url.prefix.removesuffix(name)), [name]
    elif Path(source).is_file():
        return Place.of(Path(source).parent, settings), [Path(source).name]
    return place, place.names()


def _names(
    found: Sequence[str], source: str | os.PathLike[str], prefix: str, rules: Mapping[str, str]
) -> dict[str, str]:
    if not found:
        raise WeightsError(f"{source} has no entries")
    try:
        return {old: prefix + new for old, new in new_names(found, rules).items()}
    except ValueError as error:
        raise WeightsError(f"the entries of {source} cannot be renamed: {error}") from None


class _Planner(DefaultSavePlanner):
    """Reads pieces of tensors from their files when they are about to be written. Thread-safe."""

    def __init__(self, place: Place, tensors: Mapping[str, FoundTensor], moved: Callable[[int], None]) -> None:
        super().__init__()
        self._place, self._tensors, self._moved = place, tensors, moved

    def items(self) -> list[WriteItem]:
        items = []
        for name, tensor in self._tensors.items():
            boxes = [(box.offsets, box.lengths) for box in cut(tensor.shape, PIECE // tensor.dtype.itemsize)]
            for offsets, lengths in boxes or [((0,) * len(tensor.shape), tensor.shape)]:
                index = MetadataIndex(name, torch.Size(offsets))
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
                data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape))
                kind = WriteItemType.TENSOR if len(boxes) < 2 else WriteItemType.SHARD
                items.append(WriteItem(index, kind, tensor_data=data))
        return items

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        tensor, data = self._tensors[write_item.index.fqn], write_item.tensor_data
        assert data is not None  # noqa: S101 - all items are tensors
        offsets, lengths = data.chunk.offsets, data.chunk.sizes
        itemsize = tensor.dtype.itemsize
        size = lengths.numel() * itemsize
        if size < _MAPPED:
            memory = torch.empty(size, dtype=torch.uint8)
        else:
            memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        first = sum(map(operator.mul, offsets, row_major_strides(tensor.shape)))
        if size:
            key = self._place.key(tensor.file)
            self._place.store.read(key, tensor.start + itemsize * first, view_bytes(memory), tensor.etag)
        self._moved(size)
        return memory.view(tensor.dtype).view(lengths)
