"""Deletes one checkpoint, or leftovers. Safe against interruption anywhere, readers, saves and other prunes.

1. Look: it is still what the plan saw. A joint save to its URL that shows nothing new is aborted, so that it does not
   commit what is deleted here.
2. Write the list of what will be deleted (`DeletionList`), with ETags.
3. Look again for new pins and readers' leases, and for commits of slow saves. Whoever writes one of these then looks
   for the list.
4. Delete what makes it a checkpoint, if its ETag is unchanged. From here on it is no checkpoint.
5. Delete the rest, and finally the list.

What was never committed, and leftovers beside a checkpoint, go in the same way, with a look before each request: other
saves may be about to commit. A deletion that was cut off is finished by the next prune: exactly what its list names.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import check_metadata
from dcp_s3.checkpoint.directory import Directory, DirectoryEntry, list_directory
from dcp_s3.checkpoint.info import CheckpointInfo, Deletion, LeftoverObject
from dcp_s3.checkpoint.lease import DELETION_BEGINS
from dcp_s3.checkpoint.look import Inspected, inspect
from dcp_s3.format.control_files import DeletionList
from dcp_s3.format.layout import (
    CLAIM,
    DELETION_PREFIX,
    METADATA,
    SAVE_ID_KEY,
    What,
    classify,
    deletion_id,
    deletion_object,
    is_merged,
    metadata_object,
    new_nonce,
)
from dcp_s3.format.saved_entries import needed_objects
from dcp_s3.limit import Deadline, Limit
from dcp_s3.process import torch_imported_alone
from dcp_s3.store import DeleteTarget, Store, batches, same_etag
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

_ATTEMPT_SECONDS = 30.0
"""Seconds for which one attempt to delete a commit may hang."""

# Each request of 1000 keys counts as 1000 for S3, which takes 3500 a second.
_DELETES_AT_ONCE = 8


class LeftAloneError(errors.DcpS3Error):
    """Something was not deleted because it is not what the plan saw, or is protected."""


@dataclass(frozen=True)
class _CommitDeadline(Deadline):
    """When a deletion's commits must be gone, so that readers may rely on its list. Uses two clocks, because one
    stops while a host sleeps."""

    wall: float = 0.0
    """When the deadline passes, seconds since the epoch."""

    @property
    def left(self) -> float:
        return max(0.0, min(self.at - time.monotonic(), self.wall - time.time()))

    @property
    def passed(self) -> bool:
        return self.left <= 0


def end_joint_save(store: Store, url: CheckpointURL) -> str | None:
    """Commit what a joint save has decided, and abort what it has not. Returns the claim's ETag, None without one."""
    with torch_imported_alone():
        from dcp_s3.coordination.processes import settle_saves  # imports torch, which most prunes do without

    return settle_saves(store, url, why="nothing was written for longer than the grace period of a prune")


