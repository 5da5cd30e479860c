"""What a tensor costs when there are many small ones: microseconds that each adds to ``dcp.load``, beyond DCP's own.

``python -m benchmarks.small_tensors`` starts an in-memory S3 server in a process of its own, saves a state of 50,000
tensors of 4 KiB by dcp_s3, and loads it, one rank, no process group, by turns through dcp_s3 and through a reader that
does no I/O at all: what is left there is DCP itself (the pickle of the metadata, planning). Other backends take far
longer for each tensor and load a smaller state, with DCP itself beside it. The first round of each is not counted.
Everything is loaded into memory that has been touched, and compared after every load, outside of the measured time.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import logging
import os
import pickle
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import boto3
import torch
import torch.distributed.checkpoint as dcp
from rich import box
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from benchmarks.cases import CASES, Target, reason_to_skip
from benchmarks.measure import measure
from benchmarks.report import machine
from benchmarks.save_load import RESULTS, serve_embedded
from benchmarks.units import parse_size

#: The reader without I/O.
ITSELF = "DCP itself"
_OURS = "dcp_s3"
#: Target for dcp_s3, beyond DCP itself.
_TARGET_MICROSECONDS = 30.0
_OTHERS = ("s3torchconnector", "fsspec")
_PHASES = ("read_metadata", "planning", "read_data")

State = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Sample:
    """One load."""

    reader: str
    round: int
    """Readers are compared within a round."""
    tensors: int
    seconds: float
    cpu_seconds: float
    phases: dict[str, float]
    """Seconds by phase: those of `_PHASES`, which add up to ``seconds``."""


class NoReader(StorageReader):
    """Reads nothing: metadata as torch's FileSystemReader does from bytes in memory, data not at all.

    Args:
        pickled: the checkpoint's ``.metadata``.
    """

    def __init__(self, pickled: bytes) -> None:
        super().__init__()
        self._pickled = pickled

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Unpickle it, as torch does."""
        metadata: Metadata = pickle.loads(self._pickled)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to coordinate."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Call the planner for each item, and leave the tensors as they are."""
        nothing = io.BytesIO()
        torch.save(0, nothing)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                nothing.seek(0)
                planner.load_bytes(item, nothing)
            else:
                planner.commit_tensor(item, planner.resolve_tensor(item).detach())
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any will do."""
        return True


def make_state(tensors: int, tensor_bytes: int) -> State:
    """That many fp32 tensors; each element of a tensor is the tensor's number."""
    return {f"layer.{n // 10}.weight.{n % 10}": torch.full((tensor_bytes // 4,), float(n)) for n in range(tensors)}


def timed(reader: StorageReader) -> dict[str, float]:
    """Make ``reader`` note, in what is returned, the seconds spent in its methods, by name."""
    seconds: dict[str, float] = defaultdict(float)

    def wrap(name: str) -> None:
        method = getattr(reader, name)

        @functools.wraps(method)  # DCP looks at the signature
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - start

        setattr(reader, name, wrapped)

    for name in ("read_metadata", "read_data"):
        wrap(name)
    return seconds


def load(name: str, number: int, reader: StorageReader, loaded: State, saved: State) -> Sample:
    """Load by one reader and compare.

    Raises:
        RuntimeError: what was loaded is not what was saved.
    """
    for tensor in loaded.values():
        tensor.fill_(-1.0)
    phases = timed(reader)
    cost = measure(lambda: dcp.load(loaded, storage_reader=reader, no_dist=True))
    if name != ITSELF:
        for key, tensor in saved.items():
            if not torch.equal(tensor, loaded[key]):
                raise RuntimeError(f"{key} was not loaded as it was saved")
    planning = cost.wall_seconds - sum(phases.values())
    return Sample(name, number, len(saved), cost.wall_seconds, cost.cpu_seconds, {**phases, "planning": planning})


def compare(names: Sequence[str], target: Target, tensors: int, tensor_bytes: int, rounds: int) -> Iterator[Sample]:
    """Save a state by dcp_s3; load it by each reader in every round, after one round that is not counted."""
    saved = make_state(tensors, tensor_bytes)
    loaded = {key: torch.empty_like(tensor) for key, tensor in saved.items()}
    checkpoint = f"small-{tensors}"
    dcp.save(saved, storage_writer=CASES[_OURS](target).writer(checkpoint), no_dist=True)
    client = boto3.client("s3", endpoint_url=target.endpoint_url, region_name=target.region)
    answer = client.get_object(Bucket=target.bucket, Key=f"{target.prefix}/{checkpoint}/.metadata")
    pickled = answer["Body"].read()
    for number in range(rounds + 1):
        for name in names:
            reader = NoReader(pickled) if name == ITSELF else CASES[name](target).reader(checkpoint)
            sample = load(name, number, reader, loaded, saved)
            if number:
                yield sample


def microseconds(samples: Sequence[Sample], reader: str, phase: str | None = None) -> float:
    """Median microseconds a tensor that ``reader`` takes, in a phase or in all."""
    mine = [sample for sample in samples if sample.reader == reader]
    return statistics.median(1e6 * (s.phases[phase] if phase else s.seconds) / s.tensors for s in mine)


def beyond(samples: Sequence[Sample], reader: str, phase: str | None = None) -> float:
    """Median over the rounds of what ``reader`` takes for a tensor beyond DCP itself, microseconds."""

    def cost(sample: Sample) -> float:
        return 1e6 * (sample.phases[phase] if phase else sample.seconds) / sample.tensors

    itself = {sample.round: cost(sample) for sample in samples if sample.reader == ITSELF}
    return statistics.median(cost(s) - itself[s.round] for s in samples if s.reader == reader)


def show(groups: Sequence[Sequence[Sample]], console: Console) -> None:
    """Print a table for each state, medians."""
    for samples in groups:
        rounds = max(sample.round for sample in samples)
        table = Table(
            title=f"dcp.load of {samples[0].tensors:,} tensors, one rank, median of {rounds} round(s), us a tensor",
            box=box.MARKDOWN,
        )
        columns = ("all", *_PHASES, "beyond DCP itself", *(f"beyond: {phase}" for phase in _PHASES), "CPU")
        table.add_column("", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right")
        for name in dict.fromkeys(sample.reader for sample in samples):
            cells = [microseconds(samples, name), *(microseconds(samples, name, phase) for phase in _PHASES)]
            if name != ITSELF:
                cells += [beyond(samples, name), *(beyond(samples, name, phase) for phase in _PHASES)]
            cpu = statistics.median(1e6 * s.cpu_seconds / s.tensors for s in samples if s.reader == name)
            gap = [""] * (len(columns) - 1 - len(cells))
            table.add_row(name, *(f"{cell:.1f}" for cell in cells), *gap, f"{cpu:.1f}")
        console.print(table)


def main() -> None:
    """Run the benchmark as the command line says, print tables, write JSON; status 1 if dcp_s3 misses its target."""
    options = _parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 160)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    others = []
    for name in options.backends:
        if reason := reason_to_skip(name):
            console.print(f"[yellow]{name} skipped: {reason}")
        elif name != _OURS:
            others.append(name)
    groups = []
    size = 2 * (options.tensors + options.few) * options.tensor_size
    with serve_embedded("bench", "us-east-1", size) as (endpoint_url, environment):
        os.environ.update(environment)
        target = Target("bench", "small", endpoint_url, "us-east-1", 4)
        plan = [([ITSELF, _OURS], options.tensors)] if _OURS in options.backends else []
        plan += [([ITSELF, *others], options.few)] if others else []
        for names, tensors in plan:
            groups.append(list(compare(names, target, tensors, options.tensor_size, options.rounds)))
    show(groups, console)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    described = {name: value for name, value in vars(options).items() if name != "out"}
    facts = {"machine": machine(), "options": described, "samples": [asdict(s) for group in groups for s in group]}
    options.out.write_text(json.dumps(facts, indent=1, default=str) + "\n")
    console.print(f"samples: {options.out}")
    if _OURS in options.backends and (cost := beyond(groups[0], _OURS)) > _TARGET_MICROSECONDS:
        console.print(f"[red]{_OURS} takes {cost:.1f} us a tensor beyond DCP itself, above {_TARGET_MICROSECONDS:g}")
        sys.exit(1)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.small_tensors", description="What each small tensor adds to dcp.load."
    )
    parser.add_argument("--tensors", type=int, default=50_000, help="default: %(default)s")
    parser.add_argument("--few", type=int, default=5_000, help="tensors for the other backends; default: %(default)s")
    parser.add_argument("--tensor-size", type=parse_size, default=4096, help="of a tensor; default: 4KiB")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument(
        "--backends",
        type=lambda text: text.split(","),
        default=[_OURS, *_OTHERS],
        metavar="NAME,...",
        help=f"default: {','.join((_OURS, *_OTHERS))}",
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "small_tensors.json", help="default: %(default)s")
    return parser.parse_args()


if __name__ == "__main__":
    main()
