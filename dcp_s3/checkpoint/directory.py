"""The objects at a checkpoint's URL: one listing, classified once.

Earlier versions could spread data over directories below the checkpoint (``a7/__0_0-....distcp``); one of such a name
may also be a checkpoint of its own. Such data belongs to a checkpoint that names it, and is nobody's leftover.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from dcp_s3.format.control_files import Manifest
from dcp_s3.format.layout import CLAIM, FILES_PREFIX, Kind, What, classify, is_inside
from dcp_s3.store import ListedObject, Page, Store, same_etag
from dcp_s3.url import CheckpointURL

LEASE_MARGIN = 60.0
"""Seconds for which a lease counts after its end: a renewal may be under way. Both times are by S3's clock."""

CONTROL_KINDS = frozenset(
    {What.MANIFEST, What.METRICS, What.PIN, What.LEASE, What.DELETION, What.COORDINATION, What.CONTROL}
)
"""Kinds of objects in our own directory, ``.dcp_s3/``."""


class DirectoryEntry(NamedTuple):
    """One object in a checkpoint's directory. A tuple: a listing has many."""

    path: str
    """Path relative to the checkpoint."""
    size: int
    """Bytes."""
    kind: Kind
    modified_at: float
    """Seconds since the epoch on the clock of S3; 0 if the listing did not say."""
    etag: str
    """ETag as S3 gave it, with quotes; empty if it gave none."""
    key: str

    def has_etag(self, etag: str | None) -> bool:
        """Whether this is its ETag, with or without quotes."""
        return etag is not None and same_etag(self.etag, etag)


