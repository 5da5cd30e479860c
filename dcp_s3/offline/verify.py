"""Verifies that a checkpoint is still what was saved."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from dcp_s3 import errors
from dcp_s3.checkpoint.directory import Directory, list_directory
from dcp_s3.checkpoint.stored_metadata import check_metadata, fetch_metadata, find_crc_mismatch
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.layout import SAVE_ID_KEY, manifest_object, metadata_object
from dcp_s3.limit import UNLIMITED
from dcp_s3.memory import ReadTarget
from dcp_s3.offline.place import OnProgress, ahead
from dcp_s3.offline.verify_plan import (
    Problem,
    StoredData,
    StoredItem,
    check_manifest,
    cut_range,
    find_items,
    find_mismatches,
    is_crc,
    place_items,
)
from dcp_s3.s3.store import S3Store, store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import StoredObject
from dcp_s3.units import one_line, plural
from dcp_s3.url import CheckpointURL, parse_url

BLOCK = 2**20
"""Bytes that a connection receives into, again and again; added to a checksum while still in the CPU's cache."""

_ROUNDS = 3
_CHANGES: dict[type[Exception], str] = {
    errors.ObjectNotFoundError: "was deleted while it was read",
    errors.PreconditionFailedError: "was replaced while it was read",
    errors.OutOfRangeError: "became shorter while it was read",
}


