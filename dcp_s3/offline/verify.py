"""Verifies that a checkpoint is still what was saved."""

from __future__ import annotations

import os
import queue
import re
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import check_metadata, fetch_metadata, not_found_error
from dcp_s3.checkpoint.directory import Directory, list_directory
from dcp_s3.checkpoint.look import find_crc_mismatch
from dcp_s3.format.blocks import get_facts
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.layout import SAVE_ID_KEY, manifest_object, metadata_object
from dcp_s3.format.saved_entries import find_chunk, find_flaws
from dcp_s3.limit import UNLIMITED
from dcp_s3.load.weights import SUFFIX
from dcp_s3.memory import ReadTarget, combine_crc64nvme, crc64nvme_between, crc_hex
from dcp_s3.offline.place import OnProgress, OnTotal, ahead
from dcp_s3.s3.store import S3Store, store_of
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.store import same_etag
from dcp_s3.units import one_line, plural
from dcp_s3.url import CheckpointURL, parse_url

BLOCK = 2**20
"""Bytes that a connection receives into, again and again; added to a checksum while still in the CPU's cache."""


@dataclass(frozen=True)
class Problem:
    """Something about a checkpoint that is not as it was saved.

    >>> for problem in verify("s3://bucket/run/step-00002000").problems:
    ...     print(problem)
    """

    path: str
    """Path of the object, relative to the checkpoint."""
    fqn: str | None
    """Fully qualified name of the affected entry; None for the object as a whole."""
    what: str
    """What is wrong."""

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" if self.fqn is None else f"{self.path}: {self.fqn!r} {self.what}"


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
    exist, with the recorded size and room for its items. ``full`` also compares the CRC-64 of every object and every
    item. What does not match is read once more before it is reported. Objects without any checksum (of other writers,
    or saved with ``DCP_S3_CHECKSUM=none``) are counted and not read: load them to know.

    Memory: a block of 1 MiB per connection (``DCP_S3_CONCURRENCY``).

    >>> verify("s3://bucket/run/step-00002000", full=True).ok
    True

    Args:
        on_total: called with the bytes of data to be read; with ``full`` only, and again if it was replaced meanwhile.

    Raises:
        CheckpointNotFoundError: no committed checkpoint is there.
        InvalidURLError, SettingsError
        StorageError: there is no verdict: missing bucket, credentials, permissions, network.
    """
    parsed = parse_url(url)
    resolved = resolve_settings(settings)
    store = store_of(parsed, resolved, UNLIMITED.shared(resolved.stall_timeout))
    while True:
        directory = list_directory(store, parsed)
        if not directory.commits and any(path.endswith(SUFFIX) for path in directory.objects):
            raise not_found_error(parsed, why=": safetensors weights lie there")
        commits = [_read_commit(store, parsed, directory, rank) for rank in directory.committing or [None]]
        report = _check(store, parsed, directory, commits, full, on_total, on_progress or (lambda _: None))
        if report.ok:
            return report
        # Is it still the one that was looked at? An overwrite deletes the old one's objects: then verify the new one.
        now = [(each, fetch_metadata(store, parsed, each.rank).etag) for each in commits]
        if all(
            (listed := directory.commits.get(each.rank)) and same_etag(listed.etag, etag) and same_etag(each.etag, etag)
            for each, etag in now
        ):
            return report


@dataclass
class _Commit:
    """What one ``.metadata`` and its manifest say."""

    rank: int | None
    """Rank that saved it; None with collectives."""
    etag: str
    bytes_read: int
    """Bytes of both."""
    items: list[_Item] = field(default_factory=list)
    manifest: Manifest | None = None
    """None if it is missing or damaged."""
    problems: list[Problem] = field(default_factory=list)


def _read_commit(store: S3Store, url: CheckpointURL, directory: Directory, rank: int | None) -> _Commit:
    stored, path, metadata = fetch_metadata(store, url, rank), metadata_object(rank), None
    commit = _Commit(rank, stored.etag, len(stored.data))
    try:
        metadata = check_metadata(stored, url, rank)
        commit.items, commit.problems = _find_items(metadata, path, of_rank=rank is not None)
    except (errors.CorruptCheckpointError, errors.UnsafeMetadataError) as error:
        commit.problems.append(Problem(path, None, str(error)))
    named = stored.metadata.get(SAVE_ID_KEY)
    path = manifest_object(named or str(getattr(getattr(metadata, "storage_meta", None), "save_id", None)), rank)
    if path not in directory.objects:
        if named:
            commit.problems.append(Problem(path, None, f"is missing; {metadata_object(rank)} names it"))
        return commit
    try:
        found = store.get(url.key(path))
        commit.bytes_read += len(found.data)
        mismatch = find_crc_mismatch(found)
        if mismatch is not None:
            raise ValueError(mismatch)
        commit.manifest = Manifest.from_json(found.data)
        commit.problems += [Problem(path, None, what) for what in _contradictions(commit.manifest, path, metadata)]
    except (errors.ObjectNotFoundError, ValueError) as error:
        commit.problems.append(Problem(path, None, f"is damaged: {error}"))
    return commit


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
    problems += [problem for commit in commits for problem in commit.problems]
    items = [item for commit in commits for item in commit.items]
    entries = [entry for commit in commits if commit.manifest is not None for entry in commit.manifest.objects]
    objects, flaws = _place(items, entries, {path: found.size for path, found in directory.objects.items()})
    problems += flaws
    bytes_read = sum(commit.bytes_read for commit in commits)
    if full:
        if on_total is not None:
            on_total(sum(each.size for each in objects))
        flaws, count = _check_bytes(store, url, objects, on_progress)
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


# --- what the bytes must be, by metadata, manifest and listing ------------------------------------------


class _Item(NamedTuple):
    fqn: str
    path: str
    start: int
    """First byte of the item in the object."""
    length: int
    crc: int | None
    """Recorded CRC-64/NVME of the item's checked bytes, None without."""
    first: int
    """First byte, in the object, that ``crc`` covers."""
    stop: int
    """Byte after the last one that it covers."""


