"""Which rank writes which item of a save without collectives: each computes it from its own plan and state. Pure.

An item has holders: the ranks that have the same chunk. They spread those that they hold together over each other. What
a rank cannot know is no input, so all holders get the same answer. Where they do not, because their states differ in a
way that no layout shows, the merge finds items twice, and keeps one; or the roll call finds them missing, and has them
written.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dcp_s3.errors import SaveProtocolError
from dcp_s3.torch_private import compute_offset

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
    """An item that this rank holds. Ranks are global ones."""

    item: WriteItem
    holders: tuple[int, ...]
    """The ranks that are supposed to hold it, ascending, this one among them."""
    owner: int
    """The one that is to write it."""


def find_owners(
    items: Sequence[WriteItem], lookup: Lookup, *, world: Sequence[int], rank: int, replicas: Replicas = None
) -> list[OwnedItem]:
    """Who writes each item of a rank's whole plan, in the order of the plan.

    Raises:
        SaveProtocolError: ``replicas`` leaves this rank out, or names others than ranks of the save.
    """
    values = [_find(lookup, item) for item in items]
    meshes = {id(value.device_mesh): value.device_mesh for value in values if isinstance(value, DTensor)}
    holders = Holders(world, rank, replicas, meshes.values())
    held = [(item, holders.find(item, value)) for item, value in zip(items, values, strict=True)]
    return [OwnedItem(item, found, owner) for (item, found), owner in zip(held, assign(held), strict=True)]


def lookup_in(planner: Any) -> Lookup:
    """What a planner holds under an index's name, flattened as its plan is."""
    state = getattr(planner, "state_dict", None)

    def lookup(index: MetadataIndex) -> Any:
        if not isinstance(state, dict):
            raise KeyError(index.fqn)
        return state[index.fqn]

    return lookup


def assign(held: Sequence[tuple[WriteItem, tuple[int, ...]]]) -> list[int]:
    """The owner of each item, of all that a rank holds: one of its holders (`Holders.find`).

    Items with the same holders go, the largest first, to the one with the fewest bytes so far. What counts are bytes
    that all holders know of: of items that they hold together, also with more ranks. Items that look equally good are
    told apart by hashes, so that small ones spread, and so that no rank comes first in every group.

    The result does not depend on the order, nor on items that are held by others.
    """
    owners = [0] * len(held)
    known: list[tuple[frozenset[int], dict[int, int]]] = []
    # Layouts are certain, the rule for plain values is not: these come last, and change no other owner.
    for (plain, holders), numbers in sorted(_group(held).items(), key=lambda each: (each[0][0], -len(each[0][1]))):
        members = frozenset(holders)
        loads = dict.fromkeys(holders, 0)
        if len(holders) > 1:
            for more, theirs in known:
                if members <= more:
                    for rank in holders:
                        loads[rank] += theirs[rank]
        before = dict(loads)
        for number, owner in _spread([held[number][0] for number in numbers], holders, loads):
            owners[numbers[number]] = owner
        if not plain:
            known.append((members, {rank: loads[rank] - before[rank] for rank in holders}))
    return owners


def _group(held: Sequence[tuple[WriteItem, tuple[int, ...]]]) -> dict[tuple[bool, tuple[int, ...]], list[int]]:
    """Numbers of items by whether they are plain, and by holders."""
    same: dict[tuple[bool, int], list[int]] = {}  # by identity first: thousands of ranks take long to compare
    for number, (item, holders) in enumerate(held):
        same.setdefault((item.type != WriteItemType.SHARD, id(holders)), []).append(number)
    groups: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    for (plain, _), numbers in same.items():
        groups.setdefault((plain, held[numbers[0]][1]), []).extend(numbers)
    return groups


def _spread(items: list[WriteItem], holders: tuple[int, ...], loads: dict[int, int]) -> Iterable[tuple[int, int]]:
    """Number and owner of each item. Adds to ``loads``."""
    if len(holders) == 1:
        yield from ((number, holders[0]) for number in range(len(items)))
        return
    large: list[tuple[int, int, int]] = []
    for number, item in enumerate(items):
        size, chosen = _nbytes(item), _hash(item.index.fqn, *(item.index.offset or ()))
        if size < _SMALL_BYTES:
            yield number, holders[chosen % len(holders)]
        else:
            large.append((-size, chosen, number))
    if not large:
        return
    first = _hash(*holders)
    heap = [(loads[rank], (place - first) % len(holders), rank) for place, rank in enumerate(holders)]
    heapq.heapify(heap)
    for size, _, number in sorted(large):
        load, turn, owner = heap[0]
        loads[owner] = load - size
        heapq.heapreplace(heap, (load - size, turn, owner))
        yield number, owner