@dataclass(frozen=True)
class Deleter:
    """Deletes checkpoints and leftovers, one per call."""

    store: Store
    force: bool = False
    """Whether to ignore pins, leases and saves in progress."""
    dry_run: bool = False
    """Whether to look only."""
    slots: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_DELETES_AT_ONCE))

    # --- a committed checkpoint -----------------------------------------------------------------

    def delete_committed(
        self, url: CheckpointURL, planned: CheckpointInfo, *, since: float, newest: CheckpointURL | None = None
    ) -> Deletion:
        """Delete a committed checkpoint.

        Args:
            since: seconds since the epoch on the clock of S3. Objects that were written later and are not the
                checkpoint's belong to a save in progress.
            newest: URL of the checkpoint that must exist for this one to be deleted.

        Raises:
            LeftAloneError: it changed, it is protected, or a save to its URL is in progress.
            StorageError, CheckpointError
        """
        found = inspect(self.store, url, whole=True)
        if found is None or not found.info.committed:
            raise LeftAloneError("it is gone, or no longer committed")
        now = found.info
        if (planned.save_id, planned.modified_at) != (now.save_id, now.modified_at) or not same_etag(
            planned.etag, now.etag
        ):
            raise LeftAloneError("it was overwritten")
        if repr(sorted(planned.metrics.items())) != repr(sorted(now.metrics.items())):
            raise LeftAloneError("metrics were added to it")
        removal, listed = self._remove(url, found.directory, self._needed(url, found), planned.save_id, since)
        if listed is None:
            return Deletion.of(url.name, removal)

        path, seconds = deletion_object(planned.deletion_id, new_nonce()), DELETION_BEGINS / 2
        deadline = _CommitDeadline("DELETION_BEGINS / 2", seconds, time.monotonic() + seconds, time.time() + seconds)
        try:
            self.store.put(url.key(path), listed.to_json())
            lists = {path, *self._look_again(url, planned, listed, newest)}  # with those of attempts that were cut off
            if deadline.left <= 0:
                raise LeftAloneError("S3 is too slow for its readers to be seen")
        except (LeftAloneError, errors.StorageError):
            self._withdraw(url, path)
            raise
        # From this somebody else would write the commit of a joint save once more, when it is gone.
        if merged := [each for each in listed.objects if is_merged(each)]:
            self.delete_all([DeleteTarget(url.key(each)) for each in merged])
        for step in _commit_steps(url, listed):
            if self.delete_all(step, limit=Limit(deadline=deadline, hang=_ATTEMPT_SECONDS)):
                self._withdraw(url, path)
                raise LeftAloneError("it was overwritten")
        self.delete_all(_other_targets(url, listed))
        self.delete_all([DeleteTarget(url.key(each)) for each in lists])
        return Deletion.of(url.name, removal)

    def _needed(self, url: CheckpointURL, found: Inspected) -> set[str]:
        """Relative paths of the data objects and manifests that a checkpoint's metadata names, and of the copies that
        earlier versions made of its attachments."""
        needed: set[str] = set()
        for rank in found.directory.committing:
            if manifest := found.manifests.get(rank):
                needed |= manifest.paths | set(manifest.attachments)
                continue
            try:
                metadata = check_metadata(self.store.get(url.key(metadata_object(rank))), url, rank)
                needed |= set(needed_objects(metadata))
            except errors.ObjectNotFoundError:
                raise LeftAloneError("another prune deletes it") from None
            except errors.CheckpointError as error:
                logger.warning("what %s consists of cannot be read, so that only old objects go: %s", url, error)
        return needed

    def _look_again(
        self, url: CheckpointURL, planned: CheckpointInfo, listed: DeletionList, newest: CheckpointURL | None
    ) -> list[str]:
        """Look a last time before deleting. Returns the lists of other deletions of the same checkpoint."""
        commits = [] if newest is None else [newest.key(METADATA), newest.key(metadata_object(0))]
        if commits and not any(map(self.store.exists, commits)):
            raise LeftAloneError(f"{newest}, which was to stay as the newest, is gone")
        directory = list_directory(self.store, url, ".")
        commit, metrics = directory.commits.get(None), directory.metrics
        if planned.etag is not None and commit is None:
            raise LeftAloneError("another prune deletes it")
        if planned.etag is not None and commit is not None and not commit.has_etag(planned.etag):
            raise LeftAloneError("it was overwritten")
        if not self.force:
            if metrics is not None and not metrics.has_etag(listed.objects.get(metrics.path)):
                raise LeftAloneError("metrics were added to it")
            _check(directory, listed.objects)
        return [each.path for each in directory.lists_of(planned.deletion_id)]

    # --- what is no checkpoint ------------------------------------------------------------------

    def delete_uncommitted(self, url: CheckpointURL, *, since: float) -> Deletion:
        """Delete what a save that was never committed left, if nothing in the directory was written after ``since``.
        Arguments and errors: `delete_committed`."""
        found = inspect(self.store, url, whole=True)
        if found is None:
            return Deletion(url.name, 0, 0)  # somebody else was faster
        if found.info.committed or None in found.directory.commits:
            raise LeftAloneError("it was committed")
        if found.info.damage is not None and not self.force:
            raise LeftAloneError(found.info.damage)
        removal, listed = self._remove(url, found.directory, None, None, since)
        if listed is None:
            return Deletion.of(url.name, removal)
        seen, there = {**listed.commits, **listed.objects}, dict(listed.commits)

        def look() -> None:
            if self.force:
                return
            directory = list_directory(self.store, url, ".", "__")
            if not all(each.has_etag(there.get(each.path)) for each in directory.commits.values()):
                raise LeftAloneError("it was committed")
            _check(directory, seen)

        # Whatever goes first, the list must not make a part of it look like a checkpoint.
        self._delete_watched(url, listed, DeletionList(None, {}, listed.objects), look, there)
        return Deletion.of(url.name, removal)

    def delete_leftovers(self, url: CheckpointURL, planned: Sequence[LeftoverObject], *, since: float) -> Deletion:
        """Delete objects of other saves in the directory of a committed checkpoint."""
        found = inspect(self.store, url, whole=True)
        unneeded = found.leftovers if found else ()
        if any(each.modified_at > since and not each.is_lease for each in unneeded):
            raise LeftAloneError("a save is in progress: an object was written")
        gone = [each for each in planned if each in unneeded]
        if not gone or found is None:
            return Deletion(url.name, 0, 0)
        before, skip = found.info, len(url.key(""))
        # What is deleted was listed before this: nothing commits it after.
        claim = end_joint_save(self.store, url)
        seen = {each.path: each.etag for each in found.directory.other_saves({})} | ({CLAIM: claim} if claim else {})

        def look() -> None:
            now = inspect(self.store, url)
            if now is None or (now.info.save_id, now.info.etag) != (before.save_id, before.etag):
                raise LeftAloneError("it was overwritten")
            if others := now.directory.other_saves(seen):
                raise LeftAloneError(f"a save is in progress: it has written {others[0].path}")

        etags = {each.key[skip:]: each.etag for each in gone}
        etags |= {CLAIM: claim or ""} if CLAIM in etags else {}
        # Without ETags: it is beside a checkpoint, so that nobody may finish this without a look.
        written = DeletionList(None, {}, dict.fromkeys(etags, ""))
        self._delete_watched(url, DeletionList(None, {}, etags), written, look, {})
        return Deletion.of(url.name, gone)

    def _delete_watched(
        self,
        url: CheckpointURL,
        listed: DeletionList,
        written: DeletionList,
        look: Callable[[], None],
        there: dict[str, str],
    ) -> None:
        """Delete what is no checkpoint. Looks before each request. ``there``: the commits that are not deleted yet."""
        path = deletion_object(deletion_id(None, new_nonce()), new_nonce())
        begun = False
        try:
            self.store.put(url.key(path), written.to_json())
            look()
            begun = True
            for step in _commit_steps(url, listed):
                self.delete_all(step, look=look)
            there.clear()
            self.delete_all(_other_targets(url, listed), look=look)
        except (LeftAloneError, errors.StorageError) as error:
            if isinstance(error, LeftAloneError) or not begun:
                self._withdraw(url, path)
            raise
        self.delete_all([DeleteTarget(url.key(path))])

    # --- deletions that were cut off ------------------------------------------------------------

    def finish(self, url: CheckpointURL, deletion: str) -> Deletion:
        """Finish a deletion (its id) that was cut off: delete exactly what its lists name and is unchanged."""
        directory = list_directory(self.store, url)
        gone: set[str] = set()
        for found in directory.lists_of(deletion):
            try:
                listed = DeletionList.from_json(self.store.get(url.key(found.path)).data)
            except errors.ObjectNotFoundError:
                continue  # another prune has finished it
            except ValueError as error:
                raise errors.CheckpointError(
                    f"the list of a deletion s3://{url.bucket}/{url.key(found.path)} cannot be read: {error}. "
                    "Remedy: delete it; what it names is then left over, and goes after the grace period",
                    url=str(url),
                ) from None
            if not self._has_begun(url, directory, listed):
                if listed.commits:
                    raise LeftAloneError("a deletion was begun and given up; the checkpoint is still there")
                # Of leftovers, or of a save that was committed after all.
                given_up = found.modified_at < directory.now - DELETION_BEGINS
                if given_up or not listed.objects.keys() & directory.objects.keys():
                    self._withdraw(url, found.path)
                continue
            # An object younger than the list is another save's, even if its bytes are the same.
            commits, objects = (
                directory.unchanged(each, until=found.modified_at) for each in (listed.commits, listed.objects)
            )
            rest = replace(listed, commits=commits, objects=objects)
            for step in _commit_steps(url, rest):
                self.delete_all(step)
            self.delete_all(_other_targets(url, rest))
            self.delete_all([DeleteTarget(url.key(found.path))])
            gone |= {*commits, *objects}
        return Deletion.of(url.name, [directory.objects[path] for path in gone])

    def _has_begun(self, url: CheckpointURL, directory: Directory, listed: DeletionList) -> bool:
        """Whether a deletion whose list was found has already removed the commit, and it did not come back."""
        there = directory.unchanged(listed.commits)
        if not listed.commits:  # it was never committed
            begun = not directory.commits
        elif METADATA in listed.commits:
            begun = METADATA not in there
        else:
            begun = len(there) < len(listed.commits)
        if not begun or listed.save_id is None or None not in directory.commits:
            return begun
        try:  # brought back from a copy, it has another ETag
            return self.store.head(url.key(METADATA)).metadata.get(SAVE_ID_KEY) != listed.save_id
        except errors.ObjectNotFoundError:
            return True

    def withdraw_given_up(self, url: CheckpointURL, deletion: str) -> None:
        """Remove the lists of a deletion that was cut off before it began: the checkpoint is still there."""
        directory = list_directory(self.store, url, DELETION_PREFIX)
        old = [each for each in directory.lists_of(deletion) if each.modified_at < directory.now - DELETION_BEGINS]
        self.delete_all([DeleteTarget(url.key(each.path)) for each in old])

    # --- steps of each deletion -----------------------------------------------------------------

    def _remove(
        self, url: CheckpointURL, directory: Directory, needed: set[str] | None, save_id: str | None, since: float
    ) -> tuple[list[DirectoryEntry], DeletionList | None]:
        """What `Directory.removal` finds, and the list of it; none for a dry run. Raises LeftAloneError if it may not
        go. A joint save that is not committed is aborted: from here on nothing commits what is listed."""
        removal, being_saved = directory.removal(needed, since=since)
        why = directory.protection or (being_saved and f"a save is in progress: {being_saved} was written")
        if why and not self.force:
            raise LeftAloneError(why)
        if self.dry_run:
            return [*removal.values()], None
        commits: dict[str, str] = {}
        objects: dict[str, str] = {}
        for path, found in removal.items():
            (commits if found.kind.what is What.COMMIT else objects)[path] = found.etag
        if CLAIM in objects:
            objects[CLAIM] = end_joint_save(self.store, url) or objects[CLAIM]
        return [*removal.values()], DeletionList(save_id, commits, objects)

    def _withdraw(self, url: CheckpointURL, path: str) -> None:
        """Remove the list of a deletion that was given up. A failure is a warning."""
        try:
            # What has stalled here is over for good in this store's limit.
            self.store.within(self.store.limit.for_cleanup()).delete([url.key(path)])
        except errors.StorageError as error:
            logger.warning("a deletion of %s was given up, and its list stays until the next prune: %s", url, error)

    def delete_all(
        self, targets: Sequence[DeleteTarget], *, limit: Limit | None = None, look: Callable[[], None] | None = None
    ) -> list[str]:
        """Delete keys whose ETags are unchanged; ``limit`` bounds each request, ``look`` is called before it and raises
        if nothing more may be deleted.

        Returns:
            Keys that were left alone because they have another ETag.
        """

        def delete(store: Store, batch: Sequence[DeleteTarget]) -> Sequence[str]:
            if look is not None:
                look()
            if limit is not None:
                store = store.within(replace(limit, cancel=store.limit.cancel, progress=store.limit.progress))
            with self.slots:
                return store.delete(batch)

        runs = batches(targets)
        one_by_one = look is not None or len(runs) == 1
        changed = [delete(self.store, each) for each in runs] if one_by_one else self.store.map(delete, runs)
        return [key for each in changed for key in each]


