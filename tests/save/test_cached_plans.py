"""Plans that torch caches, after a save that failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_s3 import S3StorageWriter, errors, verify
from dcp_s3.save.save import Save
from tests.ranks import run_ranks


def _save(url: str, *, extra: bool) -> None:
    state = {"w": torch.ones(9), f"of_{dist.get_rank()}": torch.ones(3)}
    if extra and dist.get_rank() == 1:
        state["only_of_1"] = torch.ones(5)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(state, storage_writer=S3StorageWriter(url), planner=planner)


def _after_a_failure(url: str) -> str:
    _save(f"{url}/0", extra=False)
    check = Save.prepare_global_plan

    def fail(*_: Any) -> Any:
        raise errors.SaveProtocolError("two saves overlapped")

    Save.prepare_global_plan = fail  # type: ignore[method-assign]
    with pytest.raises(CheckpointException):
        _save(f"{url}/1", extra=True)
    Save.prepare_global_plan = check  # type: ignore[method-assign]
    with pytest.raises(CheckpointException) as caught:
        _save(f"{url}/2", extra=True)
    return str(next(iter(caught.value.failures.values()))[0])


@pytest.mark.servers("memory")
def test_a_save_whose_ranks_have_plans_of_another_state_is_not_committed(root: str) -> None:
    for text in run_ranks(2, _after_a_failure, root):
        assert "'only_of_1' was planned, and no rank has written all of it" in text
    assert verify(f"{root}/0", full=True).ok
    with pytest.raises(errors.CheckpointNotFoundError):
        verify(f"{root}/2")
