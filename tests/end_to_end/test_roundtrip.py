"""Every kind of entry, saved and loaded on one rank, on every server."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from dcp_s3 import S3StorageReader, S3StorageWriter
from tests.end_to_end import loads
from tests.end_to_end.states import assert_same, blank, every_kind, random_tensor
from tests.spread import spread_out

SMALL = {"part_size": "5MiB", "concurrency": 3}


def save(state: Any, url: str, **writer: Any) -> Any:
    return loads.save(state, url, **{"settings": SMALL, **writer})


def load(state: Any, url: str) -> Any:
    return loads.load(state, url, settings=SMALL)


def test_every_kind(root: str) -> None:
    state = every_kind()
    save(state, root)
    assert_same(load(blank(state), root), state)
    save({}, f"{root}/empty")
    assert load({}, f"{root}/empty") == {}


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


def test_what_earlier_versions_spread_over_directories_is_read(memory_server: Any, root: str, s3: Any) -> None:
    state = {**every_kind(), "large": random_tensor((4000, 1000), torch.float32)}
    save(state, root, settings=SMALL)
    spread_out(s3, root)
    assert_same(load(blank(state), root), state)


def test_no_bytes_but_the_needed_ones_are_fetched_by_few_requests(memory_server: Any, root: str) -> None:
    server = memory_server.handle
    state = {"a": random_tensor((1000, 1000), torch.float32), "b": random_tensor((1000, 1000), torch.float32, 1)}
    save(state, f"{root}/two")
    server.reset_counters()
    load({"a": torch.zeros(1000, 1000)}, f"{root}/two")
    assert server.counters.bytes_out < 4_000_000 + 30_000

    state = {f"layer.{i}": random_tensor((64,), torch.float32, i) for i in range(2000)}
    save(state, f"{root}/many")
    server.reset_counters()
    assert_same(load(blank(state), f"{root}/many"), state)
    assert server.counters.requests["GetObject"] <= 4

    server.reset_counters()
    save({"x": torch.ones(3), "n": 5}, f"{root}/small")
    assert dict(server.counters.requests) == {"GetObject": 2, "PutObject": 3}


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


class Marked(torch.Tensor):
    """A subclass, which torch.save pickles as what it is."""


def test_subclasses_go_through_torch_save(memory_server: Any, root: str) -> None:
    state = {"m": torch.randn(5, 4).as_subclass(Marked)}
    save(state, root)
    target = {"m": torch.zeros(5, 4)}
    with torch.serialization.safe_globals([Marked]):
        load(target, root)
    assert_same(target["m"], state["m"].as_subclass(torch.Tensor))
