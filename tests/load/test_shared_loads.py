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
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.load.exchange import Exchange
from tests.end_to_end.states import random_tensor, random_values
from tests.faulty import BUCKET
from tests.load.conftest import RUN, SMALL, Recording, copy_checkpoint, large_state, load_into, place_on
from tests.ranks import run_ranks

pytestmark = [pytest.mark.timeout(120)]
ROWS, COLUMNS = 1200, 400


def _base_state(blank: bool) -> dict[str, Any]:
    state: dict[str, Any] = {f"norm{n}": random_values(n, 30 + n) * (not blank) for n in range(12)}
    state["large"] = torch.zeros(ROWS, 900) if blank else random_values(50, ROWS, 900)
    state["scalar"] = torch.tensor(0.0 if blank else 3.5)
    state["empty"] = torch.empty(0, 4)
    state["step"] = 0 if blank else 12
    state["text"] = "" if blank else "läuft"
    return state


def _assert_base(state: dict[str, Any]) -> None:
    expected = _base_state(False)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(state[name], value), name
        else:
            assert state[name] == value, name


def _save_all(mesh: DeviceMesh) -> None:
    state = _base_state(False)
    state["sharded"] = place_on(random_values(60, ROWS, COLUMNS), mesh, Shard(0))
    state["whole"] = random_values(61, ROWS, COLUMNS)
    dcp.save(state, storage_writer=S3StorageWriter(f"{RUN}/saved", settings=SMALL))


