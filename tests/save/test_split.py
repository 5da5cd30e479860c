"""Replicated tensors are written by all ranks that hold them (`split_replicated`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dcp_s3 import S3StorageWriter, errors, events, verify
from dcp_s3.save import split
from dcp_s3.save.plan import item_size
from dcp_s3.save.split import Rows, find_large, split_replicated, with_rows
from tests.end_to_end.loads import assert_loads
from tests.end_to_end.states import assert_same
from tests.end_to_end.test_interchange import download
from tests.ranks import run_ranks

MIB = 2**20


def tensor(fqn: str, shape: tuple[int, ...], at: tuple[int, ...] | None = None) -> WriteItem:
    offsets = torch.Size(at or (0,) * len(shape))
    chunk = ChunkStorageMetadata(offsets, torch.Size(shape))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.uint8), torch.Size([10 * n for n in shape]))
    return WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)


def plan(*held: list[WriteItem], owners: dict[str, int] | None = None) -> list[list[WriteItem]]:
    """What the ranks write of what they hold; by torch's planner, the first holder or the owner would write it."""
    first: dict[MetadataIndex, int] = {}
    for rank, items in enumerate(held):
        for item in items:
            first.setdefault(item.index, (owners or {}).get(item.index.fqn, rank))
    plans = [SavePlan([item for item in items if first[item.index] == rank]) for rank, items in enumerate(held)]
    return split_replicated(plans, [find_large(items) for items in held])


def shown(items: list[WriteItem]) -> list[tuple[Any, ...]]:
    return [
        (item.index.fqn, *(tuple(each) for each in (item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes)))
        for item in items
        if item.tensor_data is not None
    ]


def test_one_large_tensor_levels_what_its_holders_write() -> None:
    w, other = tensor("w", (1024, MIB)), tensor("other", (256, MIB))
    assert [shown(items) for items in plan([w], [w], [w, other], [w])] == [
        [("w", (0, 0), (320, MIB))],
        [("w", (320, 0), (320, MIB))],
        [("other", (0, 0), (256, MIB)), ("w", (960, 0), (64, MIB))],
        [("w", (640, 0), (320, MIB))],
    ]


@pytest.mark.parametrize(
    ("item", "parts"),
    [
        (tensor("small", (64, MIB // 2)), 1),
        (tensor("limit", (64 * MIB - 4096,)), 1),
        (tensor("w", (1, 1, 65, MIB)), 4),  # along the first dimension that can be cut
        (tensor("w", (3, 64 * MIB)), 3),  # no more parts than rows
        (tensor("w", (1, 1)), 1),
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
    w = tensor("w", (96, MIB))
    sizes = [sum(map(item_size, items)) for items in plan(*[[w]] * 100)]
    assert sorted(size // MIB for size in sizes if size) == [16] * 6


def test_chunks_that_differ_are_not_taken_for_replicas() -> None:
    a, b = tensor("w", (128, MIB)), tensor("w", (64, 2 * MIB))
    assert plan([a], [b], owners={"w": 0}) == [[a], []]


def test_ranks_with_a_cached_plan_get_nothing() -> None:
    w = tensor("w", (128, MIB))
    plans = [SavePlan([w]), SavePlan([], usable=False), SavePlan([])]
    assert [len(items) for items in split_replicated(plans, [find_large([w])] * 3)] == [1, 0, 1]


_SHAPES = st.tuples(st.integers(1, 300), st.sampled_from([1, 1000, MIB // 2, MIB, 3 * MIB]))


@given(
    st.lists(st.tuples(_SHAPES, st.sets(st.integers(0, 7), min_size=1)), max_size=20),
    st.lists(st.integers(0, 400 * MIB), min_size=8, max_size=8),
)
def test_every_element_is_written_once_by_a_rank_that_holds_it(
    tensors: list[tuple[tuple[int, int], set[int]]], own: list[int]
) -> None:
    held = [[tensor(f"own{rank}", (size,))] for rank, size in enumerate(own)]
    for number, (shape, ranks) in enumerate(tensors):
        for rank in ranks:
            held[rank].append(tensor(f"t{number}", shape))
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


# --- saves ------------------------------------------------------------------------------------------------


def _full(step: int) -> torch.Tensor:
    return torch.arange(40 * 1024, dtype=torch.float32).reshape(160, 256) + step


def _state(step: int, *, extra: bool = False) -> dict[str, Any]:
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


def _save(url: str, how: str) -> list[int]:
    split.LARGE, split.SMALLEST, split._CRUMB = 2**16, 2**14, 2**10
    heard: list[Any] = []
    # The fourth changes the plan of one rank only, the fifth is like it.
    for step, extra in enumerate((False, False, False, True, True)):
        planner = DefaultSavePlanner(enable_plan_caching=how == "cached")
        # With the same plan in the cache, one save that does not cut in between.
        writer = S3StorageWriter(f"{url}/{step}", split_replicated=step != 2, on_event=heard.append)
        how_to: dict[str, Any] = {"storage_writer": writer, "planner": planner}
        if how == "async":
            saving: Any = dcp.async_save(_state(step, extra=extra), **how_to)
            metadata = saving.result(60)
        else:
            metadata = dcp.save(_state(step, extra=extra), **how_to)
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
    written = run_ranks(ranks, _save, root, how)
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
