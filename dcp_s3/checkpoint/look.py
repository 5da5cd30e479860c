"""Looks at one checkpoint with few small requests.

Our own take two: a listing of what begins with a dot (``.metadata``, and below ``.dcp_s3/`` manifest, metrics, pin
and leases), and a GET of the manifest. One more GET if metrics were added, another if it is pinned, and a HEAD if it is
not clear which manifest belongs to ``.metadata``: at most five. Foreign and uncommitted ones are listed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import Directory, list_directory_async, spread_prefixes
from dcp_s3.checkpoint.info import (
    CheckpointInfo,
    LeftoverObject,
    from_listing,
    from_manifest,
    from_rank_manifests,
    with_marks,
    with_metrics,
    with_step,
)
from dcp_s3.checkpoint.stored_metadata import check_metadata, find_crc_mismatch
from dcp_s3.coroutines import map_bounded
from dcp_s3.forking import reset_in_child
from dcp_s3.format.control_files import AddedMetrics, Manifest
from dcp_s3.format.layout import (
    CONTROL_PREFIX,
    METADATA,
    METADATA_CRC_KEY,
    METRICS,
    PIN,
    SAVE_ID_KEY,
    What,
    manifest_object,
    metadata_object,
)
from dcp_s3.format.saved_entries import needed_objects
from dcp_s3.store import ObjectHead, StoredObject, same_etag
from dcp_s3.torch_version import is_newer_than_installed
from dcp_s3.url import CheckpointURL

if TYPE_CHECKING:
    from dcp_s3.s3.async_store import AsyncS3Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inspected:
    """A checkpoint with what was read to describe it."""

    info: CheckpointInfo
    directory: Directory
    """The objects that begin with a dot, or all of them if they had to be listed."""
    manifest: Manifest | None = None
    """Manifest of a committed save with collectives; None without."""
    manifests_of_ranks: tuple[Manifest, ...] = ()
    """Manifests of a save without collectives, in the order of ranks."""


async def inspect_checkpoint(
    store: AsyncS3Store, url: CheckpointURL, patterns: Sequence[re.Pattern[str]] = ()
) -> CheckpointInfo | None:
    """The checkpoint at ``url`` itself; None if there is nothing of one."""
    found = await inspect(store, url, patterns)
    return None if found is None else found.info


async def inspect(
    store: AsyncS3Store, url: CheckpointURL, patterns: Sequence[re.Pattern[str]] = ()
) -> Inspected | None:
    """`inspect_checkpoint`, with what it was concluded from."""
    dotted = await _list_dotted(store, url)
    found = await _inspect_committed(store, url, dotted) or await _inspect_without_metadata(store, url, dotted)
    if found is None:
        return None
    info = with_step(with_marks(found.info, found.directory), patterns)
    if found.directory.metrics is not None and info.committed:
        info = with_metrics(info, await _read_added(store, url))
    if info.pinned:
        info = replace(info, pin_reason=await _read_pin_reason(store, url))
    return replace(found, info=info)


async def _list_dotted(store: AsyncS3Store, url: CheckpointURL) -> Directory:
    """The objects that begin with a dot and may belong to a checkpoint."""
    page = await store.page(url.key("."))
    if page.next_token is None:
        return Directory.of(url, page.objects)
    # Many ranks without collectives, or a directory with something like .git/: do not list all of it.
    metadata = await store.page(url.key(METADATA))
    control = (await store.list(url.key(CONTROL_PREFIX))).objects
    return Directory.of(url, [*control, *(found for found in metadata.objects if found.key == url.key(METADATA))])


async def _inspect_committed(store: AsyncS3Store, url: CheckpointURL, directory: Directory) -> Inspected | None:
    """A checkpoint with ``.metadata``; None without."""
    commit = directory.commits.get(None)
    if commit is None:
        return None
    try:
        manifest = await find_manifest(store, url, directory, None)
    except errors.ObjectNotFoundError:
        return None  # deleted just now
    if manifest is not None:
        return Inspected(from_manifest(url, manifest), directory, manifest)
    directory = await list_directory_async(store, url)
    return Inspected(from_listing(url, directory, committed_at=commit.modified_at), directory)


async def _inspect_without_metadata(store: AsyncS3Store, url: CheckpointURL, dotted: Directory) -> Inspected | None:
    # No full listing at first: this may be a directory with millions of other things, such as a run with its boards.
    skip = len(url.key(""))
    page = await store.page(url.key(""), delimiter="/")
    prefixes = [prefix[skip:] for prefix in page.prefixes]
    directory, spread = Directory.of(url, page.objects), spread_prefixes(prefixes)
    shown = dotted.shows_checkpoint or directory.shows_checkpoint
    if not shown and spread:
        sample = await store.page(url.key(spread[0]))
        shown = Directory.of(url, sample.objects).shows_checkpoint
    if not shown:
        return None
    if page.next_token is not None or spread or CONTROL_PREFIX in prefixes:
        directory = await list_directory_async(store, url)
    if directory.is_spread_of(url.name) or not directory.shows_checkpoint:
        return None
    ranks = directory.ranks
    if not ranks:
        return Inspected(from_listing(url, directory, committed_at=None), directory)

    async def manifest_of(rank: int) -> Manifest | None:
        try:
            return await find_manifest(store, url, directory, rank)
        except errors.ObjectNotFoundError:
            return None  # deleted just now

    manifests = await map_bounded(manifest_of, ranks)
    by_rank = {rank: manifest for rank, manifest in zip(ranks, manifests, strict=True) if manifest is not None}
    info = from_rank_manifests(url, directory, by_rank)
    return Inspected(info, directory, manifests_of_ranks=tuple(by_rank.values()))


async def find_manifest(
    store: AsyncS3Store, url: CheckpointURL, directory: Directory, rank: int | None
) -> Manifest | None:
    """The manifest of the save that the commit of ``rank`` (None: ``.metadata``) names. None if it is missing, cannot
    be read, or is not clear.
    """
    manifests = directory.manifests.get(rank, {})
    if not manifests:
        return None
    save_id = directory.save_id_by_time(rank)
    if save_id is None:
        save_id = save_id_of(await store.head(url.key(metadata_object(rank))))
    if save_id is None and len(manifests) == 1:
        [save_id] = manifests
    if save_id is None:
        try:
            metadata = check_metadata(await store.get(url.key(metadata_object(rank))), url, rank)
        except errors.CheckpointError as error:
            logger.warning("cannot tell which manifest of %s is valid: %s", url, error)
            return None
        inside = getattr(metadata.storage_meta, "save_id", None)
        save_id = inside if inside in manifests else None  # another library's save_id may be anything
    return None if save_id is None else await _read_manifest(store, url, save_id, rank)


async def _read_manifest(store: AsyncS3Store, url: CheckpointURL, save_id: str, rank: int | None) -> Manifest | None:
    """The manifest of a save; None if there is none or it cannot be read."""
    try:
        return Manifest.from_json((await store.get(url.key(manifest_object(save_id, rank)))).data)
    except errors.ObjectNotFoundError:
        return None  # lost in a copy, or replaced by another save just now
    except ValueError as error:
        logger.warning("the manifest %s of %s is not used: %s", manifest_object(save_id, rank), url, error)
        return None


async def _read_added(store: AsyncS3Store, url: CheckpointURL) -> AddedMetrics:
    try:
        return AddedMetrics.from_json((await store.get(url.key(METRICS))).data)
    except errors.ObjectNotFoundError:
        return AddedMetrics("")
    except ValueError as error:
        logger.warning("the metrics that were added to %s are not used: %s", url, error)
        return AddedMetrics("")


async def _read_pin_reason(store: AsyncS3Store, url: CheckpointURL) -> str | None:
    """Why a checkpoint is pinned, if the pin says so and may be read. A pin protects whatever is in it."""
    try:
        reason = json.loads((await store.get(url.key(PIN))).data)["reason"]
    except (errors.ObjectNotFoundError, errors.AccessDeniedError):
        return None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return " ".join(reason.split()) if isinstance(reason, str) else None  # one line, wherever it is shown


def save_id_of(head: ObjectHead) -> str | None:
    """The save id in the user metadata of ``.metadata``; None if it has none."""
    return head.metadata.get(SAVE_ID_KEY)


async def find_damage(store: AsyncS3Store, url: CheckpointURL, *, foreign: bool = True) -> str | None:
    """Why a committed checkpoint cannot be loaded; None if it can. Reads its metadata and lists its objects.

    Metadata is decoded, which takes torch, unless it has the checksum that it was saved with, and a manifest that says
    what it names and that no newer torch wrote it.
    """
    directory = await list_directory_async(store, url)
    for rank in directory.committing:
        try:
            stored = await store.get(url.key(metadata_object(rank)))
            needed = await _objects_of_manifest(store, url, rank, stored)
            if needed is None and not foreign and METADATA_CRC_KEY not in stored.metadata:
                continue
            if needed is None:
                metadata = check_metadata(stored, url, rank)
                if not isinstance(metadata.storage_data, dict):
                    return "its metadata does not say where its items lie"
                needed = needed_objects(metadata)
        except (errors.ObjectNotFoundError, errors.CheckpointError) as error:
            return str(error)
        damage = directory.describe_damage(needed)
        if damage is not None:
            return damage
    return None if directory.commits else "it was deleted meanwhile"


def tell_unreadable(unreadable: Mapping[str, str], loadable: str | None) -> None:
    """Warn of checkpoints that cannot be loaded though they were to be taken first; once in a process for each.

    Args:
        loadable: URL of the one after them, which can be loaded; None if there is none.
    """
    new = [url for url in unreadable if url not in _told]
    _told.update(new)
    if not new:
        return
    first, *more = unreadable
    others = f", nor can {len(more)} more (to {more[-1]})" if more else ""
    then = f"The next one that can be is {loadable}" if loadable else "None of them can be"
    logger.warning("%s cannot be loaded%s: %s. %s", first, others, unreadable[first].rstrip("."), then)


_told: set[str] = set()
reset_in_child(_told.clear)


async def _objects_of_manifest(
    store: AsyncS3Store, url: CheckpointURL, rank: int | None, stored: StoredObject
) -> dict[str, int] | None:
    """Path and size of each object of a commit; None if only its metadata tells for certain."""
    save_id = stored.metadata.get(SAVE_ID_KEY)
    if save_id is None or METADATA_CRC_KEY not in stored.metadata or find_crc_mismatch(stored) is not None:
        return None
    manifest = await _read_manifest(store, url, save_id, rank)
    if manifest is None or is_newer_than_installed(manifest.writer.get("torch")):
        return None
    return {entry.path: entry.size for entry in manifest.objects}


async def look_deeper(
    store: AsyncS3Store, url: CheckpointURL, found: Inspected, now: float
) -> tuple[CheckpointInfo, list[LeftoverObject]]:
    """A committed checkpoint with its damage and when it was written, and its leftovers.

    Without a manifest that is certainly its own, there is neither damage nor leftovers.

    Args:
        now: seconds since the epoch on the clock of S3. Leases that ended earlier are leftovers.
    """
    head = await store.head(url.key(METADATA)) if found.manifest is not None else None
    directory = replace(await list_directory_async(store, url), now=now)
    info = replace(found.info, written_at=directory.data_written_at)
    listed = directory.commits.get(None)
    if found.manifest is None or head is None or save_id_of(head) != found.manifest.save_id:
        return info, []  # foreign, or a copy without user metadata
    if listed is None or not same_etag(head.etag, info.etag) or not same_etag(head.etag, listed.etag):
        return info, []  # foreign, a copy without user metadata, or replaced meanwhile
    damage = directory.describe_damage({entry.path: entry.size for entry in found.manifest.objects})
    leftovers = [
        LeftoverObject(
            url.key(each.path), each.size, each.modified_at, url.name,
            is_lease=each.kind.what is What.LEASE, etag=each.etag,
        )
        for each in directory.leftovers(found.manifest)
    ]  # fmt: skip
    return replace(info, damage=damage), leftovers
