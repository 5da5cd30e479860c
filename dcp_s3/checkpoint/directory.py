"""The objects at a checkpoint's URL: one listing, classified once. Pure.

A `Directory` answers what belongs to a checkpoint, what is missing, what is left over and what will be deleted. Earlier
versions could spread data over directories below the checkpoint (``a7/__0_0-....distcp``); one of such a name may also
be a checkpoint of its own. Such data belongs to a checkpoint that names it, and is nobody's leftover.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from dcp_s3.format.control_files import DeletionList, Manifest
from dcp_s3.format.layout import CLAIM, FILES_PREFIX, Kind, What, classify, is_inside, manifest_object
from dcp_s3.process import reset_in_child
from dcp_s3.store import ListedObject, Page, Store
from dcp_s3.url import CheckpointURL

LEASE_MARGIN = 60.0
"""Seconds for which a lease counts after its end: a renewal may be under way. Both times are by S3's clock."""

_CONTROL = frozenset(
    {What.MANIFEST, What.METRICS, What.PIN, What.LEASE, What.DELETION, What.COORDINATION, What.CONTROL}
)
_OF_CHECKPOINTS = _CONTROL | {What.DATA, What.COMMIT}

logger = logging.getLogger(__name__)


class DirectoryEntry(NamedTuple):
    """One object in a checkpoint's directory. A tuple: a listing has many."""

    path: str
    """Path relative to the checkpoint."""
    size: int
    """Bytes."""
    kind: Kind
    modified_at: float = 0.0
    """Seconds since the epoch on the clock of S3; 0 if the listing did not say."""
    etag: str = ""
    """ETag as S3 gave it, with quotes; empty if it gave none."""

    def has_etag(self, etag: str | None) -> bool:
        """Whether this is its ETag, with or without quotes."""
        return etag is not None and self.etag.strip('"') == etag.strip('"')


@dataclass(frozen=True)
class Deletion:
    """The objects that were deleted from one checkpoint's directory."""

    name: str
    """Name of the checkpoint."""
    objects: int
    """Number of objects; the deletion's list and other small marks do not count."""
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Removal:
    """The objects that are deleted with a checkpoint."""

    commits: Mapping[str, DirectoryEntry]
    """The objects that make it a checkpoint, by relative path. They are deleted first."""
    objects: Mapping[str, DirectoryEntry]
    """Everything else, by relative path."""
    being_saved: str | None = None
    """Relative path of an object of a save in progress; None if there is none."""

    def as_deletion(self, name: str) -> Deletion:
        """What is reported of it, for the checkpoint of this name."""
        objects = (*self.commits.values(), *self.objects.values())
        return Deletion(name, len(objects), sum(found.size for found in objects))

    def to_list(self, save_id: str | None) -> DeletionList:
        """The list that is written before the first of them is deleted."""
        return DeletionList(
            save_id=save_id,
            commits={path: found.etag for path, found in self.commits.items()},
            objects={path: found.etag for path, found in self.objects.items()},
        )


