"""Safetensors files into the tensors of a state (`load_safetensors`), or as a checkpoint (`import_weights`)."""

from __future__ import annotations

import mmap
import operator
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from dcp_s3 import errors, process
from dcp_s3.errors import WeightsError
from dcp_s3.events import Listener
from dcp_s3.failures import real_causes
from dcp_s3.load.plan import Box, row_major_strides
from dcp_s3.load.planner import S3LoadPlanner
from dcp_s3.load.reader import S3StorageReader
from dcp_s3.load.weights import FoundTensor, find_weights, is_weights, rename_entries
from dcp_s3.memory import view_bytes
from dcp_s3.offline.names import new_names
from dcp_s3.offline.place import Place
from dcp_s3.offline.read import cut
from dcp_s3.save.writer import S3StorageWriter
from dcp_s3.settings import SettingsLike, resolve_settings

PIECE = 8 * 2**20
"""Most bytes of a chunk: larger tensors become several, as if they had been sharded."""

# Each object has a thread that reads pieces, and each connection a part that it sends: that bounds the memory.
_OBJECTS, _CONNECTIONS = 6, 12
_MAPPED = 2**20  # bytes of a piece that has memory of its own: malloc keeps what its threads free


def load_safetensors(
    url: str | os.PathLike[str],
    state_dict: dict[str, Any],
    *,
    prefix: str = "",
    rename: Mapping[str, str] | None = None,
    tied: Mapping[str, str] | None = None,
    allow_partial_load: bool = False,
    allow_dtype_cast: bool = True,
    process_group: dist.ProcessGroup | None = None,
    settings: SettingsLike = None,
    on_event: Listener | None = None,
) -> None:
    """Fill the tensors of a state, in place, from safetensors files on S3, as Hugging Face's libraries write them.

    Called on all ranks with their parts of the state (DTensors or plain tensors), or in a process without a group. Each
    rank fetches only the ranges that it needs; what several ranks need is fetched once and sent between them. Entries
    of one memory (tied parameters) need only one of their names in the files. Other dtypes are converted.

    >>> exported = export("s3://bucket/run/step-00002000", "s3://bucket/hf-model")
    >>> model = {"model": {"weight": torch.zeros(4, 2)}}
    >>> load_safetensors("s3://bucket/hf-model", model, prefix="model.")

    Args:
        url: ``s3://bucket/prefix`` with ``*.safetensors``, with an index or without.
        state_dict: tensors by name, or such dicts in dicts: their names are joined by dots. A model's ``state_dict()``.
        prefix: put before every name of the files, for example ``model.``.
        rename: regular expressions, and what replaces their matches in the files' names, in this order, before the
            prefix.
        tied: names in the state that are in no file, each with that of the entry in the state that it equals.
        allow_partial_load: leave entries as they are that no file has, instead of MissingKeysError.
        allow_dtype_cast: False: an entry of another dtype is a TensorMismatchError, before anything is changed.
        process_group: see `S3StorageReader`.

    Raises:
        WeightsError: there are no weights at ``url``, they are damaged, or names do not fit.
        MissingKeysError: the state has entries that no file has.
        TensorMismatchError: a shape differs.
        CorruptCheckpointError: a file was replaced while it was read.
        InvalidURLError, SettingsError, StorageError
        CheckpointException: several ranks failed, with different errors; its ``failures`` has them.
    """
    reader = _Reader(
        url, allow_dtype_cast=allow_dtype_cast, process_group=process_group, settings=settings, on_event=on_event,
    )  # fmt: skip
    reader.names = prefix, rename, tied
    planner = S3LoadPlanner(allow_partial_load=allow_partial_load)
    alone = not process.is_initialized()
    try:
        state_dict_loader.load(
            state_dict, storage_reader=reader, planner=planner, process_group=process_group, no_dist=alone
        )
    except CheckpointException as error:
        first, *others = real_causes({rank: cause for rank, (cause, _) in error.failures.items()}).values()
        if isinstance(first, errors.DcpS3Error) and all(str(each) == str(first) for each in others):
            raise first from None
        raise


class _Reader(S3StorageReader):
    """Reads weights under other names."""

    names: tuple[str, Mapping[str, str] | None, Mapping[str, str] | None]

    def _fetch_metadata(self, rank: int | None) -> Metadata:
        metadata, url = super()._fetch_metadata(rank), str(self._url)
        if not is_weights(metadata):
            raise WeightsError(f"{url} is a checkpoint of DCP. Remedy: dcp.load with S3StorageReader({url!r})")
        prefix, rules, tied = self.names
        names = {prefix + name: old for old, name in new_names(metadata.state_dict_metadata, rules or {}).items()}
        for name, other in (tied or {}).items():
            if other not in names:
                raise WeightsError(f"tied: {name!r} is to equal {other!r}, which is in no file of {url}")
            names[name] = names[other]
        return rename_entries(metadata, names)


# --- import ------------------------------------------------------------------------------------------


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
    ImportResult(tensors=1, size=32)

    Args:
        source: directory or ``s3://bucket/prefix`` with ``*.safetensors``, with an index or without.
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
    place = Place.of(source, given)
    found = find_weights(place.store, place.key(""), place.names(), str(source))
    if not found:
        raise WeightsError(f"{source} has no entries")
    new = {old: prefix + name for old, name in new_names(found, rename or {}).items()}
    size = sum(tensor.nbytes for tensor in found.values())
    if on_total is not None:
        on_total(size)
    writes = {"part_size": PIECE, "concurrency": min(given.max_connections, _CONNECTIONS)}
    settings = given.model_copy(update=writes)
    writer = S3StorageWriter(url, overwrite=overwrite, max_objects=_OBJECTS, settings=settings)
    planner = _Importer(place, {new[old]: tensor for old, tensor in found.items()}, on_progress or (lambda _: None))
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    plans, metadata = create_default_global_save_plan([writer.prepare_local_plan(SavePlan(planner.items()))])
    outer = prefix[:-1].split(".") if prefix.endswith(".") else []
    # Where each entry is in a nested state: what torch's tools need to turn a checkpoint into a state again.
    metadata.planner_data = {each: (*outer, each[len(prefix) :]) if outer else (each,) for each in new.values()}
    (plan,) = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    return ImportResult(len(found), size)


class _Importer(DefaultSavePlanner):
    """Reads pieces of tensors from their files when they are about to be written. Thread-safe."""

    def __init__(self, place: Place, tensors: Mapping[str, FoundTensor], moved: Callable[[int], None]) -> None:
        super().__init__()
        self._place, self._tensors, self._moved = place, tensors, moved

    def items(self) -> list[WriteItem]:
        items = []
        for name, tensor in self._tensors.items():
            whole = Box((0,) * len(tensor.shape), tensor.shape)
            boxes = list(cut(tensor.shape, PIECE // tensor.dtype.itemsize)) or [whole]
            kind = WriteItemType.TENSOR if len(boxes) == 1 else WriteItemType.SHARD
            for offsets, lengths in boxes:
                chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(lengths))
                data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape))
                items.append(WriteItem(MetadataIndex(name, chunk.offsets), kind, tensor_data=data))
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