@dataclass(frozen=True)
class VerifyReport:
    """The things that `verify` checked, and the problems that it found.

    >>> verify("s3://bucket/run/step-00002000")
    VerifyReport('s3://bucket/run/step-00002000', ok, fast, objects=1, items=2)
    """

    url: str
    """URL of the checkpoint."""
    mode: Literal["fast", "full"]
    """``fast`` (metadata, manifest, presence of the objects) or ``full`` (their bytes, too)."""
    objects: int
    """Number of data objects checked."""
    items: int
    """Number of saved items (tensor chunks and others) checked."""
    bytes_read: int
    """Bytes read from all objects, metadata included."""
    objects_without_checksum: int
    """Number of data objects whose checksum is not recorded."""
    items_without_checksum: int
    """Number of items whose checksum is not recorded; unless their object has one, only a load finds damage of them."""
    problems: tuple[Problem, ...]
    """Problems found, by object."""

    def __repr__(self) -> str:
        found = "ok" if self.ok else f"{plural(len(self.problems), 'problem')}"
        first = str(self.problems[0]) if self.problems else None
        return one_line(
            "VerifyReport", repr(self.url), found, self.mode, objects=self.objects, items=self.items, first=first
        )

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong, as far as the mode tells."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """The fields and ``ok``, for JSON."""
        return {**asdict(self), "ok": self.ok}


def verify(
    url: str | os.PathLike[str],
    *,
    full: bool = False,
    settings: SettingsLike = None,
    on_total: Callable[[int], None] | None = None,
    on_progress: OnProgress | None = None,
) -> VerifyReport:
    """Check whether a committed checkpoint is still what was saved.

    The metadata must load and match its checksum, and the manifest must agree with it. Every object that they name must
    exist, with the recorded size and room for its items. ``full`` also reads the data: it compares the CRC-64 of every
    object and every item. What does not match is read once more before it is reported. Objects without any checksum (of
    other writers, or saved with ``DCP_S3_CHECKSUM=none``) are counted and not read: load them to know.

    Memory: a block of 1 MiB per connection (``DCP_S3_CONCURRENCY``).

    >>> verify("s3://bucket/run/step-00002000", full=True).ok
    True

    Args:
        on_total: called with the bytes of data to be read; with ``full`` only. Called again if the checkpoint
            was replaced meanwhile, and is verified again.

    Raises:
        CheckpointNotFoundError: no committed checkpoint is there.
        InvalidURLError, SettingsError
        StorageError: there is no verdict: missing bucket, credentials, permissions, network.
        CheckpointError: the checkpoint was replaced again and again while it was verified.
    """
    parsed = parse_url(url)
    resolved = resolve_settings(settings)
    store = store_of(parsed, resolved, UNLIMITED.shared(resolved.stall_timeout))
    for _ in range(_ROUNDS):
        check = _Check(store, parsed)
        report = check.run(full=full, on_total=on_total, on_progress=on_progress)
        if report.ok or check.is_current():
            return report
    raise errors.CheckpointError(
        f"{parsed} was replaced {_ROUNDS} times while it was verified. Remedy: verify it when nobody saves to it",
        url=str(parsed),
    )


@dataclass(frozen=True)
class _Commit:
    """One ``.metadata``, with its manifest."""

    rank: int | None
    """Rank that saved it; None with collectives."""
    stored: StoredObject
    manifest: Manifest | None
    """None if it is missing or unreadable."""
    items: Sequence[StoredItem]
    problems: Sequence[Problem]


class _Check:
    """One look at a checkpoint."""

    def __init__(self, store: S3Store, url: CheckpointURL) -> None:
        self._store = store
        self._url = url
        self._commits: list[_Commit] = []
        self._problems: list[Problem] = []
        self._bytes_read = 0

    def run(
        self, *, full: bool, on_total: Callable[[int], None] | None, on_progress: OnProgress | None
    ) -> VerifyReport:
        sizes = self._read_commits()
        items: list[StoredItem] = []
        entries: list[ObjectEntry] = []
        for commit in self._commits:
            self._problems += commit.problems
            items += commit.items
            entries += commit.manifest.objects if commit.manifest is not None else ()
        objects, problems = place_items(items, entries, sizes)
        self._problems += problems
        check = _ByteCheck(self._store, self._url)
        if full:
            if on_total is not None:
                on_total(sum(each.size for each in objects if each.is_checked))
            damages = check.run([each for each in objects if each.is_checked], on_progress)
            self._problems += sorted(damages, key=lambda problem: problem.path)
        paths = {item.path for item in items} | {entry.path for entry in entries}
        recorded = {entry.path for entry in entries if is_crc(entry.crc64nvme)}
        return VerifyReport(
            url=str(self._url),
            mode="full" if full else "fast",
            objects=len(paths),
            items=len(items),
            bytes_read=self._bytes_read + check.bytes_read,
            objects_without_checksum=len(paths - recorded),
            items_without_checksum=sum(item.crc is None for item in items),
            problems=tuple(self._problems),
        )

    def is_current(self) -> bool:
        """Whether the checkpoint is still the one that was looked at: an overwrite deletes the old one's objects."""
        return all(
            fetch_metadata(self._store, self._url, commit.rank).etag == commit.stored.etag for commit in self._commits
        )

    def _read_commits(self) -> Mapping[str, int]:
        """Fetch metadata and manifests; returns the sizes of all objects of the checkpoint, by relative path.

        With collectives, the metadata is fetched before the listing: so what an overwrite removes meanwhile is missing
        from the listing, and not the other way round.
        """
        try:
            stored = fetch_metadata(self._store, self._url)
        except errors.CheckpointNotFoundError as error:
            directory = list_directory(self._store, self._url)
            if not directory.ranks:
                raise
            for rank in directory.ranks:
                self._add_commit(rank, fetch_metadata(self._store, self._url, rank), directory)
            self._keep_ranks_of_save(error)
            return directory.sizes
        directory = list_directory(self._store, self._url)
        self._add_commit(None, stored, directory)
        return directory.sizes

    def _add_commit(self, rank: int | None, stored: StoredObject, directory: Directory) -> None:
        path, metadata = metadata_object(rank), None
        items: list[StoredItem] = []
        problems: list[Problem] = []
        self._bytes_read += len(stored.data)
        try:
            metadata = check_metadata(stored, self._url, rank)
        except (errors.CorruptCheckpointError, errors.UnsafeMetadataError) as error:
            problems.append(Problem(path, None, str(error)))
        named = stored.metadata.get(SAVE_ID_KEY)
        inside = getattr(getattr(metadata, "storage_meta", None), "save_id", None)
        if named is not None and metadata is not None and inside != named:
            problems.append(Problem(path, None, f"is of the save {inside!r}, its user metadata of {named!r}"))
        save_id = str(named if named is not None else inside)
        manifest_path, manifest = manifest_object(save_id, rank), None
        try:
            manifest = self._read_manifest(save_id, rank, directory, expected=named is not None)
        except ValueError as error:
            problems.append(Problem(manifest_path, None, str(error)))
        if metadata is not None:
            items, found = find_items(metadata, path, of_rank=rank is not None)
            problems += found
        if manifest is not None:
            problems += check_manifest(
                manifest, manifest_path, save_id=save_id, rank=rank, metadata=metadata, items=items
            )
        self._commits.append(_Commit(rank, stored, manifest, items, problems))

    def _read_manifest(
        self, save_id: str, rank: int | None, directory: Directory, *, expected: bool
    ) -> Manifest | None:
        """The manifest of a save, None if there is none. ValueError says how it is missing or damaged."""
        found = directory.manifests.get(rank, {}).get(save_id)
        if found is None:
            if expected:
                raise ValueError(f"is missing; {metadata_object(rank)} names it")
            return None
        try:
            stored = self._store.get(self._url.key(found.path))
        except errors.ObjectNotFoundError:
            raise ValueError("was deleted meanwhile") from None
        self._bytes_read += len(stored.data)
        mismatch = find_crc_mismatch(stored)
        if mismatch is not None:
            raise ValueError(f"is damaged: {mismatch}")
        try:
            return Manifest.from_json(stored.data)
        except ValueError as error:
            raise ValueError(f"cannot be read: {error}") from error

    def _keep_ranks_of_save(self, not_found: errors.CheckpointNotFoundError) -> None:
        """Drop ranks that the last save did not have; CheckpointNotFoundError if some of its own have not committed."""
        manifests = [commit.manifest for commit in self._commits if commit.manifest is not None]
        present = {commit.rank for commit in self._commits}
        if not manifests:
            highest = max(rank for rank in present if rank is not None)
            missing = sorted(set(range(highest)) - present)
            self._problems += [Problem(metadata_object(rank), None, "is missing") for rank in missing]
            return
        last = max(manifests, key=lambda manifest: manifest.created_at)
        missing = sorted(set(range(last.world_size)) - present)
        if missing:
            raise errors.CheckpointNotFoundError(
                f"the checkpoint at {self._url} is incomplete: of {last.world_size} ranks, {missing} have not "
                "committed. Remedy: wait until the save is done; if it was cut off, use another checkpoint",
                url=str(self._url),
            ) from not_found
        self._commits = [commit for commit in self._commits if (commit.rank or 0) < last.world_size]
        for commit in self._commits:
            if commit.manifest is not None and commit.manifest.world_size != last.world_size:
                what = f"is of a save by {commit.manifest.world_size} ranks, the last one was by {last.world_size}"
                self._problems.append(Problem(metadata_object(commit.rank), None, what))


