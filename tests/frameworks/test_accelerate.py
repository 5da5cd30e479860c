"""Accelerate's training state as one checkpoint, with the real package: trainings that are killed, and one process."""

from __future__ import annotations

import logging
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, DistributedType, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, set_seed
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from dcp_s3 import CheckpointManager, S3StorageReader, S3StorageWriter, list_checkpoints, read_tensor
from dcp_s3.demo.train import state_digest
from dcp_s3.errors import CheckpointError
from dcp_s3.integrations import accelerate as adapter
from dcp_s3.integrations.accelerate import PRIVATE, training_state
from examples import accelerate as example
from tests.faulty import BUCKET, FaultyServer
from tests.frameworks.ranks import AtWrite, files_in, kill_in_save, run_example, run_ranks
from tests.preload import MODULES

MODULES.append(__name__)  # imported once, by the process that ranks are forked from

pytestmark = pytest.mark.servers("memory")

ROOT = f"s3://{BUCKET}/run"
CPU = torch.device("cpu")
SEQUENCES = 20
BATCH = 4  # 5 batches an epoch


def save_state(accelerator: Accelerator, url: str) -> None:
    save(training_state(accelerator), storage_writer=S3StorageWriter(url))


def load_state(accelerator: Accelerator, url: str) -> None:
    load(training_state(accelerator), storage_reader=S3StorageReader(url))