@dataclass(frozen=True)
class Directory:
    """All or some of the objects at one URL. Made by `of` and `of_sizes`."""

    objects: Mapping[str, DirectoryEntry]
    """All objects, by relative path."""
    now: float = 0.0
    """When they were listed, seconds since the epoch on the clock of S3. 0: no lease has ended."""
    data: Mapping[str, DirectoryEntry] = field(default_factory=dict)
    """Objects named like data of a save to this URL, by relative path."""
    commits: Mapping[int | None, DirectoryEntry] = field(default_factory=dict)
    """The commits, which make it a checkpoint, by rank; rank None is ``.metadata``."""
    manifests: Mapping[int | None, Mapping[str, DirectoryEntry]] = field(default_factory=dict)
    """Manifests by rank (None as above), then by save id."""
    metrics: DirectoryEntry | None = None
    """The object with the metrics that were added after the save."""
    pin: DirectoryEntry | None = None
    leases: tuple[DirectoryEntry, ...] = ()
    """Leases of readers, including those that have ended."""
    deletions: Mapping[str, DirectoryEntry] = field(default_factory=dict)
    """Lists of deletions that were begun, by relative path."""
    coordination: tuple[DirectoryEntry, ...] = ()
    """Claim, parts, intents and notices of saves without collectives."""
    nested: frozenset[str] = frozenset()
    """Names of directories right below that are checkpoints of their own."""
    whole: bool = False
    """Whether these are all objects at the URL."""

    @classmethod
    def of(
        cls, url: CheckpointURL, objects: Iterable[ListedObject], now: float = 0.0, *, whole: bool = False
    ) -> Directory:
        """The directory from a listing of all or some keys below ``url``."""
        skip = len(url.key(""))
        paths = ((each.key[skip:], each) for each in objects)
        listed = (DirectoryEntry(path, o.size, classify(path), o.modified_at, o.etag) for path, o in paths)
        return cls._of(listed, now, whole)

    @classmethod
    def of_sizes(cls, sizes: Mapping[str, int]) -> Directory:
        """The directory from a listing without times: bytes by relative path."""
        return cls._of((DirectoryEntry(path, size, classify(path)) for path, size in sizes.items()), 0.0, True)

    @classmethod
    def _of(cls, listed: Iterable[DirectoryEntry], now: float, whole: bool) -> Directory:
        objects = {found.path: found for found in listed}
        of: defaultdict[What, list[DirectoryEntry]] = defaultdict(list)
        for found in objects.values():
            of[found.kind.what].append(found)
        manifests: dict[int | None, dict[str, DirectoryEntry]] = {}
        for found in of[What.MANIFEST]:
            manifests.setdefault(found.kind.rank, {})[found.kind.save_id] = found
        return cls(
            objects=objects,
            now=now,
            data={found.path: found for found in of[What.DATA]},
            commits={found.kind.rank: found for found in of[What.COMMIT]},
            manifests=manifests,
            metrics=next(iter(of[What.METRICS]), None),
            pin=next(iter(of[What.PIN]), None),
            leases=tuple(of[What.LEASE]),
            deletions={found.path: found for found in of[What.DELETION]},
            coordination=tuple(of[What.COORDINATION]),
            nested=frozenset(found.kind.below for found in of[What.NESTED]),
            whole=whole,
        )

    # --- what is there ---------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes by relative path."""
        return {path: found.size for path, found in self.objects.items()}

    @property
    def ranks(self) -> list[int]:
        """Ranks that have committed without collectives."""
        return sorted(rank for rank in self.commits if rank is not None)

    @property
    def committing(self) -> list[int | None]:
        """Ranks whose metadata makes it a checkpoint. If there is rank None, only that: it hides the others."""
        return [None] if None in self.commits else [*self.ranks]

    @property
    def shows_checkpoint(self) -> bool:
        """Whether it is a checkpoint, or was meant to become one."""
        return any(found.kind.what in _OF_CHECKPOINTS and not found.kind.spread for found in self.objects.values())

    @property
    def ours(self) -> bool:
        """Whether dcp_s3 has written any of it."""
        return any(found.kind.nonce or found.kind.what in _CONTROL for found in self.objects.values())

    @property
    def newest(self) -> float | None:
        """When the last object was written; None if there is none."""
        return max((found.modified_at for found in self.objects.values()), default=None)

    def is_spread_of(self, name: str) -> bool:
        """Whether this directory, called ``name``, is no checkpoint but only holds spread data of the one above."""
        return bool(self.data) and all(
            path in self.data and classify(f"{name}/{path}").spread
            for path, found in self.objects.items()
            if found.kind.what not in (What.OTHER, What.NESTED)
        )

    # --- commits and manifests -------------------------------------------------------------------

    def other_saves(self, seen: Mapping[str, str]) -> list[DirectoryEntry]:
        """What saves in progress wrote into our own directory since a listing with these ETags by relative path."""
        manifests = (found for by_id in self.manifests.values() for found in by_id.values())
        records = (found for path, found in self.objects.items() if path.startswith(FILES_PREFIX))
        return [each for each in (*manifests, *self.coordination, *records) if not each.has_etag(seen.get(each.path))]

    def save_id_by_time(self, rank: int | None) -> str | None:
        """The save that made a commit, if that is clear: there is one manifest, and it is not newer.

        A manifest is written before its commit. A newer one is of a save that is in progress, or was cut off.
        """
        commit, manifests = self.commits.get(rank), self.manifests.get(rank, {})
        if commit is None or len(manifests) != 1:
            return None
        [(save_id, manifest)] = manifests.items()
        return save_id if manifest.modified_at <= commit.modified_at else None

    @property
    def no_rank_missing(self) -> bool:
        """Whether ranks 0 to n have committed, and no other rank has data there.

        Data in a directory below counts, unless that is a checkpoint itself: other writers may put theirs there.
        """
        below = [each for each in self if each.kind.what is What.NESTED_DATA and each.kind.below not in self.nested]
        writers = {found.kind.rank for found in (*self.data.values(), *below)} - {None}
        return bool(self.ranks) and self.ranks == list(range(len(self.ranks))) and writers <= set(self.ranks)

    # --- what is missing -------------------------------------------------------------------------

    def lacking(self, sizes: Mapping[str, int], *, exact: bool = False) -> list[str]:
        """Relative paths of objects that are missing or too short; with ``exact``, also of those that are too long."""
        return [
            path
            for path, size in sizes.items()
            if (found := self.objects.get(path)) is None or (found.size != size if exact else found.size < size)
        ]

    def describe_damage(self, sizes: Mapping[str, int]) -> str | None:
        """Why it cannot be loaded: names the first object that is `lacking`. None if none is."""
        for path in self.lacking(sizes):
            if path not in self.objects:
                return f"its object {path} is not there"
            return f"its object {path} has {self.objects[path].size} bytes instead of at least {sizes[path]}"
        return None

    # --- protection and deletion -----------------------------------------------------------------

    @property
    def protection(self) -> str | None:
        """Why it must not be deleted: a pin, or a lease that has not ended. None if it may be."""
        if self.pin is not None:
            return "it is pinned"
        return "a reader has a lease" if any(not self._has_ended(found) for found in self.leases) else None

    def lists_of(self, deletion: str) -> list[DirectoryEntry]:
        """The lists of one deletion, one per attempt."""
        return [found for found in self.deletions.values() if found.kind.deletion == deletion]

    def removal(self, needed: Collection[str], *, since: float) -> Removal:
        """The objects to delete with a checkpoint: those that it needs, and leftovers of failed saves. Nobody else's
        objects, and nothing of a checkpoint in a directory below.

        Args:
            since: seconds since the epoch on the clock of S3. Objects that were written later and are not needed
                belong to a save in progress.
        """
        needed = {*needed, *self._own_claim}
        save_ids = [found.kind.save_id for path in needed if (found := self.objects.get(path)) and found.kind.save_id]
        objects: dict[str, DirectoryEntry] = {}
        being_saved = None
        for found in self.objects.values():
            path, what = found.path, found.kind.what
            if what is What.COMMIT:
                continue
            if what is What.METRICS or (path in needed and (what is not What.OTHER or is_inside(path))):
                objects[path] = found
            elif what is What.LEASE:
                if self._has_ended(found):
                    objects[path] = found
            elif what in (What.DATA, What.MANIFEST, What.COORDINATION) or path in self._files:
                # What the ranks of this very save told each other late, or nobody removed: it is decided.
                nonce = found.kind.save_id if what is What.COORDINATION else ""
                is_decided = bool(nonce) and any(each.startswith(nonce) for each in save_ids)
                if found.modified_at > since and not is_decided:
                    being_saved = path
                elif not found.kind.spread:
                    objects[path] = found
        if self.commits:  # a save that overwrites names in use, as other libraries do
            committed = max(found.modified_at for found in self.commits.values())
            late = (path for path in needed if path in objects and objects[path].modified_at > max(committed, since))
            being_saved = being_saved or next(late, None)
        return Removal({found.path: found for found in self.commits.values()}, objects, being_saved)

    @cached_property
    def _files(self) -> frozenset[str]:
        """Paths of files with names of their own, and of their records. Without a record, none is ours."""
        records = {path for path in self.objects if path.startswith(FILES_PREFIX)}
        if not records:
            return frozenset()
        others = (path for path, found in self.objects.items() if found.kind.what is What.OTHER and is_inside(path))
        return frozenset(records | {path for path in others if path.partition("/")[0] not in self.nested})

    @property
    def _own_claim(self) -> tuple[str, ...]:
        """The claim, if it is of the save that made the checkpoint, and stays with it: a newer one is of another."""
        claim, commit = self.objects.get(CLAIM), self.commits.get(None)
        return (CLAIM,) if claim and commit and claim.modified_at <= commit.modified_at else ()

    def removal_of_uncommitted(self, *, since: float) -> Removal:
        """The objects to delete if it was never committed: `removal`, and all of our own directory except pins,
        unexpired leases and lists of deletions."""
        removal = self.removal((), since=since)
        young = (path for path, found in removal.commits.items() if found.modified_at > since)
        goes = _CONTROL - {What.PIN, What.LEASE, What.DELETION}
        control = {path: found for path, found in self.objects.items() if found.kind.what in goes}
        return Removal(removal.commits, {**removal.objects, **control}, removal.being_saved or next(young, None))

    def leftovers(self, manifest: Manifest) -> list[DirectoryEntry]:
        """Objects that our checkpoint does not need: those of failed, running or overwritten saves, and leases that
        have ended. Only names that dcp_s3 gives count: nobody else's objects are leftovers."""
        needed = {entry.path for entry in manifest.objects}
        needed |= {manifest_object(manifest.save_id), *self._own_claim}
        return [
            found
            for found in self.objects.values()
            if (found.kind.what is What.LEASE and self._has_ended(found))
            or (
                found.path not in needed
                and not found.kind.spread
                and (found.kind.what in (What.MANIFEST, What.COORDINATION) or found.kind.nonce)
            )
        ]

    def unchanged(self, etags: Mapping[str, str], *, until: float | None = None) -> dict[str, str]:
        """The given ETags, by relative path, that are still there.

        Args:
            until: seconds since the epoch on the clock of S3. A younger object has changed, even if its bytes are the
                same.
        """
        return {
            path: etag
            for path, etag in etags.items()
            if (found := self.objects.get(path)) is not None
            and found.has_etag(etag)
            and (until is None or found.modified_at <= until)
        }

    def __iter__(self) -> Iterator[DirectoryEntry]:
        return iter(self.objects.values())

    def _has_ended(self, lease: DirectoryEntry) -> bool:
        return lease.modified_at + lease.kind.seconds + LEASE_MARGIN < self.now


# --- listing ---------------------------------------------------------------------------------------


def list_directory(store: Store, url: CheckpointURL, *prefixes: str) -> Directory:
    """List a checkpoint's directory, or what starts with one of the prefixes; ``now`` is from before all of that."""
    pages = [store.list(url.key(prefix)) for prefix in prefixes or ("",)]
    objects = (each for page in pages for each in page.objects)
    return Directory.of(url, objects, time_of(pages[0]), whole=not prefixes)


def time_of(page: Page) -> float:
    """The store's time when it was listed, in seconds since the epoch; that of this host if the store does not tell,
    which is said once."""
    if page.server_time is not None:
        return page.server_time
    if not _timeless:
        _timeless.append(True)
        logger.warning("the S3 endpoint does not tell its time; ages are by the clock of this host")
    return time.time()


_timeless: list[bool] = []
reset_in_child(_timeless.clear)
