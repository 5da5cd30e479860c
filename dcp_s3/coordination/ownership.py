"""Which rank writes which item of a save without collectives: each computes it from its own plan and state. Pure.

An item has holders: the ranks that have the same chunk. They spread those that they hold together over each other. What
a rank cannot know is no input, so all holders get the same answer. Where they do not, because their states differ in a
way that no layout shows, the merge finds items twice, and keeps one; or the roll call finds them missing, and has them
written.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dcp_s3.errors import SaveProtocolError
from dcp_s3.failures import name_ranks

Replicas: TypeAlias = Sequence[int] | Callable[[str], Sequence[int]] | None
"""Ranks that hold the plain tensors and objects that this rank holds: by default (None), these, or by FQN.

A function is asked for shards that are no DTensors, too. An empty answer is this rank alone.
"""
Lookup: TypeAlias = Callable[[MetadataIndex], Any]
"""What the flat state holds under an index's name (not the chunk); LookupError if nothing is known of it."""

# A smaller item goes to the rank that its name alone chooses. So an item that one rank has and the others do not, a
# state of a random generator say, changes the owner of no other one; and it is less than a request's worth of time.
_SMALL_BYTES = 64 * 2**10


class OwnedItem(NamedTuple):
    """An item that this rank holds."""

    item: WriteItem
    holders: tuple[int, ...]
    """The ranks that are supposed to hold it, ascending, this one among them; none if there is nothing to write."""
    owner: int
    """The one that is to write it; -1: none."""


def find_owners(
    items: Sequence[WriteItem], lookup: Lookup, *, world_size: int, rank: int, replicas: Replicas = None
) -> list[OwnedItem]:
    """Who writes each item of a rank's whole plan, in the order of the plan.

    Raises:
        SaveProtocolError: ``replicas`` leaves this rank out, or names others than ranks of the save.
    """
    values: list[Any] = []
    for item in items:
        try:
            values.append(lookup(item.index))
        except (LookupError, ValueError):  # a planner of its own may name items otherwise
            values.append(None)
    meshes = {id(value.device_mesh): value.device_mesh for value in values if isinstance(value, DTensor)}
    holders = Holders(world_size, rank, replicas, meshes.values())
    held = [(item, holders.find(item, value)) for item, value in zip(items, values, strict=True)]
    return [OwnedItem(item, found, owner) for (item, found), owner in zip(held, assign(held), strict=True)]


def lookup_in(planner: Any) -> Lookup:
    """What a planner holds under an index's name, flattened as its plan is."""
    state = getattr(planner, "state_dict", None)
    return lambda index: state[index.fqn] if isinstance(state, dict) else None


def assign(held: Sequence[tuple[WriteItem, tuple[int, ...]]]) -> list[int]:
    """The owner of each item, of all that a rank holds: one of its holders (`Holders.find`).

    Items with the same holders go, the largest first, to the one with the fewest bytes of these so far. Items that look
    equally good are told apart by hashes, so that small ones spread, and so that no rank comes first in every group.
    The result does not depend on the order, nor on items that are held by others.
    """
    owners = [-1] * len(held)
    # Layouts are certain, the rule for plain values is not: it changes no other owner.
    groups: dict[tuple[bool, int], list[int]] = {}  # holders by identity: thousands of ranks take long to compare
    for number, (item, holders) in enumerate(held):
        if len(holders) == 1:
            owners[number] = holders[0]
        elif holders:
            groups.setdefault((item.type != WriteItemType.SHARD, id(holders)), []).append(number)
    for numbers in groups.values():
        holders = held[numbers[0]][1]
        large: list[tuple[int, int, int]] = []
        for number in numbers:
            item, nbytes = held[number][0], 1  # of objects, as DCP counts them
            if (data := item.tensor_data) is not None:
                nbytes = math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
            chosen = _hash(item.index.fqn, *(item.index.offset or ()))
            if nbytes < _SMALL_BYTES:
                owners[number] = holders[chosen % len(holders)]
            else:
                large.append((-nbytes, chosen, number))
        first = _hash(*holders) if large else 0
        heap = [(0, (place - first) % len(holders), rank) for place, rank in enumerate(holders)] if large else []
        heapq.heapify(heap)
        for size, _, number in sorted(large):
            load, turn, owner = heap[0]
            heapq.heapreplace(heap, (load - size, turn, owner))
            owners[number] = owner
    return owners


