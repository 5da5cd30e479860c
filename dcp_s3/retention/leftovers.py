"""What saves that failed left behind, deleted while others may be about to commit.

As with a checkpoint (`deletion.py`), what goes is written down first, for saves that took long and are about to commit,
and S3 is looked at again before each request, for those that have.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace

from dcp_s3 import errors
from dcp_s3.format.deletion_list import DeletionList
from dcp_s3.format.layout import (
    CONTROL_PREFIX,
    DELETION_PREFIX,
    METADATA,
    PIN,
    deletion_id,
    deletion_object,
    new_nonce,
    parse_deletion_object,
    parse_lease_object,
    parse_manifest_object,
)
from dcp_s3.retention.belongings import (
    commit_steps,
    is_commit,
    same_etag,
    sort_belongings,
)
from dcp_s3.retention.deleter import Deleter, Deletion, LeftAloneError
from dcp_s3.retention.inspect import inspect
from dcp_s3.retention.plan import LeftoverObject
from dcp_s3.retention.scan import look_deeper
from dcp_s3.store import Target
from dcp_s3.url import CheckpointURL


class LeftoverRemover:
    """Deletes directories of saves that were never committed, and what lies beside a checkpoint that it does not need.

    Args:
        deleter: for its root.
    """

    def __init__(self, deleter: Deleter) -> None:
        self._deleter = deleter

    async def delete_uncommitted(self, url: CheckpointURL, *, since: float) -> Deletion:
        """Delete what a save that was never committed left.

        Args:
            url: of the directory.
            since: nothing in it may have been written later: seconds since the epoch on the clock of S3.

        Raises:
            LeftAloneError: it was committed meanwhile, is being saved, or is protected.
            StorageError, CheckpointError
        """
        found = await inspect(self._deleter.bucket, url)
        if found is None:
            return Deletion(url.name, 0, 0)  # somebody else was faster
        if found.info.committed:
            raise LeftAloneError("it was committed")
        if found.info.damage is not None and not self._deleter.force:
            raise LeftAloneError(found.info.damage)
        objects, now = await self._deleter.list_objects(url.key(""))
        self._deleter.check_marks(url, objects, now)
        belongings = sort_belongings(url, objects, (), since=since, now=now)
        if METADATA in belongings.commits:
            raise LeftAloneError("it was committed")
        young = [path for path, each in belongings.commits.items() if each.modified_at > since]
        if (belongings.being_saved or young) and not self._deleter.force:
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
        if self._deleter.dry_run:
            return Deletion(url.name, len(belongings.commits) + len(belongings.objects), belongings.size)
        everything = belongings.to_list(None, all_versions=self._deleter.all_versions)
        seen = {**everything.commits, **everything.objects}
        known = set(everything.commits)

        async def look() -> None:
            if not self._deleter.force:
                await self._look_for_commits(url, seen, known)

        # It is none, whatever goes first; and what is written down must not make a part of it look like one.
        listed = replace(everything, commits={}, objects=everything.objects)
        path = await self._announce(url, listed, look)
        try:
            for step in commit_steps(url, everything):
                await self._deleter.delete_all(step, look=look)
            known.clear()
            await self._deleter.delete_rest(url, listed, (), look=look)
        except LeftAloneError:
            await self._deleter.withdraw(url, [path])
            raise
        await self._deleter.delete_rest(url, replace(listed, objects={}), [path])
        return Deletion(url.name, len(belongings.commits) + len(belongings.objects), belongings.size)

    async def delete_leftovers(
        self, url: CheckpointURL, planned: Sequence[LeftoverObject], *, since: float
    ) -> Deletion:
        """Delete objects of other saves in the directory of a committed checkpoint.

        Raises:
            LeftAloneError: a save is in progress.
            StorageError
        """
        _, now = await self._deleter.list_objects(url.key(DELETION_PREFIX))
        found = await inspect(self._deleter.bucket, url)
        unneeded = (
            (await look_deeper(self._deleter.bucket, url, found, now))[1] if found and found.info.committed else []
        )
        if any(each.modified_at > since and not each.is_lease for each in unneeded):
            raise LeftAloneError("a save is in progress: an object was written")
        gone = [each for each in planned if each in unneeded]
        if not gone or found is None:
            return Deletion(url.name, 0, 0)
        before = found.info

        async def look() -> None:
            now = await inspect(self._deleter.bucket, url)
            if now is None or (now.info.save_id, now.info.etag) != (before.save_id, before.etag):
                raise LeftAloneError("it was overwritten")

        skip = len(url.key(""))
        listed = DeletionList(
            None, {}, dict.fromkeys((each.key[skip:] for each in gone), ""), self._deleter.all_versions
        )
        path = await self._announce(url, listed, look)
        try:
            await self._deleter.delete_all([Target(each.key) for each in gone], look=look)
        except LeftAloneError:
            await self._deleter.withdraw(url, [path])
            raise
        left = {each.key[skip:] for each in unneeded} - set(listed.objects)
        lists = await self._spent_lists(url, left)
        await self._deleter.delete_rest(url, replace(listed, objects={}), {path, *lists}, purged=listed)
        return Deletion(url.name, len(gone), sum(each.size for each in gone))

    async def _announce(self, url: CheckpointURL, listed: DeletionList, look: Callable[[], Awaitable[None]]) -> str:
        """Write down what goes, for saves that are about to commit, and look for those that have; the list's path."""
        path = deletion_object(deletion_id(None, new_nonce()), new_nonce())
        try:
            await self._deleter.write_list(url, path, listed)
            await look()
        except (LeftAloneError, errors.StorageError):
            await self._deleter.withdraw(url, [path])
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
        objects, now = await self._deleter.list_objects(url.key("."))
        self._deleter.check_marks(url, objects, now)
        for each in (*objects, *(await self._deleter.bucket.list(url.key("__"))).objects):
            path = each.key[skip:]
            if is_commit(path) and not (path in known and same_etag(seen.get(path), each)):
                raise LeftAloneError("it was committed")
            if parse_manifest_object(path) is not None and not same_etag(seen.get(path), each):
                raise LeftAloneError("a save is in progress: it has written its manifest")

    async def _spent_lists(self, url: CheckpointURL, left: Collection[str]) -> list[str]:
        """Lists of leftovers of which none is left, from prunes that were cut off."""
        spent = []
        for each in (await self._deleter.list_objects(url.key(DELETION_PREFIX)))[0]:
            try:
                listed = DeletionList.from_json((await self._deleter.bucket.get(each.key)).data)
            except (errors.ObjectNotFoundError, ValueError):
                continue
            if not listed.commits and not listed.objects.keys() & left:
                spent.append(each.key[len(url.key("")) :])
        return spent
