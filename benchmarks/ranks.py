"""Saves and loads of 1, 2 and 4 ranks on this host, through each backend: MLPerf Storage's checkpoint, scaled down.

``python -m benchmarks.ranks`` starts an in-memory S3 server in a process of its own. Gloo ranks hold a Llama 3 (32
layers in the shapes of the 8B model, bf16 weights, fp32 master weights and two moments), fully sharded, scaled to
``--size`` in all. As in MLPerf Storage, a save or load takes as long as the slowest rank. Backends take turns in every
round, what was loaded is compared bit by bit outside the measured time.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import resource
import statistics
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES, Target, reason_to_skip
from benchmarks.llama import llama_shapes
from benchmarks.report import machine
from benchmarks.reshard_cases import Layout, Spec, TensorSpec
from benchmarks.reshard_worker import check_state, make_state
from benchmarks.save_load import RESULTS, case_names, empty, serve
from benchmarks.units import GIB, MIB, parse_size
from tests.memory_s3 import Link
from tests.ranks import run_ranks

_LAYERS = 32
_WARM_UP_BYTES = 4 * MIB
_TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Cost:
    """A save and a load of one rank."""

    save_seconds: float
    load_seconds: float
    save_cpu_seconds: float
    load_cpu_seconds: float


@dataclass(frozen=True)
class Sample:
    """A save and a load by one backend: seconds of the slowest rank, CPU seconds of all."""

    ranks: int
    backend: str
    round: int
    state_bytes: int
    save_seconds: float
    load_seconds: float
    save_cpu_seconds: float
    load_cpu_seconds: float

    def __str__(self) -> str:
        size = self.state_bytes / GIB
        return (
            f"save {self.save_seconds:.2f} s, {size / self.save_seconds:.2f} GiB/s, {self.save_cpu_seconds / size:.2f} "
            f"CPU s/GiB; load {self.load_seconds:.2f} s, {size / self.load_seconds:.2f} GiB/s, "
            f"{self.load_cpu_seconds / size:.2f} CPU s/GiB"
        )


@dataclass
class Results:
    """Everything that was measured, and on what."""

    machine: dict[str, Any]
    options: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)


def training_spec(total_bytes: int) -> Spec:
    """About ``total_bytes`` of what mixed-precision training with Adam keeps: 14 bytes for each parameter."""
    shapes = llama_shapes(total_bytes * 4 // 14, layers=_LAYERS)
    spec = {name: TensorSpec(shape, torch.bfloat16) for name, shape in shapes.items()}
    for state in ("master", "exp_avg", "exp_avg_sq"):
        spec |= {f"optim.{state}.{name}": TensorSpec(shape, torch.float32) for name, shape in shapes.items()}
    return spec


def work(size: int, backends: Sequence[str], rounds: int, target: Target) -> list[list[Cost]]:
    """What each rank does: rounds of a save and a load through each backend; returns costs by round and backend."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    ranks = dist.get_world_size()
    layout = Layout(f"FSDP {ranks}", (ranks,), (0,), (0,))
    cases = {name: CASES[name](replace(target, prefix=f"{target.prefix}/{name}")) for name in backends}
    for number, case in enumerate(cases.values()):
        _save_and_load(case, f"warm-up-{number}", training_spec(_WARM_UP_BYTES), layout, target)
    spec = training_spec(size)
    return [
        [_save_and_load(case, f"round-{number}", spec, layout, target) for case in cases.values()]
        for number in range(rounds)
    ]


def _save_and_load(case: Any, name: str, spec: Spec, layout: Layout, target: Target) -> Cost:
    rank = dist.get_rank()
    state = make_state(spec, layout, rank, filled=True)
    save = _measure(lambda: dcp.save(state, storage_writer=case.writer(name)))
    del state
    state = make_state(spec, layout, rank, filled=False)
    load = _measure(lambda: dcp.load(state, storage_reader=case.reader(name)))
    check_state(state, spec, layout, rank)
    dist.barrier()
    if rank == 0:  # the next case needs the memory
        empty(target, dict(os.environ))
        case.clean_up()
    dist.barrier()
    return Cost(save[0], load[0], save[1], load[1])


