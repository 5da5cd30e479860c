"""`export`: the weights of a checkpoint as Hugging Face reads them, in bounded memory.

entries -> names -> files (all planned before a byte is written) -> batches, of which one is written while the next is
read
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_s3.checkpoint.attachments import find_attachments, read_attachment
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
from dcp_s3.load.boxes import Box
from dcp_s3.memory import Piece, view_bytes
from dcp_s3.offline.boxes import cut
from dcp_s3.offline.names import new_names
from dcp_s3.offline.place import Place, ahead
from dcp_s3.offline.read import OpenCheckpoint, Reading, Target, reading_under_lease
from dcp_s3.s3.parts import MAX_PARTS
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.units import format_size, one_line, parse_size, plural
from dcp_s3.url import parse_url

logger = logging.getLogger(__name__)

BATCH = 48 * 2**20
"""Bytes of tensors that are read together into one buffer. There are two."""

_PIECE = BATCH // 4
_PIECES = 4096
_ALIGNMENT = 64
# Elements converted to another dtype at a time: as many as stay in the CPU's cache, and torch converts in one thread.
_CONVERTED = 2**15
# Bytes of a part of a file on its way to S3, and how many connections send them: that bounds the memory.
_PART = 8 * 2**20
_CONNECTIONS = 32
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

    def __repr__(self) -> str:
        what = [f"{plural(len(self.files), 'file')}", f"{plural(self.tensors, 'tensor')}", format_size(self.size)]
        return one_line("ExportResult", *what, skipped=self.skipped or None)


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

    ``model.safetensors``; or ``model-00001-of-0000N.safetensors`` and
    ``model.safetensors.index.json``. With an attachment ``adapter_config.json``, which only adapters of PEFT have,
    ``adapter_model.safetensors``.

    Attachments of the checkpoint become files beside them. Needs no process group. Takes at most 512 MiB of host
    memory, whatever the size of tensors and weights files (on S3, of up to 150 GiB), and besides an attachment (256 MiB
    at most). Each file appears complete, the index last.

    >>> export("s3://bucket/run/step-00002000", "weights", include="weight")
    ExportResult(1 file, 1 tensor, ... B)

    Args:
        destination: directory or ``s3://bucket/prefix``, with nothing in it.
        include: names or patterns of entries, such as ``model.*``, as for `read_tensors`; None: all tensors.
        rename: regular expressions, and what replaces their matches in the names, in this order: ``{"^model[.]": ""}``.
        dtype: convert floating-point tensors to this dtype: ``bf16``, ``fp16``, ``fp32``, or torch's name. Others stay.
        max_shard_size: bytes of the tensors of a safetensors file, as ``5GB`` or ``2GiB``; a larger tensor gets a file
            of its own.

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
    target = Place.of(destination, few)
    with reading_under_lease(parse_url(url), given) as reading:
        checkpoint = reading.checkpoint
        tensors, skipped = _select(checkpoint, include, rename or {}, wanted)
        files = _plan(str(checkpoint.url), tensors, most)
        attached = find_attachments(checkpoint.store, checkpoint.url) or {}
        if _ADAPTER in attached and files[0].name == SINGLE_FILE:
            files = [replace(files[0], name=f"adapter_{SINGLE_FILE}")]  # as PEFT expects it
        _check(target, files, attached)
        if on_total is not None:
            on_total(sum(file.size for file in files))
        for name in attached:
            data = read_attachment(checkpoint.store, checkpoint.url, name)
            _write(target, name, len(data), [data])
        buffers = [torch.empty(BATCH, dtype=torch.uint8) for _ in range(2)]
        for file in files:
            with contextlib.closing(_contents(file, reading, buffers, on_progress or (lambda _: None))) as views:
                _write(target, file.name, file.size, views)
    if skipped:
        logger.info("%s: %d entries that are no tensors were left out", url, skipped)
    return ExportResult(tuple(file.name for file in files), len(tensors), sum(file.size for file in files), skipped)


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
        most = parse_size(size)
    except ValueError as error:
        raise WeightsError(f"max_shard_size = {size!r}: {error}") from None
    if most < 1:
        raise WeightsError(f"max_shard_size = {size!r}: expected at least 1 byte")
    return most


# --- plan ------------------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    entry: TensorEntry
    """In the file, with its new name."""
    fqn: str
    dtype: torch.dtype
    """In the checkpoint."""


@dataclass(frozen=True)
class _File:
    name: str
    head: bytes
    """Its first bytes. Those of its tensors follow."""
    tensors: Sequence[_Tensor] = ()

    @property
    def size(self) -> int:
        return len(self.head) + sum(tensor.entry.nbytes for tensor in self.tensors)


def _select(
    checkpoint: OpenCheckpoint,
    include: str | Iterable[str] | None,
    rules: Mapping[str, str],
    dtype: torch.dtype | None,
) -> tuple[dict[str, _Tensor], int]:
    """Tensors by their new names, and the number of other entries."""
    url, names = str(checkpoint.url), checkpoint.match(include)
    exported = [name for name in names if isinstance(checkpoint.find(name), TensorStorageMetadata)]
    if not exported:
        raise WeightsError(f"{url} has no tensor to export among {len(names)} entries", url=url)
    try:
        renamed = new_names(exported, rules)
    except ValueError as error:
        raise WeightsError(f"the entries of {url} cannot be renamed: {error}", url=url) from None
    chosen = {}
    for fqn in exported:
        saved = checkpoint.find(fqn)
        kept = saved.properties.dtype
        new = dtype if dtype is not None and kept.is_floating_point else kept
        chosen[renamed[fqn]] = _Tensor(TensorEntry(renamed[fqn], new, tuple(saved.size)), fqn, kept)
    return chosen, len(names) - len(exported)


def _plan(url: str, tensors: Mapping[str, _Tensor], most: int) -> list[_File]:
    try:
        shards = plan_shards([each.entry for each in tensors.values()], most)
        files = [
            _File(shard.name, make_header(shard.tensors), [tensors[each.name] for each in shard.tensors])
            for shard in shards
        ]
        return files if len(files) == 1 else [*files, _File(INDEX, make_index(shards))]
    except SafetensorsError as error:
        raise WeightsError(f"{url} cannot be exported: {error}. Remedy: leave it out with include", url=url) from None


# --- read ------------------------------------------------------------------------------------------


class _Piece(NamedTuple):
    """A part of a tensor that is read at once."""

    of: _Tensor
    box: Box

    @property
    def size(self) -> int:
        return self.box.numel * self.of.dtype.itemsize

    @property
    def room(self) -> int:
        """Bytes that it takes in a buffer."""
        return -(-self.size // _ALIGNMENT) * _ALIGNMENT


def _contents(
    file: _File, reading: Reading, buffers: Sequence[torch.Tensor], moved: Callable[[int], None]
) -> Generator[bytes | memoryview, None, None]:
    """The bytes of a file. Tensors are read in batches, each while the caller is busy with the one before; the memory
    of a run of bytes is valid until the next."""

    def read(planned: tuple[Sequence[_Piece], torch.Tensor]) -> list[tuple[_Piece, torch.Tensor]]:
        batch, buffer = planned
        found, start = [], 0
        for piece in batch:
            found.append((piece, buffer[start : start + piece.size].view(piece.of.dtype).view(piece.box.lengths)))
            start += piece.room
        reading.fill([Target(piece.of.fqn, piece.box.offsets, tensor) for piece, tensor in found])
        return found

    yield file.head
    moved(len(file.head))
    with ahead(read, zip(_batches(file.tensors), itertools.cycle(buffers), strict=False), 1) as batches:
        for piece, tensor in itertools.chain.from_iterable(batches):
            for view in _bytes_of(tensor, piece.of.entry.dtype):
                yield view
                moved(len(view))


def _batches(tensors: Iterable[_Tensor]) -> Iterator[list[_Piece]]:
    """Pieces of tensors, together at most a buffer full."""
    batch: list[_Piece] = []
    used = 0
    for tensor in tensors:
        for box in cut(tensor.entry.shape, _PIECE // tensor.dtype.itemsize):
            piece = _Piece(tensor, box)
            if used + piece.room > BATCH or len(batch) == _PIECES:
                yield batch
                batch, used = [], 0
            batch.append(piece)
            used += piece.room
    if batch:
        yield batch


def _bytes_of(tensor: Any, dtype: torch.dtype) -> Iterator[memoryview]:
    if dtype == tensor.dtype:
        yield view_bytes(tensor)
        return
    flat = tensor.view(-1)
    converted = torch.empty(min(_CONVERTED, flat.numel()), dtype=dtype)
    for start in range(0, flat.numel(), _CONVERTED):
        some = flat[start : start + _CONVERTED]
        yield view_bytes(converted[: some.numel()].copy_(some))


# --- write -----------------------------------------------------------------------------------------


def _check(place: Place, files: Sequence[_File], attached: Mapping[str, Any]) -> None:
    clash = next((file.name for file in files if file.name in attached), None)
    if clash is not None:
        raise WeightsError(f"the checkpoint has an attachment {clash}, in whose place weights would be written")
    found = place.names()
    if found:
        some = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise WeightsError(f"{place.name} is not empty (it has {some}). Remedy: empty it, or give another destination")


def _write(place: Place, name: str, size: int, views: Iterable[bytes | memoryview]) -> None:
    """Write a file front to back; it appears complete."""
    part = max(_PART, -(-size // MAX_PARTS))
    pieces = map(Piece.of, views) if place.url is None else _copies(views, part)
    place.write(name, size, pieces, part_size=part)


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
