"""DCP's plan caching: a save whose plan comes out of the cache is as complete in itself as any other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.format.control_files import Manifest
from dcp_s3.format.metadata import load_metadata
from tests.ranks import run_ranks
from tests.servers import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

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


def _assert_loads(url: str, step: int, **kwargs: Any) -> None:
    expected = _state(step, **kwargs)
    found = {
        name: torch.zeros_like(value) if isinstance(value, torch.Tensor) else -1 for name, value in expected.items()
    }
    dcp.load(found, storage_reader=S3StorageReader(url))
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), (url, name)
        else:
            assert found[name] == value, (url, name)


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


def _new_writer() -> Callable[[str], dict[str, Any]]:
    return lambda url: {"storage_writer": S3StorageWriter(url)}


def _one_writer() -> Callable[[str], dict[str, Any]]:
    writer = S3StorageWriter()
    return lambda url: {"storage_writer": writer, "checkpoint_id": url}


@pytest.mark.parametrize("make", [_new_writer, _one_writer], ids=["a writer each", "one writer"])
def test_each_checkpoint_is_complete_in_itself(
    root: str, bucket: str, memory_server: S3Server, make: Callable[[], Callable[[str], dict[str, Any]]]
) -> None:
    target = make()
    nonces: list[set[str]] = []
    for step, shape in enumerate(_SAVES):
        planner = _CountingPlanner()
        dcp.save(_state(step, **shape), planner=planner, **target(f"{root}/{step}"))
        assert planner.from_cache is _FROM_CACHE[step], step
        nonces.append(_assert_complete(memory_server, bucket, f"run/{step}"))
    # At the end, when all later saves have been through the cache.
    for step, shape in enumerate(_SAVES):
        assert _assert_complete(memory_server, bucket, f"run/{step}") == nonces[step]
        _assert_loads(f"{root}/{step}", step, **shape)
    assert len(set().union(*nonces)) == sum(map(len, nonces))


def test_overwriting_with_a_cached_plan(root: str, bucket: str, memory_server: S3Server) -> None:
    writer = S3StorageWriter(root, overwrite=True)
    seen: set[str] = set()
    for step, shape in enumerate(_SAVES):
        planner = _CountingPlanner()
        dcp.save(_state(step, **shape), storage_writer=writer, planner=planner)
        assert planner.from_cache is _FROM_CACHE[step], step
        # Complete also means: nothing is left of the save before.
        nonces = _assert_complete(memory_server, bucket, "run")
        assert seen.isdisjoint(nonces)
        seen |= nonces
        _assert_loads(root, step, **shape)


def test_a_save_that_failed_leaves_a_cache_that_works(root: str, bucket: str, memory_server: S3Server) -> None:
    dcp.save(_state(0), storage_writer=S3StorageWriter(f"{root}/0"), planner=_CountingPlanner())
    with pytest.raises(BaseException, match="BucketNotFoundError"):
        dcp.save(_state(1), storage_writer=S3StorageWriter("s3://no-such-bucket-here/1"), planner=_CountingPlanner())
    planner = _CountingPlanner()
    dcp.save(_state(2), storage_writer=S3StorageWriter(f"{root}/2"), planner=planner)
    assert planner.from_cache
    for step in (0, 2):
        _assert_complete(memory_server, bucket, f"run/{step}")
        _assert_loads(f"{root}/{step}", step)


def test_async_saves_with_a_cached_plan(root: str, bucket: str, memory_server: S3Server) -> None:
    for step in range(3):
        writer = S3StorageWriter(f"{root}/{step}")
        dcp.async_save(_state(step), storage_writer=writer, planner=_CountingPlanner()).result(60)
    for step in range(3):
        _assert_complete(memory_server, bucket, f"run/{step}")
        _assert_loads(f"{root}/{step}", step)


# --- on several ranks ------------------------------------------------------------------------------------


def _distributed_state(step: int, extra: bool) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = torch.full((5, 4), float(step))
    state: dict[str, Any] = {
        "sharded": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None),
        "replicated": torch.full((9,), step),
        "step": step,
        f"of_{dist.get_rank()}": torch.full((2,), step + dist.get_rank()),
    }
    if extra and dist.get_rank() == 1:
        state["only_of_1"] = torch.full((3,), step)
    return state


def _save_on_ranks(url: str, one_writer: bool) -> list[bool]:
    make = _one_writer() if one_writer else _new_writer()
    from_cache = []
    # The third changes the plan of one rank only.
    for step, extra in enumerate((False, False, True, True)):
        planner = _CountingPlanner()
        dcp.save(_distributed_state(step, extra), planner=planner, **make(f"{url}/{step}"))
        from_cache.append(planner.from_cache)
    for step, extra in enumerate((False, False, True, True)):
        found = {
            "sharded": _distributed_state(-1, False)["sharded"],
            "replicated": torch.full((9,), -1),
            "step": -1,
            **{f"of_{rank}": torch.full((2,), -1) for rank in range(2)},
        }
        if extra:
            found["only_of_1"] = torch.full((3,), -1)
        dcp.load(found, storage_reader=S3StorageReader(f"{url}/{step}"))
        assert torch.equal(found["sharded"].full_tensor(), torch.full((5, 4), float(step)))
        assert torch.equal(found["replicated"], torch.full((9,), step))
        assert found["step"] == step
        for rank in range(2):
            assert torch.equal(found[f"of_{rank}"], torch.full((2,), step + rank))
        if extra:
            assert torch.equal(found["only_of_1"], torch.full((3,), step))
    return from_cache


@pytest.mark.quick("one writer")
@pytest.mark.parametrize("one_writer", [False, True], ids=["a writer each", "one writer"])
def test_on_two_ranks(root: str, bucket: str, memory_server: S3Server, one_writer: bool) -> None:
    first, second = run_ranks(2, _save_on_ranks, root, one_writer)
    assert first == [False, True, True, True]
    assert second == [False, True, False, True]
    nonces = [_assert_complete(memory_server, bucket, f"run/{step}") for step in range(4)]
    assert len(set().union(*nonces)) == sum(map(len, nonces))