class _ChangingPlanner(DefaultLoadPlanner):
    """Drops what the reader has put into the plan."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        return LoadPlan(list(reversed(new_plan.items)))


def _loads() -> None:
    line = init_device_mesh("cpu", (4,))
    square = init_device_mesh("cpu", (2, 2))
    _save_all(line)
    copy_checkpoint(
        "saved", "ddp", "hsdp", "tp", "off", "one_off", "changed", "strided",
        "urls_a", "urls_b",
    )  # fmt: skip
    rank = dist.get_rank()

    # DDP: everything on all ranks.
    state = load_into(
        f"{RUN}/ddp", {**_base_state(True), "sharded": torch.zeros(ROWS, COLUMNS), "whole": torch.zeros(ROWS, COLUMNS)}
    )
    _assert_base(state)
    assert torch.equal(state["sharded"], random_values(60, ROWS, COLUMNS))
    assert torch.equal(state["whole"], random_values(61, ROWS, COLUMNS))

    # HSDP: replicas of shards, of what one rank and of what four saved. TP: columns of rows that others saved.
    blank = torch.zeros(ROWS, COLUMNS)
    for run, mesh, placements in (("hsdp", square, (Replicate(), Shard(0))), ("tp", line, (Shard(1),))):
        state = {name: place_on(blank, mesh, *placements) for name in ("sharded", "whole")}
        load_into(f"{RUN}/{run}", state)
        for seed, name in ((60, "sharded"), (61, "whole")):
            assert torch.equal(state[name].full_tensor(), random_values(seed, ROWS, COLUMNS)), (run, name)

    # Not shared: by the setting, on all ranks or on one; because a planner changes the plan.
    _assert_base(load_into(f"{RUN}/off", _base_state(True), load_sharing=False))
    _assert_base(load_into(f"{RUN}/one_off", _base_state(True), load_sharing=rank != 2))
    _assert_base(load_into(f"{RUN}/changed", _base_state(True), planner=_ChangingPlanner()))

    # Into other dtypes and strides, and into memory that two entries share.
    target = torch.zeros(900, ROWS, dtype=torch.float64).t()
    both = torch.zeros(ROWS, COLUMNS)
    load_into(f"{RUN}/strided", {"large": target, "whole": both, "sharded": both})
    assert torch.equal(target, random_values(50, ROWS, 900).double())

    # Ranks that load from different URLs at once.
    _assert_base(load_into(f"{RUN}/urls_{'a' if rank else 'b'}", _base_state(True)))


def test_each_byte_is_fetched_once(recording: Recording) -> None:
    run_ranks(4, _loads)
    stored = recording.stored("saved")
    base = 4 * ROWS * 900
    whole = 4 * ROWS * COLUMNS
    assert recording.fetched("ddp") <= 1.05 * stored
    assert recording.fetched("hsdp") <= 1.05 * 2 * whole
    assert recording.fetched("tp") <= 1.3 * 2 * whole
    for run in ("ddp", "hsdp", "tp", "strided", "changed", "off", "one_off"):
        assert recording.metadata_gets(run) == 4, run
    assert recording.fetched("strided") <= 1.05 * (base + 2 * whole)
    for run in ("off", "one_off", "changed"):
        assert recording.fetched(run) >= 4 * base, run
    assert (recording.metadata_gets("urls_a"), recording.metadata_gets("urls_b")) == (3, 1)


def _foreign_loads(folder: Path) -> None:
    """Items that have to be decoded as a whole: small and needed as a whole, or not."""
    full = {
        "small": random_values(1, 300, 400),
        "sliced": random_values(2, 300, 40),
        "large": random_values(3, 1_500_000),
    }
    mesh = init_device_mesh("cpu", (3,))
    if dist.get_rank() == 0:
        dcp.save({**full, "text": "läuft"}, checkpoint_id=folder, no_dist=True)
        client = boto3.Session().client("s3", endpoint_url=os.environ["DCP_S3_ENDPOINT_URL"])
        for path in folder.iterdir():
            client.upload_file(str(path), BUCKET, f"foreign/{path.name}")
        client.close()
    dist.barrier()
    state = {name: torch.zeros_like(value) for name, value in full.items()}
    state["sliced"] = place_on(state["sliced"], mesh, Shard(1))
    load_into(f"{RUN}/foreign", state | {"text": ""})
    for name in ("small", "large"):
        assert torch.equal(state[name], full[name]), name
    assert isinstance(state["sliced"], DTensor)
    assert torch.equal(state["sliced"].full_tensor(), full["sliced"])


def test_what_another_writer_stored_is_shared_where_it_is_small(recording: Recording, tmp_path: Path) -> None:
    run_ranks(3, _foreign_loads, tmp_path)
    small, sliced, large = 4 * 300 * 400, 4 * 300 * 40, 4 * 1_500_000
    assert 3 * large <= recording.fetched("foreign") <= 3 * large + small + 3 * sliced + 100_000


def _random_loads(seed: int, count: int) -> None:
    """States and placements drawn from ``seed``, the same on all ranks; each rank's plan differs."""
    draw = random.Random(seed)
    meshes = [init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))]
    for number in range(count):
        url = f"{RUN}/random{seed}-{number}"
        shapes = [tuple(draw.randint(1, 70) for _ in range(draw.randint(1, 3))) for _ in range(8)]
        shapes.append((draw.randint(300, 500), draw.randint(300, 900)))
        dtypes = [draw.choice([torch.float32, torch.bfloat16, torch.uint8, torch.float64]) for _ in shapes]
        fulls = [random_tensor(shape, dtype, n) for n, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]

        def placed(full: torch.Tensor) -> torch.Tensor:
            mesh = draw.choice(meshes)
            choices: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(full.dim()))]
            placements = [draw.choice(choices) for _ in range(mesh.ndim)]
            return full.clone() if draw.random() < 0.2 else place_on(full, mesh, *placements)

        saved = {f"t{n}": placed(full) for n, full in enumerate(fulls)}
        dcp.save({**saved, "n": number}, storage_writer=S3StorageWriter(url, settings=SMALL))
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
def test_random_states_on_random_placements(recording: Recording, seed: int) -> None:
    run_ranks(4, _random_loads, seed, 6)


def _groups() -> dict[str, list[str]]:
    url = f"{RUN}/good"
    dcp.save(large_state(False), storage_writer=S3StorageWriter(url, settings=SMALL))
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
        for key, value in large_state(False).items():
            assert torch.equal(state[key], value), key

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


def test_ranks_share_in_a_group_that_is_exactly_theirs(recording: Recording) -> None:
    for rank, found in enumerate(run_ranks(3, _groups, timeout=60)):
        assert found == {
            "none": ["default"], "given": ["given"], "no_dist": [], "no gloo": [],
            **({} if rank == 1 else {"part": [], "part, given": ["pair"]}),
        }  # fmt: skip
