"""What incremental saves cost, next to saves that send everything.

``python -m benchmarks.incremental`` starts an in-memory S3 server in a process of its own, whose connections carry 85
MiB/s each, and saves a state of 80 tensors from this process, in turns:

- ``full``: everything is sent,
- ``frozen``: incremental, while every tenth tensor changes between saves,
- ``changing``: incremental, while all tensors change.

Bytes are those of the requests that the server received. Each round is a save of each; the ratios are those of the
medians. The first incremental saves, before which there is nothing to compare with, are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import boto3
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Sample, measure
from benchmarks.report import machine
from benchmarks.save_load import RESULTS, serve_embedded
from benchmarks.units import GIB, MIB, parse_size
from dcp_s3 import S3StorageReader, S3StorageWriter
from tests.memory_s3 import Link
from tests.memory_s3.counters import fetch_counters

BUCKET = "bench"
TENSORS = 80
WAYS = ("full", "frozen", "changing")


@dataclass(frozen=True)
class Save:
    """One save, and the bytes that the server received."""

    way: str
    sample: Sample
    sent: int
    changed: int
    """Bytes of the tensors that had changed."""


class State:
    """One state for all ways, and its saves."""

    def __init__(self, endpoint_url: str, size: int) -> None:
        self.endpoint_url, self.number = endpoint_url, 0
        self.client = boto3.client("s3", endpoint_url=endpoint_url)
        self.tensors = {
            f"layer.{number}": torch.randint(2**30, (size // TENSORS // 4,), dtype=torch.int32)
            for number in range(TENSORS)
        }

    def save(self, way: str) -> Save:
        """Change what changes, and save. Of the checkpoints only the last ``frozen`` one stays."""
        self.number += 1
        changed = [value for number, value in enumerate(self.tensors.values()) if way != "frozen" or number % 10 == 5]
        for value in changed:
            value += self.number
        url = f"s3://{BUCKET}/{way}/step-{self.number}"
        writer = S3StorageWriter(url, incremental=way != "full")
        before = fetch_counters(self.endpoint_url).bytes_in
        sample = measure(lambda: dcp.save(self.tensors, storage_writer=writer, no_dist=True))
        sent = fetch_counters(self.endpoint_url).bytes_in - before
        for key in self._keys(way):
            if way != "frozen" or not key.startswith(f"{way}/step-{self.number}/"):
                self.client.delete_object(Bucket=BUCKET, Key=key)
        for value in changed if way != "frozen" else ():
            value -= self.number
        return Save(way, sample, sent, sum(value.nbytes for value in changed))

    def check(self) -> None:
        """Load the last ``frozen`` one, which is alone by now."""
        (name,) = {key.split("/")[1] for key in self._keys("frozen")}
        found = {name: torch.zeros_like(value) for name, value in self.tensors.items()}
        dcp.load(found, storage_reader=S3StorageReader(f"s3://{BUCKET}/frozen/{name}"), no_dist=True)
        if wrong := [name for name, value in found.items() if not torch.equal(value, self.tensors[name])]:
            raise RuntimeError(f"{name} has other values of {wrong}")

    def _keys(self, way: str) -> list[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{way}/")
        return [each["Key"] for each in found.get("Contents", ())]


def run(size: int, rounds: int, rate: float | None) -> list[Save]:
    """Save in each way, ``rounds`` times."""
    link = None if rate is None else Link(rate=rate)
    with serve_embedded(BUCKET, "us-east-1", 5 * size // 2, link=link) as (endpoint_url, environment):
        os.environ.update(environment)
        state = State(endpoint_url, size)
        for way in ("full", *WAYS):  # to open connections, and for what incremental saves compare with
            state.save(way)
        saves = []
        for _ in range(rounds):
            for way in WAYS:
                saves.append(save := state.save(way))
                print(f"{way:10}{save.sample.wall_seconds:8.3f} s {save.sample.cpu_seconds:8.3f} s of CPU", flush=True)
        state.check()
    return saves


def show(saves: Sequence[Save], console: Console) -> None:
    """Medians, and ratios to a full save."""
    medians = {
        way: [
            statistics.median(figure(save) for save in saves if save.way == way)
            for figure in (
                lambda save: save.sample.wall_seconds,
                lambda save: save.sample.cpu_seconds,
                lambda save: save.sent,
            )
        ]
        for way in WAYS
    }
    table = Table("", "seconds", "of full", "CPU s", "of full", "sent MiB", "of what changed", title="medians")
    for way, (wall, cpu, sent) in medians.items():
        changed = max(save.changed for save in saves if save.way == way)
        table.add_row(
            way, f"{wall:.3f}", f"{wall / medians['full'][0]:.2f}", f"{cpu:.3f}", f"{cpu / medians['full'][1]:.2f}",
            f"{sent / MIB:.1f}", f"{sent / changed:.3f}",
        )  # fmt: skip
    console.print(table)


def main() -> None:
    """Run it as the command line says, print a table, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.incremental", description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=parse_size, default=2 * GIB, help="of the state; default: 2GiB")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--connection-rate", type=parse_size, default=85 * MIB, help="bytes per second; 0: no limit")
    parser.add_argument("--json", type=Path, default=RESULTS / "incremental.json", help="default: %(default)s")
    options = parser.parse_args()
    saves = run(options.size, options.rounds, options.connection_rate or None)
    show(saves, Console())
    options.json.parent.mkdir(parents=True, exist_ok=True)
    described = {"machine": machine(), "size": options.size, "connection_rate": options.connection_rate}
    options.json.write_text(json.dumps({**described, "saves": [asdict(save) for save in saves]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
