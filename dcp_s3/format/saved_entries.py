"""The contents of a checkpoint, according to its metadata. Pure, and imported without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorStorageMetadata,
    )


def needed_objects(metadata: Metadata) -> dict[str, int]:
    """Relative path of every data object that the metadata refers to, and the minimum bytes that it needs to hold its
    items."""
    needed: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        end = int(getattr(info, "offset", 0)) + int(getattr(info, "length", 0))
        needed[info.relative_path] = max(end, needed.get(info.relative_path, 0))
    return needed


def find_chunk(saved: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata | None:
    """The saved chunk of a tensor that belongs to the stored item at ``index``; None if there is none."""
    offset = index.offset if index.offset is not None else (0,) * len(saved.size)
    hint = index.index
    if isinstance(hint, int) and 0 <= hint < len(saved.chunks) and saved.chunks[hint].offsets == offset:
        return saved.chunks[hint]
    return next((chunk for chunk in saved.chunks if chunk.offsets == offset), None)


@dataclass(frozen=True)
class SavedEntry:
    """One entry of a saved state dict."""

    fqn: str
    """Fully qualified name."""
    kind: str
    """``tensor``, or ``bytes`` for any other object."""
    dtype: str | None
    """Dtype of a tensor, without ``torch.``; None otherwise."""
    shape: tuple[int, ...] | None
    """Global shape of a tensor; None otherwise."""
    chunks: int
    """Number of stored chunks."""
    size: int
    """Stored bytes, framing included."""

    @property
    def parameters(self) -> int:
        """Elements of a tensor; 0 otherwise."""
        return 0 if self.shape is None else math.prod(self.shape)


def saved_entries(metadata: Metadata) -> list[SavedEntry]:
    """The entries that the metadata describes, in their saved order."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    def entry(fqn: str, saved: Any, chunks: int, size: int) -> SavedEntry:
        if isinstance(saved, TensorStorageMetadata):
            dtype = str(saved.properties.dtype).removeprefix("torch.")
            return SavedEntry(fqn, "tensor", dtype, tuple(saved.size), chunks, size)
        return SavedEntry(fqn, "bytes", None, None, chunks, size)

    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for index, info in (metadata.storage_data or {}).items():
        fqn = str(getattr(index, "fqn", index))
        sizes[fqn] = sizes.get(fqn, 0) + int(getattr(info, "length", 0))
        counts[fqn] = counts.get(fqn, 0) + 1
    return [entry(fqn, saved, counts.get(fqn, 0), sizes.get(fqn, 0))
            for fqn, saved in metadata.state_dict_metadata.items()]  # fmt: skip
