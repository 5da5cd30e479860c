"""The catalog: which checkpoints lie under a root, and which of them is the one to resume from.

Requests per checkpoint: two (HEAD of ``.metadata``, GET of the manifest that it names); data objects are not
touched. Copies that lost the user metadata of ``.metadata`` cost a listing more, foreign checkpoints are listed
once. `latest` looks closer at the one it returns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from dcp_s3 import errors
from dcp_s3.checkpoint.contents import needed_objects
from dcp_s3.format.layout import CONTROL_PREFIX, METADATA, SAVE_ID_KEY, manifest_object, metadata_object
from dcp_s3.format.manifest import Manifest
from dcp_s3.format.metadata import load_metadata
from dcp_s3.retention.checkpoint_info import (
    CheckpointInfo,
    Contents,
    age_order,
    from_contents,
    from_manifest,
    from_rank_manifests,
    is_spread_data,
    newest_first,
    shows_checkpoint,
    sort_out,
    spread_prefixes,
)
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.spill.local import find_commits
from dcp_s3.spill.session import open_store
from dcp_s3.transport.async_client import AsyncBucket, open_bucket, timestamp
from dcp_s3.url import CheckpointURL, parse_url

logger = logging.getLogger(__name__)

T = TypeVar("T")
Root = str | os.PathLike[str]

# Names between two slashes that no checkpoint URL may have, and our own directory in a root that is a checkpoint.
_NO_CHILD = frozenset({"", ".", "..", CONTROL_PREFIX.rstrip("/")})


def list_checkpoints(root: Root, *, settings: SettingsLike = None) -> list[CheckpointInfo]:
    """The checkpoints directly under ``root``, committed or not, oldest first.

    Sorted by step, time and name. Directories that hold nothing of a checkpoint are left out. ``committed`` says
    that the commit is there; it does not look at every data object, as `latest` does.

    Args:
        root: ``s3://bucket/run`` for checkpoints at ``s3://bucket/run/step-1000`` and so on.
        settings: a `Settings`, or a mapping of those that differ from the environment.

    Raises:
        InvalidURLError, SettingsError
        StorageError: missing bucket, credentials, permissions, network.
    """
    return run(list_checkpoints_async(root, settings=settings))


async def list_checkpoints_async(root: Root, *, settings: SettingsLike = None) -> list[CheckpointInfo]:
    """`list_checkpoints` for asyncio."""
    url = parse_url(root)
    async with open_bucket(url.bucket, resolve_settings(settings)) as bucket:
        return await _list(bucket, url)


def latest(root: Root, *, include_uncommitted: bool = False, settings: SettingsLike = None) -> CheckpointInfo | None:
    """The checkpoint to resume from: of the committed ones under ``root`` that with the highest step, then the
    newest; None if there is none.

    The one that is returned can be loaded: its metadata is readable, and every data object that it names is there
    and long enough. One that is not (a copy that was cut off, objects that somebody deleted) is passed over with a
    warning in the log.

    Args:
        root: the URL above the checkpoints.
        include_uncommitted: also consider checkpoints whose commit still waits in this host's spill directory
            (``DCP_S3_SPILL_DIR``), for a job on one host: on several, parts of such a checkpoint may be missing. Their
            ``state`` is ``local``; to load one, S3StorageReader needs ``include_uncommitted``, too.
        settings: a `Settings`, or a mapping of those that differ from the environment.

    Raises:
        InvalidURLError, SettingsError
        StorageError: missing bucket, credentials, permissions, network. Never None because of a failure.
    """
    resolved = resolve_settings(settings)
    waiting = find_local(root, settings=resolved) if include_uncommitted else []
    try:
        found = run(latest_async(root, settings=resolved))
    except errors.TransferError as error:
        if not waiting:
            raise
        logger.warning("S3 does not answer, so that only this host's spill directory was looked at: %s", error)
        found = None
    return max([*waiting, *([] if found is None else [found])], key=age_order, default=None)


def find_local(root: Root, *, settings: Settings) -> list[CheckpointInfo]:
    """The checkpoints directly under ``root`` whose commits wait in this host's spill directory, oldest first."""
    store = open_store(settings)
    found = []
    for journal, data, _ in find_commits(store) if store else ():
        url = parse_url(journal.url)
        if str(url) == str(parse_url(root).child(url.name)):
            found.append(dataclasses.replace(from_manifest(url, Manifest.from_json(data)), state="local"))
    return sorted(found, key=age_order)


