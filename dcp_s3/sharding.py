"""`shard` and `shard_state`: the parts of tensors that this rank holds, as DCP can save, load and reshard them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_s3.errors import ShardingError
from dcp_s3.torch_private import ShardedTensor, is_traceable_wrapper_subclass, make_wrapper

_aten = torch.ops.aten
_COPIES = {op.default for op in (_aten.detach, _aten.clone, _aten._to_copy, _aten.empty_like, _aten.new_empty)}
"""What stagers do to a tensor."""


class LocalShards(torch.Tensor):
    """The boxes of a tensor that this rank holds. Made by `shard`; goes into a state dict in place of the tensor.

    Its shape is that of the whole tensor. It has no memory of its own: the boxes are the tensors that it was made of,
    so a load writes into those. Only what stagers need can be computed with it (`clone`, `to`).

    DCP asks it for its chunks through the protocol that DTensor has, too (`__create_write_items__` and so on).
    """

    offsets: tuple[tuple[int, ...], ...]
    """First element of each box in the whole tensor."""

    @staticmethod
    def __new__(
        cls, boxes: Sequence[torch.Tensor], offsets: tuple[tuple[int, ...], ...], shape: Sequence[int]
    ) -> LocalShards:
        made = make_wrapper(cls, shape, boxes[0])
        made.offsets = offsets
        for number, box in enumerate(boxes):  # each an attribute: torch's stagers copy attributes
            setattr(made, f"box{number}", box)
        return made

    @property
    def boxes(self) -> list[torch.Tensor]:
        """The tensors of this rank, one for each of `offsets`."""
        return [getattr(self, f"box{number}") for number in range(len(self.offsets))]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.boxes[0])
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        # Without empty boxes: DCP takes chunks at the same offsets for replicas and saves one of them, and the next
        # rank's box may begin where an empty one does. If there is no other, one stands at the far corner, as DTensor's
        # do, so that DCP knows of the tensor.
        if not self.numel():
            return [ChunkStorageMetadata(torch.Size([0] * self.dim()), torch.Size(self.shape))]
        found = [
            ChunkStorageMetadata(torch.Size(offsets), box.shape)
            for offsets, box in zip(self.offsets, self.boxes, strict=True)
            if box.numel()
        ]
        return found or [ChunkStorageMetadata(torch.Size(self.shape), torch.Size([0] * self.dim()))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        for offsets, box in zip(self.offsets, self.boxes, strict=True):
            if box.numel() and index.offset == offsets:
                return box
        for chunk in self.__create_chunk_list__():
            if index.offset == chunk.offsets:
                return torch.empty(chunk.sizes, dtype=self.dtype, device=self.device)
        raise ShardingError(
            f"{index.fqn!r} has no box at {index.offset} on this rank, but at {self.offsets}", fqn=index.fqn
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [f"box{number}" for number in range(len(self.offsets))], (self.offsets, tuple(self.shape))

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: Any, _size: Any, _stride: Any
    ) -> LocalShards:
        offsets, shape = context
        return cls([inner[f"box{number}"] for number in range(len(offsets))], offsets, shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in _COPIES:
            raise ShardingError(
                f"{func} cannot be computed with a shard made for a checkpoint. Remedy: compute with the tensor that "
                "it was made of; keep the result of dcp_s3.shard for dcp.save and dcp.load"
            )
        source, options = args[0], kwargs or {}
        sized = func is _aten.new_empty.default  # takes a shape, here the box's own
        boxes = [func(box, box.shape, **options) if sized else func(box, **options) for box in source.boxes]
        return cls(boxes, source.offsets, source.shape)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        boxes = ", ".join(f"{tuple(b.shape)} at {o}" for o, b in zip(self.offsets, self.boxes, strict=True))
        return f"LocalShards({boxes} of {tuple(self.shape)}, {self.dtype})"


def shard(
    tensor: torch.Tensor | Sequence[torch.Tensor],
    *,
    global_shape: Sequence[int],
    offsets: Sequence[int] | Sequence[Sequence[int]],
) -> torch.Tensor:
    """Tell DCP where a tensor of this rank lies in a larger one, so that it saves, loads and reshards it.

    Put the result into the state dict in place of ``tensor``, for `dcp.save`, `dcp.async_save` and `dcp.load`. Nothing
    is copied: a load writes into ``tensor``. What is saved is one tensor of ``global_shape``, whatever its shards were;
    a plain tensor, a DTensor or other shards can be loaded from it.

    All ranks together hold each element once; ranks with equal boxes are replicas, of which one is saved.

    >>> rows = torch.ones(2, 8)  # rows 2 and 3 of 4, on this rank
    >>> shard(rows, global_shape=(4, 8), offsets=(2, 0)).size()
    torch.Size([4, 8])

    Args:
        tensor: what this rank holds, any shape and dtype; may be empty. A sequence of tensors of one dtype: several
            boxes, for example the rows of q, k and v in a fused parameter (views of one tensor are fine).
        global_shape: shape of the whole tensor, in elements.
        offsets: where the first element of ``tensor`` lies in the whole, in elements, one for each dimension; for
            several tensors, such offsets for each.

    Raises:
        ShardingError: a box is outside of the whole, has other dimensions, or overlaps another one of this rank. When
            it is saved to S3: without other ranks, a part of the whole is in no box.
    """
    boxes: list[Any] = [tensor] if isinstance(tensor, torch.Tensor) else list(tensor)
    places: list[Any] = [offsets] if isinstance(tensor, torch.Tensor) else list(offsets)
    try:
        shape = tuple(map(operator.index, global_shape))
        starts = tuple(tuple(map(operator.index, place)) for place in places)
    except TypeError:
        raise ShardingError(f"global_shape {global_shape!r} or offsets {offsets!r}: expected whole numbers") from None
    if not boxes or len(boxes) != len(starts):
        raise ShardingError(
            f"{len(boxes)} tensors with {len(starts)} offsets. Remedy: pass one tensor and its offsets, or as many "
            "offsets as tensors"
        )
    for box, start in zip(boxes, starts, strict=True):
        if not isinstance(box, torch.Tensor) or not _is_local(box):
            raise ShardingError(
                f"a {type(box).__name__} cannot be a shard, expected a dense local tensor. Remedy: put DTensors into "
                "the state as they are; DCP knows where they lie"
            )
        if (box.dtype, box.device) != (boxes[0].dtype, boxes[0].device):
            raise ShardingError(
                f"the boxes of a tensor are {boxes[0].dtype} on {boxes[0].device} and {box.dtype} on {box.device}, "
                "expected one dtype and device"
            )
        fits = box.dim() == len(start) == len(shape)
        if not fits or any(o < 0 or o + n > g for o, n, g in zip(start, box.shape, shape, strict=True)):
            raise ShardingError(
                f"a tensor of shape {tuple(box.shape)} at {start} does not lie inside global_shape {shape}"
            )
    for (a, at), (b, bt) in itertools.combinations(zip(boxes, starts, strict=True), 2):
        if all(max(i, j) < min(i + m, j + n) for i, m, j, n in zip(at, a.shape, bt, b.shape, strict=True)):
            raise ShardingError(
                f"the boxes of shape {tuple(a.shape)} at {at} and {tuple(b.shape)} at {bt} of this rank overlap"
            )
    # Detached ones share memory and version counter with the parameters that they may be.
    return LocalShards([box.detach() for box in boxes], starts, shape)


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor knows its shards itself: a DTensor, a ShardedTensor, the result of `shard`."""
    return isinstance(tensor, ShardedTensor) or is_traceable_wrapper_subclass(tensor)


