"""Loads of ranks that do not talk to each other: which metadata each of them gets, by which requests.

Also of checkpoints as earlier versions wrote them without collectives: each rank committed one for itself.
"""

from __future__ import annotations

import contextlib
import json
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
from tests.end_to_end.distributed import (
    distribute,
    failures_by_rank,
    random_values,
    rank_of,
)  # fmt: skip
from tests.end_to_end.states import assert_same
from tests.faulty import BUCKET, FaultyServer, serve
from tests.ranks import run_ranks
from tests.retention.making import committing_alone

URL = f"s3://{BUCKET}/run"


class Recording(FaultyServer):
    """Knows the requests for metadata, and the listings."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, str]] = []
        self.rule = self._record

    def _record(self, request: Any) -> None:
        if request.operation == "ListObjectsV2" or request.key.endswith(".metadata"):
            self.requests.append((request.operation, request.key))

    def gets(self) -> list[str]:
        return sorted(key.removeprefix("run/") for operation, key in self.requests if operation == "GetObject")

    def listings(self) -> int:
        return sum(operation == "ListObjectsV2" for operation, _ in self.requests)


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


def _save(seed: int, *, alone: bool, overwrite: bool = False) -> BaseException | None:
    """Without collectives: merged into one checkpoint, or alone."""
    try:
        with committing_alone() if alone else contextlib.nullcontext():
            writer = S3StorageWriter(URL, overwrite=overwrite)
            dcp.save(_state(seed), storage_writer=writer, use_collectives=False)
    except BaseException as error:  # noqa: BLE001 - CheckpointException is no Exception
        return error
    return None


def _load(seed: int, **options: Any) -> tuple[list[str], int]:
    """Returns the names and the number of the collectives."""
    state = _state(-1)
    with counted() as found:
        dcp.load(state, storage_reader=S3StorageReader(URL), **options)
        told = found.names, found.number
    expected = _state(seed)
    for each in (state, expected):
        each["sharded"] = each["sharded"].full_tensor()
    assert_same(state, expected)
    return told


# --- which metadata -----------------------------------------------------------------------------------------


def _save_merged(together: bool) -> None:
    if together:
        dcp.save(_state(10), storage_writer=S3StorageWriter(URL))
    else:
        assert _save(10, alone=False) is None


def _load_without_a_group_and_with_one() -> None:
    assert _load(10, no_dist=True) == ([], 0)
    dist.barrier()
    names, number = _load(10)
    assert names, "the count does not see torch's collectives"
    assert number > 0


@pytest.mark.parametrize("together", [False, True])
def test_a_load_without_a_group_has_no_collective(recording: Recording, together: bool) -> None:
    run_ranks(2, _save_merged, together)
    recording.requests.clear()
    run_ranks(2, _load_without_a_group_and_with_one)
    # Each rank of both loads. Nobody looks for __0.metadata, and nobody lists.
    assert recording.gets() == [".metadata"] * 4
    assert recording.listings() == 0


def _save_alone_once() -> None:
    assert _save(10, alone=True) is None
    _load(10)
    # Each commits for itself: a replacement that is cut off would be a mixture.
    for overwrite in (False, True):
        refused = _save(20, alone=True, overwrite=overwrite)
        assert isinstance(refused, errors.CheckpointExistsError), repr(refused)
        assert URL in str(refused)
    dist.barrier()
    _load(10)


def _load_own() -> None:
    assert _load(10, no_dist=True) == ([], 0)


def _load_with_one_missing() -> BaseException | None:
    plain = torch.zeros(5)
    with pytest.raises(CheckpointException) as caught:
        dcp.load({"plain": plain}, storage_reader=S3StorageReader(URL))
    assert not plain.any()
    return caught.value


def test_each_rank_commits_and_loads_for_itself(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(2, _save_alone_once)
    objects = recording.s3.objects(BUCKET)
    assert {"run/__0.metadata", "run/__1.metadata"} <= set(objects)
    assert "run/.metadata" not in objects
    manifests = [json.loads(recording.s3.read(BUCKET, key)) for key in objects if "/manifest-" in key]
    assert sorted((each["rank"], each["world_size"]) for each in manifests) == [(0, 2), (1, 2)]
    # Nothing is left of the saves that were refused.
    assert sorted(rank_of(key) for key in objects if key.endswith(".distcp")) == [0, 1]

    recording.requests.clear()
    run_ranks(2, _load_own)
    assert recording.gets() == [".metadata", ".metadata", "__0.metadata", "__1.metadata"]
    assert recording.listings() == 4  # each rank looks for safetensors files, then for metadata of single ranks

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
