"""Loads weights of Hugging Face's layout from S3 into four gloo ranks: directly, by a checkpoint, by a download.

``python -m benchmarks.weights`` starts an in-memory S3 server in a process of its own, whose connections carry
``--rate`` bytes per second, and puts a bf16 model in four safetensors files there. Ways, in turn:

- ``load_safetensors`` on all ranks;
- ``load_safetensors`` and ``dcp.save`` on all ranks, then ``dcp.load``;
- a copy of the files to this host by the first rank, which every rank maps into memory and cuts its part out of.

A way takes as long as its slowest rank. What was loaded is compared bit by bit, outside of the measured time.
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
from typing import Any

import boto3
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich import box
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_s3
from benchmarks.measure import Sample, measure
from benchmarks.save_load import DUMMY_CREDENTIALS
from benchmarks.units import GIB, MIB, parse_size
from dcp_s3.format.safetensors import (
    PREFIX,
    TensorEntry,
    header_length,
    make_header,
    make_index,
    parse_header,
    plan_shards,
)
from dcp_s3.memory import view_bytes
from tests.memory_s3 import Link, MemoryS3Process, fetch_counters, reset_counters
from tests.ranks import run_ranks

_BUCKET = "bench"
_URL = f"s3://{_BUCKET}/hf"
_TENSORS, _COLUMNS = 32, 1024
_MESHES: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "FSDP 4": ((4,), [Shard(0)]), "TP 4": ((4,), [Shard(1)]), "2x2": ((2, 2), [Shard(0), Shard(1)]),
}  # fmt: skip


def make_tensor(number: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size // _TENSORS // _COLUMNS // 2, _COLUMNS, generator=generator).to(torch.bfloat16)


def upload(size: int) -> None:
    client = boto3.client("s3")
    client.create_bucket(Bucket=_BUCKET)
    tensors = {f"layers.{number}.weight": make_tensor(number, size) for number in range(_TENSORS)}
    shards = plan_shards(
        [TensorEntry(name, each.dtype, tuple(each.shape)) for name, each in tensors.items()], size // 4
    )
    for shard in shards:
        data = make_header(shard.tensors) + b"".join(view_bytes(tensors[each.name]) for each in shard.tensors)
        client.put_object(Bucket=_BUCKET, Key=f"hf/{shard.name}", Body=data)
    client.put_object(Bucket=_BUCKET, Key="hf/model.safetensors.index.json", Body=make_index(shards))


def on_rank(size: int, mesh: str, way: str, directory: str) -> Sample:
    shape, placements = _MESHES[mesh]
    devices = init_device_mesh("cpu", shape)
    rows = size // _TENSORS // _COLUMNS // 2
    zeros = torch.zeros(rows, _COLUMNS, dtype=torch.bfloat16)
    state: dict[str, Any] = {
        f"layers.{number}.weight": distribute_tensor(zeros, devices, placements, src_data_rank=None)
        for number in range(_TENSORS)
    }
    dist.barrier()
    sample = measure(lambda: _WAYS[way](state, directory))
    for number in range(_TENSORS):
        expected = distribute_tensor(make_tensor(number, size), devices, placements, src_data_rank=None)
        if not torch.equal(expected.to_local(), state[f"layers.{number}.weight"].to_local()):
            raise RuntimeError(f"layers.{number}.weight differs")
    return sample


def _load(state: dict[str, Any], _: str) -> None:
    dcp_s3.load_safetensors(_URL, state)


def _checkpoint(state: dict[str, Any], _: str) -> None:
    url = f"s3://{_BUCKET}/checkpoint"
    dcp_s3.load_safetensors(_URL, state)
    dcp.save(state, storage_writer=dcp_s3.S3StorageWriter(url, overwrite=True))
    dcp.load(state, storage_reader=dcp_s3.S3StorageReader(url), planner=dcp_s3.S3LoadPlanner())


def _copy(state: dict[str, Any], directory: str) -> None:
    if dist.get_rank() == 0:
        client = boto3.client("s3")
        for found in client.list_objects_v2(Bucket=_BUCKET, Prefix="hf/")["Contents"]:
            client.download_file(_BUCKET, found["Key"], str(Path(directory) / Path(found["Key"]).name))
    dist.barrier()
    for path in Path(directory).glob("*.safetensors"):
        data = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
        length = header_length(bytes(data[:PREFIX].tolist()), data.numel())
        for entry, start in parse_header(bytes(data[PREFIX : PREFIX + length].tolist()), data.numel()):
            full = data[start : start + entry.nbytes].view(entry.dtype).view(entry.shape)
            target: DTensor = state[entry.name]
            part = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(part.to_local())


_WAYS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "load_safetensors": _load,
    "load, save, load": _checkpoint,
    "copy": _copy,
}


def main() -> None:
    """Run the benchmark as the command line says, print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--size", type=parse_size, default=GIB, help="of the weights; default: 1GiB")
    parser.add_argument("--rate", type=parse_size, default=85 * MIB, help="bytes/s of a connection; default: 85MiB")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ |= {**DUMMY_CREDENTIALS, "AWS_DEFAULT_REGION": "us-east-1"}
    table = Table(
        "mesh", "way", "seconds", "of load, save, load", "read from S3", "CPU s/GiB", "peak MiB", box=box.SIMPLE
    )
    link = Link(0.03, options.rate)
    with MemoryS3Process(preallocate=options.size * 9 // 4 + 256 * MIB, link=link) as server:
        os.environ["AWS_ENDPOINT_URL"] = server.endpoint_url
        upload(options.size)
        for mesh in _MESHES:
            add_rows(table, mesh, run(server.endpoint_url, options.size, mesh, options.rounds), options.size)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def run(endpoint: str, size: int, mesh: str, rounds: int) -> dict[str, list[tuple[list[Sample], int]]]:
    """Of each way and round: the samples of the ranks, and the bytes that S3 sent. The first round is not measured."""
    found: dict[str, list[tuple[list[Sample], int]]] = {way: [] for way in _WAYS}
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    for number in range(rounds + 1):
        for way, samples in found.items():
            with tempfile.TemporaryDirectory(prefix="dcp-bench-weights-", dir=memory) as path:
                reset_counters(endpoint)
                ranks = run_ranks(4, on_rank, size, mesh, way, path, timeout=600)
            if number:
                samples.append((ranks, fetch_counters(endpoint).bytes_out))
    return found


def add_rows(table: Table, mesh: str, found: dict[str, list[tuple[list[Sample], int]]], size: int) -> None:
    """A row for each way, with the medians."""

    def seconds(way: str) -> float:
        return statistics.median(max(each.wall_seconds for each in ranks) for ranks, _ in found[way])

    for way, samples in found.items():
        cpu = statistics.median(sum(each.cpu_seconds for each in ranks) for ranks, _ in samples)
        peak = max(each.peak_bytes for ranks, _ in samples for each in ranks)
        sent = statistics.median(sent for _, sent in samples)
        table.add_row(
            mesh, way, f"{seconds(way):.2f}", f"{seconds(way) / seconds('load, save, load'):.2f} x",
            f"{sent / size:.3f} x", f"{cpu * GIB / size:.2f}", f"{peak / MIB:.0f}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