def _is_local(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be a shard: dense, and of this rank alone."""
    return not _is_sharded(tensor) and tensor.layout == torch.strided


# --- whole states -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fused:
    """How a tensor is split that holds several, one after the other, each of them split: q, k and v, or gate and up.

    In the checkpoint the parts follow one another too, each of them whole: all of q, then all of k, then all of v.

    >>> qkv = Fused(dim=0, lengths=(8, 2, 2))  # 8 rows of q, 2 of k and 2 of v on each rank
    >>> shard_state({"qkv": torch.ones(12, 4)}, {"qkv": qkv}, rank=1, world_size=2)["qkv"].size()
    torch.Size([24, 4])
    """

    dim: int
    """Dimension along which the parts follow one another, and are split."""
    lengths: tuple[int, ...]
    """Length of each part on this rank along ``dim``, in elements. With grouped-query attention k and v are shorter."""
    copies: tuple[int, ...] | None = None
    """For each part, how many ranks in a row hold the same of it: with 8 ranks and 2 heads of k and v, (1, 4, 4). None:
    one each."""


Plan = Mapping[str, int | Fused | None]
"""Split of each tensor by name or pattern."""


def shard_state(
    state: Mapping[str, Any],
    plan: Plan,
    *,
    group: dist.ProcessGroup | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> dict[str, Any]:
    """Tell DCP how the tensors of a state are split among the ranks of a tensor-parallel group.

    Returns a state to pass to `dcp.save`, `dcp.async_save` and `dcp.load`. Its tensors share memory with those of
    ``state``, so a load writes into the model; what is no tensor is loaded into the returned dict.

    >>> mine = {"mlp": torch.ones(2, 8), "norm": torch.ones(8)}
    >>> split = shard_state(mine, {"mlp": 0, "norm": None}, rank=0, world_size=2)
    >>> split["mlp"].size()
    torch.Size([4, 8])

    Args:
        plan: for each tensor, by its name (keys joined by dots: ``model.layers.0.weight``) or a pattern of names
            (``*.weight``, as in `fnmatch`): the dimension along which it is split, a `Fused`, or None if each rank
            holds all of it. An exact name takes precedence; of several patterns that match, the first counts. Every
            tensor must be in it, so that no misspelt name makes shards look like replicas, of which one is saved;
            ``"*": None`` at the end takes all the rest. Numbers (0 dimensions), DTensors and shards need no entry.
        group: the ranks that share the tensors, in the order of their shards, which are of one shape. All of them call
            this, once: they compare plans and shapes.
        rank: without ``group``: place of this rank's shards, of ``world_size``.

    Raises:
        ShardingError: a tensor is in no entry of ``plan``, or cannot be split as it says; the ranks of ``group`` split
            differently; neither ``group`` nor ``rank`` and ``world_size`` are given.
    """
    if group is not None:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if rank is None or world_size is None or not 0 <= rank < world_size:
        raise ShardingError(
            f"rank {rank} of {world_size}: expected group, on its ranks only, or both rank and world_size"
        )
    splits: dict[str, Any] = {}

    def note(name: str, tensor: torch.Tensor) -> None:
        if _is_sharded(tensor) or not tensor.dim():
            return
        pattern = name if name in plan else next((each for each in plan if fnmatchcase(name, each)), None)
        if pattern is None:
            raise ShardingError(
                f"the plan does not say how {name!r} is split. Remedy: give its dimension, or None if each rank has "
                "all of it",
                fqn=name,
            )
        if (split := plan[pattern]) is not None:
            splits[name] = split, tensor.shape, tensor.dtype

    def make_shard(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return _shard(name, tensor, splits[name][0], rank, world_size) if name in splits else tensor

    _map_tensors(state, note)
    if group is not None:
        everyone: list[dict[str, Any]] = [splits] * world_size
        dist.all_gather_object(everyone, splits, group=group)
        names = {name for each in everyone for name in each}
        differing = sorted(name for name in names if any(each.get(name) != everyone[0].get(name) for each in everyone))
        if differing:
            found = [each.get(differing[0]) for each in everyone]
            raise ShardingError(
                f"{differing[0]!r} is split differently on the ranks of the group (split, shape, dtype): {found}. "
                "Remedy: pass the same plan, and tensors of one shape; shard() takes any shapes",
                fqn=differing[0],
            )
    sharded: dict[str, Any] = _map_tensors(state, make_shard)
    return sharded


def _shard(name: str, tensor: torch.Tensor, split: int | Fused, rank: int, world_size: int) -> torch.Tensor:
    dim, shape = split.dim if isinstance(split, Fused) else split, tuple(tensor.shape)
    if not _is_local(tensor):
        raise ShardingError(
            f"{name!r} is {tensor.layout}, expected a dense tensor. Remedy: {{{name!r}: None}}", fqn=name
        )
    if isinstance(dim, bool) or not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        raise ShardingError(f"the plan splits {name!r} along {dim!r}, which is no dimension of {shape}", fqn=name)
    dim %= len(shape)
    lengths = tuple(split.lengths) if isinstance(split, Fused) else (shape[dim],)
    copies = (split.copies if isinstance(split, Fused) else None) or (1,) * len(lengths)
    fits = sum(lengths) == shape[dim] and min(lengths, default=-1) >= 0 and len(copies) == len(lengths)
    if not fits or any(count < 1 or world_size % count for count in copies):
        raise ShardingError(
            f"{name!r} has length {shape[dim]} along {dim}, but the plan has parts of {lengths} with {copies} copies "
            f"on {world_size} ranks. Remedy: lengths are those of this rank, and add up to that of its tensor; copies "
            "divide the ranks",
            fqn=name,
        )
    starts, base = [], 0
    for length, count in zip(lengths, copies, strict=True):
        starts.append(base + rank // count * length)
        base += world_size // count * length
    whole = [*shape[:dim], base, *shape[dim + 1 :]]
    offsets = [[start if d == dim else 0 for d in range(len(shape))] for start in starts]
    return shard(torch.split(tensor.detach(), [*lengths], dim), global_shape=whole, offsets=offsets)


def _map_tensors(value: Any, change: Callable[[str, torch.Tensor], Any], name: str = "") -> Any:
    """Copy nested dicts and lists, with ``change(name, tensor)`` in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return change(name, value)
    prefix = f"{name}." if name else ""
    if isinstance(value, Mapping):
        return {key: _map_tensors(entry, change, f"{prefix}{key}") for key, entry in value.items()}
    if isinstance(value, list):
        return [_map_tensors(entry, change, f"{prefix}{number}") for number, entry in enumerate(value)]
    if isinstance(value, tuple) and any(isinstance(entry, torch.Tensor) for entry in value):
        raise ShardingError(
            f"{name!r} is a tuple of tensors, which DCP saves as one object, from one rank. Remedy: make it a list",
            fqn=name,
        )
    if hasattr(value, "state_dict"):
        raise ShardingError(f"{name!r} is a {type(value).__name__}. Remedy: pass its state_dict()", fqn=name)
    return value
