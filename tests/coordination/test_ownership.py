"""Who writes what, against what DCP's global plan says of the same ranks.

Ranks are simulated, one after the other, with a process group that communicates with nobody; tensors have no memory.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, debug
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from dcp_s3 import errors, shard
from dcp_s3.coordination import ownership
from dcp_s3.coordination.ownership import Holders, assign, find_owners, lookup_in
from tests.relying import BEFORE_2_10

State = dict[str, Any]
Key = tuple[str, tuple[int, ...] | None]
KIB = 2**10


# --- simulated ranks -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_rank(rank: int, world_size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor's caches of layouts, which have the mesh as this rank sees it.
        if BEFORE_2_10:
            DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()  # type: ignore[attr-defined]
        else:
            debug._clear_sharding_prop_cache()


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _place(mesh: DeviceMesh, placements: Sequence[Any], *shape: int) -> DTensor:
    """This rank's part of a tensor of ``shape``."""
    local, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    whole = _meta(*shape)
    return DTensor.from_local(
        _meta(*local), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


class _Block(nn.Module):
    """A layer whose weights are megabytes, and no mesh divides all of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width, bias=False)


class _Model(nn.Module):
    def __init__(self, width: int = 241) -> None:
        super().__init__()
        self.embed = nn.Embedding(1001, width)
        self.layers = nn.ModuleList(_Block(width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.three, self.few = nn.Parameter(torch.zeros(3, width)), nn.Parameter(torch.zeros(3))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("table", torch.zeros(5, 4 * KIB))


def _mesh(world_size: int, *names: str) -> DeviceMesh:
    """The last dimension has what the others leave, which are 2."""
    twos = (2,) * (len(names) - 1)
    return init_device_mesh("cpu", (*twos, world_size // 2 ** len(twos)), mesh_dim_names=names)


def _model(mesh: DeviceMesh | None, tensor: DeviceMesh | None = None, whole: bool = True) -> _Model:
    """Over FSDP's mesh, and over that of tensor parallelism. ``whole``: no layer is left out of the latter."""
    with torch.device("meta"):
        model = _Model()
    if tensor is not None:
        plan: dict[str, Any] = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
        norms = {"layers.*.norm": SequenceParallel(), "norm": SequenceParallel()}
        parallelize_module(model, tensor, {**plan, **norms} if whole else plan)
    if mesh is not None:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def _training(model: nn.Module) -> State:
    weights = model.state_dict()
    moments = {
        f"{name}.{moment}": torch.empty_like(each)
        for name, each in weights.items()
        if each.is_floating_point()
        for moment in ("exp_avg", "exp_avg_sq")
    }
    steps = {f"{name}.step": torch.tensor(7.0) for name in weights}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(weights)}]
    return {"model": weights, "optimizer": {**moments, **steps, "param_groups": groups}, "step": 7}


def _parallel(*names: str, whole: bool = True) -> Callable[[int, int], State]:
    """A training over a mesh of these dimensions: FSDP's, HSDP's, and that of tensor parallelism."""

    def make(rank: int, world_size: int) -> State:
        if not names:
            return _training(_model(None))
        mesh, twos = _mesh(world_size, *names), names[:-1]
        return _training(_model(mesh[twos], mesh["tp"], whole) if twos else _model(mesh))

    return make


def _pipeline(rank: int, world_size: int) -> State:
    """Two stages, each with FSDP of its own. Nothing is plain but what both have."""
    stage = _mesh(world_size, "pp", "fsdp")["fsdp"]
    number = rank // (world_size // 2)
    weights = {name: each for name, each in _model(stage).state_dict().items() if isinstance(each, DTensor)}
    return {f"stage{number}": weights, "step": 7, "table": _meta(64 * KIB)}


def _by_hand(rank: int, world_size: int) -> State:
    rows = [5 * KIB + (number < 3) for number in range(world_size)]
    weight = shard(_meta(rows[rank], 70), global_shape=(sum(rows), 70), offsets=(sum(rows[:rank]), 0))
    return {"weight": weight, "norms": {f"{n}": _meta(20 * KIB) for n in range(16)}, "step": 7}


