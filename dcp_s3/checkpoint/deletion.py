"""Deletes one checkpoint. May be interrupted anywhere, and may meet readers, saves and other prunes.

1. Look: it is still what the plan saw. A joint save to its URL that shows nothing new is aborted, so that it does not
   commit what is deleted here.
2. Write the list of what will be deleted (`DeletionList`), with ETags.
3. Look again for new pins and readers' leases, and for commits of slow saves. Whoever writes one of these then looks
   for the list.
4. Delete what makes it a checkpoint, if its ETag is unchanged. From here on it is no checkpoint.
5. Delete the rest, and finally the list.

`leftovers` deletes what was never committed, and finishes what was cut off.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import Deletion, Directory, Removal, list_directory
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.checkpoint.lease import DELETION_BEGINS
from dcp_s3.checkpoint.look import Inspected, inspect
from dcp_s3.checkpoint.stored_metadata import check_metadata
from dcp_s3.format.control_files import DeletionList
from dcp_s3.format.layout import (
    CLAIM,
    METADATA,
    classify,
    deletion_object,
    is_merged,
    metadata_object,
    new_nonce,
)
from dcp_s3.format.saved_entries import needed_objects
from dcp_s3.limit import UNLIMITED, Deadline, Limit
from dcp_s3.process import torch_imported_alone
from dcp_s3.store import DeleteTarget, Store, batches
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

_ATTEMPT_SECONDS = 30.0
"""Seconds for which one attempt to delete a commit may hang."""

# Each request of 1000 keys counts as 1000 for S3, which takes 3500 a second.
_DELETES_AT_ONCE = 8

Look = Callable[[], None]
"""Called before each request of a deletion; raises if nothing more may be deleted."""


class LeftAloneError(errors.DcpS3Error):
    """Something was not deleted because it is not what the plan saw, or is protected."""


def end_joint_save(store: Store, url: CheckpointURL) -> str | None:
    """Commit what a joint save has decided, and abort what it has not. Returns the claim's ETag, None without one."""
    with torch_imported_alone():
        from dcp_s3.coordination.processes import settle_saves  # imports torch, which most prunes do without

    return settle_saves(store, url, why="nothing was written for longer than the grace period of a prune")


class Deleter:
    """Deletes committed checkpoints; has the steps of every deletion."""

    def __init__(self, store: Store, *, force: bool = False, dry_run: bool = False) -> None:
        self.store = store
        self.force = force  # ignore pins, leases and saves in progress
        self.dry_run = dry_run
        self._slots = threading.Semaphore(_DELETES_AT_ONCE)

    def on(self, store: Store) -> Deleter:
        """The same with its requests on ``store``."""
        other = copy.copy(self)
        other.store = store
        return other

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
        _check_unchanged(planned, found.info)
        removal = found.directory.removal(self._needed(url, found), since=since)
        self.check(found.directory, removal)
        if not self.dry_run:
            self._delete(url, planned, self.settle_saves(url, removal), newest)
        return removal.as_deletion(url.name)

    def _delete(
        self, url: CheckpointURL, planned: CheckpointInfo, removal: Removal, newest: CheckpointURL | None
    ) -> None:
        listed = removal.to_list(planned.save_id)
        path = deletion_object(planned.deletion_id, new_nonce())
        deadline = _CommitDeadline.begin()
        lists = [path]  # with those of attempts that were cut off

        def look() -> None:
            lists.extend(self._look_again(url, planned, listed, newest, deadline))

        self.announce(url, path, listed, look)
        in_time = Limit(deadline=deadline, hang=_ATTEMPT_SECONDS)
        # From this somebody else would write the commit of a joint save once more, when it is gone.
        self.delete_all([DeleteTarget(url.key(each)) for each in listed.objects if is_merged(each)])
        for step in commit_steps(url, listed):
            if self.delete_all(step, limit=in_time):
                self.withdraw(url, path)
                raise LeftAloneError("it was overwritten")
        self.delete_rest(url, listed, lists)

    def _look_again(
        self,
        url: CheckpointURL,
        planned: CheckpointInfo,
        listed: DeletionList,
        newest: CheckpointURL | None,
        deadline: Deadline,
    ) -> list[str]:
        """Look a last time before deleting. Returns the lists of other deletions of the same checkpoint."""
        commits = [] if newest is None else [newest.key(METADATA), newest.key(metadata_object(0))]
        if commits and not any(map(self.store.exists, commits)):
            raise LeftAloneError(f"{newest}, which was to stay as the newest, is gone")
        directory = list_directory(self.store, url, ".")
        if planned.etag is not None:
            commit = directory.commits.get(None)
            if commit is None:
                raise LeftAloneError("another prune deletes it")
            if not commit.has_etag(planned.etag):
                raise LeftAloneError("it was overwritten")
        self.check(directory)
        if not self.force:
            metrics = directory.metrics
            if metrics is not None and not metrics.has_etag(listed.objects.get(metrics.path)):
                raise LeftAloneError("metrics were added to it")
            check_no_other_save(directory, listed.objects)
        if deadline.passed:
            raise LeftAloneError("S3 is too slow for its readers to be seen")
        return [each.path for each in directory.lists_of(planned.deletion_id)]

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

    # --- steps of each deletion -----------------------------------------------------------------

    def check(self, directory: Directory, removal: Removal | None = None) -> None:
        """Raises LeftAloneError if it is pinned, a reader has a lease, or a save is in progress."""
        if self.force:
            return
        if directory.protection is not None:
            raise LeftAloneError(directory.protection)
        if removal is not None and removal.being_saved:
            raise LeftAloneError(f"a save is in progress: {removal.being_saved} was written")

    def settle_saves(self, url: CheckpointURL, removal: Removal) -> Removal:
        """Abort a joint save that was begun before this listing and is not committed: from here on nothing commits what
        is listed. If it is decided already, it is committed."""
        claim = removal.objects.get(CLAIM)
        if claim is None:
            return removal
        etag = end_joint_save(self.store, url)
        return replace(removal, objects={**removal.objects, CLAIM: claim._replace(etag=etag or claim.etag)})

    def announce(self, url: CheckpointURL, path: str, listed: DeletionList, look: Look) -> None:
        """Write the list of what will be deleted, then ``look`` again; if that fails, withdraw the list."""
        try:
            self.store.put(url.key(path), listed.to_json())
            look()
        except (LeftAloneError, errors.StorageError):
            self.withdraw(url, path)
            raise

    def withdraw(self, url: CheckpointURL, path: str) -> None:
        """Remove the list of a deletion that was given up. A failure is a warning."""
        try:
            # What has stalled here is over for good in this store's limit.
            store = self.store.within(self.store.limit.for_cleanup())
            self.on(store).delete_all([DeleteTarget(url.key(path))])
        except errors.StorageError as error:
            logger.warning("a deletion of %s was given up, and its list stays until the next prune: %s", url, error)

    def delete_all(
        self, targets: Sequence[DeleteTarget], *, limit: Limit = UNLIMITED, look: Look | None = None
    ) -> list[str]:
        """Delete keys whose ETags are unchanged; ``limit`` bounds each request.

        Returns:
            Keys that were left alone because they have another ETag.
        """
        runs = batches(targets)

        def delete(store: Store, batch: Sequence[DeleteTarget]) -> Sequence[str]:
            if look is not None:
                look()
            with self._slots:
                return store.within(replace(limit, cancel=store.limit.cancel, progress=store.limit.progress)).delete(
                    batch
                )

        one_by_one = look is not None or len(runs) == 1
        changed = [delete(self.store, each) for each in runs] if one_by_one else self.store.map(delete, runs)
        return [key for each in changed for key in each]

    def delete_rest(self, url: CheckpointURL, listed: DeletionList, lists: Sequence[str]) -> None:
        """Delete the listed objects, and last the lists (relative paths), once the commit is gone."""
        self.delete_all(other_targets(url, listed))
        self.delete_all([DeleteTarget(url.key(path)) for path in dict.fromkeys(lists)])


