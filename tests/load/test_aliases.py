"""Entries of a state that lie in the same memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from dcp_s3 import S3LoadPlanner, S3StorageReader, S3StorageWriter
from dcp_s3.errors import MissingKeysError
from tests.ranks import run_ranks
from tests.servers import S3Server

_SETTINGS = {"part_size": "5MiB", "concurrency": 16}


def save(url: str, state: dict[str, Any]) -> None:
    dcp.save(state, storage_writer=S3StorageWriter(url, settings=_SETTINGS))


def load(url: str, state: dict[str, Any], planner: S3LoadPlanner | None = None) -> None:
    dcp.load(state, storage_reader=S3StorageReader(url, settings=_SETTINGS), planner=planner)


def test_tied_parameters_of_one_content_are_read_at_once(memory_server: S3Server, root: str) -> None:
    weight = torch.arange(1000.0)
    save(f"{root}/tied", {"in": weight, "out": weight})
    memory_server.handle.reset_counters()
    tied = torch.zeros(1000)
    load(f"{root}/tied", {"in": tied, "out": tied})
    assert torch.equal(tied, weight)
    assert memory_server.handle.counters.requests["GetObject"] == 2  # .metadata, and both in one


def test_entries_that_interleave(memory_server: S3Server, root: str) -> None:
    saved = {"q": torch.full((8, 4), 1.0), "k": torch.full((8, 4), 2.0)}
    save(f"{root}/columns", saved)
    fused = torch.zeros(8, 8)
    load(f"{root}/columns", {"q": fused[:, :4], "k": fused[:, 4:]})
    assert torch.equal(fused, torch.cat([saved["q"], saved["k"]], dim=1))


class Wrapped(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapped) else value

        found = function(*map(unwrap, arguments), **(kwargs or {}))
        return Wrapped(found) if isinstance(found, torch.Tensor) and arguments[0] is not found else found


def test_a_tensor_without_memory_of_its_own_is_loaded(memory_server: S3Server, root: str) -> None:
    save(f"{root}/wrapped", {"w": torch.arange(10.0), "x": torch.ones(3)})
    wrapped, plain = Wrapped(torch.zeros(10)), torch.zeros(3)
    load(f"{root}/wrapped", {"w": wrapped, "x": plain})
    assert torch.equal(wrapped.inner, torch.arange(10.0))
    assert torch.equal(plain, torch.ones(3))


@pytest.mark.servers("memory")
@pytest.mark.parametrize("part", [slice(None), slice(2**20, 2**21)], ids=["all", "a part"])
def test_of_what_entries_share_the_last_one_in_the_plan_stays(root: str, part: slice) -> None:
    saved = {name: torch.full((3 * 2**20,), value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    saved["b"] = saved["b"][part]
    save(f"{root}/apart", saved)
    for _ in range(6):
        shared, other = torch.zeros(3 * 2**20), torch.zeros(3 * 2**20)
        load(f"{root}/apart", {"b": shared[part], "a": shared, "c": other})  # DCP sorts the names
        expected = saved["a"].clone()
        expected[part] = 2.0
        assert torch.equal(shared, expected)
        assert torch.equal(other, saved["c"])


@pytest.mark.servers("memory")
def test_a_name_that_is_not_saved_is_found_by_the_one_that_it_is_tied_to(root: str) -> None:
    save(f"{root}/one", {"in": torch.arange(6.0)})
    tied = torch.zeros(6)
    load(f"{root}/one", {"out": tied, "in": tied}, planner=S3LoadPlanner())
    assert tied.tolist() == [0, 1, 2, 3, 4, 5]
    for other in (tied[1:], tied.view(2, 3), tied.view(torch.int32), tied.clone()):
        with pytest.raises(CheckpointException) as raised:
            load(f"{root}/one", {"out": other, "in": tied}, planner=S3LoadPlanner())
        assert isinstance(raised.value.failures[0][0], MissingKeysError)


@pytest.mark.servers("memory")
def test_shards_are_tied_too(root: str) -> None:
    save(f"{root}/one", {"in": torch.arange(8.0).view(2, 4)})
    assert run_ranks(3, _load_tied, f"{root}/one") == [[[0, 1, 2, 3]], [[4, 5, 6, 7]], []]


def _load_tied(url: str) -> list[Any]:
    """What a rank has got, the last one nothing."""
    tied, other = (distribute_tensor(torch.zeros(2, 4), init_device_mesh("cpu", (3,)), [Shard(0)]) for _ in range(2))
    load(url, {"out": tied, "in": tied}, planner=S3LoadPlanner())
    with pytest.raises(CheckpointException):
        load(url, {"out": other, "in": tied}, planner=S3LoadPlanner())
    return tied.to_local().tolist()
