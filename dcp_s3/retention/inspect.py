"""One checkpoint, looked at with few small requests.

Of ours there are two: a listing of what begins with a dot (``.metadata``, and below ``.dcp_s3/`` manifest, metrics, pin
and leases), and a GET of the manifest. A GET more if metrics were added, another if it is pinned, a HEAD more if it is
not plain which manifest belongs to ``.metadata``: five at most. Foreign ones, and those that are not committed, are
listed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import re
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dcp_s3 import errors
from dcp_s3.format.added_metrics import AddedMetrics
from dcp_s3.format.layout import (
    CONTROL_PREFIX,
    METADATA,
    METRICS,
    PIN,
    SAVE_ID_KEY,
    manifest_object,
    metadata_object,
)
from dcp_s3.format.manifest import Manifest
from dcp_s3.format.metadata import load_metadata
from dcp_s3.format.saved_entries import needed_objects
from dcp_s3.retention.checkpoint_info import (
    CheckpointInfo,
    Contents,
    from_contents,
    from_manifest,
    from_rank_manifests,
    is_spread_data,
    shows_checkpoint,
    sort_out,
    spread_prefixes,
    with_marks,
    with_metrics,
    with_step,
)
from dcp_s3.s3.async_store import AsyncS3Store
from dcp_s3.store import ListedObject, ObjectHead
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

T = TypeVar("T")
U = TypeVar("U")
Root = str | os.PathLike[str]

CHECKPOINTS_AT_ONCE = 64
"""Checkpoints that are looked at at a time, which bounds the memory for what is in flight."""


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


async def map_bounded(
    function: Callable[[T], Awaitable[U]], items: Sequence[T], *, limit: int = CHECKPOINTS_AT_ONCE
) -> list[U]:
    """``function`` of each item, in order, at most ``limit`` at a time. Failures as in `gather`."""
    results: dict[int, U] = {}
    pending = iter(enumerate(items))

    async def work() -> None:
        for number, item in pending:
            results[number] = await function(item)

    await gather(work() for _ in range(min(limit, len(items))))
    return [results[number] for number in range(len(items))]


@dataclass(frozen=True)
class Inspected:
    """A checkpoint with what was read for it.

    Attributes:
        info: the checkpoint.
        contents: what begins with a dot; all of its objects if they had to be listed.
        manifest: of a committed save with collectives; None without.
    """

    info: CheckpointInfo
    contents: Contents
    manifest: Manifest | None = None


async def inspect_checkpoint(
    bucket: AsyncS3Store, url: CheckpointURL, patterns: Sequence[re.Pattern[str]] = ()
) -> CheckpointInfo | None:
    """The checkpoint at ``url`` itself, None if there is nothing of one.

    Args:
        bucket: of the URL.
        url: of the checkpoint.
        patterns: that find the step in its name, instead of the rules of `step_of`.

    Raises:
        StorageError
    """
    found = await inspect(bucket, url, patterns)
    return None if found is None else found.info


async def inspect(
    bucket: AsyncS3Store, url: CheckpointURL, patterns: Sequence[re.Pattern[str]] = ()
) -> Inspected | None:
    """`inspect_checkpoint`, with what it was concluded from."""
    found = await _inspect_committed(bucket, url) or await _inspect_without_metadata(bucket, url)
    if found is None:
        return None
    info = with_step(with_marks(found.info, found.contents), patterns)
    if found.contents.metrics and info.committed:
        info = with_metrics(info, await _read_added(bucket, url))
    if info.pinned:
        info = dataclasses.replace(info, pin_reason=await _read_pin_reason(bucket, url))
    return dataclasses.replace(found, info=info)


async def _dotted(bucket: AsyncS3Store, url: CheckpointURL) -> list[ListedObject]:
    """What begins with a dot and may be of a checkpoint."""
    page = await bucket.page(url.key("."))
    if page.next_token is None:
        return list(page.objects)
    # Many ranks without collectives, or a directory with something like .git/: not all of that.
    metadata = await bucket.page(url.key(METADATA))
    control = (await bucket.list(url.key(CONTROL_PREFIX))).objects
    return [*control, *(found for found in metadata.objects if found.key == url.key(METADATA))]


async def _inspect_committed(bucket: AsyncS3Store, url: CheckpointURL) -> Inspected | None:
    """A checkpoint with ``.metadata``, None without."""
    contents = sort_out(url, await _dotted(bucket, url))
    commit = contents.commits.get(None)
    if commit is None:
        return None
    save_ids = contents.manifests.get(None, ())
    manifest = None
    if save_ids:
        # A manifest is written before its .metadata: a later one is of a save that goes on, or was cut off.
        listed = contents.control[manifest_object(save_ids[0])]
        if len(save_ids) == 1 and listed.modified_at <= commit.modified_at:
            manifest = await read_manifest(bucket, url, save_ids[0], None)
        else:
            try:
                save_id = save_id_of(await bucket.head(url.key(METADATA)))
            except errors.ObjectNotFoundError:
                return None  # deleted just now
            manifest = await read_manifest(bucket, url, save_id, None) if save_id else None
            manifest = manifest or await matching_manifest(bucket, url, contents, None)
    if manifest is not None:
        return Inspected(from_manifest(url, manifest), contents, manifest)
    contents = sort_out(url, (await bucket.list(url.key(""))).objects)
    return Inspected(from_contents(url, contents, committed_at=commit.modified_at), contents)


async def _inspect_without_metadata(bucket: AsyncS3Store, url: CheckpointURL) -> Inspected | None:
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
    contents = sort_out(url, page.objects if complete else (await bucket.list(url.key(""))).objects)
    if _belongs_to_parent(url, contents) or not contents.any:
        return None
    ranks = [rank for rank in contents.commits if rank is not None]
    if not ranks:
        return Inspected(from_contents(url, contents, committed_at=None), contents)
    manifests = await map_bounded(lambda rank: matching_manifest(bucket, url, contents, rank), ranks)
    by_rank = {rank: manifest for rank, manifest in zip(ranks, manifests, strict=True) if manifest is not None}
    return Inspected(from_rank_manifests(url, contents, by_rank), contents)


def _belongs_to_parent(url: CheckpointURL, contents: Contents) -> bool:
    """Whether this directory is not a checkpoint but one of the ``xx/`` of a checkpoint at the URL above."""
    if contents.commits or contents.control or not contents.data:
        return False
    skip = len(url.key("")) - len(url.name) - 1
    return all(is_spread_data(found.key[skip:]) for found in contents.data)


async def matching_manifest(
    bucket: AsyncS3Store, url: CheckpointURL, contents: Contents, rank: int | None
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
        return await read_manifest(bucket, url, save_ids[0], rank)
    key = url.key(metadata_object(rank))
    try:
        save_id = save_id_of(await bucket.head(key))
        if save_id is None:
            metadata = load_metadata((await bucket.get(key)).data, url=str(url))
            save_id = getattr(metadata.storage_meta, "save_id", None)
    except (errors.ObjectNotFoundError, errors.CheckpointError) as error:
        logger.warning("cannot tell which manifest of %s is valid: %s", url, error)
        return None
    return await read_manifest(bucket, url, save_id, rank) if save_id in save_ids else None


async def read_manifest(bucket: AsyncS3Store, url: CheckpointURL, save_id: str, rank: int | None) -> Manifest | None:
    """The manifest of a save, None if there is none or it can not be read."""
    try:
        return Manifest.from_json((await bucket.get(url.key(manifest_object(save_id, rank)))).data)
    except errors.ObjectNotFoundError:
        return None  # lost in a copy, or replaced by another save just now
    except ValueError as error:
        logger.warning("the manifest %s of %s is not used: %s", manifest_object(save_id, rank), url, error)
        return None


async def _read_added(bucket: AsyncS3Store, url: CheckpointURL) -> AddedMetrics:
    try:
        return AddedMetrics.from_json((await bucket.get(url.key(METRICS))).data)
    except errors.ObjectNotFoundError:
        return AddedMetrics("")
    except ValueError as error:
        logger.warning("the metrics that were added to %s are not used: %s", url, error)
        return AddedMetrics("")


async def _read_pin_reason(bucket: AsyncS3Store, url: CheckpointURL) -> str | None:
    """Why it is pinned, if it says so and may be read. It protects whatever is in it."""
    try:
        reason = json.loads((await bucket.get(url.key(PIN))).data)["reason"]
    except (errors.ObjectNotFoundError, errors.AccessDeniedError):
        return None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return reason if isinstance(reason, str) else None


def save_id_of(head: ObjectHead) -> str | None:
    """The save id in the user metadata of ``.metadata``, None if it has none."""
    return head.metadata.get(SAVE_ID_KEY)


async def find_damage(bucket: AsyncS3Store, url: CheckpointURL) -> str | None:
    """Why a committed checkpoint can not be loaded, None if it can: reads its metadata and lists its objects.

    Raises:
        StorageError
    """
    objects = (await bucket.list(url.key(""))).objects
    sizes = {found.key: found.size for found in objects}
    commits = sort_out(url, objects).commits
    for rank in [None] if None in commits else sorted(rank for rank in commits if rank is not None):
        try:
            data = (await bucket.get(url.key(metadata_object(rank)))).data
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
