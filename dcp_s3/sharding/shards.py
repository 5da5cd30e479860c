"""`shard`: the part of a tensor that this rank holds, as DCP can save, load and reshard it."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_s3 import ranks
from dcp_s3.errors import ShardingError
from dcp_s3.settings import launch
from dcp_s3.torch_private import ShardedTensor, is_traceable_wrapper_subclass, make_wrapper

_aten = torch.ops.aten
_COPIES = {op.default for op in (_aten.detach, _aten.clone, _aten._to_copy, _aten.empty_like, _aten.new_empty)}
"""What stagers do to a tensor."""


class LocalShards(torch.Tensor):
    """The boxes of a tensor that this rank holds. Made by `shard`; goes into a state dict in place of the tensor.

    Its shape is that of the whole tensor. It has no memory of its own: the boxes are the tensors that it was made of,
    so a load writes into those. Only what stagers need can be computed with it (`clone`, `to`).

    DCP asks it for its chunks through the protocol that DTensor has, too (`__create_write_items__` and so on).

    Attributes:
        offsets: first element of each box in the whole tensor.
    """

    offsets: tuple[tuple[int, ...], ...]

    @staticmethod
    def __new__(
        cls, boxes: Sequence[torch.Tensor], offsets: tuple[tuple[int, ...], ...], shape: Sequence[int]
    ) -> LocalShards:
        made = make_wrapper(cls, shape, boxes[0])
        made.offsets = offsets
        for number, box in enumerate(boxes):  # each an attribute: torch's stagers copy attributes
            setattr(made, _name(number), box)
        return made

    @property
    def boxes(self) -> list[torch.Tensor]:
        """The tensors of this rank, one for each of `offsets`."""
        return [getattr(self, _name(number)) for number in range(len(self.offsets))]

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        """What this rank has to save.

        Raises:
            ShardingError: there are no other ranks, and the boxes leave out a part of the tensor.
            SettingsError: see `read_launch`.
        """
        chunks = self.__create_chunk_list__()
        saved = sum(math.prod(chunk.sizes) for chunk in chunks)
        # Other ranks that no process group knows may save with this one, without collectives; the merge checks that.
        if saved != math.prod(self.shape) and ranks.world_size() == launch().world_size == 1:
            raise ShardingError(
                f"{fqn!r}: the shards to save hold {saved} of the {math.prod(self.shape)} elements of a tensor of "
                f"shape {tuple(self.shape)}, and there are no other ranks. Remedy: save on all ranks that hold a part "
                "of it, with torch.distributed initialized",
                fqn=fqn,
            )
        properties = TensorProperties.create_from_tensor(self.boxes[0])
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, torch.Size(self.shape)),
            )
            for chunk in chunks
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Where the boxes lie.

        Without empty ones: DCP takes chunks at the same offsets for replicas and saves one of them, and the next rank's
        box may begin where an empty one does. If there is no other, one stands at the far corner, as DTensor's do, so
        that DCP knows of the tensor.
        """
        if not self.numel():
            return [ChunkStorageMetadata(torch.Size([0] * self.dim()), torch.Size(self.shape))]
        found = [
            ChunkStorageMetadata(torch.Size(offsets), box.shape)
            for offsets, box in zip(self.offsets, self.boxes, strict=True)
            if box.numel()
        ]
        return found or [ChunkStorageMetadata(torch.Size(self.shape), torch.Size([0] * self.dim()))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """The box at ``index.offset``."""
        for offsets, box in zip(self.offsets, self.boxes, strict=True):
            if box.numel() and index.offset == offsets:
                return box
        for chunk in self.__create_chunk_list__():
            if index.offset == chunk.offsets:  # an empty one
                return torch.empty(chunk.sizes, dtype=self.dtype, device=self.device)
        raise ShardingError(
            f"{index.fqn!r} has no box at {index.offset} on this rank, but at {self.offsets}", fqn=index.fqn
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return [_name(number) for number in range(len(self.offsets))], (self.offsets, tuple(self.shape))

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: Any, _size: Any, _stride: Any
    ) -> LocalShards:
        offsets, shape = context
        return cls([inner[_name(number)] for number in range(len(offsets))], offsets, shape)

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
            it is saved: without other ranks, a part of the whole is in no box.
    """
    single = isinstance(tensor, torch.Tensor)
    boxes: list[Any] = [tensor] if single else list(tensor)
    places: list[Any] = [offsets] if single else list(offsets)
    shape = _numbers(global_shape, "global_shape")
    if not boxes or len(boxes) != len(places):
        raise ShardingError(
            f"{len(boxes)} tensors with {len(places)} offsets. Remedy: pass one tensor and its offsets, or as many "
            "offsets as tensors"
        )
    starts = tuple(_numbers(place, "offsets") for place in places)
    for box, start in zip(boxes, starts, strict=True):
        _check_tensor(box, boxes[0])
        _check_place(tuple(box.shape), start, shape)
    for (a, at), (b, bt) in itertools.combinations(zip(boxes, starts, strict=True), 2):
        if all(max(i, j) < min(i + m, j + n) for i, m, j, n in zip(at, a.shape, bt, b.shape, strict=True)):
            raise ShardingError(f"the boxes {_box(at, a.shape)} and {_box(bt, b.shape)} of this rank overlap")
    # Detached ones share memory and version counter with the parameters that they may be.
    return LocalShards([box.detach() for box in boxes], starts, shape)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor knows its shards itself: a DTensor, a ShardedTensor, the result of `shard`."""
    return isinstance(tensor, ShardedTensor) or is_traceable_wrapper_subclass(tensor)


def is_local(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be a shard: dense, and of this rank alone."""
    return not is_sharded(tensor) and tensor.layout == torch.strided


def _name(number: int) -> str:
    return f"box{number}"


def _numbers(values: Any, what: str) -> tuple[int, ...]:
    try:
        found = tuple(map(operator.index, values))
    except TypeError:
        raise ShardingError(f"{what} is {values!r}, expected a whole number for each dimension") from None
    if min(found, default=0) < 0:
        raise ShardingError(f"{what} is {found}, expected no negative number")
    return found


def _check_tensor(box: Any, first: Any) -> None:
    if not isinstance(box, torch.Tensor) or not is_local(box):
        raise ShardingError(
            f"a {type(box).__name__} cannot be a shard, expected a dense local tensor. Remedy: put DTensors into the "
            "state as they are; DCP knows where they lie"
        )
    if (box.dtype, box.device) != (first.dtype, first.device):
        raise ShardingError(
            f"the boxes of a tensor are {first.dtype} on {first.device} and {box.dtype} on {box.device}, expected one "
            "dtype and device"
        )


def _check_place(size: tuple[int, ...], start: tuple[int, ...], shape: tuple[int, ...]) -> None:
    if not len(size) == len(start) == len(shape):
        raise ShardingError(
            f"a tensor of shape {size} at {start} in {shape}: expected as many offsets, and as many dimensions of "
            "global_shape, as the tensor has dimensions"
        )
    if any(o + n > g for o, n, g in zip(start, size, shape, strict=True)):
        raise ShardingError(f"the box {_box(start, size)} is not inside global_shape {shape}")


def _box(start: Sequence[int], size: Sequence[int]) -> str:
    return "[" + ", ".join(f"{o}:{o + n}" for o, n in zip(start, size, strict=True)) + "]"
