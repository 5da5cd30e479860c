"""Deletes one checkpoint. May be interrupted anywhere, and may meet readers, saves and other prunes.

1. Look: it is still what the plan saw. A joint save to its URL that shows nothing new is aborted, so that it does not
   commit what is deleted here.
2. Write the list of what will be deleted (`DeletionList`), with ETags.
3. Look again for new pins and readers' leases, and for commits of slow saves. Whoever writes one of these then looks
   for the list.
4. Delete what makes it a checkpoint, if its ETag is unchanged. From here on it is no checkpoint.
5. Delete the rest, and finally the list.

`leftovers` deletes what was never committed.
"""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import Directory, Removal, list_directory
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.checkpoint.lease import DELETION_BEGINS
from dcp_s3.checkpoint.look import Inspected, find_manifest, inspect, save_id_of
from dcp_s3.checkpoint.stored_metadata import check_metadata
from dcp_s3.format.control_files import DeletionList
from dcp_s3.format.layout import (
    CLAIM,
    CONTROL_PREFIX,
    DELETION_PREFIX,
    METADATA,
    classify,
    deletion_object,
    is_merged,
    metadata_object,
    new_nonce,
)
from dcp_s3.format.saved_entries import needed_objects
from dcp_s3.limit import UNLIMITED, Deadline, Limit
from dcp_s3.store import DeleteTarget, Store, Versioned, batches, same_etag
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

_ATTEMPT_SECONDS = 30.0
"""Seconds for which one attempt to delete a commit may hang."""

# Each request of 1000 keys counts as 1000 for S3, which takes 3500 a second.
_DELETES_AT_ONCE = 8

_TOO_SLOW = "S3 is too slow for its readers to be seen"

Look = Callable[[], None]
"""Called before each request of a deletion; raises if nothing more may be deleted."""


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


def end_joint_save(store: Store, url: CheckpointURL) -> str | None:
    """Commit what a joint save has decided, and abort what it has not. Returns the claim's ETag, None without one."""
    from dcp_s3.coordination.processes import settle_saves  # imports torch, which most prunes do without

    return settle_saves(store, url, why="nothing was written for longer than the grace period of a prune")


