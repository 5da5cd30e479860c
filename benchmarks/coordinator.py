"""What thousands of ranks cost the one that coordinates them, in simulation: time and memory for each item.

``python -m benchmarks.coordinator --ranks 256,1024,4096 --items 500`` makes the plans and results of so many ranks in
one process and takes them through what DCP calls on the coordinator: ``prepare_global_plan`` and ``finish`` of a
writer, ``read_metadata`` and ``prepare_global_plan`` of a reader, and the plan that each rank makes for its load.
``.metadata`` goes to an in-memory S3 server in a process of its own; there are no data. DCP's own part of the work is
beside it.

A rank saves a chunk of 1 MiB of each of 480 tensors (as FSDP does), 12 tensors and 6 objects that all ranks have, and
2 objects of its own, or as much of that as ``--items`` says. What a rank sends was pickled, as by DCP's collectives.
Loads:

- ``same cut``: as it was saved. Only what all ranks have is shared.
- ``HSDP``: each chunk is needed by 8 ranks, of a checkpoint of an eighth of the ranks.
- ``replicated``: every rank needs all of a checkpoint of one rank.

Times are CPU time of this process, with Python's garbage collector on, as a training script has it; DCP's part is done
with the collector off, or it would take several times as long. The slope is that of the time from one number of ranks
to the next, for each item more; where work is linear, it is the time of an item.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import pickle
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import boto3
import torch
import torch.distributed as dist
from botocore.config import Config
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measure import Sample, measure
from benchmarks.report import machine
from benchmarks.save_load import RESULTS
from benchmarks.units import MIB
from dcp_s3 import S3LoadPlanner, S3StorageReader, S3StorageWriter, Settings
from dcp_s3.format.blocks import Blocks, block_size, make_storage_info
from dcp_s3.format.control_files import ObjectEntry
from dcp_s3.format.layout import METADATA, data_object
from dcp_s3.load.messages import Offer
from dcp_s3.s3.store import S3Store
from dcp_s3.save.objects import ItemWriteResult
from dcp_s3.url import parse_url
from tests.memory_s3 import MemoryS3Process

T = TypeVar("T")

_CHUNK = torch.Size((256, 1024))  # of fp32: 1 MiB
_NBYTES = 4 * _CHUNK.numel()
_NORM = torch.Size((1024,))
_REPLICAS = 8
_DCP = "DCP: "  # begins the names of steps that are not dcp_s3's


@dataclass(frozen=True)
class State:
    """The names of what a rank saves."""

    sharded: tuple[str, ...]
    replicated: tuple[str, ...]
    objects: tuple[str, ...]
    own: int
    """Number of objects that this rank alone has."""

    @classmethod
    def of(cls, items: int) -> State:
        """A state with so many items on each rank."""
        own, objects, replicated = (max(1, items * share // 500) for share in (2, 6, 12))
        return cls(
            tuple(f"model.layers.{n // 10}.block.{n % 10}.weight" for n in range(items - own - objects - replicated)),
            tuple(f"model.layers.{n}.norm.weight" for n in range(replicated)),
            tuple(f"optimizer.param_groups.{n}.step" for n in range(objects)),
            own,
        )

    def own_names(self, rank: int) -> list[str]:
        """Names of the objects that only ``rank`` has."""
        return [f"loader.rank_{rank}.state_{n}" for n in range(self.own)]

    def stored(self, ranks: int) -> int:
        """Items in a checkpoint of so many ranks."""
        return len(self.replicated) + len(self.objects) + ranks * (len(self.sharded) + self.own)


@dataclass(frozen=True)
class Step:
    """What one call costs."""

    items: int
    """Items that it is about: stored ones, or those that all ranks read."""
    sample: Sample

    @property
    def microseconds(self) -> float:
        """CPU time of an item."""
        return 1e6 * self.sample.cpu_seconds / self.items


Steps = dict[str, Step]


class _Clock:
    """Calls functions, and notes what each call cost."""

    def __init__(self, items: int) -> None:
        self.items = items
        """Items that the next calls are about."""
        self.steps = Steps()

    def __call__(self, name: str, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function for the step ``name``."""
        found: list[T] = []
        sample = measure(lambda: found.append(function(*arguments)))
        self.steps[name] = Step(self.items, sample)
        return found[0]


def simulate(ranks: int, items: int, url: str, settings: Settings) -> Steps:
    """Save and load a checkpoint of so many ranks at ``url``."""
    state = State.of(items)
    clock = _Clock(state.stored(ranks))
    _save(clock, state, ranks, url, settings)
    _load(clock, state, ranks, S3StorageReader(url, settings=settings))
    return clock.steps


