"""S3LoadPlanner: torch's DefaultLoadPlanner, quick for many tensors of many chunks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import chain, islice, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.tensor import DTensor

from dcp_s3 import errors
from dcp_s3.errors import MissingKeysError, TensorMismatchError
from dcp_s3.failures import called_by_dcp
from dcp_s3.memory import is_plain
from dcp_s3.process import collector_paused
from dcp_s3.torch_private import ShardedTensor, create_chunk_list
from dcp_s3.units import plural

AnyBox = tuple[Sequence[int], Sequence[int]]
"""Offsets and sizes of a chunk, in elements."""
_Boxes = tuple[AnyBox, ...]


class S3LoadPlanner(DefaultLoadPlanner):
    """Makes the same plan as torch's DefaultLoadPlanner, faster, with better errors. Pass it to `dcp.load` as
    ``planner``.

    torch compares all pairs of saved and local chunks that overlap in the longest dimension, for each tensor. This
    planner compares them once for all tensors that are cut alike. It takes the same arguments; subclasses may override
    the same methods.

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
        teller = getattr(self.metadata, "failure_teller", None)
        if teller is not None:
            teller.tell(error)

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
            # Let torch check whether the checkpoint has names from before torch 2.4, and adopt them.
            names = dict.fromkeys(metadata.state_dict_metadata, BytesStorageMetadata())
            partial = self.allow_partial_load
            self.metadata, self.allow_partial_load = Metadata(names), True  # type: ignore[arg-type]
            try:
                super().create_local_plan()
            finally:
                self.metadata, self.allow_partial_load = metadata, partial
        state = without_tied(self.state_dict, metadata.state_dict_metadata)
        return create_load_plan(state, metadata, strict=not self.allow_partial_load)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The local tensor at ``index``: looked up once for a run of items of one local chunk."""
        entry, found = self.state_dict.get(index.fqn), self._found
        if found is None or found[0] is not index or found[1] is not entry:
            found = self._found = index, entry, super().lookup_tensor(index)
        return found[2]


def without_tied(state: dict[str, Any], saved: Container[str]) -> dict[str, Any]:
    """A flat state without the names that are not ``saved`` but are the same memory as one that is: files of Hugging
    Face have one of the names of tied parameters."""
    nothing = "a shard without elements"

    def memory(entry: Any) -> object:
        """What two entries have in common if they are the same memory; None if that cannot be told."""
        local = entry.to_local() if isinstance(entry, DTensor) else entry
        if not isinstance(local, torch.Tensor) or not is_plain(local) or entry.numel() == 0:
            return None
        if local.numel() == 0:
            return nothing  # of this rank; the other ranks tell whether the name is missing
        return local.data_ptr(), local.shape, local.stride(), local.dtype, local.device, entry.shape

    missing = [name for name in state if name not in saved]
    if not missing:
        return state
    found = {memory(entry) for name, entry in state.items() if name in saved} | {nothing}
    tied = {name for name in missing if memory(state[name]) in found - {None}}
    return {name: entry for name, entry in state.items() if name not in tied} if tied else state


_Layout = tuple[list[tuple[torch.Size, int]], list[tuple[int, torch.Size, int, torch.Size, torch.Size]]]
"""The items of a tensor, without its name. Offsets and number of each chunk that an item refers to, local or saved:
often they are the same. Then for each item the indices of its two chunks there, each before the offsets in it, and the
lengths."""


def create_load_plan(state_dict: dict[str, Any], metadata: Metadata, *, strict: bool) -> LoadPlan:
    """Make the plan that torch's `create_default_local_load_plan` makes, or raise as `create_local_plan` does."""
    known: dict[tuple[_Boxes, _Boxes], _Layout] = {}
    size = functools.cache(torch.Size)  # one object for equal sizes: a plan has few different ones
    items: list[ReadItem] = []
    with collector_paused():
        for fqn, entry in state_dict.items():
            saved = metadata.state_dict_metadata.get(fqn)
            layout = None
            if saved is None and strict:
                raise _mismatch(state_dict, metadata, strict)
            if isinstance(saved, TensorStorageMetadata) and isinstance(entry, torch.Tensor):
                if saved.size != _size_of(entry):
                    raise _mismatch(state_dict, metadata, strict)
                if isinstance(entry, DTensor) and entry.device_mesh.get_coordinate() is None:
                    continue  # its mesh does not have this rank
                layout = _find_layout(known, size, saved, entry)
            elif _is_other_kind(saved, entry):
                raise _mismatch(state_dict, metadata, strict)
            if layout is None:
                items += create_default_local_load_plan({fqn: entry}, metadata, strict).items
                continue
            places, rows = layout
            indices = [MetadataIndex(fqn, offset, index) for offset, index in places]
            items += [
                ReadItem(LoadItemType.TENSOR, indices[i], dest_offsets, indices[j], storage_offsets, lengths)
                for i, dest_offsets, j, storage_offsets, lengths in rows
            ]
    return LoadPlan(items)