async def latest_async(root: Root, *, settings: SettingsLike = None) -> CheckpointInfo | None:
    """`latest` for asyncio."""
    url = parse_url(root)
    async with open_bucket(url.bucket, resolve_settings(settings)) as bucket:
        for info in newest_first(await _list(bucket, url)):
            damage = await _find_damage(bucket, url.child(info.name))
            if damage is None:
                return info
            logger.warning("%s is passed over: %s", info.url, damage)
    return None


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`, in a thread of its own if this one runs an event loop already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    results: list[T] = []
    failures: list[BaseException] = []

    def target() -> None:
        try:
            results.append(asyncio.run(coroutine))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            failures.append(error)

    thread = threading.Thread(target=target, name="dcp_s3-catalog")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


async def gather(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """All results in order; when one fails, the others are cancelled and have ended before it is raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _list(bucket: AsyncBucket, root: CheckpointURL) -> list[CheckpointInfo]:
    pages = await bucket.pages(root.key(""), delimiter="/")
    skip = len(root.key(""))
    names = [prefix[skip:-1] for page in pages for prefix in page.prefixes]
    children = [root.child(name) for name in names if name not in _NO_CHILD]
    found = await gather(inspect_checkpoint(bucket, child) for child in children)
    return sorted((info for info in found if info is not None), key=age_order)


async def inspect_checkpoint(bucket: AsyncBucket, url: CheckpointURL) -> CheckpointInfo | None:
    """The checkpoint at ``url`` itself, None if there is nothing of one.

    Raises:
        StorageError
    """
    try:
        head = await bucket.head(url.key(METADATA))
    except errors.ObjectNotFoundError:
        return await _inspect_without_metadata(bucket, url)
    save_id = _save_id(head)
    manifest = await _read_manifest(bucket, url, save_id, None) if save_id else None
    if manifest is None:
        contents = sort_out(url, await bucket.list(url.key(CONTROL_PREFIX)))
        manifest = await matching_manifest(bucket, url, contents, None)
    if manifest is not None:
        return from_manifest(url, manifest)
    contents = sort_out(url, await bucket.list(url.key("")))
    return from_contents(url, contents, committed_at=timestamp(head["LastModified"]))


async def _inspect_without_metadata(bucket: AsyncBucket, url: CheckpointURL) -> CheckpointInfo | None:
    # Not a full listing at once: this may be a directory with millions of other things.
    skip = len(url.key(""))
    page = await bucket.page(url.key(""), delimiter="/")
    prefixes = [prefix[skip:] for prefix in page.prefixes]
    spread = spread_prefixes(prefixes)
    shown = shows_checkpoint([*(found.key[skip:] for found in page.objects), *prefixes])
    if not shown and spread:
        sample = await bucket.page(url.key(spread[0]))
        shown = any(is_spread_data(found.key[skip:]) for found in sample.objects)
    if not shown:
        return None
    complete = page.next_token is None and not spread and CONTROL_PREFIX not in prefixes
    contents = sort_out(url, page.objects if complete else await bucket.list(url.key("")))
    if _belongs_to_parent(url, contents) or not contents.any:
        return None
    ranks = [rank for rank in contents.commits if rank is not None]
    if not ranks:
        return from_contents(url, contents, committed_at=None)
    manifests = await gather(matching_manifest(bucket, url, contents, rank) for rank in ranks)
    by_rank = {rank: manifest for rank, manifest in zip(ranks, manifests, strict=True) if manifest is not None}
    return from_rank_manifests(url, contents, by_rank)


def _belongs_to_parent(url: CheckpointURL, contents: Contents) -> bool:
    """Whether this directory is not a checkpoint but one of the ``xx/`` of a checkpoint at the URL above."""
    if contents.commits or contents.manifests or not contents.data:
        return False
    skip = len(url.key("")) - len(url.name) - 1
    return all(is_spread_data(found.key[skip:]) for found in contents.data)


async def matching_manifest(
    bucket: AsyncBucket, url: CheckpointURL, contents: Contents, rank: int | None
) -> Manifest | None:
    """The manifest that belongs to the commit of ``rank`` (None: to ``.metadata``): the only one there is, or that
    of the save which the commit names. None if it is missing or cannot be told.

    Raises:
        StorageError
    """
    save_ids = contents.manifests.get(rank, ())
    if not save_ids:
        return None
    if len(save_ids) == 1:
        return await _read_manifest(bucket, url, save_ids[0], rank)
    key = url.key(metadata_object(rank))
    try:
        save_id = _save_id(await bucket.head(key))
        if save_id is None:
            metadata = load_metadata(await bucket.read(key), url=str(url))
            save_id = getattr(metadata.storage_meta, "save_id", None)
    except (errors.ObjectNotFoundError, errors.CheckpointError) as error:
        logger.warning("cannot tell which manifest of %s is valid: %s", url, error)
        return None
    return await _read_manifest(bucket, url, save_id, rank) if save_id in save_ids else None


async def _read_manifest(bucket: AsyncBucket, url: CheckpointURL, save_id: str, rank: int | None) -> Manifest | None:
    try:
        return Manifest.from_json(await bucket.read(url.key(manifest_object(save_id, rank))))
    except errors.ObjectNotFoundError:
        return None  # lost in a copy, or replaced by another save just now
    except ValueError as error:
        logger.warning("the manifest %s of %s is not used: %s", manifest_object(save_id, rank), url, error)
        return None


def _save_id(head: Any) -> str | None:
    fields = {name.lower(): value for name, value in head.get("Metadata", {}).items()}
    return fields.get(SAVE_ID_KEY)


async def _find_damage(bucket: AsyncBucket, url: CheckpointURL) -> str | None:
    """Why a committed checkpoint can not be loaded, None if it can."""
    objects = await bucket.list(url.key(""))
    sizes = {found.key: found.size for found in objects}
    commits = sort_out(url, objects).commits
    for rank in [None] if None in commits else sorted(rank for rank in commits if rank is not None):
        try:
            data = await bucket.read(url.key(metadata_object(rank)))
            metadata = load_metadata(data, url=str(url))
        except (errors.ObjectNotFoundError, errors.CheckpointError) as error:
            return str(error)
        if not isinstance(metadata.storage_data, dict):
            return "its metadata does not say where its items lie"
        for path, size in needed_objects(metadata).items():
            stored = sizes.get(url.key(path))
            if stored is None:
                return f"its object {path} is not there"
            if stored < size:
                return f"its object {path} has {stored} bytes instead of at least {size}"
    return None if commits else "it was deleted meanwhile"