def _save(clock: _Clock, state: State, ranks: int, url: str, settings: Settings) -> None:
    writers = [_writer(url, rank, settings) for rank in range(ranks)]
    with _no_collector():
        plans = (writer.prepare_local_plan(local_plan(state, ranks, rank)) for rank, writer in enumerate(writers))
        sent = list(map(pickle.dumps, plans))
    local_plans: list[SavePlan] = clock(f"{_DCP}unpickle the plans", _receive, sent)
    local_plans = clock("prepare_global_plan", writers[0].prepare_global_plan, local_plans)
    global_plans, metadata = clock(f"{_DCP}create_global_plan", _create_global_plan, local_plans)
    with _no_collector():
        sent = [pickle.dumps(results_of(rank, plan)) for rank, plan in enumerate(global_plans)]
    del local_plans, global_plans
    results: list[list[WriteResult]] = clock(f"{_DCP}unpickle the results", _receive, sent)
    del sent
    clock("finish", writers[0].finish, metadata, results)

    # DCP's cache of plans: empty plans from the ranks, and the metadata object of the save before.
    S3Store(parse_url(url).bucket, settings).delete([parse_url(url).key(METADATA)])
    writers = [_writer(url, rank, settings) for rank in range(ranks)]
    cached = [writer.prepare_local_plan(SavePlan([], usable=False)) for writer in writers]
    clock("cached plan: prepare_global_plan", writers[0].prepare_global_plan, cached)
    clock("cached plan: finish", writers[0].finish, metadata, results)


