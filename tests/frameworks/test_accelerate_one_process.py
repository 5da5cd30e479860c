"""Accelerate's training state in one process, without torch.distributed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.data_loader import prepare_data_loader
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import DataLoader, TensorDataset

from dcp_s3 import list_checkpoints, read_tensor
from dcp_s3.errors import CheckpointError, CheckpointExistsError
from dcp_s3.integrations import accelerate as adapter
from dcp_s3.integrations.accelerate import PRIVATE, load_state, save_state, training_state

pytestmark = pytest.mark.servers("memory")


def make(**options: Any) -> Accelerator:
    data = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=True)
    return Accelerator(cpu=True, **{"dataloader_config": data, **options})


def two_models(seed: int) -> tuple[Accelerator, list[nn.Module], list[Any]]:
    """A generator and a discriminator, whose optimizers are prepared in the other order."""
    accelerator = make()
    torch.manual_seed(seed)
    models: list[nn.Module] = [nn.Linear(3, 5), nn.Linear(5, 2)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in reversed(models)]
    prepared = accelerator.prepare(*models, *optimizers)
    for _ in range(2):
        accelerator.backward(models[1](models[0](torch.randn(4, 3))).square().mean())
        for optimizer in prepared[2:]:
            optimizer.step()
    return accelerator, models, list(prepared[2:])


def test_several_models_and_optimizers_are_one_checkpoint(root: str) -> None:
    accelerator, models, optimizers = two_models(1)
    weights = [model.weight.detach().clone() for model in models]
    moments = [optimizer.state_dict()["state"][0]["exp_avg"].clone() for optimizer in optimizers]
    save_state(accelerator, f"{root}/step-2", metrics={"loss": 1.5})
    [info] = list_checkpoints(root)
    assert (info.step, info.committed, info.metrics) == (2, True, {"loss": 1.5})
    assert torch.equal(read_tensor(info.url, "model_1.weight"), weights[1])
    with pytest.raises(CheckpointException) as raised:
        save_state(accelerator, f"{root}/step-2")
    assert isinstance(raised.value.failures[0][0], CheckpointExistsError)

    accelerator.free_memory()
    accelerator, models, optimizers = two_models(2)
    assert not torch.equal(models[0].weight, weights[0])
    load_state(accelerator, f"{root}/step-2")
    assert all(torch.equal(model.weight, weight) for model, weight in zip(models, weights, strict=True))
    for optimizer, moment in zip(optimizers, moments, strict=True):
        assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], moment)


class Registered:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def test_the_scaler_the_step_and_registered_objects(root: str) -> None:
    def prepare(scale: float, value: Any) -> tuple[Accelerator, Registered]:
        accelerator = make()
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        accelerator.scaler.scale(torch.ones(()))  # makes its tensors
        registered = Registered(value)
        accelerator.prepare(nn.Linear(2, 2))
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


def test_other_schedulers_than_were_saved_are_named(root: str) -> None:
    def prepare(schedulers: int) -> Accelerator:
        accelerator = make()
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(schedulers)]
        accelerator.prepare(model, optimizer, *made)
        return accelerator

    accelerator = prepare(1)
    save_state(accelerator, f"{root}/step-1")
    accelerator.free_memory()
    with pytest.raises(CheckpointError, match="has 1 schedulers, and the accelerator has 2"):
        load_state(prepare(2), f"{root}/step-1")


def test_hooks_that_write_files_are_refused(root: str) -> None:
    accelerator = make()
    accelerator.register_save_state_pre_hook(lambda models, weights, directory: None)
    with pytest.raises(CheckpointError, match="register_for_checkpointing"):
        save_state(accelerator, f"{root}/step-1")


def test_what_keeps_its_state_itself_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = make()
    monkeypatch.setattr(Accelerator, "distributed_type", "DEEPSPEED")
    with pytest.raises(CheckpointError, match="DEEPSPEED"):
        training_state(accelerator)


@pytest.mark.parametrize("name", PRIVATE)
def test_the_private_attributes_of_accelerate_exist(name: str) -> None:
    assert hasattr(make(), name)


# --- dataloaders ----------------------------------------------------------------------------------------


def loader_of(rank: int, ranks: int) -> Any:
    """Twelve batches of one number each, every ``ranks``-th of them for this rank."""
    data = DataLoader(TensorDataset(torch.arange(12)), batch_size=1)
    return prepare_data_loader(data, num_processes=ranks, process_index=rank, use_stateful_dataloader=True)


def take(loader: Any, count: int) -> tuple[list[int], dict[str, Any]]:
    """The next batches, and the state after them."""
    taken = []
    for (value,) in loader:
        taken.append(int(value))
        if len(taken) == count:
            return taken, adapter._dataloader_state(loader, make())
    raise AssertionError("the loader ended")


@pytest.mark.parametrize(("ranks", "each", "now", "left"), [(2, 3, 3, 6), (3, 2, 1, 6), (1, 8, 2, 8), (2, 2, 3, 3)])
def test_a_position_goes_to_another_number_of_ranks(
    ranks: int, each: int, now: int, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = make()
    loaders = [loader_of(rank, ranks) for rank in range(ranks)]
    taken, states = zip(*(take(loader, each) for loader in loaders), strict=True)
    assert {value for values in taken for value in values} == set(range(ranks * each))
    after = [loader_of(rank, now) for rank in range(now)]
    with caplog.at_level(logging.WARNING, adapter.__name__):
        for loader in after:
            adapter._load_dataloader(loader, states[0], accelerator)
    found = sorted(int(value) for loader in after for (value,) in loader)
    assert found == list(range(left, 12))
    assert ("come again" in caplog.text) == (left != ranks * each)


def test_a_position_that_cannot_be_divided_is_named(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = make()
    _, state = take(loader_of(0, 2), 3)
    state["position"]["dataset_state"] = {"its own": 1}
    loader = loader_of(0, 1)
    with caplog.at_level(logging.WARNING, adapter.__name__):
        adapter._load_dataloader(loader, state, accelerator)
    assert "accelerator.skip_first_batches" in caplog.text
    assert [int(value) for (value,) in loader] == list(range(12))


def test_the_keys_of_a_position_exist() -> None:
    _, state = take(loader_of(0, 1), 1)
    assert {*adapter._YIELDED, *adapter._INNER, "_iterator_finished"} <= set(state["position"])


def test_an_epoch_goes_on_after_two_loads_of_its_position() -> None:
    accelerator = make()
    _, state = take(loader_of(0, 1), 5)
    loader = loader_of(0, 1)
    for _ in range(2):
        adapter._load_dataloader(loader, state, accelerator)
    before = torch.get_rng_state()
    assert [int(value) for (value,) in loader] == list(range(5, 12))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(list(loader)) == 12
