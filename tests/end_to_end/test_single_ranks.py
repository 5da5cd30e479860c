"""Loads of ranks that do not talk to each other: which metadata each of them gets, by which requests.

Also of checkpoints as earlier versions wrote them without collectives: each rank committed one for itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.s3.store import S3Store
from dcp_s3.settings import Settings
from tests.collectives import counted
from tests.end_to_end.states import assert_same, distribute, failures_by_rank, random_values, rank_of
from tests.faulty import BUCKET, FaultyServer, serve
from tests.ranks import run_ranks
from tests.retention.making import committing_alone

URL = f"s3://{BUCKET}/run"


@pytest.fixture
def gets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[FaultyServer, list[str]]]:
    """A server, and the keys of the metadata that was asked for."""
    monkeypatch.setenv("DCP_S3_RUN_ID", "a-run")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    asked: list[str] = []

    def record(request: Any) -> None:
        if request.key.endswith(".metadata"):
            asked.append(request.key.removeprefix("run/"))

    with serve(monkeypatch, FaultyServer()) as server:
        server.rule = record
        yield server, asked


def _state(seed: int) -> dict[str, Any]:
    return {
        "sharded": distribute(random_values(seed, 7, 3), Shard(0)),
        "plain": random_values(seed, 5),
        "own": {dist.get_rank(): random_values(seed + dist.get_rank(), 5)},
        "step": seed,
    }


def _save(*, alone: bool, **options: Any) -> None:
    with committing_alone() if alone else contextlib.nullcontext():
        dcp.save(_state(10), storage_writer=S3StorageWriter(URL, **options), use_collectives=False)


def _load(**options: Any) -> int:
    state = _state(-1)
    with counted() as found:
        dcp.load(state, storage_reader=S3StorageReader(URL), **options)
        number = found.number
    expected = _state(10)
    for each in (state, expected):
        each["sharded"] = each["sharded"].full_tensor()
    assert_same(state, expected)
    return number


def _save_merged() -> None:
    _save(alone=False)


def _load_without_a_group_and_with_one() -> None:
    assert _load(no_dist=True) == 0
    dist.barrier()
    assert _load() > 0


def test_a_load_without_a_group_has_no_collective(gets: tuple[FaultyServer, list[str]]) -> None:
    _, asked = gets
    run_ranks(2, _save_merged)
    asked.clear()
    run_ranks(2, _load_without_a_group_and_with_one)
    # Each rank of both loads. Nobody looks for __0.metadata, and nobody lists.
    assert asked == [".metadata"] * 4


def _save_alone_once() -> None:
    _save(alone=True)
    _load()
    # Each commits for itself: a replacement that is cut off would be a mixture.
    for overwrite in (False, True):
        with pytest.raises(errors.CheckpointExistsError, match=URL):
            _save(alone=True, overwrite=overwrite)
    dist.barrier()
    _load()


def _load_own() -> None:
    assert _load(no_dist=True) == 0


def _load_with_one_missing() -> BaseException | None:
    plain = torch.zeros(5)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"plain": plain}, storage_reader=S3StorageReader(URL))
    assert not plain.any()
    return caught.value


def test_each_rank_commits_and_loads_for_itself(
    gets: tuple[FaultyServer, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, asked = gets
    run_ranks(2, _save_alone_once)
    objects = server.s3.objects(BUCKET)
    assert {"run/__0.metadata", "run/__1.metadata"} <= set(objects)
    assert "run/.metadata" not in objects
    # Nothing is left of the saves that were refused.
    assert sorted(rank_of(key) for key in objects if key.endswith(".distcp")) == [0, 1]

    asked.clear()
    run_ranks(2, _load_own)
    assert sorted(asked) == [".metadata", ".metadata", "__0.metadata", "__1.metadata"]

    # A process of a launcher, without torch.distributed.
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    state = {"own": {1: torch.zeros(5)}}
    dcp.load(state, storage_reader=S3StorageReader(URL))
    assert_same(state["own"][1], random_values(11, 5))

    S3Store(BUCKET, Settings()).delete(["run/__1.metadata"])
    failures = failures_by_rank(run_ranks(2, _load_with_one_missing))
    assert set(failures) == {1}
    assert isinstance(failures[1], errors.CheckpointNotFoundError)
    assert URL in str(failures[1])
