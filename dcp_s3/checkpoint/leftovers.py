"""Deletes what failed saves left behind, while other saves may be about to commit.

As with a checkpoint (`deletion.py`), it first writes the list of what it deletes: a slow save that is about to commit
sees it. It looks at S3 again before each request, for saves that have committed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace

from dcp_s3 import errors
from dcp_s3.checkpoint.deleter import Deleter, Deletion, LeftAloneError, commit_steps, other_targets
from dcp_s3.checkpoint.directory import Directory
from dcp_s3.checkpoint.info import LeftoverObject
from dcp_s3.checkpoint.look import inspect, look_deeper
from dcp_s3.format.control_files import DeletionList, Manifest
from dcp_s3.format.layout import DELETION_PREFIX, deletion_id, deletion_object, new_nonce
from dcp_s3.url import CheckpointURL


class LeftoverRemover:
    """Deletes directories of saves that were never committed, and leftovers beside a committed checkpoint.

    Args:
        deleter: deleter of the root.
    """

    def __init__(self, deleter: Deleter) -> None:
        self._deleter = deleter

    async def delete_uncommitted(self, url: CheckpointURL, *, since: float) -> Deletion:
        """Delete what a save that was never committed left.

        Args:
            url: URL of the directory.
            since: seconds since the epoch on the clock of S3. Nothing in the directory may have been written later.

        Raises:
            LeftAloneError: it was committed meanwhile, is being saved, or is protected.
            StorageError, CheckpointError
        """
        found = await inspect(self._deleter.store, url)
        if found is None:
            return Deletion(url.name, 0, 0)  # somebody else was faster
        if found.info.committed:
            raise LeftAloneError("it was committed")
        if found.info.damage is not None and not self._deleter.force:
            raise LeftAloneError(found.info.damage)
        directory = await self._deleter.list_directory(url)
        self._deleter.check_protection(directory)
        if None in directory.commits:
            raise LeftAloneError("it was committed")
        removal = directory.removal_of_uncommitted(since=since, copies=await self._copies(url, directory))
        if removal.being_saved and not self._deleter.force:
            raise LeftAloneError(f"a save is in progress: {removal.being_saved} was written")
        if self._deleter.dry_run:
            return Deletion(url.name, removal.count, removal.size)
        everything = removal.to_list(None, all_versions=self._deleter.all_versions)
        seen = {**everything.commits, **everything.objects}
        known = set(everything.commits)

        async def look() -> None:
            if not self._deleter.force:
                await self._look_for_commits(url, seen, known)

        # It is no checkpoint, whatever goes first, and the list must not make a part of it look like one.
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
        return Deletion(url.name, removal.count, removal.size)

    async def _copies(self, url: CheckpointURL, directory: Directory) -> set[str]:
        """Relative paths of plain copies of attachments that saves without a commit may have left."""
        copies: set[str] = set()
        for found in directory.all_manifests:
            with contextlib.suppress(errors.ObjectNotFoundError, ValueError):
                copies |= set(Manifest.from_json((await self._deleter.store.get(url.key(found.path))).data).attachments)
        return copies

    async def delete_leftovers(
        self, url: CheckpointURL, planned: Sequence[LeftoverObject], *, since: float
    ) -> Deletion:
        """Delete objects of other saves in the directory of a committed checkpoint.

        Raises:
            LeftAloneError: a save is in progress.
            StorageError
        """
        now = (await self._deleter.list_directory(url, DELETION_PREFIX)).now
        found = await inspect(self._deleter.store, url)
        unneeded = (
            (await look_deeper(self._deleter.store, url, found, now))[1] if found and found.info.committed else []
        )
        if any(each.modified_at > since and not each.is_lease for each in unneeded):
            raise LeftAloneError("a save is in progress: an object was written")
        gone = [each for each in planned if each in unneeded]
        if not gone or found is None:
            return Deletion(url.name, 0, 0)
        before, skip = found.info, len(url.key(""))
        seen = {each.path: each.etag for each in found.directory.other_saves({})}

        async def look() -> None:
            now = await inspect(self._deleter.store, url)
            if now is None or (now.info.save_id, now.info.etag) != (before.save_id, before.etag):
                raise LeftAloneError("it was overwritten")
            if others := now.directory.other_saves(seen):
                raise LeftAloneError(f"a save is in progress: it has written {others[0].path}")

        etags = {each.key[skip:]: each.etag for each in gone}
        listed = DeletionList(None, {}, dict.fromkeys(etags, ""), self._deleter.all_versions)
        path = await self._announce(url, listed, look)
        try:
            await self._deleter.delete_all(other_targets(url, replace(listed, objects=etags)), look=look)
        except LeftAloneError:
            await self._deleter.withdraw(url, [path])
            raise
        left = {each.key[skip:] for each in unneeded} - set(listed.objects)
        lists = await self._spent_lists(url, left)
        await self._deleter.delete_rest(url, replace(listed, objects={}), {path, *lists}, purged=listed)
        return Deletion(url.name, len(gone), sum(each.size for each in gone))

    async def _announce(self, url: CheckpointURL, listed: DeletionList, look: Callable[[], Awaitable[None]]) -> str:
        """Write the list for saves that are about to commit, and look for those that have. Returns the list's path."""
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
            url: URL of the checkpoint.
            seen: ETags of the listed objects, by relative path.
            known: relative paths of the listed commits that may still be there.
        """
        directory = await self._deleter.list_directory(url, ".", "__")
        self._deleter.check_protection(directory)
        for each in directory.commits.values():
            if not (each.path in known and each.has_etag(seen.get(each.path))):
                raise LeftAloneError("it was committed")
        if others := directory.other_saves(seen):
            raise LeftAloneError(f"a save is in progress: it has written {others[0].path}")

    async def _spent_lists(self, url: CheckpointURL, left: Collection[str]) -> list[str]:
        """Lists, from prunes that were cut off, whose leftovers are all gone."""
        spent = []
        for path in (await self._deleter.list_directory(url, DELETION_PREFIX)).deletions:
            try:
                listed = DeletionList.from_json((await self._deleter.store.get(url.key(path))).data)
            except (errors.ObjectNotFoundError, ValueError):
                continue
            if not listed.commits and not listed.objects.keys() & left:
                spent.append(path)
        return spent
