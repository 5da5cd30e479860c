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
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import check_metadata
from dcp_s3.checkpoint.directory import Directory, DirectoryEntry, list_directory
from dcp_s3.checkpoint.info import CheckpointInfo, Deletion, LeftoverObject
from dcp_s3.checkpoint.lease import DELETION_BEGINS
from dcp_s3.checkpoint.look import inspect
from dcp_s3.format.control_files import DeletionList
from dcp_s3.format.layout import (
    CLAIM,
    DELETION_PREFIX,
    METADATA,
    SAVE_ID_KEY,
    What,
    deletion_id,
    deletion_object,
    is_merged,
    metadata_object,
)
from dcp_s3.format.saved_entries import needed_objects
from dcp_s3.limit import Deadline, Limit
from dcp_s3.process import torch_imported_alone
from dcp_s3.store import BATCH, DeleteTarget, Store, same_etag
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

_ATTEMPT_SECONDS = 30.0
"""Seconds for which one attempt to delete a commit may hang."""

# Each request of 1000 keys counts as 1000 for S3, which takes 3500 a second.
_DELETES_AT_ONCE = 8

Look = Callable[[], Sequence[str] | None]
"""Raises LeftAloneError if nothing more may be deleted. May return the keys of lists of earlier attempts, which go with
this one's."""


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
        directory, now = found.directory, found.info
        if (planned.save_id, planned.modified_at) != (now.save_id, now.modified_at) or not same_etag(
            planned.etag, now.etag
        ):
            raise LeftAloneError("it was overwritten")
        if repr(sorted(planned.metrics.items())) != repr(sorted(now.metrics.items())):
            raise LeftAloneError("metrics were added to it")
        # What its metadata names, the manifests, and the copies that earlier versions made of attachments.
        needed: set[str] = set()
        for rank in directory.committing:
            if manifest := found.manifests.get(rank):
                needed |= {*manifest.attachments, *(entry.path for entry in manifest.objects)}
                if own := directory.manifests[rank].get(manifest.save_id):  # its name may say another id
                    needed.add(own.path)
                continue
            try:
                metadata = check_metadata(self.store.get(directory.commits[rank].key), url, rank)
                needed |= needed_objects(metadata).keys()
            except errors.ObjectNotFoundError:
                raise LeftAloneError("another prune deletes it") from None
            except errors.CheckpointError as error:
                logger.warning("what %s consists of cannot be read, so that only old objects go: %s", url, error)
        removal = self._remove(url, directory, needed, since)
        if not self.dry_run:
            until = (clock() + DELETION_BEGINS / 2 for clock in (time.monotonic, time.time))
            deadline = _CommitDeadline("DELETION_BEGINS / 2", DELETION_BEGINS / 2, *until)
            commits = {each.path: each.etag for each in removal if each.kind.what is What.COMMIT}
            objects = {each.path: each.etag for each in removal if each.kind.what is not What.COMMIT}
            listed = DeletionList(planned.save_id, commits, objects)
            self._delete_listed(
                url, planned.deletion_id, listed, removal,
                lambda: self._look_again(url, planned, objects, newest, deadline), deadline,
            )  # fmt: skip
        return Deletion.of(url.name, removal)

    def _look_again(
        self, url: CheckpointURL, planned: CheckpointInfo, objects: Mapping[str, str], newest: CheckpointURL | None,
        deadline: Deadline,
    ) -> list[str]:  # fmt: skip
        """Look a last time before deleting. Returns the keys of the lists of attempts that were cut off."""
        if newest is not None and not any(self.store.exists(newest.key(metadata_object(rank))) for rank in (None, 0)):
            raise LeftAloneError(f"{newest}, which was to stay as the newest, is gone")
        directory = list_directory(self.store, url, ".")
        commit, metrics = directory.commits.get(None), directory.metrics
        if planned.etag is not None and commit is None:
            raise LeftAloneError("another prune deletes it")
        if planned.etag is not None and commit is not None and not commit.has_etag(planned.etag):
            raise LeftAloneError("it was overwritten")
        if not self.force:
            if metrics is not None and not metrics.has_etag(objects.get(metrics.path)):
                raise LeftAloneError("metrics were added to it")
            if why := directory.protection(objects):
                raise LeftAloneError(why)
        if deadline.passed:
            raise LeftAloneError("S3 is too slow for its readers to be seen")
        return [each.key for each in directory.deletions.get(planned.deletion_id, ())]

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
        removal = self._remove(url, found.directory, None, since)
        seen = {each.path: each.etag for each in removal}

        def look() -> None:
            if self.force:
                return
            directory = list_directory(self.store, url, ".", "__")
            if directory.commits:  # there were none: commits of some ranks only are damage
                raise LeftAloneError("it was committed")
            if why := directory.protection(seen):
                raise LeftAloneError(why)

        if not self.dry_run:
            # Whatever goes first, the list must not make a part of it look like a checkpoint.
            objects = {each.path: each.etag for each in removal if each.kind.what is not What.COMMIT}
            listed = DeletionList(None, {}, objects)
            self._delete_listed(url, deletion_id(None, secrets.token_hex(8)), listed, removal, look)
        return Deletion.of(url.name, removal)

    def delete_leftovers(self, url: CheckpointURL, planned: Sequence[LeftoverObject], *, since: float) -> Deletion:
        """Delete objects of other saves in the directory of a committed checkpoint."""
        found = inspect(self.store, url, whole=True)
        unneeded = {each.key: each for each in found.leftovers} if found else {}
        if any(each.modified_at > since and not each.is_lease for each in unneeded.values()):
            raise LeftAloneError("a save is in progress: an object was written")
        gone = {each.key for each in planned if each == unneeded.get(each.key)}
        if not gone or found is None:
            return Deletion(url.name, 0, 0)
        before, directory = found.info, found.directory
        # What is deleted was listed before this: nothing commits it after.
        claim = end_joint_save(self.store, url)
        seen = {each.path: each.etag for each in directory.other_saves({})} | ({CLAIM: claim} if claim else {})
        removal = [
            each._replace(etag=claim or "") if each.path == CLAIM else each
            for each in directory.objects.values()
            if each.key in gone
        ]

        def look() -> None:
            now = inspect(self.store, url)
            if now is None or (now.info.save_id, now.info.etag) != (before.save_id, before.etag):
                raise LeftAloneError("it was overwritten")
            if others := now.directory.other_saves(seen):
                raise LeftAloneError(f"a save is in progress: it has written {others[0].path}")

        # Without ETags: it is beside a checkpoint, so that nobody may finish this without a look.
        listed = DeletionList(None, {}, {each.path: "" for each in removal})
        self._delete_listed(url, deletion_id(None, secrets.token_hex(8)), listed, removal, look)
        return Deletion.of(url.name, removal)

    # --- steps of each deletion -----------------------------------------------------------------

    def _remove(
        self, url: CheckpointURL, directory: Directory, needed: set[str] | None, since: float
    ) -> list[DirectoryEntry]:
        """What `Directory.removal` finds. Raises LeftAloneError if it may not go. Unless this is a dry run, a joint
        save that is not committed is aborted: from here on nothing commits what is listed."""
        removal, being_saved = directory.removal(needed, since=since)
        why = directory.protection() or (being_saved and f"a save is in progress: {being_saved} was written")
        if why and not self.force:
            raise LeftAloneError(why)
        if CLAIM in removal and not self.dry_run:
            claim = removal[CLAIM]
            removal[CLAIM] = claim._replace(etag=end_joint_save(self.store, url) or claim.etag)
        return [*removal.values()]

    def _delete_listed(
        self, url: CheckpointURL, deletion: str, listed: DeletionList, removal: Sequence[DirectoryEntry], look: Look,
        deadline: Deadline | None = None,
    ) -> None:  # fmt: skip
        """Write the list of a deletion (its id), look once more, and delete. With a deadline: what was committed, whose
        commits must be gone by then. Without: what never was, so that it looks before each request."""
        key, begun = url.key(deletion_object(deletion, secrets.token_hex(8))), False
        watch = look if deadline is None else None
        *commits, others = _steps(removal)
        # From these somebody else would write the commit of a joint save once more, when it is gone.
        coordination = (each for each in removal if each.kind.what is What.COORDINATION)
        merged = [] if watch else [DeleteTarget(each.key) for each in coordination if is_merged(each.path)]
        try:
            self.store.put(key, listed.to_json())
            lists = {key, *(look() or ())}
            begun = True
            if merged:
                self.delete_all(merged)
            for step in filter(None, commits):
                if self.delete_all(step, deadline, watch) and watch is None:
                    raise LeftAloneError("it was overwritten")
            self.delete_all(others, look=watch)
        except (LeftAloneError, errors.StorageError) as error:
            if isinstance(error, LeftAloneError) or not begun:
                self._withdraw(url, key)
            raise
        self.delete_all([DeleteTarget(each) for each in lists])

    def _withdraw(self, url: CheckpointURL, key: str) -> None:
        """Remove the list of a deletion that was given up. A failure is a warning."""
        try:
            # What has stalled here is over for good in this store's limit.
            self.store.within(self.store.limit.for_cleanup()).delete([key])
        except errors.StorageError as error:
            logger.warning("a deletion of %s was given up, and its list stays until the next prune: %s", url, error)

    def delete_all(
        self, targets: Sequence[DeleteTarget], deadline: Deadline | None = None, look: Look | None = None
    ) -> list[str]:
        """Delete keys whose ETags are unchanged, each request before ``deadline``, and after ``look``, which raises if
        nothing more may be deleted.

        Returns:
            Keys that were left alone because they have another ETag.
        """

        def delete(store: Store, batch: Sequence[DeleteTarget]) -> Sequence[str]:
            if look is not None:
                look()
            if deadline is not None:
                cancel, progress = store.limit.cancel, store.limit.progress
                store = store.within(Limit(deadline=deadline, hang=_ATTEMPT_SECONDS, cancel=cancel, progress=progress))
            with self.slots:
                return store.delete(batch)

        runs = [targets[start : start + BATCH] for start in range(0, len(targets), BATCH)]
        one_by_one = look is not None or len(runs) == 1
        changed = [delete(self.store, each) for each in runs] if one_by_one else self.store.map(delete, runs)
        return [key for each in changed for key in each]

    # --- deletions that were cut off ------------------------------------------------------------

    def finish(self, url: CheckpointURL, deletion: str) -> Deletion:
        """Finish a deletion (its id) that was cut off: delete exactly what its lists name and is unchanged."""
        directory = list_directory(self.store, url)
        gone: dict[str, DirectoryEntry] = {}
        for found in directory.deletions.get(deletion, ()):
            try:
                listed = DeletionList.from_json(self.store.get(found.key).data)
            except errors.ObjectNotFoundError:
                continue  # another prune has finished it
            except ValueError as error:
                raise errors.CheckpointError(
                    f"the list of a deletion s3://{url.bucket}/{found.key} cannot be read: {error}. "
                    "Remedy: delete it; what it names is then left over, and goes after the grace period",
                    url=str(url),
                ) from None
            if not self._has_begun(directory, listed):
                if listed.commits:
                    raise LeftAloneError("a deletion was begun and given up; the checkpoint is still there")
                # Of leftovers, or of a save that was committed after all.
                given_up = found.modified_at < directory.now - DELETION_BEGINS
                if given_up or not listed.objects.keys() & directory.objects.keys():
                    self._withdraw(url, found.key)
                continue
            # An object younger than the list is another save's, even if its bytes are the same.
            rest = directory.unchanged({**listed.commits, **listed.objects}, until=found.modified_at)
            for step in (*_steps(rest), [DeleteTarget(found.key)]):
                self.delete_all(step)
            gone |= {each.path: each for each in rest}
        return Deletion.of(url.name, gone.values())

    def _has_begun(self, directory: Directory, listed: DeletionList) -> bool:
        """Whether a deletion whose list was found has already removed the commit, and it did not come back."""
        there = {each.path for each in directory.unchanged(listed.commits)}
        if not listed.commits:  # it was never committed
            begun = not directory.commits
        elif METADATA in listed.commits:
            begun = METADATA not in there
        else:
            begun = len(there) < len(listed.commits)
        commit = directory.commits.get(None)
        if not begun or listed.save_id is None or commit is None:
            return begun
        try:  # brought back from a copy, it has another ETag
            return self.store.head(commit.key).metadata.get(SAVE_ID_KEY) != listed.save_id
        except errors.ObjectNotFoundError:
            return True

    def withdraw_given_up(self, url: CheckpointURL, deletion: str) -> None:
        """Remove the lists of a deletion that was cut off before it began: the checkpoint is still there."""
        directory = list_directory(self.store, url, DELETION_PREFIX)
        old = directory.now - DELETION_BEGINS
        lists = directory.deletions.get(deletion, ())
        self.delete_all([DeleteTarget(each.key) for each in lists if each.modified_at < old])


def _steps(removal: Iterable[DirectoryEntry]) -> tuple[list[DeleteTarget], ...]:
    """What is deleted, in order: the commits of single ranks, ``.metadata``, which hides them, and the rest. Names that
    no other save uses need no condition, and get none; the claim's, and other libraries', do."""
    steps: tuple[list[DeleteTarget], ...] = ([], [], [])
    for each in sorted(removal):
        if each.kind.what is What.COMMIT:
            steps[1 if each.path == METADATA else 0].append(DeleteTarget(each.key, each.etag))
        else:
            steps[2].append(DeleteTarget(each.key, "" if each.kind.nonce or each.kind.save_id else each.etag))
    return steps
