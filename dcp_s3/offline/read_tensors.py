"""Reads single tensors of a checkpoint, for inspection and serving: `read_tensor` and `read_tensors`."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import io
import math
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_s3 import errors
from dcp_s3.checkpoint.stored_metadata import check_metadata, fetch_metadata
from dcp_s3.limit import Deadline, Limit
from dcp_s3.load.engine import Source
from dcp_s3.load.overlaps import find_overlaps
from dcp_s3.load.read import LoadExecutor
from dcp_s3.offline.indexing import Index, Selection, select
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.spill.local import LocalObjects
from dcp_s3.spill.session import open_store
from dcp_s3.torch_private import ReaderTransforms
from dcp_s3.url import CheckpointURL, parse_url

_SUGGESTED = 3


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

    Args:
        url: URL of the checkpoint.
        fqn: name of the tensor, as ``dcp-s3 show`` lists it.
        slice: part to read, as in numpy: ``3``, ``np.s_[:10, ..., -1]``. Numbers, slices with step 1, an Ellipsis.
        settings: a `Settings`, or a mapping of those that differ from the environment.

    Returns:
        A contiguous tensor of the saved dtype.

    Raises:
        EntryNotFoundError: there is no such tensor.
        TensorIndexError: ``slice`` is out of range or not supported.
        CheckpointNotFoundError, CorruptMetadataError, CorruptCheckpointError
        InvalidURLError, SettingsError, StorageError, DeadlineExceededError
    """
    checkpoint = _OpenCheckpoint(url, settings)
    saved = checkpoint.find(fqn)
    if not isinstance(saved, TensorStorageMetadata):
        raise errors.EntryNotFoundError(
            f"{fqn!r} in {checkpoint.url} is no tensor. Remedy: read_tensors(url, [{fqn!r}]) reads objects, too",
            url=str(checkpoint.url),
            fqn=fqn,
        )
    try:
        selection = select(slice, saved.size)
    except IndexError as error:
        raise errors.TensorIndexError(
            f"{fqn!r} in {checkpoint.url}, of shape {tuple(saved.size)}, cannot be read at {slice!r}: {error}",
            url=str(checkpoint.url),
            fqn=fqn,
        ) from None
    return checkpoint.read({fqn: selection})[fqn].reshape(selection.shape)  # type: ignore[no-any-return]


def read_tensors(
    url: str | os.PathLike[str],
    fqns: str | Iterable[str] | None = None,
    *,
    weights_only: bool = True,
    settings: SettingsLike = None,
) -> dict[str, Any]:
    """Read entries of a committed checkpoint: tensors into host memory, and objects.

    Works like `read_tensor`, but fetches all entries together and the metadata once.

    Args:
        url: URL of the checkpoint.
        fqns: names, or patterns such as ``model.*`` (``*`` any text, ``?`` any character, ``[ab]`` one of them); None:
            everything. An entry with exactly that name takes precedence over a pattern.
        weights_only: whether to unpickle only objects that cannot run code, as `S3StorageReader` does.
            False: whoever can write to the bucket can run code here.
        settings: a `Settings`, or a mapping of those that differ from the environment.

    Returns:
        Entries by name, in the order of ``fqns``; the matches of a pattern in the order of the checkpoint.

    Raises:
        EntryNotFoundError: a name is not in the checkpoint, or a pattern matches nothing.
        UnsafeItemError: an object needs what ``weights_only`` refuses.
        CheckpointNotFoundError, CorruptMetadataError, CorruptCheckpointError
        InvalidURLError, SettingsError, StorageError, DeadlineExceededError
    """
    checkpoint = _OpenCheckpoint(url, settings)
    wanted: dict[str, Selection | None] = {}
    for name in checkpoint.match(fqns):
        saved = checkpoint.find(name)
        wanted[name] = select(None, saved.size) if isinstance(saved, TensorStorageMetadata) else None
    return checkpoint.read(wanted, weights_only=weights_only)


