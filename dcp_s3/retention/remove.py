"""Deletes one checkpoint on request."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace

from dcp_s3 import errors
from dcp_s3.checkpoint.deletion import Deleter, Deletion, LeftAloneError
from dcp_s3.checkpoint.directory import LEASE_MARGIN
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.checkpoint.leftovers import delete_uncommitted
from dcp_s3.checkpoint.look import inspect_checkpoint
from dcp_s3.checkpoint.stored_metadata import not_found_error
from dcp_s3.retention.catalog import find_local, open_upload
from dcp_s3.s3.async_store import AsyncS3Store, run_on_store
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.store import Upload
from dcp_s3.url import CheckpointURL, URLLike, parse_url

logger = logging.getLogger(__name__)


def remove(
    url: URLLike,
    *,
    force: bool = False,
    all_versions: bool = False,
    dry_run: bool = False,
    settings: SettingsLike = None,
) -> Deletion:
    """Delete one checkpoint whatever the policies say, even the newest or one that was never committed.

    >>> remove("s3://bucket/run/step-00001000").name
    'step-00001000'

    Args:
        url: URL of the checkpoint.
        force: delete it even if it is pinned, being read, or being saved; the reader or the save then fails.
        all_versions: see `prune`.
        dry_run: only look. The result says what would be deleted; an error says why it would be kept.
        settings: a `Settings`, or a mapping of those that differ from the environment.

    Raises:
        CheckpointNotFoundError: nothing of a checkpoint is there.
        CheckpointProtectedError: it is pinned, a reader has a lease, something was written there within the grace
            period (setting ``retention_grace``), or its commit waits in this host's spill directory.
        InvalidURLError, SettingsError
        StorageError: all or part of it is still there; `prune` or another `remove` finishes it.
    """
    where, resolved = parse_url(url), resolve_settings(settings)

    async def work(store: AsyncS3Store) -> Deletion:
        deleter = Deleter(store, all_versions=all_versions, force=force, dry_run=dry_run)
        return await _remove(deleter, where, resolved)

    return run_on_store(where.bucket, resolved, work)


async def _remove(deleter: Deleter, url: CheckpointURL, settings: Settings) -> Deletion:
    root = CheckpointURL(url.bucket, url.prefix.rpartition("/")[0])
    waiting = any(info.name == url.name for info in find_local(str(root), settings=settings))
    now = (await deleter.store.page(url.key(""))).server_time
    if now is None:
        logger.warning("the S3 endpoint does not tell its time; ages are by the clock of this host")
        now = time.time()
    since = math.inf if deleter.force else now - settings.retention_grace
    uploads = [
        each
        for each in await deleter.store.uploads(url.key(""))
        if (upload := open_upload(root, each)) is not None and upload.checkpoint == url.name
    ]
    info = await inspect_checkpoint(deleter.store, url)
    if info is None and not uploads:
        raise not_found_error(url, "nothing of a checkpoint")
    why = "its commit waits in this host's spill directory" if waiting else None
    if any(each.initiated_at > since for each in uploads):
        why = "a save is in progress: an upload was begun within the grace period"
    if info is not None and info.leased_until is not None:
        live = now < info.leased_until + LEASE_MARGIN
        why = "a reader has a lease" if live else why
    if info is not None and info.pinned:
        why = f"it is pinned ({info.pin_reason})" if info.pin_reason else "it is pinned"
    if why is not None and not deleter.force:
        raise _protected(url, why)
    if deleter.dry_run:  # do not finish what others have begun either
        uploads, info = [], None if info is None else replace(info, deletions=())
    return await _remove_found(deleter, url, info, uploads, since=since)


async def _remove_found(
    deleter: Deleter, url: CheckpointURL, info: CheckpointInfo | None, uploads: Sequence[Upload], *, since: float
) -> Deletion:
    done = Deletion(url.name, 0, 0)
    try:
        for deletion in info.deletions if info is not None else ():
            if not info.committed or deletion != info.deletion_id:  # type: ignore[union-attr]
                finished = await deleter.finish(url, deletion)
                done = Deletion(url.name, done.objects + finished.objects, done.size + finished.size)
        if info is not None:
            deleted = await (
                deleter.delete_committed(url, info, since=since)
                if info.committed
                else delete_uncommitted(deleter, url, since=since)
            )
            done = Deletion(url.name, done.objects + deleted.objects, done.size + deleted.size)
    except LeftAloneError as error:
        raise _protected(url, str(error)) from None
    for upload in uploads:
        await deleter.store.abort(upload)
    return done


def _protected(url: CheckpointURL, why: str) -> errors.CheckpointProtectedError:
    return errors.CheckpointProtectedError(
        f"{url} was not deleted: {why}. Remedy: `unpin` it, wait, or pass force=True, if nobody needs what is there",
        url=str(url),
    )
