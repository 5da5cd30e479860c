"""Every kind of entry, saved and loaded on one rank, on every server."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from dcp_s3 import S3StorageReader, S3StorageWriter
from tests.end_to_end.states import DTYPES, assert_same, bits, blank, every_kind, random_tensor
from tests.spread import spread_out

SMALL = {"part_size": "5MiB", "concurrency": 3}


def save(state: Any, url: str, **arguments: Any) -> Any:
    return dcp.save(state, storage_writer=S3StorageWriter(url, **{"settings": SMALL, **arguments}))


def load(state: Any, url: str, **settings: Any) -> Any:
    dcp.load(state, storage_reader=S3StorageReader(url, settings={**SMALL, **settings}))
    return state


def test_every_kind(root: str) -> None:
    state = every_kind()
    save(state, root)
    assert_same(load(blank(state), root), state)


def test_multipart_objects(root: str, s3: Any, bucket: str) -> None:
    state = {
        "large": random_tensor((3000, 1000), torch.float32),
        "strided": random_tensor((2000, 1500), torch.float32).t(),
        "small": torch.ones(3),
    }
    save(state, f"{root}/ü b+%", max_objects=1)
    sizes = [o["Size"] for o in s3.list_objects_v2(Bucket=bucket)["Contents"] if o["Key"].endswith(".distcp")]
    assert len(sizes) == 1
    assert sizes[0] > 4 * 5 * 2**20
    assert_same(load(blank(state), f"{root}/ü b+%"), state)


def test_each_load_has_an_id_that_the_planner_sees(memory_server: Any, root: str) -> None:
    class Planner(DefaultLoadPlanner):
        def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
            seen.append(metadata.storage_meta.load_id)
            super().set_up_planner(state_dict, metadata, is_coordinator)

    seen: list[str] = []
    save({"x": torch.ones(3)}, root)
    reader = S3StorageReader(root)
    assert isinstance(reader.load_id, str)
    for _ in range(2):
        dcp.load({"x": torch.zeros(3)}, checkpoint_id=root, storage_reader=reader, planner=Planner())
        assert seen[-1] == reader.load_id
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"checksum": "none"},
        {"checksum": "crc32c"},
        {"concurrency": 1},
    ],
    ids=str,
)
def test_settings_that_change_what_is_written(memory_server: Any, root: str, settings: dict[str, Any]) -> None:
    state = {**every_kind(), "large": random_tensor((4000, 1000), torch.float32)}
    save(state, root, max_objects=7, settings={**SMALL, **settings})
    assert_same(load(blank(state), root), state)


def test_what_earlier_versions_spread_over_directories_is_read(memory_server: Any, root: str, s3: Any) -> None:
    state = {**every_kind(), "large": random_tensor((4000, 1000), torch.float32)}
    save(state, root, settings=SMALL)
    spread_out(s3, root)
    assert_same(load(blank(state), root), state)


def test_checkpoint_ids_with_a_writer_and_a_reader_without_url(memory_server: Any, root: str) -> None:
    writer, reader = S3StorageWriter(), S3StorageReader()
    for step in (1, 2):
        dcp.save({"x": torch.full((3,), step)}, checkpoint_id=f"{root}/step-{step}", storage_writer=writer)
    for step in (2, 1):
        state = {"x": torch.zeros(3, dtype=torch.int64)}
        dcp.load(state, checkpoint_id=f"{root}/step-{step}", storage_reader=reader)
        assert state["x"].tolist() == [step] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_of_a_saved_tensor(memory_server: Any, root: str, dtype: torch.dtype) -> None:
    """What resharding asks for: boxes of a saved chunk, dense and not, into all sorts of memory."""
    saved = random_tensor((6, 8, 5), dtype)
    save({"x": saved}, root)
    boxes = [
        (slice(0, 6), slice(0, 8), slice(0, 5)),
        (slice(2, 5), slice(0, 8), slice(0, 5)),
        (slice(1, 2), slice(3, 7), slice(0, 5)),
        (slice(0, 6), slice(2, 3), slice(0, 5)),
        (slice(1, 4), slice(2, 7), slice(1, 4)),
        (slice(5, 6), slice(7, 8), slice(4, 5)),
    ]
    for box in boxes:
        found = torch.zeros_like(saved[box].contiguous())
        _load_box(root, "x", box, found)
        assert bits(found) == bits(saved[box]), box
        strided = torch.zeros((*found.shape, 2), dtype=dtype)[..., 1]
        _load_box(root, "x", box, strided)
        assert bits(strided) == bits(saved[box]), box


def _load_box(url: str, fqn: str, box: tuple[slice, ...], into: torch.Tensor) -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner import LoadPlan
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    class Planner(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            chunk = ChunkStorageMetadata(
                torch.Size([s.start for s in box]), torch.Size([s.stop - s.start for s in box])
            )
            assert self.metadata is not None
            return LoadPlan(create_read_items_for_chunk_list(fqn, self.metadata.state_dict_metadata[fqn], [chunk]))

        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            return into

    dcp.load({fqn: torch.empty(0)}, storage_reader=S3StorageReader(url), planner=Planner())


def test_loading_into_strided_memory_and_views(memory_server: Any, root: str) -> None:
    state = {"a": random_tensor((30, 40), torch.float32), "b": random_tensor((10, 40), torch.float32, 1)}
    save(state, root)
    whole = torch.full((40, 40), -1.0)
    target = {"a": torch.zeros(40, 30).t(), "b": whole[5:15]}
    load(target, root)
    assert_same(target, state)
    assert (whole[:5] == -1).all()
    assert (whole[15:] == -1).all()


def test_no_bytes_but_the_needed_ones_are_fetched(memory_server: Any, root: str) -> None:
    state = {"a": random_tensor((1000, 1000), torch.float32), "b": random_tensor((1000, 1000), torch.float32, 1)}
    save(state, root)
    memory_server.handle.reset_counters()
    load({"a": torch.zeros(1000, 1000)}, root)
    assert memory_server.handle.counters.bytes_out < 4_000_000 + 30_000


def test_many_small_tensors_share_requests(memory_server: Any, root: str) -> None:
    state = {f"layer.{i}": random_tensor((64,), torch.float32, i) for i in range(2000)}
    save(state, root)
    memory_server.handle.reset_counters()
    assert_same(load(blank(state), root), state)
    assert memory_server.handle.counters.requests["GetObject"] <= 4


def test_a_small_save_takes_five_requests(memory_server: Any, root: str) -> None:
    memory_server.handle.reset_counters()
    save({"x": torch.ones(3), "n": 5}, root)
    assert dict(memory_server.handle.counters.requests) == {"GetObject": 2, "PutObject": 3}


def test_separate_gives_groups_their_own_objects(memory_server: Any, root: str) -> None:
    state = {
        "model": {"w": torch.ones(10), "b": torch.ones(3)},
        "model2": {"w": torch.ones(4)},
        "optimizer": {"m": torch.ones(10), "step": 5},
        "loader": {"position": 3},
    }
    metadata = save(state, root, separate=["model", ["optimizer", "loader"]])
    objects: dict[str, set[str]] = {}
    for index, info in metadata.storage_data.items():
        objects.setdefault(info.relative_path, set()).add(index.fqn.split(".")[0])
    assert sorted(map(sorted, objects.values())) == [["loader", "optimizer"], ["model"], ["model2"]]
    assert_same(load(blank(state), root), state)


class _Counter:
    """A Stateful object."""

    def __init__(self, value: int) -> None:
        self.value = torch.tensor(value)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "squares": [self.value.item() ** 2]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.squares = state["squares"]


def test_stateful_objects(memory_server: Any, root: str) -> None:
    save({"counter": _Counter(7)}, root)
    found = _Counter(0)
    load({"counter": found}, root)
    assert found.value.item() == 7
    assert found.squares == [49]


def test_a_model_and_its_optimizer(root: str) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.LayerNorm(30), torch.nn.Linear(30, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.randn(4, 20)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = make()
    save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, root)
    other, other_optimizer = make()
    state = {"model": other.state_dict(), "optimizer": other_optimizer.state_dict()}
    load(state, root)
    other_optimizer.load_state_dict(state["optimizer"])
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())


class _HalfPlanner(DefaultSavePlanner):
    """A planner that hands out other tensors than it planned, as torch's documentation shows."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        data = super().resolve_data(write_item)
        return data.half() if isinstance(data, torch.Tensor) else data