def _nbytes(item: WriteItem) -> int:
    """Bytes of the chunk; 1 for objects, as DCP counts them."""
    if item.tensor_data is None:
        return 1
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def _hash(*parts: object) -> int:
    """64 bits that are the same in every process."""
    text = "\0".join(map(str, parts)).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def _find(lookup: Lookup, item: WriteItem) -> Any:
    try:
        return lookup(item.index)
    except (LookupError, ValueError):  # a planner of its own may name items otherwise
        return None


class Holders:
    """Finds the holders of items: the global ranks that hold the same, ascending, this one among them. Equal ones are
    one object.

    A chunk of a DTensor: the ranks of its mesh that have the same, also where that is nothing. If the mesh is a slice
    of one in ``meshes``: those of the other slices, too. Other shards (ShardedTensor, `shard`): as ``replicas`` says if
    it is a function, otherwise this rank alone, for nothing says who else has them. Plain tensors and objects: as
    ``replicas`` says.
    """

    def __init__(self, world: Sequence[int], rank: int, replicas: Replicas, meshes: Iterable[DeviceMesh]) -> None:
        self._world = tuple(sorted(set(world)))
        self._members = frozenset(self._world)
        if rank not in self._members:
            raise SaveProtocolError(f"rank {rank} is not one of the {len(self._world)} ranks of the save")
        self._rank = rank
        self._alone = (rank,)
        self._replicas = replicas
        unique = {tuple(grid.flatten().tolist()): grid for grid in (mesh.mesh for mesh in meshes)}
        self._grids = [grid for _, grid in sorted(unique.items(), key=lambda each: (-len(each[0]), each[0]))]
        self._of_layout: dict[Any, tuple[DeviceMesh, tuple[int, ...]]] = {}  # with the mesh, whose id it is known by
        self._of_answer: dict[Any, tuple[int, ...]] = {}

    def find(self, item: WriteItem, value: Any) -> tuple[int, ...]:
        """``value`` is what the flat state holds under the item's name; None if that is not known."""
        if item.type != WriteItemType.SHARD:
            return self._world if self._replicas is None else self._answer(item.index.fqn, self._replicas)
        if not isinstance(value, DTensor) or item.tensor_data is None or _has_own_chunks(value):
            return self._answer(item.index.fqn, self._replicas) if callable(self._replicas) else self._alone
        mesh, shape = value.device_mesh, tuple(value.shape)
        empty = tuple((dim, shape[dim]) for dim, size in enumerate(item.tensor_data.chunk.sizes) if not size)
        layout = (id(mesh), value.placements, empty)
        if layout not in self._of_layout:
            ranks = self._widen(_ranks_with(mesh, value.placements, empty), mesh.mesh)
            self._of_layout[layout] = mesh, tuple(sorted(ranks & self._members)) or self._alone
        return self._of_layout[layout][1]

    def _answer(self, fqn: str, replicas: Sequence[int] | Callable[[str], Sequence[int]]) -> tuple[int, ...]:
        try:
            answer = tuple(map(operator.index, replicas(fqn) if callable(replicas) else replicas))
        except TypeError as error:
            raise SaveProtocolError(
                f"replicas does not say which ranks hold {fqn!r} ({error}). Remedy: pass ranks, a function of the name "
                "that returns ranks, or None for all ranks"
            ) from error
        found = self._of_answer.get(answer)
        if found is None:
            found = self._of_answer[answer] = self._checked(fqn, answer)
        return found

    def _checked(self, fqn: str, answer: tuple[int, ...]) -> tuple[int, ...]:
        found = tuple(sorted(set(answer)))
        if not found:
            return self._alone
        if self._rank not in found:
            raise SaveProtocolError(
                f"rank {self._rank} holds {fqn!r}, but replicas says that it is held by {_show(found)}. Remedy: let "
                "replicas return all ranks that hold the same, this one among them, or nothing if no other does"
            )
        if not self._members.issuperset(found):
            others = tuple(rank for rank in found if rank not in self._members)
            raise SaveProtocolError(
                f"replicas says that {fqn!r} is held by {_show(others)}, not of the save, which has "
                f"{_show(self._world)}. Remedy: let replicas return global ranks of the save's process group"
            )
        return self._world if found == self._world else found

    def _widen(self, ranks: frozenset[int], grid: torch.Tensor) -> frozenset[int]:
        """With the ranks that hold the same on the other slices of a mesh of which ``grid`` is one.

        FSDP of a model that is parallelized in part: what has no tensor parallelism is on the mesh of FSDP alone, and
        the rest of the model on the whole mesh. All ranks of that run the same model.
        """
        part = set(grid.flatten().tolist())
        for wider in self._grids:
            if wider.numel() <= len(part):
                break
            dims = _dims_of_slice(wider, part, self._rank)
            if dims is None:
                continue
            found: set[int] = set()
            for rank in ranks:
                place = (wider == rank).nonzero()[0].tolist()
                found |= set(
                    wider[tuple(at if dim in dims else slice(None) for dim, at in enumerate(place))].flatten().tolist()
                )
            return frozenset(found)
        return ranks


