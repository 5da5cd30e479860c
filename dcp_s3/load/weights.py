"""The metadata of a load: ``.metadata`` (under a lease), or that of a commit that waits on this host's disk, or made of
what the headers of safetensors files say.

A tensor in a file is row-major bytes, as is a chunk in an object of a checkpoint. So a load of weights is a load of a
checkpoint with one chunk for each tensor, which has no checksums.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_s3 import errors
from dcp_s3.checkpoint.commit_state import CommitState, SaveIdentity, check_metadata, fetch_metadata, find_state
from dcp_s3.checkpoint.directory import list_directory
from dcp_s3.checkpoint.lease import ReaderLease
from dcp_s3.format import safetensors
from dcp_s3.format.blocks import make_storage_info
from dcp_s3.format.layout import CONTROL_PREFIX, DATA_SUFFIX, METADATA, SAVE_ID_KEY, deletion_id
from dcp_s3.format.metadata import load_metadata
from dcp_s3.format.safetensors import SafetensorsError, TensorEntry
from dcp_s3.memory import crc64nvme
from dcp_s3.settings import Settings
from dcp_s3.spill.local import WaitingCommit, find_commits
from dcp_s3.spill.store import open_store
from dcp_s3.store import Store
from dcp_s3.url import CheckpointURL

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
_FIRST = 32 * 2**10  # bytes of a file that are read first: most headers are not much longer
_OURS = (DATA_SUFFIX, METADATA)


@dataclass(frozen=True)
class FoundTensor(TensorEntry):
    """A tensor, row-major, in a file that was found."""

    file: str
    """Name of the file."""
    etag: str
    """ETag of the file whose header was read."""
    start: int
    """Byte of the file at which its elements begin."""


def find_weights(store: Store, prefix: str, names: Iterable[str], where: str) -> dict[str, FoundTensor]:
    """The tensors in the files ``names`` below ``prefix``, by name: those of a model with an index, or of
    ``model.safetensors``, or of all ``*.safetensors``. Reads the headers, of many files at once.

    Raises:
        WeightsError: there are no weights at ``where``, or they are damaged.
    """
    names = [name for name in names if name.endswith(SUFFIX) or name == safetensors.INDEX]
    places: Mapping[str, str] | None = None
    if safetensors.INDEX in names:
        try:
            places = safetensors.parse_index(store.get(prefix + safetensors.INDEX).data)
        except SafetensorsError as error:
            raise errors.WeightsError(f"{safetensors.INDEX} of {where} cannot be used: {error}") from None
        names = list(dict.fromkeys(places.values()))
    elif safetensors.SINGLE_FILE in names:
        names = [safetensors.SINGLE_FILE]
    elif missing := safetensors.missing_files(names):
        raise errors.WeightsError(
            f"{where} has no {missing[0]}, and no {safetensors.INDEX} ({len(missing)} files are missing): it is not "
            "there as a whole. Remedy: copy or export it again"
        )
    if not names:
        raise errors.WeightsError(f"{where} has no weights: its {safetensors.INDEX} names no file")
    found: dict[str, FoundTensor] = {}
    for name, tensors in zip(names, store.map(partial(_read_header, prefix=prefix, where=where), names), strict=True):
        for fqn, tensor in tensors.items():
            if places is not None and places.get(fqn) != name:
                raise errors.WeightsError(f"{fqn!r} is in {name} of {where}, but its index says {places.get(fqn)!r}")
            if fqn in found:
                raise errors.WeightsError(f"{fqn!r} is in two of the files of {where}")
            found[fqn] = tensor
    lost = [fqn for fqn in places or () if fqn not in found]
    if lost:
        raise errors.WeightsError(f"{lost[0]!r} is in no file of {where}, but in its index ({len(lost)} in all)")
    return found


def _read_header(store: Store, name: str, *, prefix: str, where: str) -> dict[str, FoundTensor]:
    try:
        head = store.head(prefix + name)
    except errors.ObjectNotFoundError:
        raise errors.WeightsError(f"{where} has no file {name}, which its index names") from None
    data = bytearray(min(_FIRST, head.size))
    store.read(prefix + name, 0, memoryview(data), head.etag)
    try:
        stop = safetensors.PREFIX + safetensors.header_length(bytes(data[: safetensors.PREFIX]), head.size)
        if stop > len(data):
            rest = bytearray(stop - len(data))
            store.read(prefix + name, len(data), memoryview(rest), head.etag)
            data += rest
        placed = safetensors.parse_header(bytes(data[safetensors.PREFIX : stop]), head.size)
    except SafetensorsError as error:
        raise errors.WeightsError(f"{store.name}/{prefix}{name} cannot be read: {error}") from None
    return {entry.name: FoundTensor(**vars(entry), file=name, etag=head.etag, start=start) for entry, start in placed}


def make_metadata(found: Mapping[str, FoundTensor]) -> WeightsMetadata:
    """DCP's metadata of tensors in files: one chunk for each."""
    saved, stored = {}, {}
    for fqn, tensor in found.items():
        start, shape = torch.Size([0] * len(tensor.shape)), torch.Size(tensor.shape)
        properties = TensorProperties(dtype=tensor.dtype)
        saved[fqn] = TensorStorageMetadata(properties, shape, [ChunkStorageMetadata(start, shape)])
        info = make_storage_info(tensor.file, tensor.start, tensor.nbytes, raw_offset=0)
        stored[MetadataIndex(fqn, start)] = info
    names = {fqn: (fqn,) for fqn in found}
    etags = {tensor.file: tensor.etag for tensor in found.values()}
    return WeightsMetadata(saved, names, stored, StorageMeta(), etags=etags)  # type: ignore[arg-type]


