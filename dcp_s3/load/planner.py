"""S3LoadPlanner: torch's DefaultLoadPlanner, quick for many tensors of many chunks."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Container
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from dcp_s3 import errors
from dcp_s3.failures import called_by_dcp
from dcp_s3.load.boxes import AnyBox, find_overlaps
from dcp_s3.load.names import find_mismatch, is_other_kind, some
from dcp_s3.memory import is_plain
from dcp_s3.process import collector_paused
from dcp_s3.torch_private import ShardedTensor, create_chunk_list

logger = logging.getLogger(__name__)


_Boxes = tuple[AnyBox, ...]


class S3LoadPlanner(DefaultLoadPlanner):
    """Makes the plan that torch's DefaultLoadPlanner makes, sooner; pass it to `dcp.load` as ``planner``.

    torch compares all pairs of saved and local chunks that overlap in the longest dimension, for each tensor. Here they
    are compared once for all tensors that are cut alike. Takes the same arguments; subclasses may override the same
    methods.

    Python's garbage collector is off while the items are made.

    >>> reader = S3StorageReader("s3://bucket/run/step-00002000")
    >>> dcp.load(state, storage_reader=reader, planner=S3LoadPlanner())

    Raises:
        MissingKeysError, TensorMismatchError: when it plans: see `create_local_plan`. Other errors are as in torch's.
    """

    _found: tuple[MetadataIndex, object, torch.Tensor] | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(allow_partial_load={self.allow_partial_load})"

    def _tell_failed(self, error: BaseException) -> None:
        """Let the reader of the load tell that it failed."""
        tell = getattr(self.metadata, "tell_failed", None)
        if tell is not None:
            tell(error)

    @called_by_dcp
    def create_local_plan(self) -> LoadPlan:
        """Make the plan for this rank.

        Raises:
            TensorMismatchError: saved tensors have other shapes.
            MissingKeysError: entries are not in the checkpoint, unless ``allow_partial_load``.
        """
        metadata = self.metadata
        if metadata is None:
            return super().create_local_plan()  # which raises
        if self.flatten_state_dict and not metadata.state_dict_metadata.keys() <= self.state_dict.keys():
            self._adopt_old_names(metadata)
        state = without_tied(self.state_dict, metadata.state_dict_metadata)
        return create_load_plan(state, metadata, strict=not self.allow_partial_load)

    def _adopt_old_names(self, metadata: Metadata) -> None:
        """Let torch check whether the checkpoint has names from before torch 2.4, and adopt them."""
        names = dict.fromkeys(metadata.state_dict_metadata, BytesStorageMetadata())
        partial = self.allow_partial_load
        self.metadata, self.allow_partial_load = Metadata(names), True  # type: ignore[arg-type]
        try:
            super().create_local_plan()
        finally:
            self.metadata, self.allow_partial_load = metadata, partial

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The local tensor at ``index``: looked up once for a run of items of one local chunk."""
        entry = self.state_dict.get(index.fqn)
        found = self._found
        if found is not None and found[0] is index and found[1] is entry:
            return found[2]
        tensor: torch.Tensor = super().lookup_tensor(index)
        self._found = index, entry, tensor
        return tensor


def without_tied(state: dict[str, Any], saved: Container[str]) -> dict[str, Any]:
    """A flat state without the names that are not ``saved`` but are the same memory as one that is: files of Hugging
    Face have one of the names of tied parameters."""
    missing = [name for name in state if name not in saved]
    if not missing:
        return state
    found = {_memory(entry) for name, entry in state.items() if name in saved} | {_NOTHING}
    tied = {name for name in missing if _memory(state[name]) in found - {None}}
    return {name: entry for name, entry in state.items() if name not in tied} if tied else state


_NOTHING = "a shard without elements"


def _memory(entry: Any) -> object:
    """What two entries have in common if they are the same memory; None if that cannot be told."""
    local = entry.to_local() if isinstance(entry, DTensor) else entry
    if not isinstance(local, torch.Tensor) or not is_plain(local) or entry.numel() == 0:
        return None
    if local.numel() == 0:
        return _NOTHING  # of this rank; the other ranks tell whether the name is missing
    return local.data_ptr(), local.shape, local.stride(), local.dtype, local.device, entry.shape


def create_load_plan(state_dict: dict[str, Any], metadata: Metadata, *, strict: bool) -> LoadPlan:
    """Make the plan that torch's `create_default_local_load_plan` makes.

    Raises:
        TensorMismatchError: saved tensors have other shapes, or no tensor is there for them.
        MissingKeysError: names are missing.
    """
    layouts = _Layouts()
    parts: list[tuple[str, _Layout] | list[ReadItem]] = []
    for fqn, entry in state_dict.items():
        saved = metadata.state_dict_metadata.get(fqn)
        layout = None
        if saved is None and strict:
            raise _mismatch(state_dict, metadata, strict)
        if isinstance(saved, TensorStorageMetadata) and isinstance(entry, torch.Tensor):
            # size() of a ShardedTensor goes through torch's dispatch: 50 us.
            size = entry.metadata().size if type(entry) is ShardedTensor else entry.size()
            if saved.size != size:
                raise _mismatch(state_dict, metadata, strict)
            if isinstance(entry, DTensor) and entry.device_mesh.get_coordinate() is None:
                continue  # its mesh does not have this rank
            layout = layouts.find(saved, entry)
        elif is_other_kind(saved, entry):
            raise _mismatch(state_dict, metadata, strict)
        if layout is not None:
            parts.append((fqn, layout))
        else:
            parts.append(create_default_local_load_plan({fqn: entry}, metadata, strict).items)
    items: list[ReadItem] = []
    with collector_paused():
        for part in parts:
            items += part if isinstance(part, list) else part[1].make_items(part[0])
    return LoadPlan(items)


