"""When a save or load fails on one rank: what the ranks are told, and what is left on S3."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import Shard

from dcp_s3 import S3StorageReader, S3StorageWriter, errors
from dcp_s3.format.metadata import load_metadata
from tests.end_to_end.distributed import (
    SMALL_PARTS,
    assert_same,
    distribute,
    failures_by_rank,
    load_together,
    manifests,
    rank_of,
    save_together,
)
from tests.faulty import BUCKET, FaultyServer
from tests.memory_s3 import Fault
from tests.ranks import run_ranks
from tests.servers import S3Server


class _BrokenPlanner(DefaultSavePlanner):
    """Fails on one rank, at its last item, when most of its objects are complete."""

    def __init__(self, rank: int, entry: str) -> None:
        super().__init__()
        self._broken_rank = rank
        self._entry = entry

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        if dist.get_rank() == self._broken_rank and write_item.index.fqn == self._entry:
            raise ValueError(f"no data for {write_item.index.fqn}")
        return super().resolve_data(write_item)


class _WrongPlanner(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        return "text" if dist.get_rank() == 1 else super().resolve_data(write_item)


def _large_state(fill: float) -> dict[str, Any]:
    """Four entries; on each of two ranks 6 MB of each, so that each becomes an object of several parts."""
    return {f"e{n}": distribute(torch.full((2, 1_500_000), fill + n), Shard(0)) for n in range(4)}


def _save_failing(url: str, planner: Any = None, overwrite: bool = False, fill: float = 1.0) -> BaseException | None:
    writer = S3StorageWriter(url, overwrite=overwrite, settings={**SMALL_PARTS, "retry_attempts": 2})
    try:
        dcp.save(_large_state(fill), storage_writer=writer, planner=planner)
    except BaseException as error:  # noqa: BLE001 - CheckpointException is no Exception
        return error
    return None


def _load_large(url: str, fill: float) -> None:
    state = _large_state(0.0)
    dcp.load(state, storage_reader=S3StorageReader(url))
    for name, value in _large_state(fill).items():
        assert_same(name, state[name].full_tensor(), value.full_tensor())


def _ranks_with_objects(keys: Any) -> set[int]:
    return {rank_of(key) for key in keys if key.endswith(".distcp")}


def _objects_of(data: bytes) -> set[str]:
    """Keys of the objects to which a .metadata refers."""
    metadata = load_metadata(data, url="here")
    return {f"run/{info.relative_path}" for info in metadata.storage_data.values()}


def test_a_planner_that_raises_on_one_rank(root: str, bucket: str, memory_server: S3Server) -> None:
    failures = failures_by_rank(run_ranks(2, _save_failing, root, _BrokenPlanner(1, "e3")))
    assert set(failures) == {1}
    assert isinstance(failures[1], ValueError)
    assert "no data for e3" in str(failures[1])
    keys = memory_server.handle.objects(bucket)
    assert "run/.metadata" not in keys
    assert not manifests(memory_server, bucket)
    assert 1 not in _ranks_with_objects(keys)
    assert memory_server.handle.open_uploads(bucket) == []


def test_a_planner_that_returns_what_cannot_be_stored(root: str, bucket: str, memory_server: S3Server) -> None:
    failures = failures_by_rank(run_ranks(2, _save_failing, root, _WrongPlanner()))
    assert set(failures) == {1}
    assert isinstance(failures[1], errors.SaveProtocolError)
    assert "run/.metadata" not in memory_server.handle.objects(bucket)


def _overwrite_failing(url: str) -> BaseException | None:
    assert _save_failing(url, fill=1.0) is None
    error = _save_failing(url, overwrite=True, fill=5.0)
    _load_large(url, 1.0)  # the one that was to be overwritten is whole
    return error


@pytest.mark.quick("1-CompleteMultipartUpload-fault1-AccessDeniedError")
@pytest.mark.parametrize(
    ("rank", "operation", "fault", "expected"),
    [
        (1, "UploadPart", Fault.error(403, "AccessDenied"), errors.AccessDeniedError),
        (1, "CompleteMultipartUpload", Fault.error(403, "AccessDenied"), errors.AccessDeniedError),
        (0, "CompleteMultipartUpload", Fault.error_in_200("InternalError"), errors.TransferError),
    ],
)
def test_s3_refuses_one_object_of_one_rank(
    faulty: FaultyServer, rank: int, operation: str, fault: Fault, expected: type[BaseException]
) -> None:
    committed = []

    def rule(request: Any) -> Fault | None:
        if request.operation == "PutObject" and request.key == "run/.metadata":
            committed.append(request.key)
        # Only the last object: those before it may be complete by then.
        return fault if committed and request.operation == operation and f"__{rank}_3-" in request.key else None

    faulty.rule = rule
    failures = failures_by_rank(run_ranks(2, _overwrite_failing, f"s3://{BUCKET}/run"))
    assert set(failures) == {rank}
    assert isinstance(failures[rank], expected)
    assert f"__{rank}_3-" in str(failures[rank])
    assert len(committed) == 1
    assert faulty.s3.open_uploads(BUCKET) == []
    keys = set(faulty.s3.objects(BUCKET))
    left = keys - _objects_of(faulty.s3.read(BUCKET, "run/.metadata"))
    assert _ranks_with_objects(left) <= {1 - rank}
    assert len([key for key in keys if "manifest" in key]) == 1


def _commit_failing(url: str) -> list[BaseException | None]:
    outcome = [_save_failing(url, fill=fill) for fill in (1.0, 2.0, 3.0)]
    _load_large(url, 3.0)
    return outcome


def test_s3_refuses_the_commit(faulty: FaultyServer) -> None:
    refused: list[str] = []

    def rule(request: Any) -> Fault | None:
        for name in ("manifest-", ".metadata"):
            if request.operation == "PutObject" and name in request.key and name not in refused:
                refused.append(name)
                return Fault.error(403, "AccessDenied")
        return None

    faulty.rule = rule
    outcome = run_ranks(2, _commit_failing, f"s3://{BUCKET}/run")
    assert refused == ["manifest-", ".metadata"]
    for attempt in (0, 1):
        failures = failures_by_rank([told[attempt] for told in outcome])
        assert set(failures) == {0}
        assert isinstance(failures[0], errors.AccessDeniedError)
    # The URL was still free after both.
    assert [told[2] for told in outcome] == [None, None]
    assert faulty.s3.open_uploads(BUCKET) == []


def _save_three_times(url: str) -> BaseException | None:
    assert save_together(url, 1) is None
    error = save_together(url, 2)
    load_together(url, 1)
    assert save_together(url, 3, overwrite=True) is None
    load_together(url, 3)
    return error


def test_every_rank_is_told_that_a_checkpoint_exists(root: str, s3: Any, bucket: str) -> None:
    failures = failures_by_rank(run_ranks(2, _save_three_times, root))
    assert isinstance(failures[0], errors.CheckpointExistsError)
    # One checkpoint: .metadata, manifest, data.
    assert len(_keys(s3, bucket)) == 3


def _keys(client: Any, bucket: str) -> set[str]:
    return {found["Key"] for found in client.list_objects_v2(Bucket=bucket).get("Contents", [])}


def _load_nothing(url: str) -> BaseException | None:
    try:
        dcp.load({"w": torch.zeros(1)}, storage_reader=S3StorageReader(url))
    except CheckpointException as error:
        return error
    return None


@pytest.mark.parametrize(
    ("where", "expected"),
    [("{root}", errors.CheckpointNotFoundError), ("s3://no-such-bucket-here/run", errors.BucketNotFoundError)],
)
def test_every_rank_is_told_that_there_is_nothing_to_load(
    root: str, memory_server: S3Server, where: str, expected: type[BaseException]
) -> None:
    failures = failures_by_rank(run_ranks(2, _load_nothing, where.format(root=root)))
    assert set(failures) == {0, 1}
    assert {type(error) for error in failures.values()} == {expected}


def _load_failing(url: str) -> BaseException | None:
    assert _save_failing(url) is None
    try:
        dcp.load(_large_state(0.0), storage_reader=S3StorageReader(url))
    except CheckpointException as error:
        return error
    return None


def test_a_read_that_fails_on_one_rank_is_told_to_all(faulty: FaultyServer) -> None:
    # In equal worlds only rank 1 reads what rank 1 wrote.
    fault = Fault.error(403, "AccessDenied")
    faulty.rule = lambda request: fault if request.operation == "GetObject" and "__1_" in request.key else None
    failures = failures_by_rank(run_ranks(2, _load_failing, f"s3://{BUCKET}/run"))
    assert set(failures) == {1}
    assert isinstance(failures[1], errors.AccessDeniedError)