def _find_items(metadata: Metadata, path: str, *, of_rank: bool) -> tuple[list[_Item], list[Problem]]:
    """The items that metadata (at ``path``) places in objects, and where it contradicts itself. That of one rank
    describes only a part of each tensor."""
    if metadata.storage_data is None:
        return [], [Problem(path, None, "does not say where its items lie")]
    items, problems = [], []
    for index, info in metadata.storage_data.items():
        saved, start, length = metadata.state_dict_metadata.get(index.fqn), 0, info.length
        raw_offset, crc = get_facts(info)
        if isinstance(saved, TensorStorageMetadata):
            chunk = find_chunk(saved, index)
            if chunk is None:
                length = info.length + 1  # which does not fit
            elif raw_offset is not None:
                start, length = raw_offset, chunk.sizes.numel() * saved.properties.dtype.itemsize
        if start + length > info.length:
            what = f"has no chunk at {tuple(index.offset or ())} that fits into the {info.length} bytes stored there"
            problems.append(Problem(path, index.fqn, what))
            continue
        first = info.offset + start
        covered = crc, first, first + length
        items.append(_Item(index.fqn, info.relative_path, info.offset, info.length, *covered))
    flaws = find_flaws(metadata, filled=not of_rank)
    return items, problems + [Problem(path, fqn, flaw) for fqn, flaw in flaws]


def _contradictions(manifest: Manifest, path: str, metadata: Metadata | None) -> list[str]:
    """Where a manifest (at ``path``) contradicts its name, itself or its metadata, which is None if it cannot be
    loaded."""
    found, entries = [], Counter(entry.path for entry in manifest.objects)
    if manifest_object(manifest.save_id, manifest.rank) != path:
        found.append(f"is of the save {manifest.save_id!r} and the rank {manifest.rank}")
    found += [f"names {each} twice" for each, count in entries.items() if count > 1]
    for entry in manifest.objects:
        if entry.crc64nvme is not None and not re.fullmatch("[0-9a-f]{16}", str(entry.crc64nvme)):
            found.append(f"has no possible checksum of {entry.path}: {entry.crc64nvme!r}")
    if metadata is not None:
        stored = metadata.storage_data or {}
        if manifest.items != len(stored):
            found.append(f"counts {manifest.items} items, the metadata {len(stored)}")
        missing = sorted({info.relative_path for info in stored.values()} - entries.keys())
        found += [f"does not name {name}, in which items lie" for name in missing]
    return found


def _place(
    items: Iterable[_Item], entries: Iterable[ObjectEntry], sizes: Mapping[str, int]
) -> tuple[list[_Reading], list[Problem]]:
    """Place items in the objects that exist, whose sizes are given by path: those that have a checksum, and what is
    wrong: objects that are missing, of another size, or too short for their items."""
    by_path: dict[str, list[_Item]] = {}
    for item in items:
        by_path.setdefault(item.path, []).append(item)
    recorded = {entry.path: entry for entry in entries}
    found: list[_Reading] = []
    problems: list[Problem] = []
    for path in sorted(by_path.keys() | recorded.keys()):
        size, entry, checked = sizes.get(path), recorded.get(path), []
        if size is None:
            problems.append(Problem(path, None, "is missing"))
            continue
        if entry is not None and entry.size != size:
            problems.append(Problem(path, None, f"has {size} bytes, recorded were {entry.size}"))
        for item in by_path.get(path, ()):
            if (stop := item.start + item.length) > size:
                where = f"lies at bytes {item.start} to {stop - 1}, but its object ends at {size}"
                problems.append(Problem(path, item.fqn, where))
            elif item.crc is not None:
                checked.append(item)
        crc = entry.crc64nvme if entry is not None and entry.size == size else None
        if crc is not None or any(item.stop > item.first for item in checked):
            found.append(_Reading(path, size, crc, checked))
    return found, problems


