"""What a save, a load and a prune pass through: functions, files and calls of dcp_s3.

``python -m benchmarks.walks`` saves three items from one rank to an in-memory server, loads them, and prunes three
checkpoints down to one, each for the second time (the first one imports, and looks at what the store can do). A
profile function of all threads counts what is called by name in the package (no comprehensions, no lambdas); ``--list``
names the files and functions in the order of their first calls.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table

import dcp_s3
from tests.memory_s3.process import MemoryS3Process

PACKAGE = Path(dcp_s3.__file__).parent


class Walk:
    """Counts the calls of functions of the package while it is entered; the key is file, function and first line."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str, int]] = Counter()

    def _note(self, frame: types.FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and not code.co_name.startswith("<"):
            file = str(Path(code.co_filename).relative_to(PACKAGE))
            self.calls[
                file, code.co_qualname if sys.version_info >= (3, 11) else code.co_name, code.co_firstlineno
            ] += 1

    def __enter__(self) -> Walk:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    @property
    def files(self) -> list[str]:
        """The files, in the order in which they were entered."""
        return list(dict.fromkeys(file for file, _, _ in self.calls))


def walk(work: Callable[[], object]) -> Walk:
    """Count what a call of ``work`` passes through."""
    with Walk() as counted:
        work()
    return counted


def _state(step: float) -> dict[str, Any]:
    return {"weight": torch.full((1000,), step), "bias": torch.full((10,), step), "step": int(step)}


def _save(url: str, step: int) -> None:
    dcp.save(_state(step), storage_writer=dcp_s3.S3StorageWriter(url), no_dist=True)


def _load(url: str) -> None:
    dcp.load(_state(0), storage_reader=dcp_s3.S3StorageReader(url), no_dist=True)


def measure() -> dict[str, Walk]:
    """The walks by name, against the server of the environment."""
    walks: dict[str, Walk] = {}
    for turn in ("first", "second"):
        root = f"s3://bucket/{turn}"
        for step in (1, 2):
            _save(f"{root}/step-{step}", step)
        walks["save"] = walk(lambda root=root: _save(f"{root}/step-3", 3))  # type: ignore[misc]
        walks["load"] = walk(lambda root=root: _load(f"{root}/step-3"))  # type: ignore[misc]
        walks["prune"] = walk(lambda root=root: dcp_s3.prune(root, "latest:1"))  # type: ignore[misc]
    return walks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the files and functions")
    options = parser.parse_args()
    with MemoryS3Process() as server:
        os.environ |= {"DCP_S3_ENDPOINT_URL": server.endpoint_url, "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        boto3.client("s3", endpoint_url=server.endpoint_url).create_bucket(Bucket="bucket")
        walks = measure()
    table = Table("walk", "functions", "files", "calls")
    for name, walked in walks.items():
        table.add_row(name, str(len(walked.calls)), str(len(walked.files)), str(walked.calls.total()))
    console = Console()
    console.print(table)
    if options.list:
        for name, walked in walks.items():
            console.print(f"\n{name}", style="bold")
            for file in walked.files:
                called = [
                    f"{function} {count}" for (where, function, _), count in walked.calls.items() if where == file
                ]
                console.print(f"{file}: {', '.join(called)}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