_BOX = attrgetter("offsets", "sizes")


def _find_layout(
    known: dict[tuple[_Boxes, _Boxes], _Layout], size: Callable[[Any], torch.Size], saved: Any, entry: torch.Tensor
) -> _Layout | None:
    """The layout of a tensor's items, computed once for all that are cut alike (``known``); None if the chunks are so
    unusual that torch should plan them."""
    try:
        stored: _Boxes = tuple(map(_BOX, saved.chunks))
        if type(entry) in (torch.Tensor, torch.nn.Parameter):
            local: _Boxes = (((0,) * entry.dim(), entry.size()),)
        elif type(entry) is ShardedTensor:
            shards = [shard.metadata for shard in entry.local_shards()]
            local = tuple([(tuple(shard.shard_offsets), tuple(shard.shard_sizes)) for shard in shards])
        else:
            local = tuple(map(_BOX, create_chunk_list(entry)))
        if (stored, local) not in known:
            places: dict[tuple[torch.Size, int], int] = {}
            rows = [
                (
                    places.setdefault((size(tuple(local[i][0])), i), len(places)),
                    size(local_offsets),
                    places.setdefault((size(tuple(stored[j][0])), j), len(places)),
                    size(saved_offsets),
                    size(lengths),
                )
                for i, j, local_offsets, saved_offsets, lengths in find_overlaps(stored, local)
            ]
            known[stored, local] = list(places), rows
    except (TypeError, ValueError):  # not hashable, or other dimensions
        return None
    return known[stored, local]


_Overlap = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
_PAIRS = 2**16  # that are compared at once


def find_overlaps(saved: Sequence[AnyBox], local: Sequence[AnyBox]) -> Iterable[_Overlap]:
    """All pairs of chunks that overlap, in torch's order: by the beginning of the local chunk, then by the end of the
    saved one, both in the longest dimension. Compares the pairs that overlap in the dimension in which the fewest do.

    Two chunks overlap if in every dimension each begins before the other ends; so an empty chunk overlaps one that has
    it strictly inside. Raises ValueError if boxes have different numbers of dimensions.

    Returns:
        For each pair: number of the local chunk, of the saved one; offsets of the common box in the local chunk, in the
        saved one; its sizes, of which some may be 0 where a chunk is empty.
    """
    if not saved or not local:
        return ()
    dims = len(local[0][0])
    if set(map(len, chain.from_iterable(chain(saved, local)))) != {dims}:
        raise ValueError("the chunks of a tensor differ in their number of dimensions")
    starts, stops = _bounds(saved, dims)
    local_starts, local_stops = _bounds(local, dims)
    candidates = []  # for each dimension: an order of the saved chunks, and which of them may overlap each local one
    for start, stop, local_start, local_stop in zip(starts.T, stops.T, local_starts.T, local_stops.T, strict=True):
        by_end = np.argsort(stop, kind="stable")
        first_starts = np.minimum.accumulate(start[by_end][::-1])[::-1]  # from each place on
        first = np.searchsorted(stop[by_end], local_start, side="right")
        last = np.searchsorted(first_starts, local_stop, side="left")
        candidates.append((by_end, first, np.maximum(last - first, 0)))
    by_end, first, counts = min(candidates, key=lambda each: each[2].sum())
    ends, pairs = np.cumsum(counts), []
    # Where memory for all pairs would be large, those of some local chunks at a time.
    cuts = np.searchsorted(ends, np.arange(_PAIRS, ends[-1], _PAIRS)) if ends[-1] > _PAIRS else ()
    for begin, end in pairwise((0, *cuts, len(local))):
        i = np.repeat(np.arange(begin, end), counts[begin:end])
        before = ends[begin] - counts[begin]
        j = by_end[np.arange(before, before + len(i)) + (first + counts - ends)[i]]
        kept = ((starts[j] < local_stops[i]) & (local_starts[i] < stops[j])).all(1)
        pairs.append((i[kept], j[kept]))
    i, j = pairs[0] if len(pairs) == 1 else map(np.concatenate, zip(*pairs, strict=True))
    longest = int(np.maximum(stops.max(0), local_stops.max(0)).argmax())
    places = [np.argsort(np.argsort(each[:, longest], kind="stable")) for each in (stops, local_starts)]
    order = np.lexsort((places[0][j], places[1][i]))
    i, j = i[order], j[order]
    low, high = np.maximum(local_starts[i], starts[j]), np.minimum(local_stops[i], stops[j])
    offsets = ((low - local_starts[i])[:, :dims], (low - starts[j])[:, :dims], (high - low)[:, :dims])
    columns = [map(tuple, each.tolist()) for each in offsets]
    return zip(i.tolist(), j.tolist(), *columns, strict=True)


