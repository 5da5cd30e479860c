"""What a checkpoint's bytes must be, by its metadata, manifest and listing. Pure."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from dcp_s3.checksum import combine_crc64nvme, crc64nvme_between, crc_hex
from dcp_s3.format.blocks import get_crc, get_raw_offset
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.cover import find_flaws
from dcp_s3.format.layout import is_inside
from dcp_s3.format.saved_entries import find_chunk
from dcp_s3.torch_private import StorageInfo
from dcp_s3.units import one_line

_CRC = re.compile("[0-9a-f]{16}")


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

    def __repr__(self) -> str:
        return one_line("Problem", repr(self.path), self.what, fqn=self.fqn)

    def __str__(self) -> str:
        return f"{self.path}: {self.what}" if self.fqn is None else f"{self.path}: {self.fqn!r} {self.what}"


# --- what the bytes must be --------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredItem:
    fqn: str
    path: str
    start: int
    """First byte of the item in the object."""
    length: int
    crc: int | None
    """Recorded CRC-64/NVME of the item's checked bytes, None without."""
    checked_start: int
    """First byte, in the object, that ``crc`` covers."""
    checked_length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class StoredData:
    """One data object that exists, and what its bytes must be."""

    path: str
    size: int
    crc: str | None
    """Recorded CRC-64/NVME of the whole object (16 hex digits); None if not recorded, or if the object has another size
    and so cannot match."""
    items: tuple[StoredItem, ...]

    @property
    def checked(self) -> tuple[StoredItem, ...]:
        return tuple(item for item in self.items if item.crc is not None)

    @cached_property
    def cuts(self) -> Sequence[int]:
        """Ends of the object and of what its items' checksums cover, ascending."""
        ends = ((item.checked_start, item.checked_start + item.checked_length) for item in self.checked)
        return sorted({0, self.size}.union(*ends))

    @property
    def is_checked(self) -> bool:
        """Whether some of its bytes have a checksum."""
        return self.crc is not None or any(item.checked_length for item in self.checked)


def find_items(
    metadata: Metadata, metadata_path: str, *, of_rank: bool = False
) -> tuple[list[StoredItem], list[Problem]]:
    """The items that metadata places in objects, and where it contradicts itself. That of one rank describes only a
    part of each tensor."""
    problems: list[Problem] = []
    if not isinstance(metadata.storage_data, dict):
        kind = type(metadata.storage_data).__name__
        return [], [Problem(metadata_path, None, f"does not say where its items lie (storage_data is {kind})")]
    items = []
    for index, info in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(index.fqn, str):
            problems.append(Problem(metadata_path, None, f"names an item {index!r}, which is no DCP index"))
            continue
        saved = metadata.state_dict_metadata.get(index.fqn)
        found = _make_item(index, info, saved)
        if isinstance(found, StoredItem):
            items.append(found)
        else:
            problems.append(Problem(metadata_path, index.fqn, found))
    flaws = find_flaws(metadata, filled=not of_rank)
    return items, problems + [Problem(metadata_path, fqn, flaw) for fqn, flaw in flaws]


def _make_item(index: MetadataIndex, info: StorageInfo, saved: object) -> StoredItem | str:
    raw_offset, shape, checked = get_raw_offset(info), None, (0, info.length)
    if isinstance(saved, TensorStorageMetadata):
        chunk = find_chunk(saved, index)
        if chunk is None:
            return f"has no chunk at {index.offset}, where an item lies"
        shape = chunk.sizes
    elif info.length == 0:
        return "has no bytes"
    if raw_offset is not None:
        if not isinstance(saved, TensorStorageMetadata) or shape is None:
            return "has raw bytes, but is no tensor"
        size = shape.numel() * saved.properties.dtype.itemsize
        if raw_offset < 0 or size < 0 or raw_offset + size > info.length:
            return f"has a chunk of {size} bytes at {raw_offset}, which does not fit into its item of {info.length}"
        checked = (raw_offset, size)
    return StoredItem(
        fqn=index.fqn,
        path=info.relative_path,
        start=info.offset,
        length=info.length,
        crc=get_crc(info),
        checked_start=info.offset + checked[0],
        checked_length=checked[1],
    )


