"""What stands at a URL: a checkpoint's ``.metadata``, a save's own commit, what it would replace, or nothing."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import list_directory
from dcp_s3.format.control_files import AttachmentEntry, DeletionList, Manifest, ObjectEntry
from dcp_s3.format.layout import METADATA_CRC_KEY, SAVE_ID_KEY, manifest_object, metadata_object
from dcp_s3.process import torch_imported_alone
from dcp_s3.store import ObjectHead, Store, StoredObject
from dcp_s3.url import CheckpointURL

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SaveIdentity:
    """One save of one checkpoint."""

    url: CheckpointURL
    """URL of the checkpoint."""
    save_id: str
    """Random id of this save."""
    rank: int | None = None
    """Rank of this process in a save without collectives, where each rank commits for itself."""


class CommitState(Enum):
    """How the commit of a save stands."""

    WAITING = "waiting"
    COMMITTED = "committed"
    REPLACED = "replaced"
    """A save that began later has replaced it."""


@dataclass(frozen=True)
class Previous:
    """The checkpoint that a save is about to replace."""

    keys: frozenset[str] = frozenset()
    """Keys of objects that only the old checkpoint needs, as far as its metadata can be read."""
    etag: str | None = None
    """ETag of the old ``.metadata``; None if there was none."""


def exists_error(url: CheckpointURL) -> errors.CheckpointExistsError:
    """The error for a URL that holds a checkpoint. Begins like FileSystemWriter's in torch, which callers match."""
    return errors.CheckpointExistsError(
        f"Checkpoint already exists: a committed checkpoint is at {url}; it is untouched. Remedy: save to another URL, "
        "or pass overwrite=True to replace it (the old one stays whole until the new one is committed)",
        url=str(url),
    )


def find_state(store: Store, identity: SaveIdentity, *, path: str | None, started_at: float) -> CommitState:
    """How the commit of a save stands that began at ``started_at`` (seconds since the epoch) and wrote ``path``."""
    try:
        save_id = find_save_id(store, identity)
        if save_id == identity.save_id:
            return CommitState.COMMITTED
        if save_id is None:
            return CommitState.WAITING  # not ours
        manifest = Manifest.from_json(store.get(identity.url.key(manifest_object(save_id, identity.rank))).data)
    except (errors.ObjectNotFoundError, ValueError):
        return CommitState.WAITING  # there is none
    if any(entry.path == path for entry in manifest.objects):
        return CommitState.COMMITTED
    newer = (manifest.started_at or manifest.created_at) > started_at
    return CommitState.REPLACED if newer else CommitState.WAITING


def is_committed(store: Store, identity: SaveIdentity) -> bool:
    """Whether the checkpoint at the URL is this save's, judged by its id."""
    try:
        return find_save_id(store, identity) == identity.save_id
    except errors.ObjectNotFoundError:
        return False


def find_previous(store: Store, identity: SaveIdentity) -> Previous:
    """Find what a save with collectives will overwrite: a checkpoint, those of single ranks, or nothing."""
    url = identity.url
    keys: set[str] = set()
    etag = None
    for rank in [None, *list_directory(store, url, "__").ranks]:
        key = url.key(metadata_object(rank))
        try:
            stored = store.get(key)
            etag = stored.etag if rank is None else etag
            metadata = check_metadata(stored, url, rank)
        except errors.ObjectNotFoundError:
            continue
        except errors.CheckpointError as error:
            logger.warning("the objects of the checkpoint that is being overwritten will stay: %s", error)
            continue
        keys.update(url.key(info.relative_path) for info in (metadata.storage_data or {}).values())
        if rank is not None:
            keys.add(key)
        if save_id := getattr(metadata.storage_meta, "save_id", None):
            manifest = url.key(manifest_object(save_id, rank))
            keys.add(manifest)
            with contextlib.suppress(errors.ObjectNotFoundError, ValueError):
                for entry in Manifest.from_json(store.get(manifest).data).objects:
                    keys.add(url.key(entry.path))  # also files that its metadata does not name
                    if isinstance(entry, AttachmentEntry):
                        keys.add(url.key(entry.attachment))  # the plain copy of an earlier version
    return Previous(frozenset(keys), etag)


