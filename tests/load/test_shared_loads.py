"""Loads of several ranks that need the same bytes: what is fetched, and that it arrives.

Starting processes costs more than a load: each test goes through many loads in one process group.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any
from unittest import mock

import boto3
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from dcp_s3 import S3StorageReader
from dcp_s3.load.exchange import Exchange
from dcp_s3.offline.copy import copy
from tests.end_to_end.states import assert_same, blank, random_tensor, random_values
from tests.faulty import BUCKET, FaultyServer
from tests.load.sources import RUN, assert_large, large_state, load_into, save
from tests.ranks import run_ranks

pytestmark = [pytest.mark.timeout(120)]
ROWS, COLUMNS = 1200, 400


def _fetched(server: FaultyServer, run: str) -> int:
    """Bytes of data that were asked for."""
    keys = f"{run}/__"
    log = [each for each in server.s3.request_log if each.operation == "GetObject" and each.key.startswith(keys)]
    ranges = [(each.range or "").removeprefix("bytes=").split("-") for each in log]
    return sum(int(last) - int(first) + 1 for first, last in ranges)


def _metadata_gets(server: FaultyServer, run: str) -> int:
    return sum((each.operation, each.key) == ("GetObject", f"{run}/.metadata") for each in server.s3.request_log)


def _place_on(full: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    # A copy: torch 2.9 takes the memory of a tensor that it need not cut.
    return distribute_tensor(full.clone(), mesh, list(placements), src_data_rank=None)


def _base_state() -> dict[str, Any]:
    return {
        **{f"norm{n}": random_values(n, 30 + n) for n in range(12)}, "large": random_values(50, ROWS, 900),
        "scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "step": 12, "text": "läuft",
    }  # fmt: skip


def _load_base(run: str, **options: Any) -> None:
    assert_same(load_into(f"{RUN}/{run}", blank(_base_state()), **options), _base_state())


class _ChangingPlanner(DefaultLoadPlanner):
    """Drops what the reader has put into the plan."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return LoadPlan(list(reversed(new_plan.items)))


def _loads() -> None:
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    full = {"sharded": random_values(60, ROWS, COLUMNS), "whole": random_values(61, ROWS, COLUMNS)}
    saved = save("saved", {**_base_state(), **full, "sharded": _place_on(full["sharded"], line, Shard(0))})
    rank = dist.get_rank()
    if rank == 0:  # so that their requests can be told apart
        for run in ("ddp", "hsdp", "tp", "off", "one_off", "changed", "strided", "urls_a", "urls_b"):
            copy(saved, f"{RUN}/{run}")
    dist.barrier()

    # DDP: everything on all ranks.
    everything = {**_base_state(), **full}
    assert_same(load_into(f"{RUN}/ddp", blank(everything)), everything)

    # HSDP: replicas of shards, of what one rank and of what four saved. TP: columns of rows that others saved.
    for run, mesh, placements in (("hsdp", square, (Replicate(), Shard(0))), ("tp", line, (Shard(1),))):
        state = {name: _place_on(blank(value), mesh, *placements) for name, value in full.items()}
        load_into(f"{RUN}/{run}", state)
        assert_same({name: value.full_tensor() for name, value in state.items()}, full, run)

    # Not shared: by the setting, on all ranks or on one; because a planner changes the plan.
    _load_base("off", load_sharing=False)
    _load_base("one_off", load_sharing=rank != 2)
    _load_base("changed", planner=_ChangingPlanner())

    # Into other dtypes and strides, and into memory that two entries share.
    target = torch.zeros(900, ROWS, dtype=torch.float64).t()
    both = torch.zeros(ROWS, COLUMNS)
    load_into(f"{RUN}/strided", {"large": target, "whole": both, "sharded": both})
    assert torch.equal(target, random_values(50, ROWS, 900).double())

    # Ranks that load from different URLs at once.
    _load_base(f"urls_{'a' if rank else 'b'}")


def test_each_byte_is_fetched_once(faulty: FaultyServer) -> None:
    run_ranks(4, _loads)
    stored = sum(size for key, size in faulty.s3.objects(BUCKET).items() if key.startswith("saved/__"))
    base = 4 * ROWS * 900
    whole = 4 * ROWS * COLUMNS
    most = {"ddp": stored, "hsdp": 2 * whole, "tp": 1.24 * 2 * whole, "strided": base + 2 * whole}
    for run, size in most.items():
        assert _fetched(faulty, run) <= 1.05 * size, run
    for run in ("off", "one_off", "changed"):
        assert _fetched(faulty, run) >= 4 * base, run
    assert {_metadata_gets(faulty, run) for run in (*most, "off", "one_off", "changed")} == {4}
    assert (_metadata_gets(faulty, "urls_a"), _metadata_gets(faulty, "urls_b")) == (3, 1)


