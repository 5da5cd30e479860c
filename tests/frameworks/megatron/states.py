"""A state as tensor-parallel ranks hold it, in several shardings. Every value follows from the step and the name."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedObject

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "decoder.qkv.weight": ((24, 16), torch.bfloat16),
    "decoder.mlp.weight": ((16, 24), torch.float32),
    "decoder.bias": ((24,), torch.float32),
    "norm.weight": ((8,), torch.float64),
    "optimizer.exp_avg.decoder.qkv.weight": ((24, 16), torch.float32),
    "optimizer.exp_avg.decoder.mlp.weight": ((16, 24), torch.float32),
}
REPLICATED = {"norm.weight"}
LAYOUTS = ("rows", "columns", "grid")


def whole(name: str, step: int) -> torch.Tensor:
    """A tensor as a whole."""
    shape, dtype = SHAPES[name]
    generator = torch.Generator().manual_seed(1000 * step + list(SHAPES).index(name))
    return torch.randn(shape, generator=generator).to(dtype)


def splits(name: str, layout: str, world: int) -> tuple[int, ...]:
    """In how many pieces each axis of a tensor is cut."""
    dims = len(SHAPES[name][0])
    if name in REPLICATED:
        return (1,) * dims
    if layout == "rows" or dims == 1:
        return (world, *[1] * (dims - 1))
    if layout == "columns":
        return (1, world)
    return (2, world // 2) if world > 1 else (1, 1)


def sharded(step: int, layout: str = "rows", *, blank: bool = False) -> dict[str, Any]:
    """This rank's state for Megatron: what is sharded, and a common part."""
    rank, world = dist.get_rank(), dist.get_world_size()
    state: dict[str, Any] = {}
    for name in SHAPES:
        cut = splits(name, layout, world)
        piece = _piece(whole(name, step), cut, rank)
        if blank:
            piece = torch.zeros_like(piece)
        place = _place(cut, rank)
        state[name] = ShardedTensor.from_rank_offsets(
            name,
            piece,
            *((axis, at, count) for axis, (at, count) in enumerate(zip(place, cut, strict=True)) if count > 1),
            replica_id=rank if name in REPLICATED else 0,
        )
    state["rng"] = ShardedObject("rng", None if blank else {"seed": step}, (1,), (0,), replica_id=rank)
    if not blank:
        state["iteration"] = step
        state["args"] = {"lr": 0.5**step, "layers": [step, 2]}
    return state


def check(loaded: dict[str, Any], step: int, layout: str = "rows") -> None:
    """What a load gave this rank is, bit for bit, the state of ``step``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in SHAPES:
        expected = _piece(whole(name, step), splits(name, layout, world), rank)
        assert loaded[name].dtype == expected.dtype, name
        assert torch.equal(loaded[name].view(torch.uint8), expected.view(torch.uint8)), name
    assert loaded["rng"] == {"seed": step}
    assert loaded["iteration"] == step
    assert loaded["args"] == {"lr": 0.5**step, "layers": [step, 2]}


def _place(cut: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Which piece of each axis a rank has."""
    place = []
    for count in reversed(cut):
        rank, at = divmod(rank, count)
        place.append(at)
    return tuple(reversed(place))


def _piece(tensor: torch.Tensor, cut: tuple[int, ...], rank: int) -> torch.Tensor:
    for axis, (at, count) in enumerate(zip(_place(cut, rank), cut, strict=True)):
        tensor = tensor.chunk(count, axis)[at]
    return tensor.contiguous()