def check_newest(store: Store, identity: SaveIdentity, previous: Previous, started_at: float) -> None:
    """Refuse to let a late save, which began at ``started_at`` (seconds since the epoch), replace a newer one."""
    # One that is not ours, or damaged: the user asked to overwrite it.
    if previous.etag and find_state(store, identity, path=None, started_at=started_at) is CommitState.REPLACED:
        raise errors.CheckpointExistsError(
            f"{identity.url} holds a checkpoint that is newer than this one, which was not put in its place",
            url=str(identity.url),
        )


def find_manifest(store: Store, url: CheckpointURL, rank: int | None = None) -> Manifest | None:
    """The manifest of the checkpoint at ``url``, or of one ``rank``; None if it is not there, or not ours.

    Raises:
        ObjectNotFoundError: there is no checkpoint.
        CorruptCheckpointError: the manifest cannot be read.
    """
    save_id = find_save_id(store, SaveIdentity(url, "", rank))
    if save_id is None:
        return None
    key = url.key(manifest_object(save_id, rank))
    try:
        return Manifest.from_json(store.get(key).data)
    except errors.ObjectNotFoundError:
        return None
    except ValueError as error:
        raise errors.CorruptCheckpointError(
            f"the manifest {key} of {url}, which says what is attached, cannot be read ({error}). Remedy: use a newer "
            "dcp_s3 if a newer one wrote it, else restore the object from a backup",
            url=str(url),
        ) from error


def find_save_id(store: Store, identity: SaveIdentity, head: ObjectHead | None = None) -> str | None:
    """Save id of the checkpoint at the URL, which the HEAD of its commit mostly tells: the object may be large. None if
    it is not ours; ObjectNotFoundError if there is none."""
    key = identity.url.key(metadata_object(identity.rank))
    found = (head or store.head(key)).metadata.get(SAVE_ID_KEY)
    if found is None:  # stores, proxies and copies may lose user metadata
        with contextlib.suppress(errors.CheckpointError):
            metadata = check_metadata(store.get(key), identity.url, identity.rank)
            found = getattr(metadata.storage_meta, "save_id", None)
    return found


# --- .metadata ----------------------------------------------------------------------------------------


def fetch_metadata(store: Store, url: CheckpointURL, rank: int | None = None) -> StoredObject:
    """Fetch the object whose presence is the commit: ``.metadata``, or the one of ``rank``. Not checked yet."""
    try:
        return store.get(url.key(metadata_object(rank)))
    except errors.ObjectNotFoundError:
        raise not_found_error(url, why=f": it has no {metadata_object(rank)}") from None


def not_found_error(
    url: CheckpointURL, what: str = "no committed checkpoint", why: str = ""
) -> errors.CheckpointNotFoundError:
    """The error for a URL where there is ``what``."""
    return errors.CheckpointNotFoundError(
        f"there is {what} at {url}{why}. Remedy: check the URL; `dcp-s3 ls` on its parent shows what is there. A save "
        "that was cut off leaves no checkpoint",
        url=str(url),
    )


def check_metadata(stored: StoredObject, url: CheckpointURL, rank: int | None = None) -> Metadata:
    """The metadata in a fetched object: ``.metadata``, or the one of ``rank``. See `load_metadata`."""
    with torch_imported_alone():
        from dcp_s3.format.metadata import load_metadata  # here, for the import of torch takes seconds

    crc = stored.metadata.get(METADATA_CRC_KEY)
    return load_metadata(stored.data, url=str(url), crc=crc, of_rank=rank is not None)


# --- whether the objects of a slow save are still there ------------------------------------------------


def find_loss(store: Store, url: CheckpointURL, objects: Sequence[ObjectEntry]) -> str | None:
    """Why a save is incomplete: an object is gone, or a deletion's list names it. None if all will stay."""
    directory, paths = list_directory(store, url), {entry.path for entry in objects}
    missing = directory.lacking({entry.path: entry.size for entry in objects}, exact=True)
    if missing:
        return f"{len(missing)} of its {len(paths)} objects are gone, the first {missing[0]}"
    for found in chain(*directory.deletions.values()):
        try:
            named = paths & set(DeletionList.from_json(store.get(found.key).data).objects)
        except errors.ObjectNotFoundError:
            return "a prune has just deleted something there"
        except ValueError as error:
            return f"a prune deletes something there, and its list {found.path} cannot be read: {error}"
        if named:
            return f"a prune is about to delete {len(named)} of its {len(paths)} objects, the first {min(named)}"
    return None
