"""Compares loading what torch's FsspecWriter wrote with loading what dcp_s3 wrote, of the same state.

``python -m benchmarks.foreign`` starts an in-memory S3 server in a process of its own and saves two states with both
writers: few large tensors, and many small ones. Then it loads them in turn through `S3StorageReader`, into memory that
has been touched; one rank, no process group. What was loaded is compared bit by bit, outside the measured time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from collections.abc import Callable

import boto3
import torch
import torch.distributed.checkpoint as dcp
from botocore.config import Config
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.cases import CASES, Target
from benchmarks.measure import Sample, measure
from benchmarks.save_load import DUMMY_CREDENTIALS
from benchmarks.units import GIB, MIB, parse_size
from tests.memory_s3 import MemoryS3Process

State = dict[str, torch.Tensor]

WRITERS = {"dcp_s3": "dcp_s3", "FsspecWriter": "fsspec"}
_BUCKET = "bench"
_SMALL_BYTES = 4096
_LARGE_TENSORS = 16


def large_state(size: int) -> State:
    """``size`` bytes of float32 in 16 tensors."""
    return {f"w{i}": torch.randn(size // _LARGE_TENSORS // 4096, 1024) for i in range(_LARGE_TENSORS)}


def small_state(count: int) -> State:
    """``count`` tensors of 4 KiB."""
    return {f"s{i}": torch.randn(_SMALL_BYTES // 4) for i in range(count)}


def main() -> None:
    """Run the benchmark as the command line says, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foreign", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--size", type=parse_size, default=GIB, help="of the large tensors together; default: 1GiB")
    parser.add_argument("--count", type=int, default=20_000, help="of small tensors; default: %(default)s")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ |= {**DUMMY_CREDENTIALS, "AWS_DEFAULT_REGION": "us-east-1"}
    states: dict[str, Callable[[], State]] = {
        f"{_LARGE_TENSORS} tensors of {options.size // _LARGE_TENSORS // MIB} MiB": lambda: large_state(options.size),
        f"{options.count} tensors of 4 KiB": lambda: small_state(options.count),
    }
    table = Table("state", "written by", "seconds", "GiB/s", "CPU s/GiB", "time", box=box.SIMPLE)
    for label, make in states.items():
        # A server for each: the tail of a block for each part, twice the state, and the framing.
        with MemoryS3Process(preallocate=options.size * 9 // 4 + 256 * MIB) as server:
            os.environ["AWS_ENDPOINT_URL"] = server.endpoint_url
            state = make()
            samples = run(state, server.endpoint_url, options.rounds)
        add_rows(table, label, samples, sum(tensor.nbytes for tensor in state.values()))
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def run(state: State, endpoint_url: str, rounds: int) -> dict[str, list[Sample]]:
    """Samples of loading ``state``, by its writer; the first load of each is not measured.

    Raises:
        RuntimeError: what was loaded is not what was saved.
    """
    boto3.client("s3", endpoint_url=endpoint_url, config=Config(s3={"addressing_style": "path"})).create_bucket(
        Bucket=_BUCKET
    )
    target = Target(_BUCKET, "run", endpoint_url, "us-east-1", 4)
    ours = CASES["dcp_s3"](target)
    for name, case in WRITERS.items():
        dcp.save(state, storage_writer=CASES[case](target).writer(name), no_dist=True)
    loaded = {key: torch.empty_like(tensor) for key, tensor in state.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in WRITERS}
    for number in range(rounds + 1):
        for name in WRITERS:
            for tensor in loaded.values():
                tensor.fill_(-2.0)
            sample = measure(lambda name=name: dcp.load(loaded, storage_reader=ours.reader(name), no_dist=True))
            if not all(torch.equal(tensor, loaded[key]) for key, tensor in state.items()):
                raise RuntimeError(f"what {name} saved was not loaded as it was saved")
            if number:
                samples[name].append(sample)
    return samples


def add_rows(table: Table, label: str, samples: dict[str, list[Sample]], size: int) -> None:
    """A row for each writer: medians; the time as a multiple of the first one's."""
    first = None
    for name, found in samples.items():
        wall = statistics.median(sample.wall_seconds for sample in found)
        cpu = statistics.median(sample.cpu_seconds for sample in found)
        first = first or wall
        table.add_row(
            label, name, f"{wall:.3f}", f"{size / GIB / wall:.2f}", f"{cpu / (size / GIB):.2f}", f"{wall / first:.2f} x"
        )


if __name__ == "__main__":
    main()
