"""What a checkpoint's bytes must be, by its metadata, manifest and listing. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_s3.format.blocks import get_crc, get_raw_offset
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.layout import manifest_object
from dcp_s3.format.saved_entries import find_chunk, find_flaws
from dcp_s3.memory import combine_crc64nvme, crc64nvme_between, crc_hex
from dcp_s3.units import one_line


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


class StoredItem(NamedTuple):
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


def find_items(metadata: Metadata, path: str, *, of_rank: bool = False) -> tuple[list[StoredItem], list[Problem]]:
    """The items that metadata (at ``path``) places in objects, and where it contradicts itself. That of one rank
    describes only a part of each tensor."""
    if metadata.storage_data is None:
        return [], [Problem(path, None, "does not say where its items lie")]
    items, problems = [], []
    for index, info in metadata.storage_data.items():
        saved, start, length = metadata.state_dict_metadata.get(index.fqn), 0, info.length
        if isinstance(saved, TensorStorageMetadata):
            chunk, raw_offset = find_chunk(saved, index), get_raw_offset(info)
            if chunk is None:
                length = info.length + 1  # which does not fit
            elif raw_offset is not None:
                start, length = raw_offset, chunk.sizes.numel() * saved.properties.dtype.itemsize
        if start + length > info.length:
            what = f"has no chunk at {tuple(index.offset or ())} that fits into the {info.length} bytes stored there"
            problems.append(Problem(path, index.fqn, what))
            continue
        first = info.offset + start
        items.append(StoredItem(index.fqn, info.relative_path, info.offset, info.length, get_crc(info), first, length))
    flaws = find_flaws(metadata, filled=not of_rank)
    return items, problems + [Problem(path, fqn, flaw) for fqn, flaw in flaws]


def check_manifest(manifest: Manifest, path: str, metadata: Metadata | None) -> list[Problem]:
    """Find where a manifest (at ``path``) contradicts its name, itself or its metadata, which is None if it cannot be
    loaded."""
    problems = []
    if manifest_object(manifest.save_id, manifest.rank) != path:
        problems.append(f"is of the save {manifest.save_id!r} and the rank {manifest.rank}")
    if metadata is not None:
        stored, named = metadata.storage_data or {}, {entry.path for entry in manifest.objects}
        if manifest.items != len(stored):
            problems.append(f"counts {manifest.items} items, the metadata {len(stored)}")
        missing = sorted({info.relative_path for info in stored.values()} - named)
        problems += [f"does not name {name}, in which items lie" for name in missing]
    return [Problem(path, None, what) for what in problems]


def place_items(
    items: Iterable[StoredItem], entries: Iterable[ObjectEntry], sizes: Mapping[str, int]
) -> tuple[list[StoredData], list[Problem]]:
    """Place items in the objects that exist, whose sizes are given by path: the data objects, and those that are
    missing, of another size, or too short for their items."""
    by_path: dict[str, list[StoredItem]] = {}
    for item in items:
        by_path.setdefault(item.path, []).append(item)
    recorded = {entry.path: entry for entry in entries}
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
            if (stop := item.start + item.length) > size:
                where = f"lies at bytes {item.start} to {stop - 1}, but its object ends at {size}"
                problems.append(Problem(path, item.fqn, where))
            else:
                inside.append(item)
        crc = entry.crc64nvme if entry is not None and entry.size == size else None
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


def find_mismatches(data: StoredData, segments: Iterable[tuple[int, int, int]]) -> list[Problem]:
    """What the checksums say of an object: of its items; of all of it only where no item is wrong.

    Args:
        segments: start, length and CRC-64/NVME of each segment, in any order; together they are all its bytes.
    """
    crc = 0
    before = {0: 0}  # CRC of all bytes before a segment
    for start, length, found in sorted(segments):
        crc = combine_crc64nvme([(crc, start), (found, length)])
        before[start + length] = crc
    is_whole = data.crc in (None, crc_hex(crc))
    problems = []
    for item in data.checked:
        stop = item.checked_start + item.checked_length
        found = crc64nvme_between(before[item.checked_start], before[stop], item.checked_length)
        if found != item.crc:
            what = f"has CRC-64/NVME {crc_hex(found)}, recorded was {crc_hex(item.crc or 0)}"
            if item.checked_length:
                what += f" (bytes {item.checked_start} to {stop - 1})"
            if data.crc is not None and is_whole:
                what += "; the object as a whole is as recorded, so that the metadata is wrong"
            problems.append(Problem(data.path, item.fqn, what))
    if not is_whole and not problems:
        what = f"has CRC-64/NVME {crc_hex(crc)}, recorded was {data.crc}; its items match, what is around them does not"
        problems.append(Problem(data.path, None, what))
    return problems
