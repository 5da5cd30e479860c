"""Verifies that a checkpoint is still what was saved."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import (
    check_metadata,
    fetch_metadata,
    find_crc_mismatch,
    not_found_error,
)
from dcp_s3.checkpoint.directory import Directory, list_directory
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.layout import SAVE_ID_KEY, manifest_object, metadata_object
from dcp_s3.limit import UNLIMITED
from dcp_s3.load.weights import SUFFIX
from dcp_s3.memory import ReadTarget
from dcp_s3.offline.place import OnProgress, OnTotal, ahead
from dcp_s3.offline.verify_plan import (
    Problem,
    StoredData,
    StoredItem,
    check_manifest,
    cut_range,
    find_items,
    find_mismatches,
    place_items,
)
from dcp_s3.s3.store import S3Store, store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import same_etag
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
    on_total: OnTotal | None = None,
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
        directory = list_directory(store, parsed)
        if not directory.commits and any(path.endswith(SUFFIX) for path in directory.objects):
            raise not_found_error(parsed, why=": safetensors weights lie there, see `dcp-s3 show`")
        commits = [_read_commit(store, parsed, directory, rank) for rank in directory.committing or [None]]
        report = _check(store, parsed, directory, commits, full, on_total, on_progress or (lambda _: None))
        if report.ok or _is_current(store, parsed, directory, commits):
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
    etag: str
    bytes_read: int
    """Bytes of both."""
    metadata: Metadata | None = None
    """None if it is damaged."""
    manifest_path: str = ""
    manifest: Manifest | None = None
    """None if it is missing or damaged."""
    problems: list[Problem] = field(default_factory=list)


def _read_commit(store: S3Store, url: CheckpointURL, directory: Directory, rank: int | None) -> _Commit:
    stored, path = fetch_metadata(store, url, rank), metadata_object(rank)
    commit = _Commit(rank, stored.etag, len(stored.data))
    try:
        commit.metadata = check_metadata(stored, url, rank)
    except (errors.CorruptCheckpointError, errors.UnsafeMetadataError) as error:
        commit.problems.append(Problem(path, None, str(error)))
    named = stored.metadata.get(SAVE_ID_KEY)
    save_id = named or str(getattr(getattr(commit.metadata, "storage_meta", None), "save_id", None))
    commit.manifest_path = manifest_object(save_id, rank)
    if commit.manifest_path not in directory.objects:
        if named:
            commit.problems.append(Problem(commit.manifest_path, None, f"is missing; {path} names it"))
        return commit
    try:
        found = store.get(url.key(commit.manifest_path))
        commit.bytes_read += len(found.data)
        mismatch = find_crc_mismatch(found)
        if mismatch is not None:
            raise ValueError(mismatch)
        commit.manifest = Manifest.from_json(found.data)
    except (errors.ObjectNotFoundError, ValueError) as error:
        commit.problems.append(Problem(commit.manifest_path, None, f"is damaged: {error}"))
    return commit


def _is_current(store: S3Store, url: CheckpointURL, directory: Directory, commits: Sequence[_Commit]) -> bool:
    """Whether the checkpoint is still the one that was looked at: an overwrite deletes the old one's objects."""
    for commit in commits:
        listed, now = directory.commits.get(commit.rank), fetch_metadata(store, url, commit.rank)
        if listed is None or not (same_etag(listed.etag, now.etag) and same_etag(commit.etag, now.etag)):
            return False
    return True


