"""What a load plans: what torch's DefaultLoadPlanner plans, item for item; what a state and a checkpoint may differ in;
and entries that lie in the same memory."""

from __future__ import annotations

import itertools
import logging
import pickle
from types import SimpleNamespace
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
from torch.testing._internal.two_tensor import TwoTensor

from dcp_s3 import S3LoadPlanner, S3StorageReader, errors
from dcp_s3.load.planner import AnyBox as Box
from dcp_s3.load.read import find_late, keeps_values
from tests.end_to_end.loads import load, save
from tests.end_to_end.states import DTYPES, random_tensor
from tests.end_to_end.test_failures import failure_of_load
from tests.ranks import run_ranks
from tests.relying import BEFORE_2_10, in_torchs_order
from tests.servers import S3Server

pytestmark = pytest.mark.timeout(180)


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
    save({"x": torch.zeros(4)}, root)

    class Other(DefaultLoadPlanner):
        def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
            return LoadPlan(new_plan.items * times)

    error = failure_of_load(root, {"x": torch.ones(4)}, Other())
    assert isinstance(error, errors.CorruptCheckpointError)
    assert f"{4 * times} of the 4 elements of 'x'" in str(error)


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


# --- what a state and a checkpoint may differ in: names, shapes, dtypes --------------------------------


_LAYERS = [f"layers.{i}.{part}" for i in range(12) for part in ("weight", "bias")]


@pytest.fixture
def layers(root: str, memory_server: S3Server) -> str:
    """The URL of a checkpoint."""
    save({"train": {"model": {name: torch.ones(2, 3) for name in _LAYERS}}, "epoch": 3}, f"{root}/step-1")
    return f"{root}/step-1"


def test_all_missing_names_and_all_other_shapes_are_in_one_error(layers: str) -> None:
    state: dict[str, Any] = {"model": {name: torch.zeros(2, 3) for name in _LAYERS}}
    error: Any = failure_of_load(layers, state, S3LoadPlanner())
    assert isinstance(error, errors.MissingKeysError)
    assert isinstance(error, (errors.EntryNotFoundError, RuntimeError))
    assert error.missing == [f"model.{name}" for name in _LAYERS]
    assert sorted(error.unexpected) == sorted([*(f"train.model.{name}" for name in _LAYERS), "epoch"])
    assert str(error).startswith("Missing key in checkpoint state_dict: model.layers.0.weight and 23 more (")
    assert layers in str(error)
    assert "Remedy: " in str(error)
    assert len(str(error)) < 1000
    state = {"train": {"model": {name: torch.zeros(3, 2) for name in _LAYERS}, "more": 1}}
    error = failure_of_load(layers, state, S3LoadPlanner())
    assert isinstance(error, errors.TensorMismatchError)
    assert len(error.shapes) == 24
    assert error.shapes[error.fqn] == ((2, 3), (3, 2))
    assert str(error).startswith(
        "Size mismatch between saved (2, 3) and current (3, 2) for train.model.layers.0.weight"
    )
    assert "and for 23 more: " in str(error)
    assert "also not saved: 1 name of the state (train.more)" in str(error)


def test_a_partial_load_may_lack_names_but_not_differ_in_shape(layers: str) -> None:
    partial = S3LoadPlanner(allow_partial_load=True)
    dcp.load({"new": torch.zeros(1)}, storage_reader=S3StorageReader(layers), planner=partial)
    for other in (torch.zeros(1), 7):
        state = {"train": {"model": {_LAYERS[0]: other}}, "new": 1}
        error = failure_of_load(layers, state, S3LoadPlanner(allow_partial_load=True))
        assert isinstance(error, errors.TensorMismatchError)
        assert layers in str(error)
        assert "not saved" not in str(error)


