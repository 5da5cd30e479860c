"""What a save writes: which item goes into which object, also by a plan out of a cache, and which rows of what several
ranks hold are written by which of them (`split_replicated`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_s3 import S3StorageWriter, errors, events, verify
from dcp_s3.format.layout import manifest_object
from dcp_s3.format.metadata import load_metadata
from dcp_s3.save import split
from dcp_s3.save.incremental import plan_changes
from dcp_s3.save.plan import item_size, plan_buckets
from dcp_s3.save.save import Save
from dcp_s3.save.split import Rows, find_large, split_replicated, with_rows
from tests.end_to_end.loads import assert_loads
from tests.end_to_end.states import assert_same, random_tensor
from tests.end_to_end.test_interchange import download
from tests.ranks import run_ranks
from tests.servers import S3Server

MIB = 2**20


def tensor(fqn: str, *shape: int) -> WriteItem:
    """The first chunk of a tensor."""
    chunk = ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.uint8), torch.Size([10 * n for n in shape]))
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def bytes_item(fqn: str) -> WriteItem:
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)


@given(st.lists(st.integers(0, 10**6), max_size=40), st.integers(0, 10), st.integers(1, 8))
def test_each_item_is_in_one_bucket_and_loads_are_level(sizes: list[int], others: int, buckets: int) -> None:
    items = [tensor(f"t{i}", size) for i, size in enumerate(sizes)] + [bytes_item(f"b{i}") for i in range(others)]
    plan = plan_buckets(items, max_buckets=buckets, min_bucket_size=1)
    assert sorted(id(item) for bucket in plan for item in bucket.items) == sorted(map(id, items))
    order = {id(item): number for number, item in enumerate(items)}
    for bucket in plan:
        assert [order[id(item)] for item in bucket.items] == sorted(order[id(item)] for item in bucket.items)
    assert len(plan) <= buckets
    assert all(bucket.items for bucket in plan)
    assert all(bucket.size == sum(map(item_size, bucket.items)) for bucket in plan)
    if items:
        # Any greedy assignment: the fullest exceeds the emptiest by at most one item.
        loads = [bucket.size for bucket in plan] + [0] * (min(buckets, len(items)) - len(plan))
        assert max(loads) - min(loads) <= max(map(item_size, items)) + others * item_size(bytes_item("x"))
    assert plan == plan_buckets(items, max_buckets=buckets, min_bucket_size=1)
    assert plan == plan_changes(items, (), {}, max_buckets=buckets, min_bucket_size=1), "or where all has changed"


# --- the rows of what several ranks hold ------------------------------------------------------------------


def plan(*held: list[WriteItem]) -> list[list[WriteItem]]:
    """What the ranks write of what they hold; by torch's planner, the first holder would write it."""
    first: dict[MetadataIndex, int] = {}
    for rank, items in enumerate(held):
        for item in items:
            first.setdefault(item.index, rank)
    plans = [SavePlan([item for item in items if first[item.index] == rank]) for rank, items in enumerate(held)]
    return split_replicated(plans, [find_large(items) for items in held])


def shown(items: list[WriteItem]) -> list[tuple[Any, ...]]:
    return [
        (item.index.fqn, *(tuple(each) for each in (item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes)))
        for item in items
        if item.tensor_data is not None
    ]


def test_one_large_tensor_levels_what_its_holders_write() -> None:
    w, other = tensor("w", 1024, MIB), tensor("other", 256, MIB)
    assert [shown(items) for items in plan([w], [w], [w, other], [w])] == [
        [("w", (0, 0), (320, MIB))],
        [("w", (320, 0), (320, MIB))],
        [("other", (0, 0), (256, MIB)), ("w", (960, 0), (64, MIB))],
        [("w", (640, 0), (320, MIB))],
    ]


