"""Measures saves, loads and staging of a state on a CUDA device, next to torch's own stager, in one run.

``python -m benchmarks.gpu --size 8GiB`` needs a CUDA device, and host memory of about six times the size: the in-memory
S3 server keeps two checkpoints, and staged copies are pinned. Of every save the checkpoint is loaded and compared with
what the state was at the call, bit by bit; meanwhile the state is changed, as training does once a copy is made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import AsyncStager, BlockingAsyncStager

from benchmarks.units import GIB, parse_size
from dcp_s3 import S3Stager, S3StorageReader, S3StorageWriter
from tests.memory_s3 import MemoryS3Process

_BUCKET, _TENSORS, _WORK_SIZE = "bucket", 64, 4096

_STAGERS: dict[str, Callable[[], AsyncStager]] = {
    "S3Stager(asynchronous=True)": lambda: S3Stager(asynchronous=True),
    "S3Stager()": S3Stager,
    "torch's BlockingAsyncStager": lambda: BlockingAsyncStager(cache_staged_state_dict=True),
}


class Work:
    """Matrix products, in the place of training."""

    def __init__(self) -> None:
        self._factor = torch.randn(_WORK_SIZE, _WORK_SIZE, device="cuda", dtype=torch.bfloat16)

    def until(self, is_over: Callable[[], bool]) -> float:
        """Work until ``is_over``; returns products per second."""
        torch.cuda.synchronize()
        began, count = time.monotonic(), 0
        while count == 0 or not is_over():
            for _ in range(10):
                torch.mm(self._factor, self._factor)
            torch.cuda.synchronize()
            count += 10
        return count / (time.monotonic() - began)


def make_state(size: int) -> dict[str, Any]:
    """``size`` bytes of bfloat16 in 64 tensors."""
    rows = size // _TENSORS // 2 // 4096
    return {f"layer.{n}": torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16) for n in range(_TENSORS)}


def check(url: str, expected: dict[str, torch.Tensor]) -> float:
    """Load and compare; returns the seconds of the load."""
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    torch.cuda.synchronize()
    began = time.monotonic()
    dcp.load(found, storage_reader=S3StorageReader(url))
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    for name, tensor in expected.items():
        if not torch.equal(found[name], tensor):
            raise AssertionError(f"{name} is not what was saved")
    return seconds


def save_in_background(state: dict[str, Any], url: str, stager: AsyncStager, work: Work, quiet: float) -> list[float]:
    """Seconds of the stall, seconds until the state may change, and products per second meanwhile and until the commit,
    as fractions of those without a save."""
    torch.cuda.synchronize()
    began = time.monotonic()
    begun: Any = dcp.async_save(
        state, storage_writer=S3StorageWriter(url, overwrite=True), async_stager=stager, process_group=dist.group.WORLD
    )
    stall = time.monotonic() - began
    staged, upload = stall, begun
    if hasattr(begun, "staging_completion"):
        begun.staging_completion.result()
        staged, upload = time.monotonic() - began, begun.upload_completion
    for tensor in state.values():
        tensor.add_(1)
    rate = work.until(upload.done)
    upload.result()
    return [stall, staged, rate / quiet]


def rounds_of(count: int) -> Iterator[tuple[int, str, Callable[[], AsyncStager]]]:
    """Rounds of all stagers, alternating."""
    for number in range(count):
        for name, make in _STAGERS.items():
            yield number, name, make


def main() -> None:
    """Run the benchmark as the command line says, and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=parse_size, default=8 * GIB, help="bytes of the state, like 8GiB")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    torch.cuda.set_device(0)
    with MemoryS3Process(preallocate=int(2.6 * options.size)) as s3, tempfile.TemporaryDirectory() as directory:
        os.environ.update(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x", AWS_REGION="us-east-1")
        os.environ["AWS_ENDPOINT_URL_S3"] = s3.endpoint_url
        boto3.client("s3").create_bucket(Bucket=_BUCKET)
        dist.init_process_group("gloo", init_method=f"file://{Path(directory) / 'store'}", rank=0, world_size=1)
        _measure(options.size, options.rounds)
        dist.destroy_process_group()


def _measure(size: int, rounds: int) -> None:
    state, url = make_state(size), f"s3://{_BUCKET}/run/step-1"
    size = sum(tensor.nbytes for tensor in state.values())
    print(f"{size / GIB:.1f} GiB on {torch.cuda.get_device_name()}, torch {torch.__version__}, {os.cpu_count()} cores")
    saves, loads = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.monotonic()
        dcp.save(state, storage_writer=S3StorageWriter(url, overwrite=True))
        saves.append(time.monotonic() - began)
        loads.append(check(url, state))
    _show("dcp.save from the device", saves, size)
    _show("dcp.load to the device", loads, size)
    work = Work()
    began = time.monotonic()
    quiet = work.until(lambda: time.monotonic() - began > 2)
    stagers = {name: make() for name, make in _STAGERS.items()}
    figures: dict[str, list[list[float]]] = {name: [] for name in stagers}
    for _, name, _ in rounds_of(rounds + 1):
        expected = {key: tensor.clone() for key, tensor in state.items()}
        figures[name].append(save_in_background(state, url, stagers[name], work, quiet))
        check(url, expected)
    for name, found in figures.items():
        first, later = found[0], [statistics.median(column) for column in zip(*found[1:], strict=True)]
        print(
            f"{name}: stall {1000 * later[0]:.1f} ms, copied after {1000 * later[1]:.0f} ms "
            f"({size / GIB / later[1]:.1f} GiB/s), work during the upload {later[2]:.2f} of quiet; "
            f"first save {1000 * first[0]:.0f} and {1000 * first[1]:.0f} ms"
        )


def _show(name: str, seconds: list[float], size: int) -> None:
    median = statistics.median(seconds[1:] or seconds)
    print(f"{name}: {median:.2f} s ({size / GIB / median:.2f} GiB/s), the first {seconds[0]:.2f} s")


if __name__ == "__main__":
    main()
