"""How one checkpoint is deleted, so that it may be cut off anywhere and meet readers, saves and other prunes.

1. Look: it is still what the plan saw.
2. Write down what goes (`DeletionList`), with ETags.
3. Look again, for readers' leases and pins that came meanwhile, and for commits of saves that took long: whoever writes
   one of these looks for the list then.
4. Delete what makes it a checkpoint, on condition that it still has its ETag. From here on it is none.
5. Delete the rest; at last the list.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dcp_s3 import errors
from dcp_s3.checkpoint.contents import needed_objects
from dcp_s3.checkpoint.lease import DELETION_BEGINS
from dcp_s3.format.deletion_list import DeletionList
from dcp_s3.format.layout import (
    CONTROL_PREFIX,
    DELETION_PREFIX,
    METADATA,
    METRICS,
    PIN,
    deletion_id,
    deletion_object,
    manifest_object,
    metadata_object,
    new_nonce,
    parse_deletion_object,
    parse_lease_object,
    parse_manifest_object,
)
from dcp_s3.format.metadata import load_metadata
from dcp_s3.retention.belongings import (
    Belongings,
    commit_steps,
    is_begun,
    is_commit,
    other_targets,
    sort_belongings,
    still_there,
)
from dcp_s3.retention.checkpoint_info import CheckpointInfo
from dcp_s3.retention.inspect import Inspected, gather, inspect, matching_manifest, save_id_of
from dcp_s3.retention.plan import LEASE_MARGIN, LeftoverObject
from dcp_s3.retention.scan import look_deeper
from dcp_s3.transport import multipart
from dcp_s3.transport.async_client import AsyncBucket, ListedObject
from dcp_s3.transport.bucket import Bucket, limit_timeouts
from dcp_s3.transport.deadline import Deadline
from dcp_s3.transport.delete import Target, batches, delete_batch, list_versions, old_versions
from dcp_s3.transport.workers import Workers
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

T = TypeVar("T")

WORKERS = 8
"""Requests that delete in flight; each of 1000 keys counts as 1000 for S3, which takes 3500 a second."""

_ATTEMPT_SECONDS = 30.0
"""For which one attempt to delete a commit may hang."""


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


class Remover:
    """Deletes what lies under one root.

    Args:
        bucket: to look at it.
        workers: threads for the requests that change something.
        all_versions: whether, in a bucket with versions, all of an object's go instead of a delete marker being put.
        force: whether pins, leases and saves in progress count for nothing.
        dry_run: whether it only looks.
    """

    def __init__(
        self,
        bucket: AsyncBucket,
        workers: Workers,
        *,
        all_versions: bool,
        force: bool = False,
        dry_run: bool = False,
    ) -> None:
        self._bucket = bucket
        self._writing = Bucket(bucket.name, bucket.settings)
        self._workers = workers
        self._all_versions = all_versions
        self._force = force
        self._dry_run = dry_run

    async def delete_committed(
        self, url: CheckpointURL, planned: CheckpointInfo, *, since: float, newest: CheckpointURL | None = None
    ) -> Deletion:
        """Delete a committed checkpoint.

        Args:
            url: of the checkpoint.
            planned: what the plan saw.
            since: what was written later (seconds since the epoch on the clock of S3) and is not the checkpoint's is
                of a save in progress.
            newest: of the checkpoint that has to be there for this one to be deleted.

        Raises:
            LeftAloneError: it changed, is protected, or something is being saved there.
            StorageError, CheckpointError
        """
        found = await inspect(self._bucket, url)
        if found is None or not found.info.committed:
            raise LeftAloneError("it is gone, or no longer committed")
        _check_unchanged(planned, found.info)
        needed = await self._needed(url, found)
        objects, now = await self._list(url.key(""))
        self._check_marks(url, objects, now)
        belongings = sort_belongings(url, objects, needed, since=since, now=now)
        if belongings.being_saved and not self._force:
            raise LeftAloneError(f"a save is in progress: {belongings.being_saved} was written")
        if planned.etag is not None and not _same(planned.etag, belongings.commits.get(METADATA)):
            raise LeftAloneError("it was overwritten")
        if not self._dry_run:
            await self._delete(url, planned, belongings, newest)
        return Deletion(url.name, len(belongings.commits) + len(belongings.objects), belongings.size)

    async def _delete(
        self, url: CheckpointURL, planned: CheckpointInfo, belongings: Belongings, newest: CheckpointURL | None
    ) -> None:
        listed = belongings.to_list(planned.save_id, all_versions=self._all_versions)
        path = deletion_object(planned.deletion_id, new_nonce())
        deadline = _CommitDeadline.begin()
        try:
            await self._run(self._write, url.key(path), listed.to_json())
            lists = await self._look_again(url, planned, listed, newest)
            if deadline.passed:
                raise LeftAloneError(_TOO_SLOW)
        except (LeftAloneError, errors.StorageError):
            await self._withdraw(url, [path])
            raise
        settings = limit_timeouts(self._writing.settings, _ATTEMPT_SECONDS)
        in_time = replace(self._writing, settings=settings, deadline=deadline)
        for step in commit_steps(url, listed):
            try:
                changed = await self._delete_all(step, bucket=in_time)
            except errors.StorageError as error:
                await self._give_up(url, path, listed, error)
                raise
            if changed:
                await self._withdraw(url, [path])
                raise LeftAloneError("it was overwritten")
        await self._delete_rest(url, listed, {path, *lists})

    async def _give_up(self, url: CheckpointURL, path: str, listed: DeletionList, error: errors.StorageError) -> None:
        """Withdraw the list if S3 has certainly not deleted a commit, and never will: readers wait for no one."""
        late = isinstance(error, errors.DeadlineExceededError)
        if isinstance(error, errors.TransferError) or (late and error.attempts):
            return  # S3 may still carry it out
        try:
            for commit, etag in listed.commits.items():
                if (await self._bucket.head(url.key(commit))).get("ETag", "").strip('"') != etag.strip('"'):
                    return
        except errors.StorageError:
            return
        await self._withdraw(url, [path])
        if late:
            raise LeftAloneError(_TOO_SLOW)

    async def _delete_rest(
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
        await self._delete_all(other_targets(url, listed), look=look)
        if listed.all_versions or self._all_versions:
            await self._purge(url, purged or listed)
        await self._delete_all([Target(url.key(path)) for path in lists])
        if listed.all_versions or self._all_versions:
            await self._purge(url, DeletionList(None, {}, dict.fromkeys(lists, "")))

    async def _look_again(
        self, url: CheckpointURL, planned: CheckpointInfo, listed: DeletionList, newest: CheckpointURL | None
    ) -> list[str]:
        """The last look before something goes; the lists of other deletions of the same checkpoint."""
        if newest is not None and not await self._exists(newest):
            raise LeftAloneError(f"{newest}, which was to stay as the newest, is gone")
        if planned.etag is not None:
            try:
                head = await self._bucket.head(url.key(METADATA))
            except errors.ObjectNotFoundError:
                raise LeftAloneError("another prune deletes it") from None
            if head.get("ETag", "").strip('"') != planned.etag.strip('"'):
                raise LeftAloneError("it was overwritten")
        skip = len(url.key(""))
        objects, now = await self._list(url.key(CONTROL_PREFIX))
        self._check_marks(url, objects, now)
        lists = []
        for each in objects:
            path = each.key[skip:]
            if path == METRICS and not self._force and not _same(listed.objects.get(path), each):
                raise LeftAloneError("metrics were added to it")
            if parse_manifest_object(path) is not None and path not in listed.objects and not self._force:
                raise LeftAloneError("a save is in progress: it has written its manifest")
            if parse_deletion_object(path) == planned.deletion_id:
                lists.append(path)
        return lists

    async def delete_uncommitted(self, url: CheckpointURL, *, since: float) -> Deletion:
        """Delete what a save that was never committed left.

        Args:
            url: of the directory.
            since: nothing in it may have been written later: seconds since the epoch on the clock of S3.

        Raises:
            LeftAloneError: it was committed meanwhile, is being saved, or is protected.
            StorageError, CheckpointError
        """
        found = await inspect(self._bucket, url)
        if found is None:
            return Deletion(url.name, 0, 0)  # somebody else was faster
        if found.info.committed:
            raise LeftAloneError("it was committed")
        if found.info.damage is not None and not self._force:
            raise LeftAloneError(found.info.damage)
        objects, now = await self._list(url.key(""))
        self._check_marks(url, objects, now)
        belongings = sort_belongings(url, objects, (), since=since, now=now)
        if METADATA in belongings.commits:
            raise LeftAloneError("it was committed")
        young = [path for path, each in belongings.commits.items() if each.modified_at > since]
        if (belongings.being_saved or young) and not self._force:
            raise LeftAloneError(f"a save is in progress: {belongings.being_saved or young[0]} was written")
        skip = len(url.key(""))
        for each in objects:  # everything in our own directory goes, but what protects and what is to be finished
            path = each.key[skip:]
            if (
                path.startswith(CONTROL_PREFIX)
                and path != PIN
                and parse_lease_object(path) is None
                and parse_deletion_object(path) is None
            ):
                belongings.objects[path] = each
        if self._dry_run:
            return Deletion(url.name, len(belongings.commits) + len(belongings.objects), belongings.size)
        everything = belongings.to_list(None, all_versions=self._all_versions)
        seen = {**everything.commits, **everything.objects}
        known = set(everything.commits)

        async def look() -> None:
            if not self._force:
                await self._look_for_commits(url, seen, known)

        # It is none, whatever goes first; and what is written down must not make a part of it look like one.
        listed = replace(everything, commits={}, objects=everything.objects)
        path = await self._announce(url, listed, look)
        try:
            for step in commit_steps(url, everything):
                await self._delete_all(step, look=look)
            known.clear()
            await self._delete_rest(url, listed, (), look=look)
        except LeftAloneError:
            await self._withdraw(url, [path])
            raise
        await self._delete_rest(url, replace(listed, objects={}), [path])
        return Deletion(url.name, len(belongings.commits) + len(belongings.objects), belongings.size)

    async def _announce(self, url: CheckpointURL, listed: DeletionList, look: Callable[[], Awaitable[None]]) -> str:
        """Write down what goes, for saves that are about to commit, and look for those that have; the list's path."""
        path = deletion_object(deletion_id(None, new_nonce()), new_nonce())
        try:
            await self._run(self._write, url.key(path), listed.to_json())
            await look()
        except (LeftAloneError, errors.StorageError):
            await self._withdraw(url, [path])
            raise
        return path

    async def _look_for_commits(self, url: CheckpointURL, seen: Mapping[str, str], known: Collection[str]) -> None:
        """Raises LeftAloneError if a save was committed, or is about to be, since a listing.

        Args:
            url: of the checkpoint.
            seen: ETag by relative path of what was listed.
            known: relative paths of the commits in it that may be there still.
        """
        skip = len(url.key(""))
        objects, now = await self._list(url.key("."))
        self._check_marks(url, objects, now)
        for each in (*objects, *await self._bucket.list(url.key("__"))):
            path = each.key[skip:]
            if is_commit(path) and not (path in known and _same(seen.get(path), each)):
                raise LeftAloneError("it was committed")
            if parse_manifest_object(path) is not None and not _same(seen.get(path), each):
                raise LeftAloneError("a save is in progress: it has written its manifest")

    async def finish(self, url: CheckpointURL, deletion: str) -> Deletion:
        """Finish a deletion that was cut off: exactly what its lists name goes, as far as it is what it was.

        Args:
            url: of the checkpoint.
            deletion: its id.

        Raises:
            LeftAloneError: the checkpoint is still there.
            CheckpointError: a list can not be read.
            StorageError
        """
        objects, now = await self._list(url.key(""))
        skip = len(url.key(""))
        sizes = {each.key[skip:]: each.size for each in objects}
        written = {each.key[skip:]: each.modified_at for each in objects}
        gone: set[str] = set()
        for path in [path for path in sizes if parse_deletion_object(path) == deletion]:
            try:
                listed = DeletionList.from_json(await self._bucket.read(url.key(path)))
            except errors.ObjectNotFoundError:
                continue  # another prune has finished it
            except ValueError as error:
                raise errors.CheckpointError(
                    f"the list of a deletion s3://{self._bucket.name}/{url.key(path)} can not be read: {error}. "
                    "Remedy: delete it; what it names is then left over, and goes after the grace period",
                    url=str(url),
                ) from None
            if not is_begun(url, listed, objects) or await self._has_save(url, listed.save_id, sizes):
                if not listed.commits:  # of leftovers, or of a save that was committed after all
                    if written[path] < now - DELETION_BEGINS or not listed.objects.keys() & sizes.keys():
                        await self._withdraw(url, [path])
                    continue
                raise LeftAloneError("a deletion was begun and given up; the checkpoint is still there")
            rest = still_there(url, listed, objects, written_at=written[path])
            for step in commit_steps(url, rest):
                await self._delete_all(step)
            # With versions, what has its delete marker already may still have older ones.
            await self._delete_rest(url, rest, [path], purged=listed)
            gone |= {*rest.commits, *rest.objects}
        return Deletion(url.name, len(gone), sum(sizes[path] for path in gone))

    async def withdraw_given_up(self, url: CheckpointURL, deletion: str) -> None:
        """Remove the lists of deletions of a checkpoint that is still there, which were cut off before they began."""
        objects, now = await self._list(url.key(DELETION_PREFIX))
        skip = len(url.key(""))
        old = [each.key[skip:] for each in objects if each.modified_at < now - DELETION_BEGINS]
        await self._delete_all([Target(url.key(path)) for path in old if parse_deletion_object(path) == deletion])

    async def delete_leftovers(
        self, url: CheckpointURL, planned: Sequence[LeftoverObject], *, since: float
    ) -> Deletion:
        """Delete objects of other saves in the directory of a committed checkpoint.

        Raises:
            LeftAloneError: a save is in progress.
            StorageError
        """
        _, now = await self._list(url.key(DELETION_PREFIX))
        found = await inspect(self._bucket, url)
        unneeded = (await look_deeper(self._bucket, url, found, now))[1] if found and found.info.committed else []
        if any(each.modified_at > since and not each.is_lease for each in unneeded):
            raise LeftAloneError("a save is in progress: an object was written")
        gone = [each for each in planned if each in unneeded]
        if not gone or found is None:
            return Deletion(url.name, 0, 0)
        before = found.info

        async def look() -> None:
            now = await inspect(self._bucket, url)
            if now is None or (now.info.save_id, now.info.etag) != (before.save_id, before.etag):
                raise LeftAloneError("it was overwritten")

        skip = len(url.key(""))
        listed = DeletionList(None, {}, dict.fromkeys((each.key[skip:] for each in gone), ""), self._all_versions)
        path = await self._announce(url, listed, look)
        try:
            await self._delete_all([Target(each.key) for each in gone], look=look)
        except LeftAloneError:
            await self._withdraw(url, [path])
            raise
        left = {each.key[skip:] for each in unneeded} - set(listed.objects)
        lists = await self._spent_lists(url, left)
        await self._delete_rest(url, replace(listed, objects={}), {path, *lists}, purged=listed)
        return Deletion(url.name, len(gone), sum(each.size for each in gone))

    async def _spent_lists(self, url: CheckpointURL, left: Collection[str]) -> list[str]:
        """Lists of leftovers of which none is left, from prunes that were cut off."""
        spent = []
        for each in (await self._list(url.key(DELETION_PREFIX)))[0]:
            try:
                listed = DeletionList.from_json(await self._bucket.read(each.key))
            except (errors.ObjectNotFoundError, ValueError):
                continue
            if not listed.commits and not listed.objects.keys() & left:
                spent.append(each.key[len(url.key("")) :])
        return spent

    async def abort(self, key: str, upload_id: str) -> None:
        """Abort an open multipart upload; one that is not there any more is no error."""
        await self._run(multipart.abort, self._writing, key, upload_id)

    def _check_marks(self, url: CheckpointURL, objects: Iterable[ListedObject], now: float) -> None:
        if self._force:
            return
        skip = len(url.key(""))
        for each in objects:
            seconds = parse_lease_object(each.key[skip:])
            if each.key[skip:] == PIN:
                raise LeftAloneError("it is pinned")
            if seconds is not None and now < each.modified_at + seconds + LEASE_MARGIN:
                raise LeftAloneError("a reader has a lease")

    async def _needed(self, url: CheckpointURL, found: Inspected) -> set[str]:
        """Relative paths of the data objects and manifests that a checkpoint's metadata names."""
        if found.manifest is not None:
            return {entry.path for entry in found.manifest.objects} | {manifest_object(found.manifest.save_id)}
        needed: set[str] = set()
        ranks = [None] if None in found.contents.commits else list(found.contents.commits)
        for rank in ranks:
            manifest = await matching_manifest(self._bucket, url, found.contents, rank)
            if manifest is not None:
                needed |= {entry.path for entry in manifest.objects} | {manifest_object(manifest.save_id, rank)}
                continue
            try:
                metadata = load_metadata(await self._bucket.read(url.key(metadata_object(rank))), url=str(url))
            except errors.ObjectNotFoundError:
                raise LeftAloneError("another prune deletes it") from None
            except errors.CheckpointError as error:
                logger.warning("what %s consists of can not be read, so that only old objects go: %s", url, error)
                continue
            needed |= set(needed_objects(metadata))
        return needed

    async def _has_save(self, url: CheckpointURL, save_id: str | None, there: Iterable[str]) -> bool:
        """Whether the checkpoint at the URL is of that save, though its ``.metadata`` may have another ETag: one that
        was brought back from a copy."""
        if save_id is None or METADATA not in there:
            return False
        try:
            return save_id_of(await self._bucket.head(url.key(METADATA))) == save_id
        except errors.ObjectNotFoundError:
            return False

    async def _exists(self, url: CheckpointURL) -> bool:
        for name in (METADATA, metadata_object(0)):
            page = await self._bucket.page(url.key(name))
            if any(each.key == url.key(name) for each in page.objects):
                return True
        return False

    async def _list(self, prefix: str) -> tuple[list[ListedObject], float]:
        """Objects, and the time on S3's clock."""
        pages = await self._bucket.pages(prefix)
        now = pages[0].server_time
        return [each for page in pages for each in page.objects], time.time() if now is None else now

    def _write(self, key: str, data: bytes) -> None:
        self._writing.write(key, data, content_type="application/json")

    async def _withdraw(self, url: CheckpointURL, paths: Iterable[str]) -> None:
        try:
            await self._delete_all([Target(url.key(path)) for path in paths])
        except errors.StorageError as error:
            logger.warning("a deletion of %s was given up, and its list stays until the next prune: %s", url, error)

    async def _delete_all(
        self,
        targets: Sequence[Target],
        *,
        bucket: Bucket | None = None,
        look: Callable[[], Awaitable[None]] | None = None,
    ) -> list[str]:
        """Keys that have another ETag and were left alone. With ``look``, that is called before each request."""
        if look is not None:
            found = []
            for batch in batches(targets):
                await look()
                found += await self._run(delete_batch, bucket or self._writing, batch)
            return found
        changed = await gather([self._run(delete_batch, bucket or self._writing, batch) for batch in batches(targets)])
        return [key for each in changed for key in each]

    async def _purge(self, url: CheckpointURL, listed: DeletionList) -> None:
        """All versions but a current one, which was written since."""
        commits, keys = ({url.key(path) for path in paths} for paths in (listed.commits, listed.objects))
        if commits or keys:
            for step in old_versions(await self._run(list_versions, self._writing, url.key("")), commits, keys):
                await self._delete_all(step)

    async def _run(self, function: Callable[..., T], *arguments: object) -> T:
        """In a thread: these requests are boto3's."""
        result: T = await asyncio.wrap_future(self._workers.submit(function, *arguments))
        return result


