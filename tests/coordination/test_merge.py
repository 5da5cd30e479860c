"""Parts of many ranks become one checkpoint's metadata, as DCP's coordinator makes it."""

from __future__ import annotations

import pickle

import pytest
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from benchmarks.coordinator import State, local_plan, results_of
from dcp_s3.coordination.merge import Merging
from dcp_s3.format.metadata import load_metadata
from dcp_s3.format.part import Part, WrittenItem, item_hash
from dcp_s3.format.part_codec import decode, encode

SAVE = "ab12"


def part_of(rank: int, ranks: int, held: SavePlan, written: SavePlan) -> Part:
    """The part of a rank with these plans before and after deduplication."""
    results = results_of(rank, written)
    items = tuple(
        WrittenItem(item.index, item.tensor_data, result.storage_data)
        for item, result in zip(written.items, results, strict=True)
    )
    objects = tuple(each.object_entry for each in results if each.object_entry is not None)
    paths = {item.index.fqn: held.planner_data[item.index.fqn] for item in written.items}
    return Part(SAVE, rank, ranks, items, objects, frozenset(map(item_hash, held.items)), paths)


def test_the_metadata_is_that_of_dcp_s_coordinator() -> None:
    state = State.of(50)
    held = [local_plan(state, 4, rank) for rank in range(4)]
    written, expected = DefaultSavePlanner().create_global_plan(held)
    parts = [part_of(rank, 4, *plans) for rank, plans in enumerate(zip(held, written, strict=True))]
    merging = Merging(SAVE, 4)
    for part in reversed(parts):
        assert decode(encode(part)) == part
        merging.add(encode(part))
        merging.add(encode(part))
    assert merging.ranks == {0, 1, 2, 3}
    assert merging.unwritten() == {}
    merged = merging.merged(save_id=SAVE + "00", checkpoint_id="s3://bucket/step-1")
    found = load_metadata(merged.metadata, url="s3://bucket/step-1")
    assert found == pickle.loads(merged.metadata)
    assert found.state_dict_metadata == expected.state_dict_metadata
    assert found.planner_data == expected.planner_data
    assert found.storage_data == {item.index: item.storage for part in parts for item in part.written}
    assert merged.items == len(found.storage_data) == state.stored(4)
    assert merged.objects == tuple(entry for part in parts for entry in part.objects)


def test_a_part_of_another_save_is_refused() -> None:
    state = State.of(50)
    plan = local_plan(state, 1, 0)
    data = encode(part_of(0, 1, plan, plan))
    with pytest.raises(ValueError, match="expected cd34 of 1"):
        Merging("cd34", 1).add(data)
    with pytest.raises(ValueError, match="expected ab12 of 2"):
        Merging(SAVE, 2).add(data)
