"""What an export writes: entries, their new names, files, and the batches in which their bytes are read.

Nothing is read here but entries that are no tensors, which are in the file itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from dcp_s3.errors import ExportError
from dcp_s3.format.framing import FramingError, make_archive
from dcp_s3.format.safetensors import (
    INDEX,
    PACKED,
    SafetensorsError,
    TensorEntry,
    make_header,
    make_index,
    plan_shards,
)
from dcp_s3.offline.open_checkpoint import OpenCheckpoint, Reading
from dcp_s3.offline.pieces import Box, cut, new_names

Format = Literal["safetensors", "torch"]

TORCH_FILE = "pytorch_model.bin"
"""Name of a torch file, as Hugging Face calls it."""
BATCH = 48 * 2**20
"""Bytes that are read together. There are two such buffers: one is written while the other is filled."""

_PIECE = BATCH // 4
_ALIGNMENT = 64
_STEPS = 4096


@dataclass(frozen=True)
class PlannedFile:
    """A file to write: runs of bytes, and tensors between them."""

    name: str
    """Name of the file."""
    parts: Sequence[bytes | TensorEntry]
    """What it consists of; tensors have their new names."""

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return sum(len(part) if isinstance(part, bytes) else part.nbytes for part in self.parts)


@dataclass(frozen=True)
class Step:
    """A piece of a tensor: what to read, and what is written of it."""

    fqn: str
    """Name in the checkpoint."""
    box: Box
    """The piece."""
    saved: torch.dtype
    """Dtype in the checkpoint."""
    dtype: torch.dtype
    """Dtype in the file."""


@dataclass(frozen=True)
class Batch:
    """Bytes of one file that follow one another, and fit into a buffer."""

    file: int
    """Number of the file."""
    steps: tuple[bytes | Step, ...]
    """Bytes as they are, and pieces to read."""


@dataclass(frozen=True)
class Selected:
    """What is exported, with the names that it gets."""

    url: str
    """URL of the checkpoint."""
    tensors: Mapping[str, TensorEntry]
    """Tensors by their names in the checkpoint."""
    saved: Mapping[str, tuple[str, torch.dtype]]
    """Name and dtype in the checkpoint, by new names."""
    objects: Mapping[str, str]
    """Names of other entries in the checkpoint, and their new ones."""
    skipped: int
    """Number of entries that are left out because they are no tensors."""

    @classmethod
    def of(
        cls,
        checkpoint: OpenCheckpoint,
        include: str | Iterable[str] | None,
        rules: Mapping[str, str] | None,
        dtype: torch.dtype | None,
        format: Format,
    ) -> Selected:
        """Choose entries and name them.

        Args:
            checkpoint: the checkpoint.
            include: names or patterns; None: everything.
            rules: what to rename, see `new_names`.
            dtype: dtype of floating-point tensors; None: as saved.
            format: only ``torch`` has entries that are no tensors.

        Raises:
            EntryNotFoundError: ``include`` matches nothing.
            ExportError: there is no tensor, or names that match nothing or become equal.
        """
        url = str(checkpoint.url)
        names = checkpoint.match(include)
        tensors = {name for name in names if isinstance(checkpoint.find(name), TensorStorageMetadata)}
        exported = names if format == "torch" else [name for name in names if name in tensors]
        if not exported:
            raise ExportError(f"{url} has no tensor to export among {len(names)} entries", url=url)
        try:
            renamed = new_names(exported, rules or {})
        except ValueError as error:
            raise ExportError(f"the entries of {url} cannot be renamed: {error}", url=url) from None
        entries, saved = {}, {}
        for name in exported:
            if name in tensors:
                found = checkpoint.find(name)
                kept = found.properties.dtype
                new = dtype if dtype is not None and kept.is_floating_point and kept != PACKED else kept
                entries[name] = TensorEntry(renamed[name], new, tuple(found.size))
                saved[renamed[name]] = name, kept
        objects = {name: renamed[name] for name in exported if name not in tensors}
        return cls(url, entries, saved, objects, len(names) - len(exported))

    def plan(self, reading: Reading, format: Format, most: int) -> list[PlannedFile]:
        """The files, in the order in which they are written.

        Args:
            reading: reads entries that are no tensors.
            format: format of the files.
            most: bytes of the tensors of a safetensors file.

        Raises:
            ExportError: the format does not know a dtype or a name.
        """
        try:
            if format == "torch":
                values = reading.fill([], self.objects)
                found: dict[str, Any] = {entry.name: entry for entry in self.tensors.values()}
                found |= {new: values[name] for name, new in self.objects.items()}
                return [PlannedFile(TORCH_FILE, make_archive(found).parts)]
            shards = plan_shards(list(self.tensors.values()), most)
            files = [PlannedFile(shard.name, (make_header(shard.tensors), *shard.tensors)) for shard in shards]
            return files if len(files) == 1 else [*files, PlannedFile(INDEX, (make_index(shards),))]
        except SafetensorsError as error:
            raise ExportError(
                f"{self.url} cannot be exported: {error}. Remedy: leave it out with include, or format='torch'",
                url=self.url,
            ) from None
        except FramingError as error:
            raise ExportError(f"{self.url} cannot be exported as a torch file: {error}", url=self.url) from None


def batches_of(files: Sequence[PlannedFile], selected: Selected) -> Iterator[Batch]:
    """Cut files into batches whose pieces fit into a buffer; each file has at least one."""
    for number, file in enumerate(files):
        steps: list[bytes | Step] = []
        size = 0
        for step in _steps_of(file, selected):
            room = room_of(step)
            if steps and (size + room > BATCH or len(steps) == _STEPS):
                yield Batch(number, tuple(steps))
                steps, size = [], 0
            steps.append(step)
            size += room
        yield Batch(number, tuple(steps))


def _steps_of(file: PlannedFile, selected: Selected) -> Iterator[bytes | Step]:
    for part in file.parts:
        if isinstance(part, bytes):
            yield part
            continue
        fqn, saved = selected.saved[part.name]
        for box in cut(part.shape, _PIECE // saved.itemsize):
            yield Step(fqn, box, saved, part.dtype)


def room_of(step: bytes | Step) -> int:
    """Bytes of a step in a buffer."""
    if isinstance(step, bytes):
        return 0
    size = torch.Size(step.box.lengths).numel() * step.saved.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT
