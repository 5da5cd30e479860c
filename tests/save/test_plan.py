"""Which item goes into which object."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_s3.save.plan import group_items, item_size, matches_prefix, plan_buckets


def tensor_item(fqn: str, rows: int, whole: int | None = None) -> WriteItem:
    """A shard of ``rows`` uint8 elements of a tensor of ``whole``."""
    size = torch.Size([rows if whole is None else whole])
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([rows]))
    data = TensorWriteData(chunk, TensorProperties(dtype=torch.uint8), size)
    return WriteItem(MetadataIndex(fqn, [0]), WriteItemType.SHARD, tensor_data=data)


def bytes_item(fqn: str) -> WriteItem:
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)


SIZES = st.lists(st.integers(0, 10**6), max_size=40)


@given(SIZES, st.integers(0, 10), st.integers(1, 8))
def test_every_item_is_in_exactly_one_bucket_and_the_loads_are_balanced(
    sizes: list[int], others: int, buckets: int
) -> None:
    items = [tensor_item(f"t{i}", size) for i, size in enumerate(sizes)] + [bytes_item(f"b{i}") for i in range(others)]
    plan = plan_buckets(items, max_buckets=buckets, min_bucket_size=1)
    assert sorted(id(item) for bucket in plan for item in bucket.items) == sorted(map(id, items))
    assert len(plan) <= buckets
    assert all(bucket.items for bucket in plan)
    assert all(bucket.size == sum(map(item_size, bucket.items)) for bucket in plan)
    if items:
        # Any greedy assignment: the fullest exceeds the emptiest by at most one item.
        loads = [bucket.size for bucket in plan] + [0] * (min(buckets, len(items)) - len(plan))
        assert max(loads) - min(loads) <= max(map(item_size, items)) + others * item_size(bytes_item("x"))
    assert plan == plan_buckets(items, max_buckets=buckets, min_bucket_size=1)


def test_the_chunk_counts_and_not_the_whole_tensor() -> None:
    """One small shard of a huge tensor and three medium tensors: the small one is not alone in its object."""
    items = [tensor_item("huge", 1000, whole=10**9), *(tensor_item(f"m{i}", 10**6) for i in range(3))]
    plan = plan_buckets(items, max_buckets=2, min_bucket_size=1)
    assert sorted(len(bucket.items) for bucket in plan) == [2, 2]


def test_small_states_get_one_object() -> None:
    items = [tensor_item(f"t{i}", 1000) for i in range(50)]
    assert len(plan_buckets(items, max_buckets=8, min_bucket_size=2**20)) == 1
    assert plan_buckets([], max_buckets=8, min_bucket_size=1) == []


def test_bytes_items_are_spread() -> None:
    plan = plan_buckets([bytes_item(f"b{i}") for i in range(9)], max_buckets=3, min_bucket_size=1)
    assert [len(bucket.items) for bucket in plan] == [3, 3, 3]


def test_items_of_a_bucket_keep_the_order_of_the_plan() -> None:
    items = [tensor_item(f"t{i}", (i * 37) % 11 * 1000) for i in range(30)]
    for bucket in plan_buckets(items, max_buckets=3, min_bucket_size=1):
        positions = [items.index(item) for item in bucket.items]
        assert positions == sorted(positions)


def test_prefixes_end_at_dots() -> None:
    assert matches_prefix("model.w", "model")
    assert matches_prefix("model.w", "model.")
    assert matches_prefix("model", "model")
    assert not matches_prefix("model2.w", "model")
    assert not matches_prefix("mode", "model")


def test_prefixes_with_a_star_end_anywhere() -> None:
    assert matches_prefix("model2.w", "model*")
    assert matches_prefix("model", "model*")
    assert not matches_prefix("a.model", "model*")
    assert matches_prefix("anything", "*")


def test_groups_take_the_first_match_and_leave_the_rest() -> None:
    items = [bytes_item(name) for name in ("a.x", "b.x", "a.y.z", "c", "d.a")]
    groups = group_items(items, [["a.y"], ["a", "b"]])
    assert [[item.index.fqn for item in group] for group in groups] == [["a.y.z"], ["a.x", "b.x"], ["c", "d.a"]]


@given(SIZES, st.integers(1, 5))
def test_groups_never_share_an_object(sizes: list[int], buckets: int) -> None:
    items = [tensor_item(f"{'ab'[i % 2]}.{i}", size) for i, size in enumerate(sizes)]
    plan = plan_buckets(items, max_buckets=buckets, min_bucket_size=1, separate=[["a"], ["b"]])
    assert all(len({item.index.fqn[0] for item in bucket.items}) == 1 for bucket in plan)
