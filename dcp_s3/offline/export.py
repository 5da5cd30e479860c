"""`export`: the weights of a checkpoint as Hugging Face reads them. All is planned before a byte is written; then one
batch is written while the next is read."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_s3.checkpoint.attachments import find_attachments, read_attachment
from dcp_s3.checkpoint.commit_state import not_found_error
from dcp_s3.checkpoint.lease import ReaderLease
from dcp_s3.errors import WeightsError
from dcp_s3.format.safetensors import (
    INDEX,
    SINGLE_FILE,
    SafetensorsError,
    TensorEntry,
    make_header,
    make_index,
    plan_shards,
)
from dcp_s3.load.plan import Box
from dcp_s3.load.weights import WeightsMetadata
from dcp_s3.memory import Piece, view_bytes
from dcp_s3.offline.names import new_names
from dcp_s3.offline.place import Place, ahead
from dcp_s3.offline.read import Fill, OpenCheckpoint, Target, cut
from dcp_s3.s3.multipart import MAX_PARTS
from dcp_s3.s3.store import store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.units import parse_size
from dcp_s3.url import parse_url

BATCH = 48 * 2**20
"""Bytes of tensors that are read together into one buffer. There are two."""

_PIECE, _PIECES = BATCH // 4, 4096
_ALIGNMENT = 64
# Bytes of the buffers for what cannot be read in place.
_SMALL_BUFFERS = 32 * 2**20
# Elements converted to another dtype at a time: as many as stay in the CPU's cache, and torch converts in one thread.
_CONVERTED = 2**15
# Bytes of a part of a file on its way to S3, and how many connections send them: that bounds the memory.
_PART, _CONNECTIONS = 8 * 2**20, 32
_ADAPTER = "adapter_config.json"
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class ExportResult:
    """What an export wrote.

    >>> export("s3://bucket/run/step-00002000", "weights").files
    ('model.safetensors',)
    """

    files: tuple[str, ...]
    """Names of the files, the index last."""
    tensors: int
    """Number of tensors."""
    size: int
    """Bytes of all files."""
    skipped: int
    """Number of entries that are no tensors and were left out."""


def export(
    url: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    include: str | Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: int | str = "5GB",
    settings: SettingsLike = None,
    on_total: Callable[[int], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ExportResult:
    """Write the tensors of a checkpoint as safetensors files, as Hugging Face lays them out.

    ``model.safetensors`` (of an adapter of PEFT ``adapter_model.safetensors``), or several files with an index, which
    comes last. Attachments become files beside them. Needs no process group. Takes at most 512 MiB of host memory (to
    S3, for files of up to 150 GiB), and besides one attachment (256 MiB at most).

    >>> export("s3://bucket/run/step-00002000", "weights", include="weight").tensors
    1

    Args:
        destination: directory or ``s3://bucket/prefix``, with nothing in it.
        include: names or patterns of entries, such as ``model.*``, as for `read_tensors`; None: all tensors.
        rename: regular expressions, and what replaces their matches in the names, in this order: ``{"^model[.]": ""}``.
        dtype: convert floating-point tensors to this dtype: ``bf16``, ``fp16``, ``fp32``, or torch's name. Others stay.
        max_shard_size: bytes of the tensors of a file, as ``5GB`` or ``2GiB``; a larger tensor gets one of its own.

    Raises:
        EntryNotFoundError: ``include`` matches nothing.
        WeightsError: the destination is not empty; there is no tensor; a dtype that safetensors does not know; names
            that match nothing or become equal; a wrong argument. Nothing was written.
        CheckpointNotFoundError, CorruptCheckpointError
        InvalidURLError, SettingsError, StorageError, OSError
    """
    given = resolve_settings(settings)
    wanted, most = parse_dtype(dtype), parse_shard_size(max_shard_size)
    few = given.model_copy(update={"concurrency": min(given.max_connections, _CONNECTIONS)})
    target, moved = Place.of(destination, few), on_progress or (lambda _: None)
    where = parse_url(url)
    lease = ReaderLease(store_of(where, given), where, given.reader_lease)
    lease.take()  # it may take long: no prune deletes the checkpoint meanwhile
    with lease.renewed():
        checkpoint = OpenCheckpoint(where, given)
        lease.check_not_deleted(None)
        if isinstance(checkpoint.metadata, WeightsMetadata):
            raise not_found_error(checkpoint.url, why=": safetensors weights lie there")
        names = checkpoint.match(include)
        files = _plan(checkpoint, names, rename or {}, wanted, most)
        attached = find_attachments(checkpoint.store, checkpoint.url) or {}
        if _ADAPTER in attached and files[0].name == SINGLE_FILE:
            files = [replace(files[0], name=f"adapter_{SINGLE_FILE}")]  # as PEFT expects it
        clash = next((file.name for file in files if file.name in attached), None)
        if clash is not None:
            raise WeightsError(f"the checkpoint has an attachment {clash}, in whose place weights would be written")
        prefix = target.key("")
        there = [each.key for each in target.store.page(prefix).objects if each.key != prefix]
        if there:
            found = there[-1].removeprefix(prefix).partition("/")[0]
            raise WeightsError(
                f"{target.name} is not empty (it has {found}). Remedy: empty it, or give another destination"
            )
        size = sum(file.size for file in files)
        if on_total is not None:
            on_total(size)
        for name in attached:
            data = read_attachment(checkpoint.store, checkpoint.url, name)
            _write(target, name, len(data), [data])
        buffers = [torch.empty(BATCH, dtype=torch.uint8) for _ in range(2)]
        with checkpoint.reading(buffers=_SMALL_BUFFERS) as fill:
            for file in files:
                with contextlib.closing(_contents(file, fill, buffers, moved)) as views:
                    _write(target, file.name, file.size, views)
    tensors = sum(len(file.tensors) for file in files)
    return ExportResult(tuple(file.name for file in files), tensors, size, len(names) - tensors)


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = _DTYPES.get(dtype) or getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise WeightsError(
            f"dtype {str(dtype)!r} is no floating-point type: expected {', '.join(_DTYPES)} or a name like "
            "torch's, for example float8_e5m2"
        )
    return found


def parse_shard_size(size: int | str) -> int:
    try:
        if most := parse_size(size):
            return most
        raise ValueError("expected at least 1 byte")
    except ValueError as error:
        raise WeightsError(f"max_shard_size = {size!r}: {error}") from None


# --- plan ------------------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    entry: TensorEntry
    """In the file, with its new name."""
    fqn: str
    dtype: torch.dtype
    """In the checkpoint."""


_Batch = Sequence[tuple[_Tensor, Box, int]]
"""Parts of tensors, each with the byte of a buffer at which it begins."""


@dataclass(frozen=True)
class _File:
    name: str
    head: bytes
    """Its first bytes. Those of its tensors follow."""
    tensors: Sequence[_Tensor] = ()

    @property
    def size(self) -> int:
        return len(self.head) + sum(tensor.entry.nbytes for tensor in self.tensors)


def _plan(
    checkpoint: OpenCheckpoint, names: Iterable[str], rules: Mapping[str, str], dtype: torch.dtype | None, most: int
) -> list[_File]:
    """The files of the tensors among these entries, the index last."""
    url, files = str(checkpoint.url), list[_File]()
    saved = {name: found for name in names if isinstance(found := checkpoint.find(name), TensorStorageMetadata)}
    if not saved:
        raise WeightsError(f"{url} has no tensor to export among these entries", url=url)
    try:
        tensors = {}
        for fqn, new in new_names(saved, rules).items():
            kept = saved[fqn].properties.dtype
            written = dtype if dtype is not None and kept.is_floating_point else kept
            tensors[new] = _Tensor(TensorEntry(new, written, tuple(saved[fqn].size)), fqn, kept)
        shards = plan_shards([each.entry for each in tensors.values()], most)
        for shard in shards:
            files.append(_File(shard.name, make_header(shard.tensors), [tensors[each.name] for each in shard.tensors]))
        return files if len(files) == 1 else [*files, _File(INDEX, make_index(shards))]
    except (SafetensorsError, ValueError) as error:
        raise WeightsError(
            f"{url} cannot be exported: {error}. Remedy: leave entries out with include, or choose other names with "
            "rename", url=url,
        ) from None  # fmt: skip


# --- read ------------------------------------------------------------------------------------------


def _contents(
    file: _File, fill: Fill, buffers: Sequence[torch.Tensor], moved: Callable[[int], None]
) -> Generator[bytes | memoryview, None, None]:
    """The bytes of a file. Tensors are read in batches, each while the caller is busy with the one before; the memory
    of a run of bytes is valid until the next."""

    def read(planned: tuple[_Batch, torch.Tensor]) -> list[tuple[_Tensor, torch.Tensor]]:
        targets = []
        for tensor, box, start in planned[0]:
            flat = planned[1][start : start + box.numel * tensor.dtype.itemsize]
            targets.append(Target(tensor.fqn, box.offsets, flat.view(tensor.dtype).view(box.lengths)))
        fill(targets, ())
        return [(part[0], target.tensor) for part, target in zip(planned[0], targets, strict=True)]

    yield file.head
    moved(len(file.head))
    with ahead(read, zip(_batches(file.tensors), itertools.cycle(buffers), strict=False), 1) as batches:
        for tensor, piece in itertools.chain.from_iterable(batches):
            flat, dtype = piece.view(-1), tensor.entry.dtype
            converts = dtype != tensor.dtype
            converted = torch.empty(_CONVERTED if converts else 0, dtype=dtype)
            for some in torch.split(flat, _CONVERTED) if converts else (flat,):
                view = view_bytes(converted[: some.numel()].copy_(some) if converts else some)
                yield view
                moved(len(view))


def _batches(tensors: Iterable[_Tensor]) -> Iterator[_Batch]:
    batch: list[tuple[_Tensor, Box, int]] = []
    used = 0
    for tensor in tensors:
        for box in cut(tensor.entry.shape, _PIECE // tensor.dtype.itemsize):
            room = -(-box.numel * tensor.dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            if used + room > BATCH or len(batch) == _PIECES:
                yield batch
                batch, used = [], 0
            batch.append((tensor, box, used))
            used += room
    if batch:
        yield batch


# --- write -----------------------------------------------------------------------------------------


def _write(place: Place, name: str, size: int, views: Iterable[bytes | memoryview]) -> None:
    """Write a file front to back; it appears complete."""
    part = max(_PART, -(-size // MAX_PARTS))
    pieces = map(Piece.of, views) if place.url is None else _copies(views, part)
    place.store.put_stream(place.key(name), size, pieces, part_size=part)


def _copies(views: Iterable[bytes | memoryview], size: int) -> Iterator[Piece]:
    """The bytes in new memory, ``size`` at a time: they are sent later."""
    block, filled = bytearray(size), 0
    for run in views:
        left = memoryview(run)
        while left:
            count = min(left.nbytes, size - filled)
            block[filled : filled + count] = left[:count]
            filled, left = filled + count, left[count:]
            if filled == size:
                yield Piece.of(block)
                block, filled = bytearray(size), 0
    if filled:
        yield Piece.of(memoryview(block)[:filled])
