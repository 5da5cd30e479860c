"""`export`: the weights of a checkpoint as Hugging Face and torch read them, in bounded memory.

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

import torch

from dcp_s3.checkpoint.attachments import find_attachments, read_attachment
from dcp_s3.checkpoint.lease import ReaderLease
from dcp_s3.errors import ExportError
from dcp_s3.format.layout import METADATA
from dcp_s3.format.manifest import AttachmentEntry
from dcp_s3.format.safetensors import PACKED, SINGLE_FILE
from dcp_s3.offline.destination import Destination, is_temporary, open_destination
from dcp_s3.offline.export_plan import BATCH, Batch, Format, PlannedFile, Selected, Step, batches_of, room_of
from dcp_s3.offline.open_checkpoint import OpenCheckpoint, Reading, Target
from dcp_s3.reprs import one_line
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.tensor_memory import view_bytes
from dcp_s3.units import format_size, parse_size, plural
from dcp_s3.url import parse_url
from dcp_s3.workers import Workers

logger = logging.getLogger(__name__)

# Elements converted to another dtype at a time: as many as stay in the CPU's cache, and torch converts in one thread.
_CONVERTED = 2**15
_LOAD_BUFFERS = 32 * 2**20
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
    format: Format = "safetensors",
    overwrite: bool = False,
    weights_only: bool = True,
    settings: SettingsLike = None,
    on_total: Callable[[int], None] | None = None,
    on_progress: Callable[[int], None] | None = None,
) -> ExportResult:
    """Write the tensors of a checkpoint as files that Hugging Face's libraries and torch read.

    ``safetensors``: ``model.safetensors``; or ``model-00001-of-0000N.safetensors`` and
    ``model.safetensors.index.json``. With an attachment ``adapter_config.json``, which only adapters of PEFT have,
    ``adapter_model.safetensors``. ``torch``: ``pytorch_model.bin``, a dict by name as torch.save writes it, with
    entries that are no tensors, too.

    Attachments of the checkpoint become files beside them. Needs no process group. Takes at most 512 MiB of host
    memory, whatever the size of tensors and weights files, and besides an attachment (256 MiB at most), or with
    ``torch`` all entries that are no tensors. Each file appears complete, the index last; if the export fails,
    what it had written is removed.

    >>> export("s3://bucket/run/step-00002000", "weights", include="weight")
    ExportResult(1 file, 1 tensor, ... B)

    Args:
        url: URL of the checkpoint.
        destination: directory or ``s3://bucket/prefix``.
        include: names or patterns of entries, such as ``model.*``, as for `read_tensors`; None: all tensors.
        rename: regular expressions, and what replaces their matches in the names, in this order: ``{"^model[.]": ""}``.
        dtype: convert floating-point tensors to this dtype: ``bf16``, ``fp16``, ``fp32``, or torch's name. Others stay,
            and packed float4.
        max_shard_size: bytes of the tensors of a safetensors file, as ``5GB`` or ``2GiB``; a larger tensor gets a file
            of its own.
        format: ``safetensors`` or ``torch``.
        overwrite: write into a destination that is not empty. Weights in it, of either format, are removed before the
            first byte is written; other files stay. An attachment never replaces one of them: if it has the same bytes
            it is left alone, otherwise the export is refused.
        weights_only: for ``torch``: whether to unpickle only objects that cannot run code, as for `read_tensors`.
        settings: a `Settings`, or a mapping of those that differ from the environment.
        on_total: called once with the number of bytes to write.
        on_progress: called with the number of bytes as they are written.

    Raises:
        EntryNotFoundError: ``include`` matches nothing.
        ExportError: the destination is not empty, or has another file where an attachment goes; there is no tensor; a
            dtype that the format does not know; names that match nothing or become equal; a wrong argument. Nothing was
            written.
        CheckpointNotFoundError, CorruptMetadataError, CorruptCheckpointError, UnsafeItemError
        InvalidURLError, SettingsError, StorageError, OSError
    """
    given = resolve_settings(settings)
    wanted, most, format = parse_dtype(dtype), parse_shard_size(max_shard_size), parse_format(format)
    target = open_destination(destination, given)
    lease = ReaderLease(S3Store(parse_url(url).bucket, given), parse_url(url), given.reader_lease)
    lease.take()
    with lease.renewed():
        checkpoint = OpenCheckpoint(url, given, bounded=False)
        lease.check_not_deleted(None)
        with checkpoint.reading(weights_only=weights_only, buffers=_LOAD_BUFFERS) as reading:
            selected = Selected.of(checkpoint, include, rename, wanted, format)
            files = selected.plan(reading, format, most)
            attached = find_attachments(checkpoint.store, checkpoint.url) or {}
            if _ADAPTER in attached and files[0].name == SINGLE_FILE:
                files = [replace(files[0], name=f"adapter_{SINGLE_FILE}")]  # as PEFT expects it
            present, small = _check_destination(target, files, attached, overwrite=overwrite)
            if on_total is not None:
                on_total(sum(file.size for file in files))
            with target:
                target.remove(present)
                for name in small:
                    _write_small(target, name, read_attachment(checkpoint.store, checkpoint.url, name))
                _write(target, files, selected, reading, on_progress or (lambda _: None))
    if selected.skipped:
        logger.info("%s: %d entries that are no tensors were left out", url, selected.skipped)
    return ExportResult(
        tuple(file.name for file in files), len(selected.tensors), sum(f.size for f in files), selected.skipped
    )


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """The dtype that a name stands for.

    Raises:
        ExportError: it is none, or no floating-point type.
    """
    found = _DTYPES.get(dtype) or getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if found is None and dtype is None:
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found == PACKED:
        raise ExportError(
            f"dtype {str(dtype)!r} is no floating-point type: expected {', '.join(_DTYPES)} or a name like "
            "torch's, for example float8_e5m2"
        )
    return found


def parse_shard_size(size: int | str) -> int:
    """The bytes of a file.

    Raises:
        ExportError: it is no size.
    """
    try:
        most = parse_size(size)
    except ValueError as error:
        raise ExportError(f"max_shard_size = {size!r}: {error}") from None
    if most < 1:
        raise ExportError(f"max_shard_size = {size!r}: expected at least 1 byte")
    return most


def parse_format(format: str) -> Format:
    """A format by its name.

    Raises:
        ExportError: there is none of that name.
    """
    for known in ("safetensors", "torch"):
        if format == known:
            return known
    raise ExportError(f"format = {format!r}: expected 'safetensors' or 'torch'")


def _check_destination(
    target: Destination, files: Sequence[PlannedFile], attached: Mapping[str, AttachmentEntry], *, overwrite: bool
) -> tuple[list[str], list[str]]:
    """The files to remove first, and the attachments to write.

    Raises:
        ExportError: there are files and ``overwrite`` is off, a checkpoint is there, an attachment has the name of a
            file or would replace one, or a file is too large.
    """
    for file in files:
        if file.name in attached:
            raise ExportError(f"the checkpoint has an attachment {file.name}, in whose place weights would be written")
        target.check_size(file.size)
    found = target.files()
    if METADATA in found:
        raise ExportError(f"{target.name} is a checkpoint. Remedy: export to another place, or to one below it")
    if found and not overwrite:
        some = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise ExportError(
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
            raise ExportError(
                f"{target.name} has a file where the attachment {name} of the checkpoint goes, and it is another one. "
                "Remedy: move it away, or export to another place"
            )
        if state == "nothing":  # the same one stays: if the export fails, it is not removed
            missing.append(name)
    return weights, missing


# --- act -------------------------------------------------------------------------------------------


def _write(
    target: Destination,
    files: Sequence[PlannedFile],
    selected: Selected,
    reading: Reading,
    moved: Callable[[int], None],
) -> None:
    with contextlib.closing(_read_ahead(batches_of(files, selected), reading)) as loaded:
        for number, batches in itertools.groupby(loaded, key=lambda found: found[0].file):
            with target.open(files[number].name, files[number].size) as file:
                for batch, tensors in batches:
                    for step, tensor in zip(batch.steps, tensors, strict=True):
                        for view in _bytes_of(step, tensor):
                            file.write(view)
                            moved(len(view))
                file.commit()


def _write_small(target: Destination, name: str, data: bytes) -> None:
    with target.open(name, len(data)) as file:
        file.write(data)
        file.commit()


def _read_ahead(
    batches: Iterator[Batch], reading: Reading
) -> Generator[tuple[Batch, Sequence[torch.Tensor | None]], None, None]:
    """Read batches, each while the caller is busy with the one before.

    The tensors of a batch are valid until the next is asked for.
    """
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


def _read(reading: Reading, batch: Batch, buffer: torch.Tensor) -> list[torch.Tensor | None]:
    tensors: list[torch.Tensor | None] = []
    targets, start = [], 0
    for step in batch.steps:
        if isinstance(step, bytes):
            tensors.append(None)
            continue
        lengths = step.box.lengths
        size = torch.Size(lengths).numel() * step.saved.itemsize
        tensor = buffer[start : start + size].view(step.saved).view(lengths)
        start += room_of(step)
        tensors.append(tensor)
        targets.append(Target(step.fqn, step.box.offsets, tensor))
    reading.fill(targets)
    return tensors


def _bytes_of(step: bytes | Step, tensor: torch.Tensor | None) -> Iterator[bytes | memoryview]:
    if isinstance(step, bytes) or tensor is None:
        if isinstance(step, bytes):
            yield step
    elif step.dtype == step.saved:
        yield view_bytes(tensor)
    else:
        flat = tensor.view(-1)
        converted = torch.empty(min(_CONVERTED, flat.numel()), dtype=step.dtype)
        for start in range(0, flat.numel(), _CONVERTED):
            some = flat[start : start + _CONVERTED]
            yield view_bytes(converted[: some.numel()].copy_(some))
