"""`shard_state`: all shards of a state at once, by a plan that says how each tensor is split."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist

from dcp_s3.errors import ShardingError
from dcp_s3.sharding.shards import is_local, is_sharded, shard


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


@dataclass(frozen=True)
class _Part:
    """One part of a tensor on one rank."""

    length: int
    copies: int


@dataclass(frozen=True)
class _Local:
    """A split tensor on one rank."""

    dim: int
    parts: tuple[_Part, ...]
    others: tuple[int, ...]
    """Its shape without ``dim``: the same on all ranks."""
    dtype: torch.dtype


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
        state: nested dicts and lists, with this rank's tensors.
        plan: for each tensor, by its name (keys joined by dots: ``model.layers.0.weight``) or a pattern of names
            (``*.weight``, as in `fnmatch`): the dimension along which it is split, a `Fused`, or None if each rank
            holds all of it. A name counts before patterns, of these the first that fits. Every tensor must be in it,
            so that no misspelt name makes shards look like replicas, of which one is saved; ``"*": None`` at the end
            takes all the rest. Exempt are numbers (0 dimensions), DTensors and shards, which know how they are split.
        group: the ranks that share the tensors, in the order of their shards. All of them call this, once: they tell
            each other their shapes. Shards may differ in length.
        rank: without ``group``: place of this rank's shards, of ``world_size``. All shards of a tensor have one length.
        world_size: number of ranks that share the tensors.

    Raises:
        ShardingError: a tensor is in no entry of ``plan``, or cannot be split as it says; the ranks' shapes do not fit
            each other; neither ``group`` nor ``rank`` and ``world_size`` are given. With ``group``, on all its ranks.
    """
    number, size = _place(group, rank, world_size)
    try:
        found: dict[str, _Local] | ShardingError = _find_split(state, plan)
    except ShardingError as error:
        if group is None:
            raise
        found = error  # raised below: the others wait for this rank
    everyone: list[Any] = [found] * size
    if group is not None:
        dist.all_gather_object(everyone, found, group=group)
    for failed in everyone:
        if isinstance(failed, ShardingError):
            raise failed
    _check_alike(everyone)

    def place(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return _shard(tensor, name, [each[name] for each in everyone], number) if name in everyone[0] else tensor

    sharded: dict[str, Any] = _map_tensors(state, place)
    return sharded


def _place(group: dist.ProcessGroup | None, rank: int | None, world_size: int | None) -> tuple[int, int]:
    if group is not None and rank is None and world_size is None:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    elif group is not None or rank is None or world_size is None:
        raise ShardingError("pass either group, or both rank and world_size")
    if not 0 <= rank < world_size:
        raise ShardingError(
            f"rank {rank} is none of {world_size} ranks. Remedy: call it on the ranks of the group only"
        )
    return rank, world_size


def _find_split(state: Mapping[str, Any], plan: Plan) -> dict[str, _Local]:
    """The tensors of this rank that are split, by name."""
    found: dict[str, _Local] = {}

    def note(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not is_sharded(tensor) and tensor.dim():
            split = _find_rule(name, plan)
            if split is not None:
                found[name] = _split(name, tensor, split if isinstance(split, Fused) else None, split)
        return tensor

    _map_tensors(state, note)
    return found


def _find_rule(name: str, plan: Plan) -> int | Fused | None:
    if name in plan:
        return plan[name]
    for pattern, split in plan.items():
        if fnmatchcase(name, pattern):
            return split
    raise ShardingError(
        f"the plan does not say how {name!r} is split. Remedy: give its dimension, or None if each rank has all of it",
        fqn=name,
    )


def _split(name: str, tensor: torch.Tensor, fused: Fused | None, split: Any) -> _Local:
    dim = split if fused is None else fused.dim
    shape = tuple(tensor.shape)
    if not is_local(tensor):
        raise ShardingError(
            f"{name!r} is {tensor.layout}, expected a dense tensor. Remedy: {{{name!r}: None}}", fqn=name
        )
    if isinstance(dim, bool) or not isinstance(dim, int) or not -len(shape) <= dim < len(shape):
        raise ShardingError(f"the plan splits {name!r} along {dim!r}, which is no dimension of {shape}", fqn=name)
    dim %= len(shape)
    lengths = (shape[dim],) if fused is None else tuple(fused.lengths)
    copies = (1,) * len(lengths) if fused is None or fused.copies is None else tuple(fused.copies)
    if sum(lengths) != shape[dim] or min(lengths, default=-1) < 0 or len(copies) != len(lengths) or min(copies) < 1:
        raise ShardingError(
            f"{name!r} has length {shape[dim]} along {dim}, but the plan has parts of {lengths} with {copies} copies. "
            "Remedy: lengths are those of this rank, and add up to that of its tensor",
            fqn=name,
        )
    parts = tuple(map(_Part, lengths, copies))
    return _Local(dim, parts, (*shape[:dim], *shape[dim + 1 :]), tensor.dtype)


def _check_alike(everyone: Sequence[dict[str, _Local]]) -> None:
    """Check that the tensors of all ranks can be shards of the same tensors."""
    for rank, each in enumerate(everyone):
        for name in everyone[0].keys() ^ each.keys():
            raise ShardingError(
                f"{name!r} is split on rank {0 if name in everyone[0] else rank}, but not on rank "
                f"{rank if name in everyone[0] else 0}. Remedy: split the same tensors on all ranks of the group",
                fqn=name,
            )
        for name, local in each.items():
            first = everyone[0][name]
            if _kind(local) != _kind(first):
                raise ShardingError(
                    f"{name!r} differs on ranks 0 and {rank} in more than its length along {first.dim}: {first}, "
                    f"{local}. Remedy: check the plan and the shapes on both",
                    fqn=name,
                )
            for number, part in enumerate(local.parts):
                owner = rank - rank % part.copies
                if len(everyone) % part.copies or everyone[owner][name].parts[number].length != part.length:
                    raise ShardingError(
                        f"part {number} of {name!r} cannot have {part.copies} copies on {len(everyone)} ranks: "
                        f"{everyone[owner][name].parts[number].length} on rank {owner}, {part.length} on rank {rank}",
                        fqn=name,
                    )


def _kind(local: _Local) -> object:
    return local.dim, tuple(part.copies for part in local.parts), local.others, local.dtype


def _shard(tensor: torch.Tensor, name: str, everyone: Sequence[_Local], rank: int) -> torch.Tensor:
    """The shards of one tensor. Pure but for the tensor."""
    own, starts, base = everyone[rank], [], 0
    for number, part in enumerate(own.parts):
        lengths = [each.parts[number].length for each in everyone[:: part.copies]]
        starts.append(base + sum(lengths[: rank // part.copies]))
        base += sum(lengths)
    dims = range(tensor.dim())
    whole = [base if d == own.dim else tensor.shape[d] for d in dims]
    offsets = [[start if d == own.dim else 0 for d in dims] for start in starts]
    boxes = torch.split(tensor.detach(), [part.length for part in own.parts], own.dim)
    return shard(boxes, global_shape=whole, offsets=offsets)


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