def _has_own_chunks(value: DTensor) -> bool:
    """Whether the local tensor says itself what its chunks are: DCP asks it, rather than the mesh."""
    with torch.no_grad():
        return hasattr(value.to_local(), "__create_write_items__")


def _ranks_with(mesh: DeviceMesh, placements: Sequence[Placement], empty: Sequence[tuple[int, int]]) -> frozenset[int]:
    """The ranks of a mesh that have the chunk that this rank has.

    ``empty`` are the dimensions, with their sizes in the whole tensor, of which it has nothing.
    """
    here = mesh.get_coordinate()
    if here is None:
        return frozenset()
    grid, sizes = mesh.mesh, dict(empty)
    chosen = torch.ones(grid.shape, dtype=torch.bool)
    for place, placement in enumerate(placements):
        dim = getattr(placement, "dim", None)
        if placement.is_replicate() or placement.is_partial() or dim in sizes:
            continue
        line = torch.arange(grid.shape[place]) == here[place]
        chosen &= line.view([-1 if each == place else 1 for each in range(grid.ndim)])
    for dim, size in sizes.items():
        cut = tuple(each if getattr(each, "dim", None) == dim else Replicate() for each in placements)
        chosen &= _without_any(dim, size, tuple(grid.shape), cut, tuple(here))
    return frozenset(grid[chosen].tolist())


@functools.lru_cache(maxsize=256)
def _without_any(
    dim: int, size: int, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], here: tuple[int, ...]
) -> torch.Tensor:
    """The places of a mesh whose chunk is empty at the same offset as here, from one dimension of a tensor."""
    shape = (1,) * dim + (size,)
    offset = compute_offset(shape, mesh_shape, here, placements)
    cut = [place for place, each in enumerate(placements) if not each.is_replicate()]
    found = torch.zeros([n if place in cut else 1 for place, n in enumerate(mesh_shape)], dtype=torch.bool)

    def is_same(place: Sequence[int]) -> bool:
        return compute_offset(shape, mesh_shape, place, placements) == offset

    if len(cut) == 1 and type(placements[cut[0]]) is Shard:  # the last places are empty, perhaps thousands
        places = [[*here[: cut[0]], at, *here[cut[0] + 1 :]] for at in range(mesh_shape[cut[0]])]
        found.view(-1)[bisect.bisect_left(places, True, key=is_same) :] = True
        return found
    for place in itertools.product(*map(range, found.shape)):
        found[place] = is_same(place)
    return found


def _dims_of_slice(grid: torch.Tensor, part: set[int], rank: int) -> set[int] | None:
    """The dimensions along which ``part`` is the slice of ``grid`` at ``rank``; None if it is none."""
    at = (grid == rank).nonzero()
    if not len(at):
        return None
    place = at[0].tolist()
    lines = [
        set(grid[tuple(slice(None) if d == dim else p for d, p in enumerate(place))].tolist())
        for dim in range(grid.ndim)
    ]
    dims = {dim for dim, line in enumerate(lines) if line <= part}
    whole = grid[tuple(slice(None) if dim in dims else at for dim, at in enumerate(place))]
    return dims if set(whole.flatten().tolist()) == part else None


def _show(ranks: Sequence[int], most: int = 8) -> str:
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:most]))}{more}"
