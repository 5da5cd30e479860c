"""Everything about one checkpoint, for people to read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from dcp_s3.checkpoint.directory import Directory
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.checkpoint.look import inspect
from dcp_s3.checkpoint.stored_metadata import check_metadata, not_found_error
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import metadata_object
from dcp_s3.format.saved_entries import SavedEntry, needed_objects, saved_entries
from dcp_s3.s3.store import store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import Store
from dcp_s3.url import URLLike, parse_url


@dataclass(frozen=True)
class ObjectDetails:
    """One data object of a checkpoint."""

    path: str
    """Path relative to the checkpoint."""
    size: int | None
    """Bytes; None if the metadata names it but it is not there."""
    crc64nvme: str | None
    """CRC-64/NVME as recorded in the manifest, 16 hex digits; None if not recorded."""
    used: bool
    """Whether the checkpoint needs it; otherwise it is a leftover of another save."""
    attachment: str | None = None
    """Name of the attachment that it holds; None if it holds items."""


@dataclass(frozen=True)
class CheckpointDetails:
    """Details of one checkpoint."""

    info: CheckpointInfo
    """The catalog's summary, including metrics that were added after the save."""
    writer: dict[str, str]
    """Library versions that wrote it; empty if it is foreign."""
    items: int
    """Number of saved items (tensor chunks and others)."""
    objects: tuple[ObjectDetails, ...]
    """Data objects of the checkpoint."""
    entries: tuple[SavedEntry, ...]
    """Entries of the saved state dict; empty if the checkpoint is incomplete."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


def describe(where: URLLike, *, settings: SettingsLike = None, store: Store | None = None) -> CheckpointDetails:
    """Look at the checkpoint at a URL: its listing, manifests and metadata, no data."""
    url = parse_url(where)
    store = store_of(url, resolve_settings(settings)) if store is None else store
    looked = inspect(store, url, whole=True)
    if looked is None:
        raise not_found_error(url, "nothing of a checkpoint")
    directory = looked.directory
    ranks = directory.committing
    manifests = list(looked.manifests.values())
    commits = store.map(lambda store, rank: store.get(url.key(metadata_object(rank))), ranks)
    metadata = [check_metadata(stored, url, rank) for rank, stored in zip(ranks, commits, strict=True)]
    needed: set[str] = set()
    for manifest in manifests:
        needed |= {entry.path for entry in manifest.attachments.values()}
    entries: dict[str, SavedEntry] = {}
    for loaded in metadata:
        needed |= needed_objects(loaded).keys()
        for entry in saved_entries(loaded):
            entries[entry.fqn] = _merge(entries.get(entry.fqn), entry)
    return CheckpointDetails(
        info=looked.info,
        writer=manifests[0].writer if manifests else {},
        items=sum(len(loaded.storage_data or {}) for loaded in metadata),
        objects=tuple(_objects(directory, manifests, needed)),
        entries=tuple(entries.values()),
    )


def _merge(before: SavedEntry | None, entry: SavedEntry) -> SavedEntry:
    """Merge the same entry from the metadata of two ranks: each rank describes only what it wrote."""
    if before is None:
        return entry
    return replace(entry, chunks=before.chunks + entry.chunks, size=before.size + entry.size)


def _objects(directory: Directory, manifests: list[Manifest], needed: set[str]) -> list[ObjectDetails]:
    sizes: dict[str, int | None] = dict.fromkeys(needed) | {path: each.size for path, each in directory.data.items()}
    crcs = {entry.path: entry.crc64nvme for manifest in manifests for entry in manifest.objects}
    names = {entry.path: name for manifest in manifests for name, entry in manifest.attachments.items()}
    return [ObjectDetails(path, sizes[path], crcs.get(path), path in needed, names.get(path)) for path in sorted(sizes)]
