"""Reads a checkpoint without a process group: `read_tensor`, `read_tensors`, and what an export needs."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_s3 import errors
from dcp_s3.checkpoint.lease import ReaderLease
from dcp_s3.format.saved_entries import find_flaw
from dcp_s3.load.fetch import Fetcher
from dcp_s3.load.items import allocate
from dcp_s3.load.read import LoadExecutor
from dcp_s3.load.weights import open_metadata
from dcp_s3.offline.boxes import Index, Selection, select
from dcp_s3.offline.names import closest, matches
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.spill.local import with_copies
from dcp_s3.torch_private import ReaderTransforms
from dcp_s3.url import CheckpointURL, parse_url

SMALL_BUFFERS = 32 * 2**20


def read_tensor(
    url: str | os.PathLike[str],
    fqn: str,
    slice: Index = None,
    *,
    settings: SettingsLike = None,
) -> torch.Tensor:
    """Read one tensor of a committed checkpoint, or a part of it, into host memory.

    Needs no process group, and calls no collective if there is one. Fetches the metadata, and the same bytes of the
    saved chunks that a load of this part would.

    >>> read_tensor("s3://bucket/run/step-00002000", "weight", (slice(0, 2),))
    tensor([[0., 1.],
            [2., 3.]])

    Args:
        fqn: name of the tensor, as ``dcp-s3 show`` lists it.
        slice: part to read, as in numpy: ``3``, ``np.s_[:10, ..., -1]``. Numbers, slices with step 1, an Ellipsis.

    Returns:
        A contiguous tensor of the saved dtype.

    Raises:
        EntryNotFoundError: there is no such tensor, or ``slice`` is out of range or not supported.
        CheckpointNotFoundError, CorruptCheckpointError
        InvalidURLError, SettingsError, StorageError, DeadlineExceededError
    """
    checkpoint = OpenCheckpoint(url, settings)
    selection = checkpoint.select(fqn, slice)
    return checkpoint.read({fqn: selection})[fqn].reshape(selection.shape)  # type: ignore[no-any-return]


def read_tensors(
    url: str | os.PathLike[str],
    fqns: str | Iterable[str] | Mapping[str, Index] | None = None,
    *,
    weights_only: bool = True,
    settings: SettingsLike = None,
) -> dict[str, Any]:
    """Read entries of a committed checkpoint: tensors into host memory, and objects.

    Works like `read_tensor`, but fetches all entries together and the metadata once. So a server reads its slice of a
    training checkpoint, without a process group.

    >>> read_tensors("s3://bucket/run/step-00002000")["step"]
    2000
    >>> read_tensors("s3://bucket/run/step-00002000", {"weight": (slice(None), slice(0, 1))})["weight"].shape
    torch.Size([4, 1])

    Args:
        fqns: names, or patterns such as ``model.*`` (``*`` any text, ``?`` any character, ``[ab]`` one of them); None:
            everything. An entry with exactly that name takes precedence over a pattern. Or the part of each tensor to
            read, by names: see `read_tensor`.
        weights_only: whether to unpickle only objects that cannot run code, as `S3StorageReader` does.
            False: whoever can write to the bucket can run code here.

    Returns:
        Entries by name, in the order of ``fqns``; the matches of a pattern in the order of the checkpoint.

    Raises:
        EntryNotFoundError: a name is not in the checkpoint, a pattern matches nothing, or a part is not in its tensor.
        UnsafeItemError: an object needs what ``weights_only`` refuses.
        CheckpointNotFoundError, CorruptCheckpointError
        InvalidURLError, SettingsError, StorageError, DeadlineExceededError
    """
    checkpoint = OpenCheckpoint(url, settings)
    if not isinstance(fqns, Mapping):
        return checkpoint.read(dict.fromkeys(checkpoint.match(fqns)), weights_only=weights_only)
    parts = {fqn: None if index is None else checkpoint.select(fqn, index) for fqn, index in fqns.items()}
    found = checkpoint.read(parts, weights_only=weights_only)
    return {fqn: found[fqn].reshape(part.shape) if part else found[fqn] for fqn, part in parts.items()}


# --- the checkpoint ----------------------------------------------------------------------------------


@contextlib.contextmanager
def reading_under_lease(url: CheckpointURL, settings: Settings) -> Iterator[Reading]:
    """Reads that may take long, of a checkpoint that no prune deletes meanwhile."""
    lease = ReaderLease(store_of(url, settings), url, settings.reader_lease)
    lease.take()
    with lease.renewed():
        checkpoint = OpenCheckpoint(str(url), settings)
        lease.check_not_deleted(None)
        with checkpoint.reading(buffers=SMALL_BUFFERS) as reading:
            yield reading


class OpenCheckpoint:
    """A checkpoint whose metadata has been read."""

    def __init__(self, url: str | os.PathLike[str], settings: SettingsLike) -> None:
        self.url: CheckpointURL = parse_url(url)
        self.settings = resolve_settings(settings)
        self.store = store_of(self.url, self.settings)
        self._metadata: Metadata = open_metadata(self.store, self.url)
        if not isinstance(self._metadata.storage_data, dict):
            raise errors.CorruptCheckpointError(
                f"the metadata of {self.url} does not say where its items lie", url=str(self.url)
            )

    def find(self, fqn: str) -> Any:
        saved = self._metadata.state_dict_metadata.get(fqn)
        if saved is None:
            raise self._not_found(fqn, f"has no entry {fqn!r}")
        return saved

    def select(self, fqn: str, index: Index) -> Selection:
        """The part of a tensor at an index, or EntryNotFoundError."""
        saved = self.find(fqn)
        if not isinstance(saved, TensorStorageMetadata):
            raise errors.EntryNotFoundError(
                f"{fqn!r} in {self.url} is no tensor. Remedy: read_tensors(url, [{fqn!r}]) reads objects, too",
                url=str(self.url),
                fqn=fqn,
            )
        try:
            return select(index, saved.size)
        except IndexError as error:
            raise errors.EntryNotFoundError(
                f"{fqn!r} in {self.url}, of shape {tuple(saved.size)}, cannot be read at {index!r}: {error}",
                url=str(self.url),
                fqn=fqn,
            ) from None

    def match(self, fqns: str | Iterable[str] | None) -> list[str]:
        """The names that names and patterns stand for, each once, or EntryNotFoundError. None: all of them."""
        names = self._metadata.state_dict_metadata
        if fqns is None:
            return list(names)
        found: dict[str, None] = {}
        for fqn in [fqns] if isinstance(fqns, str) else fqns:
            if fqn not in names and any(character in fqn for character in "*?["):
                matching = [name for name in names if matches(name, [fqn])]
                if not matching:
                    raise self._not_found(fqn, f"has no entry that matches {fqn!r}")
                found.update(dict.fromkeys(matching))
            else:
                self.find(fqn)
                found[fqn] = None
        return list(found)

    def _not_found(self, fqn: str, what: str) -> errors.EntryNotFoundError:
        near = closest(fqn, list(self._metadata.state_dict_metadata))
        return errors.EntryNotFoundError(f"{self.url} {what}{near}", url=str(self.url), fqn=fqn)

    def read(self, wanted: dict[str, Selection | None], *, weights_only: bool = True) -> dict[str, Any]:
        """Read entries; of a tensor the selected box, or all of it."""
        targets, objects = [], []
        for fqn, selection in wanted.items():
            saved = self.find(fqn)
            if isinstance(saved, TensorStorageMetadata):
                box = selection or select(None, saved.size)
                tensor = allocate(box.lengths, saved.properties.dtype, fqn, str(self.url))
                targets.append(Target(fqn, box.offsets, tensor))
            else:
                objects.append(fqn)
        with self.reading(weights_only=weights_only) as reading:
            found = reading.fill(targets, objects) | {target.fqn: target.tensor for target in targets}
        return {fqn: found[fqn] for fqn in wanted}

    @contextlib.contextmanager
    def reading(self, *, weights_only: bool = True, buffers: int | None = None) -> Iterator[Reading]:
        """Reads that share a fetcher; ``buffers``: see `Fetcher`."""
        with with_copies(self.store, self.settings, self.url) as store:
            fetcher = Fetcher(store, self.url, self.settings, "dcp_s3-download", buffers=buffers)
            executor = LoadExecutor(fetcher, self._metadata, ReaderTransforms(None), weights_only=weights_only)
            yield Reading(self, executor)

    def items_of(self, target: Target) -> list[ReadItem]:
        """One item for each saved chunk in the target's box; only one for chunks at the same place."""
        box = target.tensor.shape
        chunk = ChunkStorageMetadata(torch.Size(target.offsets), box)
        found = create_read_items_for_chunk_list(target.fqn, self.find(target.fqn), [chunk])
        items = {(each.dest_offsets, each.lengths): each for each in found if 0 not in each.lengths}
        if find_flaw(box, list(items)) is not None:
            raise errors.CorruptCheckpointError(
                f"the metadata of {self.url} contradicts itself on {target.fqn!r}: its chunks do not cover it, each "
                "element once. Remedy: load an earlier checkpoint",
                url=str(self.url),
            )
        return list(items.values())


