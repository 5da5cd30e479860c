"""`export`: the weights of a checkpoint as Hugging Face reads them, in bounded memory.

entries -> names -> files (all planned before a byte is written) -> batches -> one is written while the next is read
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_s3.checkpoint.attachments import find_attachments, read_attachment
from dcp_s3.checkpoint.lease import ReaderLease
from dcp_s3.errors import WeightsError
from dcp_s3.format.control_files import AttachmentEntry
from dcp_s3.format.layout import METADATA
from dcp_s3.format.safetensors import (
    INDEX,
    PACKED,
    SINGLE_FILE,
    SafetensorsError,
    TensorEntry,
    make_header,
    make_index,
    plan_shards,
)
from dcp_s3.offline.boxes import BATCH, Piece, in_batches
from dcp_s3.offline.destination import Destination, is_temporary
from dcp_s3.offline.names import new_names
from dcp_s3.offline.read import SMALL_BUFFERS, OpenCheckpoint, Reading
from dcp_s3.s3.store import store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.tensor_memory import view_bytes
from dcp_s3.units import format_size, one_line, parse_size, plural
from dcp_s3.url import parse_url
from dcp_s3.workers import Workers

logger = logging.getLogger(__name__)

# Elements converted to another dtype at a time: as many as stay in the CPU's cache, and torch converts in one thread.
_CONVERTED = 2**15
_ADAPTER = "adapter_config.json"
_WEIGHTS = re.compile(r"(model|adapter_model|pytorch_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")
_DTYPES = {
    "bf16": torch.bfloat16, "fp16": torch.float16, "half": torch.float16, "fp32": torch.float32, "fp64": torch.float64,
    "fp8": torch.float8_e4m3fn,
}  # fmt: skip


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
    overwrite: bool = False,
    settings: SettingsLike = None,
    on_total: Callable[[int], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ExportResult:
    """Write the tensors of a checkpoint as safetensors files, as Hugging Face lays them out.

    ``model.safetensors``; or ``model-00001-of-0000N.safetensors`` and
    ``model.safetensors.index.json``. With an attachment ``adapter_config.json``, which only adapters of PEFT have,
    ``adapter_model.safetensors``.

    Attachments of the checkpoint become files beside them. Needs no process group. Takes at most 512 MiB of host
    memory, whatever the size of tensors and weights files, and besides an attachment (256 MiB at most). Each file
    appears complete, the index last; if the export fails, what it had written is removed.

    >>> export("s3://bucket/run/step-00002000", "weights", include="weight")
    ExportResult(1 file, 1 tensor, ... B)

    Args:
        destination: directory or ``s3://bucket/prefix``.
        include: names or patterns of entries, such as ``model.*``, as for `read_tensors`; None: all tensors.
        rename: regular expressions, and what replaces their matches in the names, in this order: ``{"^model[.]": ""}``.
        dtype: convert floating-point tensors to this dtype: ``bf16``, ``fp16``, ``fp32``, or torch's name. Others stay,
            and packed float4.
        max_shard_size: bytes of the tensors of a safetensors file, as ``5GB`` or ``2GiB``; a larger tensor gets a file
            of its own.
        overwrite: write into a destination that is not empty. Weights in it, torch's too, are removed before the first
            byte is written; other files stay. An attachment never replaces one of them: if it has the same bytes
            it is left alone, otherwise the export is refused.

    Raises:
        EntryNotFoundError: ``include`` matches nothing.
        WeightsError: the destination is not empty, or has another file where an attachment goes; there is no tensor; a
            dtype that safetensors does not know; names that match nothing or become equal; a wrong argument. Nothing
            was written.
        CheckpointNotFoundError, CorruptCheckpointError
        InvalidURLError, SettingsError, StorageError, OSError
    """
    given = resolve_settings(settings)
    wanted, most = parse_dtype(dtype), parse_shard_size(max_shard_size)
    target = Destination(destination, given)
    lease = ReaderLease(store_of(parse_url(url), given), parse_url(url), given.reader_lease)
    lease.take()
    with lease.renewed():
        checkpoint = OpenCheckpoint(url, given, bounded=False)
        lease.check_not_deleted(None)
        with checkpoint.reading(buffers=SMALL_BUFFERS) as reading:
            selected = _Selected.of(checkpoint, include, rename, wanted)
            files = selected.plan(most)
            attached = find_attachments(checkpoint.store, checkpoint.url) or {}
            if _ADAPTER in attached and files[0].name == SINGLE_FILE:
                files = [replace(files[0], name=f"adapter_{SINGLE_FILE}")]  # as PEFT expects it
            present, small = _check_destination(target, files, attached, overwrite=overwrite)
            if on_total is not None:
                on_total(sum(file.size for file in files))
            with target:
                target.remove(present)
                for name in small:
                    data = read_attachment(checkpoint.store, checkpoint.url, name)
                    target.write(name, len(data), [data])
                _write(target, files, selected, reading, on_progress or (lambda _: None))
    if selected.skipped:
        logger.info("%s: %d entries that are no tensors were left out", url, selected.skipped)
    return ExportResult(
        tuple(file.name for file in files), len(selected.tensors), sum(f.size for f in files), selected.skipped
    )


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None:
        return None
    found = _DTYPES.get(dtype) or getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found == PACKED:
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


def _check_destination(
    target: Destination, files: Sequence[_PlannedFile], attached: Mapping[str, AttachmentEntry], *, overwrite: bool
) -> tuple[list[str], list[str]]:
    """The files to remove first, and the attachments to write."""
    for file in files:
        if file.name in attached:
            raise WeightsError(f"the checkpoint has an attachment {file.name}, in whose place weights would be written")
        target.check_size(file.size)
    found = target.files()
    if METADATA in found:
        raise WeightsError(f"{target.name} is a checkpoint. Remedy: export to another place, or to one below it")
    if found and not overwrite:
        some = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise WeightsError(
            f"{target.name} is not empty (it has {some}). Remedy: give another destination, or pass overwrite=True, "
            "which replaces weights and leaves other files"
        )
    # The index first: without it nothing looks whole.
    weights = [name for name in found if _WEIGHTS.fullmatch(name) or is_temporary(name)]
    weights.sort(key=lambda name: not name.endswith(".json"))
    missing = []
    for name, entry in attached.items():
        state = "nothing" if name in weights or not found else target.compare(name, entry.size, entry.crc64nvme)
        if state == "other":
            raise WeightsError(
                f"{target.name} has a file where the attachment {name} of the checkpoint goes, and it is another one. "
                "Remedy: move it away, or export to another place"
            )
        if state == "nothing":  # the same one stays: if the export fails, it is not removed
            missing.append(name)
    return weights, missing


# --- plan ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlannedFile:
    name: str
    parts: Sequence[bytes | TensorEntry]
    """Runs of bytes, and tensors with their new names."""

    @property
    def size(self) -> int:
        return sum(len(part) if isinstance(part, bytes) else part.nbytes for part in self.parts)


@dataclass(frozen=True)
class _Selected:
    url: str
    tensors: Mapping[str, TensorEntry]
    """Tensors by their names in the checkpoint."""
    saved: Mapping[str, tuple[str, torch.dtype]]
    """Name and dtype in the checkpoint, by new names."""
    skipped: int
    """Number of other entries."""

    @classmethod
    def of(
        cls,
        checkpoint: OpenCheckpoint,
        include: str | Iterable[str] | None,
        rules: Mapping[str, str] | None,
        dtype: torch.dtype | None,
    ) -> _Selected:
        """Choose tensors and name them."""
        url = str(checkpoint.url)
        names = checkpoint.match(include)
        exported = [name for name in names if isinstance(checkpoint.find(name), TensorStorageMetadata)]
        if not exported:
            raise WeightsError(f"{url} has no tensor to export among {len(names)} entries", url=url)
        try:
            renamed = new_names(exported, rules or {})
        except ValueError as error:
            raise WeightsError(f"the entries of {url} cannot be renamed: {error}", url=url) from None
        entries, saved = {}, {}
        for name in exported:
            found = checkpoint.find(name)
            kept = found.properties.dtype
            new = dtype if dtype is not None and kept.is_floating_point and kept != PACKED else kept
            entries[name] = TensorEntry(renamed[name], new, tuple(found.size))
            saved[renamed[name]] = name, kept
        return cls(url, entries, saved, len(names) - len(exported))

    def plan(self, most: int) -> list[_PlannedFile]:
        try:
            shards = plan_shards(list(self.tensors.values()), most)
            files = [_PlannedFile(shard.name, (make_header(shard.tensors), *shard.tensors)) for shard in shards]
            return files if len(files) == 1 else [*files, _PlannedFile(INDEX, (make_index(shards),))]
        except SafetensorsError as error:
            raise WeightsError(
                f"{self.url} cannot be exported: {error}. Remedy: leave it out with include", url=self.url
            ) from None


# --- act -------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    piece: Piece
    dtype: torch.dtype
    """In the file."""


class _Batch(NamedTuple):
    """What follows one another in a file: bytes as they are, and pieces that fit into a buffer."""

    file: int
    steps: Sequence[bytes | _Step]


def _batches_of(files: Sequence[_PlannedFile], selected: _Selected) -> Iterator[_Batch]:
    for number, file in enumerate(files):
        steps = _steps_of(file, selected)
        for batch in in_batches(steps, lambda step: step.piece.room if isinstance(step, _Step) else 0):
            yield _Batch(number, batch)


def _steps_of(file: _PlannedFile, selected: _Selected) -> Iterator[bytes | _Step]:
    for part in file.parts:
        if isinstance(part, bytes):
            yield part
            continue
        fqn, saved = selected.saved[part.name]
        for piece in Piece.all_of(fqn, part.shape, saved):
            yield _Step(piece, part.dtype)


def _write(
    target: Destination,
    files: Sequence[_PlannedFile],
    selected: _Selected,
    reading: Reading,
    moved: Callable[[int], None],
) -> None:
    with contextlib.closing(_read_ahead(_batches_of(files, selected), reading)) as loaded:
        for number, batches in itertools.groupby(loaded, key=lambda found: found[0].file):
            target.write(files[number].name, files[number].size, _contents(batches, moved))


def _contents(
    batches: Iterable[tuple[_Batch, Sequence[torch.Tensor]]], moved: Callable[[int], None]
) -> Iterator[bytes | memoryview]:
    for batch, tensors in batches:
        left = iter(tensors)
        for step in batch.steps:
            for view in [step] if isinstance(step, bytes) else _bytes_of(next(left), step.dtype):
                yield view
                moved(len(view))


def _read_ahead(
    batches: Iterator[_Batch], reading: Reading
) -> Generator[tuple[_Batch, Sequence[torch.Tensor]], None, None]:
    """Read batches, each while the caller is busy with the one before; its tensors are valid until the next."""
    buffers = itertools.cycle([torch.empty(BATCH, dtype=torch.uint8) for _ in range(2)])
    reader = Workers(1, "dcp_s3-export")
    try:
        first = next(batches)
        pending = first, reader.submit(_read, reading, first, next(buffers))
        for batch in batches:
            ready, future = pending
            tensors = future.result()
            pending = batch, reader.submit(_read, reading, batch, next(buffers))
            yield ready, tensors
        yield pending[0], pending[1].result()
    finally:
        reader.close()


def _read(reading: Reading, batch: _Batch, buffer: torch.Tensor) -> list[torch.Tensor]:
    return reading.fill_pieces([step.piece for step in batch.steps if isinstance(step, _Step)], buffer)


def _bytes_of(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    if dtype == tensor.dtype:
        yield view_bytes(tensor)
        return
    flat = tensor.view(-1)
    converted = torch.empty(min(_CONVERTED, flat.numel()), dtype=dtype)
    for start in range(0, flat.numel(), _CONVERTED):
        some = flat[start : start + _CONVERTED]
        yield view_bytes(converted[: some.numel()].copy_(some))