@dataclass(frozen=True)
class _CommitDeadline(Deadline):
    """When a deletion's commits must be gone, so that readers may rely on its list. Uses two clocks, because one
    stops while a host sleeps."""

    wall: float = 0.0
    """When the deadline passes, seconds since the epoch."""

    @classmethod
    def begin(cls) -> _CommitDeadline:
        """The deadline of a list that is written now."""
        seconds = DELETION_BEGINS / 2
        return cls("", seconds, time.monotonic() + seconds, time.time() + seconds)

    @property
    def left(self) -> float:
        return max(0.0, min(self.at - time.monotonic(), self.wall - time.time()))

    @property
    def passed(self) -> bool:
        return self.left <= 0


def commit_steps(url: CheckpointURL, listed: DeletionList) -> list[list[DeleteTarget]]:
    """The commits, which are deleted first, in steps: ``.metadata`` after those of single ranks, which it hides."""
    targets = [DeleteTarget(url.key(path), etag) for path, etag in sorted(listed.commits.items())]
    hidden = [each for each in targets if each.key != url.key(METADATA)]
    return [step for step in (hidden, [each for each in targets if each not in hidden]) if step]


def other_targets(url: CheckpointURL, listed: DeletionList) -> list[DeleteTarget]:
    """The objects to delete after the commits. Names that no other save uses need no condition, and get none."""

    targets = []
    for path, etag in sorted(listed.objects.items()):
        kind = classify(path)
        targets.append(DeleteTarget(url.key(path), "" if kind.nonce or kind.save_id else etag))  # the claim has neither
    return targets


def check_no_other_save(directory: Directory, seen: Mapping[str, str]) -> None:
    """Raises LeftAloneError if a save in progress has written since a listing with these ETags by relative path."""
    if others := directory.other_saves(seen):
        raise LeftAloneError(f"a save is in progress: it has written {others[0].path}")


def _check_unchanged(planned: CheckpointInfo, now: CheckpointInfo) -> None:
    """Raises LeftAloneError unless a checkpoint is what the plan saw."""
    if (planned.save_id, planned.modified_at) != (now.save_id, now.modified_at) or (planned.etag or "").strip('"') != (
        now.etag or ""
    ).strip('"'):
        raise LeftAloneError("it was overwritten")
    if repr(sorted(planned.metrics.items())) != repr(sorted(now.metrics.items())):
        raise LeftAloneError("metrics were added to it")