def _measure(operation: Callable[[], object]) -> tuple[float, float]:
    dist.barrier()
    cpu, start = _cpu_seconds(), time.perf_counter()
    operation()
    return time.perf_counter() - start, _cpu_seconds() - cpu


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def summed_up(costs: Sequence[Sequence[Sequence[Cost]]], backends: Sequence[str], state_bytes: int) -> list[Sample]:
    """Samples from costs by rank, round and backend. Pure."""
    return [
        Sample(
            len(costs), backend, number, state_bytes,
            max(cost.save_seconds for cost in ranks), max(cost.load_seconds for cost in ranks),
            sum(cost.save_cpu_seconds for cost in ranks), sum(cost.load_cpu_seconds for cost in ranks),
        )
        for number, of_round in enumerate(zip(*costs, strict=True), start=1)
        for backend, ranks in zip(backends, zip(*of_round, strict=True), strict=True)
    ]  # fmt: skip


def show(samples: Sequence[Sample], console: Console) -> None:
    """Print medians, and how much of one rank's throughput several reach together."""
    table = Table(
        title="median over the rounds; a save or load takes as long as its slowest rank",
        caption="of 1 rank: throughput of all ranks over that of one.",
        box=box.SIMPLE_HEAD,
    )
    for column in ("ranks", "backend", "save s", "GiB/s", "of 1 rank", "CPU s/GiB",
                   "load s", "GiB/s", "of 1 rank", "CPU s/GiB"):  # fmt: skip
        table.add_column(column, justify="left" if column == "backend" else "right", no_wrap=True)
    found: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.ranks, sample.backend), []).append(sample)
    for (ranks, backend), rounds in found.items():
        cells, alone = [], found.get((1, backend))
        for verb in ("save", "load"):
            seconds, cpu = _median(rounds, f"{verb}_seconds"), _median(rounds, f"{verb}_cpu_seconds")
            one = _median(alone, f"{verb}_seconds") if alone else math.nan
            size = rounds[0].state_bytes / GIB
            cells += [f"{seconds:.2f}", f"{size / seconds:.2f}", f"{one / seconds:.2f}", f"{cpu / size:.2f}"]
        table.add_row(str(ranks), backend, *cells)
    console.print(table)


def _median(samples: Sequence[Sample], name: str) -> float:
    return statistics.median(getattr(sample, name) for sample in samples)


def main() -> None:
    """Run the benchmark as the command line says, print a table, write JSON."""
    options = _parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 130)
    backends = [name for name in options.cases if reason_to_skip(name) is None]
    for name in set(options.cases) - set(backends):
        console.print(f"[yellow]{name} skipped: {reason_to_skip(name)}")
    described = {name: value for name, value in vars(options).items() if name != "json"}
    results = Results(machine(), described)
    size = sum(tensor.nbytes for tensor in training_spec(options.size).values())
    link = Link(options.latency, options.connection_rate or math.inf)
    for ranks in options.ranks:
        with serve(options, link=link) as (endpoint_url, environment):
            target = Target(
                options.bucket, f"dcp-bench-{uuid.uuid4().hex[:8]}", endpoint_url, options.region, options.threads
            )
            own = {name: value for name, value in environment.items() if os.environ.get(name) != value}
            costs = run_ranks(
                ranks, work, options.size, backends, options.rounds, target, timeout=_TIMEOUT_SECONDS, env=own
            )
        for sample in summed_up(costs, backends, size):
            results.samples.append(sample)
            console.print(f"{ranks} ranks, round {sample.round}, {sample.backend:18}{sample}")
    show(results.samples, console)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(asdict(results), indent=1, default=str) + "\n")
    console.print(f"samples: {options.json}")


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ranks", description="Compare saves and loads of several ranks on one host."
    )
    parser.add_argument("--ranks", type=_numbers, default=[1, 2, 4], metavar="N,...", help="default: 1,2,4")
    parser.add_argument(
        "--cases", type=case_names, default=list(CASES), metavar="NAME,...", help=f"of {','.join(CASES)}"
    )
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--size", type=parse_size, default=GIB, help="of the state of all ranks; default: 1GiB")
    parser.add_argument("--threads", type=int, default=4, help="for backends that need it; default: %(default)s")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each answer (embedded server only)")
    parser.add_argument("--connection-rate", type=parse_size, help="bytes per second of a connection (likewise)")
    parser.add_argument("--endpoint-url", help="another S3 than the embedded in-memory server")
    parser.add_argument("--bucket", default="bench", help="must exist unless embedded")
    parser.add_argument("--region", default="us-east-1", help="default: %(default)s")
    parser.add_argument("--json", type=Path, default=RESULTS / "ranks.json", help="default: %(default)s")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