def _foreign_loads(folder: Path) -> None:
    """Items that have to be decoded as a whole: small and needed as a whole, or not."""
    full = {"small": random_values(1, 300, 400), "sliced": random_values(2, 300, 40),
            "large": random_values(3, 1_500_000)}  # fmt: skip
    mesh = init_device_mesh("cpu", (3,))
    if dist.get_rank() == 0:
        dcp.save({**full, "text": "läuft"}, checkpoint_id=folder, no_dist=True)
        client = boto3.Session().client("s3", endpoint_url=os.environ["DCP_S3_ENDPOINT_URL"])
        for path in folder.iterdir():
            client.upload_file(str(path), BUCKET, f"foreign/{path.name}")
        client.close()
    dist.barrier()
    state = blank({**full, "text": "läuft"})
    state["sliced"] = _place_on(state["sliced"], mesh, Shard(1))
    load_into(f"{RUN}/foreign", state)
    state["sliced"] = state["sliced"].full_tensor()
    assert_same(state, {**full, "text": "läuft"})


def test_what_another_writer_stored_is_shared_where_it_is_small(faulty: FaultyServer, tmp_path: Path) -> None:
    run_ranks(3, _foreign_loads, tmp_path)
    small, sliced, large = 4 * 300 * 400, 4 * 300 * 40, 4 * 1_500_000
    assert 3 * large <= _fetched(faulty, "foreign") <= 3 * large + small + 3 * sliced + 100_000


def _random_loads(seed: int, count: int) -> None:
    """States and placements drawn from ``seed``, the same on all ranks; each rank's plan differs."""
    draw = random.Random(seed)
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    for number in range(count):
        shapes = [tuple(draw.randint(1, 70) for _ in range(draw.randint(1, 3))) for _ in range(8)]
        shapes.append((draw.randint(300, 500), draw.randint(300, 900)))
        dtypes = [draw.choice([torch.float32, torch.bfloat16, torch.uint8, torch.float64]) for _ in shapes]
        fulls = [random_tensor(shape, dtype, n) for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]

        def placed(full: torch.Tensor) -> torch.Tensor:
            mesh = draw.choice(meshes)
            choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(full.dim()))]
            placements = [draw.choice(choices) for _ in range(mesh.ndim)]
            return full.clone() if draw.random() < 0.2 else _place_on(full, mesh, *placements)

        url = save(f"random{seed}-{number}", {**{f"t{n}": placed(full) for n, full in enumerate(fulls)}, "n": number})
        state: dict[str, Any] = {f"t{n}": placed(torch.zeros_like(full)) for n, full in enumerate(fulls)}
        state["n"] = -1
        load_into(url, state, buffers=draw.choice([1, 10]) * 2**20)
        assert state["n"] == number
        for n, full in enumerate(fulls):
            found = state[f"t{n}"]
            found = found.full_tensor() if isinstance(found, DTensor) else found
            assert torch.equal(found.view(torch.uint8), full.view(torch.uint8)), (seed, number, n)


@pytest.mark.quick("1")
@pytest.mark.parametrize("seed", [1, 2])
def test_random_states_on_random_placements(faulty: FaultyServer, seed: int) -> None:
    run_ranks(4, _random_loads, seed, 6)


def _groups() -> dict[str, list[str]]:
    url = save("good", large_state())
    group, pair = dist.new_group([0, 1, 2]), dist.new_group([0, 2])
    names = {dist.group.WORLD: "default", group: "given", pair: "pair"}
    found: dict[str, list[str]] = {}
    init = Exchange.__init__

    def load(name: str, readers_group: Any = None, **arguments: Any) -> None:
        state, used = large_state(True), found.setdefault(name, [])

        def note(exchange: Exchange, group: Any, *others: Any, **more: Any) -> None:
            used.append(names[group])
            init(exchange, group, *others, **more)

        with mock.patch.object(Exchange, "__init__", note):
            dcp.load(state, storage_reader=S3StorageReader(url, process_group=readers_group), **arguments)
        assert_large(state)

    load("none")
    load("given", group)
    load("no_dist", group, no_dist=True)
    with mock.patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
        load("no gloo")
    dist.barrier()
    if dist.get_rank() != 1:
        load("part", process_group=pair)
        load("part, given", pair, process_group=pair)
    return found


def test_ranks_share_in_a_group_that_is_exactly_theirs(faulty: FaultyServer) -> None:
    for rank, found in enumerate(run_ranks(3, _groups, timeout=60)):
        assert found == {
            "none": ["default"], "given": ["given"], "no_dist": [], "no gloo": [],
            **({} if rank == 1 else {"part": [], "part, given": ["pair"]}),
        }  # fmt: skip