class Deleter:
    """Deletes committed checkpoints, and finishes deletions that were cut off.

    Raises:
        SettingsError: ``all_versions``, and the store has none.
    """

    def __init__(self, store: Store, *, all_versions: bool, force: bool = False, dry_run: bool = False) -> None:
        if all_versions and not isinstance(store, Versioned):
            raise errors.SettingsError(f"all_versions: {store.name} is a store that keeps no versions")
        self.store = store
        self.all_versions = all_versions  # of a versioned bucket, rather than add delete markers
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
        found = inspect(self.store, url)
        if found is None or not found.info.committed:
            raise LeftAloneError("it is gone, or no longer committed")
        _check_unchanged(planned, found.info)
        needed, copies = self._needed(url, found)
        directory = list_directory(self.store, url)
        self.check_protection(directory)
        removal = directory.removal(needed, since=since, copies=copies)
        self.check_not_saving(removal)
        commit = directory.commits.get(None)
        if planned.etag is not None and (commit is None or not commit.has_etag(planned.etag)):
            raise LeftAloneError("it was overwritten")
        if not self.dry_run:
            self._delete(url, planned, self.settle_saves(url, removal), newest)
        return Deletion(url.name, removal.count, removal.size)

    def _delete(
        self, url: CheckpointURL, planned: CheckpointInfo, removal: Removal, newest: CheckpointURL | None
    ) -> None:
        listed = removal.to_list(planned.save_id, all_versions=self.all_versions)
        path = deletion_object(planned.deletion_id, new_nonce())
        deadline = _CommitDeadline.begin()
        try:
            self.write_list(url, path, listed)
            lists = self._look_again(url, planned, listed, newest)
            if deadline.passed:
                raise LeftAloneError(_TOO_SLOW)
        except (LeftAloneError, errors.StorageError):
            self.withdraw(url, [path])
            raise
        in_time = Limit(deadline=deadline, hang=_ATTEMPT_SECONDS)
        # From this somebody else would write the commit of a joint save once more, when it is gone.
        self.delete_all([DeleteTarget(url.key(each)) for each in listed.objects if is_merged(each)])
        for step in commit_steps(url, listed):
            try:
                changed = self.delete_all(step, limit=in_time)
            except errors.StorageError as error:
                self._give_up(url, path, listed, error)
                raise
            if changed:
                self.withdraw(url, [path])
                raise LeftAloneError("it was overwritten")
        self.delete_rest(url, listed, {path, *lists})

    def _give_up(self, url: CheckpointURL, path: str, listed: DeletionList, error: errors.StorageError) -> None:
        """Withdraw the list if S3 certainly has not deleted a commit and never will: no reader should wait in vain."""
        late = isinstance(error, errors.DeadlineExceededError)
        if isinstance(error, errors.TransferError) or (late and error.attempts):
            return  # S3 may still carry it out
        try:
            for commit, etag in listed.commits.items():
                if not same_etag(self.store.head(url.key(commit)).etag, etag):
                    return
        except errors.StorageError:
            return
        self.withdraw(url, [path])
        if late:
            raise LeftAloneError(_TOO_SLOW)

    def _look_again(
        self, url: CheckpointURL, planned: CheckpointInfo, listed: DeletionList, newest: CheckpointURL | None
    ) -> list[str]:
        """Look a last time before deleting. Returns the lists of other deletions of the same checkpoint."""
        commits = [] if newest is None else [newest.key(METADATA), newest.key(metadata_object(0))]
        if commits and not any(map(self.store.exists, commits)):
            raise LeftAloneError(f"{newest}, which was to stay as the newest, is gone")
        if planned.etag is not None:
            try:
                head = self.store.head(url.key(METADATA))
            except errors.ObjectNotFoundError:
                raise LeftAloneError("another prune deletes it") from None
            if not same_etag(head.etag, planned.etag):
                raise LeftAloneError("it was overwritten")
        directory = list_directory(self.store, url, CONTROL_PREFIX)
        self.check_protection(directory)
        if not self.force:
            metrics = directory.metrics
            if metrics is not None and not metrics.has_etag(listed.objects.get(metrics.path)):
                raise LeftAloneError("metrics were added to it")
            check_no_other_save(directory, listed.objects)
        return [each.path for each in directory.lists_of(planned.deletion_id)]

    def _needed(self, url: CheckpointURL, found: Inspected) -> tuple[set[str], set[str]]:
        """Relative paths of the data objects and manifests that a checkpoint's metadata names, and of the plain copies
        of its attachments."""
        if found.manifest is not None:
            return found.manifest.paths, set(found.manifest.attachments)
        needed: set[str] = set()
        copies: set[str] = set()
        for rank in found.directory.committing:
            try:
                manifest = find_manifest(self.store, url, found.directory, rank)
                if manifest is not None:
                    needed |= manifest.paths
                    copies |= set(manifest.attachments)
                    continue
                metadata = check_metadata(self.store.get(url.key(metadata_object(rank))), url, rank)
            except errors.ObjectNotFoundError:
                raise LeftAloneError("another prune deletes it") from None
            except errors.CheckpointError as error:
                logger.warning("what %s consists of cannot be read, so that only old objects go: %s", url, error)
                continue
            needed |= set(needed_objects(metadata))
        return needed, copies

    # --- deletions that were cut off ------------------------------------------------------------

    def finish(self, url: CheckpointURL, deletion: str) -> Deletion:
        """Finish a deletion (its id) that was cut off: delete exactly what its lists name and is unchanged."""
        directory = list_directory(self.store, url)
        gone: set[str] = set()
        for found in directory.lists_of(deletion):
            path = found.path
            try:
                listed = DeletionList.from_json(self.store.get(url.key(path)).data)
            except errors.ObjectNotFoundError:
                continue  # another prune has finished it
            except ValueError as error:
                raise errors.CheckpointError(
                    f"the list of a deletion s3://{url.bucket}/{url.key(path)} cannot be read: {error}. "
                    "Remedy: delete it; what it names is then left over, and goes after the grace period",
                    url=str(url),
                ) from None
            if not _has_begun(directory, listed) or self._has_save(url, listed.save_id, directory):
                if not listed.commits:  # a list of leftovers, or of a save that was committed after all
                    given_up = found.modified_at < directory.now - DELETION_BEGINS
                    if given_up or not listed.objects.keys() & directory.objects.keys():
                        self.withdraw(url, [path])
                    continue
                raise LeftAloneError("a deletion was begun and given up; the checkpoint is still there")
            rest = still_there(directory, listed, written_at=found.modified_at)
            for step in commit_steps(url, rest):
                self.delete_all(step)
            # In a versioned bucket, an object that already has its delete marker may still have older versions.
            self.delete_rest(url, rest, [path], purged=listed)
            gone |= {*rest.commits, *rest.objects}
        return Deletion(url.name, len(gone), sum(directory.sizes[path] for path in gone))

    def withdraw_given_up(self, url: CheckpointURL, deletion: str) -> None:
        """Remove the lists of a deletion that was cut off before it began: the checkpoint is still there."""
        directory = list_directory(self.store, url, DELETION_PREFIX)
        old = [each for each in directory.lists_of(deletion) if each.modified_at < directory.now - DELETION_BEGINS]
        self.delete_all([DeleteTarget(url.key(each.path)) for each in old])

    def _has_save(self, url: CheckpointURL, save_id: str | None, directory: Directory) -> bool:
        """Whether the checkpoint at the URL is of that save. Its ``.metadata`` may have another ETag, if it was brought
        back from a copy."""
        if save_id is None or None not in directory.commits:
            return False
        try:
            return save_id_of(self.store.head(url.key(METADATA))) == save_id
        except errors.ObjectNotFoundError:
            return False

    # --- steps of each deletion -----------------------------------------------------------------

    def check_protection(self, directory: Directory) -> None:
        """Raises LeftAloneError if it is pinned, or a reader has a lease."""
        if not self.force and directory.protection is not None:
            raise LeftAloneError(directory.protection)

    def check_not_saving(self, removal: Removal) -> None:
        """Raises LeftAloneError if a save is in progress."""
        if removal.being_saved and not self.force:
            raise LeftAloneError(f"a save is in progress: {removal.being_saved} was written")

    def settle_saves(self, url: CheckpointURL, removal: Removal) -> Removal:
        """Abort a joint save that was begun before this listing and is not committed: from here on nothing commits what
        is listed. If it is decided already, it is committed."""
        claim = removal.objects.get(CLAIM)
        if claim is None:
            return removal
        etag = end_joint_save(self.store, url)
        return replace(removal, objects={**removal.objects, CLAIM: claim._replace(etag=etag or claim.etag)})

    def write_list(self, url: CheckpointURL, path: str, listed: DeletionList) -> None:
        """Write the list of what will be deleted."""
        self.store.put(url.key(path), listed.to_json(), content_type="application/json")

    def withdraw(self, url: CheckpointURL, paths: Iterable[str]) -> None:
        """Remove the lists of a deletion that was given up. A failure is a warning."""
        try:
            self.delete_all([DeleteTarget(url.key(path)) for path in paths])
        except errors.StorageError as error:
            logger.warning("a deletion of %s was given up, and its list stays until the next prune: %s", url, error)

    def delete_all(
        self, targets: Sequence[DeleteTarget], *, limit: Limit = UNLIMITED, look: Look | None = None
    ) -> list[str]:
        """Delete keys whose ETags are unchanged; ``limit`` bounds each request.

        Returns:
            Keys that were left alone because they have another ETag.
        """
        if look is not None:
            found: list[str] = []
            for batch in batches(targets):
                look()
                found += self._delete_batch(self.store, batch, limit)
            return found
        changed = self.store.map(lambda store, batch: self._delete_batch(store, batch, limit), batches(targets))
        return [key for each in changed for key in each]

    def delete_rest(
        self,
        url: CheckpointURL,
        listed: DeletionList,
        lists: Iterable[str],
        *,
        purged: DeletionList | None = None,
        look: Look | None = None,
    ) -> None:
        """Delete the listed objects, and last the lists (relative paths), once the commit is gone.

        ``purged``: objects whose old versions are deleted, if there are more than in ``listed``.
        """
        self.delete_all(other_targets(url, listed), look=look)
        if listed.all_versions or self.all_versions:
            self._purge(url, purged or listed)
        self.delete_all([DeleteTarget(url.key(path)) for path in lists])
        if listed.all_versions or self.all_versions:
            self._purge(url, DeletionList(None, {}, dict.fromkeys(lists, "")))

    def _purge(self, url: CheckpointURL, listed: DeletionList) -> None:
        """Delete all versions of the listed objects, except a current one, which was written since."""
        commits, keys = ({url.key(path) for path in paths} for paths in (listed.commits, listed.objects))
        if (commits or keys) and isinstance(self.store, Versioned):
            self.store.purge(url.key(""), commits, keys)

    def _delete_batch(self, store: Store, batch: Sequence[DeleteTarget], limit: Limit) -> Sequence[str]:
        with self._slots:
            return store.within(replace(limit, cancel=store.limit.cancel, progress=store.limit.progress)).delete(batch)


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
        return cls("DELETION_BEGINS / 2", seconds, time.monotonic() + seconds, time.time() + seconds)

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

    def is_of_one_save(path: str) -> bool:
        kind = classify(path)
        return bool(kind.nonce or kind.save_id)  # the claim has neither

    return [
        DeleteTarget(url.key(path), "" if is_of_one_save(path) else etag)
        for path, etag in sorted(listed.objects.items())
    ]


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


def _has_begun(directory: Directory, listed: DeletionList) -> bool:
    """Whether a deletion whose list was found has already removed the commit."""
    if not listed.commits:  # it was never committed
        return not directory.commits
    there = directory.unchanged(listed.commits)
    return METADATA not in there if METADATA in listed.commits else len(there) < len(listed.commits)


def still_there(directory: Directory, listed: DeletionList, *, written_at: float) -> DeletionList:
    """The part of a list that is still there and unchanged. ``written_at`` is the list's time, in seconds since the
    epoch on the clock of S3. An object younger than the list is another save's, even if its bytes are the same."""
    return replace(
        listed,
        commits=directory.unchanged(listed.commits, until=written_at),
        objects=directory.unchanged(listed.objects, until=written_at),
    )