class Directory:
    """All objects at ``url`` if it is ``whole``, or some of them, from the pages of a listing."""

    def __init__(self, url: CheckpointURL, pages: Sequence[Page], *, whole: bool = False) -> None:
        self.whole = whole
        self.now = time.time() if pages[0].server_time is None else pages[0].server_time
        """When they were listed, seconds since the epoch on the clock of S3; without it, on that of this host."""
        self.objects: dict[str, DirectoryEntry] = {}
        """All objects, by relative path."""
        skip, kinds = len(url.key("")), defaultdict[What, dict[str, DirectoryEntry]](dict)
        for page in pages:
            for key, size, modified_at, etag in page.objects:
                path = key[skip:]
                kind = classify(path)
                found = DirectoryEntry(path, size, kind, modified_at, etag, key)
                self.objects[path] = kinds[kind.what][path] = found
        self.data = kinds[What.DATA]
        """Objects named like data of a save to this URL, by relative path."""
        self.commits = {found.kind.rank: found for found in kinds[What.COMMIT].values()}
        """The commits, which make it a checkpoint, by rank; rank None is ``.metadata``."""
        self.ranks = sorted(rank for rank in self.commits if rank is not None)
        """Ranks that have committed without collectives."""
        self.committing: Sequence[int | None] = [None] if None in self.commits else self.ranks
        """Ranks whose metadata makes it a checkpoint. If there is rank None, only that: it hides the others."""
        self.manifests: dict[int | None, dict[str, DirectoryEntry]] = {}
        """Manifests by rank (None as above), then by save id."""
        for found in kinds[What.MANIFEST].values():
            self.manifests.setdefault(found.kind.rank, {})[found.kind.save_id] = found
        self.metrics = next(iter(kinds[What.METRICS].values()), None)
        """The object with the metrics that were added after the save."""
        self.pin = next(iter(kinds[What.PIN].values()), None)
        self.leases = [*kinds[What.LEASE].values()]
        """Leases of readers, including those that have ended."""
        self._ended = {
            found.path for found in self.leases if found.modified_at + found.kind.seconds + LEASE_MARGIN < self.now
        }
        self.deletions: dict[str, list[DirectoryEntry]] = {}
        """Lists of deletions that were begun, one per attempt, by the deletion's id."""
        for found in kinds[What.DELETION].values():
            self.deletions.setdefault(found.kind.deletion, []).append(found)
        self.coordination = [*kinds[What.COORDINATION].values()]
        """Claim, parts, intents and notices of saves without collectives."""
        self.nested = {found.kind.below for found in kinds[What.NESTED].values()}
        """Names of directories right below that are checkpoints of their own."""
        # A claim stays with the checkpoint that its save made; a newer one is of another save.
        claim, commit = self.objects.get(CLAIM), self.commits.get(None)
        self._own_claim = {CLAIM} if claim and commit and claim.modified_at <= commit.modified_at else set[str]()

    @classmethod
    def of_sizes(cls, sizes: Mapping[str, int]) -> Directory:
        """The directory from a listing without times, by which no lease has ended: bytes by relative path."""
        objects = tuple(ListedObject(path, size, 0.0) for path, size in sizes.items())
        return cls(CheckpointURL("", ""), [Page(objects, (), server_time=0.0)], whole=True)

    # --- what is there ---------------------------------------------------------------------------

    @property
    def shows_checkpoint(self) -> bool:
        """Whether it is a checkpoint, or was meant to become one."""
        shows = CONTROL_KINDS | {What.DATA, What.COMMIT}
        return any(found.kind.what in shows and not found.kind.spread for found in self.objects.values())

    def is_spread_of(self, name: str) -> bool:
        """Whether this directory, called ``name``, is no checkpoint but only holds spread data of the one above."""
        return bool(self.data) and all(
            path in self.data and classify(f"{name}/{path}").spread
            for path, found in self.objects.items()
            if found.kind.what not in (What.OTHER, What.NESTED)
        )

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

    def other_saves(self, seen: Mapping[str, str]) -> list[DirectoryEntry]:
        """What saves in progress wrote into our own directory since a listing with these ETags by relative path."""
        manifests = (found for by_id in self.manifests.values() for found in by_id.values())
        records = (found for path, found in self.objects.items() if path.startswith(FILES_PREFIX))
        return [each for each in (*manifests, *self.coordination, *records) if not each.has_etag(seen.get(each.path))]

    def protection(self, seen: Mapping[str, str] | None = None) -> str | None:
        """Why it must not be deleted: a pin, a lease that has not ended, or a save that has written since a listing
        with the ETags ``seen`` by relative path. None if it may be."""
        if self.pin is not None:
            return "it is pinned"
        if len(self._ended) < len(self.leases):
            return "a reader has a lease"
        others = () if seen is None else self.other_saves(seen)
        return f"a save is in progress: it has written {others[0].path}" if others else None

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
        # Files with names of their own, and their records. Without a record, none is ours.
        files = {path for path in self.objects if path.startswith(FILES_PREFIX)}
        for path, found in self.objects.items() if files else ():
            if found.kind.what is What.OTHER and is_inside(path) and path.partition("/")[0] not in self.nested:
                files.add(path)
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
            elif what in (What.DATA, What.MANIFEST, What.COORDINATION) or path in files:
                # What the ranks of this very save told each other late, or nobody removed, is decided.
                nonce = found.kind.save_id if what is What.COORDINATION else ""
                if young and not (nonce and any(each.startswith(nonce) for each in save_ids)):
                    being_saved = path
                elif not found.kind.spread:
                    goes[path] = found
            elif what is What.METRICS or path in self._ended or (what is What.CONTROL and needed is None):
                goes[path] = found
        return goes, being_saved

    def leftovers(self, manifest: Manifest) -> list[DirectoryEntry]:
        """Objects that our checkpoint does not need: those of failed, running or overwritten saves, and leases that
        have ended. Only names that dcp_s3 gives count: nobody else's objects are leftovers."""
        own = self.manifests.get(None, {}).get(manifest.save_id)
        needed = {*(entry.path for entry in manifest.objects), *self._own_claim, *([own.path] if own else [])}
        return [
            found
            for path, found in self.objects.items()
            if path in self._ended
            or (
                path not in needed
                and not found.kind.spread
                and (found.kind.what in (What.MANIFEST, What.COORDINATION) or found.kind.nonce)
            )
        ]

    def unchanged(self, etags: Mapping[str, str], *, until: float = float("inf")) -> list[DirectoryEntry]:
        """Those of the objects with the given ETags, by relative path, that are still there. One that was written after
        ``until``, in seconds since the epoch on the clock of S3, has changed, even if its bytes are the same."""
        there = (self.objects[path] for path in etags if path in self.objects)
        return [found for found in there if found.has_etag(etags[found.path]) and found.modified_at <= until]


def list_directory(store: Store, url: CheckpointURL, *prefixes: str) -> Directory:
    """List a checkpoint's directory, or what starts with one of the prefixes; ``now`` is from before all of that."""
    return Directory(url, [store.list(url.key(prefix)) for prefix in prefixes or ("",)], whole=not prefixes)
