"""S3LoadPlanner plans what torch's DefaultLoadPlanner plans, item for item."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement

from dcp_s3 import S3LoadPlanner, S3StorageReader, S3StorageWriter, errors
from dcp_s3.load.planner import AnyBox as Box
from tests.ranks import run_ranks
from tests.relying import BEFORE_2_10, in_torchs_order


def grid(shape: tuple[int, ...], parts: tuple[int, ...]) -> list[Box]:
    """The tensor cut into so many pieces in each dimension, as even as it goes (empty, if there are too many)."""
    cuts = [[(i * n // p, (i + 1) * n // p) for i in range(p)] for n, p in zip(shape, parts, strict=True)]
    return [
        (tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell))
        for cell in itertools.product(*cuts)
    ]


def chunks(boxes: list[Box]) -> list[ChunkStorageMetadata]:
    return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]


@st.composite
def chunkings(draw: st.DrawFn) -> tuple[list[Box], list[Box]]:
    dims = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=dims, max_size=dims)))

    def some() -> list[Box]:
        boxes = grid(shape, tuple(draw(st.integers(1, 4)) for _ in shape)) if draw(st.booleans()) else []
        for _ in range(draw(st.integers(0, 5))):
            starts = [draw(st.integers(0, n)) for n in shape]
            sizes = [draw(st.integers(0, n - start)) for n, start in zip(shape, starts, strict=True)]
            boxes.append((tuple(starts), tuple(sizes)))
        if boxes and draw(st.booleans()):
            boxes += draw(st.lists(st.sampled_from(boxes), max_size=4))  # replicated
        return draw(st.permutations(boxes))

    return some(), some()


class Pieces(torch.Tensor):
    """A tensor of which this process has several pieces, by torch's protocol."""

    pieces: list[Box]

    def __create_chunk_list__(self) -> Any:
        return chunks(self.pieces)

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        offsets, sizes = self.pieces[index.index or 0]
        return self.as_subclass(torch.Tensor)[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]


def in_pieces(shape: tuple[int, ...], pieces: list[Box]) -> Pieces:
    tensor = torch.zeros(shape).as_subclass(Pieces)
    tensor.pieces = pieces
    return tensor


def saved_as(shape: tuple[int, ...], boxes: list[Box]) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks(boxes))


def make_plan(planner: DefaultLoadPlanner, state: dict[str, Any], metadata: Metadata) -> LoadPlan:
    planner.set_up_planner(dict(state), metadata, True)
    return planner.create_local_plan()


def details(items: list[ReadItem]) -> list[Any]:
    """All of the items: equality leaves the hints out, and knows no difference between a tuple and a torch.Size."""
    assert all(type(item) is ReadItem for item in items)
    return in_torchs_order([
        [(name, type(value), vars(value) if isinstance(value, MetadataIndex) else value)
         for name, value in sorted(vars(item).items())]
        for item in items
    ])  # fmt: skip


def assert_same_plan(state: dict[str, Any], metadata: Metadata, **arguments: Any) -> LoadPlan:
    expected = make_plan(DefaultLoadPlanner(**arguments), state, metadata)
    found = make_plan(S3LoadPlanner(**arguments), state, metadata)
    assert BEFORE_2_10 or found == expected
    assert details(found.items) == details(expected.items)
    assert pickle.loads(pickle.dumps(found)) == (found if BEFORE_2_10 else expected)
    return found


@given(tensors=st.lists(chunkings(), min_size=1, max_size=3), data=st.data())
def test_random_chunks_and_objects(tensors: list[tuple[list[Box], list[Box]]], data: st.DataObject) -> None:
    saved: dict[str, Any] = {"object": BytesStorageMetadata()}
    state: dict[str, Any] = {"object": data.draw(st.sampled_from([3, "text", torch.ones(2)]))}
    for number, (stored, local) in enumerate([*tensors, *tensors[:1]]):  # two that are cut alike
        boxes = [*stored, *local]
        dims = len(boxes[0][0]) if boxes else 1
        shape = tuple(max([o[d] + s[d] for o, s in boxes], default=0) for d in range(dims))
        saved |= dict.fromkeys([f"t{number}", f"whole{number}"], saved_as(shape, stored))
        state[f"t{number}"] = in_pieces(shape, local)
        state[f"whole{number}"] = torch.nn.Parameter(torch.empty(shape))
    state = dict(data.draw(st.permutations(list(state.items()))))
    plain = {"flatten_sharded_tensors": False, "flatten_state_dict": False}
    found = make_plan(S3LoadPlanner(**plain), state, Metadata(saved)).items
    expected = make_plan(DefaultLoadPlanner(**plain), state, Metadata(saved)).items
    assert details(found) == details(expected)