# --- the bytes ---------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """One reading of an object, and what it has found."""

    data: StoredData
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    """Start, length and CRC-64/NVME of what has arrived."""
    problems: dict[StoredItem | None, str] = field(default_factory=dict)
    """What is wrong with items; at None, with the object."""
    change: str | None = None
    """How it was deleted or written over meanwhile."""

    def confirmed_by(self, again: _Reading) -> Iterator[Problem]:
        """What both readings have found; the object as a whole only where no item of it is wrong."""
        change = self.change or again.change
        if change:
            yield Problem(self.data.path, None, change)
            return
        found = {item: what for item, what in again.problems.items() if item in self.problems}
        for item, what in found.items():
            if item is not None or len(found) == 1:
                yield Problem(self.data.path, item.fqn if item else None, what)


class _ByteCheck:
    """Reads every byte of data objects, in parallel, through one block per connection, and compares their checksums.

    What does not match is read once more.
    """

    def __init__(self, store: S3Store, url: CheckpointURL) -> None:
        self._cancel = threading.Event()
        self._store = store.within(replace(store.limit, cancel=self._cancel))
        self._url = url
        self._width = store.read_width()
        self._blocks: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.bytes_read = 0

    def run(self, objects: Sequence[StoredData], on_progress: OnProgress | None) -> list[Problem]:
        """Progress does not count bytes that are read again."""
        for _ in range(self._width if objects else 0):
            self._blocks.put(memoryview(bytearray(BLOCK)))
        bad = [
            each for each in self._read_all(objects, on_progress or (lambda _: None)) if each.problems or each.change
        ]
        again = self._read_all([each.data for each in bad if not each.change], lambda _: None)
        by_path = {each.data.path: each for each in again}
        return [problem for each in bad for problem in each.confirmed_by(by_path.get(each.data.path, each))]

    def _read_all(self, objects: Sequence[StoredData], on_progress: OnProgress) -> list[_Reading]:
        readings = [_Reading(data) for data in objects]
        step = self._store.settings.max_part_size
        requests = ((each, start) for each in readings for start in range(0, each.data.size, step))
        if readings:
            with ahead(self._read, requests, self._width, waiting=self._width, cancel=self._cancel) as done:
                for count in done:
                    on_progress(count)
        for each in readings:
            if not each.change:
                each.problems = find_mismatches(each.data, each.segments)
        return readings

    def _read(self, request: tuple[_Reading, int]) -> int:
        reading, start = request
        length = min(self._store.settings.max_part_size, reading.data.size - start)
        if reading.change:
            return length
        block = self._blocks.get()
        try:
            targets = [
                ReadTarget(block[:size], checksum=True) for size in cut_range(reading.data, start, length, BLOCK)
            ]
            self._store.read(self._url.key(reading.data.path), start, targets)
        except tuple(_CHANGES) as error:
            reading.change = next(text for kind, text in _CHANGES.items() if isinstance(error, kind))
            return length
        finally:
            self._blocks.put(block)
        for target in targets:
            reading.segments.append((start, target.view.nbytes, target.crc or 0))
            start += target.view.nbytes
        with self._lock:
            self.bytes_read += length
        return length
