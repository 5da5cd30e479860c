"""What the local-disk tier costs: saves to disk, the drain, and saves to S3 with the tier switched on.

``python -m benchmarks.spill --directory /nvme/bench`` starts an in-memory S3 server in a process of its own. Each round
saves a Llama-shaped state in each of these ways, one rank, no process group:

- ``write + fsync``: the state's bytes to one file whose space is reserved, flushed: what the disk allows.
- ``local``: ``dcp.save`` with ``durability="local"``, until it returns. Nothing is drained meanwhile.
- ``drain``: what that left, to S3, until it is committed.
- ``S3``: ``dcp.save`` without a spill directory.
- ``S3, may spill``: the same with a spill directory that is not needed.
- ``torch's files``: ``dcp.save`` with torch's FileSystemWriter to the same disk, flushed.

After the first round the checkpoint is loaded from S3 and compared bit by bit.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import boto3
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table

from benchmarks.llama import llama_state
from benchmarks.measure import Sample, measure
from benchmarks.report import machine
from benchmarks.save_load import RESULTS
from benchmarks.units import GIB, MIB, parse_size
from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.spill.drain import Drainer, stop_draining
from dcp_s3.spill.store import SpillStore
from tests.memory_s3 import MemoryS3Process

State = dict[str, torch.Tensor]
_ROOT = "s3://bench/run"


class Cases:
    """The ways to save ``state``; everything on disk goes below ``directory``."""

    def __init__(self, state: State, directory: Path) -> None:
        self._state = state
        self._files = directory / "files"
        self._spill = directory / "spill"

    def run(self) -> dict[str, Sample]:
        """Each once; nothing of it is left on disk."""
        samples = {"write + fsync": self._measure(self._write)}
        store = SpillStore(self._spill)
        with store.drainer():  # the background drain leaves the directory alone
            samples["local"] = self._measure(
                lambda: self._save("local", durability="local", spill_dir=str(self._spill))
            )
            stop_draining()
        samples["drain"] = self._measure(lambda: self._drain(store))
        samples["S3"] = self._measure(lambda: self._save("s3", spill_dir=None))
        samples["S3, may spill"] = self._measure(lambda: self._save("may-spill", spill_dir=str(self._spill)))
        samples["torch's files"] = self._measure(
            lambda: dcp.save(self._state, storage_writer=dcp.FileSystemWriter(self._files / "torch"), no_dist=True)
        )
        shutil.rmtree(self._files)
        return samples

    def check(self) -> None:
        """Load what was drained.

        Raises:
            RuntimeError: it is not what was saved.
        """
        loaded = {name: torch.zeros_like(tensor) for name, tensor in self._state.items()}
        dcp.load(loaded, storage_reader=S3StorageReader(f"{_ROOT}/local"), no_dist=True)
        for name, tensor in self._state.items():
            if not torch.equal(tensor.view(torch.int32), loaded[name].view(torch.int32)):
                raise RuntimeError(f"{name} was not loaded as it was saved")

    def _measure(self, operation: Callable[[], object]) -> Sample:
        os.sync()  # a case does not pay for what the one before left to be written
        return measure(operation)

    def _save(self, name: str, **settings: object) -> None:
        writer = S3StorageWriter(f"{_ROOT}/{name}", overwrite=True, settings=settings)
        dcp.save(self._state, storage_writer=writer, no_dist=True)

    @staticmethod
    def _drain(store: SpillStore) -> None:
        report = Drainer(store).run()
        if report.waiting or report.refused or report.busy:
            raise RuntimeError(f"not drained: {report}")

    def _write(self) -> None:
        self._files.mkdir(exist_ok=True)
        fd = os.open(self._files / "raw", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.posix_fallocate(fd, 0, sum(tensor.nbytes for tensor in self._state.values()))
            offset = 0
            for tensor in self._state.values():
                view = memoryview(tensor.numpy()).cast("B")
                done = 0
                while done < view.nbytes:
                    done += os.pwrite(fd, view[done : done + 64 * MIB], offset + done)
                offset += done
            os.fsync(fd)
        finally:
            os.close(fd)


def main() -> None:
    """Run the benchmark as the command line says; print a table, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spill", description="What the local-disk tier costs.")
    parser.add_argument("--directory", type=Path, help="on the disk to measure; default: the temporary directory")
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--size", type=parse_size, default=GIB, help="of the state; default: 1GiB")
    parser.add_argument("--json", type=Path, default=RESULTS / "spill.json", help="default: %(default)s")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    state = llama_state(options.size)
    size = sum(tensor.nbytes for tensor in state.values())
    rounds: list[dict[str, Sample]] = []
    with (
        MemoryS3Process(preallocate=4 * size) as server,
        tempfile.TemporaryDirectory(dir=options.directory) as directory,
    ):
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "benchmark", "AWS_REGION": "us-east-1",
            "DCP_S3_ENDPOINT_URL": server.endpoint_url,
        }  # fmt: skip
        boto3.client("s3", endpoint_url=server.endpoint_url, region_name="us-east-1").create_bucket(Bucket="bench")
        Cases(llama_state(4 * MIB), Path(directory)).run()  # imports, clients, threads
        cases = Cases(state, Path(directory))
        for number in range(options.rounds):
            rounds.append(cases.run())
            if number == 0:
                cases.check()
    Console().print(_table(rounds, size))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "machine": machine(),
        "bytes": size,
        "rounds": [{n: asdict(s) for n, s in each.items()} for each in rounds],
    }
    options.json.write_text(json.dumps(facts, indent=1, default=str) + "\n")


def _table(rounds: list[dict[str, Sample]], size: int) -> Table:
    table = Table(
        "", "GiB/s", "CPU s/GiB", "x write + fsync", "x S3", "peak MiB", title=f"{size / GIB:.2f} GiB, medians"
    )

    def median(name: str, value: Callable[[dict[str, Sample], Sample], float]) -> float:
        return statistics.median(value(each, each[name]) for each in rounds)

    for name in rounds[0]:
        table.add_row(
            name,
            f"{median(name, lambda _, sample: size / GIB / sample.wall_seconds):.2f}",
            f"{median(name, lambda _, sample: sample.cpu_seconds * GIB / size):.2f}",
            f"{median(name, lambda each, sample: sample.wall_seconds / each['write + fsync'].wall_seconds):.2f}",
            f"{median(name, lambda each, sample: sample.wall_seconds / each['S3'].wall_seconds):.2f}",
            f"{median(name, lambda _, sample: sample.peak_bytes / MIB):.0f}",
        )
    return table


if __name__ == "__main__":
    main()
