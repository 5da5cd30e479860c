"""The parts of a training state, without a framework."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from dcp_s3 import S3StorageReader, S3StorageWriter
from dcp_s3.errors import CheckpointError, SaveProtocolError
from dcp_s3.integrations import training_parts
from dcp_s3.integrations.training_parts import (
    agree,
    as_item,
    from_item,
    of_first_rank,
    owner,
    rng_state,
    set_rng_state,
    set_rng_state_of,
    without_tensors,
)
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def draw() -> list[float]:
    return [random.random(), float(numpy.random.rand()), torch.rand(()).item()]


@pytest.mark.servers("memory")
def test_random_numbers_go_on_after_a_checkpoint(root: str) -> None:
    saved = {"rng": as_item([rng_state(CPU)])}
    save(saved, storage_writer=S3StorageWriter(f"{root}/step-1"))
    expected = draw()
    found = {"rng": as_item([])}
    load(found, storage_reader=S3StorageReader(f"{root}/step-1"))  # weights_only: nothing in it runs code
    set_rng_state(from_item(found["rng"])[0], CPU)
    assert draw() == expected


def states(*seeds: int) -> list[dict[str, Any]]:
    made = []
    for seed in seeds:
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        made.append(rng_state(CPU))
    return made


@pytest.mark.parametrize(
    ("rank", "saved", "same_as", "warns"),
    [(0, (1, 2), 1, False), (1, (1, 2), 2, False), (2, (1, 1), 1, False), (2, (1, 2), 9, True)],
    ids=["first", "second", "new_where_all_were_alike", "new_where_they_were_not"],
)
def test_ranks_get_their_own_random_numbers(
    rank: int, saved: tuple[int, ...], same_as: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    states(same_as)
    expected = draw()
    before = states(*saved)
    states(9)
    with caplog.at_level(logging.WARNING, training_parts.__name__):
        set_rng_state_of(rank, before, CPU)
    assert draw() == expected
    assert bool(caplog.records) == warns


@pytest.mark.parametrize("kind", ["python", "numpy", "torch", "cuda"])
def test_a_new_rank_draws_no_other_ranks_numbers_if_any_generator_differs(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = {"cuda": torch.zeros(16, dtype=torch.uint8)}
    first, other = ({**each, **cuda} for each in states(1, 2))
    other["cuda"] = torch.ones(16, dtype=torch.uint8)
    states(9)
    expected = draw()
    states(9)
    set_rng_state_of(2, [first, {**first, kind: other[kind]}], CPU)
    assert draw() == expected
    assert "rank 2 keeps its own" in caplog.text


def test_the_owner_of_an_optimizer() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(second.parameters())
    assert owner(optimizer, [first, second]) is second
    both = owner(torch.optim.SGD([*first.parameters(), *second.parameters()]), [first, second])
    assert list(both.children()) == [first, second]
    with pytest.raises(SaveProtocolError, match="belong to none of the 1 models"):
        owner(optimizer, [first])


def _items() -> tuple[Any, Any, list[Any]]:
    rank = torch.distributed.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    sharded = {"deep": [distribute_tensor(torch.arange(4), mesh, [Shard(0)])]}
    whole = {"rank": rank}
    assert isinstance(sharded["deep"][0], DTensor)
    mine = [whole, {"tensor": torch.tensor(rank)}, None]
    return as_item(sharded) is sharded, as_item(whole), of_first_rank(mine, agree(lambda: without_tensors(mine), "")[0])


def test_only_states_with_sharded_tensors_are_several_items() -> None:
    for rank, (sharded, whole, first) in enumerate(run_ranks(2, _items)):
        assert sharded
        assert whole == ({"rank": rank},)
        assert first == [{"rank": 0}, {"tensor": torch.tensor(rank)}, None]


def _agree(failing: str) -> tuple[str, str]:
    def work() -> Any:
        if torch.distributed.get_rank() == 1:
            if failing == "raises":
                raise ZeroDivisionError("of rank 1")
            return lambda: None  # cannot be pickled
        return 1

    try:
        agree(work, "it is not saved")
    except Exception as error:  # noqa: BLE001 - which one is the question
        return type(error).__name__, str(error)
    raise AssertionError("it did not fail")


def test_an_error_of_one_rank_is_an_error_of_all() -> None:
    first, second = run_ranks(2, _agree, "raises", timeout=30)
    message = "it is not saved: rank 1 cannot go on: ZeroDivisionError: of rank 1"
    assert first == (CheckpointError.__name__, message)
    assert second == ("ZeroDivisionError", "of rank 1")


def test_what_cannot_be_pickled_on_one_rank_is_an_error_of_all() -> None:
    first, second = run_ranks(2, _agree, "pickle", timeout=30)
    assert first[0] == CheckpointError.__name__
    assert second[1] in first[1]
