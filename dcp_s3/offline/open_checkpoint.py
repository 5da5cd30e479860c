"""A checkpoint that is read without a process group: its metadata, and the engine for what is wanted of it."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import io
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_s3 import errors
from dcp_s3.checkpoint.stored_metadata import check_metadata, fetch_metadata
from dcp_s3.limit import Deadline, Limit
from dcp_s3.load.engine import Source
from dcp_s3.load.item_transfer import allocate
from dcp_s3.load.overlaps import find_overlaps
from dcp_s3.load.read import LoadExecutor
from dcp_s3.offline.indexing import Selection
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import SettingsLike, resolve_settings
from dcp_s3.spill.local import LocalObjects
from dcp_s3.spill.session import open_store
from dcp_s3.torch_private import ReaderTransforms
from dcp_s3.url import CheckpointURL, parse_url

_SUGGESTED = 3


class OpenCheckpoint:
    """A checkpoint whose metadata has been read.

    Args:
        url: URL of the checkpoint.
        settings: a `Settings`, or a mapping of those that differ from the environment.
        bounded: whether ``load_timeout`` bounds all that is read, from now on.
        metadata: its metadata, if it was read before.

    Raises:
        CheckpointNotFoundError, CorruptMetadataError, StorageError
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        settings: SettingsLike,
        *,
        bounded: bool = True,
        metadata: Metadata | None = None,
    ) -> None:
        self.url: CheckpointURL = parse_url(url)
        self.settings = resolve_settings(settings)
        seconds = self.settings.load_timeout if bounded else None
        limit = Limit(deadline=Deadline.start("DCP_S3_LOAD_TIMEOUT", seconds), hang=seconds)
        self.store = S3Store(self.url.bucket, self.settings, limit)
        self._metadata: Metadata = metadata or check_metadata(fetch_metadata(self.store, self.url), self.url)
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

    @property
    def entries(self) -> Mapping[str, Any]:
        """The metadata of all entries, by name."""
        return self._metadata.state_dict_metadata

    def read(self, wanted: dict[str, Selection | None], *, weights_only: bool = True) -> dict[str, Any]:
        """Read tensors, each with the shape of its box, and objects."""
        targets, objects = [], []
        for fqn, selection in wanted.items():
            saved = self._metadata.state_dict_metadata[fqn]
            if selection is None or not isinstance(saved, TensorStorageMetadata):
                objects.append(fqn)
            else:
                tensor = allocate(selection.lengths, saved.properties.dtype, fqn, str(self.url))
                targets.append(Target(fqn, selection.offsets, tensor))
        with self.reading(weights_only=weights_only) as reading:
            found = reading.fill(targets, objects) | {target.fqn: target.tensor for target in targets}
        return {fqn: found[fqn] for fqn in wanted}

    @contextlib.contextmanager
    def reading(self, *, weights_only: bool = True, buffers: int | None = None) -> Iterator[Reading]:
        """Reads that share an engine; ``buffers``: see `Source`."""
        spill = open_store(self.settings)
        with contextlib.closing(LocalObjects(spill, str(self.url))) if spill else contextlib.nullcontext() as local:
            source = Source(self.store, self.url, local, buffers=buffers)
            executor = LoadExecutor(source, self._metadata, ReaderTransforms(None), weights_only=weights_only)
            yield Reading(self, executor)

    def items_of(self, target: Target) -> list[ReadItem]:
        """One item for each saved chunk in the target's box; only one for chunks at the same place.

        Raises:
            CorruptMetadataError: the saved chunks leave out a part of the box.
        """
        fqn, box, saved = target.fqn, tuple(target.tensor.shape), self.find(target.fqn)
        if 0 in box:
            return []
        try:
            found = find_overlaps([(chunk.offsets, chunk.sizes) for chunk in saved.chunks], [(target.offsets, box)])
        except ValueError as error:
            raise self._contradiction(fqn, str(error)) from None
        index = target.index
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
        if sum(math.prod(lengths) for _, lengths in items) != math.prod(box) or _overlap(items):
            raise self._contradiction(fqn, "its chunks do not cover it, each element once")
        return list(items.values())

    def _contradiction(self, fqn: str, what: str) -> errors.CorruptMetadataError:
        return errors.CorruptMetadataError(
            f"the metadata of {self.url} contradicts itself on {fqn!r}: {what}. Remedy: load an earlier checkpoint",
            url=str(self.url),
        )


@dataclass(frozen=True)
class Target:
    """A box of a tensor, and where it goes."""

    fqn: str
    """Name of the tensor."""
    offsets: tuple[int, ...]
    """First element of the box in each dimension."""
    tensor: torch.Tensor
    """Memory of the saved dtype, and of the box's shape."""

    @property
    def index(self) -> MetadataIndex:
        """What tells it from other targets."""
        return MetadataIndex(self.fqn, self.offsets)


class Reading:
    """Reads of one checkpoint, one after the other; see `OpenCheckpoint.reading`."""

    def __init__(self, checkpoint: OpenCheckpoint, executor: LoadExecutor) -> None:
        self._checkpoint, self._executor = checkpoint, executor

    def fill(self, targets: Sequence[Target], objects: Iterable[str] = ()) -> dict[str, Any]:
        """Fill targets, and read objects.

        Returns:
            The objects by name.

        Raises:
            UnsafeItemError: an object needs what ``weights_only`` refuses.
            CorruptMetadataError, CorruptCheckpointError, StorageError, DeadlineExceededError
        """
        planner = _Planner({target.index: target.tensor for target in targets})
        items = [item for target in targets for item in self._checkpoint.items_of(target)]
        items += [_object_item(fqn) for fqn in objects]
        self._executor.run(LoadPlan(items), planner)
        return planner.objects


def _object_item(fqn: str) -> ReadItem:
    index, nothing = MetadataIndex(fqn), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing)


@dataclass
class _Planner(LoadPlanner):
    """A planner that collects what the executor delivers."""

    tensors: Mapping[MetadataIndex, torch.Tensor]
    """Tensors to fill."""
    objects: dict[str, Any] = field(default_factory=dict)
    """Objects that have arrived, by name."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target: torch.Tensor = self.tensors[read_item.dest_index]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the tensor is in place."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        loaded = torch.load(value, map_location="cpu", weights_only=False)  # checked already, or ``weights_only=False``
        self.objects[read_item.dest_index.fqn] = loaded

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
