"""Which objects in a checkpoint's directory go with it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dcp_s3.format.deletion_list import DeletionList
from dcp_s3.format.layout import (
    DATA_SUFFIX,
    METADATA,
    METRICS,
    is_inside,
    parse_lease_object,
    parse_manifest_object,
    rank_of_metadata,
)
from dcp_s3.retention.checkpoint_info import is_our_data, is_spread_data, own_data
from dcp_s3.retention.plan import LEASE_MARGIN
from dcp_s3.store import ListedObject, Target
from dcp_s3.url import CheckpointURL


@dataclass(frozen=True)
class Belongings:
    """What goes with a checkpoint.

    Attributes:
        commits: what makes it one, by relative path. Gone first.
        objects: everything else, by relative path.
        being_saved: relative path of an object of a save in progress, None without any.
    """

    commits: dict[str, ListedObject]
    objects: dict[str, ListedObject]
    being_saved: str | None = None

    @property
    def size(self) -> int:
        """Bytes of all of them."""
        return sum(found.size for found in (*self.commits.values(), *self.objects.values()))

    def to_list(self, save_id: str | None, *, all_versions: bool) -> DeletionList:
        """What is written down before the first of them goes."""
        return DeletionList(
            save_id=save_id,
            commits={path: found.etag for path, found in self.commits.items()},
            objects={path: found.etag for path, found in self.objects.items()},
            all_versions=all_versions,
        )


def sort_belongings(
    url: CheckpointURL, objects: Iterable[ListedObject], needed: Collection[str], *, since: float, now: float
) -> Belongings:
    """What goes when a checkpoint does: what it needs, and what saves that failed left beside it. Nobody else's
    objects, and nothing of a checkpoint in a directory below.

    Args:
        url: of the checkpoint.
        objects: a listing of everything below it.
        needed: relative paths of the data objects and manifests that its metadata names.
        since: seconds since the epoch on the clock of S3; what was written later and is not needed is of a save in
            progress.
        now: likewise; leases that ended before go, too.
    """
    skip = len(url.key(""))
    objects = list(objects)
    own = own_data((each.key[skip:] for each in objects), needed)
    commits: dict[str, ListedObject] = {}
    found: dict[str, ListedObject] = {}
    commit_time = 0.0
    being_saved = None
    for each in objects:
        path = each.key[skip:]
        if not is_inside(path):
            continue
        lease = parse_lease_object(path)
        if path == METADATA or rank_of_metadata(path) is not None:
            commits[path] = each
            commit_time = max(commit_time, each.modified_at)
        elif path in needed or path == METRICS:
            found[path] = each
        elif lease is not None:
            if each.modified_at + lease + LEASE_MARGIN < now:
                found[path] = each
        elif is_data(path) or parse_manifest_object(path) is not None:
            if each.modified_at > since:
                being_saved = path
            elif path in own or parse_manifest_object(path) is not None:
                found[path] = each
    if commits:  # a save that writes over names that are in use, as other libraries' do
        late = [p for p in needed if p in found and found[p].modified_at > max(commit_time, since)]
        being_saved = being_saved or next(iter(late), None)
    return Belongings(commits, found, being_saved)


def is_data(path: str) -> bool:
    """Whether a relative path is named like a data object right in a checkpoint's directory, or spread below it."""
    return path.endswith(DATA_SUFFIX) and ("/" not in path or is_spread_data(path))


def commit_steps(url: CheckpointURL, listed: DeletionList) -> list[list[Target]]:
    """What to delete first, in steps. ``.metadata`` hides those of single ranks, and goes after them."""
    targets = [Target(url.key(path), etag) for path, etag in sorted(listed.commits.items())]
    hidden = [each for each in targets if each.key != url.key(METADATA)]
    return [step for step in (hidden, [each for each in targets if each not in hidden]) if step]


def other_targets(url: CheckpointURL, listed: DeletionList) -> list[Target]:
    """What to delete then. Names that no other save uses need no condition, and get none."""
    return [
        Target(url.key(path), "" if is_our_data(path) or parse_manifest_object(path) is not None else etag)
        for path, etag in sorted(listed.objects.items())
    ]


def is_begun(url: CheckpointURL, listed: DeletionList, objects: Iterable[ListedObject]) -> bool:
    """Whether a deletion whose list was found has come so far that the checkpoint is none any more."""
    there = _unchanged(url, listed.commits, objects)
    if not listed.commits:  # it was never committed
        skip = len(url.key(""))
        return not any(is_commit(each.key[skip:]) for each in objects)
    return METADATA not in there if METADATA in listed.commits else len(there) < len(listed.commits)


def is_commit(path: str) -> bool:
    """Whether a relative path is that of ``.metadata``, or of a single rank's."""
    return path == METADATA or rank_of_metadata(path) is not None


def still_there(
    url: CheckpointURL, listed: DeletionList, objects: Sequence[ListedObject], *, written_at: float
) -> DeletionList:
    """Of a list that was found, and written at that time (seconds since the epoch on the clock of S3), what is still
    there and unchanged. What is younger than the list is another save's, though its bytes may be the same."""
    objects = [each for each in objects if each.modified_at <= written_at]
    commits = _unchanged(url, listed.commits, objects)
    return DeletionList(listed.save_id, commits, _unchanged(url, listed.objects, objects), listed.all_versions)


def _unchanged(url: CheckpointURL, etags: Mapping[str, str], objects: Iterable[ListedObject]) -> dict[str, str]:
    skip = len(url.key(""))
    found = {each.key[skip:]: each.etag.strip('"') for each in objects}
    return {path: etag for path, etag in etags.items() if found.get(path) == etag.strip('"')}


def same_etag(etag: str | None, found: ListedObject | None) -> bool:
    """Whether an object has this ETag, with or without quotes."""
    return etag is not None and found is not None and found.etag.strip('"') == etag.strip('"')
