"""Reads a checkpoint without a process group."""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, SupportsIndex

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from dcp_s3 import errors
from dcp_s3.format.saved_entries import find_flaw
from dcp_s3.load.fetch import Fetcher
from dcp_s3.load.items import allocate
from dcp_s3.load.plan import Box
from dcp_s3.load.read import LoadExecutor
from dcp_s3.load.weights import open_metadata
from dcp_s3.offline.names import closest, matches
from dcp_s3.s3.store import store_of
from dcp_s3.settings import Settings, SettingsLike, resolve_settings
from dcp_s3.spill.local import LocalObjects
from dcp_s3.torch_private import ReaderTransforms
from dcp_s3.url import CheckpointURL, parse_url

Part = SupportsIndex | slice | EllipsisType
Index = Part | tuple[Part, ...] | None
"""An index as in numpy: numbers, slices of step 1, one Ellipsis. None: everything."""


def read_tensor(
    url: str | os.PathLike[str],
    fqn: str,
    slice: Index = None,
    *,
    settings: SettingsLike = None,
) -> torch.Tensor:
    """Read one tensor of a committed checkpoint, or a part of it, into host memory.

    Needs no process group, and calls no collective if there is one. Fetches what a load of this part would.

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
    return read_tensors(url, {fqn: ... if slice is None else slice}, settings=settings)[fqn]  # type: ignore[no-any-return]


def read_tensors(
    url: str | os.PathLike[str],
    fqns: str | Iterable[str] | Mapping[str, Index] | None = None,
    *,
    weights_only: bool = True,
    settings: SettingsLike = None,
) -> dict[str, Any]:
    """Read entries of a committed checkpoint: tensors into host memory, and objects.

    Works like `read_tensor`, but fetches all entries together and the metadata once.

    >>> read_tensors("s3://bucket/run/step-00002000")["step"]
    2000
    >>> read_tensors("s3://bucket/run/step-00002000", {"weight": (slice(None), slice(0, 1))})["weight"].shape
    torch.Size([4, 1])

    Args:
        fqns: names, or patterns such as ``model.*`` (``*`` any text, ``?`` any character, ``[ab]`` one of them); None:
            everything. An entry with exactly that name takes precedence over a pattern. Or the part of each tensor to
            read, by names: see `read_tensor`.
        weights_only: False unpickles any object: whoever can write to the bucket can run code here.

    Returns:
        Entries by name, in the order of ``fqns``; the matches of a pattern in the order of the checkpoint.

    Raises:
        EntryNotFoundError: a name is not in the checkpoint, a pattern matches nothing, or a part is not in its tensor.
        UnsafeItemError: an object needs what ``weights_only`` refuses.
        CheckpointNotFoundError, CorruptCheckpointError
        InvalidURLError, SettingsError, StorageError, DeadlineExceededError
    """
    checkpoint = OpenCheckpoint(parse_url(url), resolve_settings(settings))
    parts = fqns if isinstance(fqns, Mapping) else dict.fromkeys(checkpoint.match(fqns))
    targets, objects, shapes = [], [], {}
    for fqn, index in parts.items():
        saved = checkpoint.find(fqn)
        if isinstance(saved, TensorStorageMetadata):
            try:
                box, shapes[fqn] = _select(index, saved.size)
            except IndexError as error:
                what = f"cannot be read at {index!r} of {fqn!r}, of shape {tuple(saved.size)}: {error}"
                raise checkpoint.not_found(fqn, what) from None
            memory = allocate(box.lengths, saved.properties.dtype, fqn, str(checkpoint.url))
            targets.append(Target(fqn, box.offsets, memory))
        elif index is None:
            objects.append(fqn)
        else:
            remedy = f"Remedy: read_tensors(url, [{fqn!r}]) reads objects, too"
            raise checkpoint.not_found(fqn, f"has no tensor {fqn!r}, but an object. {remedy}")
    with checkpoint.reading(weights_only=weights_only) as fill:
        found = fill(targets, objects) | {each.fqn: each.tensor.reshape(shapes[each.fqn]) for each in targets}
    return {fqn: found[fqn] for fqn in parts}


# --- boxes -------------------------------------------------------------------------------------------


def _select(index: object, sizes: Sequence[int]) -> tuple[Box, tuple[int, ...]]:
    """The box that ``index`` selects of a tensor of ``sizes``, and the shape of the result, without the dimensions that
    are indexed by a number; or IndexError. Negative numbers count from the end; slices are cut off at the ends of the
    tensor, numbers must lie in it."""
    parts: list[Any] = [] if index is None else list(index) if isinstance(index, tuple) else [index]
    gap = next((number for number, part in enumerate(parts) if part is Ellipsis), len(parts))
    given = len(parts) - (gap < len(parts))
    if given > len(sizes):
        raise IndexError(f"it has {given} parts, the tensor {len(sizes)} dimensions")
    parts[gap : gap + 1] = [slice(None)] * (len(sizes) - given)
    offsets, lengths, shape = [], [], []
    for dim, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        try:
            found: Any = range(size)[part]
        except (IndexError, TypeError, ValueError) as error:
            raise IndexError(f"{part!r} in dimension {dim} of {size} elements: {error}") from None
        if isinstance(found, range):
            if found.step != 1:
                raise IndexError(f"its step in dimension {dim} is {found.step}: only 1 can be read")
            shape.append(len(found))
        offsets.append(found.start if isinstance(found, range) else found)
        lengths.append(len(found) if isinstance(found, range) else 1)
    return Box(tuple(offsets), tuple(lengths)), tuple(shape)


def cut(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Cut a tensor into boxes of at most ``most`` elements (at least 1) that are runs of its elements in row-major
    order, from the first to the last; none if it is empty."""
    shape = tuple(shape)
    if 0 in shape:
        return
    row = math.prod(shape[1:])
    if math.prod(shape) <= most:
        yield Box((0,) * len(shape), shape)
    elif row > most:
        for number in range(shape[0]):
            for box in cut(shape[1:], most):
                yield Box((number, *box.offsets), (1, *box.lengths))
    else:
        step = most // row
        for start in range(0, shape[0], step):
            lengths = (min(step, shape[0] - start), *shape[1:])
            yield Box((start, *(0 for _ in shape[1:])), lengths)