def test_what_is_converted_comes_through_bounded_memory(
    memory_server: S3Server, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.randn(3_000_000)}
    save(state, root, settings={"part_size": "5MiB"})
    sizes, empty = [0], torch.empty

    def record(*size: Any, **options: Any) -> torch.Tensor:
        if "pin_memory" in options:
            sizes.append(*size)
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", record)
    monkeypatch.setattr("dcp_s3.load.fetch.LOAD_BUFFERS", 4 * 2**20)
    target = load({"w": torch.zeros(3_000_000, dtype=torch.bfloat16)}, root, settings={"concurrency": 4})
    assert torch.equal(target["w"], state["w"].bfloat16())
    assert 2**19 < max(sizes) < 2**20 + 2**12, "a quarter of 4 MiB for each of 4 connections"


def test_one_warning_counts_and_names_what_was_narrowed(
    memory_server: S3Server, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    state: dict[str, Any] = {"model": {f"w{n}": torch.randn(4) for n in range(9)}, "n": torch.tensor([2**40 + 1])}
    kept = {"same": torch.ones(3), "wider": torch.ones(3).half(), "exact": torch.ones(3, dtype=torch.int32)}
    save({**state, **kept}, root)
    target = load(
        {
            "model": {f"w{n}": torch.zeros(4, dtype=torch.bfloat16) for n in range(9)}, "n": torch.zeros(1),
            "same": torch.zeros(3), "wider": torch.zeros(3), "exact": torch.zeros(3, dtype=torch.float64),
        }, root,
    )  # fmt: skip
    (record,) = (record for record in caplog.records if record.name == "dcp_s3.load.read")
    message = record.getMessage()
    assert record.levelno == logging.WARNING
    for part in (root, "10 tensors", "9 from torch.float32 to torch.bfloat16 (model.w0, ",
                 "1 from torch.int64 to torch.float32 (n)", "S3StorageReader(allow_dtype_cast=False)"):  # fmt: skip
        assert part in message, message
    assert not [name for name in kept if f"({name}" in message or f", {name}" in message]
    assert torch.equal(target["model"]["w3"], state["model"]["w3"].bfloat16())


@pytest.mark.parametrize("other", [torch.float16, torch.float64])
def test_a_strict_load_changes_nothing(memory_server: S3Server, root: str, other: torch.dtype) -> None:
    save({"a": torch.ones(3), "w": torch.ones(3)}, root)
    target = {"a": torch.full((3,), 7.0), "w": torch.full((3,), 7.0, dtype=other)}
    error = failure_of_load(root, target, allow_dtype_cast=False)
    assert isinstance(error, errors.TensorMismatchError)
    assert error.fqn == "w"
    assert "allow_dtype_cast" in str(error)
    assert (target["a"] == 7).all()


@pytest.mark.filterwarnings("ignore:Casting complex values to real:UserWarning")
@given(st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.integers(0, 1000))
def test_what_keeps_its_values_comes_back(saved: torch.dtype, target: torch.dtype, seed: int) -> None:
    """Bit for bit, but for the payloads of NaNs."""
    values = random_tensor((64,), saved, seed)
    if not keeps_values(saved, target):
        return
    back = values.to(target).to(saved)
    nan = values != values
    assert torch.equal(back != back, nan)
    one, two = (each.view(torch.uint8).view(len(each), -1)[~nan] for each in (back, values))
    assert torch.equal(one, two)


# --- entries that lie in the same memory ---------------------------------------------------------------


def test_where_entries_share_memory_the_later_ones_are_copied_unless_they_are_the_same() -> None:
    tied, whole = torch.zeros(8, 8), torch.zeros(100)

    def transfer(fqn: str, target: torch.Tensor, crc: int, at: tuple[int, ...]) -> Any:
        item = SimpleNamespace(dest_index=SimpleNamespace(fqn=fqn), dest_offsets=at, lengths=target.shape,
                               storage_offsets=(0,) * target.dim())  # fmt: skip
        return SimpleNamespace(target=target, stored=SimpleNamespace(sizes=target.shape, crc=crc), item=item)

    for last, late in ((2, []), (3, [2, 3])):  # columns of one content, or not
        columns = [("in", 0, 1), ("in", 4, 2), ("out", 0, 1), ("out", 4, last)]
        assert find_late([transfer(fqn, tied[:, at : at + 4], crc, (0, at)) for fqn, at, crc in columns]) == late
    targets = (whole, whole[10:20], whole[50:60], torch.zeros(3))
    assert find_late([transfer(str(n), target, n, (0,)) for n, target in enumerate(targets)]) == [1, 2]


def test_tied_interleaved_and_wrapped_entries(memory_server: S3Server, root: str) -> None:
    weight, columns = torch.arange(1000.0), {"q": torch.full((8, 4), 1.0), "k": torch.full((8, 4), 2.0)}
    save({"in": weight, "out": weight, **columns, "w": torch.arange(10.0), "x": torch.ones(3)}, root)
    memory_server.handle.reset_counters()
    tied = torch.zeros(1000)
    load({"in": tied, "out": tied}, root)
    assert torch.equal(tied, weight)
    assert memory_server.handle.counters.requests["GetObject"] == 2  # .metadata, and both in one
    fused = torch.zeros(8, 8)
    load({"q": fused[:, :4], "k": fused[:, 4:]}, root)
    assert torch.equal(fused, torch.cat([columns["q"], columns["k"]], dim=1))
    wrapped, plain = TwoTensor(torch.zeros(10), torch.zeros(10)), torch.zeros(3)  # without memory of its own
    load({"w": wrapped, "x": plain}, root)
    assert wrapped.a.tolist() == wrapped.b.tolist() == list(range(10))
    assert torch.equal(plain, torch.ones(3))


@pytest.mark.parametrize("part", [slice(None), slice(2**20, 2**21)], ids=["all", "a part"])
def test_of_what_entries_share_the_last_one_in_the_plan_stays(memory_server: S3Server, root: str, part: slice) -> None:
    many = {"part_size": "5MiB", "concurrency": 16}
    saved = {name: torch.full((3 * 2**20,), value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    saved["b"] = saved["b"][part]
    save(saved, root, settings=many)
    for _ in range(6):
        shared, other = torch.zeros(3 * 2**20), torch.zeros(3 * 2**20)
        load({"b": shared[part], "a": shared, "c": other}, root, settings=many)  # DCP sorts the names
        expected = saved["a"].clone()
        expected[part] = 2.0
        assert torch.equal(shared, expected)
        assert torch.equal(other, saved["c"])


def _load_tied(url: str) -> list[Any]:
    """What a rank has got, the last one nothing."""
    tied, other = (distribute_tensor(torch.zeros(2, 4), init_device_mesh("cpu", (3,)), [ShardPlacement(0)])
                   for _ in range(2))  # fmt: skip
    dcp.load({"out": tied, "in": tied}, storage_reader=S3StorageReader(url), planner=S3LoadPlanner())
    with pytest.raises(CheckpointException):
        dcp.load({"out": other, "in": tied}, storage_reader=S3StorageReader(url), planner=S3LoadPlanner())
    return tied.to_local().tolist()


def test_a_name_that_is_not_saved_is_found_by_the_one_that_it_is_tied_to(memory_server: S3Server, root: str) -> None:
    save({"in": torch.arange(8.0).view(2, 4)}, root)
    tied = torch.zeros(2, 4)
    dcp.load({"out": tied, "in": tied}, storage_reader=S3StorageReader(root), planner=S3LoadPlanner())
    assert tied.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for other in (tied[1:], tied.view(8), tied.view(torch.int32), tied.clone()):
        error = failure_of_load(root, {"out": other, "in": tied}, S3LoadPlanner())
        assert isinstance(error, errors.MissingKeysError)
    assert run_ranks(3, _load_tied, root) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], []]