def _check(
    store: S3Store, url: CheckpointURL, directory: Directory, commits: Sequence[_Commit], full: bool,
    on_total: OnTotal | None, on_progress: OnProgress,
) -> VerifyReport:  # fmt: skip
    """One look at a checkpoint: who has committed, what metadata and manifests say, what is there, its bytes."""
    problems: list[Problem] = []
    if None not in directory.commits and directory.commits:
        # The last save tells which ranks there are. Commits of other ranks, of an earlier one, are not loaded.
        manifests = [commit.manifest for commit in commits if commit.manifest is not None]
        last = max(manifests, key=lambda manifest: manifest.created_at, default=None)
        size = max(directory.ranks) + 1 if last is None else last.world_size
        commits = [commit for commit in commits if commit.rank in range(size)]
        wrong = {rank: "is missing: its rank has not committed" for rank in range(size) if rank not in directory.ranks}
        for commit in commits:
            if commit.manifest is not None and commit.manifest.world_size != size:
                wrong[commit.rank or 0] = "is of a save by another number of ranks than the last one"
        problems = [Problem(metadata_object(rank), None, what) for rank, what in sorted(wrong.items())]
    items: list[StoredItem] = []
    entries: list[ObjectEntry] = []
    for commit in commits:
        problems += commit.problems
        if commit.metadata is not None:
            found, flaws = find_items(commit.metadata, metadata_object(commit.rank), of_rank=commit.rank is not None)
            items += found
            problems += flaws
        if commit.manifest is not None:
            problems += check_manifest(commit.manifest, commit.manifest_path, commit.metadata)
            entries += commit.manifest.objects
    objects, flaws = place_items(items, entries, directory.sizes)
    problems += flaws
    bytes_read = sum(commit.bytes_read for commit in commits)
    if full:
        checked = [each for each in objects if each.is_checked]
        if on_total is not None:
            on_total(sum(each.size for each in checked))
        flaws, count = _check_bytes(store, url, checked, on_progress)
        problems += flaws
        bytes_read += count
    paths = {item.path for item in items} | {entry.path for entry in entries}
    recorded = {entry.path for entry in entries if entry.crc64nvme}
    return VerifyReport(
        url=str(url),
        mode="full" if full else "fast",
        objects=len(paths),
        items=len(items),
        bytes_read=bytes_read,
        objects_without_checksum=len(paths - recorded),
        items_without_checksum=sum(item.crc is None for item in items),
        problems=tuple(problems),
    )


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


def _check_bytes(
    store: S3Store, url: CheckpointURL, objects: Sequence[StoredData], on_progress: OnProgress
) -> tuple[list[Problem], int]:
    """Read every byte of data objects, in parallel, through one block for each connection, and compare their checksums.
    What does not match is read once more. Returns the problems by object, and how many bytes were read. Progress does
    not count those that are read again."""
    cancel = threading.Event()
    store = store.within(replace(store.limit, cancel=cancel))
    width, step = store.read_width(), store.settings.max_part_size
    blocks: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(width if objects else 0):
        blocks.put(memoryview(bytearray(BLOCK)))

    def read(request: tuple[_Reading, int]) -> int:
        reading, start = request
        length = min(step, reading.data.size - start)
        if reading.failure:
            return 0
        block = blocks.get()
        try:
            sizes = cut_range(reading.data, start, length, BLOCK)
            targets = [ReadTarget(block[:size], checksum=True) for size in sizes]
            store.read(url.key(reading.data.path), start, targets)
        except (errors.ObjectNotFoundError, errors.PreconditionFailedError, errors.OutOfRangeError) as error:
            reading.failure = f"was deleted, replaced or cut off while it was read: {error}"
            return 0
        finally:
            blocks.put(block)
        for target in targets:
            reading.segments.append((start, target.view.nbytes, target.crc or 0))
            start += target.view.nbytes
        return length

    bytes_read = 0
    problems: dict[str, list[Problem]] = {}
    for moved in (on_progress, lambda _: None):
        readings = [_Reading(data) for data in objects]
        requests = ((each, start) for each in readings for start in range(0, each.data.size, step))
        if readings:
            with ahead(read, requests, width, waiting=width, cancel=cancel) as done:
                for count in done:
                    bytes_read += count
                    moved(count)
        problems = {each.data.path: each.find_problems() for each in readings}
        objects = [data for data in objects if problems[data.path]]
    return [problem for found in problems.values() for problem in found], bytes_read
