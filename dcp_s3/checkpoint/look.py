"""Looks at one checkpoint with few small requests.

Our own take two: a listing of what begins with a dot (``.metadata``, and below ``.dcp_s3/`` manifest, metrics, pin
and leases), or of all of it, and a GET of the manifest. One more GET if metrics were added, another if it is pinned,
and a HEAD if it is not clear which manifest belongs to ``.metadata``: at most five. Foreign and uncommitted ones are
listed whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import check_metadata
from dcp_s3.checkpoint.directory import Directory, list_directory
from dcp_s3.checkpoint.info import CheckpointInfo, LeftoverObject, summarize
from dcp_s3.format.control_files import AddedMetrics, Manifest
from dcp_s3.format.layout import METADATA, METADATA_CRC_KEY, METRICS, PIN, SAVE_ID_KEY, What, manifest_object
from dcp_s3.format.saved_entries import needed_objects
from dcp_s3.memory import crc64nvme, crc_hex
from dcp_s3.process import is_newer_than_installed
from dcp_s3.store import ListedObject, Page, Store, StoredObject, same_etag
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inspected:
    """A checkpoint with what was read to describe it."""

    url: CheckpointURL
    info: CheckpointInfo
    directory: Directory
    """The objects that begin with a dot, or all of them if they had to be, or were to be, listed."""
    manifests: Mapping[int | None, Manifest]
    """Manifests of the commits that make it a checkpoint, by rank, as far as they are clear and can be read."""
    leftovers: tuple[LeftoverObject, ...] = ()
    """Objects that a committed checkpoint does not need, if all were to be listed. None are known without a manifest
    that is certainly its own."""


def inspect(store: Store, url: CheckpointURL, *, whole: bool = False) -> Inspected | None:
    """The checkpoint at ``url`` itself; None if there is nothing of one. With ``whole`` it lists all objects, and says
    whether one is missing or left over."""
    pages = [store.page(url.key(""))] if whole else []
    directory = Directory(url, pages, whole=True) if pages else list_directory(store, url, ".")
    if pages and pages[0].next_token is not None:
        # Not all of it at first: there may be millions of other things, such as below a run with its boards.
        if not directory.shows_checkpoint:
            directory = list_directory(store, url, ".")
        if directory.shows_checkpoint:
            while pages[-1].next_token is not None:
                pages.append(store.page(url.key(""), token=pages[-1].next_token))
            directory = Directory(url, pages, whole=True)
    manifests: dict[int | None, Manifest] = {}
    if None in directory.commits:
        try:
            if manifest := _find_manifest(store, url, directory, None):
                manifests = {None: manifest}
            elif not directory.whole:
                directory = list_directory(store, url)
        except errors.ObjectNotFoundError:  # deleted just now
            left = (
                ListedObject(each.key, each.size, each.modified_at, each.etag) for each in directory.objects.values()
            )
            page = Page(tuple(each for each in left if each.key != url.key(METADATA)), (), None, directory.now)
            directory = Directory(url, [page], whole=directory.whole)
    if None not in directory.commits:
        if not directory.whole:
            directory = list_directory(store, url, ".", "__")
            if directory.shows_checkpoint and (whole or directory.ranks):
                directory = list_directory(store, url)
        if directory.is_spread_of(url.name) or not directory.shows_checkpoint:
            return None

        def manifest_of(store: Store, rank: int) -> Manifest | None:
            with contextlib.suppress(errors.ObjectNotFoundError):  # deleted just now
                return _find_manifest(store, url, directory, rank)
            return None

        if ranks := directory.ranks:
            of_ranks = zip(ranks, store.map(manifest_of, ranks), strict=True)
            manifests = {rank: manifest for rank, manifest in of_ranks if manifest is not None}

    info = summarize(url, directory, manifests)
    committed, more = info.committed, dict[str, Any]()
    leftovers: tuple[LeftoverObject, ...] = ()
    if directory.metrics is not None and committed:
        added, identity = read_added(store, url)[1], info.save_id or info.etag
        if identity and added.save_id == identity:
            more["metrics"] = {**info.metrics, **added.metrics}
    if info.pinned:
        with contextlib.suppress(  # it protects whatever is in it
            errors.ObjectNotFoundError, errors.AccessDeniedError, ValueError, TypeError, KeyError, RecursionError
        ):
            reason = json.loads(store.get(url.key(PIN)).data)["reason"]
            more["pin_reason"] = " ".join(reason.split()) if isinstance(reason, str) else None  # one line
    if committed and info.foreign and not directory.data:  # S3 may carry out a commit after it was pruned
        more["damage"] = find_damage(store, url)
    if whole and committed:
        more["written_at"] = max((each.modified_at for each in directory.data.values()), default=None)
        if None in manifests:
            more["damage"], leftovers = _look_deeper(store, url, directory, manifests[None])
    return Inspected(url, replace(info, **more), directory, manifests, leftovers)


def _look_deeper(
    store: Store, url: CheckpointURL, directory: Directory, manifest: Manifest
) -> tuple[str | None, tuple[LeftoverObject, ...]]:
    """Damage and leftovers of a committed checkpoint, if the manifest is certainly its own."""
    damage = directory.describe_damage({entry.path: entry.size for entry in manifest.objects})
    left = directory.leftovers(manifest)
    if damage is None and not left:
        return None, ()
    commit = directory.commits[None]
    try:
        head = store.head(commit.key)
    except errors.ObjectNotFoundError:
        return "its .metadata is listed, but cannot be read", ()
    if head.metadata.get(SAVE_ID_KEY) != manifest.save_id or not same_etag(head.etag, commit.etag):
        return None, ()  # a copy without user metadata, or replaced meanwhile
    return damage, tuple(
        LeftoverObject(
            each.key, each.size, each.modified_at, url.name, is_lease=each.kind.what is What.LEASE, etag=each.etag
        )
        for each in left
    )


def _find_manifest(store: Store, url: CheckpointURL, directory: Directory, rank: int | None) -> Manifest | None:
    """The manifest of the save that the commit of ``rank`` (None: ``.metadata``) names. None if it is missing, cannot
    be read, or is not clear. Raises ObjectNotFoundError if there is no such commit."""
    manifests, commit = directory.manifests.get(rank, {}), directory.commits[rank]
    if not manifests:
        return None
    only = next(iter(manifests)) if len(manifests) == 1 else None
    save_id = only
    # A manifest is written before its commit. A newer one is of a save that is in progress, or was cut off.
    if only is None or manifests[only].modified_at > commit.modified_at:
        save_id = store.head(commit.key).metadata.get(SAVE_ID_KEY, only)
    if save_id is None:
        try:
            metadata = check_metadata(store.get(commit.key), url, rank)
        except errors.CheckpointError as error:
            logger.warning("cannot tell which manifest of %s is valid: %s", url, error)
            return None
        save_id = str(getattr(metadata.storage_meta, "save_id", None))  # another library's may be anything
    if save_id not in manifests:
        return None
    try:
        return Manifest.from_json(store.get(manifests[save_id].key).data)
    except errors.ObjectNotFoundError:
        return None  # lost in a copy, or replaced just now
    except ValueError as error:
        logger.warning("the manifest %s of %s is not used: %s", manifests[save_id].path, url, error)
        return None


def read_added(store: Store, url: CheckpointURL) -> tuple[str | None, AddedMetrics]:
    """The ETag of `METRICS` (None if there is none), and what it says; nothing if it is damaged."""
    try:
        stored = store.get(url.key(METRICS))
    except errors.ObjectNotFoundError:
        return None, AddedMetrics("")
    try:
        return stored.etag, AddedMetrics.from_json(stored.data)
    except ValueError as error:
        logger.warning("the metrics that were added to %s are not used: %s", url, error)
        return stored.etag, AddedMetrics("")


# --- whether it can be loaded ------------------------------------------------------------------------


def find_damage(store: Store, url: CheckpointURL, seen: Inspected | None = None) -> str | None:
    """Why a committed checkpoint cannot be loaded; None if it can. Reads its metadata and lists its objects.

    Metadata is decoded, which takes torch, unless it has the checksum that it was saved with, and a manifest that says
    what it names and that no newer torch wrote it.

    Args:
        seen: what was found there just now, with all its objects. It need not be listed and read again, unless the
            checkpoint was replaced meanwhile.
    """
    directory = seen.directory if seen is not None and seen.directory.whole else list_directory(store, url)
    for rank in directory.committing:
        try:
            stored = store.get(directory.commits[rank].key)
            manifest = None if seen is None else seen.manifests.get(rank)
            save_id, needed = stored.metadata.get(SAVE_ID_KEY), None
            if seen is not None and (manifest is None or manifest.save_id != save_id):
                return find_damage(store, url)
            if save_id and METADATA_CRC_KEY in stored.metadata and find_crc_mismatch(stored) is None:
                if manifest is None:
                    with contextlib.suppress(errors.ObjectNotFoundError, ValueError):
                        manifest = Manifest.from_json(store.get(url.key(manifest_object(save_id, rank))).data)
                if manifest is not None and not is_newer_than_installed(manifest.writer.get("torch")):
                    needed = {entry.path: entry.size for entry in manifest.objects}
            if needed is None:
                metadata = check_metadata(stored, url, rank)
                if not isinstance(metadata.storage_data, dict):
                    return "its metadata does not say where its items lie"
                needed = needed_objects(metadata)
        except (errors.ObjectNotFoundError, errors.CheckpointError) as error:
            return str(error)
        if (damage := directory.describe_damage(needed)) is not None:
            return damage
    return None if directory.commits else "it was deleted meanwhile"


def find_crc_mismatch(stored: StoredObject) -> str | None:
    """How a manifest differs from the CRC-64/NVME in its user metadata; None if it does not, or has none there."""
    found, recorded = crc_hex(crc64nvme(stored.data)), stored.metadata.get(METADATA_CRC_KEY)
    if recorded is None or recorded == found:
        return None
    return f"its CRC-64/NVME is {found}, recorded was {recorded}"


def tell_unreadable(unreadable: Mapping[str, str], loadable: str | None) -> None:
    """Warn of checkpoints that cannot be loaded (URL to reason) though they were to be taken before ``loadable``, the
    URL of one that can be; None if there is none."""
    then = f"The next one that can be is {loadable}" if loadable else "None of them can be"
    for url, damage in unreadable.items():
        logger.warning("%s cannot be loaded: %s. %s", url, damage.rstrip("."), then)