def test_a_planner_that_converts_while_saving(memory_server: Any, root: str) -> None:
    state = {"x": torch.randn(20, 30), "n": 3}
    dcp.save(state, storage_writer=S3StorageWriter(root), planner=_HalfPlanner())
    target = {"x": torch.zeros(20, 30), "n": 0}
    load(target, root)
    assert torch.equal(target["x"], state["x"].half().float())  # type: ignore[arg-type, union-attr]


def test_casting_on_load_when_allowed(memory_server: Any, root: str) -> None:
    state = {"x": torch.randn(20, 30)}
    save(state, root)
    target = {"x": torch.zeros(20, 30, dtype=torch.bfloat16)}
    load(target, root)
    assert torch.equal(target["x"], state["x"].bfloat16())


def test_an_empty_state(memory_server: Any, root: str) -> None:
    save({}, root)
    assert load({}, root) == {}


class Marked(torch.Tensor):
    """A subclass, which torch.save pickles as what it is."""


def test_subclasses_go_through_torch_save(memory_server: Any, root: str) -> None:
    state = {"m": torch.randn(5, 4).as_subclass(Marked)}
    save(state, root)
    target = {"m": torch.zeros(5, 4)}
    with torch.serialization.safe_globals([Marked]):
        load(target, root)
    assert_same(target["m"], state["m"].as_subclass(torch.Tensor))


def test_loading_in_inference_mode(memory_server: Any, root: str) -> None:
    """Which is a property of a thread, and the bytes arrive in others."""
    state = {"a": random_tensor((30, 40), torch.float32)}
    save(state, root)
    with torch.inference_mode():
        target = {"a": torch.zeros(40, 30).t()}
        load(target, root)
    assert_same(target, state)
