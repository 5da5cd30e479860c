"""What is going on under a root, seen with few requests, again and again.

A look lists the names under the root and the open multipart uploads, and then looks into so many directories only: the
newest, those with open uploads, those where something went on last time, and of all others a few in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import LEASE_MARGIN, Directory, list_directory_async
from dcp_s3.checkpoint.info import CheckpointInfo
from dcp_s3.checkpoint.look import inspect_checkpoint
from dcp_s3.coroutines import map_bounded
from dcp_s3.format.layout import CONTROL_PREFIX, step_by_patterns, step_of
from dcp_s3.retention.catalog import open_upload
from dcp_s3.s3.async_store import AsyncS3Store
from dcp_s3.setting_values import compile_step_pattern
from dcp_s3.store import Upload
from dcp_s3.url import CheckpointURL

_NO_CHILD = frozenset({"", ".", "..", CONTROL_PREFIX.rstrip("/")})

AT_ONCE = 16
"""Directories that a look goes into by default."""


@dataclass(frozen=True)
class SaveInProgress:
    """A save that is not committed. Its process may have died: then nothing is written any more."""

    name: str
    """Name of the directory under the root."""
    size: int
    """Bytes on S3 so far, with the parts of open uploads."""
    objects: int
    """Number of its data objects that are complete."""
    uploads: int
    """Number of its open multipart uploads."""
    estimated: bool
    """Whether the parts of only some uploads were counted, and ``size`` supposes that the others have as many."""
    since: float
    """Seconds since the epoch on the clock of S3 when its first object or upload was begun."""
    last: float
    """When the last object was completed or upload begun."""
    expected: int | None
    """Bytes of the newest committed checkpoint, which this one may have, too; None if there is none."""
    rate: float | None = None
    """Bytes per second since the last look; None without one."""

    @property
    def rest(self) -> float | None:
        """Seconds until it has the expected size, if it goes on at this rate; None if nobody can tell."""
        if not self.rate or self.expected is None or self.expected < self.size:
            return None
        return (self.expected - self.size) / self.rate


@dataclass(frozen=True)
class DeletionInProgress:
    """A deletion that was begun and is not done."""

    name: str
    """Name of the directory under the root."""
    since: float
    """Seconds since the epoch on the clock of S3."""
    committed: bool
    """Whether its commit is still there, so that it can be withdrawn."""
    size: int | None
    """Bytes that are still there; None if they were not listed."""


@dataclass(frozen=True)
class Lease:
    """Readers of a checkpoint."""

    name: str
    """Name of the directory under the root."""
    readers: int
    """Number of leases that have not ended."""
    until: float
    """Seconds since the epoch on the clock of S3 when the last one ends, unless it is renewed."""


@dataclass(frozen=True)
class Look:
    """What was seen at one time."""

    root: str
    """URL of the root."""
    now: float
    """Seconds since the epoch, on the clock of S3."""
    newest: CheckpointInfo | None
    """The committed checkpoint with the highest step; None if none was seen."""
    saves: tuple[SaveInProgress, ...]
    deletions: tuple[DeletionInProgress, ...]
    leases: tuple[Lease, ...]
    directories: int
    """Number of directories under the root."""
    seen: int
    """Number of those that were looked into this time."""
    requests: int
    """Number of requests that it took."""

    def to_dict(self) -> dict[str, Any]:
        """The fields, for JSON; of each save also ``rest``."""
        saves = [asdict(save) | {"rest": save.rest} for save in self.saves]
        return asdict(self) | {"saves": saves}


class Watcher:
    """Looks at a root again and again.

    Args:
        store: store with the root, open as long as the watcher is used.
        root: the URL above the checkpoints.
        at_once: directories that a look goes into at most, uploads whose parts it counts, and directories that it
            tries further if no newest committed checkpoint was among them. Each costs a request or two: a look takes
            at most ``5 * at_once + 8``, plus one for each further 1,000 names, uploads, or objects of a save.
    """

    def __init__(self, store: AsyncS3Store, root: CheckpointURL, at_once: int = AT_ONCE) -> None:
        self._store, self._root, self._at_once = store, root, max(2, at_once)
        pattern = store.settings.step_pattern
        self._patterns = () if pattern is None else (compile_step_pattern(pattern),)
        self._before: Look | None = None
        self._turn = 0
        self._active: set[str] = set()
        self._newest: CheckpointInfo | None = None

    async def look(self) -> Look:
        """Look once.

        Raises:
            StorageError: missing bucket, credentials, permissions, network.
        """
        store, root = self._store, self._root
        sent = store.requests
        uploads = await store.uploads(root.key(""))
        listed = await store.list(root.key(""), "/")
        skip = len(root.key(""))
        begun: dict[str, list[Upload]] = {}
        for upload in uploads:
            found = open_upload(root, upload)
            if found is not None:
                begun.setdefault(found.checkpoint, []).append(upload)
        listed_names = {name for each in listed.prefixes if (name := each[skip:-1]) not in _NO_CHILD}
        names = sorted(listed_names | begun.keys(), key=self._order)  # an upload alone makes no prefix
        chosen = self._choose(names, begun)
        opened = await map_bounded(lambda name: self._open(name, name in begun), chosen)
        seen = dict(zip(chosen, opened, strict=True))
        now = listed.server_time or max((each.now for each in seen.values()), default=0.0)
        newest = await self._find_newest(names, seen)
        seen = {name: seen[name] for name in names if name in seen}  # in order
        parts = await self._count_parts(begun)
        saves = _saves(seen, begun, parts, None if newest is None else newest.size)
        look = Look(
            root=str(root),
            now=now,
            newest=newest,
            saves=with_rates(saves, now, self._before),
            deletions=tuple(_deletions(seen)),
            leases=tuple(_leases(seen, now)),
            directories=len(names),
            seen=len(seen),
            requests=store.requests - sent,
        )
        self._active = _names(look.saves) | _names(look.deletions) | _names(look.leases)
        self._before = look
        return look

    def _order(self, name: str) -> tuple[bool, int, str]:
        """Oldest first, as far as names tell."""
        step = step_by_patterns(name, self._patterns) if self._patterns else step_of(name)
        return (step is not None, step or 0, name)

    def _choose(self, names: Sequence[str], begun: Iterable[str]) -> list[str]:
        """The directories to look into: at most three quarters are new or busy; the others come in turn."""
        newest = names[-max(1, self._at_once // 4) :]
        busy = [*reversed(newest), *sorted(begun), *sorted(self._active & set(names))]
        chosen = list(dict.fromkeys(busy))[: self._at_once * 3 // 4]
        others = [name for name in names if name not in set(chosen)]
        room = min(self._at_once - len(chosen), len(others))
        chosen += [others[(self._turn + number) % len(others)] for number in range(room)]
        self._turn += room
        return chosen

    async def _open(self, name: str, busy: bool) -> Directory:
        """A directory: what begins with a dot, and everything if it is not committed or ``busy``."""
        url = self._root.child(name)
        if not busy:
            directory = await list_directory_async(self._store, url, ".")
            if None in directory.commits:
                return directory
        return await list_directory_async(self._store, url)

    async def _find_newest(self, names: Sequence[str], seen: dict[str, Directory]) -> CheckpointInfo | None:
        """The newest committed checkpoint. It is inspected only if it is another than at the last look."""
        tried = 0
        for name in reversed(names):
            if name not in seen:
                if tried >= self._at_once:
                    break  # so many saves failed in a row: nobody needs to wait for all of them
                tried += 1
                seen[name] = await self._open(name, False)
            commit = seen[name].commits.get(None)
            if commit is None and not seen[name].no_rank_missing:
                continue
            known = self._newest
            if known is not None and known.name == name and commit is not None and commit.has_etag(known.etag):
                return known
            info = await inspect_checkpoint(self._store, self._root.child(name), self._patterns)
            if info is not None and info.committed:
                self._newest = info
                return info
        return None

    async def _count_parts(self, begun: dict[str, list[Upload]]) -> dict[str, int]:
        """Bytes of the parts of some uploads, by upload id. Empty without the permission to list them."""
        newest = sorted((each for found in begun.values() for each in found), key=lambda each: -each.initiated_at)
        chosen = newest[: self._at_once]
        try:
            sizes = await map_bounded(self._store.uploaded_bytes, chosen)
        except errors.AccessDeniedError:
            return {}
        return {upload.upload_id: size for upload, size in zip(chosen, sizes, strict=True)}


class _Named(Protocol):
    @property
    def name(self) -> str: ...


def _names(found: Iterable[_Named]) -> set[str]:
    return {each.name for each in found}


def _saves(
    seen: dict[str, Directory], begun: dict[str, list[Upload]], parts: dict[str, int], expected: int | None
) -> list[SaveInProgress]:
    """The saves that are not committed, by name."""
    found = []
    for name, directory in seen.items():
        uploads = begun.get(name, [])
        commits = list(directory.commits.values())
        committed = None in directory.commits or directory.no_rank_missing
        since = max((each.modified_at for each in commits), default=0.0) if committed else 0.0
        # Of an overwritten checkpoint, what is newer than its commit belongs to the new save.
        objects = (
            [each for each in directory.data.values() if each.modified_at > since] if uploads or not committed else []
        )
        if (committed and not uploads) or directory.deletions or not (objects or uploads):
            continue
        known = [parts[each.upload_id] for each in uploads if each.upload_id in parts]
        in_parts = sum(known) * len(uploads) // len(known) if known else 0
        times = [*(each.modified_at for each in objects), *(each.initiated_at for each in uploads)]
        found.append(
            SaveInProgress(
                name=name,
                size=sum(each.size for each in objects) + in_parts,
                objects=len(objects),
                uploads=len(uploads),
                estimated=len(known) < len(uploads),
                since=min(times),
                last=max(times),
                expected=expected,
            )
        )
    return found


def with_rates(saves: Iterable[SaveInProgress], now: float, before: Look | None) -> tuple[SaveInProgress, ...]:
    """The saves with their bytes per second since the look ``before``. S3's clock has whole seconds."""
    if before is None or now <= before.now:
        return tuple(saves)
    sizes = {save.name: save.size for save in before.saves}
    return tuple(
        replace(save, rate=max(0.0, (save.size - sizes[save.name]) / (now - before.now)))
        if save.name in sizes
        else save
        for save in saves
    )


def _deletions(seen: dict[str, Directory]) -> Iterable[DeletionInProgress]:
    for name, directory in seen.items():
        if directory.deletions:
            committed = bool(directory.commits)
            since = min(each.modified_at for each in directory.deletions.values())
            yield DeletionInProgress(name, since, committed, None if committed else directory.data_size)


def _leases(seen: dict[str, Directory], now: float) -> Iterable[Lease]:
    for name, directory in seen.items():
        ends = [each.modified_at + each.kind.seconds for each in directory.leases]
        active = [end for end in ends if now < end + LEASE_MARGIN]
        if active:
            yield Lease(name, len(active), max(active))
