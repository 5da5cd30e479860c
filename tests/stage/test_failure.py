"""A staging that failed passes for a state, until it is saved."""

from __future__ import annotations

import copy
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import _stateful_to_state_dict

from dcp_s3 import S3Stager, S3StorageWriter
from dcp_s3.errors import StagingError
from dcp_s3.stage.handover import MARK, FailedStaging, raise_if_failed
from tests.ranks import run_ranks
from tests.servers import S3Server

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_it_looks_like_a_state() -> None:
    state = FailedStaging(StagingError("no room"))
    assert isinstance(state, dict)
    assert list(_stateful_to_state_dict(state)) == list(state)
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=True)
    plan = planner.create_local_plan()
    assert [item.index.fqn for item in plan.items] == [state.name]
    assert state.name.startswith(MARK)


def test_each_failure_has_a_name_of_its_own() -> None:
    first, second = (FailedStaging(StagingError("no room")) for _ in range(2))
    assert first.name != second.name
    assert list(first) != list(second)


def test_the_cause_is_raised_for_its_name_only() -> None:
    error = StagingError("no room")
    state = FailedStaging(error)
    raise_if_failed([])
    raise_if_failed(["model.weight", MARK, f"{MARK}0"])
    with pytest.raises(StagingError) as failure:
        raise_if_failed(["model.weight", state.name])
    assert failure.value is error


def test_whoever_pickles_or_copies_it_gets_the_cause() -> None:
    error = StagingError("no room")
    state = FailedStaging(error)
    for use in (pickle.dumps, copy.deepcopy):
        with pytest.raises(StagingError) as failure:
            use(state[state.name])
        assert failure.value is error


def test_it_crosses_to_another_process() -> None:
    found = pickle.loads(bytes(ForkingPickler.dumps(FailedStaging(StagingError("no room")))))
    assert isinstance(found, FailedStaging)
    assert isinstance(found.error, StagingError)
    with pytest.raises(StagingError, match="no room"):
        raise_if_failed(found)


def _assert_caused_by(caught: CheckpointException, error: BaseException) -> None:
    assert [type(cause) for cause, _ in caught.failures.values()] == [type(error)]
    assert "no room" in str(caught)


def test_torchs_writer_raises_the_cause(tmp_path: Path) -> None:
    error = StagingError("no room")
    with pytest.raises(CheckpointException) as failure:
        dcp.save(FailedStaging(error), storage_writer=dcp.FileSystemWriter(tmp_path / "c"))
    _assert_caused_by(failure.value, error)
    assert not (tmp_path / "c" / ".metadata").exists()


def test_our_writer_raises_the_cause(root: str, memory_server: S3Server, s3: Any, bucket: str) -> None:
    error = StagingError("no room")
    with pytest.raises(CheckpointException) as failure:
        dcp.save(FailedStaging(error), storage_writer=S3StorageWriter(root))
    _assert_caused_by(failure.value, error)
    dcp.save({"w": torch.ones(3)}, storage_writer=S3StorageWriter(root))  # no half of a checkpoint is in the way


def _fail_on_one_rank(path: str) -> None:
    limit = "1MiB" if dist.get_rank() == 1 else None
    for stager in (S3Stager({"staging_limit": limit}), S3Stager({"staging_limit": limit}, asynchronous=True)):
        answer: Any = dcp.async_save(
            {"w": torch.ones(1_000_000)},
            storage_writer=dcp.FileSystemWriter(path),
            async_stager=stager,
            process_group=dist.group.WORLD,
        )
        future = getattr(answer, "upload_completion", answer)
        with pytest.raises(CheckpointException) as failure:
            future.result(60)
        assert list(failure.value.failures) == [1]
        assert isinstance(failure.value.failures[1][0], StagingError)
        stager.close()


def test_every_rank_learns_of_a_failure_on_one(tmp_path: Path) -> None:
    run_ranks(2, _fail_on_one_rank, str(tmp_path))


def test_an_error_that_can_not_cross_to_another_process_is_told_by_its_text() -> None:
    class Local(Exception):
        pass

    class TwoArguments(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    for error in (Local("text"), TwoArguments(1, 2)):
        carried = FailedStaging(error).error
        assert type(carried) is StagingError
        assert str(error) in str(carried)
        assert type(error).__name__ in str(carried)
