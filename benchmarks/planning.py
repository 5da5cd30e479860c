"""What it takes to plan a load: torch's DefaultLoadPlanner against S3LoadPlanner.

``python -m benchmarks.planning`` plans the load of ``--tensors`` tensors, each saved in 80 chunks, into ShardedTensors
with 80 local shards each (one process, a gloo group of its own; no storage). Cases, saved -> local:

- ``rows -> rows``: both cut along dimension 0, which is the longest: what torch's sweep is made for.
- ``rows -> other rows``: 80 -> 79, so that most local chunks need two saved ones.
- ``rows -> rows, wide``: the same cut, but dimension 1 is longer: torch sweeps along that, and compares all pairs.
- ``columns -> columns, tall``: likewise, the other way round.
- ``grid -> grid``: a square, 8 x 10 -> 10 x 8.
- ``rows -> columns``: every chunk overlaps every other: 6400 items a tensor. A tenth of the tensors.
- ``all different``: ``rows -> rows, wide`` where no two tensors are cut alike, so nothing is found twice.

Times are of the thread's CPU, in turns, medians; collecting the garbage of a plan counts. ``items`` is the time that
torch's constructors alone need for the plan's ReadItems, without any search: less than that takes another way to make
them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from benchmarks.report import machine
from dcp_s3 import S3LoadPlanner

RESULTS = Path(__file__).resolve().parent / "results"

Shape = tuple[int, int]


@dataclass(frozen=True)
class Case:
    """Tensors of one kind.

    Attributes:
        name: for the table.
        shape: of each tensor.
        saved: pieces in each dimension.
        local: likewise.
        share: of the tensors asked for.
        different: whether each tensor is a little larger than the one before.
    """

    name: str
    shape: Shape
    saved: Shape
    local: Shape
    share: float = 1.0
    different: bool = False


CASES = [
    Case("rows -> rows", (640, 16), (80, 1), (80, 1)),
    Case("rows -> other rows", (640, 16), (80, 1), (79, 1)),
    Case("rows -> rows, wide", (80, 160), (80, 1), (80, 1)),
    Case("columns -> columns, tall", (160, 80), (1, 80), (1, 80)),
    Case("grid -> grid", (80, 80), (8, 10), (10, 8)),
    Case("rows -> columns", (80, 80), (80, 1), (1, 80), share=0.1),
    Case("all different", (80, 160), (80, 1), (80, 1), different=True),
]


@dataclass(frozen=True)
class Figures:
    """Seconds for the plan of all tensors, one for each round."""

    tensors: int
    read_items: int
    torch: list[float]
    ours: list[float]
    items: list[float]
    same: bool


def cut(shape: Sequence[int], parts: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Offsets and sizes of the pieces."""
    cuts = [[(i * n // p, (i + 1) * n // p) for i in range(p)] for n, p in zip(shape, parts, strict=True)]
    return [([start for start, _ in cell], [stop - start for start, stop in cell]) for cell in itertools.product(*cuts)]


def make(case: Case, tensors: int) -> tuple[dict[str, ShardedTensor], Metadata]:
    """The state to load into and the metadata of what was saved."""
    state, saved = {}, {}
    for number in range(tensors):
        shape = (case.shape[0] + number, case.shape[1] + number) if case.different else case.shape
        fqn = f"model.layers.{number}.weight"
        saved[fqn] = TensorStorageMetadata(
            TensorProperties(torch.int8),
            torch.Size(shape),
            [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in cut(shape, case.saved)],
        )
        shards = [ShardMetadata(o, s, "rank:0/cpu") for o, s in cut(shape, case.local)]
        state[fqn] = ShardedTensor._init_from_local_shards_and_global_metadata(
            [Shard(torch.empty(each.shard_sizes, dtype=torch.int8), each) for each in shards],
            ShardedTensorMetadata(shards, torch.Size(shape), ShardProperties(dtype=torch.int8)),
        )
    return state, Metadata(saved)  # type: ignore[arg-type]


def run(case: Case, tensors: int, rounds: int) -> Figures:
    """Measure one case."""
    tensors = max(1, round(tensors * case.share))
    state, metadata = make(case, tensors)
    planners: tuple[DefaultLoadPlanner, ...] = DefaultLoadPlanner(), S3LoadPlanner()
    for planner in planners:
        planner.set_up_planner(dict(state), metadata, True)
    plans = [planner.create_local_plan() for planner in planners]
    same = details(plans[0]) == details(plans[1])
    rows = [
        (i.type, i.dest_index, i.dest_offsets, i.storage_index, i.storage_offsets, i.lengths) for i in plans[0].items
    ]
    del plans, planner
    times: tuple[list[float], ...] = [], [], []
    for _ in range(rounds):
        times[0].append(cpu_seconds(planners[0].create_local_plan))
        times[1].append(cpu_seconds(planners[1].create_local_plan))
        times[2].append(cpu_seconds(lambda: construct(rows)))
    return Figures(tensors, len(rows), *times, same)


def construct(rows: Sequence[tuple[object, ...]]) -> list[ReadItem]:
    """Items, and the two indices of each, by their constructors."""
    return [
        ReadItem(
            kind,
            MetadataIndex(dest.fqn, dest.offset, dest.index),
            offsets,
            MetadataIndex(storage.fqn, storage.offset, storage.index),
            storage_offsets,
            lengths,
        )  # type: ignore[arg-type, attr-defined]
        for kind, dest, offsets, storage, storage_offsets, lengths in rows  # type: ignore[attr-defined]
    ]


def details(plan: LoadPlan) -> list[object]:
    """All that is in the items: equality would leave the hints out."""
    return [(item, item.dest_index.index, item.storage_index.index) for item in plan.items]


def cpu_seconds(operation: Callable[[], object]) -> float:
    """Of this thread, with what the collector has to do for the objects made."""
    gc.collect()
    start = time.thread_time()
    kept = operation()
    gc.collect(0)
    seconds = time.thread_time() - start
    del kept
    return seconds


def main() -> None:
    """Run the benchmark as the command line says; print a table, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning", description="What it takes to plan a load.")
    parser.add_argument("--tensors", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--json", type=Path, default=RESULTS / "planning.json", help="default: %(default)s")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    figures = {}
    try:
        for case in CASES:
            figures[case.name] = run(case, options.tensors, options.rounds)
            gc.collect()
    finally:
        dist.destroy_process_group()
    Console().print(_table(figures))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    facts = {"machine": machine(), "cases": {name: asdict(each) for name, each in figures.items()}}
    options.json.write_text(json.dumps(facts, indent=1, default=str) + "\n")
    if not all(each.same for each in figures.values()):
        raise SystemExit("a plan is not torch's")


def _table(figures: dict[str, Figures]) -> Table:
    table = Table("saved -> local", "tensors", "torch ms", "ours ms", "ratio", "ReadItems", "items ms", "same plan",
                  title="80 saved x 80 local chunks a tensor, CPU time, medians")  # fmt: skip
    for name, each in figures.items():
        ratio = statistics.median(a / b for a, b in zip(each.torch, each.ours, strict=True))
        table.add_row(
            name, str(each.tensors), f"{statistics.median(each.torch) * 1e3:.0f}",
            f"{statistics.median(each.ours) * 1e3:.0f}", f"{ratio:.1f}", str(each.read_items),
            f"{statistics.median(each.items) * 1e3:.0f}", "yes" if each.same else "NO",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
