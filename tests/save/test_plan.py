"""What a save writes: which item goes into which object, also by a plan out of a cache, and through which memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlanner, TensorWriteData, WriteItem, WriteItemType

from dcp_s3 import S3StorageWriter
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.metadata import load_metadata
from dcp_s3.memory import iterate_bytes
from dcp_s3.save.items import BLOCK_SIZE, PinnedRing, shared_ring
from dcp_s3.save.plan import group_items, item_size, plan_buckets
from tests.end_to_end.loads import assert_loads
from tests.end_to_end.states import bits, random_tensor
from tests.servers import S3Server


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


def test_a_group_takes_what_its_prefix_is_the_first_to_match() -> None:
    names = ["a.x", "b.x", "a.y.z", "c", "d.a", "model.w", "model2.w", "mode"]
    groups = group_items([bytes_item(name) for name in names], ["a.y", "a", "model.", "nothing"])
    assert [[item.index.fqn for item in group] for group in groups] == [
        ["a.y.z"], ["a.x"], ["model.w"], ["b.x", "c", "d.a", "model2.w", "mode"],
    ]  # fmt: skip


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
    """The caches belong to the class: what one test leaves, the next one would use."""
    for cache in _CACHES:
        cache.clear()
    yield
    for cache in _CACHES:
        cache.clear()


class _CountingPlanner(DefaultSavePlanner):
    """Tells whether the plan came from the cache."""

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
    url = f"s3://{bucket}/{name}"
    objects = {key.removeprefix(f"{name}/"): key for key in server.handle.objects(bucket) if key.startswith(f"{name}/")}
    raw = server.handle.read(bucket, f"{name}/.metadata")
    metadata = load_metadata(raw, url=url)
    referred = {info.relative_path for info in metadata.storage_data.values()}
    assert referred == {path for path in objects if path.endswith(".distcp")}
    assert metadata.storage_meta.checkpoint_id == url
    assert {index.fqn for index in metadata.storage_data} == set(metadata.state_dict_metadata)
    others = set(re.findall(rb"s3://[\w./-]+", raw)) - {url.encode()}
    assert not others
    (manifest_path,) = (path for path in objects if path.startswith(".dcp_s3/manifest-"))
    assert metadata.storage_meta.save_id in manifest_path
    manifest = Manifest.from_json(server.handle.read(bucket, objects[manifest_path]))
    assert {entry.path for entry in manifest.objects} == referred
    assert {entry.path: entry.size for entry in manifest.objects} == {
        path: server.handle.objects(bucket)[objects[path]] for path in referred
    }
    return {re.findall(r"-([0-9a-f]+)\.distcp$", path)[0] for path in referred} | {metadata.storage_meta.save_id}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_each_checkpoint_is_complete_in_itself(
    root: str, bucket: str, memory_server: S3Server, asynchronous: bool
) -> None:
    writer = S3StorageWriter()
    nonces: list[set[str]] = []
    for step, shape in enumerate(_SAVES):
        planner = _CountingPlanner()
        how: Any = {"planner": planner, "storage_writer": writer, "checkpoint_id": f"{root}/{step}"}
        if asynchronous:
            dcp.async_save(_state(step, **shape), **how).result(60)
        else:
            dcp.save(_state(step, **shape), **how)
        assert planner.from_cache is _FROM_CACHE[step], step
        nonces.append(_assert_complete(memory_server, bucket, f"run/{step}"))
    for step, shape in enumerate(_SAVES):  # when all have been through the cache
        assert _assert_complete(memory_server, bucket, f"run/{step}") == nonces[step]
        assert_loads(f"{root}/{step}", _state(step, **shape))
    assert len(set().union(*nonces)) == sum(map(len, nonces))


def test_a_save_that_failed_leaves_a_cache_that_works(root: str, bucket: str, memory_server: S3Server) -> None:
    dcp.save(_state(0), storage_writer=S3StorageWriter(f"{root}/0"), planner=_CountingPlanner())
    with pytest.raises(BaseException, match="BucketNotFoundError"):
        dcp.save(_state(1), storage_writer=S3StorageWriter("s3://no-such-bucket-here/1"), planner=_CountingPlanner())
    planner = _CountingPlanner()
    dcp.save(_state(2), storage_writer=S3StorageWriter(f"{root}/2"), planner=planner)
    assert planner.from_cache
    for step in (0, 2):
        _assert_complete(memory_server, bucket, f"run/{step}")
        assert_loads(f"{root}/{step}", _state(step))


# --- on several ranks ------------------------------------------------------------------------------------


# --- the blocks through which tensors on a device come to the upload (here with CPU tensors) -------------


MIB = 2**20


def address(view: memoryview) -> int:
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()


def test_a_block_is_used_again_when_nothing_refers_to_its_bytes() -> None:
    ring = PinnedRing(1, pin=False)
    tensor = random_tensor((MIB,), torch.float32)
    first = ring.copy(tensor)
    part = first[100:200]
    where = address(first)
    del first
    second = ring.copy(tensor + 1)
    assert address(second) != where, "the block is still read through a slice: this one is in ordinary memory"
    assert bytes(part) == bits(tensor)[100:200]
    assert bytes(second) == bits(tensor + 1)
    del part, second
    assert address(ring.copy(tensor)) == where


def test_large_tensors_come_in_pieces_of_a_block() -> None:
    ring = PinnedRing(3, block_size=2 * MIB, pin=False)
    tensor = random_tensor((3000, 1001), torch.float32).t()
    pieces = [bytes(view) for view in iterate_bytes(tensor, ring.block_size, ring.copy)]
    assert max(map(len, pieces)) <= 2 * MIB
    assert b"".join(pieces) == bits(tensor.contiguous())
    assert shared_ring(10 * BLOCK_SIZE) is shared_ring(10 * BLOCK_SIZE), "the process keeps one"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_tensors_come_through_pinned_blocks() -> None:
    ring = PinnedRing(2, pin=True)
    tensor = random_tensor((3000, 1001), torch.float32).cuda()
    for source in (tensor, tensor.t(), tensor.bfloat16()):
        pieces = [bytes(view) for view in iterate_bytes(source, ring.block_size, ring.copy)]
        assert b"".join(pieces) == bits(source.cpu().contiguous())