def _bounds(boxes: Sequence[AnyBox], dims: int) -> tuple[Any, Any]:
    """First indices of boxes and those after their last ones, a row each; a scalar is a box of one dimension."""
    found = np.fromiter(chain.from_iterable(chain.from_iterable(boxes)), np.int64).reshape(len(boxes), 2, dims)
    if dims == 0:
        return np.zeros((len(boxes), 1), np.int64), np.ones((len(boxes), 1), np.int64)
    return found[:, 0], found.sum(1)


# --- what does not fit --------------------------------------------------------------------------------


_NAMED = 5  # names in a message
_MOST_NAMES = 1000  # that an error has, because it goes to each rank
_ADVICE = (
    "Remedy: build the model with the configuration that was saved. If the names differ by what they begin with or by "
    "a wrapper's part (module., _orig_mod.): load into a state with the saved names, for example {'model': state}"
)
_PARTIAL = "DefaultLoadPlanner(allow_partial_load=True) leaves what is missing as it is"


def some(names: Iterable[str]) -> str:
    """The first few names."""
    found = list(names)
    return ", ".join(found[:_NAMED]) + (", ..." if len(found) > _NAMED else "")


def _is_other_kind(saved: object, entry: object) -> bool:
    """Whether a saved tensor is to be loaded into something that is none, which torch refuses."""
    tensor_like = isinstance(entry, torch.Tensor) or hasattr(entry, "__create_chunk_list__")
    return isinstance(saved, TensorStorageMetadata) and not tensor_like


def _size_of(entry: Any) -> torch.Size | None:
    # size() of a ShardedTensor goes through torch's dispatch: 50 us.
    if type(entry) is ShardedTensor:
        return entry.metadata().size
    return entry.size() if isinstance(entry, torch.Tensor) else None


def _mismatch(state: Mapping[str, Any], metadata: Metadata, strict: bool) -> MissingKeysError | TensorMismatchError:
    """The error of a load of ``state`` that does not fit, with every missing name and every other shape."""
    saved, url = metadata.state_dict_metadata, str(getattr(metadata.storage_meta, "checkpoint_id", None) or "")
    missing = [fqn for fqn in state if strict and fqn not in saved]
    shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for fqn, entry in state.items():
        found, size = saved.get(fqn), _size_of(entry)
        if isinstance(found, TensorStorageMetadata) and size is not None and found.size != size:
            shapes[fqn] = tuple(found.size), tuple(size)
    which = f"; the checkpoint is {url}" if url else ""
    first = next((fqn for fqn in state if fqn in shapes or fqn in missing[:1]), None)
    if first in shapes:
        (fqn, (one, other)), *more = shapes.items()
        text = f"Size mismatch between saved {one} and current {other} for {fqn}"  # as torch begins
        named = some(f"{name} (saved {one}, current {other})" for name, (one, other) in more)
        text += f", and for {len(more)} more: {named}" if more else ""
        text += f"; also not saved: {plural(len(missing), 'name')} of the state ({some(missing)})" if missing else ""
        shapes = dict(islice(shapes.items(), _MOST_NAMES))
        return TensorMismatchError(f"{text}{which}. {_ADVICE}", url=url, fqn=fqn, shapes=shapes)
    if missing:
        unexpected = [fqn for fqn in saved if fqn not in state]
        others = f" and {len(missing) - 1} more ({some(missing[1:])})" if len(missing) > 1 else ""
        text = f"Missing key in checkpoint state_dict: {missing[0]}{others}{which}."  # as torch begins
        if unexpected:
            text += f" Saved but not in the state: {plural(len(unexpected), 'name')} ({some(unexpected)})."
        text += f" Of other shapes: {some(shapes)}." if shapes else ""
        names = {"missing": missing[:_MOST_NAMES], "unexpected": unexpected[:_MOST_NAMES]}
        return MissingKeysError(f"{text} {_ADVICE}. {_PARTIAL}", url=url, fqn=missing[0], **names)
    kinds = [fqn for fqn, entry in state.items() if _is_other_kind(saved.get(fqn), entry)]
    text = f"Saved tensors are no tensors in the state to load into: {some(kinds)}{which}. {_ADVICE}"
    return TensorMismatchError(text, url=url, fqn=kinds[0])


def check_filled(plan: LoadPlan, planner: LoadPlanner, metadata: Metadata, url: str) -> None:
    """Check that a plan of torch's planner, or ours, fills the tensors of its state, or raise CorruptCheckpointError:
    torch itself leaves as it is what no saved chunk covers."""
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
