"""Compares exporting a checkpoint to safetensors with downloading it as it is.

``python -m benchmarks.export`` starts an in-memory S3 server in a process of its own and saves a state of large bf16
tensors. Then it downloads and exports the checkpoint in turn, each time into a new directory (in memory where there is
``/dev/shm``, so that no disk is measured), and exports it to S3. Compares what was exported bit by bit, outside of the
measured time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import boto3
import torch
import torch.distributed.checkpoint as dcp
from rich import box
from rich.console import Console
from rich.table import Table

import dcp_s3
from benchmarks.measure import Sample, measure
from benchmarks.save_load import DUMMY_CREDENTIALS
from benchmarks.units import GIB, MIB, parse_size
from dcp_s3.format.safetensors import PREFIX, header_length, parse_header
from dcp_s3.memory import view_bytes
from dcp_s3.offline.copy import copy as download
from tests.memory_s3 import MemoryS3Process

State = dict[str, torch.Tensor]

_BUCKET = "bench"
_TENSORS = 16
_ROOT = f"s3://{_BUCKET}/run"


def make_state(size: int) -> State:
    """``size`` bytes of bf16 in 16 tensors."""
    rows = size // _TENSORS // 2048
    return {f"model.layers.{i}.weight": torch.randn(rows, 1024).to(torch.bfloat16) for i in range(_TENSORS)}


def main() -> None:
    """Run the benchmark as the command line says, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--size", type=parse_size, default=GIB, help="of the tensors together; default: 1GiB")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ |= {**DUMMY_CREDENTIALS, "AWS_DEFAULT_REGION": "us-east-1"}
    with MemoryS3Process(preallocate=options.size * 9 // 4 + 256 * MIB) as server:
        os.environ["AWS_ENDPOINT_URL"] = server.endpoint_url
        samples = run(make_state(options.size), options.rounds)
    table = Table("", "seconds", "GiB/s", "of a download", "CPU s/GiB", "peak MiB", box=box.SIMPLE)
    add_rows(table, samples, options.size)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def run(state: State, rounds: int) -> dict[str, list[Sample]]:
    """Samples of each way; the first round is not measured.

    Raises:
        RuntimeError: what was exported is not what was saved.
    """
    boto3.client("s3").create_bucket(Bucket=_BUCKET)
    dcp.save(state, storage_writer=dcp_s3.S3StorageWriter(_ROOT), no_dist=True)
    shard = "256MiB"
    ways: dict[str, Callable[[str], object]] = {
        "download": lambda path: download(_ROOT, path),
        "export to a directory": lambda path: dcp_s3.export(_ROOT, path, max_shard_size=shard),
        "export to a directory, as fp32": lambda path: dcp_s3.export(_ROOT, path, dtype="fp32", max_shard_size=shard),
        "export to S3": lambda path: dcp_s3.export(
            _ROOT, f"s3://{_BUCKET}/{Path(path).name}", max_shard_size=shard
        ),
    }  # fmt: skip
    samples: dict[str, list[Sample]] = {name: [] for name in ways}
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for number in range(rounds + 1):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory(prefix="dcp-bench-export-", dir=memory) as path:
                sample = measure(lambda: way(path))  # noqa: B023 - called at once
                if name == "export to a directory":
                    compare(Path(path), state)
            if number:
                samples[name].append(sample)
    return samples


def compare(directory: Path, state: State) -> None:
    """Check that the files hold the state, bit by bit.

    Raises:
        RuntimeError: they do not.
    """
    found = set()
    for path in directory.glob("*.safetensors"):
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(header_length(file.read(PREFIX), size))
            for tensor in parse_header(header, size):
                file.seek(tensor.start)
                if file.read(tensor.entry.nbytes) != view_bytes(state[tensor.entry.name]):
                    raise RuntimeError(f"{tensor.entry.name} differs")
                found.add(tensor.entry.name)
    if found != state.keys():
        raise RuntimeError(f"{sorted(state.keys() ^ found)} are missing")


def add_rows(table: Table, samples: dict[str, list[Sample]], size: int) -> None:
    """A row for each way, with the medians; the ratio is that of each round."""
    for name, found in samples.items():
        seconds = statistics.median(sample.wall_seconds for sample in found)
        ratios = [d.wall_seconds / s.wall_seconds for d, s in zip(samples["download"], found, strict=True)]
        cpu = statistics.median(sample.cpu_seconds for sample in found) * GIB / size
        peak = max(sample.peak_bytes for sample in found) / MIB
        table.add_row(
            name, f"{seconds:.2f}", f"{size / GIB / seconds:.2f}", f"{statistics.median(ratios):.2f} x", f"{cpu:.2f}",
            f"{peak:.0f}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
