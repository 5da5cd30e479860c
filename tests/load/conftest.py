"""Loads of several ranks against a server that records what is fetched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from dcp_s3 import S3StorageReader
from dcp_s3.load.fetch import LOAD_BUFFERS
from dcp_s3.offline.copy import copy
from tests.end_to_end.states import random_values
from tests.faulty import BUCKET, FaultyServer, serve

RUN = f"s3://{BUCKET}"
SMALL = {"part_size": "5MiB"}


class Recording(FaultyServer):
    """Knows the bytes of each GET, by the first part of its key."""

    def __init__(self) -> None:
        super().__init__()
        self.gets: dict[str, list[tuple[str, int]]] = {}
        self.rule = self._record

    def _record(self, request: Any) -> None:
        if request.operation == "GetObject":
            first, last = (request.range or "bytes=0-0").removeprefix("bytes=").split("-")
            run = request.key.split("/")[0]
            self.gets.setdefault(run, []).append((request.key, int(last) - int(first) + 1))

    def fetched(self, run: str) -> int:
        return sum(size for key, size in self.gets[run] if key.endswith(".distcp"))

    def metadata_gets(self, run: str) -> int:
        return sum(key.endswith(".metadata") for key, _ in self.gets[run])

    def stored(self, run: str) -> int:
        return sum(size for key, size in self.s3.objects(BUCKET).items() if key.startswith(f"{run}/__"))


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    with serve(monkeypatch, Recording()) as server:
        assert isinstance(server, Recording)
        yield server


def place_on(full: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    # A copy: torch 2.9 takes the memory of a tensor that it need not cut.
    return distribute_tensor(full.clone(), mesh, list(placements), src_data_rank=None)


def load_into(url: str, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """``state`` with what was loaded into it; ``planner``, ``buffers``; others: arguments of the reader."""
    planner, buffers = options.pop("planner", None), options.pop("buffers", LOAD_BUFFERS)
    reader = S3StorageReader(url, settings={**SMALL, **options.pop("settings", {})}, **options)
    with mock.patch("dcp_s3.load.fetch.LOAD_BUFFERS", buffers):
        dcp.load(state, storage_reader=reader, planner=planner)
    return state


def copy_checkpoint(source: str, *runs: str) -> None:
    """The checkpoint at ``source`` under other names, so that their requests can be told apart."""
    if dist.get_rank() == 0:
        for run in runs:
            copy(f"{RUN}/{source}", f"{RUN}/{run}")
    dist.barrier()


def large_state(blank: bool) -> dict[str, Any]:
    return {f"t{n}": torch.zeros(300_000 + n) if blank else random_values(n, 300_000 + n) for n in range(8)}


def assert_large_loads(url: str) -> None:
    state = load_into(url, large_state(True))
    for name, value in large_state(False).items():
        assert torch.equal(state[name], value), name