@dataclass
class WeightsMetadata(Metadata):
    """Metadata of safetensors files. A class of its own: ``.metadata`` may have attributes of any name."""

    etags: Mapping[str, str] = field(default_factory=dict)
    """ETags of the files, by their names. The objects of a checkpoint need none: their names are random."""


def rename_entries(metadata: Metadata, names: Mapping[str, str]) -> Metadata:
    """The metadata of the same files with new names for tensors, given with the old ones. Several may be of one."""
    saved: dict[str, Any] = {}
    stored = {}
    for new, old in names.items():
        entry = saved[new] = metadata.state_dict_metadata[old]
        start = entry.chunks[0].offsets  # type: ignore[union-attr]
        stored[MetadataIndex(new, start)] = metadata.storage_data[MetadataIndex(old, start)]
    planner_data = {new: (new,) for new in names}
    return replace(metadata, state_dict_metadata=saved, planner_data=planner_data, storage_data=stored)


def fetch_weights(store: Store, url: CheckpointURL) -> WeightsMetadata | None:
    """The metadata of safetensors files right at ``url``; None if there are none, or files of a save. WeightsError if
    they are damaged."""
    prefix = url.key("")
    found = store.list(prefix, "/")
    names = [key.removeprefix(prefix) for key in (*(each.key for each in found.objects), *found.prefixes)]
    # A save that was cut off may have such a file attached. Leases of readers say nothing about what they read.
    if not any(name.endswith(SUFFIX) for name in names) or any(name.endswith(_OURS) for name in names):
        return None
    if CONTROL_PREFIX in names:
        control = list_directory(store, url, CONTROL_PREFIX)
        if len(control.leases) != len(control.objects):
            return None
    return make_metadata(find_weights(store, prefix, names, str(url)))


# --- the metadata of a load -----------------------------------------------------------------------------


class Fetched(NamedTuple):
    metadata: Metadata
    version: int  # hash of its bytes
    lease: ReaderLease | None  # None without ``reader_lease``, or if its commit waits on this host's disk
    rank: int | None = None  # the rank whose metadata it is; None for that of all ranks


def fetch(
    store: Store, url: CheckpointURL, settings: Settings, rank: int | None, *, include_uncommitted: bool
) -> Fetched:
    """Fetch the global metadata, or that of one rank of a save without collectives; or make it of safetensors files."""
    waiting = find_uncommitted(store, settings, url, rank) if include_uncommitted else None
    if waiting is not None:
        metadata = load_metadata(waiting.metadata, url=str(url), of_rank=rank is not None)
        return Fetched(metadata, crc64nvme(waiting.metadata), None, rank)
    with contextlib.ExitStack() as stack:
        lease = None
        if settings.reader_lease is not None:
            lease = ReaderLease(store, url, settings.reader_lease)
            stack.callback(lease.release)
            lease.take()
        try:
            stored = fetch_metadata(store, url, rank)
        except errors.CheckpointNotFoundError:
            weights = fetch_weights(store, url) if rank is None else None
            if weights is None:
                raise
            return Fetched(weights, crc64nvme(repr(sorted(weights.etags.items())).encode()), None)
        metadata = check_metadata(stored, url, rank)
        if lease is not None:
            save_ids = stored.metadata.get(SAVE_ID_KEY), getattr(metadata.storage_meta, "save_id", None), None
            deletions = {deletion_id(each, stored.etag) for each in save_ids} if rank is None else None
            lease.check_not_deleted(deletions, rank=rank)
        stack.pop_all()
    return Fetched(metadata, crc64nvme(stored.data), lease, rank)


def find_uncommitted(store: Store, settings: Settings, url: CheckpointURL, rank: int | None) -> WaitingCommit | None:
    """The newest commit at ``url`` that is spilled on this host; None if S3 has a newer one."""
    spill = open_store(settings)
    found = None
    for waiting in find_commits(spill, str(url)) if spill else ():
        if waiting.journal.commit is not None and waiting.journal.commit.rank == rank:
            found = waiting
    if found is None:
        return None
    journal = found.journal
    try:
        state = find_state(store, SaveIdentity(url, journal.save_id, rank), path=None, started_at=journal.created_at)
    except errors.TransferError as error:
        logger.warning("S3 does not say whether it has a newer checkpoint than this host: %s", error)
        return found
    return found if state is CommitState.WAITING else None


def open_metadata(store: Store, url: CheckpointURL) -> Metadata:
    """The metadata of the committed checkpoint at ``url``, or of safetensors files there.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, UnsafeMetadataError, WeightsError, StorageError
    """
    try:
        return check_metadata(fetch_metadata(store, url), url)
    except errors.CheckpointNotFoundError:
        weights = fetch_weights(store, url)
        if weights is None:
            raise
        return weights
