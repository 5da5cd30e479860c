"""S3LoadPlanner: torch's DefaultLoadPlanner, quick for tensors of many chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.tensor import DTensor

from dcp_s3.failures import called_by_dcp
from dcp_s3.load.aliases import without_tied
from dcp_s3.load.names import find_mismatch, is_other_kind
from dcp_s3.load.overlaps import Box, find_overlaps
from dcp_s3.process import collector_paused
from dcp_s3.torch_private import ShardedTensor, create_chunk_list

_TENSOR = LoadItemType.TENSOR


class _PlainMetadataIndex:
    def __init__(self, fqn: str, offset: torch.Size, index: int) -> None:
        self.fqn = fqn
        self.index = index
        self.offset = offset


class _PlainReadItem:
    def __init__(
        self,
        dest_index: MetadataIndex,
        dest_offsets: torch.Size,
        storage_index: MetadataIndex,
        storage_offsets: torch.Size,
        lengths: torch.Size,
    ) -> None:
        self.type = _TENSOR
        self.dest_index = dest_index
        self.dest_offsets = dest_offsets
        self.storage_index = storage_index
        self.storage_offsets = storage_offsets
        self.lengths = lengths


def make_indices(fqn: str, places: Iterable[tuple[torch.Size, int]]) -> list[MetadataIndex]:
    """Make the index of each chunk of a tensor."""
    if not _FAST:
        return [MetadataIndex(fqn, offset, index) for offset, index in places]
    made = [_PlainMetadataIndex(fqn, offset, index) for offset, index in places]
    for each in made:
        each.__class__ = MetadataIndex  # type: ignore[assignment]
    return made  # type: ignore[return-value]


def make_tensor_items(
    dest_indices: Iterable[MetadataIndex],
    dest_offsets: Iterable[torch.Size],
    storage_indices: Iterable[MetadataIndex],
    storage_offsets: Iterable[torch.Size],
    lengths: Iterable[torch.Size],
) -> list[ReadItem]:
    """Make the items of a tensor from their columns."""
    columns = (dest_indices, dest_offsets, storage_indices, storage_offsets, lengths)
    if not _FAST:
        return [ReadItem(_TENSOR, *row) for row in zip(*columns, strict=True)]
    made = list(map(_PlainReadItem, *columns))
    for each in made:
        each.__class__ = ReadItem  # type: ignore[assignment]
    return made  # type: ignore[return-value]


_FAST = True


def _is_exact() -> bool:
    """Whether this makes exactly what torch's constructors make."""
    size = torch.Size((1, 2))
    expected = MetadataIndex("x", size, 3)
    try:
        (index,) = make_indices("x", [(size, 3)])
        (item,) = make_tensor_items([index], [size], [index], [size], [size])
    except TypeError:  # another layout, for example __slots__
        return False
    return vars(index) == vars(expected) and vars(item) == vars(ReadItem(_TENSOR, expected, size, expected, size, size))


_FAST = _is_exact()


_Boxes = tuple[Box, ...]


class FailureTeller:
    """Metadata that a reader has read carries it, so that a planner can tell of a failure. Copies tell nobody."""

    def __init__(self, tell: Callable[[BaseException], None] | None = None) -> None:
        self._tell = tell

    def __call__(self, error: BaseException) -> None:
        if self._tell is not None:
            self._tell(error)

    def __reduce__(self) -> tuple[type[FailureTeller], tuple[()]]:
        return FailureTeller, ()


class S3LoadPlanner(DefaultLoadPlanner):
    """Makes the plan that torch's DefaultLoadPlanner makes, sooner; pass it to `dcp.load` as ``planner``.

    torch compares all pairs of saved and local chunks that overlap in the longest dimension of a tensor: with chunks
    along another dimension, all pairs there are. Here an index over all dimensions finds the overlaps, once for all
    tensors that are cut alike. Takes the same arguments; subclasses may override the same methods.

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


@dataclass(frozen=True)
class _Layout:
    """The items of a tensor, without its name."""

    places: list[tuple[torch.Size, int]]
    """Offsets and number of each chunk that an item refers to, local or saved: often they are the same."""
    dest: list[int]
    """For each item, the index of its local chunk in ``places``."""
    storage: list[int]
    """For each item, the index of its saved chunk in ``places``. The fields below have one entry for each item."""
    dest_offsets: list[torch.Size]
    storage_offsets: list[torch.Size]
    lengths: list[torch.Size]

    def make_items(self, fqn: str) -> list[ReadItem]:
        indices = make_indices(fqn, self.places)
        get = indices.__getitem__
        return make_tensor_items(
            map(get, self.dest), self.dest_offsets, map(get, self.storage), self.storage_offsets, self.lengths
        )


class _Layouts:
    """The layouts of one plan, each computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[_Boxes, int], list[tuple[_Boxes, _Layout]]] = {}
        self._sizes: dict[tuple[int, ...], torch.Size] = {}

    def find(self, saved: TensorStorageMetadata, entry: torch.Tensor) -> _Layout | None:
        """The layout of a tensor's items; None if the chunks are so unusual that torch should plan them."""
        try:
            saved_boxes, local_boxes = tuple(map(_BOX, saved.chunks)), _local_boxes(entry)
            # Compared rather than hashed: boxes of a ShardedTensor are lists, and tuples of them would cost most.
            known = self._known.setdefault((saved_boxes, len(local_boxes)), [])
            for boxes, layout in known:
                if boxes == local_boxes:
                    return layout
            layout = self._compute(saved_boxes, local_boxes)
        except (TypeError, ValueError):  # not hashable, or other dimensions
            return None
        if len(known) < _MAX_ALIKE:
            known.append((local_boxes, layout))
        return layout

    def _compute(self, saved: _Boxes, local: _Boxes) -> _Layout:
        found = find_overlaps(saved, local)
        places: dict[tuple[torch.Size, int], int] = {}
        dest = [places.setdefault((self._size(tuple(local[i][0])), i), len(places)) for i in found.local]
        storage = [places.setdefault((self._size(tuple(saved[j][0])), j), len(places)) for j in found.saved]
        return _Layout(
            list(places),
            dest,
            storage,
            list(map(self._size, found.local_offsets)),
            list(map(self._size, found.saved_offsets)),
            list(map(self._size, found.lengths)),
        )

    def _size(self, numbers: tuple[int, ...]) -> torch.Size:
        """Return one object for equal sizes: a plan has few different ones."""
        size = self._sizes.get(numbers)
        if size is None:
            size = self._sizes[numbers] = torch.Size(numbers)
        return size


_BOX = attrgetter("offsets", "sizes")


_SHARD_BOX = attrgetter("metadata.shard_offsets", "metadata.shard_sizes")
# Maximum layouts kept for tensors with equal saved chunks, so that a tensor is compared with few of them.
_MAX_ALIKE = 16


def _local_boxes(entry: torch.Tensor) -> _Boxes:
    kind = type(entry)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        size = entry.size()
        return (((0,) * len(size), size),)
    if kind is ShardedTensor:
        return tuple(map(_SHARD_BOX, entry.local_shards()))  # type: ignore[attr-defined]
    return tuple(map(_BOX, create_chunk_list(entry)))


def _mismatch(state_dict: dict[str, Any], metadata: Metadata, strict: bool) -> Exception:
    url = getattr(metadata.storage_meta, "checkpoint_id", None)
    found = find_mismatch(state_dict, metadata, str(url or ""), strict=strict)
    return AssertionError("the state fits the checkpoint") if found is None else found