def _edges(rank: int, world_size: int) -> State:
    """What is empty on some ranks, on all, in one dimension or in two."""
    line, both = _mesh(world_size, "a"), _mesh(world_size, "b", "c")
    return {
        "one_row": _place(line, [Shard(0)], 1, 4),
        "no_rows": _place(line, [Shard(0)], 0, 3),
        "no_rows_by_columns": _place(line, [Shard(1)], 0, 3),
        "number": _place(line, [Replicate()]),
        "nothing": _meta(0),
        "three_by_one": _place(both, [Shard(0), Shard(1)], 3, 1),
        "one_by_three": _place(both, [Shard(0), Shard(1)], 1, 3),
        "one_by_one": _place(both, [Shard(1), Shard(0)], 1, 1),
        "twice": _place(both, [Shard(0), Shard(0)], 5, 2),
        "thrice_replicated": _place(both, [Replicate(), Shard(1)], 2, 1),
    }


STATES: dict[str, tuple[Callable[[int, int], State], tuple[int, ...]]] = {
    "fsdp-uneven": (_parallel("fsdp"), (7,)),
    "fsdp-tp-uneven": (_parallel("fsdp", "tp"), (4, 6)),
    "fsdp-tp-of-some-layers": (_parallel("fsdp", "tp", whole=False), (4,)),
    "hsdp-tp": (_parallel("replicate", "shard", "tp"), (8,)),
    "ddp": (_parallel(), (1, 3)),
    "pipeline": (_pipeline, (4,)),
    "by-hand": (_by_hand, (2, 5)),
    "edges": (_edges, (2, 6)),
}
CASES = [pytest.param(make, size, id=f"{name}-{size}") for name, (make, sizes) in STATES.items() for size in sizes]


def _plan(state: State) -> tuple[DefaultSavePlanner, SavePlan]:
    planner = DefaultSavePlanner()
    planner.set_up_planner(state)
    return planner, planner.create_local_plan()


def _key(item: WriteItem) -> Key:
    return item.index.fqn, None if item.index.offset is None else tuple(item.index.offset)


def _nbytes(item: WriteItem) -> int:
    """What is written, objects apart."""
    data = item.tensor_data
    return 0 if data is None else math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _is_nothing(item: WriteItem) -> bool:
    """A chunk of nothing, of a tensor that is not empty: nobody needs it."""
    data = item.tensor_data
    return data is not None and 0 in data.chunk.sizes and 0 not in data.size


@pytest.mark.parametrize(("make", "world_size"), CASES)
def test_the_ranks_write_what_dcp_would_have_them_write(make: Callable[[int, int], State], world_size: int) -> None:
    plans, ours = [], []
    for rank in range(world_size):
        with _as_rank(rank, world_size):
            state = make(rank, world_size)
            planner, plan = _plan(state)
            plans.append(plan)
            found = find_owners(plan.items, lookup_in(planner), world_size=world_size, rank=rank)
            ours.append([each.item for each in found if each.owner == rank])
    dcps = DefaultSavePlanner().create_global_plan(plans)[0]
    theirs = [[item for item in plan.items if not _is_nothing(item)] for plan in dcps]
    written = Counter(_key(item) for items in ours for item in items if _nbytes(item) or item.tensor_data is None)
    assert [key for key, count in written.items() if count > 1] == [], "written twice"
    expected = {_key(item): _nbytes(item) for items in theirs for item in items}
    assert {_key(item): _nbytes(item) for items in ours for item in items} == expected

    most, most_of_dcp = (max(sum(map(_nbytes, items)) for items in each) for each in (ours, theirs))
    assert most <= 1.1 * most_of_dcp


# --- holders ---------------------------------------------------------------------------------------------


