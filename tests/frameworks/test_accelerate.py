"""Accelerate's training state as one checkpoint, with the real package."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader, TensorDataset

from dcp_s3 import list_checkpoints, read_tensor
from dcp_s3.errors import CheckpointError
from dcp_s3.integrations import accelerate as adapter
from dcp_s3.integrations.accelerate import PRIVATE, training_state
from examples import accelerate as example
from tests.faulty import BUCKET, FaultyServer
from tests.frameworks import accelerate_runs as runs
from tests.frameworks.accelerate_runs import Registered, Run, load_state, save_state
from tests.frameworks.ranks import AtWrite, files_in, kill_in_save, run_example, run_ranks

ROOT = f"s3://{BUCKET}/run"
CPU = torch.device("cpu")


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_killed_in_a_save_it_goes_on_to_the_same_bits_on_other_ranks(
    faulty: FaultyServer, tmp_path: Path, sharded: bool
) -> None:
    run = Run(ROOT, sharded)
    [expected] = run_ranks(1, runs.uninterrupted, run)
    cwd = tmp_path / "cwd"
    kill_in_save(faulty, AtWrite("step-00000006"), 2, tmp_path, runs.train_for_ever, run)
    assert [info.step for info in list_checkpoints(ROOT) if info.committed] == [2, 4]

    [alone] = run_ranks(1, runs.resumed, Run(ROOT, sharded, steps=9), cwd)  # within an epoch: 5 batches each
    assert alone[0] == 4
    for began, digest, losses in run_ranks(2, runs.resumed, run, cwd):
        assert began == 8
        assert (digest, losses) == expected
    assert files_in(cwd) == []
    assert [info.step for info in list_checkpoints(ROOT) if info.committed] == [10, 12]


@pytest.mark.servers("memory")
@pytest.mark.parametrize("at", [3, 5], ids=["within_an_epoch", "at_its_end"])
def test_ranks_with_their_own_data_and_random_numbers_go_on_to_the_same_bits(root: str, at: int) -> None:
    run = Run(root, sharded=False, alike=False, steps=7)
    expected = run_ranks(2, runs.uninterrupted, run)
    assert expected[0][0] != expected[1][0], "the ranks are alike: nothing of their own is tested"
    found = run_ranks(2, runs.interrupted, run, at)
    assert [digest for digest, _ in found] == [digest for digest, _ in expected]
    # A registered object is the first rank's, as with Accelerate itself.
    first, second = expected[0][1], expected[1][1]
    assert found[0][1] == first
    assert found[1][1] == {step: (first if int(step[5:]) <= at else second)[step] for step in second}


@pytest.mark.servers("memory")
@pytest.mark.parametrize("when", ["save", "load"])
def test_what_is_wrong_on_one_rank_is_an_error_of_all(root: str, when: str) -> None:
    for error in run_ranks(2, runs.failing, root, when):
        assert f"in the {when} of rank 1" in error


@pytest.mark.servers("memory")
def test_sharded_tensors_of_a_registered_object_load_on_another_number_of_ranks(root: str) -> None:
    saved, other = run_ranks(2, runs.with_weights, Run(root, sharded=True), False)
    assert saved == other
    assert run_ranks(1, runs.with_weights, Run(root, sharded=True), True) == [saved]


@pytest.mark.servers("memory")
def test_the_example_trains_and_goes_on(root: str, tmp_path: Path) -> None:
    options = ["--url", root, "--save-every", "2"]
    run_ranks(2, run_example, example.main, [*options, "--steps", "4"], tmp_path)
    assert [info.step for info in list_checkpoints(root)] == [2, 4]
    [output] = run_ranks(1, run_example, example.main, [*options, "--steps", "7"], tmp_path)
    assert "step 4: restored on 1 processes" in output
    assert [info.step for info in list_checkpoints(root)] == [4, 6, 7]
    assert files_in(tmp_path) == []


# --- one process, without torch.distributed ------------------------------------------------------------


def make() -> Accelerator:
    data = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=True)
    return Accelerator(cpu=True, dataloader_config=data)


def two_models(seed: int) -> tuple[Accelerator, list[nn.Module], list[Any]]:
    """A generator and a discriminator, whose optimizers are prepared in the other order."""
    accelerator = make()
    torch.manual_seed(seed)
    models: list[nn.Module] = [nn.Linear(3, 5), nn.Linear(5, 2)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in reversed(models)]
    prepared = accelerator.prepare(*models, *optimizers)
    accelerator.backward(models[1](models[0](torch.randn(4, 3))).square().mean())
    for optimizer in prepared[2:]:
        optimizer.step()
    return accelerator, models, list(prepared[2:])


@pytest.mark.servers("memory")
def test_several_models_and_optimizers_are_one_checkpoint(root: str) -> None:
    accelerator, models, optimizers = two_models(1)
    weights = [model.weight.detach().clone() for model in models]
    moments = [optimizer.state_dict()["state"][0]["exp_avg"].clone() for optimizer in optimizers]
    save_state(accelerator, f"{root}/step-2")
    [info] = list_checkpoints(root)
    assert torch.equal(read_tensor(info.url, "model_1.weight"), weights[1])

    accelerator.free_memory()
    accelerator, models, optimizers = two_models(2)
    assert not torch.equal(models[0].weight, weights[0])
    load_state(accelerator, f"{root}/step-2")
    assert all(torch.equal(model.weight, weight) for model, weight in zip(models, weights, strict=True))
    for optimizer, moment in zip(optimizers, moments, strict=True):
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moment)


@pytest.mark.servers("memory")
def test_the_scaler_the_step_and_registered_objects(root: str) -> None:
    def prepare(scale: float, value: Any, schedulers: int = 1) -> tuple[Accelerator, Registered]:
        accelerator = make()
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        accelerator.scaler.scale(torch.ones(()))  # makes its tensors
        model, registered = nn.Linear(2, 2), Registered(value)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accelerator.prepare(
            model, optimizer, *(torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(schedulers))
        )
        accelerator.register_for_checkpointing(registered)
        return accelerator, registered

    accelerator, _ = prepare(8.0, {"deep": [torch.arange(3), {"text": "a"}], "new": 1})
    accelerator.step = 3
    save_state(accelerator, f"{root}/step-1")
    accelerator.free_memory()
    accelerator, registered = prepare(2.0, None)
    load_state(accelerator, f"{root}/step-1")
    assert accelerator.step == 3
    assert accelerator.scaler.get_scale() == 8.0
    assert torch.equal(registered.value["deep"][0], torch.arange(3))
    assert registered.value["deep"][1] == {"text": "a"}

    accelerator.register_for_checkpointing(Registered(1))
    with pytest.raises(CheckpointException, match="registered"):  # DCP misses the entry of the second one
        load_state(accelerator, f"{root}/step-1")
    accelerator.free_memory()
    with pytest.raises(CheckpointError, match="has 1 schedulers, and the accelerator has 2"):
        load_state(prepare(2.0, None, schedulers=2)[0], f"{root}/step-1")


def test_what_keeps_its_state_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = make()
    assert all(hasattr(accelerator, name) for name in PRIVATE)
    monkeypatch.setattr(Accelerator, "distributed_type", "DEEPSPEED")
    with pytest.raises(CheckpointError, match="DEEPSPEED"):
        training_state(accelerator)


def loader() -> Any:
    return make().prepare(DataLoader(TensorDataset(torch.arange(4)), batch_size=1))


def test_a_position_that_another_number_of_ranks_cannot_take_is_named(caplog: pytest.LogCaptureFixture) -> None:
    first = loader()
    next(iter(first))
    state = adapter._dataloader_state(first, make())
    with caplog.at_level(logging.WARNING, adapter.__name__):
        for same, left in ((True, [1, 2, 3]), (False, [0, 1, 2, 3])):
            found = loader()
            adapter._load_dataloader(found, state, same)
            assert [int(value) for (value,) in found] == left
            assert ("accelerator.skip_first_batches" in caplog.text) != same


def states(*seeds: int) -> list[dict[str, Any]]:
    made = []
    for seed in seeds:
        set_seed(seed)
        made.append(adapter.rng_state(CPU))
    return made


def draw() -> list[float]:
    return [random.random(), float(numpy.random.rand()), torch.rand(()).item()]


@pytest.mark.parametrize(("rank", "saved", "same_as"), [(1, (1, 2), 2), (2, (1, 1), 1), (2, (1, 2), 9)])
def test_a_new_rank_gets_the_random_numbers_that_all_had(rank: int, saved: tuple[int, ...], same_as: int) -> None:
    states(same_as)
    expected = draw()
    before = states(*saved)
    states(9)
    adapter.set_rng_state(rank, before, CPU)
    assert draw() == expected
