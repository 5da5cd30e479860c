"""The objects at a checkpoint's URL: one listing, classified once. Pure.

A `Directory` answers what belongs to a checkpoint, what is missing, what is left over and what will be deleted. Earlier
versions could spread data over directories below the checkpoint (``a7/__0_0-....distcp``); one of such a name may also
be a checkpoint of its own. Such data belongs to a checkpoint that names it, and is nobody's leftover.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import CLAIM, FILES_PREFIX, Kind, What, classify, is_inside, manifest_object
from dcp_s3.store import ListedObject, Page, Store
from dcp_s3.url import CheckpointURL

LEASE_MARGIN = 60.0
"""Seconds for which a lease counts after its end: a renewal may be under way. Both times are by S3's clock."""

_CONTROL = frozenset(
    {What.MANIFEST, What.METRICS, What.PIN, What.LEASE, What.DELETION, What.COORDINATION, What.CONTROL}
)
_OF_CHECKPOINTS = _CONTROL | {What.DATA, What.COMMIT}


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
    ranks: Sequence[int] = ()
    """Ranks that have committed without collectives, in order."""
    committing: Sequence[int | None] = ()
    """Ranks whose metadata makes it a checkpoint. If there is rank None, only that: it hides the others."""
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
        skip, found = len(url.key("")), dict[str, DirectoryEntry]()
        kinds: defaultdict[What, dict[str, DirectoryEntry]] = defaultdict(dict)
        for each in objects:
            path = each.key[skip:]
            kind = classify(path)
            found[path] = kinds[kind.what][path] = DirectoryEntry(path, each.size, kind, each.modified_at, each.etag)
        commits = {entry.kind.rank: entry for entry in kinds[What.COMMIT].values()}
        ranks = sorted(rank for rank in commits if rank is not None)
        manifests: dict[int | None, dict[str, DirectoryEntry]] = {}
        for entry in kinds[What.MANIFEST].values():
            manifests.setdefault(entry.kind.rank, {})[entry.kind.save_id] = entry
        return cls(
            objects=found,
            now=now,
            data=kinds[What.DATA],
            commits=commits,
            ranks=ranks,
            committing=[None] if None in commits else ranks,
            manifests=manifests,
            metrics=next(iter(kinds[What.METRICS].values()), None),
            pin=next(iter(kinds[What.PIN].values()), None),
            leases=tuple(kinds[What.LEASE].values()),
            deletions=kinds[What.DELETION],
            coordination=tuple(kinds[What.COORDINATION].values()),
            nested=frozenset(entry.kind.below for entry in kinds[What.NESTED].values()),
            whole=whole,
        )

    @classmethod
    def of_sizes(cls, sizes: Mapping[str, int]) -> Directory:
        """The directory from a listing without times: bytes by relative path."""
        return cls.of(CheckpointURL("", ""), (ListedObject(*each, 0.0) for each in sizes.items()), whole=True)

    # --- what is there ---------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes by relative path."""
        return {path: found.size for path, found in self.objects.items()}

    @property
    def shows_checkpoint(self) -> bool:
        """Whether it is a checkpoint, or was meant to become one."""
        return any(found.kind.what in _OF_CHECKPOINTS and not found.kind.spread for found in self.objects.values())

    @property
    def ours(self) -> bool:
        """Whether dcp_s3 has written any of it."""
        return any(found.kind.nonce or found.kind.what in _CONTROL for found in self.objects.values())

    def is_spread_of(self, name: str) -> bool:
        """Whether this directory, called ``name``, is no checkpoint but only holds spread data of the one above."""
        return bool(self.data) and all(
            path in self.data and classify(f"{name}/{path}").spread
            for path, found in self.objects.items()
            if found.kind.what not in (What.OTHER, What.NESTED)
        )

    def other_saves(self, seen: Mapping[str, str]) -> list[DirectoryEntry]:
        """What saves in progress wrote into our own directory since a listing with these ETags by relative path."""
        manifests = (found for by_id in self.manifests.values() for found in by_id.values())
        records = (found for path, found in self.objects.items() if path.startswith(FILES_PREFIX))
        return [each for each in (*manifests, *self.coordination, *records) if not each.has_etag(seen.get(each.path))]

    # --- what is missing -------------------------------------------------------------------------

    def lacking(self, sizes: Mapping[str, int], *, exact: bool = False) -> list[str]:
        """Relative paths of objects that are missing or too short; with ``exact``, also of those that are too long."""
        return [
            path
            for path, size in sizes.items()
            if (found := self.objects.get(path)) is None or (found.size != size if exact else found.size < size)
        ]

    def describe_damage(self, sizes: Mapping[str, int]) -> str | None:
        """Why it cannot be loaded: names the first object that is missing or too short. None if none is."""
        for path, size in sizes.items():
            found = self.objects.get(path)
            if found is None:
                return f"its object {path} is not there"
            if found.size < size:
                return f"its object {path} has {found.size} bytes instead of at least {size}"
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

    def removal(self, needed: Collection[str] | None, *, since: float) -> tuple[dict[str, DirectoryEntry], str | None]:
        """The objects to delete with a checkpoint: its commits, what it needs, and leftovers of failed saves. Nobody
        else's objects, and nothing of a checkpoint in a directory below.

        Args:
            needed: relative paths of what the checkpoint needs. None: it was never committed, so that all of our own
                directory goes, too, except pins, unexpired leases and lists of deletions.
            since: seconds since the epoch on the clock of S3. Objects that were written later and are not needed
                belong to a save in progress.

        Returns:
            The objects by relative path, and the path of an object of a save in progress, if there is one.
        """
        kept = {*(needed or ()), *self._own_claim}
        save_ids = [found.kind.save_id for path in kept if (found := self.objects.get(path)) and found.kind.save_id]
        committed = max((found.modified_at for found in self.commits.values()), default=float("inf"))
        goes: dict[str, DirectoryEntry] = {}
        being_saved = None
        for path, found in self.objects.items():
            what, young = found.kind.what, found.modified_at > since
            if what is What.COMMIT:
                goes[path] = found
                if needed is None and young:
                    being_saved = being_saved or path
            elif path in kept and (what is not What.OTHER or is_inside(path)):
                goes[path] = found
                if young and found.modified_at > committed:  # a save that overwrites names in use, as others do
                    being_saved = being_saved or path
            elif what in (What.DATA, What.MANIFEST, What.COORDINATION) or path in self._files:
                # What the ranks of this very save told each other late, or nobody removed, is decided.
                nonce = found.kind.save_id if what is What.COORDINATION else ""
                if young and not (nonce and any(each.startswith(nonce) for each in save_ids)):
                    being_saved = path
                elif not found.kind.spread:
                    goes[path] = found
            elif (
                what is What.METRICS
                or (what is What.LEASE and self._has_ended(found))
                or (what is What.CONTROL and needed is None)
            ):
                goes[path] = found
        return goes, being_saved

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

    def leftovers(self, manifest: Manifest) -> list[DirectoryEntry]:
        """Objects that our checkpoint does not need: those of failed, running or overwritten saves, and leases that
        have ended. Only names that dcp_s3 gives count: nobody else's objects are leftovers."""
        needed = {*(entry.path for entry in manifest.objects), manifest_object(manifest.save_id), *self._own_claim}
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
    """The store's time when it was listed, in seconds since the epoch; that of this host if the store does not tell."""
    return time.time() if page.server_time is None else page.server_time