def test_a_slice_of_a_mesh_of_the_state_is_held_on_the_other_slices() -> None:
    found: dict[str, list[tuple[int, ...]]] = {"rows": [], "copy": []}
    for rank in range(8):
        with _as_rank(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "fsdp", "tp"))
            state = {
                "weight": _place(mesh["fsdp", "tp"], [Shard(0), Shard(1)], 8, 2),
                "rows": _place(mesh["fsdp"], [Shard(0)], 8, 2),
                "copy": _place(mesh["tp"], [Replicate()], 8, 2),
            }
            holders = Holders(8, rank, None, [value.device_mesh for value in state.values()])
            for item in _plan(state)[1].items[1:]:
                found[item.index.fqn].append(holders.find(item, state[item.index.fqn]))
    assert found["rows"] == [(0, 1), (0, 1), (2, 3), (2, 3), (4, 5), (4, 5), (6, 7), (6, 7)]
    assert found["copy"] == [(0, 1, 2, 3)] * 4 + [(4, 5, 6, 7)] * 4, "the stages of the pipeline have their own"


class _OwnChunks(torch.Tensor):
    """A local tensor that knows its chunks itself, as a quantized one may."""

    def __create_write_items__(self, fqn: str, whole: Any) -> list[WriteItem]:
        return [_tensor_item(fqn, 8, kind=WriteItemType.SHARD)]


def test_chunks_that_no_mesh_tells_are_held_by_one_rank() -> None:
    item = _tensor_item("w", 8, kind=WriteItemType.SHARD)
    with _as_rank(1, 4):
        mesh = init_device_mesh("cpu", (4,))
        local = torch.zeros(8).as_subclass(_OwnChunks)
        wrapped = DTensor.from_local(local, mesh, [Replicate()], run_check=False)
        by_hand = shard(torch.zeros(8), global_shape=(32,), offsets=(8,))
        for value in (wrapped, by_hand, torch.zeros(8), None):
            for unasked in (None, [0, 1], lambda _: []):
                assert Holders(4, 1, unasked, ()).find(item, value) == (1,), type(value)
            assert Holders(4, 1, {"w": [3, 1]}.__getitem__, ()).find(item, value) == (1, 3)
        known = _place(mesh, [Shard(0)], 8)
        assert Holders(4, 1, lambda _: [1, 3], ()).find(item, known) == (1,), "a DTensor knows"


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        (None, (0, 1, 2, 3)),
        ([3, 1, 1], (1, 3)),
        (range(4), (0, 1, 2, 3)),
        ([], (1,)),
        ([1], (1,)),
        (lambda fqn: [1, 2] if fqn == "plain" else [], (1, 2)),
        (torch.tensor([1, 2]), (1, 2)),
    ],
)
def test_replicas_says_who_holds_plain_values(replicas: Any, expected: tuple[int, ...]) -> None:
    for item in (_tensor_item("plain", 8), WriteItem(MetadataIndex("plain"), WriteItemType.BYTE_IO)):
        assert Holders(4, 1, replicas, ()).find(item, None) == expected


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        ([0, 2], "rank 1 holds 'plain', but replicas says that it is held by ranks 0, 2. Remedy: "),
        (lambda _: [0], "is held by rank 0. "),
        ([1, 9], "'plain' is held by ranks 1, 9, and the job has 4 ranks. Remedy: "),
        (lambda _: None, "does not say which ranks hold 'plain' .*Remedy: "),
        (["x"], "does not say which ranks hold 'plain' .*Remedy: "),
    ],
)
def test_replicas_that_cannot_be_right_are_an_error(replicas: Any, message: str) -> None:
    with pytest.raises(errors.SaveProtocolError, match=message):
        find_owners([_tensor_item("plain", 8)], {}.__getitem__, world_size=4, rank=1, replicas=replicas)


# --- owners ----------------------------------------------------------------------------------------------


def _tensor_item(fqn: str, nbytes: int, offset: int = 0, kind: WriteItemType = WriteItemType.TENSOR) -> WriteItem:
    place, size = torch.Size([offset]), torch.Size([nbytes])
    data = TensorWriteData(ChunkStorageMetadata(place, size), TensorProperties(torch.uint8), size)
    return WriteItem(MetadataIndex(fqn, place), kind, tensor_data=data)


Held = tuple[WriteItem, tuple[int, ...]]

_SIZES = st.one_of(st.sampled_from([0, 1, 4, 64 * KIB, 2**20]), st.integers(0, 2**22))


