"""The requests of which deletions are made: lists of what goes, batches of keys, what protects a checkpoint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import Directory
from dcp_s3.checkpoint.listing import list_directory_async
from dcp_s3.coroutines import gather
from dcp_s3.format.deletion_list import DeletionList
from dcp_s3.format.layout import METADATA, What, classify
from dcp_s3.limit import UNLIMITED, Limit
from dcp_s3.s3.delete import batches, old_versions
from dcp_s3.store import Target, Upload
from dcp_s3.url import CheckpointURL

if TYPE_CHECKING:
    from dcp_s3.s3.async_store import AsyncS3Store

logger = logging.getLogger(__name__)

# Each request of 1000 keys counts as 1000 for S3, which takes 3500 a second.
_DELETES_AT_ONCE = 8


class LeftAloneError(errors.DcpS3Error):
    """Something was not deleted because it is not what the plan saw, or is protected."""


@dataclass(frozen=True)
class Deletion:
    """What was deleted of one checkpoint's directory."""

    name: str
    """Of the checkpoint."""
    objects: int
    """How many; its list and other small marks do not count."""
    size: int
    """Bytes."""


class Deleter:
    """Deletes objects under one root.

    Args:
        bucket: to look at it.
        all_versions: whether, in a bucket with versions, all of an object's go instead of a delete marker being put.
        force: whether pins, leases and saves in progress count for nothing.
        dry_run: whether it only looks.

    Attributes:
        bucket, all_versions, force, dry_run: as given.
    """

    def __init__(
        self,
        bucket: AsyncS3Store,
        *,
        all_versions: bool,
        force: bool = False,
        dry_run: bool = False,
    ) -> None:
        self.bucket = bucket
        self.all_versions = all_versions
        self.force = force
        self.dry_run = dry_run
        self._slots = asyncio.Semaphore(_DELETES_AT_ONCE)

    async def list_directory(self, url: CheckpointURL, *prefixes: str) -> Directory:
        """What lies at the URL, or begins with one of some prefixes there."""
        return await list_directory_async(self.bucket, url, *prefixes)

    def check_protection(self, directory: Directory) -> None:
        """
        Raises:
            LeftAloneError: it is pinned, or a reader has a lease.
        """
        if not self.force and directory.protection is not None:
            raise LeftAloneError(directory.protection)

    async def write_list(self, url: CheckpointURL, path: str, listed: DeletionList) -> None:
        """Write down what goes."""
        await self.bucket.put(url.key(path), listed.to_json(), content_type="application/json")

    async def withdraw(self, url: CheckpointURL, paths: Iterable[str]) -> None:
        """Remove lists of what will not go after all. A failure is a warning."""
        try:
            await self.delete_all([Target(url.key(path)) for path in paths])
        except errors.StorageError as error:
            logger.warning("a deletion of %s was given up, and its list stays until the next prune: %s", url, error)

    async def delete_all(
        self,
        targets: Sequence[Target],
        *,
        limit: Limit = UNLIMITED,
        look: Callable[[], Awaitable[None]] | None = None,
    ) -> list[str]:
        """Delete keys, on condition of their ETags.

        Args:
            targets: what goes.
            limit: of each request.
            look: called before each request, and raises if nothing more may go.

        Returns:
            Keys that have another ETag and were left alone.
        """
        if look is not None:
            found: list[str] = []
            for batch in batches(targets):
                await look()
                found += await self._delete_batch(batch, limit)
            return found
        changed = await gather([self._delete_batch(batch, limit) for batch in batches(targets)])
        return [key for each in changed for key in each]

    async def delete_rest(
        self,
        url: CheckpointURL,
        listed: DeletionList,
        lists: Iterable[str],
        *,
        purged: DeletionList | None = None,
        look: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """What is left to do when the checkpoint is none any more.

        Args:
            url: of the checkpoint.
            listed: what goes.
            lists: relative paths of the lists that are done with then.
            purged: whose old versions go, if that is more.
            look: called before each request, and raises if nothing more may go.
        """
        await self.delete_all(other_targets(url, listed), look=look)
        if listed.all_versions or self.all_versions:
            await self._purge(url, purged or listed)
        await self.delete_all([Target(url.key(path)) for path in lists])
        if listed.all_versions or self.all_versions:
            await self._purge(url, DeletionList(None, {}, dict.fromkeys(lists, "")))

    async def _purge(self, url: CheckpointURL, listed: DeletionList) -> None:
        """All versions but a current one, which was written since."""
        commits, keys = ({url.key(path) for path in paths} for paths in (listed.commits, listed.objects))
        if commits or keys:
            for step in old_versions(await self.bucket.list_versions(url.key("")), commits, keys):
                await self.delete_all(step)

    async def abort(self, key: str, upload_id: str) -> None:
        """Abort an open multipart upload; one that is not there any more is no error."""
        await self.bucket.abort(Upload(key, upload_id))

    async def _delete_batch(self, batch: Sequence[Target], limit: Limit) -> Sequence[str]:
        async with self._slots:
            return await self.bucket.within(limit).delete(batch)


def commit_steps(url: CheckpointURL, listed: DeletionList) -> list[list[Target]]:
    """What to delete first, in steps. ``.metadata`` hides those of single ranks, and goes after them."""
    targets = [Target(url.key(path), etag) for path, etag in sorted(listed.commits.items())]
    hidden = [each for each in targets if each.key != url.key(METADATA)]
    return [step for step in (hidden, [each for each in targets if each not in hidden]) if step]


def other_targets(url: CheckpointURL, listed: DeletionList) -> list[Target]:
    """What to delete then. Names that no other save uses need no condition, and get none."""
    return [
        Target(url.key(path), "" if _is_of_one_save(path) else etag) for path, etag in sorted(listed.objects.items())
    ]


def _is_of_one_save(path: str) -> bool:
    kind = classify(path)
    return bool(kind.nonce) or kind.what is What.MANIFEST
