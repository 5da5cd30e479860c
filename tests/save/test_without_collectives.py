"""Saves without collectives, as `dcp.save` makes them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_s3 import S3StorageWriter, errors
from dcp_s3.save import without_collectives
from tests.ranks import run_ranks


def _names() -> dict[str, torch.Tensor]:
    return {f"rank-{dist.get_rank()}-{number}": torch.ones(2) for number in range(12)}


def _save(url: str) -> S3StorageWriter:
    writer = S3StorageWriter(url)
    dcp.save(_names(), storage_writer=writer, use_collectives=False)
    return writer


def _again_and_again(root: str) -> None:
    asked = []
    for number in range(1, 4):
        _save(f"{root}/{number}")
        [history] = without_collectives._histories.values()
        last = history.before(number + 1)
        assert last is not None
        asked.append(last.asked)
    assert asked[0]
    assert asked[0] == asked[1] == asked[2]


@pytest.mark.servers("memory")
def test_what_a_rank_alone_holds_is_asked_for_once(root: str) -> None:
    run_ranks(2, _again_and_again, root)


def _alone(root: str) -> None:
    if dist.get_rank() == 1:  # the other one makes no save
        dcp.save(_names(), storage_writer=S3StorageWriter(root), no_dist=True, use_collectives=False)


@pytest.mark.servers("memory")
def test_a_rank_that_saves_without_the_others_does_not_wait_for_them(root: str) -> None:
    run_ranks(2, _alone, root)


def _over_another(root: str) -> None:
    first, second = (S3StorageWriter(root, overwrite=True) for _ in range(2))
    for writer in (first, second):
        dcp.save(_names(), storage_writer=writer, use_collectives=False)
    second.wait_committed(60)
    with pytest.raises(errors.CheckpointError, match="replaced or deleted"):
        first.wait_committed(60)


def test_a_save_that_was_replaced_is_not_waited_for(root: str) -> None:
    run_ranks(2, _over_another, root)
