"""Verifies that a checkpoint is still what was saved."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import check_metadata, fetch_metadata, find_crc_mismatch
from dcp_s3.checkpoint.directory import list_directory
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
from dcp_s3.store import StoredObject, same_etag
from dcp_s3.units import one_line, plural
from dcp_s3.url import CheckpointURL, parse_url

BLOCK = 2**20
"""Bytes that a connection receives into, again and again; added to a checksum while still in the CPU's cache."""

_ROUNDS = 3


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


@dataclass
class _Commit:
    """One ``.metadata``, with its manifest."""

    rank: int | None
    """Rank that saved it; None with collectives."""
    stored: StoredObject
    manifest_path: str = ""
    metadata: Metadata | None = None
    """None if it is damaged."""
    manifest: Manifest | None = None
    """None if it is missing or damaged."""
    problems: list[Problem] = field(default_factory=list)
    bytes_read: int = 0
    """Bytes of both."""


class _Check:
    """One look at a checkpoint."""

    def __init__(self, store: S3Store, url: CheckpointURL) -> None:
        self._store = store
        self._url = url
        self._directory = list_directory(store, url)
        self._commits = [self._read_commit(rank) for rank in self._directory.committing or [None]]

    def run(
        self, *, full: bool, on_total: Callable[[int], None] | None, on_progress: OnProgress | None
    ) -> VerifyReport:
        items: list[StoredItem] = []
        entries: list[ObjectEntry] = []
        problems = self._drop_other_saves()
        for commit in self._commits:
            problems += commit.problems
            if commit.metadata is not None:
                found, flaws = find_items(
                    commit.metadata, metadata_object(commit.rank), of_rank=commit.rank is not None
                )
                items += found
                problems += flaws
            if commit.manifest is not None:
                problems += check_manifest(commit.manifest, commit.manifest_path, commit.metadata)
                entries += commit.manifest.objects
        objects, flaws = place_items(items, entries, self._directory.sizes)
        problems += flaws
        check = _ByteCheck(self._store, self._url)
        if full:
            checked = [each for each in objects if each.is_checked]
            if on_total is not None:
                on_total(sum(each.size for each in checked))
            problems += check.run(checked, on_progress or (lambda _: None))
        paths = {item.path for item in items} | {entry.path for entry in entries}
        recorded = {entry.path for entry in entries if is_crc(entry.crc64nvme)}
        return VerifyReport(
            url=str(self._url),
            mode="full" if full else "fast",
            objects=len(paths),
            items=len(items),
            bytes_read=sum(commit.bytes_read for commit in self._commits) + check.bytes_read,
            objects_without_checksum=len(paths - recorded),
            items_without_checksum=sum(item.crc is None for item in items),
            problems=tuple(problems),
        )

    def is_current(self) -> bool:
        """Whether the checkpoint is still the one that was looked at: an overwrite deletes the old one's objects."""
        for commit in self._commits:
            listed = self._directory.commits.get(commit.rank)
            now = fetch_metadata(self._store, self._url, commit.rank)
            if listed is None or not (same_etag(listed.etag, now.etag) and same_etag(commit.stored.etag, now.etag)):
                return False
        return True

    def _read_commit(self, rank: int | None) -> _Commit:
        commit = _Commit(rank, fetch_metadata(self._store, self._url, rank))
        stored, path = commit.stored, metadata_object(rank)
        commit.bytes_read = len(stored.data)
        try:
            commit.metadata = check_metadata(stored, self._url, rank)
        except (errors.CorruptCheckpointError, errors.UnsafeMetadataError) as error:
            commit.problems.append(Problem(path, None, str(error)))
        named = stored.metadata.get(SAVE_ID_KEY)
        save_id = named or str(getattr(getattr(commit.metadata, "storage_meta", None), "save_id", None))
        commit.manifest_path = manifest_object(save_id, rank)
        if commit.manifest_path in self._directory.objects:
            try:
                commit.manifest = self._read_manifest(commit)
            except (errors.ObjectNotFoundError, ValueError) as error:
                commit.problems.append(Problem(commit.manifest_path, None, f"is damaged: {error}"))
        elif named:
            commit.problems.append(Problem(commit.manifest_path, None, f"is missing; {path} names it"))
        return commit

    def _read_manifest(self, commit: _Commit) -> Manifest:
        stored = self._store.get(self._url.key(commit.manifest_path))
        commit.bytes_read += len(stored.data)
        mismatch = find_crc_mismatch(stored)
        if mismatch is not None:
            raise ValueError(mismatch)
        return Manifest.from_json(stored.data)

    def _drop_other_saves(self) -> list[Problem]:
        """Of ranks that have each committed, drop those that the last save did not have. Its own may be missing."""
        ranks = [commit.rank for commit in self._commits if commit.rank is not None]
        if not ranks:
            return []
        manifests = [commit.manifest for commit in self._commits if commit.manifest is not None]
        last = max(manifests, key=lambda manifest: manifest.created_at, default=None)
        expected = range(max(ranks) + 1 if last is None else last.world_size)
        self._commits = [commit for commit in self._commits if commit.rank in expected]
        wrong = {rank: "is missing: its rank has not committed" for rank in expected if rank not in ranks}
        for commit in self._commits:
            if commit.manifest is not None and commit.manifest.world_size != len(expected):
                wrong[commit.rank or 0] = "is of a save by another number of ranks than the last one"
        return [Problem(metadata_object(rank), None, what) for rank, what in sorted(wrong.items())]


# --- the bytes ---------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """One reading of an object."""

    data: StoredData
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    """Start, length and CRC-64/NVME of what has arrived."""
    failure: str | None = None
    """Why it could not be read."""

    def find_problems(self) -> list[Problem]:
        if self.failure is not None:
            return [Problem(self.data.path, None, self.failure)]
        return find_mismatches(self.data, self.segments)


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

    def run(self, objects: Sequence[StoredData], on_progress: OnProgress) -> list[Problem]:
        """Problems by object. Progress does not count bytes that are read again."""
        for _ in range(self._width if objects else 0):
            self._blocks.put(memoryview(bytearray(BLOCK)))
        doubtful = [each.data for each in self._read_all(objects, on_progress) if each.find_problems()]
        again = self._read_all(doubtful, lambda _: None)
        return [problem for each in again for problem in each.find_problems()]

    def _read_all(self, objects: Sequence[StoredData], on_progress: OnProgress) -> list[_Reading]:
        readings = [_Reading(data) for data in objects]
        step = self._store.settings.max_part_size
        requests = ((each, start) for each in readings for start in range(0, each.data.size, step))
        if readings:
            with ahead(self._read, requests, self._width, waiting=self._width, cancel=self._cancel) as done:
                for count in done:
                    on_progress(count)
        return readings

    def _read(self, request: tuple[_Reading, int]) -> int:
        reading, start = request
        length = min(self._store.settings.max_part_size, reading.data.size - start)
        if reading.failure:
            return length
        block = self._blocks.get()
        try:
            targets = [
                ReadTarget(block[:size], checksum=True) for size in cut_range(reading.data, start, length, BLOCK)
            ]
            self._store.read(self._url.key(reading.data.path), start, targets)
        except (errors.ObjectNotFoundError, errors.PreconditionFailedError, errors.OutOfRangeError) as error:
            reading.failure = f"was deleted, replaced or cut off while it was read: {error}"
            return length
        finally:
            self._blocks.put(block)
        for target in targets:
            reading.segments.append((start, target.view.nbytes, target.crc or 0))
            start += target.view.nbytes
        with self._lock:
            self.bytes_read += length
        return length