@dataclass(frozen=True)
class Target:
    fqn: str
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    """Memory of the saved dtype, and of the box's shape."""

    @property
    def index(self) -> MetadataIndex:
        """As that of the items which fill it."""
        return MetadataIndex(self.fqn, self.offsets)


class Reading:
    """Reads of one checkpoint, one after the other; see `OpenCheckpoint.reading`."""

    def __init__(self, checkpoint: OpenCheckpoint, executor: LoadExecutor) -> None:
        self.checkpoint, self._executor = checkpoint, executor

    def fill(self, targets: Sequence[Target], objects: Iterable[str] = ()) -> dict[str, Any]:
        """Fill targets, and read objects, which are returned by name."""
        planner = _Planner({target.index: target.tensor for target in targets})
        items = [item for target in targets for item in self.checkpoint.items_of(target)]
        nothing = torch.Size((0,))
        for fqn in objects:
            index = MetadataIndex(fqn)
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        self._executor.run(LoadPlan(items), planner)
        return planner.objects


class _Planner(DefaultLoadPlanner):
    """A planner that collects what the executor delivers. Its plan is made beforehand."""

    def __init__(self, tensors: Mapping[MetadataIndex, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors
        self.objects: dict[str, Any] = {}

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = self._tensors[read_item.dest_index]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=False)  # checked already, or ``weights_only=False``
        self.objects[read_item.dest_index.fqn] = loaded
