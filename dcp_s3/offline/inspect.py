"""Shows what a checkpoint holds, by its metadata and manifests, without reading its data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_s3 import errors
from dcp_s3.checkpoint import look
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.checkpoint.stored_metadata import check_metadata, not_found_error
from dcp_s3.format.control_files import AttachmentEntry, Manifest, ObjectEntry
from dcp_s3.format.layout import metadata_object
from dcp_s3.format.metadata import is_unproven, mark_unproven
from dcp_s3.format.saved_entries import SavedEntry, saved_entries
from dcp_s3.offline.names import matches, no_match_error
from dcp_s3.s3.store import store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import Store, same_etag
from dcp_s3.units import format_count, format_size, one_line, plural
from dcp_s3.url import CheckpointURL, URLLike, parse_url

_ROUNDS = 3


@dataclass(frozen=True, repr=False)
class CheckpointEntries:
    """What a checkpoint holds, as its metadata and manifest say. Made by `inspect`.

    >>> inspect("s3://bucket/run/step-00001000").parameters
    8
    """

    info: CheckpointInfo
    """The checkpoint: URL, step, ranks, time, metrics, objects and their bytes."""
    writer: dict[str, str]
    """Library versions that wrote it; empty if it is foreign."""
    attachments: tuple[str, ...]
    """Names of the files attached to it."""
    entries: tuple[SavedEntry, ...]
    """The entries of the saved state, each with its dtype, shape, chunks and bytes."""

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(entry.parameters for entry in self.entries)

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return sum(entry.kind == "tensor" for entry in self.entries)

    def largest(self, count: int) -> tuple[SavedEntry, ...]:
        """The entries with the most stored bytes, the largest first."""
        return tuple(sorted(self.entries, key=lambda entry: (-entry.size, entry.fqn))[:count])

    def __repr__(self) -> str:
        tensors, parameters = plural(self.tensors, "tensor"), format_count(self.parameters)
        size = format_size(sum(entry.size for entry in self.entries))
        return one_line("CheckpointEntries", repr(self.info.url), f"{tensors}, {parameters} parameters, {size}")

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return {
            "checkpoint": self.info.to_dict(),
            "writer": self.writer,
            "attachments": list(self.attachments),
            "tensors": self.tensors,
            "parameters": self.parameters,
            "entries": [asdict(entry) for entry in self.entries],
        }


def inspect(
    url: URLLike, filter: str | Iterable[str] | None = None, *, settings: SettingsLike = None
) -> CheckpointEntries:
    """Look at what a committed checkpoint holds: names, shapes, dtypes, parameters, bytes, chunks.

    Fetches its ``.metadata`` and its manifest, no data: three requests. Without collectives, those of each rank. Works
    for checkpoints of other DCP writers, too.

    >>> [entry.fqn for entry in inspect("s3://bucket/run/step-00001000").entries]
    ['weight', 'step']

    Args:
        filter: only the entries whose names match, such as ``model.*``; several: any of them.

    Raises:
        CheckpointNotFoundError: no committed checkpoint is there.
        EntryNotFoundError: ``filter`` matches nothing.
        CorruptCheckpointError, UnsafeMetadataError: its metadata cannot, or must not, be read.
        InvalidURLError, SettingsError, StorageError
    """
    [saved] = fetch_saved(url, settings=settings)
    entries = saved_entries(saved.metadata)
    if filter is not None:
        patterns = [filter] if isinstance(filter, str) else list(filter)
        names = [entry.fqn for entry in entries]
        entries = [entry for entry in entries if matches(entry.fqn, patterns)]
        if not entries:
            raise no_match_error(f"{saved.url} has no", patterns, names, str(saved.url))
    writer = dict(saved.manifests[0].writer) if saved.manifests else {}
    return CheckpointEntries(saved.info, writer, tuple(sorted(saved.attachments)), tuple(entries))


# --- what was saved ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint without its data."""

    url: CheckpointURL
    info: CheckpointInfo
    manifests: tuple[Manifest, ...]
    """Its manifests: one, or one for each rank that saved without collectives; none if it is foreign."""
    metadata: Metadata
    """What was saved, and where it lies; that of all ranks together."""
    saved_often: frozenset[str]
    """Names under which several ranks that saved without collectives have each saved something."""

    @property
    def attachments(self) -> Mapping[str, AttachmentEntry]:
        """Its attachments, by name."""
        return {name: entry for each in reversed(self.manifests) for name, entry in each.attachments.items()}

    @property
    def files(self) -> Mapping[str, ObjectEntry]:
        """Its files with names of their own, by name: torch-checkpointing's."""
        return {name: entry for each in self.manifests for name, entry in each.files.items()}


def fetch_saved(*urls: URLLike, settings: SettingsLike = None) -> list[SavedCheckpoint]:
    """Fetch metadata and manifests of checkpoints: three requests for each that dcp_s3 wrote with collectives."""
    resolved = resolve_settings(settings)
    return [fetch_from(store_of(url, resolved), url) for url in map(parse_url, urls)]


def fetch_from(store: Store, url: CheckpointURL) -> SavedCheckpoint:
    """`fetch_saved` for a checkpoint on a store."""
    for _ in range(_ROUNDS):
        found = look.inspect(store, url)
        if found is None or not found.info.committed:
            raise not_found_error(url)
        # An overwritten save may have had more ranks.
        size = found.info.world_size
        ranks = [rank for rank in found.directory.committing if rank is None or size is None or rank < size]
        try:
            stored = store.map(lambda store, rank: store.get(url.key(metadata_object(rank))), ranks)
        except errors.ObjectNotFoundError:
            continue  # deleted or replaced meanwhile: the next look tells
        listed = [found.directory.commits[rank].etag for rank in ranks]
        if all(same_etag(each.etag, etag) for each, etag in zip(stored, listed, strict=True)):
            of_ranks = tuple(check_metadata(each, url, rank) for rank, each in zip(ranks, stored, strict=True))
            manifests = tuple(found.manifests[rank] for rank in ranks if rank in found.manifests)
            counts = Counter(index for each in of_ranks for index in each.storage_data or {}) if len(ranks) > 1 else {}
            often = frozenset(index.fqn for index, count in counts.items() if count > 1)
            return SavedCheckpoint(url, found.info, manifests, merge_metadata(of_ranks), often)
    raise errors.CheckpointError(
        f"{url} was replaced {_ROUNDS} times while it was looked at. Remedy: look when nobody saves to it",
        url=str(url),
    )


def merge_metadata(parts: Sequence[Metadata]) -> Metadata:
    """One metadata from those of all ranks: without collectives, each describes only what it wrote.

    A chunk or object that several ranks wrote is that of the first.
    """
    if len(parts) == 1:
        return parts[0]
    entries: dict[str, Any] = {}
    storage: dict[Any, Any] = {}
    for part in parts:
        for fqn, entry in part.state_dict_metadata.items():
            before = entries.setdefault(fqn, entry)
            if isinstance(before, TensorStorageMetadata) and isinstance(entry, TensorStorageMetadata):
                known = {(chunk.offsets, chunk.sizes) for chunk in before.chunks}
                added = [chunk for chunk in entry.chunks if (chunk.offsets, chunk.sizes) not in known]
                if added:
                    entries[fqn] = replace(before, chunks=before.chunks + added)
        for index, info in (part.storage_data or {}).items():
            storage.setdefault(index, info)
    merged = Metadata(state_dict_metadata=entries, storage_data=storage)
    return mark_unproven(merged) if any(map(is_unproven, parts)) else merged