class _Layout(NamedTuple):
    """The items of a tensor, without its name."""

    places: list[tuple[torch.Size, int]]
    """Offsets and number of each chunk that an item refers to, local or saved: often they are the same."""
    rows: list[tuple[int, torch.Size, int, torch.Size, torch.Size]]
    """For each item, the indices of its chunks in ``places``, each before the offsets in it, and the lengths."""

    def make_items(self, fqn: str) -> list[ReadItem]:
        indices = [MetadataIndex(fqn, offset, index) for offset, index in self.places]
        return [
            ReadItem(LoadItemType.TENSOR, indices[i], dest_offsets, indices[j], storage_offsets, lengths)
            for i, dest_offsets, j, storage_offsets, lengths in self.rows
        ]


class _Layouts:
    """The layouts of one plan, each computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[_Boxes, _Boxes], _Layout] = {}
        self._size = functools.cache(torch.Size)  # one object for equal sizes: a plan has few different ones

    def find(self, saved: TensorStorageMetadata, entry: torch.Tensor) -> _Layout | None:
        """The layout of a tensor's items; None if the chunks are so unusual that torch should plan them."""
        try:
            boxes = tuple(map(_BOX, saved.chunks)), _local_boxes(entry)
            if boxes not in self._known:
                self._known[boxes] = self._compute(*boxes)
        except (TypeError, ValueError):  # not hashable, or other dimensions
            return None
        return self._known[boxes]

    def _compute(self, saved: _Boxes, local: _Boxes) -> _Layout:
        size = self._size
        places: dict[tuple[torch.Size, int], int] = {}
        rows = [
            (
                places.setdefault((size(tuple(local[i][0])), i), len(places)),
                size(local_offsets),
                places.setdefault((size(tuple(saved[j][0])), j), len(places)),
                size(saved_offsets),
                size(lengths),
            )
            for i, j, local_offsets, saved_offsets, lengths in find_overlaps(saved, local)
        ]
        return _Layout(list(places), rows)


_BOX = attrgetter("offsets", "sizes")


def _local_boxes(entry: torch.Tensor) -> _Boxes:
    kind = type(entry)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        size = entry.size()
        return (((0,) * len(size), size),)
    if kind is ShardedTensor:
        shards = [shard.metadata for shard in entry.local_shards()]  # type: ignore[attr-defined]
        return tuple([(tuple(shard.shard_offsets), tuple(shard.shard_sizes)) for shard in shards])
    return tuple(map(_BOX, create_chunk_list(entry)))


def _mismatch(state_dict: dict[str, Any], metadata: Metadata, strict: bool) -> Exception:
    url = getattr(metadata.storage_meta, "checkpoint_id", None)
    found = find_mismatch(state_dict, metadata, str(url or ""), strict=strict)
    return AssertionError("the state fits the checkpoint") if found is None else found


# --- what torch does not say ----------------------------------------------------------------------


def log_unexpected(planner: LoadPlanner, metadata: Metadata, url: str) -> None:
    """Log in one line which saved names are not loaded, if the planner is torch's or ours."""
    state = getattr(planner, "state_dict", None)
    if not isinstance(planner, DefaultLoadPlanner) or not isinstance(state, dict):
        return
    unexpected = [name for name in metadata.state_dict_metadata if name not in state]
    if unexpected:
        count = len(unexpected)
        logger.info("%d names in %s are not in the state and are not loaded: %s", count, url, some(unexpected))


def check_filled(plan: LoadPlan, planner: LoadPlanner, metadata: Metadata, url: str) -> None:
    """Check that a plan of torch's planner, or ours, fills the tensors of its state: torch itself leaves as it is what
    no saved chunk covers.

    Raises:
        CorruptCheckpointError
    """
    state = getattr(planner, "state_dict", None)
    if not isinstance(planner, DefaultLoadPlanner) or not isinstance(state, dict):
        return
    if type(planner).create_local_plan not in (DefaultLoadPlanner.create_local_plan, S3LoadPlanner.create_local_plan):
        return
    planned: dict[str, int] = {}
    for item in plan.items:
        fqn = item.dest_index.fqn
        planned[fqn] = planned.get(fqn, 0) + math.prod(item.lengths)
    for fqn, entry in state.items():
        if not isinstance(metadata.state_dict_metadata.get(fqn), TensorStorageMetadata):
            continue
        local = entry.to_local() if isinstance(entry, DTensor) else entry
        if type(local) in (torch.Tensor, torch.nn.Parameter) and local.numel() != planned.get(fqn, 0):
            raise errors.CorruptCheckpointError(
                f"the metadata of {url} has chunks with {planned.get(fqn, 0)} of the {local.numel()} elements of "
                f"{fqn!r} that are to be loaded here. It is damaged, or was merged wrongly: load an earlier checkpoint",
                url=url,
            )
