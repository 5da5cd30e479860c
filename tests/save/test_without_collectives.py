"""Saves without collectives, as `dcp.save` makes them."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from dcp_s3 import S3StorageWriter, errors, latest
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
        dcp.save(_names(), storage_writer=S3StorageWriter(root), no_dist=True)


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


def _in_turn(root: str) -> None:
    """Two groups of ranks save by turns."""
    groups = [[0, 1], [0, 1, 2]]
    made = [dist.new_group(members) for members in groups]
    for number in range(1, 4):
        for members, group in zip(groups, made, strict=True):
            if dist.get_rank() in members:
                writer = S3StorageWriter(f"{root}/{len(members)}-{number}", process_group=group)
                dcp.save(_names(), storage_writer=writer, process_group=group, use_collectives=False)
                [history] = [
                    each for key, each in without_collectives._histories.items() if len(key[1]) == len(members)
                ]
                last = history.before(number + 1)
                assert last is not None, "they do not forget each other"
                assert last.url.name == f"{len(members)}-{number}"


@pytest.mark.servers("memory")
def test_groups_that_save_in_turn_remember_their_last_saves(root: str) -> None:
    run_ranks(3, _in_turn, root)


def _without_its_group(root: str, use_collectives: bool) -> str:
    writer, state = S3StorageWriter(root), _names()
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    with pytest.raises((CheckpointException, errors.SaveProtocolError)) as caught:
        dcp.save(state, storage_writer=writer, use_collectives=use_collectives)
    return str(caught.value)


@pytest.mark.servers("memory")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("use_collectives", [True, False])
def test_one_rank_is_not_taken_for_all_when_the_group_is_gone(root: str, use_collectives: bool) -> None:
    for text in run_ranks(2, _without_its_group, root, use_collectives):
        assert "before destroy_process_group()" in text
    assert latest(root) is None


def _in_an_unknown_group(root: str) -> str:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return ""
    with pytest.raises(errors.SaveProtocolError) as caught:
        dcp.save(_names(), storage_writer=S3StorageWriter(root), process_group=group, use_collectives=False)
    return str(caught.value)


@pytest.mark.servers("memory")
def test_a_writer_that_does_not_know_its_group_says_so(root: str) -> None:
    _, *texts = run_ranks(3, _in_an_unknown_group, root)
    assert all("S3StorageWriter(url, process_group=...)" in text for text in texts)