def _create_global_plan(plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    with _no_collector():
        return DefaultSavePlanner().create_global_plan(plans)


def _receive(sent: list[bytes]) -> list[Any]:
    with _no_collector():
        return list(map(pickle.loads, sent))


def _load(clock: _Clock, state: State, ranks: int, reader: S3StorageReader) -> None:
    metadata = clock("read_metadata", reader.read_metadata)
    with _mesh_of(ranks):
        planner = S3LoadPlanner(allow_partial_load=True)
        planner.set_up_planner(_local_state(state, ranks), metadata, True)
        plan = clock("load plan of a rank", planner.create_local_plan)
    if plan.items != pickle.loads(read_plan(state, ranks, 0)).items[: len(plan.items)]:
        raise RuntimeError("the simulated plans of a load are not those that a planner makes")
    del planner
    for name, saved in (("same cut", ranks), ("HSDP", max(1, ranks // _REPLICAS)), ("replicated", 1)):
        reader.set_up_storage_reader(metadata if saved == ranks else _checkpoint(state, saved), True)
        with _no_collector():
            sent = [read_plan(state, saved, shard) for shard in range(saved)]
            plans = [pickle.loads(sent[rank * saved // ranks]) for rank in range(ranks)]
        del sent
        for rank, plan in enumerate(plans):
            plan.storage_data = Offer(rank, shares=True, checkpoint="a", version=1, world_size=ranks, given=0)
        clock.items = sum(len(plan.items) for plan in plans)
        clock(f"share a load: {name}", reader.prepare_global_plan, plans)


# --- what ranks send --------------------------------------------------------------------------------


def local_plan(state: State, ranks: int, rank: int) -> SavePlan:
    """What torch's planner makes of the state of a rank."""
    rows, columns = _CHUNK
    whole = (ranks * rows, columns)
    items = [_write_item(WriteItemType.SHARD, fqn, (rank * rows, 0), _CHUNK, whole) for fqn in state.sharded]
    items += [_write_item(WriteItemType.TENSOR, fqn, (0,), _NORM, _NORM) for fqn in state.replicated]
    objects = [*state.objects, *state.own_names(rank)]
    items += [WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO) for fqn in objects]
    return SavePlan(items, planner_data={item.index.fqn: tuple(item.index.fqn.split(".")) for item in items})


def _write_item(
    kind: WriteItemType, fqn: str, offset: Sequence[int], sizes: Sequence[int], whole: Sequence[int]
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes))
    data = TensorWriteData(chunk, TensorProperties(torch.float32), torch.Size(whole))
    return WriteItem(MetadataIndex(fqn, offset), kind, tensor_data=data)


def results_of(rank: int, plan: SavePlan) -> list[WriteResult]:
    """What a rank's `write_data` returns: one object with all items."""
    path, offset, results = data_object(rank, 0, secrets.token_hex(8)), 0, []
    entry = ObjectEntry(path, _NBYTES * len(plan.items), os.urandom(8).hex())
    for item in plan.items:
        nbytes = 0 if item.tensor_data is None else 4 * item.tensor_data.chunk.sizes.numel()
        block = block_size(nbytes) if nbytes else 0
        blocks = Blocks(block, os.urandom(8 * (-(-nbytes // block) - 1)), 0) if nbytes > block else None
        crc = int.from_bytes(os.urandom(8), "big")
        raw_offset = 448 if nbytes else None
        info = make_storage_info(path, offset, nbytes + 1024, raw_offset=raw_offset, crc64nvme=crc, blocks=blocks)
        results.append(ItemWriteResult(item.index, nbytes + 1024, info, None if results else entry))
        offset += nbytes + 1024
    return results


def read_plan(state: State, saved: int, shard: int) -> bytes:
    """The pickled plan of a rank that loads one of ``saved`` shards."""
    items = _read_items(state.sharded, torch.Size((shard * _CHUNK[0], 0)), shard, _CHUNK)
    items += _read_items(state.replicated, torch.Size((0,)), 0, _NORM)
    zero = torch.Size((0,))
    for fqn in (*state.objects, *state.own_names(shard)):
        items.append(ReadItem(LoadItemType.BYTE_IO, MetadataIndex(fqn), zero, MetadataIndex(fqn), zero, zero))
    return pickle.dumps(LoadPlan(items))


def _read_items(names: Sequence[str], offset: torch.Size, number: int, sizes: torch.Size) -> list[ReadItem]:
    tensor, begin = LoadItemType.TENSOR, torch.Size([0] * len(sizes))
    pairs = [(MetadataIndex(fqn, offset, 0), MetadataIndex(fqn, offset, number)) for fqn in names]
    return [ReadItem(tensor, dest, begin, storage, begin, sizes) for dest, storage in pairs]


# --- the coordinator's surroundings -----------------------------------------------------------------


def _writer(url: str, rank: int, settings: Settings) -> S3StorageWriter:
    writer = S3StorageWriter(url, settings=settings)
    writer.set_up_storage_writer(rank == 0, rank=rank)
    return writer


def _checkpoint(state: State, ranks: int) -> Metadata:
    """The metadata of a checkpoint of so many ranks."""
    with _no_collector():
        plans = [local_plan(state, ranks, rank) for rank in range(ranks)]
        plans, metadata = DefaultSavePlanner().create_global_plan(plans)
        results = [result for rank, plan in enumerate(plans) for result in results_of(rank, plan)]
        metadata.storage_data = {result.index: result.storage_data for result in results}  # type: ignore[attr-defined]
        return metadata


def _local_state(state: State, ranks: int) -> dict[str, Any]:
    """The tensors that the first rank loads into."""
    mesh, size = init_device_mesh("cpu", (ranks,)), torch.Size((ranks * _CHUNK[0], _CHUNK[1]))
    local = torch.empty(_CHUNK)
    sharded = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=size, stride=(_CHUNK[1], 1))
    return dict.fromkeys(state.sharded, sharded) | dict.fromkeys(state.replicated, torch.empty(_NORM))


@contextlib.contextmanager
def _mesh_of(ranks: int) -> Iterator[None]:
    """A process group of so many ranks, of which only the first is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """For what is not measured for dcp_s3: with the collector, DCP's part takes several times as long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# --- the report -------------------------------------------------------------------------------------


def show(found: dict[int, Steps], console: Console) -> None:
    """Print a table with a line for each step."""
    sizes = sorted(found)
    table = Table("us an item", title="What the coordinator does, CPU time")
    for ranks in sizes:
        table.add_column(f"{ranks} ranks", justify="right")
    for before, ranks in itertools.pairwise(sizes):
        table.add_column(f"slope {before}-{ranks}", justify="right")
    table.add_column(f"seconds, {sizes[-1]}", justify="right")
    table.add_column(f"peak MiB, {sizes[-1]}", justify="right")
    for name, last in found[sizes[-1]].items():
        cells = [f"{found[ranks][name].microseconds:.2f}" for ranks in sizes]
        cells += [f"{slope(found[a][name], found[b][name]):.2f}" for a, b in itertools.pairwise(sizes)]
        cells += [f"{last.sample.cpu_seconds:.2f}", f"{last.sample.peak_bytes / MIB:.0f}"]
        table.add_row(name, *cells, style="dim" if name.startswith(_DCP) else None)
    console.print(table)


def slope(few: Step, many: Step) -> float:
    """Microseconds for each item more."""
    return 1e6 * (many.sample.cpu_seconds - few.sample.cpu_seconds) / (many.items - few.items)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark as the command line says; print a table, write JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coordinator", description="What many ranks cost their coordinator."
    )
    parser.add_argument(
        "--ranks",
        type=lambda text: sorted({int(number) for number in text.split(",")}),
        default=[256, 1024],
        metavar="N,...",
        help="default: 256,1024",
    )
    parser.add_argument("--items", type=int, default=500, help="of a rank; default: %(default)s")
    parser.add_argument("--json", type=Path, default=RESULTS / "coordinator.json", help="default: %(default)s")
    options = parser.parse_args(arguments)
    found: dict[int, Steps] = {}
    os.environ |= {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "benchmark", "AWS_REGION": "us-east-1"}
    for ranks in options.ranks:
        with MemoryS3Process() as server:
            settings = Settings(endpoint_url=server.endpoint_url)
            config = Config(s3={"addressing_style": "path"})
            boto3.client("s3", endpoint_url=server.endpoint_url, config=config).create_bucket(Bucket="bench")
            found[ranks] = simulate(ranks, options.items, "s3://bench/run/step-1", settings)
        show(found, Console(width=None if sys.stdout.isatty() else 140))
        _write(options.json, options.items, found)


def _write(file: Path, items: int, found: dict[int, Steps]) -> None:
    ranks = {ranks: {name: asdict(step) for name, step in steps.items()} for ranks, steps in found.items()}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": machine(), "items": items, "ranks": ranks}, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
