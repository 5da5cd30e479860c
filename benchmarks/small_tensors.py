"""What a tensor costs when there are many small ones: microseconds that each adds to ``dcp.load``, beyond DCP's own.

``python -m benchmarks.small_tensors`` starts an in-memory S3 server in a process of its own, saves a state of 50,000
tensors of 4 KiB by dcp_s3, and loads it, one rank, no process group, by turns through dcp_s3 and through a reader that
does no I/O at all: what is left there is DCP itself (the pickle of the metadata, planning). Other backends take far
longer for each tensor and load a smaller state, with DCP itself beside it. The first round of each is not counted.
Everything is loaded into memory that has been touched; what dcp_s3 and the other backends load is compared, outside of
the measured time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.cases import Target, reason_to_skip
from benchmarks.report import machine
from benchmarks.save_load import RESULTS, run_worker, serve_embedded
from benchmarks.small_tensors_worker import ITSELF, Sample
from benchmarks.units import parse_size

_OURS = "dcp_s3"
#: For dcp_s3, beyond DCP itself.
TARGET_MICROSECONDS = 30.0
_OTHERS = ("s3torchconnector", "fsspec")
_PARTS = ("all", "read_metadata", "planning", "read_data", "CPU")


def cost(sample: Sample, part: str = "all") -> float:
    """Microseconds a tensor: wall time of all or of a phase, or CPU time, which a busy machine disturbs less."""
    seconds = {"all": sample.seconds, "CPU": sample.cpu_seconds, **sample.phases}[part]
    return 1e6 * seconds / sample.tensors


def microseconds(samples: Sequence[Sample], reader: str, part: str = "all") -> float:
    """Median `cost` of ``reader``."""
    return statistics.median(cost(sample, part) for sample in samples if sample.reader == reader)


def beyond(samples: Sequence[Sample], reader: str, part: str = "all") -> float:
    """Median over the rounds of what ``reader`` takes beyond DCP itself, microseconds a tensor."""
    itself = {sample.round: cost(sample, part) for sample in samples if sample.reader == ITSELF}
    return statistics.median(cost(s, part) - itself[s.round] for s in samples if s.reader == reader)


def show(groups: Sequence[Sequence[Sample]], console: Console) -> None:
    """Print a table for each state, medians."""
    for samples in groups:
        rounds = max(sample.round for sample in samples)
        table = Table(
            title=f"dcp.load of {samples[0].tensors:,} tensors, one rank, median of {rounds} round(s), us a tensor",
            box=box.MARKDOWN,
        )
        table.add_column("", no_wrap=True)
        for column in (*_PARTS, *(f"beyond DCP itself: {part}" for part in _PARTS)):
            table.add_column(column, justify="right")
        for name in dict.fromkeys(sample.reader for sample in samples):
            cells = [microseconds(samples, name, part) for part in _PARTS]
            if name != ITSELF:
                cells += [beyond(samples, name, part) for part in _PARTS]
            table.add_row(name, *(f"{cell:.1f}" for cell in cells))
        console.print(table)


def main() -> None:
    """Run the benchmark as the command line says, print tables, write JSON; status 1 if dcp_s3 misses its target."""
    options = _parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 160)
    others = []
    for name in options.backends:
        if reason := reason_to_skip(name):
            console.print(f"[yellow]{name} skipped: {reason}")
        elif name != _OURS:
            others.append(name)
    plan = [([ITSELF, _OURS], options.tensors)] if _OURS in options.backends else []
    plan += [([ITSELF, *others], options.few)] if others else []
    size = 2 * (options.tensors + options.few) * options.tensor_size
    with serve_embedded("bench", "us-east-1", size) as (endpoint_url, environment):
        target = Target("bench", "small", endpoint_url, "us-east-1", 4)
        request = {"groups": plan, "rounds": options.rounds, "tensor_bytes": options.tensor_size}
        answers = run_worker("benchmarks.small_tensors_worker", request | {"target": asdict(target)}, environment)
        try:
            samples = [Sample(**answer) for answer in answers]
        except subprocess.CalledProcessError as error:
            console.print(f"[red]failed:[/]\n{error.stderr[-2000:]}")
            sys.exit(1)
    groups = []
    for names, _ in plan:
        count = len(names) * options.rounds
        groups.append(samples[:count])
        samples = samples[count:]
    show(groups, console)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    described = {name: value for name, value in vars(options).items() if name != "out"}
    facts = {"machine": machine(), "options": described, "samples": [asdict(s) for group in groups for s in group]}
    options.out.write_text(json.dumps(facts, indent=1, default=str) + "\n")
    console.print(f"samples: {options.out}")
    if _OURS in options.backends and (found := beyond(groups[0], _OURS)) > TARGET_MICROSECONDS:
        console.print(f"[red]{_OURS} takes {found:.1f} us a tensor beyond DCP itself, above {TARGET_MICROSECONDS:g}")
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
