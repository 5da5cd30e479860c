"""Checks a checkpoint's metadata, manifest and listing, and finds what its bytes must be. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dcp_s3.format.blocks import get_crc, get_raw_offset
from dcp_s3.format.control_files import Manifest, ObjectEntry
from dcp_s3.format.cover import find_flaws
from dcp_s3.format.layout import is_inside
from dcp_s3.format.metadata import is_unproven
from dcp_s3.format.saved_entries import find_chunk
from dcp_s3.offline.verify_report import Problem
from dcp_s3.torch_private import StorageInfo

_CRC = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class StoredItem:
    """One saved item."""

    fqn: str
    """FQN of the entry."""
    path: str
    """Path of the object, relative to the checkpoint."""
    start: int
    """First byte of the item in the object."""
    length: int
    """Length in bytes."""
    shape: torch.Size | None
    """Shape of the chunk, None if the item is no tensor."""
    raw: bool
    """Whether the item is raw bytes in a frame whose zip checksums were never computed."""
    transforms: tuple[str, ...]
    """Descriptors of the stream extensions that the item went through."""
    crc: int | None
    """Recorded CRC-64/NVME of the item's checked bytes, None without."""
    checked_start: int
    """First byte, in the object, that ``crc`` covers."""
    checked_length: int
    """Bytes that ``crc`` covers."""
    dtype: torch.dtype | None = None
    """Dtype of a tensor, None if the item is none."""
    proven: bool = True
    """Whether a checksum proves what the metadata says of the item."""

    @property
    def stop(self) -> int:
        """First byte after the item in the object."""
        return self.start + self.length


@dataclass(frozen=True)
class StoredData:
    """One data object that exists, and what its bytes must be."""

    path: str
    """Path relative to the checkpoint."""
    size: int
    """Actual size in bytes."""
    crc: str | None
    """Recorded CRC-64/NVME of the whole object (16 hex digits); None if not recorded, or if the object has another size
    and so cannot match."""
    items: tuple[StoredItem, ...]
    """Items that lie in the object."""

    @property
    def checked(self) -> tuple[StoredItem, ...]:
        """The items that have a checksum."""
        return tuple(item for item in self.items if item.crc is not None)

    @property
    def streamed(self) -> bool:
        """Whether all bytes are read, because some have a checksum."""
        return self.crc is not None or any(item.checked_length for item in self.checked)

    @property
    def headed(self) -> tuple[StoredItem, ...]:
        """The raw items whose own heads must say what they are."""
        raw = [item for item in self.items if item.raw and not item.proven]
        return tuple(item for item in raw if item.crc is not None or self.crc is not None)

    @property
    def decoded(self) -> tuple[StoredItem, ...]:
        """The items that no checksum covers."""
        return () if self.crc is not None else tuple(item for item in self.items if item.crc is None)


def group_items(items: Iterable[StoredItem], limit: int) -> list[list[StoredItem]]:
    """Group items of one object that share a request: neighbours without a gap, at most ``limit`` bytes together."""
    groups: list[list[StoredItem]] = []
    for item in sorted(items, key=lambda item: item.start):
        group = groups[-1] if groups else []
        if group and item.start == group[-1].stop and item.stop - group[0].start <= limit:
            group.append(item)
        else:
            groups.append([item])
    return groups


def find_items(
    metadata: Metadata, metadata_path: str, *, of_rank: bool = False
) -> tuple[list[StoredItem], list[Problem]]:
    """Find the items that metadata places in objects, and where it contradicts itself.

    Args:
        metadata: the loaded metadata.
        metadata_path: its path, for problems.
        of_rank: whether it is a single rank's, which describes only a part of each tensor.
    """
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
        found = _make_item(index, info, saved, proven=not is_unproven(metadata))
        if isinstance(found, StoredItem):
            items.append(found)
        else:
            problems.append(Problem(metadata_path, index.fqn, found))
    for fqn, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            missing = [
                chunk for chunk in saved.chunks if MetadataIndex(fqn, chunk.offsets) not in metadata.storage_data
            ]
            if missing:
                where = tuple(missing[0].offsets)
                problems.append(Problem(metadata_path, fqn, f"has a chunk at {where} that lies in no object"))
        elif isinstance(saved, BytesStorageMetadata) and MetadataIndex(fqn) not in metadata.storage_data:
            problems.append(Problem(metadata_path, fqn, "lies in no object"))
    for fqn, flaw in find_flaws(metadata, filled=not of_rank):
        problems.append(Problem(metadata_path, fqn, flaw))
    return items, problems


def _make_item(index: MetadataIndex, info: StorageInfo, saved: object, *, proven: bool) -> StoredItem | str:
    """Make the item, or say what is wrong with its metadata."""
    raw_offset, shape, checked = get_raw_offset(info), None, (0, info.length)
    descriptors = getattr(info, "transform_descriptors", None) or ()
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
        shape=shape,
        raw=raw_offset is not None,
        transforms=tuple(map(str, descriptors)),
        dtype=saved.properties.dtype if isinstance(saved, TensorStorageMetadata) else None,
        proven=proven,
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
    """Find where a manifest contradicts itself or the metadata.

    Args:
        manifest: parsed manifest.
        path: path of the manifest.
        save_id: ID of the save that wrote the metadata.
        rank: rank that the metadata belongs to; None with collectives.
        metadata: loaded metadata; None if it cannot be loaded.
        items: items of the metadata.
    """
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
    """Whether this is a CRC-64 in the form that manifests use."""
    return isinstance(value, str) and _CRC.fullmatch(value) is not None


def place_items(
    items: Iterable[StoredItem], entries: Iterable[ObjectEntry], sizes: Mapping[str, int]
) -> tuple[list[StoredData], list[Problem]]:
    """Place the items in the objects that exist.

    Args:
        items: items of all metadata.
        entries: entries of all manifests.
        sizes: size in bytes of every object of the checkpoint, by relative path.

    Returns:
        The data objects, and problems: objects that are missing, of another size, or too short for their items.
    """
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
