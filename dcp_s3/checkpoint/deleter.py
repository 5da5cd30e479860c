"""The requests that make up a deletion: its lists, batches of keys, and the check for pins and leases."""

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
from dcp_s3.format.control_files import DeletionList
from dcp_s3.format.layout import METADATA, classify
from dcp_s3.limit import UNLIMITED, Limit
from dcp_s3.s3.delete import batches, old_versions
from dcp_s3.store import DeleteTarget, Upload
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
    """The objects that were deleted from one checkpoint's directory."""

    name: str
    """Name of the checkpoint."""
    objects: int
    """Number of objects; the deletion's list and other small marks do not count."""
    size: int
    """Bytes."""


class Deleter:
    """Deletes objects under one root.

    Args:
        store: store with the root.
        all_versions: whether to delete all versions of an object in a versioned bucket, not add a delete marker.
        force: whether to ignore pins, leases and saves in progress.
        dry_run: whether to only look.

    Attributes:
        store, all_versions, force, dry_run: as given.
    """

    def __init__(
        self,
        store: AsyncS3Store,
        *,
        all_versions: bool,
        force: bool = False,
        dry_run: bool = False,
    ) -> None:
        self.store = store
        self.all_versions = all_versions
        self.force = force
        self.dry_run = dry_run
        self._slots = asyncio.Semaphore(_DELETES_AT_ONCE)

    async def list_directory(self, url: CheckpointURL, *prefixes: str) -> Directory:
        """The directory at the URL, or only the objects that begin with one of the prefixes."""
        return await list_directory_async(self.store, url, *prefixes)

    def check_protection(self, directory: Directory) -> None:
        """Refuse to delete a protected checkpoint.

        Raises:
            LeftAloneError: it is pinned, or a reader has a lease.
        """
        if not self.force and directory.protection is not None:
            raise LeftAloneError(directory.protection)

    async def write_list(self, url: CheckpointURL, path: str, listed: DeletionList) -> None:
        """Write the list of what will be deleted."""
        await self.store.put(url.key(path), listed.to_json(), content_type="application/json")

    async def withdraw(self, url: CheckpointURL, paths: Iterable[str]) -> None:
        """Remove the lists of a deletion that was given up. A failure is a warning."""
        try:
            await self.delete_all([DeleteTarget(url.key(path)) for path in paths])
        except errors.StorageError as error:
            logger.warning("a deletion of %s was given up, and its list stays until the next prune: %s", url, error)

    async def delete_all(
        self,
        targets: Sequence[DeleteTarget],
        *,
        limit: Limit = UNLIMITED,
        look: Callable[[], Awaitable[None]] | None = None,
    ) -> list[str]:
        """Delete keys whose ETags are unchanged.

        Args:
            targets: keys to delete, with their ETags.
            limit: bounds of each request.
            look: called before each request; raises if nothing more may be deleted.

        Returns:
            Keys that were left alone because they have another ETag.
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
        """Delete the rest, once the commit is gone.

        Args:
            url: URL of the checkpoint.
            listed: objects to delete.
            lists: relative paths of the lists to delete last.
            purged: objects whose old versions are deleted, if there are more than in ``listed``.
            look: called before each request; raises if nothing more may be deleted.
        """
        await self.delete_all(other_targets(url, listed), look=look)
        if listed.all_versions or self.all_versions:
            await self._purge(url, purged or listed)
        await self.delete_all([DeleteTarget(url.key(path)) for path in lists])
        if listed.all_versions or self.all_versions:
            await self._purge(url, DeletionList(None, {}, dict.fromkeys(lists, "")))

    async def _purge(self, url: CheckpointURL, listed: DeletionList) -> None:
        """Delete all versions of the listed objects, except a current one, which was written since."""
        commits, keys = ({url.key(path) for path in paths} for paths in (listed.commits, listed.objects))
        if commits or keys:
            for step in old_versions(await self.store.list_versions(url.key("")), commits, keys):
                await self.delete_all(step)

    async def abort(self, key: str, upload_id: str) -> None:
        """Abort an open multipart upload. One that is already gone is no error."""
        await self.store.abort(Upload(key, upload_id))

    async def _delete_batch(self, batch: Sequence[DeleteTarget], limit: Limit) -> Sequence[str]:
        async with self._slots:
            return await self.store.within(limit).delete(batch)


def commit_steps(url: CheckpointURL, listed: DeletionList) -> list[list[DeleteTarget]]:
    """The commits, which are deleted first, in steps: ``.metadata`` after those of single ranks, which it hides."""
    targets = [DeleteTarget(url.key(path), etag) for path, etag in sorted(listed.commits.items())]
    hidden = [each for each in targets if each.key != url.key(METADATA)]
    return [step for step in (hidden, [each for each in targets if each not in hidden]) if step]


def other_targets(url: CheckpointURL, listed: DeletionList) -> list[DeleteTarget]:
    """The objects to delete after the commits. Names that no other save uses need no condition, and get none."""
    return [
        DeleteTarget(url.key(path), "" if _is_of_one_save(path) else etag)
        for path, etag in sorted(listed.objects.items())
    ]


def _is_of_one_save(path: str) -> bool:
    kind = classify(path)
    return bool(kind.nonce or kind.save_id)  # the claim has neither