def _commit_steps(url: CheckpointURL, listed: DeletionList) -> list[list[DeleteTarget]]:
    """The commits, which are deleted first, in steps: ``.metadata`` after those of single ranks, which it hides."""
    hidden = [DeleteTarget(url.key(path), etag) for path, etag in listed.commits.items() if path != METADATA]
    metadata = [DeleteTarget(url.key(METADATA), listed.commits[METADATA])] if METADATA in listed.commits else []
    return [step for step in (hidden, metadata) if step]


def _other_targets(url: CheckpointURL, listed: DeletionList) -> list[DeleteTarget]:
    """The objects to delete after the commits. Names that no other save uses need no condition, and get none."""
    targets = []
    for path, etag in sorted(listed.objects.items()):
        kind = classify(path)
        targets.append(DeleteTarget(url.key(path), "" if kind.nonce or kind.save_id else etag))  # the claim has neither
    return targets


def _check(directory: Directory, seen: Mapping[str, str]) -> None:
    """Raises LeftAloneError if it is protected, or a save in progress has written since a listing with these ETags by
    relative path."""
    if directory.protection is not None:
        raise LeftAloneError(directory.protection)
    if others := directory.other_saves(seen):
        raise LeftAloneError(f"a save is in progress: it has written {others[0].path}")