@st.composite
def _saves(draw: st.DrawFn) -> list[Held]:
    world = draw(st.integers(1, 8))
    groups = st.sets(st.integers(0, world - 1), min_size=1).map(lambda ranks: tuple(sorted(ranks)))
    few = draw(st.lists(groups, min_size=1, max_size=4, unique=True))
    found = []
    for number in range(draw(st.integers(0, 40))):
        kind = draw(st.sampled_from([WriteItemType.SHARD, WriteItemType.SHARD, WriteItemType.TENSOR, None]))
        if kind is None:
            item = WriteItem(MetadataIndex(f"object{number}"), WriteItemType.BYTE_IO)
        else:
            item = _tensor_item(f"tensor{number // 2}", draw(_SIZES), number, kind)
        found.append((item, draw(st.sampled_from(few))))
    return found


@given(_saves(), st.randoms(use_true_random=False))
def test_each_item_has_one_owner_that_all_its_holders_agree_upon(save: list[Held], order: random.Random) -> None:
    agreed = {_key(item): owner for (item, _), owner in zip(save, assign(save), strict=True)}
    for rank in range(8):
        theirs = {holders: (*holders,) for _, holders in save}  # no rank has another's objects
        mine = [(item, theirs[holders]) for item, holders in save if rank in holders]
        order.shuffle(mine)
        assert {_key(item): owner for (item, _), owner in zip(mine, assign(mine), strict=True)} == {
            _key(item): agreed[_key(item)] for item, _ in mine
        }
    assert all(agreed[_key(item)] in holders for item, holders in save)


@given(st.lists(_SIZES, min_size=1, max_size=40), st.integers(1, 8), st.sampled_from(list(WriteItemType)[:2]))
def test_ranks_differ_by_one_large_item_at_most(sizes: list[int], ranks: int, kind: WriteItemType) -> None:
    everyone = tuple(range(ranks))
    held = [(_tensor_item(f"t{n}", size, kind=kind), everyone) for n, size in enumerate(sizes)]
    loads = Counter(dict.fromkeys(range(ranks), 0))
    for (item, _), owner in zip(held, assign(held), strict=True):
        loads[owner] += _nbytes(item) if _nbytes(item) >= ownership._SMALL_BYTES else 0
    assert max(loads.values()) - min(loads.values()) <= max(sizes)


def test_an_item_that_one_rank_alone_has_moves_no_other_but_smaller_plain_ones() -> None:
    """The random generators' states, one for each rank, under the rule that all ranks hold what is plain."""
    everyone = tuple(range(4))
    common: list[Held] = [(_tensor_item(f"large{n}", 2**20 + n), everyone) for n in range(10)]
    common += [(_tensor_item(f"copy{n}", 2**18 + n, kind=WriteItemType.SHARD), (0, 1)) for n in range(5)]
    common += [(_tensor_item(f"step{n}", 4), everyone) for n in range(100)]
    common += [(WriteItem(MetadataIndex(f"group{n}"), WriteItemType.BYTE_IO), everyone) for n in range(10)]
    for own in (5056, 300 * KIB):
        with_own = [(_tensor_item("rank0.rng", own), everyone), *common]
        assert assign(with_own)[1:] == assign(common), own


def test_no_rank_comes_first_in_every_group_or_with_every_small_item() -> None:
    one_each: list[Held] = [
        (_tensor_item("norm", 2**20, group, WriteItemType.SHARD), (group, group + 64)) for group in range(64)
    ]
    first = sum(owner < 64 for owner in assign(one_each))
    assert 16 < first < 48
    everyone = tuple(range(8))
    small: list[Held] = [(_tensor_item(f"layers.{n}.step", 4), everyone) for n in range(1000)]
    counts = Counter(assign(small))
    assert len(counts) == 8
    assert max(counts.values()) < 200


def test_owners_do_not_depend_on_the_process() -> None:
    """Python's hashes do: these are written down."""
    everyone = tuple(range(8))
    held = [(_tensor_item(f"w{n}", 2**20 if n < 4 else 4), everyone) for n in range(8)]
    assert assign(held) == [3, 6, 4, 5, 4, 4, 7, 6]
