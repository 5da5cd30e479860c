"""What was saved, as its metadata and manifests say: also of a checkpoint whose ranks saved without collectives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_s3 import errors
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.checkpoint.look import inspect
from dcp_s3.checkpoint.stored_metadata import check_metadata, not_found_error
from dcp_s3.coroutines import gather, map_bounded, run
from dcp_s3.format.control_files import AttachmentEntry, Manifest
from dcp_s3.format.layout import metadata_object
from dcp_s3.format.metadata import is_unproven, mark_unproven
from dcp_s3.s3.async_store import open_async_store
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import StoredObject, same_etag
from dcp_s3.url import CheckpointURL, URLLike, parse_url

_ROUNDS = 3


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint without its data."""

    url: CheckpointURL
    """Where it is."""
    info: CheckpointInfo
    """Its summary."""
    manifests: tuple[Manifest, ...]
    """Its manifests: one, or one for each rank that saved without collectives; none if it is foreign."""
    metadata: Metadata
    """What was saved, and where it lies; that of all ranks together."""
    of_ranks: tuple[Metadata, ...]
    """That of each rank that saved without collectives; else only ``metadata``."""

    @property
    def attachments(self) -> Mapping[str, AttachmentEntry]:
        """Its attachments, by name."""
        return {name: entry for each in reversed(self.manifests) for name, entry in each.attachments.items()}


def fetch_saved(*urls: URLLike, settings: SettingsLike = None) -> list[SavedCheckpoint]:
    """Fetch metadata and manifests of checkpoints: three requests for each that dcp_s3 wrote with collectives.

    Raises:
        CheckpointNotFoundError: there is no committed checkpoint.
        CorruptMetadataError, UnsafeMetadataError: its metadata cannot, or must not, be read.
        CheckpointError: it was replaced again and again meanwhile.
        InvalidURLError, SettingsError, StorageError
    """
    parsed = [parse_url(url) for url in urls]

    async def fetch() -> list[SavedCheckpoint]:
        return await gather(_fetch(url, settings) for url in parsed)

    return run(fetch())


async def _fetch(url: CheckpointURL, settings: SettingsLike) -> SavedCheckpoint:
    async with open_async_store(url.bucket, resolve_settings(settings)) as store:
        for _ in range(_ROUNDS):
            found = await inspect(store, url)
            if found is None or not found.info.committed:
                raise not_found_error(url)
            # An overwritten save may have had more ranks.
            size = found.info.world_size
            ranks = [rank for rank in found.directory.committing if rank is None or size is None or rank < size]

            async def get(rank: int | None) -> StoredObject:
                return await store.get(url.key(metadata_object(rank)))

            try:
                stored = await map_bounded(get, ranks)
            except errors.ObjectNotFoundError:
                continue  # deleted or replaced meanwhile: the next look tells
            listed = [found.directory.commits[rank].etag for rank in ranks]
            if all(same_etag(each.etag, etag) for each, etag in zip(stored, listed, strict=True)):
                of_ranks = tuple(check_metadata(each, url, rank) for rank, each in zip(ranks, stored, strict=True))
                manifests = found.manifests_of_ranks[: len(ranks)] if found.manifest is None else (found.manifest,)
                return SavedCheckpoint(url, found.info, manifests, merge_metadata(of_ranks), of_ranks)
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