@pytest.mark.parametrize(
    ("item", "parts"),
    [
        (tensor("small", 64, MIB // 2), 1),
        (tensor("limit", 64 * MIB - 4096), 1),
        (tensor("w", 1, 1, 65, MIB), 4),  # along the first dimension that can be cut
        (tensor("w", 3, 64 * MIB), 3),  # no more parts than rows
        (tensor("w", 1, 1), 1),
        (WriteItem(MetadataIndex("object"), WriteItemType.BYTE_IO), 1),
    ],
    ids=lambda value: value.index.fqn if isinstance(value, WriteItem) else str(value),
)
def test_only_what_is_large_and_can_be_cut_is(item: WriteItem, parts: int) -> None:
    written = [each for items in plan(*[[item]] * 4) for each in items]
    assert len(written) == parts
    assert all(isinstance(each, Rows) for each in written) == (parts > 1)


def test_no_part_is_small() -> None:
    """With very many ranks, a few of them share."""
    w = tensor("w", 96, MIB)
    sizes = [sum(map(item_size, items)) for items in plan(*[[w]] * 100)]
    assert sorted(size // MIB for size in sizes if size) == [16] * 6


def test_chunks_that_differ_are_no_replicas_and_ranks_with_a_cached_plan_get_nothing() -> None:
    a, b = tensor("w", 128, MIB), tensor("w", 64, 2 * MIB)
    assert split_replicated([SavePlan([a]), SavePlan([])], [find_large([a]), find_large([b])]) == [[a], []]
    plans = [SavePlan([a]), SavePlan([], usable=False), SavePlan([])]
    assert [len(items) for items in split_replicated(plans, [find_large([a])] * 3)] == [1, 0, 1]


_SHAPES = st.tuples(st.integers(1, 300), st.sampled_from([1, 1000, MIB // 2, MIB, 3 * MIB]))


@given(
    st.lists(st.tuples(_SHAPES, st.sets(st.integers(0, 7), min_size=1)), max_size=20),
    st.lists(st.integers(0, 400 * MIB), min_size=8, max_size=8),
)
def test_every_element_is_written_once_by_a_rank_that_holds_it(
    tensors: list[tuple[tuple[int, int], set[int]]], own: list[int]
) -> None:
    held = [[tensor(f"own{rank}", size)] for rank, size in enumerate(own)]
    for number, (shape, ranks) in enumerate(tensors):
        for rank in ranks:
            held[rank].append(tensor(f"t{number}", *shape))
    parts: dict[str, list[tuple[Any, Any]]] = {}
    for items, available in zip(plan(*held), held, strict=True):
        for item in items:
            assert item.index in {each.index for each in available}
            assert not isinstance(item, Rows) or item_size(item) >= MIB // 2
        for name, offsets, sizes in shown(items):
            parts.setdefault(name, []).append((offsets, sizes))
    for number, (shape, _) in enumerate(tensors):
        cut, end = int(shape[0] == 1), 0
        for offsets, sizes in sorted(parts[f"t{number}"]):
            assert (offsets[cut], sizes[1 - cut]) == (end, shape[1 - cut])
            end += sizes[cut]
        assert end == shape[cut]


def test_rows_take_the_place_of_their_chunk_in_the_metadata() -> None:
    def chunk(start: int, length: int) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size([start, 0]), torch.Size([length, 2]))

    whole = TensorStorageMetadata(TensorProperties(), torch.Size([6, 2]), [chunk(0, 4), chunk(4, 2)])
    other = BytesStorageMetadata()
    found = with_rows({"w": whole, "n": other}, [("w", chunk(3, 1)), ("w", chunk(0, 3))])
    assert found["n"] is other
    assert found["w"].chunks == [chunk(0, 3), chunk(4, 2), chunk(3, 1)]
    assert whole.chunks == [chunk(0, 4), chunk(4, 2)]
    with pytest.raises(errors.SaveProtocolError, match=r"10 of the 12 elements of 'w' .*SPLIT_REPLICATED"):
        with_rows({"w": whole}, [("w", chunk(0, 3))])


def _full(step: int) -> torch.Tensor:
    return torch.arange(40 * 1024, dtype=torch.float32).reshape(160, 256) + step


def _replicated(step: int, *, extra: bool = False) -> dict[str, Any]:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2))
    state: dict[str, Any] = {
        "w": _full(step),
        "t": _full(step).t(),
        "hsdp": distribute_tensor(_full(step), mesh, [Replicate(), Shard(0)], src_data_rank=None),
        "small": torch.full((9,), step),
        f"of_{dist.get_rank()}": torch.full((20,), step),
        "step": step,
    }
    if extra and dist.get_rank() == 1:
        state["only_of_1"] = torch.full((3,), step)
    return state


def _expected(step: int, ranks: int, *, extra: bool = False) -> dict[str, Any]:
    own = {f"of_{rank}": torch.full((20,), step) for rank in range(ranks)}
    more = {"only_of_1": torch.full((3,), step)} if extra else {}
    whole = {"w": _full(step), "t": _full(step).t(), "hsdp": _full(step)}
    return {**whole, "small": torch.full((9,), step), "step": step, **own, **more}


def _save_replicated(url: str, how: str) -> list[int]:
    split.LARGE, split.SMALLEST, split._CRUMB = 2**16, 2**14, 2**10
    heard: list[Any] = []
    # The fourth changes the plan of one rank only, the fifth is like it.
    for step, extra in enumerate((False, False, False, True, True)):
        planner = DefaultSavePlanner(enable_plan_caching=how == "cached")
        # With the same plan in the cache, one save that does not cut in between.
        writer = S3StorageWriter(f"{url}/{step}", split_replicated=step != 2, on_event=heard.append)
        how_to: dict[str, Any] = {"storage_writer": writer, "planner": planner}
        if how == "async":
            saving: Any = dcp.async_save(_replicated(step, extra=extra), **how_to)
            metadata = saving.result(60)
        else:
            metadata = dcp.save(_replicated(step, extra=extra), **how_to)
        if dist.get_rank() == 0 and step != 2:
            places = {
                (fqn, c.offsets) for fqn, t in metadata.state_dict_metadata.items() for c in getattr(t, "chunks", ())
            }
            assert places == {(i.fqn, i.offset) for i in metadata.storage_data if i.offset is not None}
    return [event.bytes for event in heard if isinstance(event, events.Written)]


@pytest.mark.servers("memory")
@pytest.mark.parametrize(("ranks", "how"), [(2, "plain"), (4, "plain"), (4, "cached"), (2, "async")])
def test_all_ranks_write_as_much_and_every_reader_reads_it(
    root: str, bucket: str, s3: Any, tmp_path: Path, ranks: int, how: str
) -> None:
    written = run_ranks(ranks, _save_replicated, root, how)
    for step, extra in enumerate((False, False, False, True, True)):
        sizes = [each[step] for each in written]
        assert max(sizes) <= 1.1 * sum(sizes) / ranks or (step == 2 and how != "cached")
        expected = _expected(step, ranks, extra=extra)
        assert_loads(f"{root}/{step}", expected)
        assert verify(f"{root}/{step}", full=True).ok
        found = {name: torch.zeros_like(value) for name, value in expected.items() if name != "step"}
        place = download(s3, bucket, f"run/{step}", tmp_path / str(step))
        dcp.load(found, storage_reader=dcp.FileSystemReader(place))
        assert_same(found, {name: expected[name] for name in found})


# --- plans out of the cache ------------------------------------------------------------------------------


_CACHES = (
    SavePlanner._cached_save_plan,
    SavePlanner._cached_final_save_plan,
    SavePlanner._cached_all_plans,
    SavePlanner._cached_global_plan,
    SavePlanner._cached_metadata,
)


@pytest.fixture(autouse=True)
def _empty_caches() -> Iterator[None]:
    for cache in _CACHES:
        cache.clear()
    yield
    for cache in _CACHES:
        cache.clear()


class _CountingPlanner(DefaultSavePlanner):
    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)

    def create_local_plan(self) -> Any:
        plan = super().create_local_plan()
        self.from_cache = not plan.usable
        return plan


def _state(step: int, *, extra: bool = False, rows: int = 5) -> dict[str, Any]:
    state: dict[str, Any] = {
        "w": torch.full((rows, 3), float(step)),
        "b": torch.full((2,), step, dtype=torch.int64),
        "step": step,
    }
    if extra:
        state["extra"] = torch.full((4,), step + 0.5)
    return state


# Shapes of five saves: the second and fifth come from the cache, the third and fourth change the plan.
_SAVES: list[dict[str, Any]] = [{}, {}, {"extra": True}, {"rows": 7}, {"rows": 7}]
_FROM_CACHE = [False, True, False, False, True]


def _assert_complete(server: S3Server, bucket: str, name: str) -> set[str]:
    """The checkpoint refers to itself only, and to all that lies there; returns the random parts of its names."""
    url, objects = f"s3://{bucket}/{name}", server.handle.objects(bucket)
    raw = server.handle.read(bucket, f"{name}/.metadata")
    metadata = load_metadata(raw, url=url)
    paths = {info.relative_path for info in metadata.storage_data.values()}
    assert {f"{name}/{path}" for path in paths} == {
        key for key in objects if key.startswith(f"{name}/") and key.endswith(".distcp")
    }
    assert {index.fqn for index in metadata.storage_data} == set(metadata.state_dict_metadata)
    assert metadata.storage_meta.checkpoint_id == url
    assert set(re.findall(rb"s3://[\w./-]+", raw)) == {url.encode()}
    assert f"{name}/{manifest_object(metadata.storage_meta.save_id)}" in objects
    assert verify(url, full=True).ok
    return {re.findall(r"-([0-9a-f]+)\.distcp$", path)[0] for path in paths} | {metadata.storage_meta.save_id}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_is_complete_in_itself_also_after_a_failure(
    root: str, bucket: str, memory_server: S3Server, asynchronous: bool
) -> None:
    writer = S3StorageWriter()
    nonces: list[set[str]] = []

    def save(step: int, shape: dict[str, Any], url: str) -> bool:
        planner = _CountingPlanner()
        how: Any = {"planner": planner, "storage_writer": writer, "checkpoint_id": url}
        if asynchronous:
            dcp.async_save(_state(step, **shape), **how).result(60)  # type: ignore[union-attr]
        else:
            dcp.save(_state(step, **shape), **how)
        return planner.from_cache

    for step, shape in enumerate(_SAVES):
        assert save(step, shape, f"{root}/{step}") is _FROM_CACHE[step], step
        nonces.append(_assert_complete(memory_server, bucket, f"run/{step}"))
        with pytest.raises(BaseException, match="BucketNotFoundError"):
            save(step, shape, "s3://no-such-bucket-here/1")
    for step, shape in enumerate(_SAVES):  # when all have been through the cache
        assert _assert_complete(memory_server, bucket, f"run/{step}") == nonces[step]
        assert_loads(f"{root}/{step}", _state(step, **shape))
    assert len(set().union(*nonces)) == sum(map(len, nonces))


def _save_of_ranks(url: str, *, extra: bool) -> None:
    state = {"w": torch.ones(9), f"of_{dist.get_rank()}": torch.ones(3)}
    if extra and dist.get_rank() == 1:
        state["only_of_1"] = torch.ones(5)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state, storage_writer=S3StorageWriter(url), planner=planner)


def _after_a_failure(url: str) -> str:
    _save_of_ranks(f"{url}/0", extra=False)
    check = Save.prepare_global_plan

    def fail(*_: Any) -> Any:
        raise errors.SaveProtocolError("two saves overlapped")

    Save.prepare_global_plan = fail  # type: ignore[method-assign]
    with pytest.raises(CheckpointException):
        _save_of_ranks(f"{url}/1", extra=True)
    Save.prepare_global_plan = check  # type: ignore[method-assign]
    with pytest.raises(CheckpointException) as caught:
        _save_of_ranks(f"{url}/2", extra=True)
    return str(next(iter(caught.value.failures.values()))[0])


@pytest.mark.servers("memory")
def test_a_save_whose_ranks_have_plans_of_another_state_is_not_committed(root: str) -> None:
    for text in run_ranks(2, _after_a_failure, root):
        assert "'only_of_1' was planned, and no rank has written all of it" in text
    assert verify(f"{root}/0", full=True).ok
    with pytest.raises(errors.CheckpointNotFoundError):
        verify(f"{root}/2")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_are_saved_through_pinned_blocks(root: str) -> None:
    tensor = random_tensor((3000, 2001), torch.float32).cuda()
    state = {"w": tensor, "t": tensor.t(), "half": tensor.bfloat16(), "small": tensor[:3, 5]}
    for step in range(2):
        dcp.save(state, storage_writer=S3StorageWriter(f"{root}/{step}"))
        assert_loads(f"{root}/{step}", {name: value.cpu() for name, value in state.items()})
        tensor.add_(1)