class _OpenCheckpoint:
    """A checkpoint whose metadata has been read."""

    def __init__(self, url: str | os.PathLike[str], settings: SettingsLike) -> None:
        self.url: CheckpointURL = parse_url(url)
        self._settings = resolve_settings(settings)
        seconds = self._settings.load_timeout
        limit = Limit(deadline=Deadline.start("DCP_S3_LOAD_TIMEOUT", seconds), hang=seconds)
        self._store = S3Store(self.url.bucket, self._settings, limit)
        self._metadata: Metadata = check_metadata(fetch_metadata(self._store, self.url), self.url)
        if not isinstance(self._metadata.storage_data, dict):
            raise errors.CorruptMetadataError(
                f"the metadata of {self.url} does not say where its items lie", url=str(self.url)
            )

    def find(self, fqn: str) -> Any:
        """The metadata of an entry.

        Raises:
            EntryNotFoundError: there is no such entry.
        """
        saved = self._metadata.state_dict_metadata.get(fqn)
        if saved is None:
            raise self._not_found(fqn, f"has no entry {fqn!r}")
        return saved

    def match(self, fqns: str | Iterable[str] | None) -> list[str]:
        """The names that ``fqns`` stands for, each once.

        Raises:
            EntryNotFoundError: one of them matches no entry.
        """
        names = self._metadata.state_dict_metadata
        if fqns is None:
            return list(names)
        found: dict[str, None] = {}
        for fqn in [fqns] if isinstance(fqns, str) else fqns:
            if fqn not in names and any(character in fqn for character in "*?["):
                matches = [name for name in names if fnmatch.fnmatchcase(name, fqn)]
                if not matches:
                    raise self._not_found(fqn, f"has no entry that matches {fqn!r}")
                found.update(dict.fromkeys(matches))
            else:
                self.find(fqn)
                found[fqn] = None
        return list(found)

    def _not_found(self, fqn: str, what: str) -> errors.EntryNotFoundError:
        names = self._metadata.state_dict_metadata
        close = difflib.get_close_matches(fqn, names, _SUGGESTED) or [n for n in names if fqn in n][:_SUGGESTED]
        hint = f"The closest of its {len(names)}: {', '.join(map(repr, close))}" if close else f"It has {len(names)}"
        return errors.EntryNotFoundError(f"{self.url} {what}. {hint}", url=str(self.url), fqn=fqn)

    def read(self, wanted: dict[str, Selection | None], *, weights_only: bool = True) -> dict[str, Any]:
        """Read tensors, each with the shape of its box, and objects."""
        planner, items = _Planner(), []
        for fqn, selection in wanted.items():
            saved = self._metadata.state_dict_metadata[fqn]
            if selection is None or not isinstance(saved, TensorStorageMetadata):
                items.append(_object_item(fqn))
            else:
                planner.entries[fqn] = torch.empty(selection.lengths, dtype=saved.properties.dtype)
                items += self._tensor_items(fqn, saved, selection)
        spill = open_store(self._settings)
        with contextlib.closing(LocalObjects(spill, str(self.url))) if spill else contextlib.nullcontext() as local:
            source = Source(self._store, self.url, local)
            executor = LoadExecutor(source, self._metadata, ReaderTransforms(None), weights_only=weights_only)
            executor.run(LoadPlan(items), planner)
        return {fqn: planner.entries[fqn] for fqn in wanted}

    def _tensor_items(self, fqn: str, saved: TensorStorageMetadata, selection: Selection) -> list[ReadItem]:
        """Make one item for each saved chunk in the box; only one for chunks at the same place.

        Raises:
            CorruptMetadataError: the saved chunks leave out a part of the box.
        """
        if 0 in selection.lengths:
            return []
        try:
            found = find_overlaps(
                [(chunk.offsets, chunk.sizes) for chunk in saved.chunks], [(selection.offsets, selection.lengths)]
            )
        except ValueError as error:
            raise self._contradiction(fqn, str(error)) from None
        index = MetadataIndex(fqn, selection.offsets, 0)
        items: dict[tuple[tuple[int, ...], tuple[int, ...]], ReadItem] = {}
        for number, offsets, saved_offsets, lengths in zip(
            found.saved, found.local_offsets, found.saved_offsets, found.lengths, strict=True
        ):
            if 0 not in lengths:
                items[offsets, lengths] = ReadItem(
                    LoadItemType.TENSOR,
                    index,
                    torch.Size(offsets),
                    MetadataIndex(fqn, saved.chunks[number].offsets, number),
                    torch.Size(saved_offsets),
                    torch.Size(lengths),
                )
        if sum(math.prod(lengths) for _, lengths in items) != math.prod(selection.lengths) or _overlap(items):
            raise self._contradiction(fqn, "its chunks do not cover it, each element once")
        return list(items.values())

    def _contradiction(self, fqn: str, what: str) -> errors.CorruptMetadataError:
        return errors.CorruptMetadataError(
            f"the metadata of {self.url} contradicts itself on {fqn!r}: {what}. Remedy: load an earlier checkpoint",
            url=str(self.url),
        )


def _object_item(fqn: str) -> ReadItem:
    index, nothing = MetadataIndex(fqn), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)


@dataclass
class _Planner(LoadPlanner):
    """A planner that collects what the executor delivers."""

    entries: dict[str, Any] = field(default_factory=dict)
    """Tensors to fill, and objects that have arrived, by name."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = self.entries[read_item.dest_index.fqn]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the tensor is in place."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=False)  # checked already, or ``weights_only=False``
        self.entries[read_item.dest_index.fqn] = loaded

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Do nothing: the planner is complete when it is made."""

    def create_local_plan(self) -> LoadPlan:
        """Not called: the plan is made beforehand."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plan unchanged: there are no other ranks."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return central_plan


def _overlap(boxes: Collection[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    return len(find_overlaps(list(boxes), list(boxes)).saved) > len(boxes)