# --- the bytes -----------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """One reading of an object of which some bytes have a checksum."""

    path: str
    size: int
    crc: str | None
    """Recorded CRC-64/NVME of the whole object (16 hex digits); None if not recorded, or if the object has another size
    and so cannot match."""
    items: Sequence[_Item]
    """The items that have a checksum."""
    segments: list[tuple[int, int, int]] = field(default_factory=list)
    """Start, length and CRC-64/NVME of what has arrived, in any order."""
    failure: str | None = None
    """Why it could not be read."""

    def __post_init__(self) -> None:
        self._cuts = sorted({0, self.size, *(end for item in self.items for end in (item.first, item.stop))})

    def cut(self, start: int, stop: int) -> list[int]:
        """Lengths of a range's segments: it is cut at both ends of every item's checked bytes, and after `BLOCK`."""
        lengths = []
        for end in [*self._cuts[bisect_right(self._cuts, start) : bisect_left(self._cuts, stop)], stop]:
            lengths += [min(BLOCK, end - at) for at in range(start, end, BLOCK)]
            start = end
        return lengths

    def find_problems(self) -> list[Problem]:
        """What the checksums say of what was read: of items; of the whole object only where no item is wrong."""
        if self.failure is not None:
            return [Problem(self.path, None, self.failure)]
        crc, before = 0, {0: 0}  # CRC of all bytes before a segment
        for start, length, found in sorted(self.segments):
            crc = before[start + length] = combine_crc64nvme([(crc, start), (found, length)])
        is_whole = self.crc in (None, crc_hex(crc))
        problems = []
        for item in self.items:
            found = crc64nvme_between(before[item.first], before[item.stop], item.stop - item.first)
            if found != item.crc:
                what = f"has CRC-64/NVME {crc_hex(found)}, recorded was {crc_hex(item.crc or 0)}"
                if item.stop > item.first:
                    what += f" (bytes {item.first} to {item.stop - 1})"
                if self.crc is not None and is_whole:
                    what += "; the object as a whole is as recorded, so that the metadata is wrong"
                problems.append(Problem(self.path, item.fqn, what))
        if not is_whole and not problems:
            what = f"has CRC-64/NVME {crc_hex(crc)}, recorded was {self.crc}"
            problems.append(Problem(self.path, None, f"{what}; its items match, what is around them does not"))
        return problems


def _check_bytes(
    store: S3Store, url: CheckpointURL, objects: Sequence[_Reading], on_progress: OnProgress
) -> tuple[list[Problem], int]:
    """Read every byte of data objects, in parallel, through one block for each connection, and compare their checksums.
    What does not match is read once more. Returns the problems by object, and how many bytes were read. Progress does
    not count those that are read again."""
    if not objects:
        return [], 0
    cancel = threading.Event()
    store = store.within(replace(store.limit, cancel=cancel))
    width, step = store.read_width(), store.settings.max_part_size
    blocks: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
    for _ in range(width):
        blocks.put(memoryview(bytearray(BLOCK)))

    def read(request: tuple[_Reading, int]) -> int:
        reading, start = request
        stop = min(start + step, reading.size)
        if reading.failure:
            return 0
        block = blocks.get()
        try:
            targets = [ReadTarget(block[:size], checksum=True) for size in reading.cut(start, stop)]
            store.read(url.key(reading.path), start, targets)
        except (errors.ObjectNotFoundError, errors.PreconditionFailedError, errors.OutOfRangeError) as error:
            reading.failure = f"was deleted, replaced or cut off while it was read: {error}"
            return 0
        finally:
            blocks.put(block)
        moved = stop - start
        for target in targets:
            reading.segments.append((start, target.view.nbytes, target.crc or 0))
            start += target.view.nbytes
        return moved

    bytes_read, problems = 0, list[list[Problem]]()
    for moved in (on_progress, lambda _: None):
        requests = ((each, start) for each in objects for start in range(0, each.size, step))
        with ahead(read, requests, width, waiting=width, cancel=cancel) as done:
            for count in done:
                bytes_read += count
                moved(count)
        problems = [each.find_problems() for each in objects]
        objects = [
            replace(each, segments=[], failure=None) for each, found in zip(objects, problems, strict=True) if found
        ]
        if not objects:
            return [], bytes_read
    return [problem for found in problems for problem in found], bytes_read
