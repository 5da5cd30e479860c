"""What a save writes: which item goes into which object, also by a plan out of a cache."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlanner, TensorWriteData, WriteItem, WriteItemType

from dcp_s3 import S3StorageWriter, errors, verify
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.metadata import load_metadata
from dcp_s3.save.plan import item_size, plan_buckets
from dcp_s3.save.save import Save
from tests.end_to_end.loads import assert_loads
from tests.end_to_end.states import random_tensor
from tests.ranks import run_ranks
from tests.servers import S3Server


def tensor_item(fqn: str, rows: int, whole: int | None = None) -> WriteItem:
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
