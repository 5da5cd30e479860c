"""Every kind of entry, saved and loaded on one rank, on every server."""

from __future__ import annotations

from typing import Any

import torch

from tests.end_to_end import loads
from tests.end_to_end.loads import assert_loads
from tests.end_to_end.states import every_kind, random_tensor
from tests.spread import spread_out

SMALL = {"part_size": "5MiB", "concurrency": 3}


def save(state: Any, url: str, **writer: Any) -> Any:
    return loads.save(state, url, settings=SMALL, **writer)


def test_every_kind(root: str) -> None:
    state = every_kind()
    save(state, root)
    assert_loads(root, state, settings=SMALL)
    save({}, f"{root}/empty")
    assert_loads(f"{root}/empty", {})


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
    assert_loads(f"{root}/ü b+%", state, settings=SMALL)


def test_what_earlier_versions_spread_over_directories_is_read(memory_server: Any, root: str, s3: Any) -> None:
    state = {**every_kind(), "large": random_tensor((4000, 1000), torch.float32)}
    save(state, root)
    spread_out(s3, root)
    assert_loads(root, state, settings=SMALL)


def test_no_bytes_but_the_needed_ones_are_fetched_by_few_requests(memory_server: Any, root: str) -> None:
    server = memory_server.handle
    state = {"a": random_tensor((1000, 1000), torch.float32), "b": random_tensor((1000, 1000), torch.float32, 1)}
    save(state, f"{root}/two")
    server.reset_counters()
    loads.load({"a": torch.zeros(1000, 1000)}, f"{root}/two", settings=SMALL)
    assert server.counters.bytes_out < 4_000_000 + 30_000

    state = {f"layer.{i}": random_tensor((64,), torch.float32, i) for i in range(2000)}
    save(state, f"{root}/many")
    server.reset_counters()
    assert_loads(f"{root}/many", state, settings=SMALL)
    assert server.counters.requests["GetObject"] <= 4

    server.reset_counters()
    save({"x": torch.ones(3), "n": 5}, f"{root}/small")
    assert dict(server.counters.requests) == {"GetObject": 2, "PutObject": 3}