def pretend_devices() -> None:
    """Let Accelerate shard on CPUs, as it does on devices: it takes no notice of FSDP on ranks that have none."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def tiny_llama(**options: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def texts() -> torch.Tensor:
    return torch.randint(37, (SEQUENCES, 8), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Run:
    """A training; pickled."""

    root: str  # URL above its checkpoints
    sharded: bool  # FSDP2; otherwise DDP, or on one rank the plain model
    # Each rank takes the gradients of the whole batch, and all draw the same random numbers: then the number of ranks
    # makes no difference to a single bit.
    alike: bool = True
    steps: int = 12  # train up to here


class Registered:
    """A registered object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Training:
    """All of a training, made anew in each process."""

    def __init__(self, run: Run) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        plugin = None
        if run.sharded:
            pretend_devices()
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
                transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            )  # fmt: skip
        # Of those that are alike any number goes on from any other's, and skips what was done.
        data = DataLoaderConfiguration(
            use_seedable_sampler=True, use_stateful_dataloader=not run.alike, split_batches=run.alike
        )
        self.run = run
        self.accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, dataloader_config=data)
        torch.set_num_threads(1)
        set_seed(7)
        model = tiny_llama(tie_word_embeddings=True, attention_dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = get_cosine_schedule_with_warmup(optimizer, 3, 100)
        size = BATCH if run.alike else BATCH // ranks
        # With a generator of its own it takes no number of the model's, of which an iterator that resumes takes one.
        loader = DataLoader(TensorDataset(texts()), batch_size=size, shuffle=True, generator=torch.Generator())
        self.model, self.optimizer, self.schedule, self.loader = self.accelerator.prepare(
            model, optimizer, schedule, loader
        )
        self.losses = Registered({})  # other keys each time
        self.accelerator.register_for_checkpointing(self.losses)
        self.model.train()
        assert run.sharded == isinstance(self.model, FSDPModule)
        set_seed(11, device_specific=not run.alike)
        self.step = 0

    def digest(self) -> str:
        """Of all that decides how the training goes on."""
        state = training_state(self.accelerator)
        parts = {name: state[name].state_dict() for name in ("model", "optimizer")}
        rest = {
            "schedule": self.schedule.state_dict(), "step": self.step,
            "epoch": self.loader.iteration, "random": torch.get_rng_state(),
        }  # fmt: skip
        return state_digest({**parts, "rest": rest})

    def train(self, steps: int) -> None:
        """Train up to ``steps``."""
        while self.step < steps:
            epoch, done = divmod(self.step, SEQUENCES // BATCH)
            if self.run.alike:
                self.loader.set_epoch(epoch)
            left = self.accelerator.skip_first_batches(self.loader, done) if done and self.run.alike else self.loader
            for (batch,) in left:
                self.update(self.accelerator.gather(batch) if self.run.alike else batch)
                self.after(self.step)
                if self.step >= steps:
                    return

    def update(self, batch: torch.Tensor) -> None:
        loss = self.model(input_ids=batch, labels=batch).loss
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.losses.value[f"step-{self.step}"] = loss.item()

    def after(self, step: int) -> None:
        """Called after each step."""


class ManagedTraining(Training):
    """Restores the latest checkpoint under the root, and saves every second step in the background."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.manager = CheckpointManager(run.root, retention="latest:2")
        self.state = training_state(self.accelerator)
        self.restored = self.manager.restore(self.state)
        self.step = self.restored or 0

    def after(self, step: int) -> None:
        if step % 2 == 0:
            self.manager.save(step, self.state)


def uninterrupted(run: Run) -> tuple[str, dict[str, float]]:
    """Train without a checkpoint. Returns the digest at the end and the losses."""
    training = Training(run)
    training.train(run.steps)
    return training.digest(), training.losses.value


def resumed(run: Run, directory: Path) -> tuple[int | None, str, dict[str, float]]:
    """Train with checkpoints, in a working directory. Returns also the step at which it began."""
    os.chdir(directory)
    training = ManagedTraining(run)
    training.train(run.steps)
    training.manager.close()
    return training.restored, training.digest(), training.losses.value


def interrupted(run: Run, at: int) -> tuple[str, dict[str, float]]:
    """Train up to step ``at``, save in the background, and let a new training go on from there."""
    first = Training(run)
    first.train(at)
    with CheckpointManager(run.root) as manager:
        manager.save(at, training_state(first.accelerator))
        first.train(at + 1)  # changes everything while it is saved
        url = manager.url(at)
    first.accelerator.free_memory()
    second = Training(run)
    set_seed(99)
    load_state(second.accelerator, url)
    second.step = at
    second.train(run.steps)
    return second.digest(), second.losses.value


def with_weights(run: Run, loads: bool) -> str:
    """Save sharded tensors of a registered object, or load them. Returns their digest."""
    training = Training(run)
    weights = {name: tensor.detach() * 2 for name, tensor in get_model_state_dict(training.model).items()}
    kept = Registered({name: torch.zeros_like(tensor) if loads else tensor for name, tensor in weights.items()})
    training.accelerator.register_for_checkpointing(kept)
    (load_state if loads else save_state)(training.accelerator, f"{run.root}/step-1")
    return state_digest(kept.value)


def train_for_ever(run: Run) -> None:
    """Train until killed."""
    ManagedTraining(run).train(10**6)


class Failing(Registered):
    """Fails on the second rank when its value says."""

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.fail_in("save")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fail_in("load")

    def fail_in(self, when: str) -> None:
        if self.value == when and dist.get_rank() == 1:
            raise ZeroDivisionError(f"in the {when} of rank 1")


def failing(root: str, when: str) -> str:
    """Save and load with an object that fails on the second rank."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.register_for_checkpointing(Failing(when))
    state = training_state(accelerator)
    try:
        with CheckpointManager(root) as manager:
            manager.save(1, state, blocking=True)
            manager.restore(state)
    except Exception as error:  # noqa: BLE001 - which one is the question
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it did not fail")


# --- tests ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
def test_killed_in_a_save_it_goes_on_to_the_same_bits_on_other_ranks(
    faulty: FaultyServer, tmp_path: Path, sharded: bool
) -> None:
    run = Run(ROOT, sharded)
    [expected] = run_ranks(1, uninterrupted, run)
    cwd = tmp_path / "cwd"
    kill_in_save(faulty, AtWrite("step-00000006"), 2, tmp_path, train_for_ever, run)
    assert [info.step for info in list_checkpoints(ROOT) if info.committed] == [2, 4]

    [alone] = run_ranks(1, resumed, Run(ROOT, sharded, steps=9), cwd)  # within an epoch: 5 batches each
    assert alone[0] == 4
    for began, digest, losses in run_ranks(2, resumed, run, cwd):
        assert began == 8
        assert (digest, losses) == expected
    assert files_in(cwd) == []
    assert [info.step for info in list_checkpoints(ROOT) if info.committed] == [10, 12]


@pytest.mark.parametrize("at", [3, 5], ids=["within_an_epoch", "at_its_end"])
def test_ranks_with_their_own_data_and_random_numbers_go_on_to_the_same_bits(root: str, at: int) -> None:
    run = Run(root, sharded=False, alike=False, steps=7)
    expected = run_ranks(2, uninterrupted, run)
    assert expected[0][0] != expected[1][0], "the ranks are alike: nothing of their own is tested"
    found = run_ranks(2, interrupted, run, at)
    assert [digest for digest, _ in found] == [digest for digest, _ in expected]
    # A registered object is the first rank's, as with Accelerate itself.
    first, second = expected[0][1], expected[1][1]
    assert found[0][1] == first
    assert found[1][1] == {step: (first if int(step[5:]) <= at else second)[step] for step in second}


@pytest.mark.parametrize("when", ["save", "load"])
def test_what_is_wrong_on_one_rank_is_an_error_of_all(root: str, when: str) -> None:
    for error in run_ranks(2, failing, root, when):
        assert f"in the {when} of rank 1" in error


def test_sharded_tensors_of_a_registered_object_load_on_another_number_of_ranks(root: str) -> None:
    saved, other = run_ranks(2, with_weights, Run(root, sharded=True), False)
    assert saved == other
    assert run_ranks(1, with_weights, Run(root, sharded=True), True) == [saved]


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