# --- the checkpoint ----------------------------------------------------------------------------------


class Target(NamedTuple):
    """A part of a tensor that is to be read."""

    fqn: str
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    """Memory of the saved dtype, and of the box's shape."""


Fill = Callable[[Sequence[Target], Sequence[str]], dict[str, Any]]
"""Fills targets, and reads objects by names, which it returns."""


class OpenCheckpoint:
    """A checkpoint whose metadata has been read."""

    def __init__(self, url: CheckpointURL, settings: Settings) -> None:
        self.url, self.settings = url, settings
        self.store = store_of(url, settings)
        self.metadata = open_metadata(self.store, url)
        if not isinstance(self.metadata.storage_data, dict):
            raise errors.CorruptCheckpointError(f"the metadata of {url} does not say where its items lie", url=str(url))

    def match(self, fqns: str | Iterable[str] | None) -> list[str]:
        """The names that names and patterns stand for, each once, or EntryNotFoundError. None: all of them."""
        names = self.metadata.state_dict_metadata
        found: dict[str, None] = {} if fqns is not None else dict.fromkeys(names)
        for fqn in [fqns] if isinstance(fqns, str) else fqns or ():
            matching = [fqn] if fqn in names else [name for name in names if matches(name, [fqn])]
            if not matching:
                self.find(fqn)  # which raises
            found.update(dict.fromkeys(matching))
        return list(found)

    def find(self, fqn: str) -> Any:
        saved = self.metadata.state_dict_metadata.get(fqn)
        if saved is None:
            near = closest(fqn, list(self.metadata.state_dict_metadata))
            raise self.not_found(fqn, f"has no entry {fqn!r}{near}")
        return saved

    def not_found(self, fqn: str, what: str) -> errors.EntryNotFoundError:
        return errors.EntryNotFoundError(f"{self.url} {what}", url=str(self.url), fqn=fqn)

    @contextlib.contextmanager
    def reading(self, *, weights_only: bool = True, buffers: int | None = None) -> Iterator[Fill]:
        """Reads that share a fetcher, one after the other; ``buffers``: see `Fetcher`."""
        nothing = torch.Size((0,))
        store = self.store if self.settings.spill_dir is None else LocalObjects(self.store, self.settings, self.url)
        fetcher = Fetcher(store, self.url, self.settings, buffers=buffers)
        executor = LoadExecutor(fetcher, self.metadata, ReaderTransforms(None), weights_only=weights_only)

        def fill(targets: Sequence[Target], objects: Sequence[str]) -> dict[str, Any]:
            items = [item for target in targets for item in self._items_of(target)]
            for fqn in objects:
                index = MetadataIndex(fqn)
                items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
            planner = _Planner({MetadataIndex(each.fqn, each.offsets): each.tensor for each in targets})
            executor.run(LoadPlan(items), planner)
            return planner.objects

        yield fill

    def _items_of(self, target: Target) -> list[ReadItem]:
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
