"""Deletes what saves that failed, and prunes that were cut off, left behind, while other saves may be about to commit.

As with a checkpoint (`deletion.py`), it first writes the list of what it deletes: a slow save that is about to commit
sees it. It looks at S3 again before each request, for saves that have committed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dcp_s3 import errors
from dcp_s3.checkpoint.deletion import (
    Deleter,
    LeftAloneError,
    Look,
    check_no_other_save,
    commit_steps,
    end_joint_save,
    other_targets,
)
from dcp_s3.checkpoint.directory import Deletion, Directory, list_directory
from dcp_s3.checkpoint.info import LeftoverObject
from dcp_s3.checkpoint.lease import DELETION_BEGINS
from dcp_s3.checkpoint.look import inspect
from dcp_s3.format.control_files import DeletionList
from dcp_s3.format.layout import (
    CLAIM,
    DELETION_PREFIX,
    METADATA,
    SAVE_ID_KEY,
    deletion_id,
    deletion_object,
    new_nonce,
)
from dcp_s3.store import DeleteTarget
from dcp_s3.url import CheckpointURL


def delete_uncommitted(deleter: Deleter, url: CheckpointURL, *, since: float) -> Deletion:
    """Delete what a save that was never committed left.

    Args:
        since: seconds since the epoch on the clock of S3. Nothing in the directory may have been written later.

    Raises:
        LeftAloneError: it was committed meanwhile, is being saved, or is protected.
        StorageError, CheckpointError
    """
    found = inspect(deleter.store, url, whole=True)
    if found is None:
        return Deletion(url.name, 0, 0)  # somebody else was faster
    directory = found.directory
    if found.info.committed or None in directory.commits:
        raise LeftAloneError("it was committed")
    if found.info.damage is not None and not deleter.force:
        raise LeftAloneError(found.info.damage)
    removal = directory.removal_of_uncommitted(since=since)
    deleter.check(directory, removal)
    if deleter.dry_run:
        return removal.as_deletion(url.name)
    removal = deleter.settle_saves(url, removal)
    everything = removal.to_list(None)
    seen = {**everything.commits, **everything.objects}
    known = set(everything.commits)

    def look() -> None:
        if not deleter.force:
            _look_for_commits(deleter, url, seen, known)

    _delete(deleter, url, everything, look, known)
    return removal.as_deletion(url.name)


def _delete(
    deleter: Deleter, url: CheckpointURL, everything: DeletionList, look: Look, known: set[str] | None = None
) -> None:
    """Delete what is no checkpoint. Looks before each request.

    Args:
        known: paths of the commits, removed from it once they are gone. None: it is beside a checkpoint, so that nobody
            may finish this: the list has no ETags.
    """
    # Whatever goes first, the list must not make a part of it look like a checkpoint.
    listed = DeletionList(None, {}, dict.fromkeys(everything.objects, "") if known is None else everything.objects)
    path = deletion_object(deletion_id(None, new_nonce()), new_nonce())
    deleter.announce(url, path, listed, look)
    try:
        for step in commit_steps(url, everything):
            deleter.delete_all(step, look=look)
        if known:
            known.clear()
        deleter.delete_all(other_targets(url, everything), look=look)
    except LeftAloneError:
        deleter.withdraw(url, path)
        raise
    deleter.delete_all([DeleteTarget(url.key(path))])


def _look_for_commits(deleter: Deleter, url: CheckpointURL, seen: Mapping[str, str], known: Collection[str]) -> None:
    """Raises LeftAloneError if a save was committed, or is about to be, since a listing.

    Args:
        known: relative paths of the listed commits that may still be there.
    """
    directory = list_directory(deleter.store, url, ".", "__")
    deleter.check(directory)
    for each in directory.commits.values():
        if not (each.path in known and each.has_etag(seen.get(each.path))):
            raise LeftAloneError("it was committed")
    check_no_other_save(directory, seen)


def delete_leftovers(
    deleter: Deleter, url: CheckpointURL, planned: Sequence[LeftoverObject], *, since: float
) -> Deletion:
    """Delete objects of other saves in the directory of a committed checkpoint."""
    found = inspect(deleter.store, url, whole=True)
    unneeded = found.leftovers if found else ()
    if any(each.modified_at > since and not each.is_lease for each in unneeded):
        raise LeftAloneError("a save is in progress: an object was written")
    gone = [each for each in planned if each in unneeded]
    if not gone or found is None:
        return Deletion(url.name, 0, 0)
    before, skip = found.info, len(url.key(""))
    # What is deleted was listed before this: nothing commits it after.
    claim = end_joint_save(deleter.store, url)
    seen = {each.path: each.etag for each in found.directory.other_saves({})} | ({CLAIM: claim} if claim else {})
    gone = [replace(each, etag=claim or "") if each.key == url.key(CLAIM) else each for each in gone]

    def look() -> None:
        now = inspect(deleter.store, url)
        if now is None or (now.info.save_id, now.info.etag) != (before.save_id, before.etag):
            raise LeftAloneError("it was overwritten")
        check_no_other_save(now.directory, seen)

    _delete(deleter, url, DeletionList(None, {}, {each.key[skip:]: each.etag for each in gone}), look)
    return Deletion(url.name, len(gone), sum(each.size for each in gone))


# --- deletions that were cut off ----------------------------------------------------------------------


def finish_deletion(deleter: Deleter, url: CheckpointURL, deletion: str) -> Deletion:
    """Finish a deletion (its id) that was cut off: delete exactly what its lists name and is unchanged."""
    directory = list_directory(deleter.store, url)
    gone: set[str] = set()
    for found in directory.lists_of(deletion):
        path = found.path
        try:
            listed = DeletionList.from_json(deleter.store.get(url.key(path)).data)
        except errors.ObjectNotFoundError:
            continue  # another prune has finished it
        except ValueError as error:
            raise errors.CheckpointError(
                f"the list of a deletion s3://{url.bucket}/{url.key(path)} cannot be read: {error}. "
                "Remedy: delete it; what it names is then left over, and goes after the grace period",
                url=str(url),
            ) from None
        if not _has_begun(directory, listed) or _has_save(deleter, url, listed.save_id, directory):
            if not listed.commits:  # a list of leftovers, or of a save that was committed after all
                given_up = found.modified_at < directory.now - DELETION_BEGINS
                if given_up or not listed.objects.keys() & directory.objects.keys():
                    deleter.withdraw(url, path)
                continue
            raise LeftAloneError("a deletion was begun and given up; the checkpoint is still there")
        rest = still_there(directory, listed, written_at=found.modified_at)
        for step in commit_steps(url, rest):
            deleter.delete_all(step)
        deleter.delete_rest(url, rest, [path])
        gone |= {*rest.commits, *rest.objects}
    return Deletion(url.name, len(gone), sum(directory.objects[path].size for path in gone))


def withdraw_given_up(deleter: Deleter, url: CheckpointURL, deletion: str) -> None:
    """Remove the lists of a deletion that was cut off before it began: the checkpoint is still there."""
    directory = list_directory(deleter.store, url, DELETION_PREFIX)
    old = [each for each in directory.lists_of(deletion) if each.modified_at < directory.now - DELETION_BEGINS]
    deleter.delete_all([DeleteTarget(url.key(each.path)) for each in old])


def _has_save(deleter: Deleter, url: CheckpointURL, save_id: str | None, directory: Directory) -> bool:
    """Whether the checkpoint at the URL is of that save. Its ``.metadata`` may have another ETag, if it was brought
    back from a copy."""
    if save_id is None or None not in directory.commits:
        return False
    try:
        return deleter.store.head(url.key(METADATA)).metadata.get(SAVE_ID_KEY) == save_id
    except errors.ObjectNotFoundError:
        return False


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