def _hash(*parts: object) -> int:
    """64 bits that are the same in every process."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


class Holders:
    """Finds the holders of items: the ranks that hold the same, ascending, this one among them. Equal ones are one
    object.

    A chunk of a DTensor: the ranks of its mesh that have the same; nobody, if a rank has nothing of a tensor that
    is not empty. If the mesh is a slice of one in ``meshes``: those of the other slices, too. Other shards
    (ShardedTensor, `shard`): as ``replicas`` says if it is a function, otherwise this rank alone, for nothing says
    who else has them. Plain tensors and objects: as ``replicas`` says.
    """

    def __init__(self, world_size: int, rank: int, replicas: Replicas, meshes: Iterable[DeviceMesh]) -> None:
        self._world, self._alone = tuple(range(world_size)), (rank,)
        self._rank, self._replicas = rank, replicas
        self._found = {each: each for each in (self._world, self._alone)}
        unique = {tuple(grid.flatten().tolist()): grid for grid in (mesh.mesh for mesh in meshes)}
        self._grids = [grid for _, grid in sorted(unique.items(), key=lambda each: (-len(each[0]), each[0]))]
        self._of_layout: dict[Any, tuple[DeviceMesh, tuple[int, ...]]] = {}  # with the mesh, whose id it is known by
        self._of_answer: dict[Any, tuple[int, ...]] = {}

    def find(self, item: WriteItem, value: Any) -> tuple[int, ...]:
        """``value`` is what the flat state holds under the item's name; None if that is not known."""
        fqn, replicas = item.index.fqn, self._replicas
        if item.type != WriteItemType.SHARD:
            return self._world if replicas is None else self._answer(fqn, replicas)
        with torch.no_grad():
            # A local tensor may say itself what its chunks are: DCP asks it, rather than the mesh.
            is_placed = isinstance(value, DTensor) and not hasattr(value.to_local(), "__create_write_items__")
        if not is_placed or item.tensor_data is None:
            return self._answer(fqn, replicas) if callable(replicas) else self._alone
        if 0 in item.tensor_data.chunk.sizes and 0 not in value.shape:
            return ()
        mesh = value.device_mesh
        layout = (id(mesh), value.placements)
        if layout not in self._of_layout:
            here = mesh.get_coordinate()
            ranks: Iterable[int] = ()
            if here is not None:
                free = [each.is_replicate() or each.is_partial() for each in value.placements]
                ranks = self._widen(mesh.mesh[_at(here, free)].flatten().tolist(), mesh.mesh)
            self._of_layout[layout] = mesh, self._same(ranks)
        return self._of_layout[layout][1]

    def _same(self, ranks: Iterable[int]) -> tuple[int, ...]:
        found = tuple(sorted(set(ranks))) or self._alone
        return self._found.setdefault(found, found)

    def _answer(self, fqn: str, replicas: Sequence[int] | Callable[[str], Sequence[int]]) -> tuple[int, ...]:
        try:
            answer = tuple(map(operator.index, replicas(fqn) if callable(replicas) else replicas))
        except TypeError as error:
            raise SaveProtocolError(
                f"replicas does not say which ranks hold {fqn!r} ({error}). Remedy: pass ranks, a function of the name "
                "that returns ranks, or None for all ranks"
            ) from error
        if answer in self._of_answer:
            return self._of_answer[answer]
        found = self._same(answer)
        if self._rank not in found:
            raise SaveProtocolError(
                f"rank {self._rank} holds {fqn!r}, but replicas says that it is held by {name_ranks(found)}. Remedy: "
                "let replicas return all ranks that hold the same, this one among them, or nothing if no other does"
            )
        if not 0 <= found[0] <= found[-1] < len(self._world):
            raise SaveProtocolError(
                f"replicas says that {fqn!r} is held by {name_ranks(found)}, and the job has {len(self._world)} ranks. "
                "Remedy: let replicas return ranks of the job"
            )
        self._of_answer[answer] = found
        return found

    def _widen(self, ranks: Sequence[int], grid: torch.Tensor) -> Iterable[int]:
        """With the ranks that hold the same on the other slices of a mesh of which ``grid`` is one.

        FSDP of a model that is parallelized in part: what has no tensor parallelism is on the mesh of FSDP alone, and
        the rest of the model on the whole mesh. All ranks of that run the same model.
        """
        part = set(grid.flatten().tolist())
        for wider in self._grids:
            if wider.numel() <= len(part):
                break
            at = (wider == self._rank).nonzero()
            if not len(at):
                continue
            here, dims = at[0].tolist(), range(wider.ndim)
            # The dimensions along which `part` is the slice of the wider mesh at this rank, if it is one.
            inside = [set(wider[_at(here, [each == dim for each in dims])].tolist()) <= part for dim in dims]
            if set(wider[_at(here, inside)].flatten().tolist()) == part:
                places = [(wider == rank).nonzero()[0].tolist() for rank in ranks]
                across = [not each for each in inside]
                return {each for place in places for each in wider[_at(place, across)].flatten().tolist()}
        return ranks


def _at(place: Sequence[int], free: Sequence[bool]) -> tuple[int | slice, ...]:
    """Index of a grid: all places that differ from one in free dimensions only."""
    return tuple(slice(None) if any_ else at for at, any_ in zip(place, free, strict=True))
