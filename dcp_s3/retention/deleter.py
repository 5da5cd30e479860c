"""The requests of which deletions are made: lists of what goes, batches of keys, what protects a checkpoint."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from dcp_s3 import errors
from dcp_s3.format.deletion_list import DeletionList
from dcp_s3.format.layout import (
    PIN,
    parse_lease_object,
)
from dcp_s3.limit import UNLIMITED, Limit
from dcp_s3.retention.belongings import (
    other_targets,
)
from dcp_s3.retention.inspect import gather
from dcp_s3.retention.plan import LEASE_MARGIN
from dcp_s3.s3.async_store import AsyncS3Store
from dcp_s3.s3.delete import batches, old_versions
from dcp_s3.store import ListedObject, Target, Upload
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

# Each request of 1000 keys counts as 1000 for S3, which takes 3500 a second.
_DELETES_AT_ONCE = 8


class LeftAloneError(errors.DcpS3Error):
    """Something was not deleted because it is not what the plan saw, or is protected."""


@dataclass(frozen=True)
class Deletion:
    """What was deleted of one checkpoint's directory.

    Attributes:
        name: of the checkpoint.
        objects: how many; its list and other small marks do not count.
        size: bytes.
    """

    name: str
    objects: int
    size: int


class Deleter:
    """Deletes objects under one root.

    Args:
        bucket: of the root.
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

    def check_marks(self, url: CheckpointURL, objects: Iterable[ListedObject], now: float) -> None:
        """
        Raises:
            LeftAloneError: a pin, or a lease that has not ended by ``now`` (of S3's clock), is among the objects.
        """
        if self.force:
            return
        skip = len(url.key(""))
        for each in objects:
            seconds = parse_lease_object(each.key[skip:])
            if each.key[skip:] == PIN:
                raise LeftAloneError("it is pinned")
            if seconds is not None and now < each.modified_at + seconds + LEASE_MARGIN:
                raise LeftAloneError("a reader has a lease")

    async def list_objects(self, prefix: str) -> tuple[Sequence[ListedObject], float]:
        """Objects, and the time on S3's clock."""
        listed = await self.bucket.list(prefix)
        return listed.objects, time.time() if listed.server_time is None else listed.server_time

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
