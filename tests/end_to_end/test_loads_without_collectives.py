"""Loads of ranks that do not talk to each other: which metadata each of them gets, by which requests."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard

from dcp_s3 import S3StorageReader, S3StorageWriter
from tests.collectives import counted
from tests.end_to_end.distributed import assert_same, distribute, random_values
from tests.faulty import BUCKET, FaultyServer, serve
from tests.killing import begin, new_process, running
from tests.ranks import run_ranks
from tests.single_ranks import committing_alone

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

URL = f"s3://{BUCKET}/run"


class Recording(FaultyServer):
    """Knows the requests for metadata, and the listings."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, str, str]] = []
        self.rule = self._record

    def _record(self, request: Any) -> None:
        if request.operation == "ListObjectsV2" or request.key.endswith(".metadata"):
            self.requests.append((request.operation, request.key, request.range or ""))

    def gets(self) -> list[str]:
        return sorted(key.removeprefix("run/") for operation, key, _ in self.requests if operation == "GetObject")

    def listings(self) -> int:
        return sum(operation == "ListObjectsV2" for operation, _, _ in self.requests)


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Recording]:
    monkeypatch.setenv("DCP_S3_RUN_ID", "a-run")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serve(monkeypatch, Recording()) as server:
        assert isinstance(server, Recording)
        yield server


def _state(seed: int) -> dict[str, Any]:
    return {
        "sharded": distribute(random_values(seed, 7, 3), Shard(0)),
        "plain": random_values(seed, 5),
        "own": {dist.get_rank(): random_values(seed + dist.get_rank(), 5)},
        "step": seed,
    }


def _blank() -> dict[str, Any]:
    return {
        "sharded": distribute(torch.zeros(7, 3), Shard(0)),
        "plain": torch.zeros(5),
        "own": {dist.get_rank(): torch.zeros(5)},
        "step": -1,
    }


def _load(url: str, **options: Any) -> tuple[dict[str, Any], list[str], int]:
    state = _blank()
    with counted() as found:
        dcp.load(state, storage_reader=S3StorageReader(url), **options)
    return state, found.names, found.number


def _check(state: dict[str, Any], seed: int) -> None:
    for name, value in _state(seed).items():
        if name == "sharded":
            assert_same(name, state[name].full_tensor(), value.full_tensor())
        elif name == "own":
            assert_same(name, state[name][dist.get_rank()], value[dist.get_rank()])
        else:
            assert_same(name, state[name], value)


def _save(merge: bool) -> None:
    with contextlib.nullcontext() if merge else committing_alone():
        dcp.save(_state(10), storage_writer=S3StorageWriter(URL), use_collectives=False)


def _load_alone_and_together() -> None:
    state, names, number = _load(URL, no_dist=True)
    assert (names, number) == ([], 0)
    _check(state, 10)
    dist.barrier()
    _, names, number = _load(URL)
    assert names, "the count does not see torch's collectives"
    assert number > 0


@pytest.mark.parametrize("together", [False, True])
def test_a_load_without_a_group_has_no_collective(recording: Recording, together: bool) -> None:
    if together:
        run_ranks(2, _save_together)
    else:
        run_ranks(2, _save, True)
    recording.requests.clear()
    run_ranks(2, _load_alone_and_together)
    # Each rank of both loads. Nobody looks for __0.metadata, and nobody lists.
    assert recording.gets() == [".metadata"] * 4
    assert recording.listings() == 0


def _save_together() -> None:
    dcp.save(_state(10), storage_writer=S3StorageWriter(URL))


def _load_own() -> int:
    state, names, number = _load(URL, no_dist=True)
    assert (names, number) == ([], 0)
    _check(state, 10)
    return dist.get_rank()


def test_a_rank_without_a_group_gets_its_own_checkpoint(recording: Recording) -> None:
    run_ranks(2, _save, False)
    recording.requests.clear()
    assert run_ranks(2, _load_own) == [0, 1]
    assert recording.gets() == [".metadata", ".metadata", "__0.metadata", "__1.metadata"]
    assert recording.listings() == 2


def _load_first() -> None:
    state = {"plain": torch.zeros(5)}
    dcp.load(state, storage_reader=S3StorageReader(URL), no_dist=True)
    assert_same("plain", state["plain"], random_values(10, 5))


def _save_plain() -> None:
    with committing_alone():
        dcp.save({"plain": random_values(10, 5)}, storage_writer=S3StorageWriter(URL), use_collectives=False)


def test_the_checkpoint_of_a_single_rank_is_everybodys(recording: Recording) -> None:
    run_ranks(1, _save_plain)
    run_ranks(2, _load_first)


# --- processes that have no torch.distributed -------------------------------------------------------------


def _process(environment: dict[str, str], rank: int, tmp_path: Path, seconds: float) -> None:
    begin({**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, tmp_path / f"{rank}.out")
    state = {"own": torch.zeros(5), "step": -1}
    with counted() as found:
        dcp.load(state, storage_reader=S3StorageReader(URL))
    assert (found.names, found.number) == ([], 0)
    assert_same("own", state["own"], random_values(10 + rank, 5))
    (tmp_path / f"{rank}.json").write_text(json.dumps({"step": state["step"]}))


def _save_own() -> None:
    state = {"own": random_values(10 + dist.get_rank(), 5), "step": 10}
    with committing_alone():
        dcp.save(state, storage_writer=S3StorageWriter(URL), use_collectives=False)


def test_a_process_of_a_launcher_gets_its_own_checkpoint(recording: Recording, tmp_path: Path) -> None:
    run_ranks(3, _save_own)
    processes = [new_process(_process, {**os.environ, "WORLD_SIZE": "3"}, rank, tmp_path, 0) for rank in range(3)]
    with running(processes):
        until = time.monotonic() + 60
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        assert [process.exitcode for process in processes] == [0, 0, 0], [
            (tmp_path / f"{rank}.out").read_text() for rank in range(3)
        ]
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)] == [{"step": 10}] * 3