_TOO_SLOW = "S3 is too slow for its readers to be seen"


@dataclass(frozen=True)
class _CommitDeadline(Deadline):
    """By which a deletion's commits must be gone, so that readers may rely on its list; by two clocks, because one
    stops while a host sleeps.

    Attributes:
        wall: when it passes, seconds since the epoch.
    """

    wall: float = 0.0

    @classmethod
    def begin(cls) -> _CommitDeadline:
        """It is now that the list is written."""
        seconds = DELETION_BEGINS / 2
        return cls("DELETION_BEGINS / 2", seconds, time.monotonic() + seconds, time.time() + seconds)

    @property
    def left(self) -> float:
        """Seconds until it passes by either clock, 0 if it has."""
        return max(0.0, min(self.at - time.monotonic(), self.wall - time.time()))

    @property
    def passed(self) -> bool:
        """Whether it has passed by either clock."""
        return self.left <= 0


def _check_unchanged(planned: CheckpointInfo, now: CheckpointInfo) -> None:
    """Raises LeftAloneError unless a checkpoint is what the plan saw."""
    if (planned.save_id, planned.modified_at) != (now.save_id, now.modified_at) or (planned.etag or "").strip('"') != (
        now.etag or ""
    ).strip('"'):
        raise LeftAloneError("it was overwritten")
    if repr(sorted(planned.metrics.items())) != repr(sorted(now.metrics.items())):
        raise LeftAloneError("metrics were added to it")


def _same(etag: str | None, found: ListedObject | None) -> bool:
    return etag is not None and found is not None and found.etag.strip('"') == etag.strip('"')