def _sharded_tensor(shape: tuple[int, ...], boxes: list[Box]) -> ShardedTensor:
    """With every world-size-th box on this rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = [ShardMetadata(list(o), list(s), f"rank:{i % world}/cpu") for i, (o, s) in enumerate(boxes)]
    properties = ShardProperties(dtype=torch.float32)
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [Shard(torch.zeros(each.shard_sizes), each) for each in shards[rank::world]],
        ShardedTensorMetadata(shards, torch.Size(shape), properties),
    )


def _plan_on_ranks() -> None:
    world = dist.get_world_size()
    line, square = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    first = init_device_mesh("cpu", (1,)) if dist.get_rank() == 0 else None
    shape = (13, 22)
    full = torch.zeros(shape)
    state: dict[str, Any] = {
        "rows": distribute_tensor(full, line, [ShardPlacement(0)], src_data_rank=None),
        "columns": distribute_tensor(full, line, [ShardPlacement(1)], src_data_rank=None),
        "both": distribute_tensor(full, square, [ShardPlacement(0), ShardPlacement(1)], src_data_rank=None),
        "strided": distribute_tensor(full, square, [ShardPlacement(0), ShardPlacement(0)], src_data_rank=None),
        "hybrid": distribute_tensor(full, square, [Replicate(), ShardPlacement(1)], src_data_rank=None),
        "shards": _sharded_tensor(shape, grid(shape, (6, 4))),
        "shards again": _sharded_tensor(shape, grid(shape, (6, 4))),
        "tensor": torch.nn.Parameter(full),
        "scalar": torch.tensor(1.0),
        "epoch": 3,
    }
    if first is not None:
        state["first"] = distribute_tensor(full, first, [ShardPlacement(0)], src_data_rank=None)
    items = 0
    for parts in ((1, 1), (13, 1), (1, 22), (5, 7), (13, 22)):
        saved: dict[str, Any] = {
            fqn: saved_as(tuple(entry.size()), grid(tuple(entry.size()), parts if entry.dim() else ()))
            if isinstance(entry, torch.Tensor)
            else BytesStorageMetadata()
            for fqn, entry in state.items()
        }
        items += len(assert_same_plan(state, Metadata(saved)).items)
    assert items > 100


def test_dtensors_and_sharded_tensors() -> None:
    run_ranks(4, _plan_on_ranks)


@pytest.mark.servers("memory")
@pytest.mark.parametrize("times", [0, 2])
def test_a_plan_that_does_not_fill_the_state_is_refused(root: str, times: int) -> None:
    dcp.save({"x": torch.zeros(4)}, storage_writer=S3StorageWriter(root))

    class Other(DefaultLoadPlanner):
        def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
            return LoadPlan(new_plan.items * times)

    with pytest.raises(CheckpointException, match=f"{4 * times} of the 4 elements of 'x'") as caught:
        dcp.load({"x": torch.ones(4)}, storage_reader=S3StorageReader(root), planner=Other())
    assert isinstance(caught.value.failures[0][0], errors.CorruptCheckpointError)


def test_chunks_that_are_not_of_the_usual_kind_are_left_to_torch() -> None:
    saved = saved_as((4, 2), grid((4, 2), (2, 1)))
    for chunk in saved.chunks:
        chunk.offsets, chunk.sizes = list(chunk.offsets), list(chunk.sizes)  # type: ignore[assignment]
    assert len(assert_same_plan({"x": torch.zeros(4, 2)}, Metadata({"x": saved})).items) == 2


def test_names_of_checkpoints_from_before_torch_2_4() -> None:
    """Lists without tensors were one entry then."""
    metadata = Metadata({"x": saved_as((2,), grid((2,), (1,))), "list": BytesStorageMetadata()})
    state = {"x": torch.zeros(2), "list": [1, 2]}
    expected, found = DefaultLoadPlanner(), S3LoadPlanner()
    plans = [make_plan(planner, state, metadata) for planner in (expected, found)]
    assert plans[0] == plans[1]
    assert [item.dest_index.fqn for item in plans[1].items] == ["x", "list"]
    assert found.mappings == expected.mappings
    assert found.metadata is metadata
    assert not found.allow_partial_load