def check_manifest(
    manifest: Manifest,
    path: str,
    *,
    save_id: str,
    rank: int | None,
    metadata: Metadata | None,
    items: Iterable[StoredItem],
) -> list[Problem]:
    """Find where a manifest contradicts itself or the metadata, which is of a save and a rank (None with collectives),
    and None if it cannot be loaded."""
    problems = []
    if manifest.save_id != save_id:
        problems.append(f"is of the save {manifest.save_id!r}, the metadata of {save_id!r}")
    if manifest.rank != rank:
        problems.append(f"is of rank {manifest.rank}, the metadata of rank {rank}")
    named = {entry.path for entry in manifest.objects}
    if len(named) != len(manifest.objects):
        problems.append("names an object twice")
    problems += [f"names an object outside of the checkpoint: {name!r}" for name in named if not is_inside(name)]
    problems += [
        f"has no possible checksum of {entry.path}: {entry.crc64nvme!r}"
        for entry in manifest.objects
        if entry.crc64nvme is not None and not is_crc(entry.crc64nvme)
    ]
    if metadata is not None:
        count = len(metadata.storage_data or {})
        if manifest.items != count:
            problems.append(f"counts {manifest.items} items, the metadata {count}")
        missing = sorted({item.path for item in items} - named)
        problems += [f"does not name {name}, in which items lie" for name in missing]
    return [Problem(path, None, what) for what in problems]


def is_crc(value: object) -> bool:
    return isinstance(value, str) and _CRC.fullmatch(value) is not None


def place_items(
    items: Iterable[StoredItem], entries: Iterable[ObjectEntry], sizes: Mapping[str, int]
) -> tuple[list[StoredData], list[Problem]]:
    """Place items in the objects that exist, whose sizes are given by path: the data objects, and those that are
    missing, of another size, or too short for their items."""
    by_path: dict[str, list[StoredItem]] = {}
    for item in items:
        by_path.setdefault(item.path, []).append(item)
    recorded = {entry.path: entry for entry in entries if is_inside(entry.path)}
    found: list[StoredData] = []
    problems: list[Problem] = []
    for path in sorted(by_path.keys() | recorded.keys()):
        size, entry, inside = sizes.get(path), recorded.get(path), []
        if size is None:
            problems.append(Problem(path, None, "is missing"))
            continue
        if entry is not None and entry.size != size:
            problems.append(Problem(path, None, f"has {size} bytes, recorded were {entry.size}"))
        for item in by_path.get(path, ()):
            if item.stop > size:
                where = f"lies at bytes {item.start} to {item.stop - 1}, but its object ends at {size}"
                problems.append(Problem(path, item.fqn, where))
            else:
                inside.append(item)
        crc = entry.crc64nvme if entry is not None and entry.size == size and is_crc(entry.crc64nvme) else None
        found.append(StoredData(path, size, crc, tuple(inside)))
    return found, problems


# --- checksums of an object that is read in ranges -----------------------------------------------------


def cut_range(data: StoredData, start: int, length: int, block: int) -> list[int]:
    """Lengths of a range's segments: it is cut at both ends of every checked item, and after ``block`` bytes."""
    stop = start + length
    lengths = []
    for end in [*data.cuts[bisect_right(data.cuts, start) : bisect_left(data.cuts, stop)], stop] if length else []:
        lengths += [min(block, end - at) for at in range(start, end, block)]
        start = end
    return lengths


def find_mismatches(data: StoredData, segments: Iterable[tuple[int, int, int]]) -> dict[StoredItem | None, str]:
    """What the checksums say of an object: what is wrong with items, and at None with all of it.

    Args:
        segments: start, length and CRC-64/NVME of each segment, in any order; together they are all its bytes.
    """
    crc = 0
    before = {0: 0}  # CRC of all bytes before a segment
    for start, length, found in sorted(segments):
        crc = combine_crc64nvme([(crc, start), (found, length)])
        before[start + length] = crc
    is_whole = data.crc in (None, crc_hex(crc))
    problems: dict[StoredItem | None, str] = {}
    for item in data.checked:
        stop = item.checked_start + item.checked_length
        found = crc64nvme_between(before[item.checked_start], before[stop], item.checked_length)
        if found != item.crc:
            what = f"has CRC-64/NVME {crc_hex(found)}, recorded was {crc_hex(item.crc or 0)}"
            if item.checked_length:
                what += f" (bytes {item.checked_start} to {stop - 1})"
            if data.crc is not None and is_whole:
                what += "; the object as a whole is as recorded, so that the metadata is wrong"
            problems[item] = what
    if not is_whole:
        around = "its items match, what is around them does not"
        problems[None] = f"has CRC-64/NVME {crc_hex(crc)}, recorded was {data.crc}; {around}"
    return problems
